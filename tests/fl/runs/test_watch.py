"""What sees a run while it goes on, what stops it early, and the model of its best round."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise

import pytest
import torch
from fl_flags import OF_METHOD, TINY
from refusals import fl_refused

import fl
from fl import run as cli
from fl.base.errors import FLError
from fl.engine import BACKENDS, progress
from fl.runs import bar, checkpoint, logs
from fl.runs import round as rounds
from fl.runs.export import client_model
from fl.runs.metrics import read
from fl.runs.state import RunState
from fl.runs.summary import describe
from fl.settings.evaluation import LOGS
from surgery import broadcast

CONFIG = fl.Config.of(algorithm="fedavg", clients=4, participants=2, rounds=6, local_epochs=1, width=0.1, batch_size=50)


def scores(monkeypatch, accuracies, losses=()):
    """The accuracy of round r is the r-th of these; likewise clients' mean validation loss."""
    real = rounds.evaluate_round

    def scored(run, server, cohort, number):
        row, tables = real(run, server, cohort, number)
        more = {"local_valid_loss": losses[number - 1]} if losses else {}
        return {**row, **({"accuracy": accuracies[number - 1], **more} if "accuracy" in row else {})}, tables

    monkeypatch.setattr(rounds, "evaluate_round", scored)


def model_of(folder, best=False):
    return torch.cat([tensor.flatten() for tensor in fl.load_model(folder, best=best).state_dict().values()])


def test_watch__a_run_stops_after_the_round_for_which_a_function_says_true_and_nothing_else(tmp_path):
    seen = []

    def watch(row):
        seen.append(row)
        return "done" if row["round"] == 1 else True

    summary = fl.simulate(CONFIG.replace(samples=100), tmp_path / "run", on_round=watch)
    assert (summary["rounds"], summary["complete"]) == (2, False)
    assert seen == read(tmp_path / "run/metrics.csv")


@pytest.mark.slow
def test_watch__patience_stops_and_a_resumed_run_decides_the_same(tmp_path, monkeypatch, capsys):
    scores(monkeypatch, [0.2, 0.5, 0.4, 0.5, 0.3, 0.6])
    folder, flags = tmp_path / "run", ["--algorithm", "fedavg", *TINY, "--local-valid", "0", "--rounds", "6"]
    assert cli.main([*flags, "--patience", "3", "--out", str(tmp_path), "--name", "run"]) == 0
    said = capsys.readouterr().out
    assert "stopped early: the last 3 evaluations brought nothing better than round 2" in said
    assert f"--resume {folder} --rounds 12 --patience 0\n" in said  # without --patience 0 no round would be trained
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["rounds"], summary["complete"], summary["stopped"]) == (5, True, {"patience": 3, "best": 2})
    assert cli.main(["--resume", str(folder)]) == 0
    assert len(read(folder / "metrics.csv")) == 5
    assert cli.main(["--resume", str(folder), "--patience", "4"]) == 0
    assert len(read(folder / "metrics.csv")) == 6
    assert f"--resume {folder} --rounds 12\n" in capsys.readouterr().out.split("stopped early")[-1]


def test_watch__clients_validation_decides_where_there_is_one(tmp_path, monkeypatch):
    scores(monkeypatch, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [3.0, 1.0, 2.0, 1.5, 0.5, 0.1])
    summary = fl.simulate(CONFIG.replace(local_valid=0.1, patience=2), tmp_path / "run")
    assert (summary["rounds"], summary["complete"], summary["stopped"]["best"]) == (4, True, 2)


def test_watch__a_column_that_is_never_a_number_has_no_best_round(tmp_path, caplog):
    asked = CONFIG.replace(metrics=(f"{__name__}:undefined",), best_by="test_undefined")
    fl.simulate(asked, tmp_path / "run")
    assert "--best-by test_undefined was nan in every evaluation" in caplog.text


def test_watch__where_no_round_has_a_number_none_is_kept_as_the_best(tmp_path):
    asked = CONFIG.replace(metrics=(f"{__name__}:undefined",), best_by="test_undefined", rounds=2, keep_best=True)
    summary = fl.simulate(replace(asked, patience=2), tmp_path / "run")
    assert summary["best"] == {}
    assert checkpoint.read_header(tmp_path / "run")["best"] is None
    assert "none is best" in describe(summary)
    with fl_refused("folder", "test_undefined"):
        fl.load_model(tmp_path / "run", best=True)
    more = fl.simulate(replace(asked, rounds=3, patience=2), tmp_path / "run", resume=True)
    assert (more["rounds"], more["stopped"]) == (2, {"patience": 2, "best": None})
    assert "brought no number to judge by" in describe(more)


