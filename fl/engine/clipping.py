"""The gradient of a step in which no sample counts for more than a bound: DP-SGD.

Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016), algorithm 1. What epsilon that is depends on how
batches are drawn, see `fl.federation.privacy`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fl.base.errors import FLError
from fl.engine.draws import Draws
from fl.engine.objectives import Batch
from fl.engine.precision import plain_attention
from surgery import State
from surgery.errors import first_line

_SAMPLES, _NOISE = 2, 3  # streams of a step's key; the model's draws and those of augmentation are 0 and 1


class SampleClip(NamedTuple):
    """How a step's gradient is clipped.

    Attributes:
        bound: the largest norm of one sample's gradient, over all parameters.
        noise: standard deviation of the noise on the sum of a batch's gradients, in bounds.
    """

    bound: float
    noise: float = 0.0

    def gradients(
        self, loss: Callable[[State, Batch, Draws], Tensor], params: State, batch: Batch, key: Tensor
    ) -> tuple[Tensor, State]:
        """The mean over the samples of their losses, and that of their clipped gradients, with noise; of one client.

        The loss is called for each sample as a batch of one. So a term that does not depend on samples, such as
        FedProx's, is part of each sample's gradient, and clipped with it. A number of a gradient that is not finite
        counts as 0. Every parameter gets noise, also one that the model has not used.

        Args:
            loss: (params, batch, draws) -> a scalar.
            key: of the step; from it comes a sequence of random numbers for each sample, and one for the noise.

        Raises:
            FLError: where gradients cannot be taken for all samples at once.

        >>> loss = lambda params, batch, draws: (params["w"] * batch[0]).sum()
        >>> params, batch = {"w": torch.ones(2)}, (torch.tensor([[3.0, 4.0], [0.0, 0.5]]),)
        >>> SampleClip(1.0).gradients(loss, params, batch, torch.tensor(7))
        (tensor(3.7500), {'w': tensor([0.3000, 0.6500])})
        """

        def of_one(params: State, sample: Batch, key: Tensor) -> Tensor:
            return loss(params, tuple(tensor.unsqueeze(0) for tensor in sample), Draws(key))

        size, here = len(batch[0]), {name: tensor.detach() for name, tensor in params.items()}
        keys = Draws(key, _SAMPLES).bits((size,))
        try:
            with plain_attention:  # see `fl.engine.vmap.train`
                each, losses = vmap(grad_and_value(of_one), in_dims=(None, 0, 0))(here, batch, keys)
        except RuntimeError as error:
            if not any(part in str(error) for part in ("vmap", "torch.func", "atching rule", "expected scalar type")):
                raise
            low = "expected scalar type" in str(error)  # torch has no such gradient of a norm under autocast
            raise FLError(
                f"this model has no gradient for each sample: {first_line(error)}; take another one, or leave "
                f"--sample-privacy.clip{' or --precision' * low} out"
            ) from error
        each = {name: torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) for name, g in each.items()}
        norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
        shares = torch.where(norms > self.bound, self.bound / norms, 1.0) / size
        mean = {name: torch.tensordot(shares.to(g.dtype), g, dims=1) for name, g in each.items()}
        if self.noise:
            draws, deviation = Draws(key, _NOISE), self.noise * self.bound / size
            mean = {name: g + deviation * draws.normal(tuple(g.shape)).to(g.dtype) for name, g in mean.items()}
        return losses.mean(), mean
