"""The table of Flower's baseline of DepthFL as a cell: models that end after different sections on CIFAR-100, IID."""

from collections.abc import Iterator

from benchmarks.papers.cell import Arm, Cell, Comparison, Published
from benchmarks.papers.recipes.nested import depthfl_cifar100
from fl.algorithms.depthfl import DepthFLOptions
from fl.algorithms.heterofl import HeteroFLOptions
from fl.models.architectures import ArchitectureOptions

_DEPTHS = {"a": "2-0-0-0", "b": "2-2-0-0", "c": "2-2-2-0", "d": "2-2-2-2"}
_NUMBERS = {"depthfl": 76.06, "fedavg": 72.67, "heterofl": 57.61, "a": 67.08, "b": 70.78, "c": 68.41, "d": 59.17}


def cells() -> Iterator[Cell]:
    """Yield the cell.

    The first three arms have clients of all four depths, or widths. An arm named by a letter has models of one depth,
    and only the clients that can afford it: a quarter less from letter to letter, with their samples.
    """
    base = depthfl_cifar100()
    plain = base.replace(depthfl=DepthFLOptions(distil=0.0))
    experiments = {"depthfl": base, "fedavg": plain}
    quarters = ArchitectureOptions(widths=(0.25, 0.5, 0.75, 1.0), choose="cycle")
    experiments["heterofl"] = base.replace(
        algorithms=("heterofl",),
        exits=False,
        norm="static_batch",
        architectures=quarters,
        heterofl=HeteroFLOptions(own_rows=False),
    )
    for place, (letter, depth) in enumerate(_DEPTHS.items()):
        same = ArchitectureOptions(depths=(depth,), choose="cycle")
        left = 4 - place
        experiments[letter] = plain.replace(
            architectures=same,
            clients=25 * left,
            samples=12_500 * left,
            participation=25 * left // 10 / (25 * left),
        )
    yield Cell(
        "depthfl.table2.cifar100.iid", "Flower's depthfl, tables 2 and 4, CIFAR-100, IID",
        "unequal depths make a better model than unequal widths, and than the clients that can afford one depth",
        tuple(Arm(f"depthfl.table2.cifar100.iid/{name}", experiment) for name, experiment in experiments.items()),
        (Comparison(
            "test accuracy in %, mean of the last ten evaluations", "late", "numbers", tuple(_NUMBERS),
            tuple(Published(number, 0.0) for number in _NUMBERS.values()),
        ),),
        settings="no FedDyn in depthfl, exits that only pool",
    )  # fmt: skip
