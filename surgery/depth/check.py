"""Whether a deeper or shallower model runs as its sections say: one forward pass of each."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.depth.sections import Section
from surgery.edits import Skip
from surgery.errors import SurgeryError, first_line
from surgery.forward import in_mode, observed, run, tensors_in


class _Run(NamedTuple):
    shapes: list[tuple[int, ...]]  # of the outputs
    calls: Counter  # of modules without children, by name
    inputs: dict[str, Tensor]  # the first input of each block's first call


def check_depth(
    before: nn.Module, after: nn.Module, example: Any, changes: Mapping[Section, Mapping[str, int]]
) -> None:
    """Raise SurgeryError unless blocks follow each other, and just the new or dropped ones are called more or less.

    Args:
        before, after: the model and the deeper or shallower one.
        example: the model's input, or a tuple of its inputs.
        changes: for sections of the model before, how many more of which block there are after (dropped ones: -1).
    """
    changes = {section: more for section, more in changes.items() if any(more.values())}
    blocks = [block for section in changes for block in section.blocks]
    old = _observe(before, example, blocks, "the model")
    for section in changes:
        for block, following in zip(section.blocks, section.blocks[1:]):
            a, b = old.inputs.get(block), old.inputs.get(following)
            if a is not None and a is b:
                raise SurgeryError(
                    f"{block!r} and {following!r} of section {section.name!r} run side by side on one input: they are "
                    "no blocks of a section; leave it as it is"
                )
    new = _observe(after, example, [], "the model of another depth")
    expected = old.calls.total()
    for block, more in (pair for section in changes.values() for pair in section.items()):
        expected += more * sum(n for name, n in old.calls.items() if _inside(name, block))
    if new.calls.total() != expected:
        raise SurgeryError(
            f"{new.calls.total()} modules run where {expected} were expected: the forward pass counts on the number of "
            f"blocks of {', '.join(repr(section.name) for section in changes)}; leave them as they are"
        )
    if new.shapes != old.shapes:
        raise SurgeryError(f"the output would be {new.shapes} instead of {old.shapes}: leave the sections as they are")


def _observe(model: nn.Module, example: Any, blocks: list[str], what: str) -> _Run:
    def watch(copy: nn.Module, given: Any) -> _Run:
        calls, inputs = Counter(), {}
        for name, module in copy.named_modules():
            if not any(module.children()) and not isinstance(module, Skip):
                module.register_forward_hook(lambda *_, name=name: calls.update([name]))
            if name in blocks:
                module.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, x[0] if x else None))
        with in_mode(copy, training=False):
            return _Run([tuple(tensor.shape) for tensor in tensors_in(run(copy, given))], calls, inputs)

    try:
        return observed(model, example, watch)[0]
    except SurgeryError:
        raise
    except Exception as error:
        raise SurgeryError(f"{what} does not run on the example: {first_line(error)}") from error


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")
