"""The numbers, memory layout and order with which steps are computed."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl.base.errors import FLError

NAMES = ("float32", "tf32", "bf16")


class Precision(NamedTuple):
    """The precision of forward and backward passes.

    Parameters and optimizer states keep their dtype.

    Attributes:
        name: `float32` computes as the model is; `tf32` lets CUDA round the factors of products to 10 bits of
            mantissa; `bf16` is torch's autocast to bfloat16.
        channels_last: whether images and convolutions have channels as the last axis in memory.
        deterministic: on CUDA, whether cuDNN may only use algorithms for convolutions that always add in one order.
    """

    name: str = "float32"
    channels_last: bool = False
    deterministic: bool = True

    def check(self, device: torch.device) -> None:
        """Raise FLError for a precision that is unknown, or that this device lacks."""
        if self.name not in NAMES:
            raise FLError(f"unknown precision {self.name!r}: there are {', '.join(NAMES)}", code="name")
        if self.name == "tf32" and device.type != "cuda":
            raise FLError(
                f"--precision tf32 needs a CUDA device, not {device}: use float32 or bf16", code="unsupported"
            )

    def lay_out(self, tensor: Tensor) -> Tensor:
        """Lay out images, and the weights of convolutions, in memory as the settings say."""
        if self.channels_last and tensor.ndim == 4:
            return tensor.to(memory_format=torch.channels_last)  # contiguous() leaves a single channel as it is
        return tensor

    def autocast(self, device: torch.device):
        """Return the context of a forward pass."""
        return torch.autocast(device.type, torch.bfloat16) if self.name == "bf16" else nullcontext()


@contextmanager
def arithmetic(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set how exactly CUDA computes in a round.

    Matrix products and convolutions may round to TF32 or not, and cuDNN has to add in one order or not. Afterwards the
    switches are as they were before.

    Torch rounds convolutions to TF32 by default, so `float32` has to switch that off. Within this context torch's older
    switches (`torch.backends.cudnn.flags()`, `allow_tf32`) raise, since they do not know the newer ones.
    """
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    switches = torch.backends.cuda.matmul, cudnn.conv
    before, order = [switch.fp32_precision for switch in switches], cudnn.deterministic
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if precision.name == "tf32" else "ieee"
        cudnn.deterministic = precision.deterministic
        yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value
        cudnn.deterministic = order
