"""Federated jobs that other tools do, too: the lines that a user writes, the seconds, and what comes of it.

    python benchmarks/jobs.py --pfllib FOLDER    # all sides in turn; stores results, writes sentences into pages

FOLDER is a checkout of github.com/TsingZ0/PFLlib. The Python that runs this needs the extra `flower`, and what PFLlib
imports: h5py, cvxpy, calmsize.

Ten clients, and two that come after training, own 100 images of Fashion-MNIST each to train on and 50 to be tested
on, in a mixture of classes of their own. All sides train PFLlib's CNN by SGD without momentum, two epochs in each of
five rounds, with one thread; of Flower that is one Ray actor. Seconds are the processor's, which others on the machine
change least, of a side's process and all that it starts: imports, Ray and the files that PFLlib reads count. Accuracy
is that of all test images of clients. Lines are those of a side's functions; the images and the network, which a user
has, do not count.

PFLlib scores a round before the next one, and trains once more after the last score. Its FedProto predicts by the
nearest prototype, ours by the model's logits.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import fl
from benchmarks.others import write_sentences
from benchmarks.report import write
from benchmarks.wishes import count_lines

Site: TypeAlias = dict[str, np.ndarray]
"""What a client owns: x, y, test_x and test_y."""
OUT = Path(__file__).parent / "results"


def draw_sites() -> list[Site]:
    """Return the images and labels of twelve clients."""
    data = fl.Config.of(dataset="fashion-mnist").load()
    x, y, free = data.normalise(data.x).numpy(), data.y.numpy(), np.ones(len(data.y), bool)
    rng, sites = np.random.default_rng(0), []
    for _ in range(12):
        chances = rng.dirichlet(np.full(10, 0.5))[y] * free
        rows = rng.choice(len(y), 150, replace=False, p=chances / chances.sum())
        free[rows] = False
        sites.append({"x": x[rows[:100]], "y": y[rows[:100]], "test_x": x[rows[100:]], "test_y": y[rows[100:]]})
    return sites


def cnn() -> nn.Module:
    """Return a CNN of the shape of PFLlib's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def table(sites: list[Site]) -> fl.Dataset:
    """Make a data set of what sites own."""
    parts = [np.concatenate([site[name] for site in sites]) for name in ("x", "y", "test_x", "test_y")]
    owners = [np.repeat(range(len(sites)), count) for count in (100, 50)]
    return fl.Dataset.from_arrays(*parts, owners[0], test_owners=owners[1])


def train(sites: list[Site], method: str) -> float:
    """Train a method of ours on the first ten sites."""
    settings = {"clients": 10, "participants": 10, "rounds": 5, "local_epochs": 2, "lr": 0.05, "momentum": 0.0}
    config = fl.Config.of(algorithm=method, partition="natural", batch_size=10, **settings)
    final = fl.simulate(config, "run", dataset=table(sites[:10]), model=cnn())["final"]
    return final["local_test_accuracy_by_samples"]


def own_rows_ours(sites: list[Site]) -> float:
    """Test clients on their own rows after each round of FedAvg."""
    return train(sites, "fedavg")


