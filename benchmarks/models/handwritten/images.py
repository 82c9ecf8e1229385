"""Convolutional networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import roi_align

from benchmarks.models.case import Case, scaled


class ShuffleUnit(nn.Module):
    """ShuffleNet V2's unit: half of the channels pass, the others are computed, then both are shuffled."""

    def __init__(self, half: int):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(half, half, 1), nn.BatchNorm2d(half), nn.ReLU(),
            nn.Conv2d(half, half, 3, padding=1, groups=half), nn.BatchNorm2d(half), nn.Conv2d(half, half, 1), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        passed, other = x.chunk(2, dim=1)
        x = torch.cat((passed, self.branch(other)), dim=1)
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, -1, height, width)


def shufflenet(s: int) -> nn.Module:
    """Three units in a row: the chunk cuts what the last shuffle mixed."""
    units = [ShuffleUnit(8 * s) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, 16 * s, 3, stride=2), *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * s, 5)
    )


class SqueezeExcite(nn.Module):
    """Residual blocks whose channels are weighted by a small net."""

    def __init__(self, s: int):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 12 * s, 3), nn.Conv2d(12 * s, 12 * s, 3, padding=1)
        self.norm, self.down, self.up = nn.BatchNorm2d(12 * s), nn.Linear(12 * s, 3 * s), nn.Linear(3 * s, 12 * s)
        self.head = nn.Linear(12 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.conv(x))
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3))))))
        return self.head(F.relu(x + y * gate[:, :, None, None]).mean((2, 3)))


class Pyramid(nn.Module):
    """A feature pyramid that returns a dict of maps, each through one shared head."""

    def __init__(self, s: int):
        super().__init__()
        widths = [6 * s, 10 * s, 14 * s]
        self.stages = nn.ModuleDict({
            f"c{i}": nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for i, (a, b) in enumerate(zip([3, *widths], widths))
        })  # fmt: skip
        self.lateral = nn.ModuleDict({f"c{i}": nn.Conv2d(w, 9 * s, 1) for i, w in enumerate(widths)})
        self.head = nn.Conv2d(9 * s, 5, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = {}
        for name, stage in self.stages.items():
            maps[name] = x = stage(x)
        top, found = None, {}
        for name in reversed(maps):
            side = self.lateral[name](maps[name])
            top = side if top is None else side + F.interpolate(top, size=side.shape[-2:], mode="nearest")
            found[name] = self.head(top)
        return found


class Unet(nn.Module):
    """Down, up, and the skips concatenated; group norm."""

    def __init__(self, s: int):
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU())

        self.a, self.b, self.c = block(3, 6 * s), block(6 * s, 10 * s), block(10 * s, 14 * s)
        self.up2, self.up1 = nn.ConvTranspose2d(14 * s, 10 * s, 2, 2), nn.ConvTranspose2d(10 * s, 6 * s, 2, 2)
        self.d, self.e, self.head = block(20 * s, 10 * s), block(12 * s, 6 * s), nn.Conv2d(6 * s, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([b, self.up2(c)], dim=1))
        return self.head(self.e(torch.cat([a, self.up1(d)], dim=1)))