@pytest.mark.parametrize(
    ("settings", "column"),
    [
        ({"best_by": "loss"}, "loss"),
        ({"local_valid": 0.2}, "local_valid_loss"),
        ({"local_valid": 0.2, "local_test": 0.2, "best_by": "local_test_std"}, "local_test_std"),
        ({"local_test": 0.2}, None),
    ],
)
def test_watch__the_best_round_of_the_summary_is_the_one_whose_model_is_kept(tmp_path, monkeypatch, settings, column):
    scores(monkeypatch, [0.3, 0.2, 0.1], [3.0, 1.0, 2.0] if "local_valid" in settings else ())
    real = rounds.evaluate_round

    def others(run, server, cohort, number):
        row, scores = real(run, server, cohort, number)
        judged = {"loss": abs(number - 2) + 1.0, "local_test_std": abs(number - 2) + 0.5}
        return row | {name: value for name, value in judged.items() if name in row}, scores

    monkeypatch.setattr(rounds, "evaluate_round", others)
    best, folder = 2 if column else 1, tmp_path / "run"
    summary = fl.simulate(CONFIG.replace(rounds=3, keep_best=True, **settings), folder)
    assert summary["best"]["round"] == checkpoint.read_header(folder)["best"] == best
    assert summary["best"].keys() == {"round", "accuracy", *filter(None, [column])}
    assert summary["selected"].get("round", best) == best
    by = f" (by {column})" if column else ""
    assert f"best {summary['best']['accuracy']:.2%} in round {best}{by}\n" in describe(summary)


def undefined(outputs, targets):
    return float("nan")


@pytest.fixture
def models(monkeypatch):
    """From the number of each round to its global model."""
    kept, real = {}, RunState.advance

    def noted(run, server, number):
        real(run, server, number)
        kept[number] = torch.cat([tensor.flatten() for tensor in run.server["global"].values()])

    monkeypatch.setattr(RunState, "advance", noted)
    return kept


BEST = CONFIG.replace(keep_best=True, checkpoint_every=3)


@pytest.mark.slow
@pytest.mark.parametrize(("accuracies", "last"), [([0.2, 0.5, 0.4, 0.4, 0.6, 0.1], 5), ([0.2, 0.5, 0.4, 0, 0, 0], 2)])
@pytest.mark.parametrize("after", [False, True])
def test_watch__a_kill_around_a_checkpoint_leaves_the_best_model_of_its_rounds(
    tmp_path, monkeypatch, models, accuracies, last, after
):
    """The one before is in the same file, whichever round the run has reached."""
    scores(monkeypatch, accuracies)
    folder, real = tmp_path / "run", checkpoint.save

    def save(place, server, number, *more, **named):
        if number < 6 or after:
            real(place, server, number, *more, **named)
        if number == 6:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        with pytest.raises(SystemExit):
            fl.simulate(BEST, folder)
    assert torch.equal(model_of(folder, best=True), models[last if after else 2])
    fl.simulate(BEST, folder, resume=True)
    assert torch.equal(model_of(folder, best=True), models[last])
    assert torch.equal(model_of(folder), models[6])


def test_watch__an_evaluation_that_only_ended_a_run_is_forgotten_when_it_goes_on(tmp_path, monkeypatch, models):
    scores(monkeypatch, [0, 0.5, 0.9, 0.4])
    config = CONFIG.replace(keep_best=True, eval_every=2, rounds=4)
    fl.simulate(config.replace(rounds=3), tmp_path / "run")
    assert torch.equal(model_of(tmp_path / "run", best=True), models[3])
    fl.simulate(config, tmp_path / "run", resume=True)
    assert torch.equal(model_of(tmp_path / "run", best=True), models[2])


@pytest.mark.parametrize("judged", [{"keep_best": True}, {"patience": 5}])
def test_watch__evaluations_that_are_compared_stay_as_frequent(tmp_path, monkeypatch, models, judged):
    """Or round 1, the best, would lose its score, and its model with it."""
    scores(monkeypatch, [0.9, 0.5, 0.4])
    config = CONFIG.replace(rounds=2, **judged)
    fl.simulate(config, tmp_path / "run")
    message = r"with --eval-every 1, and now it is 2 \(--keep-best and --patience compare .*: put 1 back"
    with pytest.raises(FLError, match=message):
        fl.simulate(config.replace(rounds=3, eval_every=2), tmp_path / "run", resume=True)
    if config.evaluation.keep_best:
        assert torch.equal(model_of(tmp_path / "run", best=True), models[1])
    else:
        with fl_refused("folder", "--keep-best"):
            fl.load_model(tmp_path / "run", best=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["local", "fedrep", "fedmr"])
def test_watch__clients_models_of_the_best_round_are_kept_where_clients_have_some(tmp_path, monkeypatch, name):
    """They predict as the run's clients did after that round; elsewhere with the deployed model."""
    scores(monkeypatch, [0.5, 0.6, 0.4], [2.0, 1.0, 3.0])
    flags, folder = ["--algorithm", name, *TINY, *OF_METHOD.get(name, []), "--keep-best"], tmp_path / "three"
    for rounds_done, label in ((2, "two"), (3, "three")):
        assert cli.main([*flags, "--out", str(tmp_path), "--name", label, "--rounds", str(rounds_done)]) == 0
    for client in range(4):
        then, kept = client_model(tmp_path / "two", client), client_model(folder, client, best=True)
        assert all(torch.equal(a, b) for a, b in zip(then.state_dict().values(), kept.state_dict().values()))


