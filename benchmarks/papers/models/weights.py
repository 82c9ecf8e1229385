"""Weights of models compared: blocks of one model, and models of different size (FedFA, appendices 0.B and 0.F)."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.papers.models.similarity import SectionSimilarity, convolutions
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.tables import align_columns
from fl.models.fleet import brief, make_example
from fl.models.init import maker
from fl.runs import checkpoint
from fl.runs.folder import load_initial_weights, load_model
from fl.settings import Config
from surgery import Plan, State, SurgeryError, layers, narrow, sections, state, ungraft
from surgery.states import check_same
from zoo import Spec


class Compared(NamedTuple):
    """Similarity of a model's blocks untrained, and trained if it is a run's."""

    title: str
    before: Sequence[SectionSimilarity]
    after: Sequence[SectionSimilarity] = ()


def initial_model(folder: Path) -> nn.Module:
    """Make the initial model of a run again, from its seed and the weights of its --init; on the CPU."""
    spec, _ = checkpoint.read_model(folder)
    config = Config.read(folder)
    return maker(spec, load_initial_weights(folder, config))(Rng(config.seed).torch("weights"))


def similarity_table(compared: Compared) -> str:
    """Make a table with a line for each convolution of each section.

    It has the mean over pairs of blocks: untrained, trained, and the change.
    """
    columns = ["untrained"] + (["trained", "change"] if compared.after else [])
    lines = [["section", "convolution", "pairs", *columns]]
    for at, before in enumerate(compared.before):
        stages = [before] + ([compared.after[at]] if compared.after else [])
        pairs = {layer: int((~matrix.isnan()).triu(1).sum()) for layer, matrix in before.layers.items()}
        name = before.name
        for layer, number in (pairs | {None: sum(pairs.values())}).items():
            values = [stage.mean(layer) for stage in stages]
            cells = [f"{value:.4f}" for value in values] + [f"{after - values[0]:+.4f}" for after in values[1:]]
            lines.append([name, layer.removesuffix(".weight") if layer else "all", str(number), *cells])
            name = ""
    return f"{compared.title}\n{align_columns(lines, left=2)}"


class Member(NamedTuple):
    """A trained model of a family."""

    name: str
    spec: Spec
    model: nn.Module

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def read(folders: Sequence[Path]) -> list[Member]:
    """Read the models of run folders, in the order of their size. Raises FLError if they are not of one family."""
    if len(folders) < 2:
        raise FLError("give two run folders or more: the smallest model, and larger ones to compare with it")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise FLError("give each run folder once")
    members = [Member(str(folder), checkpoint.read_model(folder)[0], load_model(folder)) for folder in folders]
    for member in members:
        if member.spec.name != members[0].spec.name:
            raise FLError(
                f"{members[0].name} holds a {members[0].spec.name} and {member.name} a {member.spec.name}: "
                "give widths and depths of one model",
                code="mismatch",
            )
    members.sort(key=lambda member: member.parameters)
    for small, large in itertools.pairwise(members):
        if (small.spec.width, small.spec.depth) == (large.spec.width, large.spec.depth):
            raise FLError(
                f"{small.name} and {large.name} hold models of one width and depth: give different ones",
                code="mismatch",
            )
    return members


def place(small: nn.Module, large: nn.Module, spec: Spec | None = None) -> Plan:
    """Plan a model within a wider and deeper one of its family: leading channels of the first blocks.

    Args:
        spec: what makes the larger one, see `fl.models.fleet.make_example`.

    Raises FLError or SurgeryError if it does not fit into it.
    """
    example = make_example(large, spec)
    depths = [len(section.blocks) for section in sections(small, example=example)]
    if len(depths) != (number := len(sections(large, example=example))):
        raise FLError(f"the smaller model has {len(depths)} sections and the larger one {number}", code="mismatch")
    shallow, dropped = ungraft(large, keep=depths, example=example)
    return dropped.compose(narrow(shallow, like=small)[1])


class Variation(NamedTuple):
    """The magnitude of a smallest model's weights, and the distance of K larger models from them, by convolution.

    Attributes:
        layers: names of the smallest model's L convolution weights, or of its linear ones if it has no convolution.
        magnitude: [L], the mean L1 norm of its weight maps: the kernels for one filter and one input channel.
        distance: [K, L], the mean L1 norm of the difference between its maps and those in the same place of model k.

    All float64, on the CPU.
    """

    layers: tuple[str, ...]
    magnitude: Tensor
    distance: Tensor

    @property
    def ratio(self) -> Tensor:
        """[K], the mean distance over all convolutions, divided by the mean magnitude of the smallest model."""
        return self.distance.mean(1) / self.magnitude.mean()


def variation_of(smallest: State, larger: Sequence[State], plans: Sequence[Plan]) -> Variation:
    """Measure how far larger models' weights are from those of a smaller one in the same place (FedFA, Table 10).

    Args:
        plans: for each larger model the plan of the smallest within it.

    Raises SurgeryError if a plan does not fit its models, FLError if there are no weights to measure.

    >>> from surgery.plan import Source
    >>> small, large = torch.ones(1, 1, 2, 2), torch.full((2, 1, 2, 2), 4.0)
    >>> plan = Plan({"weight": (Source("weight", (((0, 1),), None, None, None)),)}, {"weight": (2, 1, 2, 2)})
    >>> variation = variation_of({"weight": small}, [{"weight": large}], [plan])
    >>> variation.magnitude.item(), variation.distance.item(), variation.ratio.item()
    (4.0, 12.0, 3.0)
    """

    def mean_norm(weight: Tensor) -> Tensor:
        return (weight.abs().sum() / (weight.shape[0] * weight.shape[1])).cpu()

    names = convolutions(smallest)
    if not names:
        raise FLError(
            "the smallest model has no weights of convolutions or linear layers to measure", code="unsupported"
        )
    weights = {name: smallest[name].detach().double() for name in names}
    distances = []
    for number, (model, plan) in enumerate(zip(larger, plans, strict=True), 1):
        inside = plan.extract(model)
        check_same(smallest, inside, "the smallest model", f"what its plan reads from model {number}")
        distances.append(torch.stack([mean_norm(w - inside[name].detach().to(w)) for name, w in weights.items()]))
    return Variation(tuple(names), torch.stack(list(map(mean_norm, weights.values()))), torch.stack(distances))


def measure(members: Sequence[Member]) -> Variation:
    """Measure the distance of every model from the first, which is the smallest."""
    smallest, *larger = members
    plans = []
    for member in larger:
        try:
            plans.append(place(smallest.model, member.model, member.spec))
        except (FLError, SurgeryError) as error:
            raise FLError(f"{smallest.name} does not fit into {member.name}: {error}", code="mismatch") from None
    return variation_of(state(smallest.model), [state(member.model) for member in larger], plans)


def scale_table(members: Sequence[Member], variation: Variation) -> str:
    """Make FedFA's Table 10: mean magnitude of the smallest model, distance of larger ones from it, and their ratio."""
    rows = [["model", "width", "depth", "parameters", "magnitude", "distance", "ratio"]]
    cells = [[f"{variation.magnitude.mean():.4f}", "-", "-"]]
    cells += [["-", f"{row.mean():.4f}", f"{ratio:.3f}"] for row, ratio in zip(variation.distance, variation.ratio)]
    for member, last in zip(members, cells):
        depth = brief(member.spec.depth) if member.spec.depth else "-"
        rows.append([member.name, brief(member.spec.width), depth, f"{member.parameters:,}", *last])
    return align_columns(rows)


def ends(member: Member) -> dict[str, Tensor]:
    """Find the weights of the first and the last convolution in the order of execution, by name."""
    values = state(member.model)
    known = set(convolutions(values))
    every = layers(member.model, example=member.spec.example())
    order = [name for layer in every for name in layer.tensors if name in known]
    return {name: values[name] for name in (order[0], order[-1])}
