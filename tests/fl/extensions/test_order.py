"""Extensions together: the order in which they wrap, every pair of them, and that their defaults change nothing."""

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import pytest
import torch
from ranks import tiny
from refusals import fl_refused
from rounds import play

import fl
from fl.algorithms.extension import Extension, Order
from fl.extensions.attack import AttackOptions
from fl.extensions.compression import Compression
from fl.extensions.defence import Defence
from fl.extensions.failures import FailureOptions
from fl.extensions.pace import PaceOptions
from fl.extensions.presence import PresenceOptions
from fl.extensions.privacy import Privacy
from fl.federation import trainer
from fl.federation.divergence import WithoutDiverged
from fl.federation.transport import InProcess
from fl.settings.extensions import EXTENSIONS
from surgery import broadcast

ON = {
    "attack": {"attack": AttackOptions(share=0.4, amplify=3.0)},
    "compression": {"compression": Compression("topk", share=0.1)},
    "feedback": {"compression": Compression("topk", share=0.1, feedback=True)},
    "median": {"defence": Defence("median")},
    "krum": {"defence": Defence("krum", malicious=0)},
    "clip": {"defence": Defence(clip=1.0)},
    "pace": {"pace": PaceOptions(spread=1.0, speed=200.0, deadline=0.15)},
    "late": {"pace": PaceOptions(spread=1.0, speed=200.0, deadline=0.15, late="drop")},
    "failures": {"failures": FailureOptions(share=0.3)},
    "presence": {"presence": PresenceOptions(joining=0.2, leaving=0.2)},
    "privacy": {"privacy": Privacy(clip=0.5, noise=0.0)},
}
"""One or two ways of each extension, as settings ask for it."""

TOGETHER_REFUSED = {
    *(("privacy", one) for one in ("median", "krum", "clip", "presence")),  # what one client changes has no bound
    *((one, "krum") for one in ("late", "failures")),  # which needs all clients of a round
}
REFUSED = {"fedmr": {"feedback", "privacy"}}  # by the method alone, see tests/fl/algorithms/test_method.py


def settings(method, *names):
    changes = {key: value for name in names for key, value in ON[name].items()}
    return tiny(method, clients=8, participants=4, rounds=2, norm="none", **changes)


def same_extension(one, other):
    return ON[one].keys() == ON[other].keys()


@pytest.mark.parametrize("method", ["fedavg", pytest.param("fedmr", marks=pytest.mark.slow)])
def test_order__every_pair_runs_or_is_refused(method):
    """What runs keeps finite numbers, reports what each of the two reports, and moves the model."""
    for one, other in combinations(ON, 2):
        if same_extension(one, other):
            continue
        pair = {(one, other), (other, one)}
        if pair & TOGETHER_REFUSED or {one, other} & REFUSED.get(method, set()):
            with pytest.raises(fl.FLError):
                fl.build(settings(method, one, other))
            continue
        fed, algorithm = fl.build(settings(method, one, other))
        history = play(algorithm, fed, rounds=1)
        server, update = history[-1]
        assert all(tensor.isfinite().all() for tensor in server["global"].values()), (one, other)
        if {one, other} & {"compression", "feedback"}:
            whole = sum(tensor.nbytes for tensor in fed.initial().values())
            assert update.metrics["bytes_up"] < 0.5 * whole, (one, other)
        if {one, other} & {"pace", "late"}:
            assert 0 < fed.meter.metrics["simulated_seconds"] <= 0.15, (one, other)
        if "privacy" in (one, other):
            assert update.metrics["update_clip"] == 0.5
        if "attack" in (one, other):
            assert len(fed.malicious) == 3


def test_order__the_order_is_that_of_the_stages():
    """Malicious clients train within the check for divergence, and both within the deadline; clipping comes first of
    what the server does.
    """
    config = tiny("fedavg", clients=8, participants=4, rounds=2, **ON["attack"], **ON["late"], **ON["clip"])
    fed, algorithm = fl.build(config)
    stages = sorted((*fed.training, WithoutDiverged()), key=lambda one: one.stage)
    assert [type(one).__name__ for one in stages] == ["Attack", "WithoutDiverged", "Pace"]
    order = sorted((one for one in EXTENSIONS if EXTENSIONS[one].algorithm), key=lambda one: EXTENSIONS[one].order)
    assert order == ["compression", "defence", "presence", "privacy"]
    assert len(algorithm.steps) == 1


