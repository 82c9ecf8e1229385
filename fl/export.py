"""Write the trained model of a run into a file or folder: `python -m fl.export RUN FILE`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.base.console import guard
from fl.runs.export import export_model
from fl.settings.help import command


@dataclass(frozen=True)
class Export:
    """Write the trained model of a run into a file or folder, for programs that do not know this project.

    The model takes images normalised to [-1, 1], or tokens, as in training.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """a run folder"""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """the new file: .pt (a state dict) or .safetensors (the same); or a new folder: for transformers' from_pretrained,
    if the model came from it, or with --format peft for peft's"""
    format: Annotated[str | None, tyro.conf.arg(metavar="FORMAT")] = None
    """pt, safetensors, hf or peft (the adapters alone) [the file's suffix; hf without one]"""
    client: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """write the model that this client predicts with [the deployed one]"""
    best: bool = False
    """write the model of the best evaluated round, of a run with --keep-best"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns the exit code: 0, 2 for what cannot be written, 130 on Ctrl-C.
    """
    with guard() as ended:
        ended.code = run(command(Export, "export", argv))
    return ended.code


def run(arguments: Export) -> int:
    """Write the file and say so."""
    path = export_model(
        arguments.run, arguments.file, format=arguments.format, client=arguments.client, best=arguments.best
    )
    print(f"model: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
