"""Norms, reductions, and losses inside of a forward pass."""

import torch
from torch import Tensor

from surgery.width.axes import Axis, fix, picked, product, role, unify
from surgery.width.rules.registry import (
    INDICES,
    RuleResult,
    broadcast,
    broadcast_axes,
    dims_of,
    first,
    fitting,
    fresh,
    results,
    rule,
    split_groups,
    tensors,
    unify_last,
)


@rule(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
    _batch_norm_with_update _batch_norm_no_update _native_batch_norm_legit_functional
    """
)
def _batch_norm(view, args, out):
    axes = view.axes_of(args["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(args.get(name), Tensor):
            unify(axes[1], view.axes_of(args[name])[0])
    _, *statistics = results(out)
    return RuleResult([axes, *(fitting(axes[1:2], other.shape) for other in statistics)], {"num_features": axes[1]})


@rule("native_layer_norm", sizes={"normalized_shape"})
def _layer_norm(view, args, out):
    axes = view.axes_of(args["input"])
    for name in ("weight", "bias"):
        if isinstance(args.get(name), Tensor):
            unify_last(axes, view.axes_of(args[name]))
    _, *statistics = results(out)
    shape = list(axes[-len(args["normalized_shape"]) :])
    return RuleResult([axes, *(fitting(axes, other.shape) for other in statistics)], {"normalized_shape": shape})


@rule("native_group_norm", sizes={"N", "C", "HxW"})
def _group_norm(view, args, out):
    axes, groups = view.axes_of(args["input"]), first(args, "group num_groups")
    for name in ("weight", "bias"):
        if isinstance(args.get(name), Tensor):
            unify(axes[1], view.axes_of(args[name])[0])
    which, _ = split_groups(axes[1], groups)
    _, *statistics = results(out)
    sizes = {"C": axes[1], "num_channels": axes[1], **({"group": which, "num_groups": which} if groups > 1 else {})}
    return RuleResult([axes, *(fitting((axes[0], which), other.shape) for other in statistics)], sizes)


@rule("_weight_norm_interface")
def _weight_norm(view, args, out):
    v, g, dim = view.axes_of(args["v"]), view.axes_of(args["g"]), args["dim"]
    unify(v[dim], g[dim])
    _, *norms = results(out)
    return [v, *(fitting(g, other.shape) for other in norms)]


@rule("mean amax amin var std var_mean std_mean prod any all logsumexp count_nonzero aminmax")
def _reduce(view, args, out):
    axes = view.axes_of(args["self"])
    dims = dims_of(args, len(axes))

    def reduced(result: Tensor) -> list[Axis]:
        if result.ndim < len(axes):
            return [axis for dim, axis in enumerate(axes) if dim not in dims]
        sizes = zip(axes, result.shape)
        return [Axis(n, role("a reduction")) if dim in dims else axis for dim, (axis, n) in enumerate(sizes)]

    return [reduced(result) for result in results(out)]


@rule("max min median nanmedian mode kthvalue topk argmax argmin")
def _reduce_with_indices(view, args, out):
    """Reduce to numbers, whatever the order of positions, and to indices by order.

    Indices are the last result, unless all results are reduced.
    """
    axes = view.axes_of(args["self"])
    along = [axes[dim] for dim in dims_of(args, len(axes)) if axes] if "dim" in args else []
    return RuleResult(_reduce(view, args, out), fixed_when_read=[(axis, INDICES) for axis in along])


@rule("sum nansum norm linalg_vector_norm")
def _sum(view, args, out):
    """Sum: results grow with the number of positions; code may divide by it."""
    axes = view.axes_of(args["self"])
    dims = dims_of(args, len(axes))
    return RuleResult(_reduce(view, args, out), summed=product([axis for dim, axis in enumerate(axes) if dim in dims]))


@rule(
    """
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss dist
    """
)
def _compare(view, args, out):
    """Compare elements in the same places, and perhaps sum."""
    operands = tensors(args)
    axes = broadcast(view, operands, torch.broadcast_shapes(*(tensor.shape for tensor in operands)))
    return axes if out.ndim else []


@rule("nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward")
def _classify(view, args, out):
    """Look up a class by its number, along axis 1 or the only one."""
    axes, target = view.axes_of(args["self"]), view.axes_of(args["target"])
    classes = axes[1:2] or axes
    for tensor in (classes, view.axes_of(args["weight"]) if args.get("weight") is not None else ()):
        for axis in tensor:
            fix(axis, picked("a label picks one of its positions"))
    whole = [axes[0], *axes[2:]] if len(axes) > 1 else []
    if len(target) == len(whole):
        broadcast_axes([whole, target], [axis.size for axis in whole])
    return [fitting(whole, result.shape) if result.ndim else fresh(()) for result in results(out)]
