"""How `auto` admits a backend on a device that nobody has seen; the CPU plays that device."""

import errno
import io
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import unruly
from rounds import small
from torch import nn

import surgery
from fl import engine
from fl.base.rng import Rng
from fl.data import load
from fl.engine import Precision, admission, conditions, objectives, train, trial
from fl.engine.admission import TrialOutcome
from fl.engine.eager import Replica
from fl.engine.losses import by_name
from fl.federation.local_training import LocalObjective
from fl.runs import checkpoint
from fl.runs.simulation import simulate

LONG = 10**9
"""Rounds of a run in which trials cost nothing."""


@pytest.fixture(autouse=True)
def unknown(monkeypatch, tmp_path):
    """Make the CPU a device on which backends are tried, with an empty file of what was found."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(admission, "uses_trials", lambda device: True)
    monkeypatch.setattr(admission, "_known", {})
    monkeypatch.setattr(admission, "_spent", 0.0)


@pytest.fixture
def childless(monkeypatch):
    """No process may be started."""
    monkeypatch.setattr(admission, "_start", lambda *given: pytest.fail("a process was started"))


@pytest.fixture
def groups(make_federation):
    return groups_of(make_federation("cnn"), unruly.paused)


def groups_of(fed, objective, clients=(2, 0, 3)):
    starts = surgery.broadcast(fed.initial(), len(clients))
    return [fed.group(fed.model, starts, list(clients), LocalObjective(objective), Rng(0, 1))]


def offer(monkeypatch, *names):
    """Let these be the backends beside the loop."""
    backends = {name: getattr(unruly, name) for name in names}
    monkeypatch.setattr(engine, "BACKENDS", {"loop": engine.BACKENDS["loop"], **backends})


@pytest.mark.slow
def test_admission__the_fastest_that_agrees_is_admitted_and_what_dies_is_named(groups, monkeypatch, caplog):
    """Two processes; afterwards none, neither in this run nor in another."""
    offer(monkeypatch, "crashes", "quick")
    expected, chosen = train(groups, "loop"), {}
    (found,) = train(groups, "auto", chosen, LONG)
    assert all(torch.equal(found.states[name], tensor) for name, tensor in expected[0].states.items())
    assert list(chosen.values()) == ["quick"]
    (record,) = caplog.records
    assert "quick trains" in record.getMessage()
    assert "crashes is left out: its process was ended by a signal (Seg" in record.getMessage()
    monkeypatch.setattr(admission, "_start", lambda *given: pytest.fail("a process was started"))
    monkeypatch.setattr(admission, "_known", {})
    for given in (chosen, {}):
        train(groups, "auto", given, LONG)
        assert given == chosen
    (kept,) = json.loads(admission._file().read_text()).values()
    assert (kept["backend"], list(kept["left_out"])) == ("quick", ["crashes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "RuntimeError: CUDA error: an illegal memory access"),
        ("differs", "differs from the loop"),
        ("hangs", "not done within"),
        ("ends", "exit code 3"),
        ("slow", "times as fast"),
    ],
)
def test_admission__a_process_that_misbehaves_leaves_the_loop(groups, monkeypatch, name, why):
    offer(monkeypatch, name)
    monkeypatch.setattr(admission, "LIMIT", 40.0)
    chosen = {}
    (found,) = train(groups, "auto", chosen, LONG)
    assert list(chosen.values()) == ["loop"]
    assert torch.equal(found.loss, train(groups, "loop")[0].loss)
    (kept,) = json.loads(admission._file().read_text()).values()
    assert why in kept["left_out"][name]
    assert admission._spent < admission.LIMIT + 10


@pytest.mark.parametrize(
    ("name", "deterministic", "why"),
    [
        ("quick", True, ""),
        ("slow", True, "times as fast"),
        pytest.param("differs", True, "differs from the loop", marks=pytest.mark.slow),
        ("nan", True, "differs from the loop by nan"),
        ("wavers", True, "does not repeat itself"),
        pytest.param("wavers", False, "", marks=pytest.mark.slow),
    ],
)
def test_admission__what_is_measured_decides(groups, tmp_path, name, deterministic, why):
    """In this process, without the time that another takes to start."""
    found = trial.measure(getattr(unruly, name), trial.first_steps(groups))
    (tmp_path / f"{name}.json").write_text(json.dumps(found))
    gain, said = admission._judge(tmp_path / name, 0, deterministic)
    assert why in said
    assert bool(said) == bool(why)
    assert (gain >= admission.FASTER) == (not why)


@pytest.mark.parametrize("rounding", ["float32", "bf16"])
def test_admission__rounding_of_the_precision_is_no_difference_and_a_lost_step_is(make_federation, tmp_path, rounding):
    (group,) = groups_of(make_federation("cnn"), objectives.cross_entropy)
    groups = [(replace(group[0], precision=Precision(rounding)), *group[1:])]
    for backend, right in ((engine.BACKENDS["vmap"], True), (unruly.differs, False)):
        found = {**trial.measure(backend, trial.first_steps(groups)), "seconds": (2.0, 1.0)}
        (tmp_path / "b.json").write_text(json.dumps(found))
        assert (admission._judge(tmp_path / "b", 0, True)[1] == "") == right


def test_admission__scalars_of_a_model_count_as_well(make_federation):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(64, 3)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return super().forward(x.flatten(1)) * self.scale

    few = trial.first_steps(groups_of(make_federation(Scaled()), objectives.cross_entropy))

    def moved(groups):
        done = engine.BACKENDS["loop"](groups)
        done[0].states["scale"][1] += 1.0
        return done

    assert trial.measure(engine.BACKENDS["vmap"], few)["distance"] < 1e-4
    assert trial.measure(moved, few)["distance"] > 0.5


def test_admission__the_first_steps_are_those_of_the_clients_in_proportion(make_federation):
    fed = make_federation("cnn", sizes=(60, 3, 30), participants=3).with_local(epochs=2, batch_size=3)
    (group,) = groups_of(fed, objectives.cross_entropy, (0, 1, 2))
    ((job, starts, _),) = trial.first_steps([group])
    assert (group[0].batches.steps, job.batches.steps) == ((40, 2, 20), (8, 1, 4))
    for client, steps in enumerate(job.batches.steps):
        for step in range(steps):
            batches = [one.fetch(one.batches.client_step(client, step), torch.float32) for one in (job, group[0])]
            assert all(torch.equal(*pair) for pair in zip(*batches))
    assert len(job.data.y) < len(fed.data.y)
    assert {len(tensor) for tensor in starts.values()} == {3}


@pytest.mark.usefixtures("childless")
def test_admission__nothing_is_tried_where_it_is_not_wanted_or_does_not_pay(groups, monkeypatch, caplog):
    offer(monkeypatch, "quick", "hangs")
    monkeypatch.setitem(engine.BACKENDS, "hangs", engine.BACKENDS["loop"])
    chosen = {}
    train(groups, "quick", chosen, LONG)
    train(groups, "hangs", chosen, LONG)
    assert chosen == {}
    train(groups, "auto", chosen, 100)
    assert list(chosen.values()) == ["loop"]
    assert "too short" in caplog.records[-1].getMessage()
    assert not admission._file().exists()  # a longer run may try
    with monkeypatch.context() as patch:
        patch.setattr(admission, "uses_trials", lambda device: device.type != "cpu")
        patch.setattr(admission, "choose", lambda *given: pytest.fail("a CPU goes by a rule"))
        patch.setattr(engine, "rank_backends", lambda groups: ["quick", "loop"])
        train(groups, "auto", chosen, LONG)
    assert list(chosen.values()) == ["loop", "quick"]


@pytest.mark.usefixtures("childless")
def test_admission__what_cannot_be_sent_to_another_process_trains_in_the_loop(groups, monkeypatch, caplog):
    offer(monkeypatch, "quick")
    (job, *rest), told = groups[0], "is defined in the program itself"

    def objective(*given):
        return objectives.cross_entropy(*given)

    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    objective.__module__ = "__main__"
    train([(replace(job, objective=objective), *rest)], "auto", {}, LONG)
    assert told in caplog.records[-1].getMessage()
    monkeypatch.setattr(admission, "_start", lambda *given: 1 / 0)
    monkeypatch.setattr(admission.tempfile, "TemporaryDirectory", full)
    train(groups, "auto", {}, LONG)
    assert "no process could be started: [Errno 28]" in caplog.records[-1].getMessage()


def test_admission__a_run_over_several_ranks_keeps_the_loop(groups, monkeypatch, childless):
    offer(monkeypatch, "quick")
    monkeypatch.setattr(admission, "current", lambda: type("Ranks", (), {"size": 2}))
    train(groups, "auto", chosen := {}, LONG)
    assert list(chosen.values()) == ["loop"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"KEY": 1}', '{"KEY": {"backend": "magic"}}', '{"KEY": {"left_out": 3}}']
)
def test_admission__a_broken_file_is_no_file(groups, monkeypatch, content):
    offer(monkeypatch, "quick")
    monkeypatch.setattr(admission, "_decide", lambda *given: TrialOutcome("quick", 3.0))
    train(groups, "auto", chosen := {})
    admission._file().write_text(content.replace("KEY", *chosen))
    monkeypatch.setattr(admission, "_known", {})
    train(groups, "auto", again := {})
    assert again == chosen
    assert json.loads(admission._file().read_text())[next(iter(chosen))]["backend"] == "quick"


def test_admission__a_file_that_cannot_be_written_costs_the_run_nothing(groups, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file in the place of the folder")
    offer(monkeypatch, "quick")
    asked = []
    monkeypatch.setattr(admission, "_decide", lambda *given: asked.append(1) or TrialOutcome("quick", 3.0))
    for _ in range(2):
        train(groups, "auto", chosen := {})
        assert list(chosen.values()) == ["quick"]
    assert asked == [1]  # methods and seeds of a command share it


def test_admission__what_a_choice_holds_for(make_federation):
    def key(fed, objective=objectives.cross_entropy, clients=(2, 0, 3), **settings):
        (group,) = groups_of(fed, objective, clients)
        return conditions.describe([(replace(group[0], **settings), *group[1:])], {"vmap": None})

    fed = make_federation("cnn")
    first = key(fed)
    assert first == key(make_federation("cnn")) == key(fed.with_local(schedule=lambda number: 0.5))
    assert key(fed, objectives.proximal(0.1)) == key(fed, objectives.proximal(0.2))
    other = [
        key(fed, objectives.proximal(0.1)),
        key(fed, objectives.mask_absent_classes()),
        key(fed, clients=(0, 2)),
        key(fed.with_local(batch_size=2)),
        key(fed, precision=Precision(channels_last=True)),
        key(make_federation("cnn", dtype=torch.float64)),
        key(make_federation("resnet20")),
    ]
    assert len({first, *other}) == 1 + len(other)


def test_admission__a_choice_holds_for_the_code_and_the_switches_of_its_trial(groups, monkeypatch):
    keys = [conditions.describe(groups, {})]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "1")
        keys.append(conditions.describe(groups, {}))
    monkeypatch.setattr(conditions, "_digest_code", lambda: "changed")
    keys.append(conditions.describe(groups, {}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # another of the same kind
    assert conditions.describe(groups, {}) == keys[-1]
    assert len({*keys}) == 5


@pytest.mark.parametrize(
    "objective",
    [
        objectives.cross_entropy,
        objectives.mean_of(by_name("focal", "classification")),
        objectives.mask_absent_classes(objectives.with_logits(objectives.cross_entropy)),
        partial(objectives.cross_entropy),
    ],
)
def test_admission__objectives_travel_to_another_process(make_federation, tmp_path, objective):
    torch.save(objective, tmp_path / "a", pickle_module=trial.Pickle)
    sent = torch.load(tmp_path / "a", weights_only=False)
    logits, labels, more = torch.randn(4, 3), torch.tensor([0, 2, 1, 1]), torch.randn(4, 3)
    batch = (logits, labels, more) if objective is objectives.mask_absent_classes(objective) else (logits, labels)
    for one in (batch, (logits, labels, more)):
        try:
            expected = objective(lambda params, x: x, {}, {"held": torch.ones(3)}, one)
        except ValueError:  # not for such batches
            continue
        assert torch.equal(sent(lambda params, x: x, {}, {"held": torch.ones(3)}, one), expected)


def test_admission__what_was_too_slow_is_tried_again_with_twice_the_time(groups, monkeypatch):
    offer(monkeypatch, "quick")
    allowed = []
    monkeypatch.setattr(admission, "_estimate_round_seconds", lambda *_: 50.0)

    def compare(*given):
        allowed.append(given[-1] - time.monotonic())
        return TrialOutcome(late=allowed[-1])

    monkeypatch.setattr(admission, "_compare", compare)
    for rounds in (20, 30, 45):  # of 50 s, of which a fiftieth is a second
        train(groups, "auto", {}, rounds)
    assert allowed == pytest.approx([20, 45], abs=1)


def test_admission__a_device_that_others_have_taken_is_tried_again(groups, monkeypatch, tmp_path):
    """... by a run of twice the length; what raises for another reason is not."""
    monkeypatch.setattr(admission, "_start", lambda *given: SimpleNamespace(communicate=lambda *_: None, returncode=0))
    monkeypatch.setattr(admission, "_kill", lambda child: None)
    for error, again in (
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
    ):
        (tmp_path / "vmap.json").write_text(json.dumps({"error": error}))
        end = time.monotonic() + 30
        found = admission._compare(tmp_path / "trial", {"vmap": None}, torch.device("cpu"), True, end)
        assert found.left_out == {"vmap": error}
        assert (found.late > 29) == again
        assert found.late == 0 or again


@pytest.mark.parametrize("name", ["hangs", pytest.param("slow", marks=pytest.mark.slow)])
def test_admission__a_trial_takes_what_is_allowed_and_no_more(groups, monkeypatch, name):
    """A fiftieth of the run, with all that it takes: the loop's steps, writing, processes that import, and their end.

    One whose turn comes when nothing is left has a second.
    """
    offer(monkeypatch, "hangs", name)
    monkeypatch.setattr(admission, "LEAST", 2.0)
    monkeypatch.setattr(admission, "_estimate_round_seconds", lambda *_: time.sleep(1) or 1.0)
    began = time.monotonic()
    train(groups, "auto", chosen := {}, 150)
    assert time.monotonic() - began < 3 + 2 + 10  # where a process is slow to start and to end
    assert list(chosen.values()) == ["loop"]


@pytest.mark.parametrize("clients", [(0,), (2, 0, 3)])
def test_admission__a_run_that_is_too_short_to_try_makes_hardly_a_step_more(
    make_federation, monkeypatch, childless, clients
):
    """At most those of one of its rounds, to know how short it is."""
    offer(monkeypatch, "quick")
    made, step = [], Replica.step
    monkeypatch.setattr(Replica, "step", lambda *given: made.append(1) or step(*given))
    groups = groups_of(make_federation("cnn"), objectives.cross_entropy, clients)
    train(groups, "loop")
    of_a_round = len(made)
    train(groups, "auto", {}, 100)
    assert len(made) <= 3 * of_a_round


@pytest.mark.slow
def test_admission__a_process_that_tries_goes_first_where_memory_runs_out(monkeypatch, tmp_path):
    score = Path("/proc/self/oom_score_adj")
    if not score.exists():
        pytest.skip("this system has no such score")
    program = "from fl.engine.trial import attend; attend('trial', 'quick', 'cpu'); print(open('{}').read())"
    done = subprocess.run(
        [sys.executable, "-c", program.format(score)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert int(done.stdout) == 1000


def test_admission__a_process_whose_run_has_ended_ends(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    trial.attend(str(tmp_path / "trial"), "quick", "cpu")
    assert not [*tmp_path.iterdir()]


def test_simulate__a_run_keeps_its_choice_and_asks_again_on_another_device(tmp_path, monkeypatch):
    offer(monkeypatch, "quick")
    asked = []
    monkeypatch.setattr(
        admission, "_decide", lambda *given: asked.append(given[2]) or TrialOutcome("quick", 3.0, late=-1.0)
    )
    config, folder = small("fedavg", rounds=1, samples=200, local_epochs=1, width=0.1, participants=3), tmp_path / "a"
    data = load("digits")
    simulate(config, folder, dataset=data)
    assert list(checkpoint.read_header(folder)["backends"].values()) == ["quick"]
    simulate(config.replace(rounds=2), folder, resume=True, dataset=data)
    assert asked == [1]
    monkeypatch.setattr(admission, "name_device", lambda device: "another")
    simulate(config.replace(rounds=3), folder, resume=True, dataset=data)
    assert asked == [1, 3]
    assert len(checkpoint.read_header(folder)["backends"]) == 2
