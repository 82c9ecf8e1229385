"""FeMAM: Chen et al., "Multi-Level Additive Modeling for Structured Non-IID Federated Learning" (2024), algorithm 2."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm, Levels
from fl.algorithms.method import Method
from fl.algorithms.parts.additive import Cache, Validation
from fl.algorithms.parts.clustering import ASSIGNMENTS, COMPARED, Clustering, aggregate, centre, starts_of
from fl.algorithms.parts.personal import put, row, take
from fl.base.errors import FLError
from fl.base.flags import AtLeast0, Lengths, Names, number, one_of
from fl.base.rng import Rng
from fl.engine.objectives import Batch, Call, Objective, beside, cross_entropy, proximal
from fl.federation import Federation, traffic
from fl.federation.own import Level, Own, count
from fl.federation.own import predict as own_logits
from surgery import State, broadcast
from surgery.transfer import upload
from zoo.norms import StaticBatchNorm2d


@dataclass(frozen=True)
class FeMAMOptions:
    """FeMAM."""

    levels: Names = ("global", "5", "5", "5", "personal")
    """its levels: global (one model, only as the first), a number of cluster models, personal (only as the last)"""
    level_rounds: Lengths = ()
    """rounds of each level, such as 400,50 (50 for all further ones), or until each has converged; the last level
    trains to the end"""
    window: Annotated[int, number(int, least=2)] = 10
    """rounds over which convergence is judged (the paper: 50)"""
    variance: AtLeast0 = 1.0
    """a level has converged when the mean validation accuracy in % varied by less than this (squared) in the window"""
    lam: AtLeast0 = 0.02
    """pull of a cluster model on its clients while they train (Eq. 5's lambda)"""
    lam_everywhere: bool = False
    """the pull on all levels, as the released code has it"""
    share_gradients: bool = False
    """on cluster levels, the gradient of a client's loss times its share of all samples (Eq. B.4)"""
    prune: bool = True
    """after a level, take its model away from the clients whose validation loss it does not lower (Eq. 9)"""
    epsilon: float = 0.0
    """by how much it is to lower it"""
    combine: Annotated[str, one_of("sum", "mean")] = "sum"
    """of logits over a client's levels: sum, or mean as the released code has it"""
    start: Annotated[str, one_of("random", "global")] = "random"
    """what a new level begins from: random weights, or global, those of the first level (as the released code does)"""
    clustering: Annotated[str, one_of(*ASSIGNMENTS)] = "nearest"
    """how clients are assigned: nearest (cluster model, Eq. 4, after K-means in a level's first round) or kmeans
    (afresh in each round, as the released code does)"""
    compare: Annotated[str, one_of(*COMPARED)] = "all"
    """the weights by which clients are assigned: all, or the classifier's, divided by their sum's absolute value (as
    the released code does)"""


def femam(fed: Federation, options: FeMAMOptions = FeMAMOptions()) -> Algorithm:
    """Levels of models, one after another: one global model, cluster models, one model a client. A client predicts with
    the sum of the logits of its model on each level; only the newest level trains, on what the earlier ones leave over.

    A level ends when it has converged, or after its rounds. Each client then keeps the level's model only if its
    validation loss is lower with it, and the clusters are averaged once more without those that left. The first level
    is never pruned, so that everybody has a model. The last level trains on, and each client judges it anew after every
    round: it trains the model even while it predicts better without.

    The clusters of a level begin as one model, and K-means over the models of the first round tells the first of them
    (see `fesem`). A cluster that nobody is in keeps its model, and may be chosen again. A client that takes part in a
    cluster level for the first time later begins from the mean of its models. One that missed all rounds of the level
    is given, at its end, the used model with the smallest loss on its validation data, on the same condition as all
    others. (Without pruning, and on the personal level, who took no part has no model.)

    "global", for strangers, is the first level's model (the clients' mean, if it has several).
    `fl.algorithms.parts.additive.Cache` says what it takes to remember the logits of earlier levels; images can
    therefore not be augmented.

    With the only level `global` this is FedAvg, with `personal` Local, with a number of clusters (and lam 0) FeSEM.
    """
    METHOD.check(fed, options)
    _check(fed, options)
    kinds, last = options.levels, len(options.levels) - 1
    widths = [int(kind) if kind.isdecimal() else {"global": 1, "personal": len(fed.clients)}[kind] for kind in kinds]
    names = [f"level{number}" for number in range(1, len(kinds) + 1)]
    objectives = [_objective(options, at) for at in range(len(kinds))]
    clustering = Clustering.make(fed, options.clustering, options.compare, "femam")
    sizes, everyone = fed.clients.train.sizes, torch.arange(len(fed.clients))
    mean, cache = options.combine == "mean", Cache(fed) if last else None
    validation = Validation(fed, cache, mean) if last and (options.prune or not options.level_rounds) else None

    def init():
        start = fed.initial()
        pathways = torch.full((len(kinds), len(fed.clients)), -1)
        if not kinds[0].isdecimal():
            pathways[0] = everyone if kinds[0] == "personal" else 0
        levels = {name: broadcast(start, width) for name, width in zip(names, widths)}
        progress = _progress(0, pathways[0], options)
        return {"global": start, **levels, "structure": {"pathways": pathways}, "progress": progress}

    def round(server, clients, rng):
        """Lines 4 to 13 of algorithm 2 at the newest level; at its end also lines 14 to 17."""
        pathways, progress = server["structure"]["pathways"], server["progress"]
        at = int(progress["level"])
        below = levels_of(server)[:at]
        models, members = server[names[at]], progress["members"]
        if at and not progress["rounds"]:
            models = broadcast(new_model(server, at, rng), widths[at])

        starts = distribute(at, models, members, clients)
        logits = cache.table(below) if at else None
        trained = fed.train(starts, clients, rng, objectives[at], context(at, starts, clients, below), beside=logits)
        models, members = collect(at, models, members, clients, trained, rng)

        progress = {**progress, "rounds": progress["rounds"] + 1, "members": members}
        if at < last and not options.level_rounds:
            accuracy = torch.tensor([validation.accuracy(below, Level(models, members))])
            progress["accuracy"] = torch.cat([progress["accuracy"][1:], accuracy])
        over = at < last and _over(at, progress, options)
        mapping = members
        if options.prune and at and (over or at == last):
            mapping = pruned(at, models, members, below)
        if over:
            models = aggregate(fed, models, mapping, clients, trained)
            progress = _progress(at + 1, torch.full_like(members, -1), options)

        pathways = pathways.index_copy(0, torch.tensor([at]), mapping[None])
        first = {"global": centre(models, members, sizes)} if at == 0 else {}
        server = {**server, **first, names[at]: models, "structure": {"pathways": pathways}, "progress": progress}
        return server, reported(at, trained, members, pathways, over)

    def levels_of(server) -> list[Level]:
        return [Level(server[name], mapping) for name, mapping in zip(names, server["structure"]["pathways"])]

    def new_model(server, at: int, rng: Rng) -> State:
        """What a level begins from (line 2): the same model for all of its clusters or clients."""
        return server["global"] if options.start == "global" else fed.initial(Rng(rng.seed).torch("level", at))

    def distribute(at: int, models, members, clients):
        """Equation B.1a."""
        if kinds[at] == "global":
            return broadcast(row(models, 0), len(clients))
        if kinds[at] == "personal":
            return take(models, clients)
        return starts_of(models, members, clients, centre(models, members, sizes))

    def context(at: int, starts, clients, below: list[Level]) -> dict[str, Any]:
        """What the objective of the level wants to know of each participant."""
        anchor = {"anchor": starts} if _pulled(options, at) else {}
        share = {"share": 1 / (1 + count(below, len(sizes))[clients])} if mean and at else {}
        weight = {"weight": sizes[clients] / sizes.sum()} if options.share_gradients and kinds[at].isdecimal() else {}
        return {**anchor, **{key: upload(value, fed.data.x.device) for key, value in (share | weight).items()}}

    def collect(at: int, models, members, clients, trained, rng: Rng):
        """Equations B.3 and B.1b."""
        if kinds[at] == "global":
            return aggregate(fed, models, members, clients, trained), members
        if kinds[at] != "personal":
            return clustering.update(models, members, clients, trained, rng)
        took = torch.tensor([client for client, size in zip(clients, trained.sizes) if size])
        return put(models, clients, trained.states), members.index_copy(0, took, took)

    def pruned(at: int, models, mapping, below: list[Level]) -> Tensor:
        """Who keeps which model (equation 9): the mapping, with -1 for those that are as well off without."""
        missed = mapping < 0
        if missed.any() and kinds[at] != "personal":
            used = mapping[~missed].unique()
            losses = validation.losses(below, [Level(models, torch.where(missed, k, -1)) for k in used])
            mapping = torch.where(missed, used[losses.argmin(0)], mapping)
        without, present = validation.losses(below, [None, Level(models, mapping)])
        return torch.where(without - present > options.epsilon, mapping, -1)

    def reported(at: int, trained, members, pathways, over: bool):
        """With its columns of metrics.csv. Personal models stay where they are. At a level's end all clients receive
        its model (who missed it: all of them), and those whose cluster somebody left its new mean.
        """
        if kinds[at] == "personal":
            trained = traffic.no_traffic(trained)
        elif over:
            took, missed = (members >= 0).sum().item(), (members < 0).sum().item()
            offers = members[members >= 0].unique().numel() if options.prune and at else 0
            left = members[(members >= 0) & (pathways[at] < 0)].unique()
            copies = took + missed * offers + torch.isin(pathways[at], left).sum().item()
            trained = traffic.add_bytes(trained, down=trained.metrics["bytes_down"] * copies / len(trained.sizes))
        used = (pathways >= 0).sum().item() / len(sizes)
        return trained._replace(metrics={**trained.metrics, "level": at + 1, "models_used": used})

    def predict(server, images, client=None):
        logits = None if client is None else own_logits(fed.predict, levels_of(server), client, images, mean)
        return fed.predict(server["global"], images) if logits is None else logits

    def own(server):
        levels = levels_of(server)
        strangers = torch.where(count(levels, len(sizes)) == 0, 0, -1)
        return Own([*levels, Level([server["global"]], strangers)], mean)

    def found(server):
        progress = server["progress"]
        trained = int(progress["level"]) + bool(progress["rounds"])
        return Levels(list(kinds), server["structure"]["pathways"].tolist(), trained)

    return Algorithm(init, round, predict, own=own, levels=found)


def _progress(level: int, members: Tensor, options: FeMAMOptions) -> State:
    """Of a level that begins, with the model that each client trains."""
    accuracy = torch.zeros(options.window)
    return {"level": torch.tensor(level), "rounds": torch.tensor(0), "members": members, "accuracy": accuracy}


def _over(level: int, progress: State, options: FeMAMOptions) -> bool:
    """Whether a level ends with this round: as scheduled, or since it has converged (C.1)."""
    if options.level_rounds:
        return int(progress["rounds"]) >= options.level_rounds[min(level, len(options.level_rounds) - 1)]
    full = int(progress["rounds"]) >= options.window
    return full and bool((100 * progress["accuracy"]).var(correction=0) < options.variance)


def _pulled(options: FeMAMOptions, at: int) -> bool:
    return options.lam > 0 and (options.levels[at].isdecimal() or options.lam_everywhere)


def _objective(options: FeMAMOptions, at: int) -> Objective:
    """What clients minimise on a level: equations B.2, B.4, B.5."""
    objective = _weighted if options.share_gradients and options.levels[at].isdecimal() else cross_entropy
    if _pulled(options, at):
        objective = proximal(options.lam, objective)
    return beside(objective) if at else objective


def _weighted(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
    return context["weight"] * cross_entropy(call, params, context, batch)


def _check(fed: Federation, options: FeMAMOptions) -> None:
    kinds, rounds = options.levels, options.level_rounds
    for at, kind in enumerate(kinds):
        cluster = kind.isdecimal() and 1 <= int(kind) <= len(fed.clients)
        if not (cluster or (kind == "global" and at == 0) or (kind == "personal" and at == len(kinds) - 1)):
            raise FLError(
                f"--femam.levels {','.join(kinds)}: {kind!r} cannot stand there; levels are global (as the first), "
                f"numbers of clusters (1 to {len(fed.clients)}, as there are clients) and personal (as the last)"
            )
    if not kinds or (rounds and (len(rounds) > len(kinds) - 1 or min(rounds) < 1)):
        raise FLError(
            f"--femam.level-rounds {','.join(map(str, rounds))} for --femam.levels {','.join(kinds)}: give numbers of "
            "1 or more, at most one for each level but the last, which trains to the end, or converged"
        )
    if len(kinds) > 1 and (fed.local.augment.crop or fed.local.augment.flip or fed.local.augment.mask):
        raise FLError(
            "FeMAM remembers what earlier levels say of each sample, which augmentation changes: leave --crop and "
            "--flip out, and take another model than transformer_masked"
        )
    if len(kinds) > 1 and any(isinstance(module, StaticBatchNorm2d) for module in fed.model.modules()):
        raise FLError(
            "FeMAM would have to collect the statistics of static batch norms for each of its models: take another "
            "--norm than static_batch"
        )


METHOD = Method(
    femam,
    FeMAMOptions(),
    clients="own",
    columns={"level": int, "models_used": float},  # that trained in the round, from 1; a client's mean number
    refuses={"masked": "adds logits to logits, masked or not"},
)
