"""FeMAM's tables and figures as cells."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.papers.cell import OWN, SMALLER, Arm, Cell, Comparison, Published, arms
from benchmarks.papers.recipes.femam import METHODS, digits, fashion_mnist, femnist, released, row, rows
from fl.settings import Experiment

_OWN = "accuracy on the clients' own test data in %"
_F1 = "macro-F1 on the clients' own test data in %"
_TABLE_1 = {"cifar100-clusters30", "cifar100-dir0.1", "cifar100-levels3-6-11", "tiny-clusters50", "tiny-dir0.1",
            "tiny-levels9-15-22"}  # fmt: skip
_ORDER = ("femam", *(name for name in METHODS if name != "femam"))
_SECONDS = 25  # rounds over which Fig. 5a's times are measured


def cells() -> Iterator[Cell]:
    """Yield all cells of FeMAM."""
    for data, split, numbers in rows():
        for ending, experiment, differences in (
            ("", row(data, split), ""),
            ("-released", released(data, split), "the released code's options"),
        ):
            yield _column(data, split, ending, experiment, differences, dict(zip(METHODS, numbers)))
    yield from _figures()
    yield from _smaller()


def _place(data: str, split: str) -> tuple[str, str]:
    """Return the id and the place of a pair of columns: Table 1, or a table of the appendix."""
    table = {"clusters": "C.2", "levels": "C.4"}.get(split.rstrip("0123456789-"), "C.3")
    if f"{data}-{split}" in _TABLE_1:
        return f"femam.table1.{data}.{split.replace('dir', 'client')}", "Table 1"
    return f"femam.table{table.replace('.', '').lower()}.{data}.{split}", f"Table {table}"


def _column(
    data: str, split: str, ending: str, experiment: Experiment, differences: str, numbers: dict[str, tuple[str, str]]
) -> Cell:
    name, place = _place(data, split)
    accuracy, f1 = (tuple(Published.read(numbers[method][k]) for method in _ORDER) for k in (0, 1))
    claim = "FedAvg, FedProx and FeMAM are level" if split == "iid" else "FeMAM has the highest accuracy and macro-F1"
    return Cell(
        f"{name}{ending}", place, claim, arms(f"{name}{ending}", experiment, _ORDER),
        (Comparison(_OWN, "own", "numbers", _ORDER, accuracy), Comparison(_F1, "own_f1", "numbers", _ORDER, f1)),
        pattern=f"femam.TABLE.DATA.SPLIT{ending}", settings=differences, row=name,
    )  # fmt: skip


def _figures() -> Iterator[Cell]:
    table, _ = _place("cifar100", "levels3-6-11")
    experiment = row("cifar100", "levels3-6-11").replace(algorithms=("femam",))
    lines = (Arm(f"{table}/femam", experiment), *_without_levels(experiment, "femam.table2"))
    yield Cell(
        "femam.table2", "Table 2", "every level that is left out costs accuracy (0.82 to 11.87 points; which level "
        "costs which is lost in the text)", lines,
        (Comparison(_OWN, "own", "first", tuple(arm.name for arm in lines)),),
    )  # fmt: skip
    short = row("cifar100", "dir0.1").replace(rounds=_SECONDS)
    short = short.replace(eval_every=_SECONDS, femam=replace(short.options["femam"], level_rounds=(_SECONDS // 5,)))
    yield Cell(
        "femam.figure5a", "Fig. 5a", "a round of FeMAM takes longer than FedAvg's and is shorter than Ditto's",
        arms("femam.figure5a", short, ("femam", "fedavg", "ditto")),
        (Comparison("seconds of a round", "seconds", "first", ("femam", "ditto"), larger=False),
         Comparison("seconds of a round", "seconds", "first", ("fedavg", "femam"), larger=False)),
        settings=f"{_SECONDS} rounds, {_SECONDS // 5} a level; the machine must do nothing else",
    )  # fmt: skip
    name, _ = _place("cifar100", "dir0.1")
    yield Cell(
        "femam.figure5b", "Fig. 5b", "FeMAM reaches a high accuracy with the traffic of one model a round (the runs of "
        "Table 1)", arms(name, row("cifar100", "dir0.1"), ("femam", "fedavg", "ditto")),
        (Comparison(_OWN, "own", "first", ("femam", "fedavg", "ditto")),
         Comparison("a client's MB", "megabytes", "ratio", ("femam", "fedavg"), band=(0.99, 1.01), larger=False)),
    )  # fmt: skip
    yield Cell(
        "femam.figure3", "Figs. 3, C.6, C.8", "staircases and curves (image)",
        command="python -m benchmarks.papers femam-cifar100-levels3-6-11",
    )  # fmt: skip
    yield Cell(
        "femam.figure4", "Figs. 4, A.1, C.2, C.4", "which clients share models, beside the truth (image)",
        command="python -m fl.structure RUN",
    )  # fmt: skip


def _without_levels(experiment: Experiment, folder: str) -> tuple[Arm, ...]:
    """Return FeMAM without its global level, one cluster level, all cluster levels, and the personal level.

    The table has as many rows.
    """
    first, *clusters, last = experiment.options["femam"].levels
    kinds = {
        "global": (*clusters, last), "cluster": (first, *clusters[1:], last), "clusters": (first, last),
        "personal": (first, *clusters),
    }  # fmt: skip
    without = []
    for name, levels in kinds.items():
        # Without the global level the first level has clusters, and the length of a cluster level.
        lengths = (50,) if name == "global" else experiment.options["femam"].level_rounds[: len(levels) - 1]
        options = replace(experiment.options["femam"], levels=levels, level_rounds=lengths)
        without.append(Arm(f"{folder}/without-{name}", experiment.replace(algorithms=("femam",), femam=options)))
    return tuple(without)


def _smaller() -> Iterator[Cell]:
    """Yield cells with half a LeNet and 100 rounds (docs/results/femam.md), and the longer ones."""
    base = fashion_mnist()
    kinds = {
        "clusters": base.replace(seeds=(0, 1, 2)),
        "levels": base.replace(clusters=(2, 3), cluster_classes=(2, 2)),
        "dirichlet": base.replace(partition="dirichlet", alpha=0.1, lr=0.1),
        "femnist": femnist(),
    }
    for name, experiment in kinds.items():
        yield Cell(
            f"femam.smaller.{name}", SMALLER, "FeMAM has the highest accuracy on Fashion-MNIST and FEMNIST",
            arms(f"femam.smaller.{name}", experiment, _ORDER, f"femam/{name}/{{}}-seed*.csv"),
            (Comparison(_OWN, "own", "first", _ORDER),), "femam.smaller.SETTING", "half a LeNet, 100 rounds",
        )  # fmt: skip
        if experiment.config.data.partition.name == "clusters":
            femam = arms(f"femam.smaller.{name}", experiment, ("femam",), f"femam/{name}/{{}}-seed*.csv")
            yield _planted(f"fashion-mnist-{name}", femam, "half a LeNet, 100 rounds")
    for name, (experiment, order, setting) in _long().items():
        yield Cell(
            f"femam.smaller.{name}", SMALLER, f"FeMAM has the highest accuracy ({setting})",
            arms(f"femam.smaller.{name}", experiment, order),
            (Comparison(_OWN, "own", "first", order), Comparison(_F1, "own_f1", "first", order)),
            "femam.smaller.SETTING",
        )  # fmt: skip
    few, (many, _, setting) = digits().replace(seeds=(0, 1, 2)), _long()["digits"]
    for name, experiment, kind in (
        ("digits-clusters", few, "20 clients in 4 clusters of 3 classes, 80 rounds"),
        ("digits-clusters-long", many, setting),
    ):
        yield _planted(name, arms(f"femam.smaller-structure.{name}", experiment, ("femam",)), kind)
    whole = arms("femam.smaller.digits", many, ("femam",))
    lines = whole + _without_levels(many, "femam.smaller-levels.digits")
    yield Cell(
        "femam.smaller-levels.digits", SMALLER, "every level that is left out costs accuracy", lines,
        (Comparison(_OWN, "own", "first", tuple(arm.name for arm in lines)),), settings=setting,
    )  # fmt: skip
    clusters = base.replace(algorithms=("femam",), seeds=(0, 1, 2))
    yield _factor("clusters", clusters, "femam/clusters/{}-seed*.csv", "Fashion-MNIST in clusters, 100 rounds")
    yield _factor("digits", many.replace(algorithms=("femam",)), "", setting)


def _factor(name: str, experiment: Experiment, tables: str, setting: str) -> Cell:
    """Return the cell that compares the paper's Eq. B.4 with the released code's gradients."""
    folder = f"femam.smaller.{name}"
    options = replace(experiment.options["femam"], share_gradients=True)
    lines = (
        *arms(folder, experiment, ("femam",), tables),
        Arm(f"femam.factor.{name}/femam-factor", experiment.replace(femam=options)),
    )
    return Cell(
        f"femam.factor.{name}", OWN, "what Eq. B.4's factor n_i/n of the gradients on cluster levels changes", lines,
        (Comparison(_OWN, "own", "first", ("femam", "femam-factor")),), "femam.factor.SETTING", setting,
    )  # fmt: skip


def _long() -> dict[str, tuple[Experiment, tuple[str, ...], str]]:
    """Return settings, methods and a description of runs with the paper's levels.

    Digits have all of its rounds, CIFAR-100 a twentieth and a narrow model.
    """
    paper = row("cifar100", "levels3-6-11")
    few = digits().replace(rounds=paper.config.rounds, eval_every=10, seeds=(0, 1))
    plain = replace(paper.options["femam"], share_gradients=False, window=10)  # as the stored runs were made
    few = few.replace(femam=replace(plain, levels=("global", "4", "4", "4", "personal")))
    part = paper.replace(
        width=(0.125,), lr=0.1, momentum=0.9, rounds=paper.config.rounds // 20, eval_every=5, seeds=(0,),
        femam=replace(plain, level_rounds=(20, 3)),
    )  # fmt: skip
    return {
        "digits": (few, _ORDER, "digits, 20 clients in 4 clusters of 3 classes, the paper's 700 rounds and 5 levels"),
        "cifar100": (
            part, ("femam", "fedavg", "ditto", "fesem", "fedavg_plus"),
            "CIFAR-100, levels of 3, 6 and 11 clusters, ResNet-9 of an eighth of its width, 35 of the paper's 700 "
            "rounds, levels shorter in proportion, learning rate 0.1 and momentum 0.9 for the paper's 0.01 and the "
            "released code's 0",
        ),
    }  # fmt: skip


def _planted(name: str, lines: tuple[Arm, ...], setting: str) -> Cell:
    """Return the cell on whether FeMAM finds the clusters of the partition."""
    return Cell(
        f"femam.smaller-structure.{name}", SMALLER, "FeMAM finds the clusters that clients were dealt out in", lines,
        (Comparison("adjusted Rand index of the best level against the planted clusters, 0.9 (excellent, Steinley "
                    "2004) or more", "rand", "above", ("femam",), band=(0.9, 1.0)),),
        "femam.smaller-structure.SETTING", setting,
    )  # fmt: skip
