"""InclusiveFL: Liu et al., "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices"
(KDD 2022).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.submodels import with_own_tensors
from fl.base.errors import FLError
from fl.base.settings import OnlyWith, number, one_of
from fl.federation import Federation
from fl.models.fleet import find_kept_blocks, identity_plan, make_example, plan_within, remove_grafting
from surgery import Plan, Section, layers, sections, state


@dataclass(frozen=True)
class InclusiveFLOptions:
    """InclusiveFL."""

    own: Annotated[str, one_of("top", "classifier", "none")] = "top"
    """what clients average only with clients of the same depth: top (their last block of a section that is cut, and all
    that follows the blocks, as the authors do), classifier (what follows the blocks) or none"""
    beta: Annotated[float, number(float, least=0, most=1), OnlyWith("own", "top")] = 0.2
    """momentum distillation: the share of the next larger model's last update in the update of a last block (the
    authors: 0.2). 0: none"""


def inclusivefl(fed: Federation, options: InclusiveFLOptions = InclusiveFLOptions()) -> Algorithm:
    """Clients of different depths share lower blocks; smaller models' last blocks also follow larger models' updates.

    A client has the first blocks of each section. Tensors are averaged, by samples, over the clients that have them at
    this place, or, if they belong to a depth (`own`), over the clients of the depth. The last block of a depth then
    moves by 1 - beta of its own clients' mean update and beta of its momentum. This is the mean over blocks, from this
    place to the end of the next larger model, of the mean update of that model's clients when some last took part.
    Blocks of another shape are left out, and buffers (running statistics) are averaged only. The momentum begins as 0.
    The deepest model is the global one.

    These are the rules of the authors' released code, which never distils: it mixes a momentum in only as long as that
    is still the number 0 that it began as. It would also keep one block's share of the mean instead of the sum. There
    clients of a depth pool their samples, and each depth takes one step of Adam a round with a learning rate of its
    own; here clients train as in FedAvg.

    With one depth this is FedAvg; with own="none" HeteroFL's average by samples.

    Raises:
        FLError: if clients differ in width, if one is deeper than another in one section and shallower in another, or
            if no client has the global model's depth.
    """
    fleet = fed.fleet_or_uniform
    stands = [plan_within(fed.model, kind.model, "equal", spec=kind.spec) for kind in fleet.architectures]
    plans = [remove_grafting(plan) for plan in stands]
    example = make_example(fed.model, fed.spec or fleet.architectures[0].spec)
    depths = [find_kept_blocks(fed.model, kind.model, example=example) for kind in fleet.architectures]
    order = _from_small_to_large(plans, depths)
    known = sections(fed.model, example=example)
    behind = _behind_blocks(fed.model, known) if options.own != "none" else set()
    last = [_last_blocks(fed.model, known, depth) if options.own == "top" else set() for depth in depths]
    own_names = [_read_from(plan, behind | blocks) for plan, blocks in zip(plans, last)]
    average = with_own_tensors(fed, plans, own_names)
    if options.own != "top" or not options.beta:
        return average

    learns = []  # (smaller architecture, next larger one, the server's name of a tensor, those that it learns from)
    for small, large in pairwise(order):
        place = {source.name: name for name, (source,) in plans[large].entries.items()}
        for name in sorted(_read_from(plans[small], last[small] & set(fed.trainable))):
            above = [place[source.name] for source in stands[small].entries[name] if source.name in place]
            learns.append((small, large, f"{small}:{name}", above))

    def mean_update(state, clients, update, kind):
        rows = [row for row, client in enumerate(clients) if fleet.owned[client] == kind]
        (sent,) = average.send(state, [clients[rows[0]]], None)["model"]
        within = [identity_plan(fleet.architectures[kind].model)] * len(rows)
        sizes = [update.sizes[row] for row in rows]
        mean = fed.average([update.received[row] for row in rows], sizes, sent, plans=within)
        return {name: mean[name] - sent[name] for name in sent}

    def init():
        start = average.init()
        return {**start, "momentum": {key: torch.zeros_like(start["own"][key]) for _, _, key, _ in learns}}

    def aggregate(server, clients, update, rng):
        old, momentum = server["own"], server["momentum"]
        after = average.aggregate(server, clients, update, rng)
        took = {fleet.owned[client] for client, size in zip(clients, update.sizes) if size}
        for small, _, key, _ in learns:
            if small in took:
                update_of_own = after["own"][key] - old[key]
                after["own"][key] = old[key] + (1 - options.beta) * update_of_own + options.beta * momentum[key]
        means = {kind: mean_update(server, clients, update, kind) for kind in took.intersection(order[1:])}
        fresh = {
            key: torch.stack([means[large][name] for name in above]).mean(0)
            for _, large, key, above in learns
            if large in means
        }
        return {**after, "momentum": momentum | fresh}

    return replace(average, init=init, aggregate=aggregate)


def _from_small_to_large(plans: Sequence[Plan], depths: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the architectures, as positions.

    Raises FLError if these are not models of ascending depths up to the global.
    """
    for plan in plans:
        if any(plan.small_shapes[name] != plan.shapes[source.name] for name, (source,) in plan.entries.items()):
            raise FLError("InclusiveFL's clients differ in depth only: give one --architectures.widths")
    order = sorted(range(len(plans)), key=lambda k: sum(depths[k].values()))
    for small, large in pairwise(order):
        if section := next((s for s in depths[small] if depths[small][s] > depths[large][s]), None):
            raise FLError(
                f"InclusiveFL's models lie in each other, and in {section} the one with fewer blocks in all has more: "
                "leave --architectures.mixed out, or give other --architectures.depths"
            )
    if plans[order[-1]].small_shapes != plans[order[-1]].shapes:
        raise FLError(
            "InclusiveFL deploys the deepest model, and no client has the global model's depth: use "
            "--architectures.choose cycle, say, or other --architectures.depths"
        )
    return order


def _last_blocks(model: nn.Module, known: Sequence[Section], depth: Mapping[str, Any]) -> set[str]:
    """Return the global model's tensors in the last blocks that a depth has.

    Of each section that the depth cuts, it is the last block that is left.
    """
    cut = [section for section in known if depth[section.name] < len(section.blocks)]
    ends = tuple(f"{section.blocks[depth[section.name] - 1]}." for section in cut)
    return {name for name in state(model) if name.startswith(ends)}


def _behind_blocks(model: nn.Module, known: Sequence[Section]) -> set[str]:
    """Return the global model's tensors in layers registered after the last block."""
    blocks = tuple(f"{block}." for section in known for block in section.blocks)
    names = [name for layer in layers(model) for name in layer.tensors]
    last = max((i for i, name in enumerate(names) if name.startswith(blocks)), default=len(names))
    return set(names[last + 1 :])


def _read_from(plan: Plan, full: Collection[str]) -> set[str]:
    """Return the tensors of a part that lie in these of the global model."""
    return {name for name, sources in plan.entries.items() if sources[0].name in full}


METHOD = Method(inclusivefl, InclusiveFLOptions(), clients="heterogeneous", lacks={"low_rank", "several_classifiers"})
