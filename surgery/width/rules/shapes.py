"""Reshaping, reordering, splitting and joining."""

from math import prod

from surgery.width.axes import Axis, concatenation, digits, fix, picked, place, product, regroup, role, segment
from surgery.width.rules.registry import RuleResult, fitting, fix_all, fresh, rule, tensors, unify_all


@rule("view", same="_unsafe_view _reshape_alias", sizes={"size", "stride"}, carries=True)
def _view(view, args, out):
    axes = view.axes_of(args["self"])
    if out.dtype != args["self"].dtype and out.shape != args["self"].shape:  # view(dtype) changes the last axis
        why = role("its memory is seen as another type")
        for axis in axes:
            fix(axis, why)
        return fresh(out.shape, why)
    result, sizes = regroup(list(axes), list(out.shape)), args["size"]
    return RuleResult(result, explicit=[axis for axis, size in zip(result, sizes) if size != -1] if -1 in sizes else ())


@rule("permute", carries=True)
def _permute(view, args, out):
    axes = view.axes_of(args["self"])
    return [axes[dim] for dim in args["dims"]]


@rule("transpose t", carries=True)
def _transpose(view, args, out):
    axes = list(view.axes_of(args["self"]))
    if len(axes) >= 2:
        i, j = (args.get(f"dim{n}", args.get(f"axis{n}", n)) for n in (0, 1))
        axes[i], axes[j] = axes[j], axes[i]
    return axes


@rule("_pack_padded_sequence", carries=True)
def _pack(view, args, out):
    """Return the rows of sequences of several lengths, one after the other."""
    time, batch, *features = view.axes_of(args["input"])
    rows = place("sequences of several lengths are packed")
    for axis in (time, batch):
        fix(axis, rows)
    return RuleResult([[Axis(out[0].shape[0], rows), *features], fresh(out[1].shape, rows)])


@rule("unsqueeze", carries=True)
def _unsqueeze(view, args, out):
    axes = list(view.axes_of(args["self"]))
    axes.insert(args["dim"] % out.ndim, Axis(1))
    return axes


@rule("squeeze", carries=True)
def _squeeze(view, args, out):
    rest = iter([axis for axis in view.axes_of(args["self"]) if axis.size != 1])
    return [Axis(1) if size == 1 else next(rest) for size in out.shape]


@rule("view_as_real")
def _view_as_real(view, args, out):
    return [*view.axes_of(args["self"]), Axis(2, role("real and imaginary part"))]


@rule("view_as_complex")
def _view_as_complex(view, args, out):
    *axes, parts = view.axes_of(args["self"])
    fix(parts, role("real and imaginary part"))
    return axes


@rule("expand", layout=True, carries=True)
def _expand(view, args, out):
    axes = view.axes_of(args["self"])
    return fitting(reversed(axes), reversed(out.shape))[::-1]