@pytest.mark.parametrize("turn", [1, -1])
def test_order__what_wraps_training_is_put_in_the_order_of_its_stages(turn):
    called = []

    class Noted(NamedTuple):
        stage: trainer.Stage

        def __call__(self, fed, train):
            return lambda training: called.append(self.stage) or train(training)

    fed, _ = fl.build(tiny("fedavg"))
    fed = replace(fed, training=[Noted(stage) for stage in trainer.Stage][::turn])
    fed.train(broadcast(fed.initial(), 2), [0, 1], fl.Rng(0, 1))
    assert called == sorted(trainer.Stage, reverse=True)


def test_order__no_other_extension_sees_what_privacy_has_not_made(monkeypatch):
    """Not even one that promises something too and comes later by its name; two cannot both be the first."""
    seen = []

    def watch(algorithm, config, rng):
        def aggregate(server, clients, update, rng):
            seen.append(update.received)
            return algorithm.aggregate_clients(server, clients, update, rng)

        return replace(algorithm, aggregate=aggregate)

    for order in Order:
        monkeypatch.setitem(EXTENSIONS, "zz", Extension(PresenceOptions(), algorithm=watch, order=order))
        config = settings("fedavg", "privacy").replace(zz=PresenceOptions(joining=0.1))
        if order is Order.PROTECTING:
            with fl_refused("argument", "--privacy", "--zz"):
                fl.build(config)
            continue
        fed, algorithm = fl.build(config)
        play(algorithm, fed, rounds=1)
        assert all(torch.equal(stack, stack[:1].expand_as(stack)) for stack in seen.pop().values())


@pytest.mark.parametrize("method", ["fedavg", "fedmr"])
def test_order__with_their_defaults_nothing_is_wrapped(method):
    fed, algorithm = fl.build(tiny(method))
    plain = fl.algorithms.ALGORITHMS[method](fed)
    assert (fed.training, fed.malicious, fed.report) == ((), frozenset(), None)
    assert len(algorithm.steps) == len(plain.steps)
    assert (algorithm.sample, algorithm.max_rounds, algorithm.always_aggregates) == (plain.sample, None, False)
    found, expected = (play(one, fed, rounds=1)[-1][0]["global"] for one in (algorithm, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_order__clipping_a_round_in_which_nobody_arrives_leaves_the_model():
    late = {"pace": PaceOptions(spread=1.0, deadline=1e-3)}
    fed, algorithm = fl.build(tiny("fedavg", clients=8, participants=4, rounds=2, **late, **ON["clip"]))
    (first, _), (last, update) = (algorithm.init(), None), play(algorithm, fed, rounds=1)[-1]
    assert not any(update.arrived)
    assert all(torch.equal(first["global"][name], last["global"][name]) for name in first["global"])


class Idle(NamedTuple):
    stage: trainer.Stage | str = trainer.Stage.ARRIVAL

    def __call__(self, fed, train):
        return train


def test_order__what_is_no_extension_or_middleware_is_refused(make_federation):
    def wrap(algorithm, config, rng):
        return algorithm

    options = PresenceOptions()
    for wrong in ({"options": PresenceOptions}, {"algorithm": wrap}, {"order": Order.SENDING}):
        with fl_refused("argument"):
            Extension(**{"options": options, **wrong})
    with fl_refused("argument", "SENDING"):
        Extension(options, algorithm=wrap, order=trainer.Stage.ARRIVAL)
    with fl_refused("argument", "'arrival'"):
        replace(make_federation("cnn"), training=[Idle("arrival")])
    replace(make_federation("cnn"), training=[Idle()])


def test_order__nodes_know_nothing_of_what_wraps_training_or_clients(monkeypatch):
    monkeypatch.setattr(Elsewhere, "splits", fl.build(tiny("fedavg"))[0].clients)
    for name, one in (
        ("pace", replace(EXTENSIONS["pace"], simulated=False)),
        ("compression", replace(EXTENSIONS["compression"], simulated=False)),
    ):
        monkeypatch.setitem(EXTENSIONS, name, one)
        with fl_refused("unsupported"):
            fl.build(tiny("fedavg", **ON[name]), fl.data.load("digits"), transport=Elsewhere())


class Elsewhere(InProcess):
    """Clients of whom the server has no data."""

    has_data = False


def test_simulate__a_run_goes_on_only_with_its_extensions(tmp_path, monkeypatch):
    settings = tiny("fedavg", clients=8, participants=4, rounds=1, **ON["clip"])
    fl.simulate(settings, tmp_path / "run")
    text = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(text.replace("defence:", "gone:"))
    with fl_refused("missing"):
        fl.Config.read(tmp_path / "run", resume=True)
    assert fl.Config.read(tmp_path / "run").extensions == {}
