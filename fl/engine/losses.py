"""Losses that judge a model's outputs: by name, or a function of your own.

A loss takes (outputs, targets) of n samples and returns the loss of each, [n]; clients minimise the mean over a batch.
Outputs are logits [n, classes] for classes [n] (a token of text is a sample), numbers [n, D] for numbers [n, D], and
logits [n, labels] for several labels a sample, 0 or 1 [n, labels]. A pixel of a mask is a sample, too, but for losses
of whole masks (`is_whole`): they get [n, H, W, classes] and [n, H, W]. In training a model with exits gives the outputs
of all of them, [n, exits, ...]; the loss is then the sum over exits, without the loss or the method knowing of it.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fl.base.errors import FLError
from fl.base.plugins import describe_failure, find, is_path
from fl.base.settings import choice
from fl.data.arrays import UNSCORED
from surgery.transfer import double

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

DEFAULT = "default"
_DEFAULTS = {
    "classification": "cross_entropy",
    "segmentation": "cross_entropy",
    "regression": "mse",
    "multilabel": "bce",
}
_CLASSES = ("classification", "segmentation")
NAMES = {
    "cross_entropy": _CLASSES,
    "focal": _CLASSES,
    "dice": ("segmentation",),
    "dice_cross_entropy": ("segmentation",),
    "mse": ("regression",),
    "mae": ("regression",),
    "huber": ("regression",),
    "bce": ("multilabel",),
}
"""Loss -> the tasks that it is for."""


def is_whole(loss: Loss) -> bool:
    """Return whether a loss is of whole masks: it has an attribute `whole`."""
    return getattr(loss, "whole", False)


def per_sample(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss of each sample, [n], or of each token, [n * T]: 0 if unscored.

    Sequences with a label a token have a loss of each token.

    Likewise of masks of each pixel, [n * H * W], or, with a loss of whole masks, [n].
    """
    if has_exits(outputs, targets):
        return torch.stack([per_sample(loss, of_one, targets) for of_one in outputs.unbind(1)]).sum(0)
    if targets.is_floating_point() or is_whole(loss):
        return loss(outputs, targets)
    losses = loss(outputs.flatten(0, -2), targets.flatten())
    return torch.where(is_scored(targets.flatten()), losses, 0) if targets.ndim > 1 else losses


def is_scored(targets: Tensor) -> Tensor:
    """Return which labels count: all but those that are UNSCORED.

    They are of tokens that text has for its context alone, and of pixels whose class is not known.
    """
    return targets != UNSCORED


def weights_of(loss: Loss, targets: Tensor) -> Tensor:
    """Return each sample's weight in a mean of the loss, [n].

    It is the number of tokens or pixels that count, or else 1.

    >>> weights_of(cross_entropy, torch.tensor([[0, 2, -100], [1, 1, 1]])), weights_of(cross_entropy, torch.zeros(2, 3))
    (tensor([2, 3]), tensor([1, 1]))
    """
    if targets.is_floating_point() or targets.ndim == 1 or is_whole(loss):
        return torch.ones(len(targets), dtype=torch.int64, device=targets.device)
    return is_scored(targets).flatten(1).sum(1)


def of_samples(losses: Tensor, loss: Loss, targets: Tensor) -> Tensor:
    """Average what `per_sample` gives within each sample, [n].

    The mean is over tokens or pixels that count; 0 if none does.
    """
    return losses.view(len(targets), -1).sum(1) / weights_of(loss, targets).clamp(min=1)


