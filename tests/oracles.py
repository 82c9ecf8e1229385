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


def local_training(model, state, x, y, batches, make, mu=0.0, clip=0.0):
    """One client with nothing but an optimizer of torch.optim, made of parameters, on a deep copy.

    Args:
        batches: index tensors.

    Returns: (state, mean loss)
    """
    model = copy.deepcopy(model).train()
    model.load_state_dict(state, strict=False)  # of tied tensors a state has one
    anchor = [p.detach().clone() for p in model.parameters()]
    optimizer, losses = make(model.parameters()), []
    for index in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[index]), y[index])
        loss = loss + mu / 2 * sum(((p - a) ** 2).sum() for p, a in zip(model.parameters(), anchor) if p.requires_grad)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), sum(losses) / len(losses)


def epoch_batches(part, permutation, size, partial=False):
    """Batches of one epoch, sample by sample: the permutation over and over until the last batch is full."""
    batches, position = [], 0
    while position < len(part):
        count = min(size, len(part) - position) if partial else size
        batches.append(
            torch.tensor([part[permutation[at % len(part)]].item() for at in range(position, position + count)])
        )
        position += count
    return batches


def corner(tensor, shape):
    """FedFA's [:C_o, :C_i] of a tensor."""
    return tensor[tuple(slice(0, size) for size in shape)]


def graft(state, depths):
    """FedFA's Algorithm 2: the last block of each section, named section1.0, section1.1, ..., over and over."""
    result = dict(state)
    for section, deepest in depths.items():
        last = max(int(name.split(".")[1]) for name in state if name.startswith(f"{section}."))
        for block in range(last + 1, deepest):
            for name, tensor in state.items():
                if name.startswith(f"{section}.{last}."):
                    result[name.replace(f"{section}.{last}.", f"{section}.{block}.", 1)] = tensor
    return result


def fedfa(old, states, sizes, repeat=True, scale="norm", percent=95):
    """FedFA's Algorithm 1, lines 11 to 24, layer by layer; clients of size 0 are left out. -> the new global state."""
    sections = {name.split(".")[0] for name in old if name.startswith("section")}
    depths = {s: 1 + max(int(name.split(".")[1]) for name in old if name.startswith(f"{s}.")) for s in sections}
    clients = [(graft(state, depths) if repeat else state, n) for state, n in zip(states, sizes) if n]
    layers, new = {}, {}
    for name in old:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    for names in layers.values():
        own = []  # what each client has of the layer, as far as it lies within the global one
        for state, _ in clients:
            fits = [n for n in names if n in state and all(s <= f for s, f in zip(state[n].shape, old[n].shape))]
            own.append({name: state[name] for name in fits})
        norms = []
        for tensors in own:
            flat = [
                t.numpy().ravel() for name, t in tensors.items() if "running" not in name
            ]  # statistics are no weights
            w = np.abs(np.concatenate(flat)) if flat else np.zeros(0)
            inner = w[w <= np.percentile(w, percent) * (1 + 1e-12)] if len(w) else w
            norm = np.sqrt((inner**2).sum())
            norms.append(norm / np.sqrt(len(inner)) if scale == "rms" and len(inner) else norm)
        counted = [norm > 1e-6 * max(norms) for norm in norms]
        mean = np.mean([norm for norm, counts in zip(norms, counted) if counts] or [0.0])
        for name in names:
            total, gamma = torch.zeros_like(old[name]), torch.zeros_like(old[name])
            for (_, n), tensors, norm, counts in zip(clients, own, norms, counted):
                if name in tensors:
                    alpha = mean / norm if counts and scale != "none" and "running" not in name else 1.0
                    corner(total, tensors[name].shape).add_(n * alpha * tensors[name])
                    corner(gamma, tensors[name].shape).add_(n)
            new[name] = torch.where(gamma > 0, total / gamma, old[name])
    return new


def mean_of_holders(old, states, weights, counts=lambda k, name, index: True):
    """HeteroFL's mean, element by element over those who hold it and count; what nobody has keeps its value."""
    arrays = [{name: tensor.numpy() for name, tensor in state.items()} for state in states]
    new = {}
    for name, before in old.items():
        after = before.numpy().copy()
        for index in np.ndindex(*after.shape):
            total = mass = 0.0
            for k, (state, weight) in enumerate(zip(arrays, weights)):
                if name in state and all(i < n for i, n in zip(index, state[name].shape)) and counts(k, name, index):
                    total, mass = total + weight * state[name][index], mass + weight
            if mass:
                after[index] = total / mass
        new[name] = torch.from_numpy(after)
    return new
