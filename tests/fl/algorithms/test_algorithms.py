"""What several methods have in common, and the simplest of them written out."""

from itertools import product

import pytest
import torch
from fleets import assert_close, fleet_for, spoil
from oracles import average, recombine
from refusals import fl_refused
from rounds import assert_same, made, play, row
from selection import some

import surgery
from fl.algorithms import methods_of
from fl.algorithms.fedasam import METHOD as fedasam
from fl.algorithms.fedasam import FedASAMOptions
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedexp import METHOD as fedexp
from fl.algorithms.fedexp import FedExPOptions
from fl.algorithms.fedgen import METHOD as fedgen
from fl.algorithms.fedgen import FedGenOptions
from fl.algorithms.fedmr import METHOD as fedmr
from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.fedmut import METHOD as fedmut
from fl.algorithms.fedmut import FedMutOptions
from fl.algorithms.fedprox import METHOD as fedprox
from fl.algorithms.fedprox import FedProxOptions
from fl.algorithms.indep import METHOD as indep
from fl.base.errors import FLError
from fl.base.rng import Rng

WITHOUT = {
    "fedprox": lambda fed: fedprox(fed, FedProxOptions(mu=0.0)),
    "fedasam": lambda fed: fedasam(fed, FedASAMOptions(rho=0.0)),
    "fedexp": lambda fed: fedexp(fed, FedExPOptions(eps=0.0, max_step=1.0, last_two=False)),
    "fedgen": lambda fed: fedgen(fed, FedGenOptions(alpha=0.0, beta=0.0, noise=5, hidden=8, steps=3, batch=6)),
    "fedmut": lambda fed: fedmut(fed, FedMutOptions(radius=0.0, weighted=True)),
}
CASES = list(product(WITHOUT, ("loop", "workers", "vmap"), ("cnn", "resnet20")))
QUICK = [*product(("fedprox", "fedasam", "fedgen"), ["loop"], ["resnet20"])]
QUICK += [*product(("fedexp", "fedmut"), ["loop"], ["cnn"]), *product(("fedasam", "fedgen"), ["vmap"], ["cnn"])]


@pytest.mark.parametrize(("name", "backend", "model"), some(CASES, QUICK))
def test_algorithms__without_what_a_method_adds_it_is_fedavg(make_federation, name, backend, model):
    """Bit for bit, batch-norm statistics and losses included."""
    fed = make_federation(model, backend=backend, epochs=1)
    for (a, plain), (b, seen) in zip(play(fedavg(fed), fed, 2), play(WITHOUT[name](fed), fed, 2), strict=True):
        assert_same(a["global"], b["global"])
        assert torch.equal(plain.loss, seen.loss)


ALIKE = ("fedavg", "fedprox", "fedasam", "fedexp", "fedgen", "clusamp", "local", "fedrep", "ditto", "pfedme")
DROPPED = [(name, (1, 2)) for name in (*ALIKE, *methods_of("heterogeneous"))]
DROPPED += [("fedrep", (1,)), ("fedrep", (2,)), ("ditto", (1,))]


@pytest.mark.parametrize(
    ("name", "trainings"),
    some(DROPPED, [*((name, (1, 2)) for name in ("fedavg", "fedrep", "heterofl")), ("fedrep", (2,))]),
)
def test_algorithms__a_dropped_client_is_as_one_that_was_not_there(make_federation, monkeypatch, name, trainings):
    """Whichever of its trainings in the round failed; it keeps what it had, and sends nothing."""
    fed = make_federation("cnn", norm="batch", dtype=torch.float64, epochs=1) if name in ALIKE else fleet_for(name)
    algorithm = made(name, fed)
    before, _ = algorithm.round(algorithm.init(), [3, 0, 2], Rng(0, 1))
    expected, others = algorithm.round(before, [2, 1], Rng(0, 2))
    spoil(monkeypatch, {0}, trainings)
    after, trained = algorithm.round(before, [2, 0, 1], Rng(0, 2))
    assert trained.sizes == (12, 0, 7)
    for part in expected:
        assert_close(after[part], expected[part], rtol=1e-7, atol=1e-9)
    if name in ALIKE:
        assert trained.metrics["bytes_up"] == pytest.approx(2 / 3 * others.metrics["bytes_up"])
    spoil(monkeypatch, {0, 1, 2}, trainings)
    with fl_refused("diverged", "--lr"):
        algorithm.round(before, [2, 0, 1], Rng(0, 2))


