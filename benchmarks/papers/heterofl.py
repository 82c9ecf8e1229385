"""The table of Flower's baseline of HeteroFL as a cell: models of unequal width on CIFAR-10, IID."""

from collections.abc import Iterator

from benchmarks.papers.cell import Arm, Cell, Comparison, Published
from benchmarks.papers.recipes.nested import heterofl_a_e
from fl.models.architectures import ArchitectureOptions

_NUMBERS = {"a-e": 89.98, "a": 90.83, "a-b-c-d-e": 87.46, "e": 76.53}
_RATES = {"a": 1.0, "b": 0.5, "c": 0.25, "d": 0.125, "e": 0.0625}


def cells() -> Iterator[Cell]:
    """Yield the cell."""
    base, lines = heterofl_a_e().replace(eval_every=10), []
    for name in _NUMBERS:
        rates = tuple(_RATES[letter] for letter in name.split("-"))
        experiment = base.replace(architectures=ArchitectureOptions(widths=rates, choose="cycle"))
        if name == "e":  # one model, of a sixteenth of the width
            experiment = base.replace(width=rates, architectures=ArchitectureOptions(widths=(1.0,), choose="cycle"))
        lines.append(Arm(f"heterofl.table.cifar10.iid/{name}", experiment))
    yield Cell(
        "heterofl.table.cifar10.iid", "Flower's heterofl, CIFAR-10, IID",
        "a model trained with clients of a sixteenth of its width is nearly as good as with full ones", tuple(lines),
        (Comparison(
            "test accuracy in %, mean of the last ten evaluations", "late", "numbers", tuple(_NUMBERS),
            tuple(Published(number, 0.0) for number in _NUMBERS.values()),
        ),),
    )  # fmt: skip
