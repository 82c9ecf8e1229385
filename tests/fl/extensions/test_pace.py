"""Clients of unequal speed, in simulated time, and what becomes of those who are late."""

import math

import pytest
import torch
from refusals import fl_refused
from selection import some
from wrapped import wrapped

import fl
from fl.algorithms.parts.progress import gradients_of
from fl.base.rng import Rng
from fl.extensions.pace import Pace, PaceOptions, make_pace
from fl.federation.cohort import Cohort
from fl.federation.local_training import LocalObjective
from fl.federation.trainer import Training
from fl.runs.metrics import read
from surgery import average, broadcast

FEW = {"clients": 8, "participants": 4, "width": 0.125, "partition": "iid", "momentum": 0.5}


def built(pace=None, algorithm="fedavg", **more):
    fed, made = fl.build(fl.Config.of(algorithm=algorithm, **{**FEW, **more}))
    if pace is None:
        return fed, made
    fed = wrapped(fl.Federation(fed.model, fed.data, fed.clients, fed.participants, fed.local), pace=pace)
    return fed, fl.algorithms.ALGORITHMS[algorithm](fed)


def speeds(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_pace__a_client_stopped_after_two_of_four_epochs_has_trained_for_two():
    plain, _ = built(local_epochs=2)
    epoch = plain.steps([0])[0] // 2 * 10  # samples
    slow = Pace(speeds(*[2 * epoch] * 8), deadline=1.0)
    fed, _ = built(slow, local_epochs=4)
    start = broadcast(plain.initial(), 4)
    two, stopped = (one.train(start, [0, 1, 2, 3], Rng(0, 1)) for one in (plain, fed))
    assert stopped.steps == two.steps
    for name, tensor in two.states.items():
        assert torch.equal(stopped.states[name], tensor)
    assert stopped.sizes == two.sizes
    assert fed.meter.read() == plain.meter.read()


@pytest.mark.parametrize(("partial", "sizes"), [(True, [True, True, False, True]), (False, [True, False, False, True])])
def test_pace__who_is_late_sends_a_part_or_nothing(partial, sizes):
    """Client 1 makes some steps, client 2 none."""
    _, method = built(Pace(speeds(1e9, 50, 1e-3, 1e9, *[1.0] * 4), deadline=1.0, partial=partial))
    server = method.init()
    after, update = method.round(server, [0, 1, 2, 3], Rng(0, 1))
    assert [size > 0 for size in update.sizes] == sizes
    expected = average(update.received, weights=update.sizes)
    torch.testing.assert_close(after["global"], expected)
    assert all(torch.equal(update.states[n][2], t) for n, t in server["global"].items())


@pytest.mark.parametrize(
    ("deadline", "samples", "steps"), [(2.0, 7.0, 2), (0.3, 1.0, 3), (0.39, 1.0, 3), (9.0, 1.0, 5)]
)
def test_pace__a_step_that_has_not_quite_ended_by_the_deadline_does_not_count(deadline, samples, steps):
    assert Pace(speeds(10), deadline=deadline).steps_done(lambda count: count * samples / 10, 5) == steps


def test_pace__a_partial_last_batch_takes_less_time():
    """A client of 25 samples in batches of 10 that sees 100 a second takes 0.25 s an epoch, not 0.3 s."""
    more = {"clients": 2, "participants": 2, "samples": 50, "local_valid": 0.0, "local_test": 0.0, "local_epochs": 2}
    pace = Pace(speeds(100, 100), deadline=0.5, partial=False)
    for last, seconds, sizes in (("partial", 0.5, (25, 25)), ("filled", 0.5, (0, 0))):
        fed, algorithm = built(pace, last_batch=last, backend="loop", **more)
        assert [len(part) for part in fed.clients.train] == [25, 25]
        _, update = algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))
        assert fed.meter.metrics["simulated_seconds"] == pytest.approx(seconds)
        assert update.sizes == sizes


def test_pace__a_round_in_which_all_are_late_leaves_the_model():
    _, method = built(Pace(speeds(*[1e-3] * 8), deadline=1.0))
    server = method.init()
    after, update = method.round(server, [0, 1, 2, 3], Rng(0, 1))
    assert update.sizes == (0, 0, 0, 0)
    assert all(torch.equal(after["global"][n], t) for n, t in server["global"].items())


