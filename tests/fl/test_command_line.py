"""`layer-surgery`: what it starts, and what it prints."""

import re
import shlex
import sys
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from refusals import fl_refused

import fl
import surgery
import zoo
from fl import __main__ as cli
from fl.algorithms.fedprox import FedProxOptions
from fl.base.console import as_called
from fl.base.errors import FLError
from fl.runs.summary import advice
from fl.settings import Config, Experiment
from fl.settings.command_line import parse

ROOT = Path(__file__).parents[2]


def printed(capsys, *argv):
    """What a command prints."""
    try:
        code = cli.main(argv)
    except SystemExit as done:
        code = done.code
    assert code == 0
    return capsys.readouterr().out


def test_command_line__surgery_has_at_most_forty_public_names():
    assert len(surgery.__all__) <= 40
    assert all(getattr(surgery, name) is not None for name in surgery.__all__)


def test_command_line__every_command_is_in_the_table():
    files = {*(ROOT / "fl").glob("*.py"), *(ROOT / "fl").glob("*/**/__main__.py")}
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file != ROOT / "fl/__main__.py"
    } - {"fl.__init__"}
    assert {module for module, _ in cli.commands().values()} == modules | {"surgery.__main__", "zoo.__main__"}


def test_command_line__the_version_is_that_of_the_installed_package(capsys):
    assert fl.__version__ == surgery.__version__ == zoo.__version__
    assert printed(capsys, "--version") == f"layer-surgery {fl.__version__}\n"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"layer-surgery": f"{cli.main.__module__}:{cli.main.__name__}"}


def test_commands__are_called_as_the_user_called_them(capsys, monkeypatch):
    shown = printed(capsys)
    assert "python -m fl.run   " in shown
    assert "python -m zoo   " in shown
    monkeypatch.setattr(sys, "argv", ["/usr/bin/layer-surgery"])
    shown = printed(capsys)
    assert [line.split()[1] for line in shown.splitlines()[:-2]] == [*cli.commands()]
    assert "usage: layer-surgery structure FOLDERS ..." in printed(capsys, "structure", "--help")
    assert cli.main(["rum"]) == 2
    assert "unknown command 'rum': did you mean 'run'?" in capsys.readouterr().err
    assert "usage: layer-surgery surgery COMMAND" in printed(capsys, "surgery", "--help")
    assert cli.main(["zoo", "resnet1"]) == 2
    assert "See `layer-surgery zoo`" in capsys.readouterr().err
    lines = advice(Experiment(), Path("runs/a")).split("\n")
    assert "resume    layer-surgery run --resume runs/a --rounds 80" in lines
    assert as_called("a `python -m zoo` b python -m fl.data") == "a `layer-surgery zoo` b layer-surgery data"


@pytest.mark.parametrize(
    ("flags", "methods"),
    [
        ("", "fedavg,fedprox,fedmr"),
        ("--rounds 3 --clients 8 --partition iid --unequal --width 0.25,0.5,1 --out 'my runs' --name a --betas 0.5,0.9 "
         "--optimizer adam", "fedavg,fedprox,fedmr"),
        ("--algorithm ditto --ditto.lam 0.5 --lr-schedule step --lr-steps 0.5", "fedavg,fedprox,ditto"),
        ("--algorithm fedprox --fedprox.mu 0.5 --no-download --seeds 7", "fedavg,fedprox,fedmr"),
        ("text --text.length 32", "fedavg,fedprox,fedmr"),
        ("cifar10 --algorithm fedmr --seeds 1 --participants 5 --optimizer adam", "fedavg,fedprox,fedmr"),
        ("fedfa --algorithm fedavg --rounds 40 --norm default --no-masked-loss", "fedavg,fedprox,fedmr"),
        ("--algorithm heterofl", ""),
        ("--seeds 0,1", ""),
    ],
)  # fmt: skip
def test_command_line__the_comparison_that_is_proposed_keeps_the_settings_of_the_run(flags, methods):
    request = parse(shlex.split(flags))
    experiment = request.experiment
    lines = advice(experiment, Path("runs/a"), request.recipe, request.start).split("\n")
    found = [line for line in lines if line.startswith("compare ")]
    assert len(found) == bool(methods)
    for line in found:
        assert not request.recipe or line.startswith(f"compare   python -m fl.run {request.recipe} --algorithm ")
        proposed = parse(shlex.split(line.removeprefix("compare   python -m fl.run "))).experiment
        wanted = replace(experiment, algorithms=tuple(methods.split(",")), seeds=(0, 1, 2))
        assert proposed.runs() == wanted.runs()


