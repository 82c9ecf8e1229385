"""The commands that print a checkpoint's contents, and what can be done to it."""

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from torch import nn
from tyro.conf import Positional, arg

import surgery
from surgery.commands import flags
from surgery.commands.checkpoint import Model, build, check_runs, example_for
from surgery.depth.sections import repeatable
from surgery.errors import SurgeryError
from surgery.inspect.contents import contents, contents_text
from surgery.inspect.describe import describe
from surgery.inspect.draw import check_picture, draw
from surgery.inspect.report import Steps, report_of
from surgery.transformers.folders import output_for

_DEEPEST = 500  # blocks of a section; more than any published network has, and few enough to be copied in a minute


def inspect(
    target: Annotated[Positional[str], arg(metavar="MODEL|FILE")],
    *,
    model: flags.ModelName = None,
    width: flags.OptionalShare = None,
    depth: flags.OptionalCounts = None,
    heads: flags.Heads = "inside",
    input: flags.OptionalCounts = None,
    json: flags.Switch = False,
    plot: flags.OptionalFile = None,
    seconds: float = 60,
) -> None:
    """Print a model's layers and widths, or what a checkpoint holds.

    With --width or --depth it also prints what these become.

    Of a checkpoint it prints what the tensors' names show, and how it was made.

    Args:
        target: timm:NAME, torchvision:NAME or module:factory, with random weights; or a checkpoint: a file or a folder
        model: of a checkpoint, to print its coupled widths, too: timm:NAME, torchvision:NAME or module:factory
        width: share of every hidden width to keep, in (0, 1]
        depth: number of blocks of each section, comma-separated: surplus blocks are dropped, missing ones grafted
        heads: what --width does to attention: slice inside every head, or drop heads
        input: shape of one input, such as 3,224,224 [the one that the model was made for]
        json: print one JSON object instead: all shapes, widths, sizes and fingerprints
        plot: draw the widths of all layers into a .png, .svg or .pdf file
        seconds: limit of each step; what a stopped step would have found is missing, the rest is printed
    """
    flags.check_share("--width", width)
    if input is not None and any(size < 1 for size in input):
        raise SurgeryError(f"--input {','.join(map(str, input))}: give sizes of 1 or more", code="argument")
    if is_checkpoint(target):
        if width is not None or depth is not None or plot is not None:
            raise SurgeryError("--width, --depth and --plot take timm:NAME; narrow cuts checkpoints", code="argument")
        opened = Model(Path(target), model, input)
        widths = [] if model is None else surgery.widths(opened.build(), **opened.run_arguments())
        content = contents(opened.checkpoint, widths)
        print(dumps(content) if json else contents_text(content, widths))
        return
    if model is not None:
        raise SurgeryError(f"--model belongs to a checkpoint, and there is no file or folder {target}", code="file")
    if depth is not None and max(depth) > _DEEPEST:
        raise SurgeryError(f"--depth {max(depth)}: a section may get at most {_DEEPEST} blocks", code="argument")
    if plot is not None:
        check_picture(plot)
    steps = Steps(seconds, sys.stderr)
    net = steps("building the model", lambda: build(target))
    if net is None:
        raise SurgeryError(f"building {target} took more than {seconds:g} s: give more --seconds", code="run")
    report = report_of(net, width=width, depth=depth, heads=heads, shape=input, name=target, steps=steps)
    if plot is not None:
        draw(report, plot)
    print(dumps(report.as_dict()) if json else describe(report))
    if plot is not None and not json:
        print(f"\nsaved the picture as {plot}")


def is_checkpoint(text: str) -> bool:
    """Return whether a text means a file or folder, there or not, and no model's name.

    >>> is_checkpoint("timm:resnet18"), is_checkpoint("net.safetensors"), is_checkpoint("folder/net")
    (False, True, True)
    """
    endings = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json")
    return text.endswith(endings) or (":" not in text and ("/" in text or Path(text).exists()))


def check(
    model: Annotated[Positional[str], arg(metavar="MODEL|FOLDER")],
    *,
    width: flags.Share = 0.5,
    input: flags.OptionalCounts = None,
    seconds: float = 120,
) -> int:
    """Say what surgery can do to a model of yours, and what not.

    Every operation is tried, strictly, and it is said why one does not work.

    The exit code is 1 if an operation that the model has a use for fails.

    Args:
        model: timm:NAME, torchvision:NAME or module:factory (my_models:Net,classes=10); or a transformers' folder
        width: share of every hidden width that the narrow model keeps
        input: shape of one input [the one that the model was made for]
        seconds: limit of each operation
    """
    flags.check_share("--width", width)
    if is_checkpoint(model):
        opened = Model(Path(model), shape=input)
        if not opened.described:
            raise SurgeryError(
                f"check runs the model, of which {model} holds tensors only: give timm:NAME, torchvision:NAME, "
                "module:factory, or a folder with its config.json",
                code="argument",
            )
        net = opened.load()
    else:
        net = build(model).eval()
    example = example_for(net, input)

    def runs() -> str:
        check_runs(net, example, input)
        return "it runs on its example"

    def decomposes() -> str:
        layers = surgery.layers(net, example=example)
        return f"{len(layers)} layers that hold every tensor once, in the order of their first use"

    def narrows() -> str:
        small, _ = surgery.narrow(net, width, example, output=output_for(net), strict=True)
        before, after = (sum(p.numel() for p in m.parameters()) for m in (net, small))
        return f"every hidden width shrinks to {width:g}; {before:,} parameters become {after:,}"

    tries = {"run": runs, "layers": decomposes, "narrow": narrows, "graft and ungraft": lambda: _deepen(net, example)}
    steps, failed = Steps(seconds, sys.stderr), 0
    for name, attempt in tries.items():
        try:
            text = steps(name, attempt)
            good, text = text is not None, text or f"stopped after {seconds:g} s: give more --seconds"
        except SurgeryError as error:
            good, text = False, str(error)
        failed += not good
        print(f"{'yes' if good else 'NO ':3} {name}: {text}")
    return int(failed > 0)


def _deepen(model: nn.Module, example: Any) -> str:
    candidates = [section for section in surgery.sections(model, example=example) if repeatable(model, section)]
    if not candidates:
        return "nothing to do: the model has no section whose last block could be repeated"
    deeper, _ = surgery.graft(model, depths={s.name: len(s.blocks) + 1 for s in candidates}, example=example)
    surgery.ungraft(deeper, keep={s.name: len(s.blocks) for s in candidates}, example=example)
    if len(candidates) == 1:
        return "1 section gets a block more, and loses it again"
    return f"{len(candidates)} sections get a block more, and lose it again"
