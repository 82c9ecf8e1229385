"""torchvision's own operations on regions of an image."""

from surgery.width.axes import Axis, fix, regroup
from surgery.width.rules.helpers import fresh
from surgery.width.rules.registry import rule
from surgery.width.why import role

_REGION = role("positions within a region")


def _regions(view, args) -> tuple[Axis, Axis]:
    """The channels of the image and the axis of the boxes; pixels and coordinates are told apart."""
    batch, channels, *pixels = view.axes_of(args["input"])
    boxes, coordinates = view.axes_of(args["rois"])
    for axis in (batch, *pixels, coordinates):
        fix(axis, role("regions of an image are read"))
    return channels, boxes


@rule("torchvision::roi_align torchvision::roi_pool")
def _region(view, args, out):
    channels, boxes = _regions(view, args)
    shape = out.shape if hasattr(out, "shape") else out[0].shape
    return [boxes, channels, *fresh(shape[2:], _REGION)]


@rule("torchvision::ps_roi_align torchvision::ps_roi_pool")
def _region_by_position(view, args, out):
    """Each position within a region is read of channels of its own."""
    channels, boxes = _regions(view, args)
    rows, columns = fresh(out[0].shape[2:], _REGION)
    channel, *positions = regroup([channels], list(out[0].shape[1:]))
    for axis in positions:
        fix(axis, _REGION)
    return [boxes, channel, rows, columns]
