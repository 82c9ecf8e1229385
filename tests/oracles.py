"""Slow, obvious versions to compare with."""

import copy
import math
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F


def average(states, weights, masks=None, fallback=None):
    """The weighted mean, model by model and element by element, in float64."""
    result = {}
    for name in states[0]:
        total = torch.zeros(states[0][name].shape, dtype=torch.float64)
        mass = torch.zeros_like(total)
        for k, state in enumerate(states):
            covered = torch.ones_like(total) if masks is None else masks[k][name].double()
            total += weights[k] * covered * state[name].double()
            mass += weights[k] * covered
        result[name] = total / mass
        if fallback is not None:
            result[name] = torch.where(mass > 0, result[name], fallback[name].double())
    return result


def recombine(states, layers, permutations):
    """FedMR's figure 4: a list a layer, shuffled, and models put together from what comes out."""
    result = [{} for _ in states]
    for layer, permutation in zip(layers, permutations):
        for slot, source in enumerate(permutation.tolist()):
            for name in layer.tensors:
                result[slot][name] = states[source][name].clone()
    return result


def percentile_norm(values, q):
    """FedFA's W95, entry by entry: sort the magnitudes, interpolate the quantile, sum the squares up to it."""
    magnitudes = sorted(abs(v) for v in values)
    if not magnitudes:
        return 0.0
    position = Fraction(str(q)) * (len(magnitudes) - 1)
    low = math.floor(position)
    high = min(low + 1, len(magnitudes) - 1)
    between = Fraction(magnitudes[high]) - Fraction(magnitudes[low])
    threshold = Fraction(magnitudes[low]) + (position - low) * between
    return math.sqrt(math.fsum(m * m for m in magnitudes if Fraction(m) <= threshold))


def match_norms(states, groups, q, masks=None):
    """FedFA's Algorithm 1, line 18: a factor for each model and group, as a list a group."""
    factors = []
    for group in groups:
        norms = []
        for k, state in enumerate(states):
            values = []
            for name in group:
                covered = torch.ones_like(state[name]) if masks is None else masks[k][name]
                values += [v for v, c in zip(state[name].flatten().tolist(), covered.flatten().tolist()) if c]
            norms.append(percentile_norm(values, q))
        counted = [norm for norm in norms if norm > 0]
        factors.append([sum(counted) / len(counted) / norm if norm > 0 else 1.0 for norm in norms])
    return factors


def local_sgd(model, state, x, y, batches, lr, momentum, weight_decay=0.0, mu=0.0, nesterov=False, clip=0.0):
    """One client with nothing but torch.optim.SGD on a deep copy. batches: index tensors. -> (state, mean loss)."""
    model = copy.deepcopy(model).train()
    model.load_state_dict(state)
    anchor = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov
    )
    losses = []
    for index in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[index]), y[index])
        loss = loss + mu / 2 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchor))
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return {k: v.clone() for k, v in model.state_dict().items()}, float(np.mean(losses))


def epoch_batches(part, permutation, size):
    """Batches of one epoch, sample by sample: the permutation over and over until the last batch is full."""
    batches, row, position = [], [], 0
    while position < len(part) or row:
        row.append(part[permutation[position % len(part)]].item())
        position += 1
        if len(row) == size:
            batches.append(torch.tensor(row))
            row = []
            if position >= len(part):
                break
    return batches
