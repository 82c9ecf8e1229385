"""Pooling, resampling, regions of images, and moves between pixels and channels."""

from math import prod

from surgery.width.axes import Axis, fix, product, regroup, role, unify
from surgery.width.rules.registry import RuleResult, fresh, results, rule, slide_window, split_groups, unify_all


@rule(
    """
    max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool3d
    adaptive_max_pool3d _adaptive_avg_pool3d max_pool3d_with_indices
    upsample_bilinear2d upsample_nearest2d upsample_bicubic2d upsample_linear1d upsample_nearest1d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_trilinear3d mkldnn_max_pool2d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_nearest3d
    _upsample_lanczos2d_aa
    """,
    sizes={"output_size"},
)
def _pool(view, args, out):
    axes = view.axes_of(args["self"])
    pixels = max(len(axes) - 2, len(args.get("kernel_size") or args["output_size"]))  # one more without a batch
    window = [1] * (len(axes) - pixels) + [2] * pixels  # of unknown length along all axes but batch and channels
    result_axes, ordered = zip(*(slide_window(axes, result.shape, window) for result in results(out)))
    return RuleResult(result_axes, prefix_only=[axis for row in ordered for axis in row])


@rule("max_unpool2d max_unpool3d", sizes={"output_size"})
def _unpool(view, args, out):
    axes, pixels = view.axes_of(args["self"]), len(args["output_size"])
    unify_all([axes, view.axes_of(args["indices"])])
    for axis in axes[-pixels:]:
        fix(axis, role("a window slides over it"))
    return [*axes[:-pixels], *fresh(out.shape[-pixels:], role("pixels"))]


@rule("grid_sampler_2d grid_sampler_3d")
def _grid_sample(view, args, out):
    x, grid = view.axes_of(args["input"]), view.axes_of(args["grid"])
    unify(x[0], grid[0])
    for axis in (*x[2:], *grid[1:]):
        fix(axis, role("positions are sampled"))
    return [*x[:2], *grid[1:-1]]


@rule("affine_grid_generator", sizes={"size"})  # the number of channels says nothing about a width
def _affine_grid(view, args, out):
    batch, *matrix = view.axes_of(args["theta"])
    for axis in matrix:
        fix(axis, role("a matrix moves positions"))
    return [batch, *fresh(out.shape[1:], role("positions are sampled"))]


@rule("pixel_shuffle")
def _pixel_shuffle(view, args, out):
    r = args["upscale_factor"]
    *batch, c, h, w = view.axes_of(args["self"])
    channel, i, j = regroup([c], [c.size // r**2, r, r])
    for axis in (i, j):
        fix(axis, role("channels become pixels"))
    return [*batch, channel, product([h, i]), product([w, j])]


@rule("channel_shuffle")
def _channel_shuffle(view, args, out):
    batch, c, *rest = view.axes_of(args["self"])
    which, within = split_groups(c, args["groups"])
    return RuleResult([batch, product([within, which]), *rest], {"groups": which})


@rule("pixel_unshuffle")
def _pixel_unshuffle(view, args, out):
    r = args["downscale_factor"]
    *batch, c, h, w = view.axes_of(args["self"])
    (h, i), (w, j) = regroup([h], [h.size // r, r]), regroup([w], [w.size // r, r])
    for axis in (i, j):
        fix(axis, role("pixels become channels"))
    return [*batch, product([c, i, j]), h, w]


@rule("im2col")
def _im2col(view, args, out):
    *batch, c, h, w = view.axes_of(args["self"])
    for axis in (h, w):
        fix(axis, role("a window slides over it"))
    window = Axis(prod(args["kernel_size"]), role("positions of a window"))
    return [*batch, product([c, window]), Axis(out.shape[-1], role("windows"))]


@rule("col2im", sizes={"output_size"})
def _col2im(view, args, out):
    *batch, c, n = view.axes_of(args["self"])
    window = prod(args["kernel_size"])
    channel, positions = regroup([c], [c.size // window, window])
    for axis in (positions, n):
        fix(axis, role("positions of a window"))
    return [*batch, channel, *fresh(out.shape[-2:], role("pixels"))]


_REGION = role("positions within a region")


def _regions(view, args) -> tuple[Axis, Axis]:
    """Return the channels of the image and the axis of the boxes.

    Pixels and coordinates keep their places.
    """
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
    """Say that each position within a region is read of channels of its own."""
    channels, boxes = _regions(view, args)
    rows, columns = fresh(out[0].shape[2:], _REGION)
    channel, *positions = regroup([channels], list(out[0].shape[1:]))
    for axis in positions:
        fix(axis, _REGION)
    return [boxes, channel, rows, columns]