def test_fedprox__pulls_towards_the_global_model(make_federation):
    fed = make_federation("cnn", epochs=4)
    start, moved = surgery.broadcast(fed.initial(), 1), []
    for mu in (0.0, 1.0, 10.0):
        ((server, _),) = play(fedprox(fed, FedProxOptions(mu)), fed, 1)
        moved.append(surgery.distance(start, surgery.stack([server["global"]])).item())
    assert moved[0] > moved[1] > moved[2]


def test_indep__passes_whole_models_on(make_federation):
    """Each model after a round is one of the trained models, none is lost."""
    fed = make_federation("cnn", participants=4)
    for server, trained in play(indep(fed), fed):
        same = surgery.distance(server["slots"], trained.states) == 0
        assert same.sum(0).tolist() == same.sum(1).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("unit", "fraction"),
    some(product(("layer", "tensor", "block"), (0.0, 0.4)), [("layer", 0.0), ("tensor", 0.4), ("block", 0.4)]),
)
def test_fedmr__equals_its_definition(make_federation, unit, fraction):
    """Two rounds written out with the oracles: who trains what, the mean before recombination, the shuffled lists."""
    fed = make_federation("resnet20", participants=3, epochs=1)
    groups = surgery.segments(surgery.layers(fed.model, unit=unit), fraction=fraction)
    slots = [fed.initial() for _ in range(3)]
    for number, (server, _) in enumerate(play(fedmr(fed, FedMROptions(fraction, unit)), fed, 2), 1):
        rng = Rng(0, number)
        trained = [
            surgery.unstack(fed.train(surgery.stack([start]), [client], rng).states)[0]
            for start, client in zip(slots, fed.sample(rng), strict=True)
        ]
        permutations = surgery.permutations(len(groups), 3, generator=rng.torch("recombine"))
        slots = recombine(trained, [surgery.Layer("", "", names) for names in groups], permutations)
        assert_near(server["global"], average(trained, [1, 1, 1]))
        assert_near(server["slots"], surgery.stack(slots))


def assert_near(state, expected):
    """In float32."""
    torch.testing.assert_close(dict(state), dict(expected), rtol=1e-5, atol=1e-5, check_dtype=False)


def test_fedmr__stage_one_averages_and_then_recombines(make_federation):
    fed = make_federation("cnn", participants=3)
    history = play(fedmr(fed, FedMROptions(stage1_rounds=2)), fed, 3)
    for number, (server, _) in enumerate(history, 1):
        spread = surgery.distance(server["slots"], surgery.broadcast(server["global"], 3)).max().item()
        assert (spread == 0) == (number <= 2)


@pytest.mark.parametrize("make", [fedmr, indep])
def test_algorithms__recombination_goes_on_with_the_earlier_model_of_who_was_dropped(
    make_federation, monkeypatch, make
):
    algorithm = make(make_federation("cnn"))
    server, _ = algorithm.round(algorithm.init(), [0, 1, 2], Rng(0, 1))
    spoil(monkeypatch, {2})
    after, trained = algorithm.round(server, [1, 2, 3], Rng(0, 2))
    assert_same(row(trained.states, 1), row(server["slots"], 1))
    assert_near(surgery.average(after["slots"]), surgery.average(trained.states))
    assert_near(after["global"], surgery.average(trained.states, weights=[1, 0, 1]))


def test_fedavg__weighs_clients_by_their_samples(make_federation):
    fed = make_federation("cnn", sizes=(3, 7, 12), participants=3)
    ((server, trained),) = play(fedavg(fed), fed, 1)
    sizes = [(3, 7, 12)[client] for client in fed.sample(Rng(0, 1))]
    assert_near(server["global"], average(surgery.unstack(trained.states), sizes))


def test_algorithms__sampling_is_uniform_without_replacement(make_federation):
    fed = make_federation("cnn", participants=2)
    counts, first = torch.zeros(4), torch.zeros(4)
    for number in range(400):
        drawn = fed.sample(Rng(0, number))
        assert len(set(drawn)) == 2
        counts[drawn] += 1
        first[drawn[0]] += 1
    assert ((counts - 200).abs() < 50).all()  # five standard deviations of a binomial
    assert ((first - 100).abs() < 45).all()  # and in random order: FedMR's slots go to random clients


@pytest.mark.parametrize(("method", "options"), [(fedmr, FedMROptions), (fedmut, FedMutOptions)])
def test_algorithms__blocks_that_there_are_not_are_refused(make_federation, method, options):
    with pytest.raises(FLError, match=f"--{method.name}.unit: .*no residual blocks"):
        method(make_federation("cnn"), options(unit="block"))
