"""What training samples go through, as tensor operations on the device: no worker processes, no host."""

from typing import NamedTuple

import torch
from torch import Tensor

from fl.draws import Draws


class Augment(NamedTuple):
    """Random crops and flips of images, masks of text; what is drawn depends on the client and its step alone.

    Attributes:
        crop: zeros put around an image before it is cut back to its size at a random place, in pixels; 0: none.
        flip: mirror half of the images.
        mask: the share of a text's tokens that give way to `token`, for a masked language model.

    >>> images = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    >>> Augment(crop=1, flip=True)(images, torch.tensor(5, dtype=torch.int32))
    tensor([[[[4, 5, 6],
              [7, 8, 9],
              [0, 0, 0]]]], dtype=torch.uint8)
    """

    crop: int = 0
    flip: bool = False
    mask: float = 0.0
    token: int = 0

    def __call__(self, samples: Tensor, key: Tensor) -> Tensor:
        """Augmented samples.

        Args:
            samples: images [*leading, B, C, H, W] of any dtype, or tokens [*leading, B, T].
            key: int32 [*leading], that of each client's step.
        """
        draws = Draws(key, stream=1)
        if self.mask:
            return samples.masked_fill(draws.keep(self.mask, tuple(samples.shape[key.ndim :])), self.token)
        return self._images(samples, draws) if self.crop or self.flip else samples

    def _images(self, images: Tensor, draws: Draws) -> Tensor:
        *lead, _, height, width = images.shape
        batch = (lead[-1],)
        rows, columns = (torch.arange(size, device=images.device) for size in (height, width))
        if self.flip:
            columns = torch.where(draws.keep(0.5, batch)[..., None], columns.flip(0), columns)
        if not self.crop:
            return _take(images, columns, -1)
        rows, columns = (
            places + draws.below(2 * self.crop + 1, batch)[..., None] - self.crop for places in (rows, columns)
        )
        return _take(_take(images, rows, -2), columns, -1)


def _take(images: Tensor, places: Tensor, dim: int) -> Tensor:
    """Along one axis of [..., C, H, W], the entries at places [..., size]; zero where there are none."""
    size = images.shape[dim]
    inside = (places >= 0) & (places < size)
    places, inside = (
        t[..., None, None, :] if dim == -1 else t[..., None, :, None] for t in (places.clamp(0, size - 1), inside)
    )
    return images.gather(dim, places.expand(images.shape)) * inside