def own_rows_flower(sites: list[Site]) -> float:
    """Test clients on their own rows after each round of FedAvg."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client_app, server_app, scores = ClientApp(), ServerApp(), []

    def load(message, context):
        torch.set_num_threads(1)
        model, site = cnn(), sites[context.node_config["partition-id"]]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return model, {name: torch.from_numpy(part) for name, part in site.items()}

    @client_app.train()
    def train(message, context):
        model, site = load(message, context)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(2):
            for batch in torch.randperm(100).split(10):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(site["x"][batch]), site["y"][batch]).backward()
                optimizer.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 100})}
        return Message(RecordDict(content), reply_to=message)

    @client_app.evaluate()
    def evaluate(message, context):
        model, site = load(message, context)
        with torch.no_grad():
            right = (model(site["test_x"]).argmax(1) == site["test_y"]).float().mean().item()
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": 50})}), reply_to=message)

    @server_app.main()
    def main(grid, context):
        strategy = FedAvg(min_train_nodes=10, min_evaluate_nodes=10, min_available_nodes=10)
        result = strategy.start(grid, ArrayRecord(cnn().state_dict()), num_rounds=5)
        scores.append(result.evaluate_metrics_clientapp[5]["accuracy"])

    actors = {"init_args": {"num_cpus": 1, "include_dashboard": False}, "client_resources": {"num_cpus": 1}}
    run_simulation(server_app, client_app, num_supernodes=10, backend_config=actors)
    return scores[0]


def pfllib(sites: list[Site], options: str) -> float:
    """Write the clients' files, run PFLlib's command, and read the last accuracy that it prints."""
    for part, x, y in (("train", "x", "y"), ("test", "test_x", "test_y")):
        folder = Path("dataset/FashionMNIST-sites", part)
        folder.mkdir(parents=True)
        for number, site in enumerate(sites):
            np.savez_compressed(folder / f"{number}.npz", data={"x": site[x], "y": site[y]})
    command = f"main.py -dev cpu -data FashionMNIST-sites -nc 10 -lr 0.05 -ls 2 {options}".split()
    done = subprocess.run([sys.executable, *command], cwd="system", capture_output=True, text=True, check=True)
    return float(re.findall(r"Averaged Test Accuracy: ([\d.]+)", done.stdout)[-1])


def own_rows_pfllib(sites: list[Site]) -> float:
    """Test clients on their own rows after each round of FedAvg."""
    return pfllib(sites, "-algo FedAvg -gr 5")


def fedproto_ours(sites: list[Site]) -> float:
    """Train FedProto, and test each client's model on its own rows after each round."""
    return train(sites, "fedproto")


def fedproto_pfllib(sites: list[Site]) -> float:
    """Train FedProto, and test each client's model on its own rows after each round."""
    return pfllib(sites, "-algo FedProto -gr 5 -lam 1")


def new_clients_ours(sites: list[Site]) -> float:
    """Train FedAvg, then fine-tune its model on each of two new clients, and test it there."""
    train(sites, "fedavg")
    rows = fl.personalize("run", table(sites[10:]), epochs=5, model=cnn()).rows
    return sum(row["accuracy_after"] for row in rows) / 2


def new_clients_pfllib(sites: list[Site]) -> float:
    """Train FedAvg, then fine-tune its model on each of two new clients, and test it there."""
    return pfllib(sites, "-algo FedAvg -gr 4 -nnc 2 -ften 5")


JOBS: dict[str, dict[str, list[Callable]]] = {
    "own_rows": {
        "ours": [own_rows_ours, train, table],
        "Flower": [own_rows_flower],
        "PFLlib": [own_rows_pfllib, pfllib],
    },
    "fedproto": {"ours": [fedproto_ours, train, table], "PFLlib": [fedproto_pfllib, pfllib]},
    "new_clients": {"ours": [new_clients_ours, train, table], "PFLlib": [new_clients_pfllib, pfllib]},
}
"""By job and side the function that does it, and those that it calls: all are lines that a user writes."""


