import json
import signal
import traceback
from pathlib import Path

import pytest
import torch
from fl_flags import OF_METHOD, TINY
from refusals import fl_refused
from rounds import results
from safetensors.torch import load_file
from selection import some

import fl
from fl import run as cli
from fl.base.rng import Rng
from fl.engine import SGD
from fl.runs import checkpoint
from fl.runs.assembly import build
from fl.runs.metrics import read
from fl.settings import Config


def run(tmp_path, *arguments, name="a", code=0):
    flags = [*TINY, "--out", str(tmp_path), *(["--name", name] if name else []), *map(str, arguments)]
    assert cli.main(flags) == code
    return tmp_path / (name or "")


@pytest.mark.drawn
def test_run__a_run_leaves_a_folder_with_everything(tmp_path, capsys):
    folder = run(tmp_path, "--local-test", 0.2, "--eval-client-models-every", 1)
    files = {"config.yaml", "metrics.csv", "curves.png", "checkpoint.safetensors", "summary.json"}
    files.add("clients.csv")
    assert {path.name for path in folder.iterdir()} == files
    rows = read(folder / "metrics.csv")
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    for key in ("accuracy", "loss", "f1", "models_accuracy", "models_std", "models_cosine", "local_test_accuracy"):
        assert all(key in row for row in rows)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["complete"] is True
    assert summary["final"]["accuracy"] == rows[-1]["accuracy"]
    best = min(rows, key=lambda row: row["local_valid_loss"])
    assert summary["best"] == {name: best[name] for name in ("round", "accuracy", "local_valid_loss")}
    assert Config.read(folder).rounds == 4
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert str(folder) in printed
    assert f"{rows[-1]['accuracy']:.2%}" in printed


@pytest.mark.slow
def test_run__intervals_are_kept(tmp_path, monkeypatch):
    """Evaluations and checkpoints come when they are due, and in the last round."""
    saved, original = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: (saved.append(a[2]), original(*a, **k)))
    folder = run(tmp_path, "--rounds", 7, "--eval-every", 3, "--eval-client-models-every", 2, "--checkpoint-every", 4)
    rows = read(folder / "metrics.csv")
    assert [row["round"] for row in rows if "accuracy" in row] == [3, 6, 7]
    assert [row["round"] for row in rows if "models_accuracy" in row] == [2, 4, 6, 7]
    assert saved == [4, 7]
    never = read(run(tmp_path, name="never") / "metrics.csv")
    assert not any("models_accuracy" in row for row in never)


@pytest.mark.slow
def test_run__training_learns_real_digits(tmp_path):
    """The defaults, shortened: far above the 10% of guessing."""
    assert cli.main(["--rounds", "5", "--out", str(tmp_path), "--name", "a"]) == 0
    rows = read(tmp_path / "a" / "metrics.csv")
    assert rows[-1]["accuracy"] > 0.75
    assert rows[-1]["loss"] < rows[0]["loss"]


class Stop:
    """Stops the given round, the way Ctrl-C arrives: in the middle of training."""

    def __init__(self, monkeypatch, number, error=KeyboardInterrupt, signum=None):
        from fl.federation import Federation

        def stopping(original):
            def train(fed, *given, **named):
                if any(isinstance(value, Rng) and value.round == number for value in given):
                    if signum is None:
                        raise error
                    signal.raise_signal(signum)
                return original(fed, *given, **named)

            return train

        monkeypatch.setattr(Federation, "train", stopping(Federation.train))


@pytest.mark.parametrize("algorithm", some(("fedmr", "femam"), ["fedmr"]))  # test_contract.py resumes all
def test_run__resume_equals_an_uninterrupted_run_bit_for_bit(tmp_path, monkeypatch, capsys, algorithm):
    flags = ("--algorithm", algorithm, "--eval-client-models-every", 2, *OF_METHOD.get(algorithm, ()))
    whole = run(tmp_path, *flags, name="whole")
    with monkeypatch.context() as patch:
        Stop(patch, 3)
        broken = run(tmp_path, *flags, name="broken", code=130)
    assert "--resume" in capsys.readouterr().out
    assert [row["round"] for row in read(broken / "metrics.csv")] == [1, 2]
    assert json.loads((broken / "summary.json").read_text())["complete"] is False
    assert cli.main(["--resume", str(broken)]) == 0
    assert results(whole) == results(broken)


