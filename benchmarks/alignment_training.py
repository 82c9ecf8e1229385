"""The networks that `alignment.py` compares: trained apart, and kept on the way, so that the script can be resumed."""

import itertools
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import zoo
from fl.data import Dataset, TextOptions, load
from surgery import load as load_state
from surgery import state


class Case(NamedTuple):
    """A kind of network and its data.

    Attributes:
        data: the data set's name.
        model: of the zoo; empty for a perceptron with three hidden layers; `pre-norm` for timm's Vision Transformer on
            images and for `CharGPT` on text.
        norm: the zoo model's, `layer`, `batch` or `none`.
        samples: the first ones of the training data are learned from, this many; 0 for all.
        epochs: how often each is seen.
    """

    data: str
    model: str
    norm: str
    samples: int
    epochs: int


CASES = {
    "mlp-digits": Case("digits", "", "", 0, 100),
    "mlp-fashion": Case("fashion-mnist", "", "", 0, 10),
    "vgg11-bn-cifar": Case("cifar10", "vgg11", "batch", 20000, 8),
    "vgg11-cifar": Case("cifar10", "vgg11", "layer", 20000, 8),
    "vgg11-plain-cifar": Case("cifar10", "vgg11", "none", 20000, 8),
    "resnet20-cifar": Case("cifar10", "resnet20", "layer", 20000, 6),
    "resnet20-bn-cifar": Case("cifar10", "resnet20", "batch", 20000, 6),
    "vit-digits": Case("digits", "pre-norm", "", 0, 60),
    "gpt-pydoc": Case("pydoc", "pre-norm", "", 0, 5),
}


def data_of(case: Case) -> Dataset:
    """Return the data of a case; text as sequences of 64 bytes."""
    return load(case.data, text=TextOptions("byte", length=64))


class CharGPT(nn.Module):
    """A causal language model with norms before its layers: [N, T] -> [N, T, vocabulary]."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.token(tokens) + self.position.weight, mask=self.mask, is_causal=True))


def new_model(case: Case, images: Tensor, classes: int, seed: int, width: float) -> nn.Module:
    """Return the model of a case, before it is trained."""
    if not case.model:
        torch.manual_seed(seed)
        sizes = [images[0].numel(), *[round(512 * width)] * 3]
        hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-1], classes))
    if case.model == "pre-norm":
        torch.manual_seed(seed)
        size = round(64 * width)
        if images.ndim == 2:
            return CharGPT(classes, images.shape[1], size)
        return VisionTransformer(images.shape[2], 2, images.shape[1], classes, embed_dim=size, depth=4, num_heads=4)
    generator = torch.Generator().manual_seed(seed)
    shape = {"in_channels": images.shape[1], "image_size": images.shape[2], "num_classes": classes}
    return zoo.create(case.model, norm=case.norm, width=width, generator=generator, **shape)


def trained(model: nn.Module, data: Dataset, samples: int, epochs: int, seed: int, kept: Path) -> nn.Module:
    """Return the model after training: Adam, a cosine from 1e-3 to 0, batches of 128, no augmentation.

    Args:
        kept: a file that holds the training as it is after each epoch. If it is there, training goes on from it.
    """
    images = data.x.ndim == 4
    if images:
        model = model.to(memory_format=torch.channels_last)  # up to 1.4 times as fast
    generator = torch.Generator().manual_seed(seed)
    steps = samples // 128
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    done = 0
    if kept.exists():
        held = torch.load(kept, weights_only=True)
        done = held["epochs"]
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        schedule.load_state_dict(held["schedule"])
        generator.set_state(held["generator"])
    model.train()
    for epoch in range(done, epochs):
        for batch in torch.randperm(samples, generator=generator).split(128)[:steps]:
            x = data.normalise(data.x[batch])
            x = x.contiguous(memory_format=torch.channels_last) if images else x
            loss = F.cross_entropy(model(x).flatten(0, -2), data.y[batch].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        held = {"epochs": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        held |= {"schedule": schedule.state_dict(), "generator": generator.get_state()}
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".part")
        torch.save(held, part)
        os.replace(part, kept)
        print(f"{kept.stem}: epoch {epoch + 1} of {epochs}, loss {loss.item():.3f}", flush=True)
    model = model.to(memory_format=torch.contiguous_format) if images else model
    return load_state(model, {name: tensor.contiguous() for name, tensor in state(model).items()}).eval()
