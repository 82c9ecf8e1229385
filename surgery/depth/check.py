"""Whether a deeper or shallower model runs as its sections say: one forward pass of each."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.depth.cache import uncached
from surgery.depth.chain import Skip
from surgery.depth.sections import Section
from surgery.errors import SurgeryError
from surgery.forward import in_mode, observed, tensors_in
from surgery.names import is_inside


class Pass(NamedTuple):
    """What is seen of a forward pass.

    Attributes:
        shapes: of the outputs.
        calls: how often each module without children ran, by name.
        inputs: the first input of each block's first call.
        computed: whether numbers were computed: these may decide how many of something (boxes) there are.
    """

    shapes: list[tuple[int, ...]]
    calls: Counter
    inputs: dict[str, Tensor]
    computed: bool


def watched(model: nn.Module, example: Any, changing: Iterable[Section] = ()) -> Pass:
    """Run a model once in evaluation mode and without a cache, on the meta device if it can run there."""
    blocks = [block for section in changing for block in section.blocks]

    def watch(copy: nn.Module, given: Any) -> Pass:
        calls, inputs = Counter(), {}

        def note(name: str, args: tuple) -> None:
            inputs.setdefault(name, args[0] if args else None)

        for name, module in copy.named_modules():
            if not any(module.children()) and not isinstance(module, Skip):
                module.register_forward_hook(lambda *_, name=name: calls.update([name]))
            if name in blocks:
                module.register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        args, kwargs = uncached(copy, given)
        with in_mode(copy, training=False):
            outputs = tensors_in(copy(*args, **kwargs))
        computed = not all(tensor.is_meta for tensor in outputs)
        return Pass([tuple(tensor.shape) for tensor in outputs], calls, inputs, computed)

    return observed(model, example, watch).found


def check_depth(before: Pass, after: Pass, changes: Mapping[Section, Mapping[str, int]]) -> None:
    """Check that blocks follow each other, and that the forward pass calls the new blocks and no dropped ones.

    Args:
        before, after: how the model, and the deeper or shallower one, ran.
        changes: by section of the model before, for each block how many more of it there are after (-1: dropped).

    Raises:
        SurgeryError: if blocks of a section run side by side, if another number of modules is called than the changes
            imply, or if the output changes its shape.
    """
    changes = {section: more for section, more in changes.items() if any(more.values())}
    for section in changes:
        for block, following in zip(section.blocks, section.blocks[1:]):
            a, b = before.inputs.get(block), before.inputs.get(following)
            if a is not None and a is b:
                raise SurgeryError(
                    f"{block!r} and {following!r} of section {section.name!r} run side by side on one input, so they "
                    "are not blocks of a section: leave it as it is"
                )
    expected = before.calls.total()
    for block, more in (pair for section in changes.values() for pair in section.items()):
        expected += more * sum(n for name, n in before.calls.items() if is_inside(name, block))
    if after.calls.total() != expected:
        raise SurgeryError(
            f"{after.calls.total()} modules run where {expected} were expected: the forward pass depends on the number "
            f"of blocks of {', '.join(repr(section.name) for section in changes)}; leave them as they are"
        )
    free = 1 if before.computed else 0  # the first axis of a detector's outputs is a number of boxes
    if [shape[free:] for shape in after.shapes] != [shape[free:] for shape in before.shapes]:
        raise SurgeryError(
            f"the output would be {after.shapes} instead of {before.shapes}: leave the sections as they are"
        )