@rule("repeat", sizes={"repeats"})
def _repeat(view, args, out):
    axes = view.axes_of(args["self"])
    axes = [*fresh([1] * (out.ndim - len(axes))), *axes]
    return [product([Axis(size // max(axis.size, 1)), axis]) for axis, size in zip(axes, out.shape)]


@rule("repeat_interleave", sizes={"output_size"})
def _repeat_interleave(view, args, out):
    return fix_all(view, tensors(args), out)


@rule("slice", sizes={"end"}, carries=True)
def _slice(view, args, out):
    axes = list(view.axes_of(args["self"]))
    dim, whole = args["dim"], axes[args["dim"]]
    start, stop, step = slice(args["start"], args.get("end"), args.get("step", 1)).indices(whole.size)
    if step == 1:
        leading, *minor = digits(whole) or [whole]
        inside = minor and any(at % prod(digit.size for digit in minor) for at in (start, stop))
        if inside and stop > start and whole.size % (stop - start):  # equal parts mean a channel shuffle
            fix(leading, role("a slice counts its positions, so that it is divided inside of one of its parts"))
        axes[dim] = segment(whole, start, stop) if stop > start else Axis(0)
        counts = start and args["start"] <= whole.size  # one beyond the end is no size
        sizes = {"start": segment(whole, 0, start)} if counts else {}
        for name, at in (("start", start), ("end", stop)):  # a negative number is the size of what lies behind it
            sizes |= {f"-{name}": segment(whole, at, whole.size)} if (args.get(name) or 0) < 0 < at else {}
        return RuleResult(axes, sizes)
    if whole.size % step == 0 and start < step and stop > whole.size - step:
        # every step-th position from `start`: one position of a last digit
        axes[dim], last = regroup([whole], [whole.size // step, step])
        fix(last, role("one of its positions is picked"))
    else:
        fix(whole, picked("some of its positions are picked"))
        axes[dim] = Axis(out.shape[dim], picked("positions are picked"))
    return axes


@rule("split unsafe_split", sizes={"split_size", "split_sizes"})
@rule("split_with_sizes unsafe_split_with_sizes", sizes={"split_sizes"})
def _split(view, args, out):
    axes, start, parts = view.axes_of(args["self"]), 0, []
    dim = args["dim"] % len(axes)
    for result in out:
        stop = start + result.shape[dim]
        parts.append([*axes[:dim], segment(axes[dim], start, stop), *axes[dim + 1 :]])
        start = stop
    return parts


@rule("cat")
def _cat(view, args, out):
    parts = [view.axes_of(tensor) for tensor in args["tensors"] if tensor.shape != (0,) or out.ndim == 1]
    dim = args["dim"] % out.ndim
    unify_all([*axes[:dim], *axes[dim + 1 :]] for axes in parts)
    return [*parts[0][:dim], concatenation([axes[dim] for axes in parts]), *parts[0][dim + 1 :]]


@rule("stack")
def _stack(view, args, out):
    parts = [view.axes_of(tensor) for tensor in args["tensors"]]
    unify_all(parts)
    result = list(parts[0])
    result.insert(args["dim"] % out.ndim, Axis(len(parts), role("tensors are stacked")))
    return result


@rule("slice_scatter", sizes={"end"}, carries=True)
def _slice_scatter(view, args, out):
    axes, source_axes = list(view.axes_of(args["self"])), list(view.axes_of(args["src"]))
    dim = args["dim"]
    start, stop, step = slice(args["start"], args["end"], args["step"]).indices(axes[dim].size)
    if step != 1:
        return fix_all(view, tensors(args), out)
    unify_all([[*axes[:dim], segment(axes[dim], start, stop), *axes[dim + 1 :]], source_axes])
    return RuleResult(axes, {"start": segment(axes[dim], 0, start)} if start else {})


@rule("select_scatter")
def _select_scatter(view, args, out):
    axes = view.axes_of(args["self"])
    rest = list(axes)
    fix(rest.pop(args["dim"]), role("one of its positions is picked"))
    unify_all([rest, view.axes_of(args["src"])])
    return axes


@rule("diag_embed")
def _diagonal_matrix(view, args, out):
    *axes, axis = view.axes_of(args["self"])
    if args["offset"]:
        return fix_all(view, tensors(args), out)
    for dim in sorted((args["dim1"] % out.ndim, args["dim2"] % out.ndim)):
        axes.insert(dim, axis)
    return axes


@rule("reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d")
def _pad_by_copies(view, args, out):
    axes, pad = list(view.axes_of(args["self"])), args["padding"]
    for i in range(len(pad) // 2):
        if any(pad[2 * i : 2 * i + 2]):
            position, why = len(axes) - 1 - i, role("positions at its ends are repeated around it")
            fix(axes[position], why)
            axes[position] = Axis(out.shape[position], why)
    return axes


@rule("constant_pad_nd")
def _pad(view, args, out):
    axes, ends = list(view.axes_of(args["self"])), []
    pad = args["pad"]
    for i in range(len(pad) // 2):
        position = len(axes) - 1 - i
        axis = axes[position]
        before, after = (Axis(max(0, n)) for n in pad[2 * i : 2 * i + 2])
        if min(pad[2 * i : 2 * i + 2]) < 0:
            fix(axis, role("it is cropped"))
            axis = segment(axis, max(0, -pad[2 * i]), axis.size - max(0, -pad[2 * i + 1]))
        axes[position] = concatenation([before, axis, after])
        ends += [before, after]
    return RuleResult(axes, {"pad": ends} if min(pad) >= 0 else {})


@rule("as_strided", sizes={"size", "stride", "storage_offset"})
def _as_strided(view, args, out):
    source = args["self"]
    if out.shape == source.shape and out.stride() == source.stride():
        return view.axes_of(source)
    return fix_all(view, [source], out)[0]
