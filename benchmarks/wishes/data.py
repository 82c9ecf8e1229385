"""Wishes about data: what users have, who owns which samples, and what is measured where."""

import csv
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

import fl
from benchmarks.wishes import error_of
from fl.partition.kind import Partition
from fl.partition.split import Parts

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")
CONFIG = fl.Config.of(algorithm="fedavg", partition="natural", rounds=2, lr=0.1, local_epochs=1)
TABLE = (X[:160], Y[:160], X[160:], Y[160:])
"""Four features and two classes: 160 samples to train on, 80 to test."""


def run(data: fl.Dataset, model: object, folder: str = "run", **settings: object) -> dict[str, float]:
    """Return the last row of a run of FedAvg on data of one's own."""
    return fl.simulate(CONFIG.replace(**settings), folder, dataset=data, model=model)["final"]


def table(file: str) -> list[dict[str, str]]:
    """Read a table that a run leaves."""
    return list(csv.DictReader(Path(file).read_text().splitlines()))


def clients() -> list[dict[str, str]]:
    """Return the last round of a run's table of clients."""
    rows = table("run/clients.csv")
    return [row for row in rows if row["round"] == rows[-1]["round"]]


def draw_folders(*folders: str) -> None:
    """Write a bright picture into each folder's train/ and test/, and one more for training."""
    for number, folder in enumerate(folders):
        for part, names in (("train", "ab"), ("test", "c")):
            place = Path(part, folder)
            place.mkdir(parents=True)
            for name in names:
                Image.new("RGB", (8, 8), (40 * number,) * 3).save(place / f"{name}.png")


def small_clients():
    data = fl.Dataset.from_arrays(*TABLE, owners=np.repeat([0, 1, 2, 3], [1, 2, 11, 146]))
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    config = CONFIG.replace(clients=4, min_samples=1)
    final = fl.simulate(config, "run", dataset=data, model=net)["final"]
    assert [len(client.train) for client in fl.build(config, data, net)[0].clients] == [1, 2, 11, 146]
    assert np.isfinite(final["loss"])


def many_clients():
    y = RNG.integers(0, 100, 50_000)
    data = fl.Dataset.from_arrays(np.zeros((50_000, 1)), y, np.zeros((100, 1)), np.arange(100))
    config = fl.Config.of(algorithm="fedavg", partition="dirichlet", alpha=0.3, clients=500)
    fed, _ = fl.build(config, dataset=data, model=nn.Linear(1, 100))
    rows = torch.cat([client.train for client in fed.clients])
    assert len(fed.clients) == 500
    assert len(rows.unique()) == len(rows) == 50_000


def folders_of_classes():
    draw_folders("oslo/cat", "oslo/dog", "oslo/fox", "lima/dog", "lima/fox")
    data = fl.data.load("images:.", None)
    mixed = ConcatDataset([ImageFolder(f"train/{site}", ToTensor()) for site in ("oslo", "lima")])
    assert type(error_of(lambda: fl.Dataset.from_torch(mixed, mixed))) is fl.FLError
    assert [data.y[data.owners == site].unique().tolist() for site in (0, 1)] == [[1, 2], [0, 1, 2]]


def time_series():
    sites = np.repeat(["bern", "lima"], 60)
    series = np.concatenate([np.sin(np.arange(66) / speed) for speed in (2, 3)]).reshape(2, 66)
    x = np.concatenate([np.lib.stride_tricks.sliding_window_view(row, 6)[:60] for row in series])[..., None]
    y, late = series[:, 6:].reshape(-1, 1), np.arange(120) % 60 >= 50
    parts = (x[~late], y[~late], x[late], y[late], sites[~late])
    data = fl.Dataset.from_arrays(*parts, test_owners=sites[late], task="regression")
    final = run(data, Forecast, clients=2)
    with torch.no_grad():
        error = (fl.load_model("run", model=Forecast)(torch.tensor(x[late]).float()) - torch.tensor(y[late])).abs()
    assert abs(final["mae"] - error.mean().item()) < 1e-5
    assert abs(final["test_mae_lima"] - error[10:].mean().item()) < 1e-5


class Forecast(nn.Module):
    """An LSTM whose last state gives the next number."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next number."""
        return self.last(self.cell(x)[0][:, -1])


