"""Random changes of training samples, as tensor operations on the device."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fl.data.arrays import UNSCORED
from fl.engine.draws import Draws


class Augment(NamedTuple):
    """Random crops and flips of images, masks of text.

    The random numbers depend only on the client and its step.

    The places where images are cut out are drawn for all steps of a round at once (`draw`), since drawing takes many
    small kernels; each step then cuts its own images (`cut`).

    Attributes:
        crop: zeros put around an image before it is cut back to its size at a random place, in pixels; 0: none.
        flip: mirror half of the images.
        mask: the share of a text's tokens that are replaced by `token`, for a masked language model.

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

    def __call__(self, samples: Tensor, key: Tensor, places: Tensor | None = None) -> Tensor:
        """Augmented samples.

        Args:
            samples: images [*leading, B, C, H, W] of any dtype, or tokens [*leading, B, T].
            key: int32 [*leading], the key of each client's step.
            places: where images are cut out; None: they are sampled here.
        """
        if self.mask:
            return self.mask_tokens(samples, key)
        if not self.moves:
            return samples
        if places is None:
            places = self.draw(key, batch=samples.shape[-4], width=samples.shape[-1])
        return self.cut(samples, places)

    @property
    def moves(self) -> bool:
        """True if images are cut out at random places, or mirrored."""
        return bool(self.crop or self.flip)

    def draw(self, key: Tensor, batch: int, width: int) -> Tensor:
        """Return where the images of each key's batch are cut out: int64 [*leading, B, 2].

        The two numbers are the first pixel, counted row by row in the image with its border of zeros, and the direction
        in which columns are read from there, 1 or -1.

        Args:
            key: int32 [*leading]. batch: B. width: of the images, in pixels.
        """
        drawn = Draws(key, stream=1).several(self.flip + 2 * bool(self.crop), (batch,))
        flipped = (drawn[..., 0, :] < 0.5).long() if self.flip else drawn.new_zeros((), dtype=torch.int64)
        first = (width - 1) * flipped
        if self.crop:
            row, column = (drawn[..., -2:, :] * (2 * self.crop + 1)).long().unbind(-2)
            first = (first + column).add_(row, alpha=width + 2 * self.crop)
        return torch.stack(torch.broadcast_tensors(first, 1 - 2 * flipped), -1)

    def cut(self, images: Tensor, places: Tensor, border: int = 0) -> Tensor:
        """Return images [*leading, B, C, H, W], cut out at places [*leading, B, 2].

        Args:
            border: the value of what is put around them.
        """
        channels, height, width = images.shape[-3:]
        bordered = F.pad(images, (self.crop,) * 4, value=border) if self.crop else images
        first, way = places.flatten(0, -2).split(1, dim=-1)  # [N, 1] each
        along = torch.arange(height * bordered.shape[-1], device=images.device)
        pixels = torch.addcmul(first, way, along[:width])[:, None] + along[:: bordered.shape[-1], None]  # [N, H, W]
        chosen = pixels.flatten(1)[:, None].expand(-1, channels, -1)
        return bordered.reshape(len(first), channels, -1).gather(2, chosen).view(images.shape)

    def move_masks(self, masks: Tensor, places: Tensor | None) -> Tensor:
        """Return masks [*leading, B, H, W], cut out and mirrored as their images are.

        What crops put around a mask counts for nothing.
        """
        if not self.moves or places is None:
            return masks
        return self.cut(masks.unsqueeze(-3), places, border=UNSCORED).squeeze(-3)

    def mask_tokens(self, tokens: Tensor, key: Tensor) -> Tensor:
        """Return tokens [*leading, B, T]; a share of them is replaced by `token`."""
        return tokens.masked_fill(Draws(key, stream=1).keep(self.mask, tuple(tokens.shape[key.ndim :])), self.token)
