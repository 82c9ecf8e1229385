"""The settings of the data, and `python -m fl.data`."""

import json

import pytest
import torch

import fl
from fl import Config
from fl.data.__main__ import main
from fl.settings import DataSettings

CLUSTERS = {"partition": "clusters", "clusters": (2, 5), "cluster_classes": (2, 1)}


@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "iid"},
        {"partition": "iid", "unequal": True},
        {"partition": "shards", "class_share": 0.3, "clients": 10},
        CLUSTERS,
        {"partition": "dirichlet", "alpha": 0.3},
    ],
)
def test_every_partition_reaches_the_federation(settings, capsys):
    """The same clients as `python -m fl.data` shows."""
    config = Config(**settings, rounds=1)
    assert Config.from_yaml(config.to_yaml()) == config
    fed, _ = fl.build(config)
    flags = []
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        flags += ["--unequal"] if value is True else [f"--{name.replace('_', '-')}", text]
    assert main([*flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    tables = [torch.bincount(fed.data.y[split.train], minlength=10).tolist() for split in fed.clients]
    assert shown["counts"] == tables
    assert len(shown["structure"][0]) == config.clients


def test_titles_name_the_partition():
    spreads = [DataSettings(**settings).spread() for settings in (CLUSTERS, {"partition": "iid", "unequal": True}, {})]
    assert spreads == ["clusters2,5", "iid-unequal", "dirichlet0.5"]
    assert Config(**CLUSTERS).title() == "fedmr-digits-cnn-clusters2,5-seed0"


def test_the_command_says_and_draws_who_holds_what(tmp_path, capsys):
    path = tmp_path / "split.png"
    flags = ["--partition", "clusters", "--clusters", "2,5", "--cluster-classes", "2,1", "--plot", str(path)]
    assert main(flags) == 0
    out = capsys.readouterr().out
    assert "digits: 1,437 training and 360 test samples of 1x8x8, 10 classes" in out
    assert "classes a client  3\n" in out
    assert "true clusters     2 on level 1, 5 on level 2\n" in out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition", "random"], "unknown partition 'random': there are iid, dirichlet, shards, clusters, natural"),
        (["--dataset", "mnistt"], "unknown data set 'mnistt'"),
        (["--clients", "0"], "--clients must be 1 or more"),
        (["--alpha", "nan"], "--alpha must be a finite number above 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--partition", "natural"], "owners, such as femnist"),
        (["--plot", "split.txt"], "figures are not written as 'txt'"),
    ],
)
def test_what_cannot_be_shown_is_one_line(flags, message, capsys):
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_femnist_s_writers_are_clients(data_root):
    config = Config(dataset="femnist", partition="natural", clients=60, participants=5, data_root=str(data_root))
    fed, _ = fl.build(config)
    for split in fed.clients:
        assert len(fed.data.owners[split.train].unique()) == 1
        assert len(split.train) >= config.min_samples
