"""Plans that hypothesis draws, values for their tensors, and the slow, obvious versions of what they do."""

import itertools

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

import surgery
from surgery.plan import Plan, Source, as_runs
from surgery.plan.positions import positions

few = settings(max_examples=25)
seeds = st.integers(0, 10**6)
SIZES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=3)


def draw_index(draw, shape, among=None):
    """Any positions in any order, some of them several times."""
    result = []
    for axis, size in enumerate(shape):
        allowed = range(size) if among is None else among[axis]
        if not size or (among is None and draw(st.booleans())):
            result.append(None)
        else:
            result.append(as_runs(draw(st.lists(st.sampled_from(list(allowed)), min_size=1, max_size=6))))
    return tuple(result)


def draw_plan(draw, shapes):
    """Each full tensor is left out, has one source, or two in parts of it, of one small tensor or of two.

    A small tensor with one source may also stand for the next full tensor, if that has the same shape.
    """
    entries, stood_for = {}, set()
    after = dict(zip(shapes, [*shapes][1:]))
    for name, shape in shapes.items():
        kind = draw(st.sampled_from(["none", "one", "one", "twin", "two", "several"]))
        if name in stood_for:
            continue
        if kind == "twin":
            index, other = draw_index(draw, shape), after.get(name)
            entries[name] = (Source(name, index),)
            if shapes.get(other) == shape:
                entries[name] += (Source(other, index),)
                stood_for.add(other)
            continue
        if kind == "one" or not shape or 0 in shape or shape[0] < 2:
            if kind != "none":
                entries[f"{name}"] = (Source(name, draw_index(draw, shape)),)
        elif kind != "none":
            cut = draw(st.integers(1, shape[0] - 1))
            rest = [list(range(size)) for size in shape[1:]]
            first = draw_index(draw, shape, [range(cut), *rest])
            second = draw_index(draw, shape, [range(cut, shape[0]), *rest])
            if kind == "two":
                entries |= {f"{name}.a": (Source(name, first),), f"{name}.b": (Source(name, second),)}
            else:  # as many positions in the other part
                n = len(positions(first[0]))
                there = draw(st.lists(st.integers(cut, shape[0] - 1), min_size=n, max_size=n))
                entries[name] = (Source(name, first), Source(name, (as_runs(there), *first[1:])))
    return Plan(entries, shapes)


@st.composite
def plans(draw):
    return draw_plan(draw, {f"{t}{i}": shape for i, shape in enumerate(draw(SIZES)) for t in "tu"})


def values(shapes, seed=0, lead=(), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randint(-99, 99, (*lead, *s), generator=generator).to(dtype) for n, s in shapes.items()}


def lists(index, shape):
    return [list(range(n)) if runs is None else positions(runs) for runs, n in zip(index, shape)]


def slow_extract(plan, full):
    result = {}
    for name, (first, *_) in plan.entries.items():
        where = lists(first.index, plan.shapes[first.name])
        result[name] = full[first.name].numpy()[np.ix_(*where)] if where else full[first.name].numpy()
    return result


def slow_embed(plan, small, into):
    """One element after another, the last first, so that the first of those that repeat stays."""
    full, mask = ({n: t.numpy().copy() for n, t in s.items()} for s in (into, values(plan.shapes, dtype=torch.bool)))
    for array in mask.values():
        array[...] = False
    for name, sources in plan.entries.items():
        for source in sources:
            where = lists(source.index, plan.shapes[source.name])
            for place in reversed(list(itertools.product(*map(range, small[name].shape)))):
                there = tuple(row[p] for row, p in zip(where, place))
                full[source.name][there] = small[name].numpy()[place]
                mask[source.name][there] = True
    return full, mask


@st.composite
def cohorts(draw):
    """States of K small models, one of them perhaps of zeros, their plans, weights, and a fallback."""
    shapes = {f"{t}{i}": shape for i, shape in enumerate(draw(SIZES)) for t in "tu"}
    whole = draw(st.sets(st.sampled_from(sorted(set(shapes.values())))))
    integers = {name for name, shape in shapes.items() if shape in whole}  # what stands for another is of its kind
    plans = [draw_plan(draw, shapes) for _ in range(draw(st.integers(1, 4)))]
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.5]), min_size=len(plans), max_size=len(plans)))
    seed = draw(seeds)

    def typed(state, name_of=lambda name: name):
        return {n: t.long() if name_of(n) in integers else t / 7 for n, t in state.items()}

    states = [
        typed(values(plan.small_shapes, seed + k), lambda name, plan=plan: plan.entries[name][0].name)
        for k, plan in enumerate(plans)
    ]
    if draw(st.booleans()):
        states[0] = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    return states, plans, weights, typed(values(shapes, seed - 1))


def embedded(states, plans, fallback):
    full, masks = zip(*(plan.embed(state, into=fallback) for state, plan in zip(states, plans)))
    return surgery.stack(list(full)), surgery.stack(list(masks))
