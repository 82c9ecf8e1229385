"""`python -m surgery inspect MODEL|FILE`."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from surgery.commands.one import Model
from surgery.commands.shared import Integers
from surgery.errors import SurgeryError

_DEEPEST = 500  # blocks of a section; more than any published network has, and few enough to be copied in a minute
_LONGEST = 10**6  # seconds that a step may take


@dataclass(frozen=True)
class Inspect:
    """Print the layers, sections and coupled widths of a model; with --width or --depth also what they become.

    Of a checkpoint print what it holds: tensors, sections and layers as their names show them, and how it was made.
    """

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL|FILE")]
    """timm:NAME or torchvision:NAME, whose weights are random; or a checkpoint: a file or a folder"""
    model: Model = None
    """of a checkpoint, to print its coupled widths, too: timm:NAME, torchvision:NAME or module:factory"""
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
        if is_checkpoint(self.target):
            self._print_contents()
            return
        if self.model is not None:
            raise SurgeryError(f"--model belongs to a checkpoint, and there is no file or folder {self.target}")
        from surgery.inspect.describe import describe
        from surgery.inspect.draw import check_picture, draw
        from surgery.inspect.report import Steps, inspect
        from surgery.libraries import named

        if self.input is not None and any(size < 1 for size in self.input):
            raise SurgeryError(f"--input {','.join(map(str, self.input))}: sizes must be 1 or more")
        if self.depth is not None and max(self.depth) > _DEEPEST:
            raise SurgeryError(f"--depth {max(self.depth)}: a section may get at most {_DEEPEST} blocks")
        if self.width is not None and not 0 < self.width <= 1:
            raise SurgeryError(f"--width {self.width:g}: give a share of the widths, above 0 and at most 1")
        if not 0 < self.seconds <= _LONGEST:
            raise SurgeryError(f"--seconds {self.seconds:g}: give more than 0, and at most {_LONGEST:,}")
        steps = Steps(self.seconds, sys.stderr)
        model = steps("building the model", lambda: named(self.target))
        if model is None:
            raise SurgeryError(f"building {self.target} took more than {self.seconds:g} s: give more --seconds")
        if self.plot:
            check_picture(self.plot)
        report = inspect(
            model,
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            shape=self.input,
            name=self.target,
            steps=steps,
        )
        if self.plot:
            draw(report, self.plot)
        print(json.dumps(report.as_dict()) if self.json else describe(report))
        if self.plot and not self.json:
            print(f"\nsaved the picture as {self.plot}")

    def _print_contents(self) -> None:
        from surgery.commands.contents import contents, told
        from surgery.operations.subject import Subject

        if self.width is not None or self.depth is not None or self.plot is not None:
            raise SurgeryError(
                "--width, --depth and --plot need a model by name: give timm:NAME; narrow and ungraft cut checkpoints"
            )
        found = contents(Subject.open(Path(self.target), self.model, self.input))
        print(json.dumps(found) if self.json else told(found))


def is_checkpoint(text: str) -> bool:
    """Whether a text means a file or a folder, which need not be there, and no model by name.

    >>> is_checkpoint("timm:resnet18"), is_checkpoint("net.safetensors"), is_checkpoint("folder/net")
    (False, True, True)
    """
    endings = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json")
    return text.endswith(endings) or (":" not in text and ("/" in text or Path(text).exists()))
