"""A trained FeMAM that is saved, loaded and used, by its clients and by new ones."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from fl_flags import TINY

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


def test_predictions_are_those_of_the_run(trained, tmp_path):
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
    with pytest.raises(fl.FLError, match="there are clients 0 to 4"):
        again.predict(5, x)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1e9])
def test_a_new_client_takes_what_lowers_its_loss_most(trained, mean, epsilon):
    """Level by level by hand, for several small sets of samples."""
    folder, fed, _, server = trained
    loaded = fl.Pathways.load(folder)
    loaded.mean = mean
    pathways, taken = server["structure"]["pathways"], set()
    for first in range(0, 60, 12):
        x, y = fed.data.normalise(fed.data.test_x[first : first + 12]), fed.data.test_y[first : first + 12]
        kept, expected = [], []
        best = None
        for number in (1, 2, 3):
            models, mapping = server[f"level{number}"], pathways[number - 1]
            judged = {}
            for k in sorted(set(mapping[mapping >= 0].tolist())):
                logits = sum(
                    [*kept, fed.predict({n: t[k] for n, t in models.items()}, fed.data.test_x[first : first + 12])]
                )
                logits = logits / (len(kept) + 1) if mean else logits
                judged[k] = F.cross_entropy(logits.double(), y).item()
            k = min(judged, key=judged.get)
            if number > 1 and not best - judged[k] > epsilon:
                expected.append(-1)
                continue
            best = judged[k]
            expected.append(k)
            kept.append(fed.predict({n: t[k] for n, t in models.items()}, fed.data.test_x[first : first + 12]))
        client = loaded.join(x, y, epsilon)
        assert loaded.pathway(client) == [*expected, -1]  # nobody gets another's personal model
        taken.add(tuple(expected))
    assert loaded.clients == len(fed.clients) + 5
    assert epsilon < 1e9 or taken == {(0, -1, -1)}


def test_what_cannot_be_used_is_refused(trained, tmp_path, monkeypatch):
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
        with pytest.raises(fl.FLError, match=said):
            loaded.join(samples, labels)
    loaded.kinds = ("personal",)
    with pytest.raises(fl.FLError, match="all models are personal"):
        loaded.join(x, y)
    with pytest.raises(fl.FLError, match="is of format checkpoint-3, and this version reads pathways-2"):
        fl.Pathways.load(folder / checkpoint.FILE)
    with pytest.raises(fl.FLError, match=r"has no none\.safetensors"):
        fl.Pathways.load(tmp_path / "none.safetensors")
    assert cli.main([*TINY, "--algorithm", "fedavg", "--out", str(tmp_path), "--name", "other"]) == 0
    with pytest.raises(fl.FLError, match="a run of fedavg, whose clients have no pathways: there are femam"):
        fl.Pathways.load(tmp_path / "other")
    monkeypatch.setitem(ALGORITHMS, "femam", dataclasses.replace(ALGORITHMS["femam"], pathways=None))
    with pytest.raises(fl.FLError, match="a run of femam, whose clients have no pathways"):  # as its METHOD says
        fl.Pathways.load(folder)


def test_the_run_tells_the_structure(trained):
    folder, _, _, server = trained
    told = json.loads((folder / "structure.json").read_text())
    assert told["found"] == server["structure"]["pathways"].tolist()
    assert (told["levels"], told["trained"]) == (["global", "2", "2", "personal"], 4)
    assert (folder / "structure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_text_adds_up_too(tmp_path):
    flags = ["--dataset", "pydoc", "--partition", "iid", "--text.tokens", "byte", "--model", "transformer"]
    flags += ["--samples", "120", "--clients", "3", "--participants", "3", "--rounds", "3", "--local-epochs", "1"]
    flags += ["--width", "0.05", "--depth", "1", "--local-valid", "0.2", "--algorithm", "femam", "--batch-size", "20"]
    flags += [
        "--femam.levels",
        "global,2,personal",
        "--femam.level-rounds",
        "1,1",
    ]
    assert cli.main([*flags, "--out", str(tmp_path), "--name", "text"]) == 0
    loaded = fl.Pathways.load(tmp_path / "text")
    tokens = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    client = loaded.join(tokens, tokens)
    assert loaded.predict(client, tokens).shape[:2] == (4, 64)
