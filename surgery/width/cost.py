"""How many parameters and multiply-accumulates a choice of positions leaves, without a model that has them."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from torch import nn

from surgery.width.solved import Axes, Axis, Choice, Solution, size_of
from surgery.width.trace import Step

What: TypeAlias = Literal["parameters", "macs"]


class Cost:
    """A count that is a sum of products of sizes of axes.

    Args:
        model: the full model, or a copy of it on the meta device.
        steps: how many of the solution's steps count; those of a second pass in training mode do not.
    """

    def __init__(self, model: nn.Module, solution: Solution, what: What, steps: int):
        if what == "parameters":
            split = [name.rpartition(".") for name, _ in model.named_parameters()]
            self._products: list[Axes] = [solution.tensors[module, attribute] for module, _, attribute in split]
        else:
            self._products = [found for step in solution.steps[:steps] for found in multiplied(step)]
        self.full = self({})

    def __call__(self, choice: Choice) -> int:
        """The count with these positions."""
        known: dict[Axis, int] = {}
        total = 0
        for axes in self._products:
            count = 1
            for axis in axes:
                if axis not in known:
                    known[axis] = size_of(axis, choice)
                count *= known[axis]
            total += count
        return total


def multiplied(step: Step) -> Iterator[Sequence[Axis]]:
    """The axes whose sizes, multiplied, are the operation's MACs: the formulas of torch.utils.flop_counter."""
    given = step.inputs
    if step.name in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = given[-2:]
        yield *left, right[-1]
    elif step.name in ("convolution", "_convolution"):
        moved = given[0] if step.scalars.get("transposed") else step.outputs[0]
        yield *given[1], moved[0], *moved[2:]
    elif step.name == "scaled_dot_product_attention":
        query, key, value = given[:3]
        yield *query, key[-2]
        yield *query[:-1], value[-2], value[-1]
