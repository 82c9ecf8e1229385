"""`layer-surgery deploy`, as far as it goes without Flower."""

import shlex
import tomllib

import pytest

from fl.extensions.flower import local
from fl.extensions.flower.__main__ import main
from fl.extensions.flower.folders import node_folder, read_node, read_server
from fl.settings.command_line import parse


def run_config(folder):
    return tomllib.loads((folder / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


@pytest.mark.slow
def test_command__it_writes_what_other_machines_need(tmp_path):
    flags = ["--nodes", "2", "--folder", str(tmp_path), "--samples", "50"]
    assert main([*flags, "--only", "data"]) == 0
    train = [len(read_node(node_folder(tmp_path / "data", client))[1].train) for client in range(2)]
    assert sum(train) == 50
    assert len(read_server(tmp_path / "data" / "server").test_y) == 360
    assert main([*flags, "--only", "app", "--algorithm", "fedmr", "--quorum", "2"]) == 0
    config = run_config(tmp_path)
    assert config["flags"] == "--samples 50 --algorithm fedmr --participants 2"
    assert (config["quorum"], config["nodes"], config["threads"]) == (2, 2, 0)  # other machines have their own threads
    assert main([*flags, "--only", "app", "--participation", "1"]) == 0
    assert run_config(tmp_path)["flags"] == "--samples 50 --participation 1"


@pytest.mark.slow
@pytest.mark.parametrize("source", ["recipe", "file"])
def test_command__clients_models_that_only_a_recipe_evaluates_are_not_evaluated(source, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("samples: 50\neval_client_models_every: 5\n")
    start = ["fedfa"] if source == "recipe" else ["--config", str(tmp_path / "config.yaml")]
    one = ["--algorithm", "fedavg", "--seeds", "0", "--only", "app", "--folder", str(tmp_path)]
    assert main([*start, *one]) == 0
    assert capsys.readouterr().err.count("--eval-client-models-every is 0 here") == 1
    config = parse(shlex.split(run_config(tmp_path)["flags"])).one_run()
    assert config.evaluation.client_models_every == 0
    assert main([*start, *one, "--eval-client-models-every", "5"]) == 2
    assert "--eval-client-models-every needs" in capsys.readouterr().err


def test_command__it_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    assert main(["--folder", str(tmp_path / "new")]) == 2
    assert "pip install 'layer-surgery[flower]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags",
    [
        "--nodes 0",
        "--participants 9",
        "--algorithm fedmr,fedavg",
        "--attack.share 0.5",
        "--compression.kind topk",
        "--eval-client-models-every 1",
    ],
)
def test_command__it_refuses_what_cannot_be_run(flags, tmp_path, capsys):
    assert main(["--folder", str(tmp_path / "new"), "--only", "app", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_command__nodes_on_one_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [local.share_of_cores(n) for n in (1, 3, 4, 9)] == [8, 2, 2, 1]


def test_command__progress_follows_the_run_folder(tmp_path, capsys):
    with local.progress(tmp_path, 4) as look:
        look()
        (tmp_path / "metrics.csv").write_text("round,seconds,accuracy\n1,0.1,0.25\n2,0.1,0.5\n")
        look()
    said = capsys.readouterr().err
    assert "waiting for the nodes" in said
    assert "2/4" in said
    assert "accuracy 50.00%" in said