@pytest.mark.slow
def test_run__rounds_can_be_added(tmp_path):
    """The last round of the short run is evaluated, which the long one does not do there: its table has no such row."""
    flags = ("--eval-every", 3, "--eval-client-models-every", 3)
    longer = run(tmp_path, "--rounds", 6, *flags, name="longer")
    short = run(tmp_path, *flags, name="short")
    assert "accuracy" in read(short / "metrics.csv")[-1]
    assert cli.main(["--resume", str(short), "--rounds", "6"]) == 0
    assert results(longer) == results(short)
    assert Config.read(short).rounds == 6


@pytest.mark.slow
def test_run__several_methods_and_seeds_share_splits_and_end_in_a_comparison(tmp_path, capsys):
    folder = run(tmp_path, "--algorithm", "fedavg,fedmr", "--seeds", "0,1")
    runs = {path.name for path in folder.iterdir() if path.is_dir()}
    assert runs == {"fedavg-seed0", "fedavg-seed1", "fedmr-seed0", "fedmr-seed1"}
    assert (folder / "comparison.png").exists()
    table = (folder / "comparison.txt").read_text()
    assert table.strip() in capsys.readouterr().out
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [["fedavg", "2"], ["fedmr", "2"]]

    federations = {name: build(Config.read(folder / name))[0] for name in runs}
    for seed in (0, 1):
        a, b = (federations[f"{name}-seed{seed}"] for name in ("fedavg", "fedmr"))
        assert all(torch.equal(x.train, y.train) for x, y in zip(a.clients, b.clients, strict=True))
        assert all(torch.equal(a.initial()[n], b.initial()[n]) for n in a.initial())
    assert not torch.equal(federations["fedmr-seed0"].clients[0].train, federations["fedmr-seed1"].clients[0].train)


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_run__running_out_of_memory_is_a_line(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        Stop(patch, 2, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 TB"))
        folder = run(tmp_path, code=2)
    assert "error: out of memory: use a smaller --batch-size" in capsys.readouterr().err
    assert cli.main(["--resume", str(folder)]) == 0


def test_run__divergence_stops_with_a_line_and_keeps_what_was_done(tmp_path, capsys):
    folder = run(tmp_path, "--lr", "1e30", code=1)
    error = capsys.readouterr().err
    assert "training diverged" in error
    assert "smaller --lr" in error
    assert all(t.isfinite().all() for t in load_file(folder / "checkpoint.safetensors").values())
    assert json.loads((folder / "summary.json").read_text())["failed"]


def test_run__settings_written_by_hand_are_read():
    config = Config.from_yaml("algorithm: fedmr\nlr: 1\nparticipation: 0.5\nseeds: 3\nfedmr: {segment_fraction: 1}")
    assert (config.method.name, config.local.lr, config.clients.participation, config.seed) == ("fedmr", 1.0, 0.5, 3)
    assert isinstance(config.method.options.segment_fraction, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chunk: 2", "--chunk is now --max-parallel-clients"),
        ("models_every: 1", "--models-every is now --eval-client-models-every"),
        ("algorithm: femam\nfemam: {lam_everywhere: true}", "--femam.lam-everywhere is now --femam.prox-all-levels"),
        (
            "participants: 0.5",
            "participants cannot be 0.5: give a whole number; a share of the clients is participation",
        ),
    ],
)
def test_run__names_of_earlier_versions_say_what_they_are_now(text, said):
    with pytest.raises(fl.FLError, match=rf"^{said}(\n|$)"):
        Config.from_yaml(text)


@pytest.mark.slow
def test_run__runs_of_a_comparison_warn_once_each(tmp_path, caplog):
    few = ["--clients", 20, "--participants", 2, "--alpha", 0.01, "--min-samples", 10, "--samples", 300]
    run(tmp_path, *few, "--algorithm", "fedavg,fedprox", "--rounds", 1)
    assert caplog.text.count("in none of 200 draws") == 2


def test_run__a_reader_passes_few_functions_from_the_command_to_the_optimizer(tmp_path, monkeypatch):
    """They are named here in the order in which they call each other, so that a new one is a decision."""
    original, stacks = SGD.step, []

    def step(*arguments):
        stacks.append(traceback.extract_stack()[:-1])
        return original(*arguments)

    monkeypatch.setattr(SGD, "step", step)
    run(tmp_path, "--algorithm", "fedavg", "--backend", "loop", "--rounds", 1)
    inside = [(Path(frame.filename), frame.name) for frame in stacks[0]]
    passed = inside[inside.index((Path(cli.__file__), "main")) :]
    assert [f"{file.stem}.{name}" for file, name in passed] == [
        "run.main",
        "simulation.simulate",
        "simulation._do_rounds",
        "round.one_round",
        "algorithm.round",
        "transport.run",
        "fedavg.client",
        "federation.train",
        "divergence.run",
        "federation.train_cohort",
        "federation._in_chunks",
        "__init__.train",
        "eager.loop",
        "eager.step",
    ]


def test_run__train_loss_is_the_mean_over_the_participants(tmp_path, monkeypatch):
    from fl.federation import Federation

    losses, original = [], Federation.train
    monkeypatch.setattr(Federation, "train", lambda *a: (losses.append(original(*a)), losses[-1])[1])
    rows = read(run(tmp_path) / "metrics.csv")
    assert [row["train_loss"] for row in rows] == [t.loss.mean().item() for t in losses]
    assert losses[0].loss.std() > 0


@pytest.mark.slow
def test_run__folders_of_runs_are_not_touched_by_others(tmp_path, capsys):
    """By a run of the same name, by one without a name, and by a resumed one with other settings."""
    title = Config.read(run(tmp_path, "--rounds", 1, name="a")).title()
    several = run(tmp_path, "--seeds", "0,1", "--rounds", 2, name="b")
    cosine = run(tmp_path, "--rounds", 1, "--lr-schedule", "cosine", name="c")
    assert f"--resume {cosine}" not in capsys.readouterr().out
    before = snapshot(tmp_path)
    for flags, message in (
        ([*TINY, "--out", tmp_path, "--name", "a"], f"or continue with `python -m fl.run --resume {tmp_path / 'a'}`"),
        ([*TINY, "--algorithm", "fedavg,fedmr", "--out", tmp_path, "--name", "a"], "exists already"),
        (["--resume", tmp_path / "a", "--lr", "0.5"], "--lr cannot change"),
        (["--resume", tmp_path / "a", "--seeds", "3"], "--seeds cannot change"),
        (["--resume", several, "--rounds", "1"], "has done 2 rounds"),
        (["--resume", cosine, "--rounds", "9"], "--rounds cannot change: --lr-schedule cosine"),
        (["fashion-mnist", "--resume", tmp_path / "a"], "a recipe and --resume both say"),
    ):
        assert cli.main([*map(str, flags)]) == 2
        assert message in capsys.readouterr().err
    with fl_refused("argument", "fl.Experiment"):
        fl.load_model(several)
    assert Config.read(several / "fedmr-seed1").seed == 1
    assert snapshot(tmp_path) == before
    for _ in range(2):
        run(tmp_path, "--rounds", 1, name=None)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", title, f"{title}-2"}


@pytest.mark.slow
@pytest.mark.parametrize("mine", ["none", "one that notes it", "one that ends", "ignored"])
def test_run__sigterm_saves_as_ctrl_c_does_beside_a_handler_of_the_user(tmp_path, monkeypatch, capsys, mine):
    noted = []

    def handler(number, frame):
        noted.append(number)
        if mine == "one that ends":
            raise SystemExit(7)

    now = {"none": signal.SIG_DFL, "ignored": signal.SIG_IGN}.get(mine, handler)
    before, broken = signal.signal(signal.SIGTERM, now), tmp_path / "broken"
    try:
        with monkeypatch.context() as patch:
            Stop(patch, 3, signum=signal.SIGTERM)
            if mine == "one that ends":
                with pytest.raises(SystemExit, match="7"):
                    run(tmp_path, name="broken")
            else:
                run(tmp_path, name="broken", code=0 if mine == "ignored" else 143)
                assert f"--resume {broken}" in capsys.readouterr().out
        assert signal.getsignal(signal.SIGTERM) is now
    finally:
        signal.signal(signal.SIGTERM, before)
    assert noted == [signal.SIGTERM] * mine.startswith("one")
    assert checkpoint.read_header(broken)["round"] == (4 if mine == "ignored" else 2)
    assert cli.main(["--resume", str(broken)]) == 0
    assert len(read(broken / "metrics.csv")) == 4
