"""A fleet of architectures: each client's, and its place in the global model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

import surgery
import zoo
from fl.base.errors import FLError
from fl.models.create import create
from surgery import Plan, SurgeryError, narrow, sections, ungraft
from surgery.plan import Source
from zoo.layers import Scaler
from zoo.resnet import MultiExitResNet


class ClientArchitecture(NamedTuple):
    """One of the clients' architectures.

    Attributes:
        model: a module of it; its weights do not matter, unless there is no plan: they are then the initial ones.
        plan: where it lies in the global model: the first blocks of each section, and the leading channels of every
            tensor. The last block of a section also stands for the deeper ones that the architecture lacks (FedFA,
            algorithm 2); `remove_grafting` undoes that. None where clients have models that are no parts of one.
        spec: what makes the model; None for one that was given as a module.
    """

    model: nn.Module
    plan: Plan | None
    spec: zoo.Spec | None = None


@dataclass(frozen=True)
class Fleet:
    """The architectures of all clients.

    Attributes:
        architectures: all that occur, each once.
        owned: for each client, the position of its architecture in `architectures`.

    >>> specs = [zoo.Spec("cnn", width=rate) for rate in (0.5, 1.0, 0.5)]
    >>> fleet = make_fleet(specs[1].build(), specs[1], specs)
    >>> fleet.owned, fleet[2].spec.width
    ((0, 1, 0), (0.5, 0.5, 0.5))
    """

    architectures: tuple[ClientArchitecture, ...]
    owned: tuple[int, ...]

    def __getitem__(self, client: int) -> ClientArchitecture:
        return self.architectures[self.owned[client]]

    def __len__(self) -> int:
        return len(self.owned)


def uniform(model: nn.Module, clients: int) -> Fleet:
    """Make a fleet whose clients all have the global model itself."""
    return Fleet((ClientArchitecture(model, identity_plan(model)),), (0,) * clients)


def identity_plan(model: nn.Module) -> Plan:
    """Make the plan of a model within itself."""
    return leading_plan(model, model)


def leading_plan(full: nn.Module, small: nn.Module) -> Plan:
    """Plan a model with a full one's tensors, by the first entries of each axis."""
    shapes, sizes = ({n: tuple(tensor.shape) for n, tensor in surgery.state(model).items()} for model in (full, small))
    first = {n: tuple(None if s == f else ((0, s),) for s, f in zip(sizes[n], shapes[n])) for n in shapes}
    return Plan({name: (Source(name, index),) for name, index in first.items()}, shapes)


def remove_grafting(plan: Plan) -> Plan:
    """Remove grafting from a plan, so that each tensor stands only for itself."""
    return replace(plan, entries={name: sources[:1] for name, sources in plan.entries.items()})


def make_fleet(full: nn.Module, spec: zoo.Spec, specs: Sequence[zoo.Spec]) -> Fleet:
    """Make the fleet of clients with these architectures.

    Args:
        full: the global model, made from `spec`, on the device that trains.
        specs: one for each client, of the same family as the global model and nowhere wider or deeper.

    Raises:
        FLError: for an architecture that does not lie within the global model.
    """
    kinds = list(dict.fromkeys(specs))
    return Fleet(tuple(_architecture(full, spec, kind) for kind in kinds), tuple(map(kinds.index, specs)))


def _architecture(full: nn.Module, spec: zoo.Spec, small: zoo.Spec) -> ClientArchitecture:
    """Make the module and the plan of one architecture."""
    model = create(torch.Generator(), small).to(next(full.parameters()).device)
    for name, module in model.named_modules():
        if isinstance(module, Scaler):  # it divides by the client's rate relative to the server's
            module.rate /= full.get_submodule(name).rate
    try:
        return ClientArchitecture(model, plan_within(full, model, stand="corner", spec=small), small)
    except SurgeryError as error:
        raise FLError(
            f"{small.name} of width {brief(small.width)} and depth {brief(small.depth)} is no part of the global model "
            f"of width {brief(spec.width)} and depth {brief(spec.depth)}: {error}",
            code="mismatch",
        ) from None


def plan_within(
    full: nn.Module,
    small: nn.Module,
    stand: str,
    choose: Callable[[int, int], Sequence[int]] | None = None,
    spec: zoo.Spec | None = None,
) -> Plan:
    """Plan where a smaller model of the family lies in a full one.

    First the blocks are chosen, then the leading channels.

    Args:
        stand, choose, spec: see `as_shallow`.

    Raises:
        SurgeryError: if the smaller model is no part of the full one.
    """
    shallow, depth = as_shallow(full, small, stand, choose, spec)
    return depth.compose(narrow(shallow, like=small)[1])


def as_shallow(
    full: nn.Module,
    small: nn.Module,
    stand: str,
    choose: Callable[[int, int], Sequence[int]] | None = None,
    spec: zoo.Spec | None = None,
) -> tuple[nn.Module, Plan]:
    """Cut a full model to the depth of a smaller one of the family.

    Returns the model, as wide as before, and the plan. Where sections are missing at the end, as they may from a model
    with exits, so are their exits.

    Args:
        stand: which other blocks a block stands for, see `surgery.ungraft`.
        choose: (blocks of a section, how many of them the small model has) -> the positions of those that it has.
            None: the first ones.
        spec: what makes the small model, see `make_example`.

    Raises:
        SurgeryError: if there is no such part of the full model.
    """
    example = make_example(full, spec)
    keep = find_kept_blocks(full, small, choose, example)
    shallow, depth = ungraft(full, keep=keep, stands_for=stand, example=example)
    if not isinstance(full, MultiExitResNet) or len(small) == len(full):
        return shallow, depth
    end = {"do": "remove", "module": "", "first": len(small), "count": len(full) - len(small)}
    entries = {name: sources for name, sources in depth.entries.items() if name in surgery.state(shallow[: len(small)])}
    plan = replace(depth, entries=entries, edits=(*depth.edits, end))
    return plan.build(full), plan


def make_example(model: nn.Module, spec: zoo.Spec | None) -> torch.Tensor | None:
    """Make an input that shows which blocks of a model follow each other.

    The model is a library's or a user's. None for the zoo's models, which declare their blocks, and where it is not
    known what makes the model.
    """
    declared = spec is None or spec.architecture.depth is not None
    return None if declared else spec.example(2, device=next(model.parameters()).device)


def find_kept_blocks(
    full: nn.Module,
    small: nn.Module,
    choose: Callable[[int, int], Sequence[int]] | None = None,
    example: torch.Tensor | None = None,
) -> dict[str, int | Sequence[int]]:
    """Find which blocks of each section the small model has, as `ungraft` takes them.

    They are found by the names of tensors, since `surgery.sections` finds no section where one block is left.
    """
    names = list(surgery.state(small))
    positions = {}
    for section in sections(full, example=example):
        count = sum(any(name.startswith(f"{block}.") for name in names) for block in section.blocks)
        count = max(1, count)  # what follows the last section of a model with exits is cut off later
        positions[section.name] = choose(len(section.blocks), count) if choose else count
    return positions


def brief(values: float | tuple | None, between: str = ",") -> str:
    """Write a width, a depth or several in a few words.

    >>> brief((0.5, 0.5)), brief((1, 2), "-"), brief(None), brief(()), brief(1.0)
    ('0.5', '1-2', 'full', 'none', '1')
    """
    if values is None or values == ():
        return "full" if values is None else "none"
    numbers = values if isinstance(values, tuple) else (values,)
    return between.join(f"{v:g}" for v in (numbers[:1] if len(set(numbers)) == 1 else numbers))
