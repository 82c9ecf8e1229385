"""Losses inside of a forward pass, of which labels are an input."""

import torch

from surgery.width.axes import fix
from surgery.width.rules.helpers import broadcast, broadcast_axes, fitting, fresh, results, tensors
from surgery.width.rules.registry import rule
from surgery.width.why import picked


@rule(
    """
    mse_loss smooth_l1_loss huber_loss l1_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
    kl_div dist
    """
)
def _compare(view, args, out):
    """Elements are compared with those in their places, and perhaps summed."""
    given = tensors(args)
    found = broadcast(view, given, torch.broadcast_shapes(*(tensor.shape for tensor in given)))
    return found if out.ndim else []


@rule("nll_loss nll_loss_nd nll_loss_forward nll_loss2d_forward multi_margin_loss multilabel_margin_loss_forward")
def _classify(view, args, out):
    """A class is looked up by its number: axis 1, or the only one."""
    found, target = view.axes_of(args["self"]), view.axes_of(args["target"])
    classes = found[1:2] or found
    for tensor in (classes, view.axes_of(args["weight"]) if args.get("weight") is not None else ()):
        for axis in tensor:
            fix(axis, picked("a label picks one of its positions"))
    whole = [found[0], *found[2:]] if len(found) > 1 else []
    if len(target) == len(whole):
        broadcast_axes([whole, target], [axis.size for axis in whole])
    return [fitting(whole, result.shape) if result.ndim else fresh(()) for result in results(out)]
