"""List the models of the zoo with their sizes: `python -m zoo`."""

import json as json_format
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from zoo.errors import ZooError
from zoo.spec import Spec, names


def _shown(metavar: str | None = None, default: str = "") -> Any:
    """Return what --help says of a flag's value, and of its absence, where tyro would print None, () or False."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=default)


def show(
    models: Annotated[tuple[str, ...], tyro.conf.Positional, _shown("[NAME ...]", "[all]")] = (),
    width: Annotated[str, tyro.conf.arg(metavar="RATE,...")] = "1.0",
    depth: Annotated[str, tyro.conf.arg(metavar="INT,...")] = "all",
    num_classes: Annotated[int | None, _shown("INT", "[the model's own]")] = None,
    in_channels: Annotated[int | None, _shown("INT", "[3; 1 for the cnn]")] = None,
    image_size: Annotated[int | None, _shown("INT", "[the model's own]")] = None,
    norm: Annotated[str | None, _shown("NORM", "[the model's own]")] = None,
    yaml: Annotated[bool, tyro.conf.FlagCreatePairsOff, _shown()] = False,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, _shown()] = False,
) -> None:
    """Print parameters, multiply-accumulates of one input, and blocks of each section.

    Without names, all models of the zoo are shown that take the given flags.

    Args:
        models: the models to show
        width: rate of the hidden widths: one for all, or one for each section
        depth: number of blocks: one for all sections, or one for each
        num_classes: number of classes, or of words in the vocabulary
        in_channels: channels of the images
        image_size: height and width of the images
        norm: batch, static_batch, group, layer or none
        yaml: print the specs as YAML instead
        json: print one JSON object a line instead
    """
    if yaml and json:
        raise ZooError("--yaml and --json are two forms of output: give one of them", code="argument")
    given: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    given |= {"norm": norm, "width": _numbers("width", width, float)}
    given |= {"depth": None if depth == "all" else _numbers("depth", depth, int)}
    specs, refused = [], None
    for name in models or names():
        try:
            specs.append(Spec.from_dict({"name": name, **given}))
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
    """Return the numbers of a list with commas between them; the number itself if it is one."""
    try:
        numbers = tuple(map(kind, text.split(",")))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ZooError(f"--{flag} {text!r} is no list of {what} with commas between them", code="argument") from None
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
    """Return the command line. Returns the exit code: 0, or 2 if the command cannot be carried out."""
    program = "layer-surgery zoo" if Path(sys.argv[0]).stem == "layer-surgery" else "python -m zoo"
    try:
        tyro.cli(show, prog=program, args=argv)
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
