"""Pooling, resampling, and operations that turn pixels into channels or channels into pixels."""

from math import prod

from surgery.width.axes import Axis, fix, product, regroup, unify
from surgery.width.rules.registry import fresh, results, rule, windowed
from surgery.width.why import role


@rule(
    """
    max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d avg_pool3d
    adaptive_max_pool3d _adaptive_avg_pool3d max_pool3d_with_indices adaptive_avg_pool1d max_pool2d
    upsample_bilinear2d upsample_nearest2d upsample_bicubic2d upsample_linear1d upsample_nearest1d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_trilinear3d mkldnn_max_pool2d
    _upsample_nearest_exact2d adaptive_avg_pool2d
    """
)
def _pool(trace, a, out):
    found = trace.axes_of(a["self"])
    window = [1, 1, 2, 2, 2][: len(found)]  # windows of unknown length along all axes but batch and channels
    for result in results(out):
        trace.assign(result, windowed(trace, found, result.shape, window))


@rule("grid_sampler_2d grid_sampler")
def _grid_sample(trace, a, out):
    x, grid = trace.axes_of(a["input"]), trace.axes_of(a["grid"])
    unify(x[0], grid[0])
    for axis in (*x[2:], *grid[1:]):
        fix(axis, role("positions are sampled"))
    trace.assign(out, [*x[:2], *grid[1:-1]])


@rule("pixel_shuffle")
def _pixel_shuffle(trace, a, out):
    r = a["upscale_factor"]
    *batch, c, h, w = trace.axes_of(a["self"])
    channel, i, j = regroup([c], [c.size // r**2, r, r])
    for axis in (i, j):
        fix(axis, role("channels become pixels"))
    trace.assign(out, [*batch, channel, product([h, i]), product([w, j])])


@rule("channel_shuffle native_channel_shuffle")
def _channel_shuffle(trace, a, out):
    batch, c, *rest = trace.axes_of(a["self"])
    which, within = regroup([c], [a["groups"], c.size // a["groups"]])
    trace.assign(out, [batch, product([within, which]), *rest])
    return {"groups": which}


@rule("pixel_unshuffle")
def _pixel_unshuffle(trace, a, out):
    r = a["downscale_factor"]
    *batch, c, h, w = trace.axes_of(a["self"])
    (h, i), (w, j) = regroup([h], [h.size // r, r]), regroup([w], [w.size // r, r])
    for axis in (i, j):
        fix(axis, role("pixels become channels"))
    trace.assign(out, [*batch, product([c, i, j]), h, w])


@rule("im2col")
def _im2col(trace, a, out):
    *batch, c, h, w = trace.axes_of(a["self"])
    for axis in (h, w):
        fix(axis, role("a window slides over it"))
    window = Axis(prod(a["kernel_size"]), role("positions of a window"))
    trace.assign(out, [*batch, product([c, window]), Axis(out.shape[-1], role("windows"))])


@rule("col2im")
def _col2im(trace, a, out):
    *batch, c, n = trace.axes_of(a["self"])
    window = prod(a["kernel_size"])
    channel, positions = regroup([c], [c.size // window, window])
    for axis in (positions, n):
        fix(axis, role("positions of a window"))
    trace.assign(out, [*batch, channel, *fresh(out.shape[-2:], role("pixels"))])
