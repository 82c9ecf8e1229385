"""A stack whose rows lie on ranks gives the bits of the stack, and less moves than all of it to everybody."""

from dataclasses import replace

import pytest
import torch
from ranks import ran

import surgery
from fl.federation.cosines import cosines
from fl.federation.defence import Defence
from fl.federation.divergence import restored
from fl.federation.shared import each_row, each_shared
from fl.federation.spread import Spread, by_layer, whole
from fl.parallel import joined

K, DEALT = 5, [[3, 0, 4], [], [1, 2]]
"""Rows in no order, and a rank without any."""


def models():
    numbers = torch.Generator().manual_seed(0)
    stack = {f"{i}.weight": torch.randn(K, 3 + 7 * i, 5, generator=numbers) for i in range(4)}
    stack |= {"0.bias": torch.randn(K, 3, generator=numbers), "1.count": torch.arange(K), "1.on": torch.eye(K).bool()}
    return stack | {"2.half": torch.randn(K, 2, generator=numbers).bfloat16(), "3.none": torch.zeros(K, 0)}


def spread(ranks, stack):
    rows = DEALT[ranks.rank]
    return Spread(DEALT, {name: tensor[rows] for name, tensor in stack.items()})


def same(one, other):
    assert list(one) == list(other)
    assert all(torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype for name, tensor in one.items())


def on_three(rank):
    stack, weights = models(), [3, 0, 5, 2, 1]
    with joined() as ranks, ranks.together():
        for given in (None, weights, [weights, [0, 0, 1, 0, 0]]):
            for rule in (Defence(), Defence("median")):
                expected = rule.average(stack, given)
                there = spread(ranks, stack)
                same(by_layer(there, lambda part, rule=rule, given=given: rule.average(part, given)), expected)
                assert not there.is_whole
        parameters = {name: tensor[0] for name, tensor in stack.items() if name.endswith(("weight", "bias"))}
        expected = surgery.cosine({name: stack[name] for name in parameters})
        assert torch.equal(cosines(there, parameters), expected)
        assert torch.equal(cosines(stack, parameters), expected)

        rows = [4, 1, 3]
        chosen = {name: tensor[rows] for name, tensor in stack.items()}
        for part in (spread(ranks, stack).select(rows), there.select(rows)):  # one of them has met
            same(by_layer(part, surgery.average), surgery.average(chosen))
            same(whole(part), chosen)
        assert there.select(range(K)) is there

        asked = spread(ranks, stack)
        assert asked.keys() >= set(stack)
        assert not asked.is_whole  # that names were asked for moves nothing

        starts = {name: torch.zeros_like(tensor) for name, tensor in stack.items()}
        kept = [True, False, True, False, True]
        same(whole(restored(there, starts, kept)), restored(stack, starts, kept))
        first = each_row(there, starts, lambda after, before: after["0.bias"].sum(1) - before["0.bias"].sum(1))
        assert torch.equal(first, stack["0.bias"].sum(1))
        assert [int(one) for one in each_shared(there, lambda row, state: state["1.count"] - row)] == [0] * K

        ranks.read_moved()
        by_layer(spread(ranks, stack), surgery.average)
        once = ranks.read_moved()
        same(dict(spread(ranks, stack).items()), stack)
        assert once < 0.6 * ranks.read_moved()
        assert torch.equal(there["1.on"], stack["1.on"])


def test_a_spread_stack_gives_what_the_stack_gives():
    assert ran(3, on_three) == [0, 0, 0]


def pieces(rank):
    """More than one transfer, of lengths that differ, and nothing to oneself."""
    from fl.parallel import ranks as module

    module._AT_ONCE = 3 * 64
    with joined() as ranks:
        given = [[torch.full((5 * rank + 40 * to,), float(10 * rank + to))] for to in range(3)]
        kinds = [[(torch.float32, [5 * sender + 40 * rank])] for sender in range(3)]
        for sender, (found,) in enumerate(ranks.swap(given, kinds)):
            assert torch.equal(found, torch.full((5 * sender + 40 * rank,), float(10 * sender + rank)))
        assert [sorted(each) for each in ranks.gather({str(rank): torch.ones(rank, 20)} if rank else {})] == [
            [],
            ["1"],
            ["2"],
        ]


def test_pieces_of_any_length_arrive():
    assert ran(3, pieces) == [0, 0, 0]


@pytest.mark.slow
def test_what_is_kept_by_a_server_is_whole(tmp_path, monkeypatch):
    """A method that keeps what its clients sent, and knows nothing of ranks."""
    from ranks import assert_equal, simulate_all, tiny

    from fl.algorithms import ALGORITHMS

    honest = ALGORITHMS["fedavg"]

    def fedavg(fed):
        plain = honest.make(fed)

        def round(server, clients, rng):
            server, trained = plain.round(server, clients, rng)
            return {**server, "sent": trained.received}, trained

        def init():
            start = fed.initial()
            return {"global": start, "sent": surgery.broadcast(start, fed.participants)}

        return plain._replace(init=init, round=round)

    monkeypatch.setitem(ALGORITHMS, "fedavg", replace(honest, make=fedavg))
    configs = {"run": tiny("fedavg")}
    simulate_all(0, configs, tmp_path / "one")
    assert ran(2, simulate_all, configs, tmp_path / "two") == [0, 0]
    assert_equal(tmp_path / "one" / "run", tmp_path / "two" / "run")
