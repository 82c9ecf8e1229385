"""`python -m surgery check MODEL`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from surgery.commands.one import Shape
from surgery.errors import SurgeryError
from surgery.operations.models import build, example_for

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Check:
    """Try every operation on a model, strictly, and say in words what works and why something does not.

    The exit code is 1 if an operation that the model has a use for fails.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """timm:NAME, torchvision:NAME or module:factory, with arguments if needed: my_models:Net,classes=10"""
    rate: Annotated[float, tyro.conf.arg(metavar="RATE")] = 0.5
    """share of every hidden width that the narrow model keeps"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    seconds: float = 120
    """limit of each operation"""

    def run(self) -> int:
        """Carry out the command."""
        from surgery.inspect.report import Steps

        if not 0 < self.rate <= 1:
            raise SurgeryError(f"--rate {self.rate:g}: give a share of the widths, above 0 and at most 1")
        model = build(self.model).eval()
        example = example_for(model, self.input)
        steps, failed = Steps(self.seconds, sys.stderr), 0
        for name, check in _CHECKS.items():
            try:
                found = steps(name, lambda check=check: check(model, example, self.rate))
                good = found is not None
                text = found if good else f"stopped after {self.seconds:g} s: give more --seconds"
            except SurgeryError as error:
                good, text = False, str(error)
            failed += not good
            print(f"{'yes' if good else 'NO ':3} {name}: {text}")
        return int(failed > 0)


def _runs(model: "nn.Module", example: Any, rate: float) -> str:
    from surgery.errors import first_line
    from surgery.forward import call

    try:
        call(model, example)
    except Exception as error:  # the user's model
        raise SurgeryError(
            f"the model does not run on its example ({type(error).__name__}: {first_line(error)}): give the shape of "
            "one input as --input"
        ) from None
    return "it runs on its example"


def _decomposes(model: "nn.Module", example: Any, rate: float) -> str:
    from surgery.decomposition import layers

    return f"{len(layers(model, example=example))} layers that hold every tensor once, in the order of their first use"


def _shuffles(model: "nn.Module", example: Any, rate: float) -> str:
    import torch

    from surgery.decomposition import layers
    from surgery.recombine import inverse, permutations, segments, shuffle
    from surgery.states import stack, state

    models = stack([state(model), {name: torch.zeros_like(t) for name, t in state(model).items()}])
    parts = segments(layers(model))
    swaps = permutations(len(parts), k=2, generator=torch.Generator().manual_seed(0))
    back = shuffle(shuffle(models, segments=parts, permutations=swaps), segments=parts, permutations=inverse(swaps))
    if not all(torch.equal(back[name], models[name]) for name in models):
        raise SurgeryError("layers that were exchanged did not come back")
    return "layers are exchanged with another model and come back bit for bit"


def _narrows(model: "nn.Module", example: Any, rate: float) -> str:
    from surgery.width.narrow import narrow

    small, _ = narrow(model, rate=rate, example=example, strict=True)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    return f"every hidden width shrinks to {rate:g}; {before:,} parameters become {after:,}"


def _deepens(model: "nn.Module", example: Any, rate: float) -> str:
    from surgery.depth.graft import graft, ungraft
    from surgery.depth.sections import repeatable, sections

    found = [section for section in sections(model) if repeatable(model, section)]
    if not found:
        return "nothing to do: the model has no section whose last block could be repeated"
    deeper, _ = graft(model, depths={s.name: len(s.blocks) + 1 for s in found}, example=example)
    ungraft(deeper, keep={s.name: len(s.blocks) for s in found}, example=example)
    return f"{len(found)} sections get a block more, and lose it again"


_CHECKS: dict[str, Callable[..., str]] = {
    "run": _runs,
    "layers": _decomposes,
    "shuffle": _shuffles,
    "narrow": _narrows,
    "graft and ungraft": _deepens,
}
