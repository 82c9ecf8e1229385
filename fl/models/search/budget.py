"""The largest candidate that a client can afford."""

from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import torch
from torch.utils.flop_counter import FlopCounterMode

import surgery
from fl.base.errors import FLError
from fl.models.create import create
from fl.models.search.evolve import FEW
from fl.models.search.space import Space
from zoo import Spec, ZooError

Unit: TypeAlias = Literal["macs", "parameters", "bytes"]


def largest_within(space: Space, limit: float, unit: Unit) -> Spec:
    """The candidate with the largest count that does not exceed the limit; of equal ones the first of the grid.

    In mixed spaces of more than 64 candidates not all are counted: starting with the smallest candidate, the width or
    depth that adds most and still fits is raised, one at a time. In the result no single one can be raised further, but
    there may be a larger candidate that fits.

    Args:
        unit: "macs" of one sample at the base's own image size, "parameters", or "bytes": 4 for each element of the
            floating-point state, including buffers, which is what a model takes on the network.

    Raises:
        FLError: if no candidate fits; it names the smallest and its count.

    >>> space = Space(Spec("resnet20"), widths=(0.25, 0.5, 1), depths=(1, 2, 3))
    >>> spec = largest_within(space, 20e6, "macs")
    >>> spec.width[0], spec.depth[0], spec.count().macs
    (1.0, 1, 12239488)
    """
    if unit not in get_args(Unit):
        raise FLError(f"unknown unit {unit!r} of a model's size: choose {', '.join(get_args(Unit))}")
    climbing = space.mixed and len(space) > FEW
    starts = [space.smallest] if climbing else list(space)

    def fitting(specs: list[Spec], above: int = -1) -> dict[Spec, int]:
        return {spec: count for spec in specs if above < (count := size(spec, unit)) <= limit}

    found = fitting(starts)
    if not found:
        least = min(starts, key=lambda spec: size(spec, unit))
        raise FLError(
            f"no candidate of {least.name} has at most {limit:,.0f} {unit}: the smallest, of width {least.width} and "
            f"depth {least.depth}, has {size(least, unit):,}"
        )
    best = max(found, key=found.__getitem__)
    while climbing and (larger := fitting(space.neighbours(best), above=found[best])):
        best, found = max(larger, key=larger.__getitem__), larger
    return best


@lru_cache(maxsize=4096)
def size(spec: Spec, unit: Unit) -> int:
    """MACs of one sample, parameters, or bytes of a model. Only models of a library are built in memory.

    >>> size(Spec("cnn"), "parameters"), size(Spec("cnn"), "bytes")
    (1663370, 6653480)
    """
    try:
        library = spec.member.depth is None  # its narrow and shallow models come from surgery on a real one
        if not library and unit != "bytes":
            return getattr(spec.count(), unit)
        model = create(torch.Generator(), spec).to("meta") if library else spec.build(device="meta")
    except ZooError as error:
        raise FLError(str(error)) from None
    if unit == "bytes":
        return sum(4 * tensor.numel() for tensor in surgery.state(model).values() if tensor.is_floating_point())
    if unit == "parameters":
        return sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(spec.example(device="meta"))
    return counter.get_total_flops() // 2
