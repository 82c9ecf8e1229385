"""Whether a deeper or shallower model runs as its sections say: one forward pass of each."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.depth.sections import Section
from surgery.edits import Skip
from surgery.errors import SurgeryError
from surgery.forward import call, in_mode, observed, tensors_in
from surgery.names import is_inside


class _Pass(NamedTuple):
    shapes: list[tuple[int, ...]]  # of the outputs
    calls: Counter  # of modules without children, by name
    inputs: dict[str, Tensor]  # the first input of each block's first call


def check_depth(
    before: nn.Module, after: nn.Module, example: Any, changes: Mapping[Section, Mapping[str, int]]
) -> None:
    """Check that blocks follow each other, and that the forward pass calls the new blocks and no dropped ones.

    Args:
        before, after: the model, and the deeper or shallower one.
        example: the model's input, or a tuple of its inputs.
        changes: by section of the model before, for each block how many more of it there are after (-1: dropped).

    Raises:
        SurgeryError: if blocks of a section run side by side, if another number of modules is called than the changes
            imply, or if the output changes its shape.
    """
    changes = {section: more for section, more in changes.items() if any(more.values())}
    blocks = [block for section in changes for block in section.blocks]
    old = _watch(before, example, blocks)
    for section in changes:
        for block, following in zip(section.blocks, section.blocks[1:]):
            a, b = old.inputs.get(block), old.inputs.get(following)
            if a is not None and a is b:
                raise SurgeryError(
                    f"{block!r} and {following!r} of section {section.name!r} run side by side on one input, so they "
                    "are not blocks of a section: leave it as it is"
                )
    new = _watch(after, example, [])
    expected = old.calls.total()
    for block, more in (pair for section in changes.values() for pair in section.items()):
        expected += more * sum(n for name, n in old.calls.items() if is_inside(name, block))
    if new.calls.total() != expected:
        raise SurgeryError(
            f"{new.calls.total()} modules run where {expected} were expected: the forward pass depends on the number "
            f"of blocks of {', '.join(repr(section.name) for section in changes)}; leave them as they are"
        )
    if new.shapes != old.shapes:
        raise SurgeryError(f"the output would be {new.shapes} instead of {old.shapes}: leave the sections as they are")


def _watch(model: nn.Module, example: Any, blocks: list[str]) -> _Pass:
    def watch(copy: nn.Module, given: Any) -> _Pass:
        calls, inputs = Counter(), {}
        for name, module in copy.named_modules():
            if not any(module.children()) and not isinstance(module, Skip):
                module.register_forward_hook(lambda *_, name=name: calls.update([name]))
            if name in blocks:
                module.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, x[0] if x else None))
        with in_mode(copy, training=False):
            return _Pass([tuple(tensor.shape) for tensor in tensors_in(call(copy, given))], calls, inputs)

    return observed(model, example, watch).found
