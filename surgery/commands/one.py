"""What commands share that make one checkpoint of another: their arguments, and how they are carried out."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from surgery.commands.shared import Integers, save_subject, source

if TYPE_CHECKING:
    from surgery.plan import Submodel

File = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
Files = Annotated[
    tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...", help_behavior_hint="(required)")
]
Out = Annotated[Path, tyro.conf.arg(metavar="FILE")]
Plan = Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")]
Model = Annotated[str | None, tyro.conf.arg(metavar="MODEL")]
Shape = Annotated[Integers, tyro.conf.arg(metavar="INT,...")]
Patterns = tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN")]]
Number = Annotated[float, tyro.conf.arg(metavar="RATE")]


def carry_out(
    do: str,
    settings: Mapping[str, Any],
    *,
    file: Path,
    out: Path,
    model: str | None = None,
    shape: tuple[int, ...] | None = None,
    plan: Path | None = None,
    others: Mapping[str, Path | None] | None = None,
) -> None:
    """Carry an operation out on a file, write what comes out, and say where it is.

    Args:
        do: its name in `surgery.operations.table`.
        settings: its arguments other than checkpoints; those that are None are left out.
        file, out: the checkpoint and the new one.
        model, shape: of the model, as --model and --input.
        plan: where its plan goes, if it is asked for.
        others: further checkpoints by the name of the argument.
    """
    from surgery.files import check_absent, check_new
    from surgery.operations.subject import Subject
    from surgery.operations.table import OPERATIONS

    def before() -> None:
        check_new(out)
        if plan is not None:
            check_absent(plan)

    subject = Subject.open(file, model, shape)
    subject.before = before
    beside = {name: Subject.open(path) for name, path in (others or {}).items() if path is not None}
    given = {name: value for name, value in settings.items() if value is not None}
    result = OPERATIONS[do](model=subject, **beside, **given)
    before()
    inputs = [source(one.checkpoint) for one in (subject, *beside.values())]
    told = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    save_subject(out, result, made={"do": do, **told, "inputs": inputs})
    if result.plan is not None:
        save_plan(plan, result.plan)


def save_plan(path: Path | None, plan: "Submodel") -> None:
    """Write a plan where one is asked for, and say so."""
    if path is not None:
        plan.save(path)
        print(f"{path}: {str(plan).splitlines()[0]}")