def has_exits(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether outputs come from several exits, [n, exits, ...].

    >>> has_exits(torch.zeros(8, 4, 10), torch.zeros(8).long()), has_exits(torch.zeros(8, 10), torch.zeros(8).long())
    (True, False)
    """
    return outputs.ndim - targets.ndim == (1 if targets.is_floating_point() else 2)


def mean(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean over the samples (or the tokens that count) of a batch."""
    if has_exits(outputs, targets):
        return torch.stack([mean(loss, of_one, targets) for of_one in outputs.unbind(1)]).sum()
    if loss is cross_entropy and targets.ndim < 3:  # which torch averages in its own order
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    if loss is cross_entropy:
        total = F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="sum")  # as models of masks lay them out
        return total / is_scored(targets).sum().clamp(min=1)  # crops of masks may leave no pixel that counts
    losses = per_sample(loss, outputs, targets)
    if targets.is_floating_point() or targets.ndim == 1 or is_whole(loss):
        return losses.mean()
    return losses.sum() / is_scored(targets).sum().clamp(min=1)


def measure(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the same for an evaluation, in float64 where the device has it.

    Losses other than cross entropy are computed in the outputs' type: one of your own may hold tensors of that type.
    """
    return double(per_sample(loss, double(outputs) if loss is cross_entropy else outputs, targets))


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of each sample, the default of classification."""
    return F.cross_entropy(outputs, targets, reduction="none")


def by_name(name: str, task: str, smoothing: float = 0.0, weights: Sequence[float] = (), outputs: int = 0) -> Loss:
    """Make a loss.

    Args:
        name: one of `NAMES`; "default" is cross_entropy, mse or bce (binary cross entropy), as the task is; or the
            import path `module:function` of your own. focal is (1 - p)^2 times the cross entropy (Lin et al., ICCV
            2017, equation 4 with gamma 2).
        task: "classification", "regression", "multilabel" or "segmentation", see `fl.Dataset`.
        smoothing: of the labels in cross_entropy (Szegedy et al., CVPR 2016, section 7).
        weights: of the classes, in cross_entropy, dice_cross_entropy and focal; in bce, of the labels where they are 1.
            A sample's loss is multiplied by its class's weight; the mean is over the samples, whatever they weigh.
            Dice itself counts all classes alike.
        outputs: how many the model has, which are as many as there are weights.

    Raises:
        FLError: for an unknown name, a loss of another task, and weights that do not fit.

    >>> loss = by_name("cross_entropy", "classification", weights=(1.0, 3.0), outputs=2)
    >>> loss(torch.zeros(2, 2), torch.tensor([0, 1]))
    tensor([0.6931, 2.0794])
    """
    if is_path(name):
        if weights or smoothing:
            raise FLError(
                f"--class-weights and --label-smoothing are for losses by name, not for {name}: leave them out"
            )
        return _check_custom(name, find("loss", name), whole=task == "segmentation")
    chosen = _DEFAULTS[task] if name == DEFAULT else name
    choice("--loss", [chosen], NAMES, "FUNCTION")
    if task not in NAMES[chosen]:
        able = ", ".join(other for other, its in NAMES.items() if task in its)
        raise FLError(
            f"--loss {name} is for {' and '.join(NAMES[chosen])}, and the data are for {task}: choose {able}",
            code="unsupported",
        )
    if weights and len(weights) != outputs:
        raise FLError(
            f"--class-weights gives {len(weights)} weights, and the model has {outputs} outputs: give one each"
        )
    if chosen == "cross_entropy" and not smoothing and not weights:
        return cross_entropy
    if smoothing and chosen != "cross_entropy":
        raise FLError(f"--label-smoothing is for cross_entropy, not for {chosen}: leave it out")
    if weights and not any(weights):
        raise FLError("--class-weights are all 0, so that nothing would be learnt: give at least one above 0")
    if weights and task == "regression":
        raise FLError(
            "--class-weights are for classes, and the targets are numbers: leave them out", code="unsupported"
        )
    if weights and chosen == "dice":
        raise FLError(
            "--class-weights are for losses of single pixels, and dice counts all classes alike: leave it out"
        )
    return _make(chosen, smoothing, tuple(weights))


def check_runs(name: str, loss: Loss, shape: Sequence[int], targets: Tensor) -> None:
    """Raise FLError if a loss of one's own fails on some samples.

    Args:
        shape: of a model's outputs for one sample. targets: of the samples.
    """
    outputs = torch.randn(len(targets), *shape, generator=torch.Generator().manual_seed(0)).to(targets.device)
    try:
        per_sample(loss, outputs.requires_grad_(), targets)
    except FLError:
        raise
    except Exception as error:  # it is the user's own code
        raise FLError(f"--loss {name} fails: {describe_failure(error)}", code="run") from None


def dice(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the Dice loss of each sample, [n].

    It is 1 - mean over classes of 2 sum p y / (sum p + sum y).

    Sums are over the pixels that count, p are the softmax's probabilities of the class and y is 1 where it is the
    label. The mean is over the classes that the sample's mask has. (Milletari et al., "V-Net", 3DV 2016, section 3, who
    square p in the denominator; without squares Sudre et al., DLMIA 2017, section 2.1.)

    Args:
        outputs: logits [n, ..., classes]. targets: [n, ...], `UNSCORED` where a pixel does not count.

    >>> logits = 20 * torch.eye(3)[torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]])]
    >>> dice(logits, torch.tensor([[0, 1, 1, 1], [2, 2, -100, 2]]))
    tensor([0.2667, 0.0000])
    """
    truth = targets.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=targets.device)
    shares = outputs.softmax(-1, dtype=torch.promote_types(outputs.dtype, torch.float32))
    shares, truth = (shares * is_scored(targets).unsqueeze(-1)).flatten(1, -2), truth.flatten(1, -2).to(shares.dtype)
    there = truth.amax(1)
    overlap = 2 * (shares * truth).sum(1) / (shares + truth).sum(1).clamp(min=1)  # a class that is there has one pixel
    return ((1 - overlap) * there).sum(1) / there.sum(1).clamp(min=1)


dice.whole = True  # type: ignore[attr-defined]


def _check_custom(name: str, loss: Loss, whole: bool) -> Loss:
    def compute(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = loss(outputs.movedim(-1, 1) if whole else outputs, targets)
        if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:1]:
            shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise FLError(
                f"--loss {name} returns {shape} for {len(outputs)} samples: let it return the loss of each, "
                f"[{len(outputs)}], as torch's losses do with reduction='none'",
                code="run",
            )
        if not losses.is_floating_point() or (outputs.requires_grad and not losses.requires_grad):
            why = "has no gradient" if losses.is_floating_point() else f"is {losses.dtype}"
            raise FLError(
                f"--loss {name} {why}, so that nothing can be trained with it: compute it from the outputs", code="run"
            )
        return losses

    compute.whole = whole  # type: ignore[attr-defined]
    return compute


def _make(name: str, smoothing: float, weights: tuple[float, ...]) -> Loss:
    def weight(like: Tensor) -> Tensor | None:
        return torch.tensor(weights, dtype=like.dtype, device=like.device) if weights else None

    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, weight(outputs), reduction="none", label_smoothing=smoothing)

    def focal(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        scale = (1 - (-losses).exp()) ** 2
        return scale * losses * (weight(outputs)[targets.clamp(min=0)] if weights else 1)

    def dice_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), weight(outputs), reduction="none")
        number = is_scored(targets).flatten(1).sum(1).clamp(min=1)
        return dice(outputs, targets) + losses.view(len(targets), -1).sum(1) / number

    dice_cross_entropy.whole = True  # type: ignore[attr-defined]

    def bce(outputs: Tensor, targets: Tensor) -> Tensor:
        targets = targets.to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight(outputs), reduction="none")
        return losses.mean(1)

    def of_numbers(apart: Callable[..., Tensor]) -> Loss:
        return lambda outputs, targets: apart(outputs, targets.to(outputs.dtype), reduction="none").mean(1)

    return {
        "cross_entropy": smoothed,
        "focal": focal,
        "dice": dice,
        "dice_cross_entropy": dice_cross_entropy,
        "bce": bce,
        "mse": of_numbers(F.mse_loss),
        "mae": of_numbers(F.l1_loss),
        "huber": of_numbers(F.huber_loss),
    }[name]
