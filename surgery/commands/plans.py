"""`python -m surgery extract`, `embed` and `plan`: small models cut out of large ones by a plan, and laid back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from surgery.commands.one import carry_out, save_plan
from surgery.errors import SurgeryError

Plan = Annotated[Path, tyro.conf.arg(metavar="PLAN.json")]


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
        carry_out("extract", {"plan": self.plan}, file=self.file, out=self.out)


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
        carry_out("embed", {"plan": self.plan}, file=self.file, out=self.out, others={"into": self.into})


@dataclass(frozen=True)
class PlanCommand:
    """Print a plan, or compose two: the small model of the first is the full model of the second."""

    do: Annotated[Literal["show", "compose"], tyro.conf.Positional, tyro.conf.arg(metavar="show|compose")]
    """what to do"""
    plans: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json...", help_behavior_hint="(required)")
    ]
    """one plan to show, or two or more to compose"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")] = None
    """where the composed plan goes"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_absent
        from surgery.operations.given import plan_of

        plans = [plan_of(path) for path in self.plans]
        if self.do == "show":
            if len(plans) != 1 or self.out is not None:
                raise SurgeryError("plan show prints one plan: give one file, and no --out")
            print(plans[0].describe())
            return
        if len(plans) < 2 or self.out is None:
            raise SurgeryError("plan compose takes two or more plans, from the outside in, and --out PLAN.json")
        whole = plans[0]
        for plan in plans[1:]:
            whole = whole.compose(plan)
        check_absent(self.out)
        save_plan(self.out, whole)