@pytest.mark.parametrize("method", some(("fednova", "scaffold", "feddyn", "fedmr", "fedasam"), ["fednova", "scaffold"]))
def test_pace__methods_count_the_steps_that_were_made(method):
    pace = Pace(speeds(1e9, 100, 200, 1e9, *[100] * 4), deadline=1.0)
    fed, algorithm = built(pace, method, momentum=0.0, local_epochs=2)
    everything = built(None, method, momentum=0.0, local_epochs=2)[0].steps([0, 1, 2])
    server, update = algorithm.round(algorithm.init(), [0, 1, 2, 3], Rng(0, 1))
    assert gradients_of(fed, update.steps[:3]).tolist() == [everything[0], 10, min(20, everything[2])]
    assert all(tensor.isfinite().all() for tensor in server["global"].values())


def test_pace__speeds_are_lognormal_around_their_median():
    logs = make_pace(PaceOptions(spread=0.5, speed=200.0), 20_000, Rng(0)).speeds.log()
    assert logs.median().item() == pytest.approx(math.log(200), abs=0.02)
    assert logs.std().item() == pytest.approx(0.5, rel=0.03)


def test_pace__speeds_from_a_file(tmp_path):
    path = tmp_path / "speeds.txt"
    path.write_text("10\n20.5\n30\n")
    assert make_pace(PaceOptions(file=str(path)), 3, Rng(0)).speeds.tolist() == [10, 20.5, 30]
    with fl_refused("file", "--pace.file"):
        make_pace(PaceOptions(file=str(path)), 4, Rng(0))
    path.write_text("ten")
    with fl_refused("file", "--pace.file"):
        make_pace(PaceOptions(file=str(path)), 1, Rng(0))


def test_pace__two_gradients_a_step_take_twice_as_long():
    took = []
    for method in ("fedavg", "fedasam"):
        fed, algorithm = built(Pace(speeds(*[100.0] * 8)), method, local_epochs=1, samples=160)
        algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))
        took.append(fed.meter.metrics["simulated_seconds"])
    assert took[1] == pytest.approx(2 * took[0])


def test_pace__a_smaller_model_takes_less_time():
    fed, _ = fl.build(
        fl.Config.of(
            algorithm="heterofl",
            architectures=fl.ArchitectureOptions(widths=(0.5, 1.0), choose="cycle"),
            pace=PaceOptions(spread=0.1),
            **FEW,
        )
    )
    (pace,) = fed.training
    starts = [fed.fleet[client].plan.extract(fed.initial()) for client in (0, 1)]
    cohort = Cohort([0, 1], fed.models_of([0, 1]), starts)
    training = Training(cohort, LocalObjective(), Rng(0, 1), fed.steps([0, 1]))
    own = [clock(steps) for clock, steps in zip(pace.clocks(fed, training), training.steps)]
    equal = [fed.steps([k])[0] * 10 / pace.speeds[k].item() for k in (0, 1)]
    assert own[0] < 0.6 * equal[0]
    assert own[1] == pytest.approx(equal[1])


@pytest.mark.slow
def test_simulate__a_run_has_simulated_seconds(tmp_path, capsys):
    from fl.compare import main

    config = fl.Config.of(algorithm="fedavg", rounds=2, pace=PaceOptions(spread=1.0, deadline=0.1), **FEW)
    fl.simulate(config, tmp_path / "run")
    rows = read(tmp_path / "run" / "metrics.csv")
    assert [row["simulated_seconds"] for row in rows] == pytest.approx([0.1, 0.1], abs=0.05)
    assert max(row["simulated_seconds"] for row in rows) <= 0.1
    out = str(tmp_path / "all.png")
    assert main([str(tmp_path / "run"), "--against", "simulated", "--out", out]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"algorithm": "ditto"}, "--pace"),
        ({"pace": PaceOptions(spread=-1.0)}, "--pace.spread"),
        ({"pace": PaceOptions(spread=1.0, file="speeds.txt")}, "--pace.file"),
    ],
)
def test_pace__refusals(more, message):
    with pytest.raises(fl.FLError, match=message):
        fl.build(fl.Config.of(**{**FEW, "clients": 30, "pace": PaceOptions(deadline=1.0), **more}))