@pytest.mark.slow
def test_watch__tensorboard_has_the_columns_and_goes_on_after_a_kill(tmp_path):
    """Also the rounds before it was asked for."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fl.simulate(CONFIG.replace(rounds=1), tmp_path / "run")
    config = CONFIG.replace(log=("tensorboard",), rounds=4, checkpoint_every=3)

    def killed(row):
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fl.runs.state.RunState.close", lambda run, diverged: None)
        with pytest.raises(KeyboardInterrupt):
            fl.simulate(config, tmp_path / "run", resume=True, on_round=killed)
    fl.simulate(config, tmp_path / "run", resume=True)
    rows, log = read(tmp_path / "run/metrics.csv"), accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    log.Reload()
    assert {*log.Tags()["scalars"]} == rows[-1].keys() - {"round"}
    assert [event.step for event in log.Scalars("accuracy")] == [1, 2, 3, 4]
    assert [event.value for event in log.Scalars("accuracy")] == pytest.approx([row["accuracy"] for row in rows])


@pytest.mark.slow
def test_watch__wandb_offline_has_settings_and_rounds_and_keeps_its_id(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    begun, logged, real = [], [], wandb.init

    def init(**settings):
        log = real(**settings)
        begun.append(settings)
        monkeypatch.setattr(log, "log", lambda values, step: logged.append((step, values)))
        return log

    monkeypatch.setattr(wandb, "init", init)
    config = CONFIG.replace(log=("wandb",), rounds=2)
    fl.simulate(config, tmp_path / "run")
    fl.simulate(config.replace(rounds=3), tmp_path / "run", resume=True)
    assert [step for step, _ in logged] == [1, 2, 3]
    assert begun[0]["id"] == begun[1]["id"]
    assert begun[0]["config"]["lr"] == CONFIG.local.lr
    assert len(list((tmp_path / "run/wandb").glob("offline-run-*"))) == 2
    assert logged[2][1].keys() == read(tmp_path / "run/metrics.csv")[2].keys() - {"round"}


def test_watch__a_missing_package_is_told_before_anything_trains(tmp_path, monkeypatch, capsys):
    assert [*logs.LOGS] == [*LOGS]
    monkeypatch.setattr("fl.runs.logs.find_spec", lambda name: None)
    for seeds in ("0", "0,1"):
        assert cli.main([*TINY, "--log", "wandb", "--seeds", seeds, "--out", str(tmp_path)]) == 2
        assert "pip install 'layer-surgery[wandb]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("fl.runs.logs.find_spec", lambda name: ModuleSpec(name, None))
    assert cli.main([*TINY, "--log", "tensorboard", "--out", str(tmp_path)]) == 2  # a folder of that name is no package
    assert cli.main([*TINY, "--log", "mlflow", "--out", str(tmp_path)]) == 2
    assert "unknown --log 'mlflow': there are tensorboard, wandb" in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_watch__backends_count_the_clients_that_are_done(make_federation, backend):
    fed = make_federation(backend=backend, sizes=(3, 7, 12, 5), participants=4)
    counts = []
    with progress.listen(lambda done, total: counts.append((done, total))):
        fed.train(broadcast(fed.initial(), 4), [0, 1, 2, 3], fl.Rng(0, 1))
        halves = fed.with_local(max_parallel_clients=2)
        halves.train(broadcast(fed.initial(), 4), [0, 1, 2, 3], fl.Rng(0, 1))
    assert counts[-1] == pytest.approx((4, 4))
    assert [total for _, total in counts] == [4] * len(counts)
    assert len([done for done, _ in counts if done == pytest.approx(4)]) == 2
    assert all(b > a or a == pytest.approx(4) for (a, _), (b, _) in pairwise(counts))
    assert {"loop", "workers", "vmap", "graphs"} == BACKENDS.keys()


def test_watch__a_long_round_says_how_many_clients_are_done_on_a_terminal_only(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bar, "_LONG", 0)
    monkeypatch.setattr(bar, "_OFTEN", 0)
    fl.simulate(CONFIG.replace(rounds=1), tmp_path / "file")
    assert "client" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fl.simulate(CONFIG.replace(rounds=1, backend="loop"), tmp_path / "terminal")
    assert "client 1/2" in capsys.readouterr().err


def test_watch__a_log_is_told_of_every_row_before_the_user_is(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("fl.runs.logs.find_spec", lambda name: ModuleSpec(name, None, origin="here"))
    log = lambda run: nullcontext(lambda row: told.append(("log", row["round"])))  # noqa: E731
    monkeypatch.setitem(logs.LOGS, "wandb", log)
    config = CONFIG.replace(rounds=2, log=("wandb",))
    fl.simulate(config, tmp_path / "run", on_round=lambda row: told.append(("user", row["round"])))
    assert told == [("log", 1), ("user", 1), ("log", 2), ("user", 2)]
