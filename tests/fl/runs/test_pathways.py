"""A trained FeMAM that is saved, loaded and used, by its clients and by new ones."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from fl_flags import TINY
from refusals import fl_refused

import fl
from fl import run as cli
from fl.algorithms import ALGORITHMS
from fl.runs import checkpoint
from fl.runs.assembly import build

FLAGS = ["--algorithm", "femam", *TINY, "--local-test", "0.2", "--rounds", "6", "--participants", "4"]
FLAGS += ["--femam.levels", "global,2,2,personal", "--femam.level-rounds", "2,1,1", "--lr", "0.2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run folder, federation, algorithm, server) of a FeMAM on digits."""
    folder = tmp_path_factory.mktemp("runs")
    flags = [*FLAGS, "--femam.min-gain", "-1", "--femam.combine", "mean"]  # so that nobody loses all levels but one
    assert cli.main([*flags, "--out", str(folder), "--name", "run"]) == 0
    folder /= "run"
    config = fl.Config.read(folder)
    fed, algorithm = build(config)
    server, _ = checkpoint.restore(folder, algorithm.init(), checkpoint.read_parts(folder)[0])
    return folder, fed, algorithm, server


@pytest.mark.slow
def test_pathways__predictions_are_those_of_the_run(trained, tmp_path):
    folder, fed, algorithm, server = trained
    loaded = fl.Pathways.load(folder)
    images = fed.data.test_x[:7]
    x = fed.data.normalise(images)
    loaded.join(x, fed.data.test_y[:7])
    loaded.save(tmp_path / "a.safetensors")
    again = fl.Pathways.load(tmp_path / "a.safetensors")
    assert again.clients == loaded.clients == len(fed.clients) + 1
    for client in range(len(fed.clients)):
        expected = algorithm.predict(server, images, client)
        torch.testing.assert_close(loaded.predict(client, x), expected)
        assert loaded.pathway(client) == server["structure"]["pathways"][:, client].tolist()
    for client in range(loaded.clients):
        assert again.pathway(client) == loaded.pathway(client)
        assert torch.equal(again.predict(client, x), loaded.predict(client, x))
    with fl_refused("argument", "client 5"):
        again.predict(5, x)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1e9])
def test_pathways__a_new_client_takes_what_lowers_its_loss_most(trained, mean, epsilon):
    """Level by level by hand, for several small sets of samples."""
    folder, fed, _, server = trained
    loaded = fl.Pathways.load(folder)
    loaded.mean = mean
    pathways, taken = server["structure"]["pathways"], set()
    for images, y in zip(fed.data.test_x[:60].split(12), fed.data.test_y[:60].split(12)):
        kept, expected, best = [], [], None
        for number in (1, 2, 3):
            models, mapping = server[f"level{number}"], pathways[number - 1]
            each = {k: fed.predict({n: t[k] for n, t in models.items()}, images) for k in {*mapping.tolist()} - {-1}}
            judged = {}
            for k, logits in sorted(each.items()):
                whole = sum([*kept, logits]) / (len(kept) + 1 if mean else 1)
                judged[k] = F.cross_entropy(whole.double(), y).item()
            k = min(judged, key=judged.get)
            if number > 1 and not best - judged[k] > epsilon:
                expected.append(-1)
                continue
            best = judged[k]
            expected.append(k)
            kept.append(each[k])
        client = loaded.join(fed.data.normalise(images), y, epsilon)
        assert loaded.pathway(client) == [*expected, -1]  # nobody gets another's personal model
        taken.add(tuple(expected))
    assert loaded.clients == len(fed.clients) + 5
    assert epsilon < 1e9 or taken == {(0, -1, -1)}


def test_pathways__what_cannot_be_used_is_refused(trained, tmp_path, monkeypatch):
    folder, fed, _, _ = trained
    loaded = fl.Pathways.load(folder)
    x = fed.data.normalise(fed.data.test_x[:3])
    y = fed.data.test_y[:3]
    for samples, labels, said in (
        (x, y[:2], "3 samples, 2 labels"),
        (x[:0], y[:0], "0 samples"),
        (fed.data.test_x[:3], y, "the images are torch.uint8"),
        (x, y + 10, "the models know 0 to 9"),
    ):
        with fl_refused("data", said):
            loaded.join(samples, labels)
    loaded.kinds = ("personal",)
    with fl_refused("unsupported"):
        loaded.join(x, y)
    with fl_refused("file"):
        fl.Pathways.load(folder / checkpoint.FILE)
    with fl_refused("file", "none.safetensors"):
        fl.Pathways.load(tmp_path / "none.safetensors")
    assert cli.main([*TINY, "--algorithm", "fedavg", "--out", str(tmp_path), "--name", "other"]) == 0
    with fl_refused("unsupported", "fedavg", "femam"):
        fl.Pathways.load(tmp_path / "other")
    monkeypatch.setitem(ALGORITHMS, "femam", dataclasses.replace(ALGORITHMS["femam"], pathways=None))
    with fl_refused("unsupported", "femam"):  # as its METHOD says
        fl.Pathways.load(folder)


def test_pathways__the_run_tells_the_structure(trained):
    folder, _, _, server = trained
    told = json.loads((folder / "structure.json").read_text())
    assert told["found"] == server["structure"]["pathways"].tolist()
    assert (told["levels"], told["trained"]) == (["global", "2", "2", "personal"], 4)
    assert (folder / "structure.png").exists()
