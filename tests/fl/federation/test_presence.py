from dataclasses import replace
from itertools import product

import pytest
import torch
from rounds import assert_same, play
from selection import some

from fl.algorithms import FedFAOptions, fedavg, fedfa
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.federation.presence import Presence, make_presence
from fl.models.fleet import make_fleet
from fl.settings import Config
from zoo import Spec

ALWAYS = torch.iinfo(torch.int64).max
LARGE = Spec("preresnet20", 3, 1, 8, width=0.25, depth=(3, 1, 2), norm="static_batch")
MEDIUM = LARGE.scaled(0.5, (2, 1, 1))
SMALL = LARGE.scaled(0.25, (1, 1, 1))


def presence(first, last):
    return Presence(torch.tensor(first), torch.tensor(last))


@pytest.mark.parametrize(("clients", "joining", "leaving"), [(10, 0.2, 0.3), (7, 0.5, 0.0), (20, 0.0, 0.25)])
def test_shares_of_the_clients_come_and_go(clients, joining, leaving):
    """Everyone is there in one unbroken time, which lacks the first round or the last of those run, never both."""
    rounds, coming, going = 5, round(joining * clients), round(leaving * clients)
    starts, ends = set(), set()
    for seed in range(40):
        there = make_presence(clients, 2, joining, leaving, rounds, Rng(seed))
        joins, leaves = there.first > 1, there.last < rounds
        assert (joins.sum(), leaves.sum(), (joins & leaves).sum()) == (coming, going, 0)
        assert (there.first <= there.last).all()
        each = [there.at(number) for number in range(1, rounds + 1)]
        assert (len(each[0]), len(each[-1])) == (clients - coming, clients - going)
        for number, present in enumerate(each, 1):
            first, last = there.first.tolist(), there.last.tolist()
            assert present == [k for k in range(clients) if first[k] <= number <= last[k]]
        starts |= set(there.first[joins].tolist())
        ends |= set(there.last[leaves].tolist())
    assert starts == (set(range(2, rounds + 1)) if coming else set())
    assert ends == (set(range(1, rounds)) if going else set())
    a, b = (make_presence(clients, 2, joining, leaving, rounds, Rng(3)) for _ in range(2))
    assert torch.equal(a.first, b.first)
    assert torch.equal(a.last, b.last)


def test_who_cannot_come_and_go_is_refused():
    assert make_presence(10, 4, 0.0, 0.0, 1, Rng(0)) is None
    assert make_presence(10, 4, 0.3, 0.3, 2, Rng(0)).at(1)
    for joining, leaving, rounds, message in (
        (0.4, 0.3, 9, r"--joining 0.4 and --leaving 0.3 of 10 clients leave fewer than the 4 participants"),
        (-0.1, 0.2, 9, r"smaller shares in \[0, 1\]"),
        (0.1, 1.2, 9, r"smaller shares in \[0, 1\]"),
        (0.1, 0.0, 1, "need two --rounds or more"),
        (0.04, 0.3, 9, "--joining 0.04 of 10 clients is nobody: use 0.1 or more, or 0"),
        (0.3, 0.04, 9, "--leaving 0.04 of 10 clients is nobody"),
    ):
        with pytest.raises(FLError, match=message):
            make_presence(10, 4, joining, leaving, rounds, Rng(0))
    with pytest.raises(FLError, match="clusamp draws its clients itself"):
        Config(algorithm=("clusamp",), joining=0.1).check()


def test_a_round_draws_from_those_who_are_there(make_federation):
    """K distinct ones, each equally often; with everyone there the very same as without presence."""
    fed = make_federation(sizes=(3, 4, 5, 6, 7, 8), participants=2)
    moving = replace(fed, presence=presence([1, 1, 3, 1, 2, 1], [ALWAYS, 2, ALWAYS, ALWAYS, ALWAYS, 4]))
    for number in range(1, 7):
        there = moving.presence.at(number)
        counts = torch.zeros(6)
        for seed in range(150):
            drawn = moving.sample(Rng(seed, number))
            assert len(set(drawn)) == 2
            assert set(drawn) <= set(there)
            counts[drawn] += 1
        assert (counts[there] > 300 / len(there) * 0.6).all()
    always = replace(fed, presence=presence([1] * 6, [ALWAYS] * 6))
    for number in range(1, 7):
        assert always.sample(Rng(0, number)) == fed.sample(Rng(0, number))
    for (a, _), (b, _) in zip(play(fedavg(always), always), play(fedavg(fed), fed), strict=True):
        assert_same(a["global"], b["global"])


