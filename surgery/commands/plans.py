"""`python -m surgery extract`, `embed` and `plan`: small models cut out of large ones by a plan, and laid back."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from surgery.commands.shared import save, source
from surgery.errors import SurgeryError

if TYPE_CHECKING:
    from surgery.submodel import Submodel

Plan = Annotated[Path, tyro.conf.arg(metavar="PLAN.json")]


def read_plan(path: Path) -> "Submodel":
    """A plan of a file; SurgeryError that names the file if it holds none."""
    from surgery.submodel import Submodel

    try:
        return Submodel.load(path)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
    except SurgeryError as error:
        raise SurgeryError(f"{path}: {error}") from None


def save_plan(path: Path | None, plan: "Submodel") -> None:
    """Write a plan where one is asked for, and say so."""
    if path is not None:
        plan.save(path)
        print(f"{path}: {str(plan).splitlines()[0]}")


@dataclass(frozen=True)
class Extract:
    """Cut a small model out of a checkpoint as a plan says."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """the large model's checkpoint"""
    plan: Plan
    """the plan, as `narrow`, `ungraft` or Submodel.save write it"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the new checkpoint"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_new, open_state
        from surgery.lazy_plans import extract

        check_new(self.out)
        full, plan = open_state(self.file), read_plan(self.plan)
        save(self.out, extract(plan, full), made={"do": "extract", "inputs": [source(full)]}, like=full)


@dataclass(frozen=True)
class Embed:
    """Lay a small model's checkpoint back into the large one, where a plan says that it came from."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """the small model's checkpoint"""
    plan: Plan
    """the plan"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the new checkpoint of the large model"""
    into: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """a checkpoint of the large model, whose values stay where the small one has none [zeros]"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_new, open_state
        from surgery.lazy_plans import embed

        check_new(self.out)
        small, plan = open_state(self.file), read_plan(self.plan)
        into = None if self.into is None else open_state(self.into)
        made = {"do": "embed", "inputs": [source(one) for one in (small, into) if one is not None]}
        save(self.out, embed(plan, small, into), made=made, like=into)


@dataclass(frozen=True)
class PlanCommand:
    """Print a plan, or compose two: the small model of the first is the full model of the second."""

    do: Annotated[Literal["show", "compose"], tyro.conf.Positional, tyro.conf.arg(metavar="show|compose")]
    """what to do"""
    plans: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json...")]
    """one plan to show, or two or more to compose"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")] = None
    """where the composed plan goes"""

    def run(self) -> None:
        """Carry out the command."""
        plans = [read_plan(path) for path in self.plans]
        if self.do == "show":
            if len(plans) != 1 or self.out is not None:
                raise SurgeryError("plan show prints one plan: give one file, and no --out")
            print(plans[0].describe())
            return
        if len(plans) < 2 or self.out is None:
            raise SurgeryError("plan compose takes two or more plans, from the outside in, and --out PLAN.json")
        if self.out.exists():
            raise SurgeryError(f"{self.out} exists already: give a new name, or delete it first")
        whole = plans[0]
        for plan in plans[1:]:
            whole = whole.compose(plan)
        save_plan(self.out, whole)
