"""Look at a model, and at what surgery makes of it: `python -m surgery inspect MODEL`."""

import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from surgery.errors import SurgeryError
from surgery.inspect.describe import describe
from surgery.inspect.draw import check_picture, draw
from surgery.inspect.report import inspect
from surgery.inspect.steps import Steps
from surgery.libraries import named

_HELP = """\
usage: python -m surgery inspect MODEL [--width RATE] [--depth INT,...] [--json] [--plot FILE] ...

Look at a model, and at what surgery makes of it.

commands:
  inspect MODEL    print layers, sections and coupled widths, before and after a cut

examples:
  python -m surgery inspect torchvision:resnet50
  python -m surgery inspect torchvision:resnet50 --width 0.5 --depth 2,2,4,2 --plot resnet50.png
  python -m surgery inspect timm:vit_tiny_patch16_224 --width 0.5 --heads drop --json

`python -m surgery inspect --help` lists all options."""


_DEEPEST = 500  # blocks of a section; more than any published network has, and few enough to be copied in a minute


_LONGEST = 10**6  # seconds that a step may take


def _integers(strings: list[str]) -> tuple[int, ...]:
    items = [item.strip() for item in strings[0].split(",")]
    if "" in items:
        raise ValueError(f"{strings[0]!r} has an empty item: write one comma between two items, and none at the end")
    try:
        return tuple(map(int, items))
    except ValueError:
        raise ValueError(f"{strings[0]!r} is not a list of whole numbers, such as 2,2,4,2") from None


Integers = Annotated[
    tuple[int, ...] | None,  # both in one, as tyro's errors about a union show the code of its parts
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT,...",
        instance_from_str=_integers,
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: [str(value) if value is None else ",".join(map(str, value))],
    ),
]


@dataclass(frozen=True)
class Inspect:
    """Print the layers, sections and coupled widths of a model; with --width or --depth also what they become."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """timm:NAME or torchvision:NAME; the weights are random"""
    width: Annotated[float | None, tyro.conf.arg(metavar="RATE")] = None
    """share of every hidden width to keep, in (0, 1]"""
    depth: Annotated[Integers, tyro.conf.arg(metavar="INT,...")] = None
    """number of blocks of each section, comma-separated: surplus blocks are dropped, missing ones grafted"""
    heads: Literal["inside", "drop"] = "inside"
    """what --width does to attention: slice inside every head, or drop heads"""
    input: Annotated[Integers, tyro.conf.arg(metavar="INT,...")] = None
    """shape of one input, such as 3,224,224 [the one that the model was made for]"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead: all shapes, widths, sizes and fingerprints"""
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """draw the widths of all layers into a .png, .svg or .pdf file"""
    seconds: float = 60
    """limit of each step; what a step that is stopped would have found is missing, the rest is printed"""

    def run(self) -> None:
        """Carry out the command."""
        if self.plot:
            check_picture(self.plot)
        if self.input is not None and any(size < 1 for size in self.input):
            raise SurgeryError(f"--input {','.join(map(str, self.input))}: sizes must be 1 or more")
        if self.depth is not None and max(self.depth) > _DEEPEST:
            raise SurgeryError(f"--depth {max(self.depth)}: a section may get at most {_DEEPEST} blocks")
        if self.width is not None and not 0 < self.width <= 1:
            raise SurgeryError(f"--width {self.width:g}: give a share of the widths, above 0 and at most 1")
        if not 0 < self.seconds <= _LONGEST:
            raise SurgeryError(f"--seconds {self.seconds:g}: give more than 0, and at most {_LONGEST:,}")
        steps = Steps(self.seconds, sys.stderr)
        model = steps("building the model", lambda: named(self.model))
        if model is None:
            raise SurgeryError(f"building {self.model} took more than {self.seconds:g} s: give more --seconds")
        report = inspect(
            model,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            shape=self.input,
            name=self.model,
            steps=steps,
        )
        if self.plot:
            draw(report, self.plot)
        print(json.dumps(report.as_dict()) if self.json else describe(report))
        if self.plot and not self.json:
            print(f"\nsaved the picture as {self.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, or 2 if the command cannot be carried out."""
    command, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if command in ("-h", "--help"):
        print(_HELP)
        return 0
    try:
        if command != "inspect":
            near = difflib.get_close_matches(command, ["inspect"], n=1)
            hint = "did you mean 'inspect'?" if near else "the only command is 'inspect'; see python -m surgery --help"
            raise SurgeryError(f"unknown command {command!r}: {hint}")
        tyro.cli(Inspect, prog="python -m surgery inspect", args=rest).run()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (SurgeryError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("error: out of memory: give a smaller model or a smaller --input", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
