"""What the runs say that were stored before there were cells: in other settings than the papers'."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from fl.analysis.structure import Structure, rand_index
from fl.papers.measures import measure
from fl.papers.stored import ROOT
from fl.papers.verdict import NOT, ORDERING, REPRODUCED, SLACK
from fl.runs import metrics

RESULTS = ROOT / "benchmarks/results"
Said = tuple[str, str]
"""(verdict, the measured reason)."""


def _rows(file: Path, name: str) -> list[metrics.Row]:
    """Those that a measure is taken of: evaluated rounds, but all of them for what every round measures."""
    return [row for row in metrics.read(file) if "accuracy" in row or name == "cosine_rise"]


def _means(folder: Path, name: str) -> dict[str, float]:
    """From each method with a METHOD-seedN.csv to the mean of a measure over its seeds."""
    found: dict[str, list[float]] = {}
    for file in sorted(folder.glob("*-seed*.csv")):
        found.setdefault(file.stem.rsplit("-seed", 1)[0], []).append(measure(name, _rows(file, name)))
    return {method: fmean(values) for method, values in found.items()}


def _best(means: dict[str, float], own: str) -> tuple[str, float]:
    return max(((name, mean) for name, mean in means.items() if name != own), key=lambda pair: pair[1])


def _fedmr(name: str) -> dict[str, dict[str, float]]:
    """A measure of FedMR and its rivals on Fashion-MNIST, by setting."""
    at = RESULTS / "fashion-mnist-rivals"
    found = {f"Dirichlet {spread}, momentum 0.9": _means(at / f"dirichlet{spread}", name) for spread in ("0.5", "0.1")}
    files = {method: at / f"momentum/{method}-momentum0.5.csv" for method in ("fedmr", "fedavg")}
    found["Dirichlet 0.1, momentum 0.5"] = {method: measure(name, _rows(file, name)) for method, file in files.items()}
    return found


def fedmr_accuracy() -> Said:
    """FedMR beside its rivals: late accuracy."""
    said, found = [], _fedmr("late")
    for where, means in found.items():
        name, best = _best(means, "fedmr")
        fedavg = f"FedAvg {means['fedavg']:.1f}%, " if name != "fedavg" else ""
        said.append(f"{where}: FedMR {means['fedmr']:.1f}%, {fedavg}best other {name} {best:.1f}%")
    ahead = all(means["fedmr"] > _best(means, "fedmr")[1] for means in found.values())
    what = "Fashion-MNIST, LeNet, 100 rounds, means of the last ten evaluations"
    return ORDERING if ahead else NOT, f"{what}. {'; '.join(said)}"


def fedmr_direction() -> Said:
    """Whether the cosine of FedMR's models rises again."""
    rises = {where: means["fedmr"] for where, means in _fedmr("cosine_rise").items()}
    said = "; ".join(f"{rise:.3f} ({where})" for where, rise in rises.items())
    return (
        ORDERING if min(rises.values()) > SLACK else NOT,
        f"Fashion-MNIST, LeNet, 100 rounds: from its lowest tenth to the last the models' cosine rises by {said}",
    )


def femam_accuracy() -> Said:
    """FeMAM beside its rivals on Fashion-MNIST: accuracy on clients' own data, where they are not IID."""
    kinds = {"clusters": "clusters", "levels": "two levels of clusters", "dirichlet": "Dirichlet 0.1"}
    said, ahead = [], True
    for folder, title in kinds.items():
        means = _means(RESULTS / "femam" / folder, "own")
        name, best = _best(means, "femam")
        ahead &= means["femam"] > best
        said.append(f"{title}: FeMAM {means['femam']:.1f}%, best other {name} {best:.1f}%")
    what = "Fashion-MNIST, half a LeNet, 100 rounds, on clients' own data in the round that validation chooses"
    return ORDERING if ahead else NOT, f"{what}. {'; '.join(said)}"


def femam_structure() -> Said:
    """Whether FeMAM's second level finds five planted clusters."""
    indices = []
    for file in sorted((RESULTS / "femam/clusters").glob("femam-seed*-structure.json")):
        found = Structure(**json.loads(file.read_text()))
        indices.append(rand_index(found.found[1], found.truth[0]))
    text = ", ".join(f"{index:.2f}" for index in indices)
    return (
        ORDERING if min(indices) > 0.99 else NOT,
        f"Fashion-MNIST in five clusters: adjusted Rand index of the second level's clusters {text} (seeds 0, 1)",
    )


_PAIRS = {"depth": "flexifed", "width": "heterofl", "both": "nefl"}


def _fedfa_rows() -> list[dict[str, str]]:
    with open(RESULTS / "fedfa/runs.csv", newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if row["scale"] in ("", "norm") and row["defence"] == "mean" and row["data"] != "pydoc transformer"
        ]


def _by_seed(rows: list[dict[str, str]], column: str, count: int) -> dict[str, float]:
    """From seed to the mean of the last so many evaluations, in %."""
    seeds: dict[str, list[float]] = {}
    for row in rows:
        if row[column]:
            seeds.setdefault(row["seed"], []).append(100 * float(row[column]))
    return {seed: fmean(values[-count:]) for seed, values in seeds.items()}


def _fedfa_ratios(partition: str, column: str, attack: str) -> list[float]:
    """FedFA by its rivals, or with an attack (lambda) the rivals' drops by FedFA's, for all models, data and modes."""
    runs: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in _fedfa_rows():
        if row["partition"] == partition:
            kind = row["amplify"] if float(row["share"]) else ""
            runs.setdefault((row["data"], row["differ"], row["method"], kind), []).append(row)
    ratios = []
    for data, mode in sorted({key[:2] for key in runs}):
        values = []
        for method in (_PAIRS[mode], "fedfa"):
            clean = _by_seed(runs.get((data, mode, method, ""), []), column, 1)
            if attack:  # global accuracies then vary from round to round
                hit = _by_seed(runs.get((data, mode, method, attack), []), column, 3 if column == "accuracy" else 1)
                clean = {seed: clean[seed] - hit[seed] for seed in clean.keys() & hit.keys()}
            values.append(fmean(clean.values()) if clean else None)
        if None not in values:
            ratios.append(values[0] / values[1] if attack else values[1] / values[0])
    return ratios


def fedfa(partition: str, column: str, band: tuple[float, float], attack: str = "") -> Callable[[], Said]:
    """How many ratios lie within the paper's range.

    Args:
        partition: iid or shards. column: of runs.csv.
        attack: lambda as it stands there, or "" for accuracies without an attack.
    """

    def said() -> Said:
        ratios, (low, high) = _fedfa_ratios(partition, column, attack), band
        inside = sum(low - SLACK <= ratio <= high + SLACK for ratio in ratios)
        least = min(low, 1.0) - SLACK
        verdict = REPRODUCED if inside == len(ratios) else ORDERING if min(ratios) >= least else NOT
        what = f", lambda {float(attack):g}, attackers with the largest model" if attack else ""
        return verdict, (
            f"Pre-ResNet and MobileNetV2 on Fashion-MNIST, Pre-ResNet on CIFAR-10, small, depths 1 and 2{what}: "
            f"{min(ratios):.2f} to {max(ratios):.2f}, {inside} of {len(ratios)} within the paper's range"
        )

    return said
