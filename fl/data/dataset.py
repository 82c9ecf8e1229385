"""The form that every data set has once it is loaded: images and labels, or text, on one device."""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.memory import ask
from fl.base.rng import Rng


@dataclass(frozen=True)
class Dataset:
    """Samples of the training set, which is dealt out to clients, and of the common test set: images, or text.

    Attributes:
        x, y: training images, uint8 [N, C, H, W], and labels, int64 [N] from 0 to classes - 1; or sequences of
            tokens, int32 [N, T], and the token that comes after each, int64 [N, T].
        test_x, test_y: the same for the test set.
        classes: number of classes; of text the size of the vocabulary.
        top: the largest pixel value. It becomes 1, and 0 becomes -1: normalisation with mean = std = 0.5, as FedMR's
            released code has it for every data set.
        owners, test_owners: the natural owner (e.g. writer) of each training and each test sample, int64 [N], on the
            CPU; None if the data set does not say.
        vocabulary: the word of each token, for `fl.data.tokens.decode`; empty for bytes and images.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    top: int = 255
    owners: Tensor | None = None
    test_owners: Tensor | None = None
    vocabulary: tuple[str, ...] = ()

    @property
    def text(self) -> bool:
        """Whether samples are sequences of tokens, with a label for each token, and not images."""
        return self.x.ndim == 2

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What a model expects: floats in [-1, 1] of uint8 images of any leading shape, int64 of tokens.

        >>> from fl.data import load
        >>> load("digits").normalise(torch.tensor([0, 8, 16], dtype=torch.uint8))
        tensor([-1.,  0.,  1.])
        """
        if self.text:
            return images.long()
        return images.to(dtype).mul_(2 / self.top).sub_(1)

    def padded(self, pixels: int) -> "Dataset":
        """The same images with a border that repeats their edges, so that a white background stays white.

        >>> from fl.data import load
        >>> load("digits").padded(2).x.shape
        torch.Size([1437, 1, 12, 12])
        """
        if not pixels:
            return self
        larger = prod(n + 2 * pixels for n in self.x.shape[-2:]) * self.x.shape[1] * self.x.element_size()
        ask(larger * (len(self.x) + len(self.test_x)), f"--pad {pixels} of {self.name}", "use fewer pixels")
        rows, columns = (torch.arange(-pixels, n + pixels).clamp(0, n - 1) for n in self.x.shape[-2:])
        x, test_x = (images[..., rows, :][..., columns] for images in (self.x, self.test_x))
        return replace(self, x=x, test_x=test_x)

    def pooled(self) -> "Dataset":
        """With the test samples added at the end of the training samples; the test set stays as it is.

        >>> from fl.data import load
        >>> load("digits").pooled().x.shape
        torch.Size([1797, 1, 8, 8])
        """
        x, y, owners = torch.cat([self.x, self.test_x]), torch.cat([self.y, self.test_y]), None
        if self.owners is not None:
            if self.test_owners is None:
                raise FLError(f"--pool: {self.name} does not say who owns its test samples; leave --pool out")
            owners = torch.cat([self.owners, self.test_owners])
        return replace(self, x=x, y=y, owners=owners)

    def sampled(self, number: int) -> "Dataset":
        """With so many of the training samples: always the same random ones, in their order; 0 for all.

        >>> from fl.data import load
        >>> load("digits").sampled(100).x.shape
        torch.Size([100, 1, 8, 8])
        """
        if not number:
            return self
        if number > len(self.y):
            raise FLError(f"--samples {number:,}: {self.name} has {len(self.y):,}; use fewer, or 0 for all")
        chosen = torch.randperm(len(self.y), generator=Rng(0).torch("samples"))[:number].sort().values
        owners = None if self.owners is None else self.owners[chosen]
        return replace(self, x=self.x[chosen], y=self.y[chosen], owners=owners)

    def tested_on(self, index: Tensor) -> "Dataset":
        """With these training samples as its test set, which are those that clients hold out of pooled data."""
        owners = None if self.owners is None else self.owners[index]
        return replace(self, test_x=self.x[index], test_y=self.y[index], test_owners=owners)

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on another device. Owners stay on the CPU, since only partitions read them."""
        tensors = {k: getattr(self, k).to(device) for k in ("x", "y", "test_x", "test_y")}
        return replace(self, **tensors)