def growing(make_federation, spec, kinds, **settings):
    """Four clients, the last of whom joins in round 3; the model's weights are given later."""
    model = spec.build(torch.Generator().manual_seed(0)).double()
    fleet = make_fleet(model, spec, kinds)
    there = presence([1, 1, 1, 3], [ALWAYS] * 4)
    return make_federation(model, spec=spec, fleet=fleet, presence=there, epochs=1, **settings)


def close(a, b, names=None):
    return all(torch.allclose(a[n].double(), b[n].double(), rtol=1e-9, atol=1e-11) for n in names or a)


@pytest.mark.parametrize(
    ("everyone", "scale"), some(product((True, False), ("norm", "none")), [(True, "norm"), (False, "none")])
)
def test_a_model_that_has_the_size_of_a_later_client_from_the_start_is_one_that_grows(make_federation, everyone, scale):
    """Run A has the global model of all clients from the start. Run B has that of the present ones, begins as its part
    of A's initial model, and grows when the large client joins: `plan.embed(B, into=A's initial model)`.

    Until then every submodel that present clients receive is the same in both (so B is A's part, and the clients
    train and are scaled alike). On joining, A and the grown B are equal everywhere if some present client that has
    the largest present architecture has taken part, and so are all later rounds. Else they differ, in the blocks
    that B has not, in what no participant has covered yet: A has its initial values there still, and the grown
    B copies of the initial values of its own last block, which serve just as well.
    """
    later, large = (
        [SMALL, MEDIUM, SMALL],
        growing(make_federation, LARGE, [SMALL, MEDIUM, SMALL, LARGE], participants=3),
    )
    small = growing(make_federation, MEDIUM, [*later, MEDIUM], participants=3)
    grown = large.fleet[1].plan  # of the medium model, which holds all that are present, in the large one
    options = FedFAOptions(scale=scale)
    a, b = fedfa(large, options), fedfa(small, options)
    start = large.initial()
    one, two = {"global": start}, {"global": grown.extract(start)}
    for number in (1, 2):
        rng = Rng(0, number)
        assert set(large.sample(rng)) == {0, 1, 2}
        clients = large.sample(rng) if everyone else [0, 2]
        (one, trained), (two, same) = a.round(one, clients, rng), b.round(two, clients, rng)
        torch.testing.assert_close(trained.loss, same.loss, rtol=1e-9, atol=1e-11)
        assert close(grown.extract(one["global"]), two["global"])
        for client in range(3):
            received = (fed.fleet[client].plan.extract(s["global"]) for fed, s in ((large, one), (small, two)))
            assert close(*received)
    full, mask = grown.embed(two["global"], into=start)
    assert any(not covered.all() for covered in mask.values())
    blocks = [name for name in full if name.startswith(("section1.2.", "section3.1."))]
    assert blocks
    for name, tensor in full.items():
        kept = ~mask[name]  # what no present client has: the initial values in both
        assert torch.equal(one["global"][name][kept], start[name][kept])
        assert torch.equal(tensor[kept], start[name][kept])
        assert not torch.equal(tensor, start[name])  # and what somebody has is trained
    assert close(full, one["global"], set(full) - set(blocks))
    if not everyone:
        covered = large.fleet[0].plan.embed(large.fleet[0].plan.extract(start))[1]
        for name in blocks:
            assert close({"": full[name][covered[name]]}, {"": one["global"][name][covered[name]]})
        assert not close(full, one["global"])
        return
    assert close(full, one["global"])
    grew = {"global": full}
    for number in (3, 4):
        rng = Rng(0, number)
        clients = [3, *[client for client in large.sample(rng) if client != 3][:2]]
        (one, trained), (grew, same) = (a.round(s, clients, rng) for s in (one, grew))
        torch.testing.assert_close(trained.loss, same.loss, rtol=1e-6, atol=1e-9)
        for name, tensor in one["global"].items():
            torch.testing.assert_close(grew["global"][name], tensor, rtol=1e-6, atol=1e-9)
