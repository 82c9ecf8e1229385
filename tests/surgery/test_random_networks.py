"""Random networks: an operation refuses one, or does to it what it says."""

import copy
import dataclasses
import os

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from random_networks import OPERATIONS, Net, Node, graphs, inputs, live
from selection import some

import surgery
from surgery.width.axes import concatenation
from surgery.width.rules.registry import RULES

MANY = int(os.environ.get("RANDOM_NETWORKS", 198))
FIXED = "RANDOM_NETWORKS" not in os.environ  # the same networks in every run, unless somebody hunts for others


def same(found, expected):
    assert [y.shape for y in found] == [y.shape for y in expected]
    for y, z in zip(found, expected):
        assert (y - z).abs().max() <= 1e-7 * (1 + z.abs().max())


@torch.no_grad()
def judge_small(net, small, plan):
    """The small network computes what the full one does over the positions that stay."""
    values, masks = plan.embed(surgery.state(small))
    full = surgery.load(copy.deepcopy(net), values)
    held = {name: (mask & ("bias" not in name)).to(values[name].dtype) for name, mask in masks.items()}
    masked = surgery.load(copy.deepcopy(net), held)  # a bias makes no position: the sums that it is added to are there
    for seed in (0, 1):
        expected, there = live(full, masked, inputs(seed))
        assert all(mask.all() for mask in there)
        same(small(*inputs(seed)), expected)


@torch.no_grad()
def judge_same(net, other):
    """Both networks compute the same."""
    for seed in (0, 1):
        same(other(*inputs(seed)), net(*inputs(seed)))


def scores(net):
    draw = torch.Generator().manual_seed(1)
    return {width.name: torch.rand(width.size, generator=draw) for width in surgery.widths(net, inputs())}


def orders(net):
    free = [width for width in surgery.widths(net, inputs()) if not width.order]
    draw = torch.Generator().manual_seed(1)
    return {width.name: torch.randperm(width.size, generator=draw) for width in free}


def narrow(net):
    judge_small(net, *surgery.narrow(net, 0.5, inputs()))


def narrow_twice(net):
    once, outer = surgery.narrow(net, 0.7, inputs())
    twice, inner = surgery.narrow(once, 0.6, inputs())
    judge_small(net, twice, outer.compose(inner))


def drop(net):
    judge_small(net, *surgery.narrow(net, 0.5, inputs(), heads="drop"))


def best(net):
    judge_small(net, *surgery.narrow(net, 0.6, inputs(), scores=scores(net)))


def prune(net):
    target = surgery.pruning.Target(parameters=0.8)
    small, plan, _ = surgery.pruning.prune(net, target=target, importance=scores, example=inputs())
    judge_small(net, small, plan)


def permute(net):
    judge_same(net, surgery.symmetry.permute(net, orders(net), example=inputs())[0])


def align(net):
    other = surgery.symmetry.permute(net, orders(net), example=inputs())[0]
    found = surgery.symmetry.align([net, other], example=inputs()).models[1]
    same(surgery.state(found).values(), surgery.state(net).values())


def widen(net):
    judge_same(net, surgery.widening.widen(net, rate=2, example=inputs())[0])


def widen_zero(net):
    wide, plan = surgery.widening.widen(net, rate=1.5, mode="zero", example=inputs())
    judge_same(net, wide)
    back, before = plan.extract(surgery.state(wide)), surgery.state(net)
    assert all(torch.equal(back[name], before[name]) for name in before)


JUDGED = (narrow, narrow_twice, drop, best, prune, permute, align, widen, widen_zero)


def check(judged, graph, head):
    """Judge an operation on a network; whether it was refused."""
    net = Net(graph, head)
    if list(net.parameters()):
        try:
            judged(net)
        except surgery.SurgeryError:
            return True
    return False


def judge_many(name, count, more=1):
    """Judge networks that have an operation, the first of which is the least one."""
    first, found = list(OPERATIONS).index(name) % len(JUDGED), []

    @settings(max_examples=count, derandomize=FIXED, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(JUDGED[first:] + JUDGED[:first]), graphs(name, more), st.integers(0, 3))
    def judge(judged, graph, head):
        found.append((name in {step.operation for step in Net(graph, head).steps}, check(judged, graph, head)))

    judge()
    return found


def test_random_networks__how_many_operations_random_networks_have():
    assert len(OPERATIONS) == 99


@pytest.mark.parametrize("name", some(OPERATIONS, [*OPERATIONS][::4]))  # each rule has samples beside these
def test_random_networks__holds(name):
    there, _ = zip(*judge_many(name, 2))
    assert any(there)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_random_networks__many_random_networks(name):
    there, refused = zip(*judge_many(name, -(-MANY // len(OPERATIONS)), more=2))
    assert any(there)
    if len(refused) >= 10:  # of few all may be refused
        assert sum(refused) < len(refused) * 2 / 3  # or little would have been judged
        assert sum(there) > len(there) / 4


def unchanged(view, args, out):
    return view.axes_of(args["self"])


def backwards(view, args, out):
    whole = [list(view.axes_of(tensor)) for tensor in reversed(args["tensors"])]
    return [*whole[0][:-1], concatenation([axes[-1] for axes in whole])]


WRONG = {
    "flip": (unchanged, [Node("flip", a=1)], narrow),
    "roll": (unchanged, [Node("roll", a=1)], best),
    "sort": (unchanged, [Node("sort", a=1)], permute),
    "cat": (backwards, [Node("linear", (2,), 2), Node("cat", (0, 1), 1)], permute),
}


def broken(name, monkeypatch):
    monkeypatch.setitem(RULES, name, dataclasses.replace(RULES[name], function=WRONG[name][0]))


@pytest.mark.parametrize("name", WRONG)
def test_random_networks__a_wrong_rule_is_noticed(name, monkeypatch):
    _, nodes, judged = WRONG[name]
    graph = [Node("linear", (1,), 2), *nodes, Node("linear", (0,), 1)]
    check(judged, graph, head=3)  # which may refuse: nothing of it is wrong
    broken(name, monkeypatch)
    with pytest.raises(AssertionError):
        judged(Net(graph, head=3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["roll", "sort"])
def test_random_networks__a_wrong_rule_is_found_in_random_networks_and_shrunk(name, monkeypatch):
    broken(name, monkeypatch)

    known = {}

    def wrong(graph):
        """Whether the rule shows; only the first networks are judged, after which none is smaller."""
        if graph not in known and len(known) < 80:
            try:
                check(WRONG[name][2], graph, head=3)
                known[graph] = False
            except AssertionError:
                known[graph] = True
        return known.get(graph, False)

    few = graphs(name, 2, ("linear", "activation", "batch_norm", "transpose", "cat"), [[Node("conv")]]).map(tuple)
    graph = find(few, wrong, settings=settings(max_examples=200, derandomize=True))
    assert len(graph) <= 5
    assert name in {node.operation for node in graph}
