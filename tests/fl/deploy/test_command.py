"""`layer-surgery deploy`, as far as it goes without Flower."""

import tomllib

import pytest

from fl.deploy import local
from fl.deploy.__main__ import main
from fl.deploy.folders import node_folder, read_node, read_server


def test_it_writes_what_other_machines_need(tmp_path):
    flags = ["--nodes", "2", "--folder", str(tmp_path), "--samples", "50"]
    assert main([*flags, "--only", "data"]) == 0
    train = [len(read_node(node_folder(tmp_path / "data", client))[1].train) for client in range(2)]
    assert sum(train) == 50
    assert len(read_server(tmp_path / "data" / "server").test_y) == 360
    assert main([*flags, "--only", "app", "--algorithm", "fedmr", "--quorum", "2"]) == 0
    config = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config["flags"] == "--samples 50 --algorithm fedmr --participants 2"
    assert (config["quorum"], config["nodes"]) == (2, 2)


def test_it_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    assert main(["--folder", str(tmp_path / "new")]) == 2
    assert "pip install 'layer-surgery[flower]'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("flags", [["--nodes", "0"], ["--participants", "9"], ["--algorithm", "fedmr,fedavg"]])
def test_it_refuses_what_cannot_be_run(flags, tmp_path, capsys):
    assert main(["--folder", str(tmp_path / "new"), "--only", "app", *flags]) == 2
    assert capsys.readouterr().err.startswith("error: ")