def generator(s: int) -> nn.Module:
    """Return a DCGAN generator: a vector becomes a map, which grows."""
    return nn.Sequential(
        nn.Linear(11, 10 * s * 4), nn.Unflatten(1, (10 * s, 2, 2)), nn.BatchNorm2d(10 * s), nn.ReLU(),
        nn.ConvTranspose2d(10 * s, 6 * s, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(6 * s), nn.ReLU(),
        nn.ConvTranspose2d(6 * s, 3, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip


class Generator(nn.Module):
    """A generator with a size in `view`, conditioned on a class by embedding."""

    def __init__(self, s: int):
        super().__init__()
        self.width = 10 * s
        self.label, self.fc = nn.Embedding(5, 4 * s), nn.Linear(11 + 4 * s, 10 * s * 4)
        self.up, self.out = nn.ConvTranspose2d(10 * s, 6 * s, 4, 2, 1), nn.ConvTranspose2d(6 * s, 3, 4, 2, 1)

    def forward(self, z: Tensor, label: Tensor) -> Tensor:
        x = self.fc(torch.cat([z, self.label(label)], dim=1)).view(-1, self.width, 2, 2)
        return torch.tanh(self.out(F.leaky_relu(self.up(F.relu(x)), 0.2)))


def critic(s: int) -> nn.Module:
    """Return a WGAN critic: layer norms over maps (instance norm), no sigmoid."""
    return nn.Sequential(
        nn.Conv2d(3, 6 * s, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(6 * s, 10 * s, 4, 2, 1),
        nn.InstanceNorm2d(10 * s, affine=True), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(10 * s * 4, 1),
    )  # fmt: skip


def super_resolution(s: int) -> nn.Module:
    """ESPCN: a pixel shuffle at the end, and one between hidden layers."""
    return nn.Sequential(
        nn.Conv2d(1, 8 * s, 5, padding=2), nn.Tanh(), nn.Conv2d(8 * s, 4 * 6 * s, 3, padding=1), nn.PixelShuffle(2),
        nn.PReLU(6 * s), nn.Conv2d(6 * s, 9, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip


class Regions(nn.Module):
    """A head over regions of a map, cut out by roi_align."""

    def __init__(self, s: int):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6 * s, 3, padding=1), nn.ReLU(), nn.Conv2d(6 * s, 10 * s, 3, padding=1))
        self.fc, self.head = nn.Linear(10 * s * 9, 12 * s), nn.Linear(12 * s, 5)

    def forward(self, images: Tensor, boxes: Tensor) -> Tensor:
        cut = roi_align(self.body(images), boxes, output_size=(3, 3), spatial_scale=1.0)
        return self.head(F.relu(self.fc(cut.flatten(1))))


class Detector(nn.Module):
    """A detector of torchvision's manner: a list of images in, a list of dicts out, losses in training."""

    def __init__(self, s: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6 * s, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(6 * s, 10 * s, 3, 2, 1),
            nn.BatchNorm2d(10 * s),
            nn.ReLU(),
        )
        self.scores, self.boxes = nn.Conv2d(10 * s, 3, 1), nn.Conv2d(10 * s, 4, 1)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None):
        height, width = (max(image.shape[i] for image in images) for i in (1, 2))
        batch = images[0].new_zeros(len(images), 3, height, width)
        for place, image in zip(batch, images):
            place[:, : image.shape[1], : image.shape[2]].copy_((image - 0.45) / 0.22)
        x = self.body(batch)
        scores, boxes = self.scores(x).flatten(2).transpose(1, 2), self.boxes(x).flatten(2).transpose(1, 2)
        if self.training:
            chosen = torch.stack([target["labels"] for target in targets])
            wanted = torch.stack([target["boxes"] for target in targets])
            return {"class": F.cross_entropy(scores[:, 0], chosen), "box": F.smooth_l1_loss(boxes[:, 0], wanted)}
        best = scores.softmax(-1).amax(-1).topk(4).indices
        return [{"scores": s[i], "boxes": b[i]} for s, b, i in zip(scores, boxes, best)]


class Deep(nn.Module):
    """Nested residual stages as in a hand-written ResNet: basic blocks, a projection, an attribute for the width."""

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
            self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
            self.pad = stride > 1

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
            if self.pad:  # option A of the paper: a shortcut without parameters
                missing = y.shape[1] - x.shape[1]
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, missing // 2, missing - missing // 2))
            return F.relu(y + x)

    def __init__(self, s: int):
        super().__init__()
        self.conv = nn.Conv2d(3, 6 * s, 3, padding=1, bias=False)
        self.stage1 = nn.Sequential(*(self.Block(6 * s, 6 * s, 1) for _ in range(2)))
        self.stage2 = nn.Sequential(self.Block(6 * s, 10 * s, 2), self.Block(10 * s, 10 * s, 1))
        self.width, self.fc = 10 * s, nn.Linear(10 * s, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(F.relu(self.conv(x))))
        return self.fc(F.avg_pool2d(x, x.shape[-1]).view(-1, self.width))


def _images(size: int = 8, channels: int = 3):
    return lambda: torch.randn(3, channels, size, size)


def _boxes() -> tuple[Tensor, Tensor]:
    boxes = torch.tensor([[0, 0.0, 0.0, 4.0, 5.0], [1, 1.0, 2.0, 7.0, 6.0], [2, 0.0, 0.0, 7.0, 7.0]])
    return torch.randn(3, 3, 8, 8), boxes


def _sizes() -> list[Tensor]:
    return [torch.rand(3, 12, 16), torch.rand(3, 16, 9)]


def _targets() -> list[dict[str, Tensor]]:
    return [{"labels": torch.tensor(1), "boxes": torch.rand(4)} for _ in range(2)]


MODELS = {
    "shufflenet": scaled(shufflenet, _images(), blocks=True),
    "squeeze_excite": scaled(SqueezeExcite, _images()),
    "feature_pyramid": scaled(Pyramid, _images(16)),
    "unet": scaled(Unet, _images()),
    "gan_generator": scaled(generator, lambda: torch.randn(3, 11)),
    "conditional_generator": scaled(Generator, lambda: (torch.randn(3, 11), torch.tensor([0, 4, 2]))),
    "wgan_critic": scaled(critic, _images()),
    "pixel_shuffle": scaled(super_resolution, _images(6, 1)),
    "roi_align": scaled(Regions, _boxes),
    "detector": Case(
        lambda: Detector(2), lambda m: (_sizes(),), lambda: Detector(1), lambda m: (_sizes(), _targets()), False
    ),
    "resnet_option_a": scaled(Deep, _images(), blocks=True),
}
