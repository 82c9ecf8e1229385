"""The judges of the suite "support": whether an operation handles a model, refuses it, or gives something wrong.

They are less strict than those of benchmarks/judges.py in how much has to shrink, and stricter in numbers: all compare
in float64 (in float32 models of more than LARGE parameters, and those with an operation that torch has in float32
only). What stays whole is told beside. `Wrong` is a mistake of surgery; a `SurgeryError` is a refusal, and its
message the reason.
"""

import copy
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surgery
from benchmarks import judges, zeros
from benchmarks.calls import outputs, tensors
from benchmarks.judges import NothingToDo
from benchmarks.models.case import Case
from surgery.errors import first_line

LARGE = 70_000_000  # parameters
MACS = 0.6
ROUNDING = {torch.float64: 1e-5}  # of the largest output: some classes compute norms in single precision all the same


class Wrong(Exception):
    """An operation gave a model that computes something else than it has to."""


class NotJudged(Exception):
    """Rounding alone changes the output of a model as much as a wrong answer would."""


class PlanOnly(Exception):
    """The class of the model cannot make the changed one from its arguments; the plan and the state restore it."""


def narrow(case: Case, model: nn.Module, example: Any) -> str:
    """At half of every width it computes what the full model does with zeros."""
    model, example = prepared(model, example)
    with noted() as said:
        small, plan = surgery.narrow(model, 0.5, example, output=case.output)
    if numbers(small) == numbers(model):
        raise NothingToDo
    compared = right(case, model, small, plan, example)
    if whole := next(filter(None, map(WHOLE.match, said)), None):
        found = surgery.widths(model, example, 0.5, output=case.output)
        shrunk = sum(width.kept < width.size for width in found)
        n = 1 if whole[1] == "a" else int(whole[1])
        compared += f"; {n} of {n + shrunk} widths whole"
    return compared


def prune(case: Case, model: nn.Module, example: Any) -> str:
    """With 0.6 of the multiply-accumulates, by the norms of weights, it computes what the full one does with zeros."""
    model, example = prepared(model, example)
    target = surgery.pruning.Target(macs=MACS)
    small, plan, sizes = surgery.pruning.prune(model, example=example, target=target, output=case.output)
    check(sizes[-1].macs < sizes[0].macs, "it has as many multiply-accumulates as before")
    return right(case, model, small, plan, example)


def right(case: Case, model: nn.Module, small: nn.Module, plan: surgery.Plan, example: Any) -> str:
    """Return what was compared: "zeros", or what forbids it; Wrong if numbers differ or the plan is not exact."""
    shapes = [case.shapes(outputs(net.eval(), example, case.output)) for net in (model, small)]
    check(shapes[0] == shapes[1], f"its output has shape {shapes[1]} instead of {shapes[0]}")
    values, cut = surgery.state(small), plan.extract(model)
    check(all(torch.equal(cut[n], values[n]) for n in values), "its tensors are not those that the plan reads")
    full, _ = plan.embed(values)
    back = plan.extract(full)
    check(all(torch.equal(back[n], values[n]) for n in values), "extract(embed(x)) is not x")
    same, operation = zeros.agrees(model, small, plan, example, case.output)
    check(same or bool(operation), "it computes other numbers than the full model with zeros")
    return "zeros" if same else f"not compared: {operation} may count positions"


def graft(case: Case, model: nn.Module, example: Any) -> str:
    """One more block in every section: each new block runs, and grafting is undone bit for bit."""
    sections = surgery.sections(model)
    if not any(judges.repeatable(model, section) for section in sections):
        raise surgery.SurgeryError(
            f"no section has a block that may be repeated ({len(sections)} sections)", code="depth"
        )
    try:
        judges.graft(case, model.eval(), example)
    except judges.Miss as miss:
        if "no section" in str(miss):
            raise surgery.SurgeryError(str(miss), code="depth") from None
        raise Wrong(str(miss)) from None
    return "undone"


def permute(case: Case, model: nn.Module, example: Any) -> str:
    """Every width that may be reordered, in a drawn order: the same output, and the inverse gives the model back."""
    model, example = prepared(model, example)
    other, orders = permuted(case, model, example)
    same(outputs(other, example, case.output), outputs(model, example, case.output))
    inverses = {name: order.argsort() for name, order in orders.items()}
    back, _ = surgery.symmetry.permute(other, inverses, example=example, output=case.output)
    before = surgery.state(model)
    check(all(torch.equal(before[n], t) for n, t in surgery.state(back).items()), "the inverse is another model")
    return f"{len(orders)} widths"


def align(case: Case, model: nn.Module, example: Any) -> str:
    """Check that a planted permutation of all widths is found again."""
    model, example = prepared(model, example)
    other, _ = permuted(case, model, example)
    found = surgery.symmetry.align([model, other], example=example, output=case.output).models[1]
    same(outputs(found, example, case.output), outputs(model, example, case.output))
    before, after = surgery.state(model), surgery.state(found)
    equal = sum(torch.equal(before[n], after[n]) for n in before)
    return "found" if equal == len(before) else f"found in part: {equal} of {len(before)} tensors"


