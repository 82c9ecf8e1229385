"""Time models of the zoo against timm's, torchvision's and torch's own of equal size, with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/zoo_speed.py    # prints the table, writes benchmarks/results/zoo-<device>.json

`step` is a training step without the optimiser: forward, cross entropy, backward, gradients back to None. `forward` is
a forward pass in evaluation mode without gradients. Both sides take turns in one process, so that what else the machine
does hits both alike; before that, they must give the same outputs in training mode. Reported is the ratio theirs / ours
(above 1: the zoo is faster): the median over the repetitions, of 0.1 s or one call a side, and their range. Dropout and
stochastic depth are off. The whole run takes three minutes on one core.

Two rows are against a model written below: `cnn` against a plain nn.Sequential, and `transformer` against
nn.TransformerEncoder between the same embedding and head: as many parameters, but q, k and v in one matrix, and heads
before channels. Its vocabulary has 1000 words, for else most of the time goes to the head. The CIFAR ResNets (resnet20,
preresnet20, ...) are missing: neither library has them.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision import models

import zoo
from zoo import load

WORDS, TOKENS, CHANNELS, HEADS, HIDDEN, LAYERS = 1000, 64, 256, 8, 512, 4


def plain_cnn() -> nn.Module:
    first = nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, 10))


class TorchTransformer(nn.Module):
    """nn.TransformerEncoder (post-norm, GELU, causal) between the zoo's embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(WORDS, CHANNELS), nn.Embedding(TOKENS, CHANNELS)
        self.norm, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, WORDS)
        layer = nn.TransformerEncoderLayer(CHANNELS, HEADS, HIDDEN, dropout=0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)
        self.tail = nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.GELU(), nn.LayerNorm(CHANNELS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return self.head(self.tail(self.encoder(x, mask=self.mask, is_causal=True)))


def as_zoo(theirs: TorchTransformer) -> dict[str, Tensor]:
    """Its tensors in the order of the zoo's, which has q, k and v apart and, within each, channels before heads."""

    def turned(t: Tensor, axis: int = 0) -> Tensor:
        return t.unflatten(axis, (HEADS, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)

    tensors = [theirs.token.weight, theirs.position.weight, *theirs.norm.parameters()]
    for layer in theirs.encoder.layers:
        attention = layer.self_attn
        for weight, bias in zip(attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)):
            tensors += [turned(weight), turned(bias)]
        tensors += [turned(attention.out_proj.weight, axis=1), attention.out_proj.bias]
        tensors += [t for m in (layer.norm1, layer.linear1, layer.linear2, layer.norm2) for t in m.parameters()]
    return {str(i): t for i, t in enumerate([*tensors, *theirs.tail.parameters(), *theirs.head.parameters()])}


_IMAGE = {"image_size": 64}
_MOBILE, _EFFICIENT = {**_IMAGE, "dropout": 0}, {**_IMAGE, "dropout": 0, "drop_path": 0}
efficientnet = partial(models.efficientnet_v2_s, dropout=0, stochastic_depth_prob=0)

# Family, what to compare with, how to make that, the batch size and the zoo's arguments.
ROWS = (
    ("cnn", "nn.Sequential", plain_cnn, 16, {}),
    ("resnet18", "torchvision", models.resnet18, 16, _IMAGE),
    ("resnet18", "timm", partial(timm.create_model, "resnet18", zero_init_last=False), 16, _IMAGE),
    ("resnet50", "torchvision", models.resnet50, 16, _IMAGE),
    ("mobilenetv2", "torchvision", partial(models.mobilenet_v2, dropout=0), 16, _MOBILE),
    ("mobilenetv2", "timm", partial(timm.create_model, "mobilenetv2_100"), 16, _MOBILE),
    ("efficientnetv2_s", "torchvision", efficientnet, 16, _EFFICIENT),
    ("efficientnetv2_s", "timm", partial(timm.create_model, "efficientnetv2_s"), 16, {**_EFFICIENT, "norm_eps": 1e-5}),
    ("vgg16", "torchvision", partial(models.vgg16_bn, dropout=0), 2, {"dropout": 0}),
    ("transformer", "nn.Transformer", TorchTransformer, 16, {"num_classes": WORDS, "tokens": TOKENS, "dropout": 0}),
)


def pair(family: str, make: Callable, batch: int, arguments: dict) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """Our model and theirs with the same weights, shown to give the same outputs, an input and its labels."""
    torch.manual_seed(0)
    theirs, spec = make().train(), zoo.Spec(family, **arguments)
    ours = load(spec.build(), as_zoo(theirs) if family == "transformer" else theirs.state_dict())
    x = spec.example(batch)
    x = torch.randn(x.shape) if x.is_floating_point() else torch.randint(WORDS, x.shape)
    with torch.no_grad():
        out = ours(x)
        torch.testing.assert_close(out, theirs(x), rtol=1e-4, atol=1e-4)
    return ours, theirs, x, torch.randint(spec.num_classes, out.shape[:-1])


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def forward(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model(x)


def seconds(call: Callable[[], None], number: int, device: str) -> float:
    """Wall-clock seconds of one call, the mean of several."""
    begin = time.perf_counter()
    for _ in range(number):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / number


def measure(work: Callable, ours: nn.Module, theirs: nn.Module, x: Tensor, y: Tensor, repetitions: int) -> dict:
    """Alternate the sides, pair by pair."""
    name, device = work.__name__, x.device.type
    sides = {"zoo": lambda: work(ours, x, y), "theirs": lambda: work(theirs, x, y)}
    warm = {side: [seconds(call, 1, device) for _ in range(3)] for side, call in sides.items()}
    number = max(1, round(0.1 / min(warm["zoo"])))
    times: dict[str, list[float]] = {side: [] for side in sides}
    for repetition in range(repetitions):
        for side in list(sides) if repetition % 2 else list(sides)[::-1]:
            times[side].append(seconds(sides[side], number, device))
    ratios = [b / a for a, b in zip(*times.values())]
    medians = {f"{name}_{side}_ms": round(1e3 * statistics.median(t), 2) for side, t in times.items()}
    return medians | {f"{name}_ratio": [round(f(ratios), 3) for f in (statistics.median, min, max)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    families = list(dict.fromkeys(row[0] for row in ROWS))
    parser.add_argument("--models", nargs="*", default=families, choices=families)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/zoo-<device>.json")
    args = parser.parse_args()
    path = args.json or Path(__file__).parent / "results" / f"zoo-{args.device}.json"
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    versions = {library.__name__: library.__version__ for library in (torch, torchvision, timm)}
    result = {"device": args.device, "name": name, "threads": torch.get_num_threads(), "machine": platform.machine()}
    result |= {**versions, "repetitions": args.repetitions, "rows": []}
    print(", ".join([name, *(f"{library} {version}" for library, version in versions.items())]))
    print("theirs / ours (range): above 1 the zoo is faster; milliseconds of ours")
    print(f"{'model':17}{'against':15}{'step':>7}{'ms':>24}{'forward':>10}{'ms':>22}")
    for family, against, *how in (row for row in ROWS if row[0] in args.models):
        ours, theirs, x, y = (thing.to(args.device) for thing in pair(family, *how))
        values = measure(step, ours, theirs, x, y, args.repetitions)
        values |= measure(forward, ours.eval(), theirs.eval(), x, y, args.repetitions)
        result["rows"].append({"model": family, "against": against, "input": list(x.shape), **values})
        path.write_text(json.dumps(result, indent=1) + "\n")  # row by row: a run that is cut short keeps them
        cells = (
            "{:7.3f} ({:.2f} to {:.2f}){:9.1f}".format(*values[f"{work}_ratio"], values[f"{work}_zoo_ms"])
            for work in ("step", "forward")
        )
        print(f"{family:17}{against:14}", *cells, flush=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