def segmentation():
    y = RNG.integers(0, 3, size=(40, 8, 8))
    x = (y[:, None] + RNG.normal(scale=0.2, size=(40, 1, 8, 8))).astype("float32")
    data = fl.Dataset.from_arrays(x[:30], y[:30], x[30:], y[30:], task="segmentation")
    net = nn.Sequential(nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, 3, 1))
    final = run(data, net, clients=3, partition="iid", rounds=8, batch_size=2)
    right = fl.load_model("run", model=net)(torch.tensor(x[30:])).argmax(1) == torch.tensor(y[30:])
    assert abs(final["accuracy"] - right.float().mean().item()) < 1e-6
    assert final["accuracy"] > 0.6


class GraphNet(nn.Module):
    """Two rounds of messages and the mean over the nodes that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = edges @ (edges @ self.first(x)).relu()
        return self.last((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def graphs():
    sizes, y = RNG.integers(3, 9, size=120), np.arange(120) % 2  # dense graphs, and graphs without an edge but loops
    edges = [np.ones((n, n)) if k else np.eye(n) for n, k in zip(sizes, y)]
    x = {**fl.data.pad([np.ones((n, 1)) for n in sizes]), "edges": fl.data.pad(edges)["x"]}
    half = [{name: part[rows] for name, part in x.items()} for rows in (slice(80), slice(80, 120))]
    data = fl.Dataset.from_arrays(half[0], y[:80], half[1], y[80:])
    final = run(data, GraphNet, clients=4, partition="iid", rounds=8, local_epochs=4, optimizer="adam", lr=0.02)
    assert x["edges"].shape == (120, sizes.max(), sizes.max())
    assert final["accuracy"] > 0.9


def own_test_rows():
    sites = (np.repeat([0, 1, 2], [80, 50, 30]), np.repeat([0, 1, 2], [40, 30, 10]))
    data = fl.Dataset.from_arrays(*TABLE, owners=sites[0], test_owners=sites[1])
    fed, _ = fl.build(
        fl.Config.of(algorithm="ditto", partition="natural", clients=3), dataset=data, model=nn.Linear(4, 2)
    )
    rows = [set(map(tuple, X[160:][sites[1] == k].tolist())) for k in range(3)]
    for k, client in enumerate(fed.clients):
        assert set(map(tuple, fed.data.x[client.test].tolist())) == rows[k]
        assert len(client.train) == (80, 50, 30)[k]


def one_class_metrics():
    parts = (X, Y, X, Y, np.where(Y, np.arange(240) % 2, 2))
    net = nn.Linear(4, 2)
    net.weight.data = torch.tensor([[-1.0, 0, 0, 0], [1, 0, 0, 0]])
    net.bias.data.zero_()
    names = ("roc_auc", "recall", "precision")
    more = {"local_test": 0.25, "metrics": names, "lr": 1e-9, "clients": 3}
    final = run(fl.Dataset.from_arrays(*parts), net, **more)
    assert [row["test_recall"] for row in clients()] == ["1.0", "1.0", "nan"]
    assert final["local_test_recall"] == final["local_test_precision"] == 1
    assert np.isnan(final["local_test_roc_auc"])


def huge_population():
    owners = np.repeat(np.arange(10_000), 2)
    data = fl.Dataset.from_arrays(X[owners % 240], Y[owners % 240], *TABLE[2:], owners=owners)
    fed, algorithm = fl.build(CONFIG.replace(clients=10_000, participants=50, min_samples=1), data, nn.Linear(4, 2))
    server, trained = algorithm.round(algorithm.init(), fed.sample(fl.Rng(0, 1)), fl.Rng(0, 1))
    assert (trained.sizes, len(fed.clients)) == ((2,) * 50, 10_000)
    assert all(tensor.isfinite().all() for tensor in server["global"].values())


def leave_one_out():
    data = fl.Dataset.from_arrays(
        *TABLE, owners=np.repeat(["a", "b", "c", "d"], 40), test_owners=np.repeat([*"abcd"], 20)
    )
    settings = {"clients": 3, "test_sites": ("c",), "local_valid": 0.2}
    final = run(data, nn.Linear(4, 2), **settings)
    held = np.concatenate([X[80:120], X[200:220]]), np.concatenate([Y[80:120], Y[200:220]])
    right = fl.load_model("run", model=nn.Linear(4, 2))(torch.tensor(held[0])).argmax(1).numpy() == held[1]
    assert [row["owner"] for row in clients()] == ["a", "b", "d"]
    assert abs(final["test_accuracy_c"] - right.mean()) < 1e-6


def text_labels():
    from datasets import Dataset

    names = [("dog", "cat")[k] for k in Y]
    table = Dataset.from_dict({"image": list(X[:, :, None, None]), "label": names}).class_encode_column("label")
    halves = [table.select(range(160)), table.select(range(160, 240))]
    data = fl.Dataset.from_huggingface(*halves)
    assert type(error_of(lambda: fl.Dataset.from_arrays(*TABLE[:2], X[160:], ["elk"] * 80))) is fl.FLError
    assert data.y.tolist() == [("cat", "dog").index(name) for name in names[:160]]


def by_feature(task, options=None):
    """Client k holds the k-th quarter of the samples by their first feature."""
    return Partition(Parts.of_owners(X[:160, 0].argsort().argsort() // 40, task.clients), torch.arange(4)[None])


def own_partition():
    config, data = fl.Config.of(algorithm="fedavg", clients=4, partition=by_feature), fl.Dataset.from_arrays(*TABLE)
    fed, _ = fl.build(config, dataset=data, model=nn.Linear(4, 2))
    config = config.replace(partition="dirichlet_sizes", alpha=0.5, min_samples=1)
    sizes = [len(client.train) for client in fl.build(config, dataset=data, model=nn.Linear(4, 2))[0].clients]
    assert sum(sizes) == 160
    assert max(sizes) > 2 * min(sizes)
    for k, client in enumerate(fed.clients):
        assert set(client.train.tolist()) == set(X[:160, 0].argsort()[40 * k : 40 * k + 40].tolist())


def named_sites():
    names = np.repeat(["oslo", "athens", "zurich", "lima"], 40)
    data = fl.Dataset.from_arrays(*TABLE, owners=names, test_owners=np.repeat(["oslo", "athens", "zurich", "lima"], 20))
    final = run(data, nn.Linear(4, 2), clients=4)
    scores = {row["owner"]: float(row["test_accuracy"]) for row in clients()}
    assert [*scores] == ["athens", "lima", "oslo", "zurich"]
    right = fl.load_model("run", model=nn.Linear(4, 2))(torch.tensor(X[160:180])).argmax(1).numpy() == Y[160:180]
    assert abs(final["test_accuracy_oslo"] - right.mean()) < 1e-6


def volumes():
    x = (4 * Y[:40, None, None, None, None] + RNG.random((40, 1, 4, 6, 6))).astype("float32")
    data = fl.Dataset.from_arrays(x[:30], Y[:30], x[30:], Y[30:40])
    net = nn.Sequential(nn.Conv3d(1, 4, 3), nn.Flatten(), nn.Linear(128, 2))
    final = run(data, net, partition="iid", clients=3, rounds=8, lr=0.01)
    right = fl.load_model("run", model=net)(data.test_x).argmax(1).numpy() == Y[30:40]
    assert abs(final["accuracy"] - right.mean()) < 1e-6
    assert final["accuracy"] > 0.5


def unknown_labels():
    y = np.stack([Y, 1 - Y, Y], 1)
    y[RNG.random(y.shape) < 0.3] = -100
    y[:, 0] = Y
    data = fl.Dataset.from_arrays(X[:160], y[:160], X[160:], y[160:], task="segmentation")
    net = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)))  # two logits for each of three labels
    final = run(data, net, partition="iid", clients=3)
    found = fl.load_model("run", model=net)(torch.tensor(X[160:])).argmax(1).numpy()
    assert abs(final["accuracy"] - (found == y[160:])[y[160:] >= 0].mean()) < 1e-6


def kinds_of_arrays():
    x, y = RNG.integers(-3, 4, size=(240, 5)).astype("float32"), X[:, :1]
    forms = (
        x,
        np.asfortranarray(x),
        x.astype(">f8"),
        x.astype("float16"),
        np.flip(np.flip(x).copy()),
        x[:, :, None][..., 0],
    )
    losses, net = [], nn.Linear(5, 1)
    for number, one in enumerate(forms):
        data = fl.Dataset.from_arrays(one[:160], y[:160], one[160:], y[160:, 0][:, None], task="regression")
        losses.append(run(data, net, f"run{number}", partition="iid", clients=4)["loss"])
    assert len(set(losses)) == 1
    assert type(error_of(lambda: fl.Dataset.from_arrays(np.ma.masked_less(X, 0), Y, X, Y))) is fl.FLError