def measure(job: str, side: str, sites: Path, checkout: Path) -> tuple[float, float]:
    """Run a side in a process and a folder of its own; return its processor seconds and its accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkout / "system", Path(folder, "system"))
        command = [sys.executable, __file__, job, side, "--sites", str(sites)]
        quiet = {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        with subprocess.Popen(
            command, cwd=folder, env=os.environ | quiet, text=True, stdout=subprocess.PIPE, stderr=sys.stderr
        ) as process:
            used: dict[int, float] = {}
            while process.poll() is None:
                used |= processor_seconds(process.pid)
                time.sleep(0.5)
            printed = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"{job}, {side} failed")
    return sum(used.values()), float(printed.split()[-1])


def processor_seconds(root: int) -> dict[int, float]:
    """Return by number the seconds that a process and all that it has started have used the processor."""
    parents, seconds = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
            seconds[int(file.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    inside, more = {root}, {root}
    while more := {number for number, parent in parents.items() if parent in more} - inside:
        inside |= more
    return {number: seconds[number] for number in inside if number in seconds}


SENTENCES = {
    "own_rows": (
        "docs/guides/sites.md",
        "Ten clients with 100 images of Fashion-MNIST each, tested on 50 of their own after each of five rounds of "
        "FedAvg, are {ours.lines} lines here, {Flower.lines} with Flower {flwr} and {PFLlib.lines} with PFLlib; their "
        "programs compute {Flower.ratio:.1f} ({Flower.least:.1f} to {Flower.most:.1f}, with Ray) and "
        "{PFLlib.ratio:.1f} ({PFLlib.least:.1f} to {PFLlib.most:.1f}) times as long as ours. The "
        "accuracies are {ours.accuracy:.0%}, {Flower.accuracy:.0%} and {PFLlib.accuracy:.0%}.",
    ),
    "fedproto": (
        "docs/guides/model.md",
        "An example with FedProto: one architecture, five rounds, ten clients with 100 images of Fashion-MNIST each. "
        "It takes {ours.lines} lines here and {PFLlib.lines} with PFLlib, which computes {PFLlib.ratio:.1f} "
        "({PFLlib.least:.1f} to {PFLlib.most:.1f}) times as long. Here clients predict by their "
        "logits (accuracy {ours.accuracy:.0%}), there by the nearest prototype "
        "({PFLlib.accuracy:.0%}).",
    ),
    "new_clients": (
        "docs/guides/model.md",
        "An example: five rounds of FedAvg on ten clients with 100 images of Fashion-MNIST each, then five epochs of "
        "fine-tuning on each of two new clients. It takes {ours.lines} lines here and {PFLlib.lines} with PFLlib, "
        "which computes {PFLlib.ratio:.1f} ({PFLlib.least:.1f} to {PFLlib.most:.1f}) times as long. The new clients' "
        "accuracies are {ours.accuracy:.0%} and {PFLlib.accuracy:.0%}.",
    ),
}


def sentences(stored: dict) -> dict[str, tuple[str, str]]:
    """Return by job the page, and the sentence with the stored numbers."""
    sides = {job: {side: SimpleNamespace(**row) for side, row in rows.items()} for job, rows in stored["jobs"].items()}
    return {job: (page, text.format(**sides[job], **stored["versions"])) for job, (page, text) in SENTENCES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", choices=[*JOBS])
    parser.add_argument("side", nargs="?", choices=["ours", "Flower", "PFLlib"])
    parser.add_argument("--pfllib", type=Path, metavar="FOLDER")
    parser.add_argument("--sites", type=Path, help="for one side: the file with the clients' images")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.sites:
        sites = torch.load(options.sites, weights_only=False)
        print(JOBS[options.job][options.side][0](sites))
        return
    jobs: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sites.pt")
        torch.save(draw_sites(), file)
        for job, sides in JOBS.items():
            taken: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for _ in range(options.repeats):
                for side in sides:
                    taken[side].append(measure(job, side, file, options.pfllib.resolve()))
                    print(job, side, *taken[side][-1], flush=True)
            jobs[job] = {}
            for side, functions in sides.items():
                seconds, accuracies = (list(column) for column in zip(*taken[side]))
                ratios = [own / first for own, (first, _) in zip(seconds, taken["ours"])]
                row = {"lines": sum(map(count_lines, functions)), "accuracy": statistics.mean(accuracies)}
                spread = {"least": min(ratios), "ratio": statistics.median(ratios), "most": max(ratios)}
                jobs[job][side] = row | spread | {"seconds": seconds}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "flwr")}
    head = subprocess.run(
        ["git", "-C", options.pfllib, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    stored = {"versions": versions | {"pfllib": head.stdout.strip()[:8]}, "jobs": jobs}
    write(stored, options.out, "jobs")
    if options.out == OUT:
        write_sentences(sentences(stored), "jobs.py")


if __name__ == "__main__":
    main()