def permuted(case: Case, model: nn.Module, example: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy with all widths that may be reordered in a random order."""
    generator = torch.Generator().manual_seed(0)
    free = [w for w in surgery.widths(model, example) if not w.order and w.size > 1]
    orders = {width.name: torch.randperm(width.size, generator=generator) for width in free}
    if not orders:
        raise surgery.SurgeryError("no width may be put in another order", code="width")
    return surgery.symmetry.permute(model, orders, example=example, output=case.output)[0], orders


def widen(case: Case, model: nn.Module, example: Any) -> str:
    """Twice as wide it computes the same output."""
    model, example = prepared(model, example)
    wide, _ = surgery.widening.widen(model, rate=2, example=example, output=case.output)
    same(outputs(wide, example, case.output), outputs(model, example, case.output))
    if numbers(wide) == numbers(model):
        raise surgery.SurgeryError("no width grew", code="width")
    return f"{numbers(wide) / numbers(model):.2f} times the parameters"


def save(case: Case, model: nn.Module, example: Any) -> str:
    """Half as wide, saved and loaded by its own library it computes the same; or else by its plan."""
    judges.randomize(model.eval())
    small, plan = surgery.narrow(model, 0.5, example, output=case.output)
    if numbers(small) == numbers(model):
        raise NothingToDo
    small.eval()
    expected = outputs(small, example, case.output)
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(small, "save_pretrained") and hasattr(type(small), "from_pretrained"):
            small.save_pretrained(folder)
            try:
                again = type(small).from_pretrained(folder)
            except RuntimeError:  # sizes that its class does not make
                try:
                    again, report = type(small).from_pretrained(
                        folder, ignore_mismatched_sizes=True, output_loading_info=True
                    )
                    why = "; ".join(
                        f"{name} is {tuple(saved)}, and {tuple(made)} in a model made from its configuration"
                        for name, saved, made in sorted(report["mismatched_keys"])[:1]
                    )
                except RuntimeError as error:
                    why = f"from_pretrained refuses it: {first_line(error)}"
            else:
                if restored(again.eval(), small, example, case):
                    return "from_pretrained"
                model.save_pretrained(full := f"{folder}/full")
                check(
                    not restored(type(model).from_pretrained(full).eval(), model, example, case),
                    "from_pretrained gives another model than was saved",
                )
                why = "from_pretrained gives another model than was saved, and so it does of the full one"
        else:
            why = "its constructor takes no widths"
        file = Path(folder) / "plan.json"
        plan.save(file)
        again = surgery.load(surgery.Plan.load(file).build(case.build()), surgery.state(small))
    same(outputs(again.eval(), example, case.output), expected)
    raise PlanOnly(why)


def restored(again: nn.Module, saved: nn.Module, example: Any, case: Case) -> bool:
    """Return whether a model that was loaded computes what the saved one does."""
    try:
        same(outputs(again, example, case.output), outputs(saved, example, case.output))
    except Wrong:
        return False
    return True


WHOLE = re.compile(r"(\d+|a) hidden widths? of \w+ cannot shrink:")
"""How surgery's warning about widths that stay whole begins."""


class Notes(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def noted() -> Iterator[list[str]]:
    """What surgery logs in the body."""
    notes = Notes()
    logging.getLogger("surgery").addHandler(notes)
    try:
        yield notes.said
    finally:
        logging.getLogger("surgery").removeHandler(notes)


def prepared(model: nn.Module, example: Any) -> tuple[nn.Module, Any]:
    """Return the model with noise in its weights, and its input, in float64 where that can be.

    In float32 are models that are large, if what they compute is finite there, and those with operations that cannot in
    float64, or that compute what is not finite there (masks may be the least numbers of float32).
    """
    judges.randomize(model.eval())
    if numbers(model) > LARGE and finite(model, example):
        return model, example
    double, given = copy.deepcopy(model).double(), doubled(example)
    try:
        if finite(double, given):
            return double, given
    except (RuntimeError, ValueError):  # torch has no grouped products in float64
        pass
    shaken = copy.deepcopy(model)
    for parameter in shaken.parameters():
        if parameter.is_floating_point():
            parameter.data *= 1 + torch.finfo(parameter.dtype).eps * torch.randn_like(parameter)
    try:
        same(outputs(shaken, example), outputs(model, example))
    except Wrong as wrong:
        raise NotJudged(f"rounding alone changes it ({wrong}), and it does not run in float64") from None
    return model, example


def finite(model: nn.Module, example: Any) -> bool:
    """Return whether all numbers that it computes are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors(outputs(model, example)))


def doubled(tree: Any) -> Any:
    """Floating-point tensors in float64."""
    if isinstance(tree, Tensor):
        return tree.double() if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: doubled(value) for key, value in tree.items()}
    return type(tree)(map(doubled, tree)) if isinstance(tree, list | tuple) else tree


def numbers(model: nn.Module) -> int:
    """Return its number of parameters."""
    return sum(p.numel() for p in model.parameters())


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Wrong unless the outputs are the same up to rounding."""
    shapes = [[tuple(t.shape) for t in side] for side in (found, expected)]
    check(shapes[0] == shapes[1], f"its output has shape {shapes[0]} instead of {shapes[1]}")
    for mine, other in zip(tensors(found), tensors(expected)):
        if mine.numel():
            error = (mine.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-12)
            check(bool(error < ROUNDING.get(mine.dtype, 1e-3)), f"its output differs by {error:.1e}")


def check(condition: bool, reason: str) -> None:
    """Wrong unless the condition holds."""
    if not condition:
        raise Wrong(reason)


JUDGES = {
    "narrow": narrow, "prune": prune, "graft": graft, "permute": permute, "align": align, "widen": widen, "save": save
}  # fmt: skip
