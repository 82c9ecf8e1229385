"""Slow, obvious versions to compare with."""

import copy

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


def local_sgd(model, state, x, y, batches, lr, momentum, weight_decay=0.0, mu=0.0):
    """One client with nothing but torch.optim.SGD on a deep copy. batches: index tensors. -> (state, mean loss)."""
    model = copy.deepcopy(model).train()
    model.load_state_dict(state)
    anchor = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    losses = []
    for index in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[index]), y[index])
        loss = loss + mu / 2 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchor))
        loss.backward()
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