@pytest.mark.parametrize("width", [80, 120])
def test_command_line__lines_of_help_are_as_long_as_the_terminal_is_wide(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    text = printed(capsys, "run", "--help", "all")
    flags = {one.flag for one in Config().settings()} - {"seed"}
    for flag in (*flags, "seeds", "fedmr.stage1-rounds", "text.tokens", "text.vocabulary", "text.length"):
        assert f"--{flag}" in text
    assert not re.search(r"default:\s+(None|\(\)|\))", text)  # but for what has one
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for line, following in pairwise(lines):
        flag_alone = line.startswith("  ") and "  " not in line.strip() and line[2:3] != " "
        if line and not flag_alone and re.match(r" {26}[^( ]", following):  # "(default: 3)" stays together
            assert len(line) + 1 + len(following.split()[0]) > width, (line, following)


@pytest.mark.parametrize("name", sorted(set(cli.commands()) - {"deploy", "surgery", "zoo"}))
def test_command_line__help_begins_with_what_a_command_does(name, capsys):
    usage, about, *_ = printed(capsys, name, "--help").split("\n\n")
    assert usage.startswith("usage: ")
    assert len(about) < 600
    assert about[0].isupper()
    assert "\n  --" not in about


@pytest.mark.parametrize(
    ("argv", "shown", "hidden"),
    [
        (
            [],
            "--fedmr.segment-fraction --alpha --rounds --momentum INT>=1 {sgd,adam,adamw} 0<=FLOAT<=1 FLOAT>0",
            "--femam.window --clusters --betas --presence.joining --attack.share --text.tokens",
        ),
        (["--algorithm", "femam,fedavg+"], "--femam.window --fedavg-plus.epochs", "--fedmr.segment-fraction"),
        (["--partition", "clusters", "--lr-schedule", "step"], "--clusters --lr-steps", "--alpha"),
        (["--algorithm", "heterofl"], "--architectures.widths --architectures.weak", "--architectures.file"),
        (["text"], "--text.tokens --text.vocabulary", "--fedmr.segment-fraction"),
        (["--lr", "wrong"], "--fedmr.segment-fraction", "--femam.window"),
    ],
)
def test_command_line__help_shows_what_the_command_reads(argv, shown, hidden, capsys):
    words = printed(capsys, "run", *argv, "--help").split("recipes")[0].split()
    assert set(shown.split()) <= {word.rstrip(",") for word in words}
    assert not set(hidden.split()) & {word.rstrip(",") for word in words}


@pytest.mark.slow
def test_command_line__settings_come_from_a_file_and_flags_override_them(tmp_path):
    experiment = Experiment.of(algorithms="fedprox", lr=0.5, seeds=(3, 4), alpha=0.1)
    path = tmp_path / "mine.yaml"
    path.write_text(experiment.to_yaml())
    assert parse(["--config", str(path)]).experiment.runs() == experiment.runs()
    found = parse(["--lr", "0.25", f"--config={path}", "--fedprox.mu", "1"]).experiment
    assert found.runs() == experiment.replace(lr=0.25, fedprox=FedProxOptions(mu=1.0)).runs()
    path.write_text("rounds: 7\nclients: {number: 3}\nlr: 0.5")
    assert parse(["--config", str(path)]).one_run() == Config.of(rounds=7, clients=3, lr=0.5)
    path.write_text("rounds: 7\nout: runs\nname: mine\n")  # as run folders of version 0.2 have it
    assert parse(["--config", str(path)]).one_run() == Config.of(rounds=7)
    request = parse(["--config", str(path), "--name", "mine", "--out", "elsewhere"])
    assert (request.out, request.name, request.resume) == ("elsewhere", "mine", None)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("rounds: 7\nspeed: 3\n", [], "unknown setting speed"),
        ("resume: runs/a\n", [], "resume is a flag"),
        ("config: b.yaml\n", [], "config is a flag"),
        ("[" * 9000, [], "not YAML"),
        (None, [], "cannot be read: No such file"),
        (Path("/dev/zero"), [], "is not a regular file"),
        ("rounds: 7\n", ["--resume", "runs/a"], "--config.*--resume"),
        ("rounds: 7\n", ["digits"], "--config"),
    ],
)
def test_command_line__what_a_file_of_settings_cannot_be_is_said(text, flags, said, tmp_path):
    path = tmp_path / "mine.yaml"
    if isinstance(text, Path):
        path.symlink_to(text)
    elif text is not None:
        path.write_text(text)
    with pytest.raises(FLError, match=said):
        parse([*flags, "--config", str(path)])


def test_command_line__a_plus_is_written_as_in_papers(capsys):
    assert parse(["--algorithm", "fedavg+,fesem+"]).experiment.algorithms == ("fedavg_plus", "fesem_plus")
    assert Config.from_yaml("algorithm: [fesem+]") == Config.of(algorithm="fesem_plus")
    with fl_refused("name", "--algorithm", "'fedmr_plus'"):
        Config.of(algorithm="fedmr+").check()


@pytest.mark.slow
def test_command_line__samples_are_held_out_for_a_method_that_validates(caplog):
    said = "femam validates on samples that clients hold out: --local-valid 0.1 is taken"
    fed, _ = fl.build(Config.of(algorithm="femam", width=0.1))
    assert fed.clients.valid.sizes.min() > 0
    for flags, share in (
        ("--algorithm fedavg,femam", 0.1),
        ("--algorithm femam --femam.no-prune --femam.level-rounds 2", 0),
        ("--algorithm femam --femam.levels global", 0),
        ("--algorithm fedavg", 0),
        ("--algorithm femam --local-valid 0.2", 0.2),
    ):
        assert parse(flags.split()).experiment.config.data.local_valid == share
    assert caplog.messages == [said] * 2
    for flags in (["--local-valid", "0"], ["--local_valid=0.0"]):
        with fl_refused("argument", "--local-valid"):
            parse(["--algorithm", "femam", *flags])
