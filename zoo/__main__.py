"""List the models of the zoo with their sizes: `python -m zoo`."""

import argparse
import difflib
import inspect
import json as json_format
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from zoo.errors import ZooError
from zoo.spec import Spec, names

FLAGS = {
    "--width RATE,...": "rate of the hidden widths: one for all, or one for each section (default: 1.0)",
    "--depth INT,...": "number of blocks: one for all sections, or one for each",
    "--num-classes INT": "number of classes, or of words in the vocabulary",
    "--in-channels INT": "channels of the images (default: 3; 1 for the cnn)",
    "--image-size INT": "height and width of the images",
    "--norm NORM": "batch, static_batch, group, layer or none",
    "--yaml": "print the specs as YAML instead",
    "--json": "print one JSON object a line instead",
}
"""From each flag, as it is written, to what it does; without one a model is as published."""


class Parser(argparse.ArgumentParser):
    """The command's arguments."""

    def __init__(self, program: str) -> None:
        columns = min(120, shutil.get_terminal_size().columns)
        super().__init__(
            usage=f"{program} [NAME ...] [--FLAG VALUE ...]",
            description=inspect.getdoc(show),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 26, columns),
            add_help=False,
            allow_abbrev=False,
        )
        arguments = self.add_argument_group("arguments")
        arguments.add_argument("models", nargs="*", metavar="[NAME ...]", help="the models to show (default: all)")
        for written, text in FLAGS.items():
            flag, _, value = written.partition(" ")
            kind: dict[str, Any] = {"action": "store_true"}
            if value:
                kind = {"metavar": value, "type": int if value == "INT" else str}
            arguments.add_argument(flag, help=text, **kind)
        arguments.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Raise a ZooError, which names the flag that may have been meant."""
        wrong = next((word.strip(":") for word in message.split() if word.startswith("--")), "")
        near = difflib.get_close_matches(wrong, [written.split()[0] for written in FLAGS], n=1)
        hint = f"did you mean {near[0]}?" if near and near[0] != wrong else "`python -m zoo --help` lists the flags"
        message = re.sub("argument (.*): invalid int value: ('.*')", r"\1: \2 is not a whole number", message)
        message = re.sub("argument (.*): expected one argument", r"\1 needs a value", message)
        raise ZooError(f"{message.replace('unrecognized arguments:', 'unknown flag')}: {hint}", code="argument")


def show(
    models: Sequence[str] = (),
    width: str | None = None,
    depth: str | None = None,
    yaml: bool = False,
    json: bool = False,
    **fields: Any,
) -> None:
    """Print parameters, multiply-accumulates of one input, and blocks of each section.

    Without names, all models of the zoo are shown that take the given flags.
    """
    if yaml and json:
        raise ZooError("--yaml and --json are two forms of output: give one of them", code="argument")
    fields |= {"width": _numbers("width", width or "1", float), "depth": depth and _numbers("depth", depth, int)}
    specs, refused = [], None
    for name in models or names():
        try:
            specs.append(Spec.from_dict({"name": name, **fields}))
        except ZooError as error:
            refused = refused or error
    if refused and (models or not specs):
        raise refused
    if yaml:
        print("---\n".join(spec.to_yaml() for spec in specs), end="")
    elif json:
        print("\n".join(json_format.dumps(_row(spec)) for spec in specs))
    else:
        text = table(specs)
        if sys.stdout.isatty() and max(map(len, text.split("\n"))) > shutil.get_terminal_size().columns:
            text = table(specs, source=False)
        print(text)


def _numbers(flag: str, text: str, kind: Callable[[str], Any]) -> Any:
    """Return the numbers of a comma-separated list, or a single number itself."""
    try:
        numbers = tuple(map(kind, text.split(",")))
    except ValueError:
        noun = "whole numbers" if kind is int else "numbers"
        raise ZooError(f"--{flag} {text!r} is no list of {noun} with commas between them", code="argument") from None
    return numbers[0] if len(numbers) == 1 else numbers


def _row(spec: Spec) -> dict[str, Any]:
    """Return what --json prints of a model."""
    size = spec.count()
    shape = list(spec.example(device="meta").shape[1:])
    values = {"parameters": size.parameters, "macs": size.macs, "input": shape, "sections": spec.depth}
    return {"name": spec.name, **values, "width": spec.width, "source": spec.architecture.source}


def table(specs: Sequence[Spec], source: bool = True) -> str:
    """Return names, parameters, MACs, input and sections of models, aligned.

    Args:
        source: whether the last column says where a model is from.

    >>> from zoo import Spec
    >>> print(table([Spec("resnet18"), Spec("resnet20", width=0.5)]))
    model     parameters    MACs      input  blocks of each section  source
    resnet18  11,689,512  1.81 G  3x224x224  2, 2, 2, 2              He et al., CVPR 2016, table 1
    resnet20      68,290  10.3 M    3x32x32  3, 3, 3                 He et al., CVPR 2016, section 4.2
    """
    rows = [("model", "parameters", "MACs", "input", "blocks of each section", "source")]
    for spec in specs:
        row = _row(spec)
        blocks = ", ".join(map(str, row["sections"]))
        size = "x".join(map(str, row["input"]))
        rows.append((row["name"], f"{row['parameters']:,}", _short(row["macs"]), size, blocks, row["source"]))
    widths = [max(map(len, column)) for column in zip(*rows)]
    align = (str.ljust, str.rjust, str.rjust, str.rjust, str.ljust, str.ljust)[: 6 if source else 5]
    lines = ["  ".join(place(cell, w) for place, cell, w in zip(align, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def _short(count: int) -> str:
    """Return a number with three digits and a unit.

    >>> _short(1_814_073_344), _short(999_600_000), _short(500)
    ('1.81 G', '1 G', '500')
    """
    unit, power = next((u, p) for u, p in (("G", 9), ("M", 6), ("k", 3), ("", 0)) if count >= 0.9995 * 10**p or not p)
    return f"{count / 10**power:.3g} {unit}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, or 2 if it cannot be carried out."""
    program = "layer-surgery zoo" if Path(sys.argv[0]).stem == "layer-surgery" else "python -m zoo"
    try:
        show(**vars(Parser(program).parse_args(argv)))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # the output is full; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 2
    except ZooError as error:
        print(f"error: {error}".replace("python -m zoo", program), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
