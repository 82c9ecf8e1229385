"""The commands that print: what a model or checkpoint holds, how two differ, what surgery can do, what a plan says."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn

import surgery
from surgery.commands.contents import contents, contents_text
from surgery.commands.shared import ModelName, NewFile
from surgery.depth.sections import repeatable
from surgery.errors import SurgeryError
from surgery.inspect.describe import describe
from surgery.inspect.draw import check_picture, draw
from surgery.inspect.report import Steps
from surgery.inspect.report import inspect as report_of
from surgery.libraries import named
from surgery.operations.arguments import Counts, Kind, Shape
from surgery.operations.checkpoint import Model, build, check_runs, example_for, output_for
from surgery.recombine import inverse

_DEEPEST = 500  # blocks of a section; more than any published network has, and few enough to be copied in a minute
_LONGEST = 10**6  # seconds that a step may take


def inspect(
    target: Annotated[str, Kind("MODEL|FILE", positional=True)],
    *,
    model: ModelName | None = None,
    width: Annotated[float, Kind("RATE")] | None = None,
    depth: Counts | None = None,
    heads: Literal["inside", "drop"] = "inside",
    input: Shape | None = None,
    json: bool = False,
    plot: NewFile | None = None,
    seconds: float = 60,
) -> None:
    """Print what a checkpoint holds, or a model's layers, sections and widths.

    With --width or --depth also print what these become. Of a checkpoint print tensors, sections and layers as their
    names show them, and how it was made.

    Args:
        target: timm:NAME or torchvision:NAME, whose weights are random; or a checkpoint: a file or a folder
        model: of a checkpoint, to print its coupled widths, too: timm:NAME, torchvision:NAME or module:factory
        width: share of every hidden width to keep, in (0, 1]
        depth: number of blocks of each section, comma-separated: surplus blocks are dropped, missing ones grafted
        heads: what --width does to attention: slice inside every head, or drop heads
        input: shape of one input, such as 3,224,224 [the one that the model was made for]
        json: print one JSON object instead: all shapes, widths, sizes and fingerprints
        plot: draw the widths of all layers into a .png, .svg or .pdf file
        seconds: limit of each step; what a step that is stopped would have found is missing, the rest is printed
    """
    if is_checkpoint(target):
        if width is not None or depth is not None or plot is not None:
            raise SurgeryError(
                "--width, --depth and --plot need a model by name: give timm:NAME; narrow and ungraft cut checkpoints"
            )
        found = contents(Model.open(Path(target), model, input))
        print(dumps(found) if json else contents_text(found))
        return
    if model is not None:
        raise SurgeryError(f"--model belongs to a checkpoint, and there is no file or folder {target}")
    if input is not None and any(size < 1 for size in input):
        raise SurgeryError(f"--input {','.join(map(str, input))}: sizes must be 1 or more")
    if depth is not None and max(depth) > _DEEPEST:
        raise SurgeryError(f"--depth {max(depth)}: a section may get at most {_DEEPEST} blocks")
    if width is not None and not 0 < width <= 1:
        raise SurgeryError(f"--width {width:g}: give a share of the widths, above 0 and at most 1")
    if not 0 < seconds <= _LONGEST:
        raise SurgeryError(f"--seconds {seconds:g}: give more than 0, and at most {_LONGEST:,}")
    steps = Steps(seconds, sys.stderr)
    net = steps("building the model", lambda: named(target))
    if net is None:
        raise SurgeryError(f"building {target} took more than {seconds:g} s: give more --seconds")
    if plot:
        check_picture(plot)
    report = report_of(net, width=width, depth=depth, heads=heads, shape=input, name=target, steps=steps)
    if plot:
        draw(report, plot)
    print(dumps(report.as_dict()) if json else describe(report))
    if plot and not json:
        print(f"\nsaved the picture as {plot}")


def is_checkpoint(text: str) -> bool:
    """Whether a text means a file or a folder, which need not be there, and no model by name.

    >>> is_checkpoint("timm:resnet18"), is_checkpoint("net.safetensors"), is_checkpoint("folder/net")
    (False, True, True)
    """
    endings = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json")
    return text.endswith(endings) or (":" not in text and ("/" in text or Path(text).exists()))


def check(
    model: Annotated[str, Kind("MODEL|FOLDER", positional=True)],
    *,
    rate: Annotated[float, Kind("RATE")] = 0.5,
    input: Shape | None = None,
    seconds: float = 120,
) -> int:
    """Say what surgery can do to a model of yours, and what not.

    Every operation is tried, strictly; where one does not work it is said why. The exit code is 1 if an operation that
    the model has a use for fails.

    Args:
        model: timm:NAME, torchvision:NAME or module:factory, with arguments if needed: my_models:Net,classes=10; or a
            folder of a transformers' model
        rate: share of every hidden width that the narrow model keeps
        input: shape of one input [the one that the model was made for]
        seconds: limit of each operation
    """
    if not 0 < rate <= 1:
        raise SurgeryError(f"--rate {rate:g}: give a share of the widths, above 0 and at most 1")
    if is_checkpoint(model):
        opened = Model.open(Path(model), shape=input)
        if not opened.described:
            raise SurgeryError(
                f"check runs the model, of which {model} holds tensors only: give timm:NAME, torchvision:NAME, "
                "module:factory, or a folder with its config.json"
            )
        net = opened.loaded()
    else:
        net = build(model).eval()
    example = example_for(net, input)
    tries = {
        "run": lambda: _runs(net, example, input),
        "layers": lambda: _decomposes(net, example),
        "shuffle": lambda: _shuffles(net),
        "narrow": lambda: _narrows(net, example, rate),
        "graft and ungraft": lambda: _deepens(net, example),
    }
    steps, failed = Steps(seconds, sys.stderr), 0
    for name, attempt in tries.items():
        try:
            found = steps(name, attempt)
            good = found is not None
            text = found if good else f"stopped after {seconds:g} s: give more --seconds"
        except SurgeryError as error:
            good, text = False, str(error)
        failed += not good
        print(f"{'yes' if good else 'NO ':3} {name}: {text}")
    return int(failed > 0)


def _runs(model: nn.Module, example: Any, shape: Shape | None) -> str:
    check_runs(model, example, shape)
    return "it runs on its example"


def _decomposes(model: nn.Module, example: Any) -> str:
    found = surgery.layers(model, example=example)
    return f"{len(found)} layers that hold every tensor once, in the order of their first use"


def _shuffles(model: nn.Module) -> str:
    own = surgery.state(model)
    models = surgery.stack([own, {name: torch.zeros_like(tensor) for name, tensor in own.items()}])
    parts = surgery.segments(surgery.layers(model))
    swaps = surgery.permutations(len(parts), k=2, generator=torch.Generator().manual_seed(0))
    mixed = surgery.shuffle(models, segments=parts, permutations=swaps)
    back = surgery.shuffle(mixed, segments=parts, permutations=inverse(swaps))
    if not all(torch.equal(back[name], models[name]) for name in models):
        raise SurgeryError("layers that were exchanged did not come back")
    return "layers are exchanged with another model and come back bit for bit"


def _narrows(model: nn.Module, example: Any, rate: float) -> str:
    small, _ = surgery.narrow(model, rate, example, output=output_for(model), strict=True)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, small))
    return f"every hidden width shrinks to {rate:g}; {before:,} parameters become {after:,}"


def _deepens(model: nn.Module, example: Any) -> str:
    found = [section for section in surgery.sections(model, example=example) if repeatable(model, section)]
    if not found:
        return "nothing to do: the model has no section whose last block could be repeated"
    deeper, _ = surgery.graft(model, depths={s.name: len(s.blocks) + 1 for s in found}, example=example)
    surgery.ungraft(deeper, keep={s.name: len(s.blocks) for s in found}, example=example)
    if len(found) == 1:
        return "1 section gets a block more, and loses it again"
    return f"{len(found)} sections get a block more, and lose it again"
