"""FeMAM: Chen et al., "Multi-Level Additive Modeling for Structured Non-IID Federated Learning" (2024), algorithm 2."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm, Levels, Server
from fl.algorithms.method import Method
from fl.algorithms.parts.additive import Cache, Validation
from fl.algorithms.parts.clustering import ASSIGNMENTS, COMPARED, Clustering, cluster_means
from fl.algorithms.parts.levels import ClusterLevel, GlobalLevel, LevelType, PersonalLevel, add_level_traffic
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import AtLeast0, Defaults, Lengths, Names, number, one_of
from fl.engine.objectives import with_logits
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level, count
from fl.federation.clients import CLIENTS, is_remote
from surgery import State
from surgery.transfer import upload
from zoo.norms import StaticBatchNorm2d


@dataclass(frozen=True)
class FeMAMOptions:
    """FeMAM."""

    levels: Names = Defaults(("global", "5", "5", "5", "personal"))
    """levels of models: global (one model, only as the first), a number of cluster models, personal (only as the
    last); the default is the paper's, with no more clusters than clients"""
    level_rounds: Lengths = ()
    """rounds of each level (the paper: 400,50, where the last number is for all further levels), or converged: until
    its accuracy varies little; the last level trains to the end"""
    window: Annotated[int, number(int, least=2, most=10**6)] = 10
    """rounds over which convergence is judged (the paper: 50)"""
    variance: AtLeast0 = 1.0
    """largest variance of the mean validation accuracy in % over the window at which a level has converged (the paper:
    1)"""
    prox: AtLeast0 = 0.02
    """weight of the proximal term that pulls clients to the cluster's model while they train (Eq. 5's lambda)"""
    prox_all_levels: bool = False
    """apply the proximal term on every level, as the released code does"""
    share_gradients: bool = False
    """on cluster levels, scale the gradient of a client's loss by its share of all samples (Eq. B.4)"""
    prune: bool = True
    """remove a finished level's model from clients if it does not lower their validation loss (Eq. 9)"""
    min_gain: float = 0.0
    """smallest drop in validation loss for which a client keeps the level's model (Eq. 9; the paper: 0)"""
    combine: Annotated[str, one_of("sum", "mean")] = "sum"
    """how the logits of a client's levels are combined: sum, or mean as in the released code"""
    start: Annotated[str, one_of("random", "global")] = "random"
    """what a new level begins from: random weights, or global, the first level's (as the released code does)"""
    clustering: Annotated[str, one_of(*ASSIGNMENTS)] = "nearest"
    """how clients are assigned: nearest (cluster model, Eq. 4, after K-means in a level's first round) or kmeans
    (afresh in each round, as the released code does)"""
    compare: Annotated[str, one_of(*COMPARED)] = "all"
    """the weights by which clients are assigned: all, or the classifier's, divided by their sum's absolute value (as
    the released code does)"""


def femam(fed: Federation, options: FeMAMOptions = FeMAMOptions()) -> Algorithm:
    """Train levels of models, one after another: one global model, cluster models, a model for each client.

    A client predicts with the sum of the logits of its model on each level; only the newest level trains, on what the
    earlier ones leave over.

    A level ends when it has converged, or after its rounds. Each client then keeps the level's model only if its
    validation loss is lower with it, and the clusters are averaged once more without those that left. The first level
    is never pruned, so that everybody has a model. The last level trains on, and each client judges it anew after every
    round: it trains the model even while it predicts better without.

    The clusters of a level begin as one model, and K-means over the models of the first round makes the first of them
    (see `fesem`). An empty cluster keeps its model, and may be chosen again. A client that takes part in a
    cluster level for the first time later begins from the mean of its models. A client that missed all rounds of the
    level is given, at its end, the used model with the smallest loss on its validation data, on the same condition as
    all others. (Without pruning, and on the personal level, a client that never took part has no model.)

    "global", for strangers, is the first level's model (the clients' mean, if it has several).
    `fl.algorithms.parts.additive.Cache` says what it takes to remember the logits of earlier levels; images can
    therefore not be augmented.

    With the only level `global` this is FedAvg, with `personal` Local, with a number of clusters (and `prox` 0) FeSEM.
    """
    _check(fed, options)
    clustering = Clustering.make(fed, options.clustering, options.compare, "femam")
    kinds = [_kind(fed, options, clustering, name) for name in options.levels]
    names, last = [part_of(at, name) for at, name in enumerate(options.levels)], len(kinds) - 1
    n, mean = len(fed.clients), options.combine == "mean"
    objectives = [with_logits(kind.objective()) if at else kind.objective() for at, kind in enumerate(kinds)]
    cache = Cache(fed) if last else None
    validation = Validation(fed, cache, mean) if validates(options) else None

    def init():
        start, used, unused = fed.initial(), kinds[0].start(), torch.full((last, n), -1)
        levels = {name: kind.begin(start) for name, kind in zip(names, kinds)}
        structure = {"pathways": torch.cat([used[None], unused])}
        return {"global": start, **levels, "structure": structure, "progress": _begun(0, used, options)}

    def training(server) -> tuple[int, Level]:
        """Return the newest level, with the model that each client trains."""
        at = int(server["progress"]["level"])
        return at, Level(server[names[at]], server["progress"]["members"])

    def send(server, clients, rng):
        """Return (line 5) the model of the newest level, and once the models of the levels below."""
        at, level = training(server)
        message = {"levels": levels_of(server)[:at], **kinds[at].message(level, clients)}
        if at and mean:
            message["share"] = upload(1 / (1 + count(message["levels"], n)[clients]), fed.data.device)
        return message

    def client(message, client_states, clients, rng):
        """Train (lines 6 to 9) what the levels below leave over."""
        at = len(message["levels"])
        kind, starts = kinds[at], message.get("model", client_states)
        context = kind.anchor(starts) | {name: message[name] for name in ("weight", "share") if name in message}
        logits = cache.table(message["levels"]) if at else None
        return kind.sent(fed.train(starts, clients, rng, objectives[at], context, per_sample=logits))

    def aggregate(server, clients, update, rng):
        """Do lines 10 to 13 on the newest level, and at its end also lines 14 to 17 and line 2 for the next."""
        (at, level), pathways, metrics = training(server), server["structure"]["pathways"], {}
        kind, below = kinds[at], levels_of(server)[:at]
        level = kind.collect(level, clients, update, rng)  # lines 10 to 12
        progress = {**server["progress"], "rounds": server["progress"]["rounds"] + 1, "members": level.used}
        if at < last and not options.level_rounds:
            accuracy = torch.tensor([validation.accuracy(below, level)])
            progress["accuracy"] = torch.cat([progress["accuracy"][1:], accuracy])
        over = at < last and _over(at, progress, options)
        prunes = options.prune and at > 0
        kept = pruned(kind, level, below) if prunes and (over or at == last) else level  # lines 14 and 15
        if over:
            offers = len(kind.offers(level)) if prunes else 0
            metrics = add_level_traffic(update.metrics, len(clients), level, kept, offers)
            kept = kept._replace(models=cluster_means(fed, kept.models, kept.used, clients, update))  # line 16
        first = {"global": kind.mean(kept, otherwise=server["global"])} if at == 0 else {}
        pathways = pathways.index_copy(0, torch.tensor([at]), kept.used[None])
        server = {**server, **first, names[at]: kept.models, "structure": {"pathways": pathways}, "progress": progress}
        if over:  # line 2
            server[names[at + 1]] = kinds[at + 1].begin(new_model(server, at + 1, rng))
            server["progress"] = _begun(at + 1, torch.full((n,), -1), options)
        return server, {**metrics, "level": at + 1, "models_used": (pathways >= 0).sum().item() / n}

    def new_model(server, at: int, rng: Rng) -> State:
        """Return what a level begins from: the same model for all of its clusters or clients."""
        return server["global"] if options.start == "global" else fed.initial(Rng(rng.seed).torch("level", at))

    def pruned(kind: LevelType, level: Level, below: list[Level]) -> Level:
        """With the model that each client keeps (equation 9), -1 for those that are as well off without."""
        missed, offers = level.used < 0, kind.offers(level)
        if missed.any() and len(offers):
            each = [level._replace(used=torch.where(missed, k, -1)) for k in offers]
            losses, answered = validation.ask_losses(below, each)
            level = level._replace(used=torch.where(missed & answered, offers[losses.argmin(0)], level.used))
        losses, answered = validation.ask_losses(below, [None, level])
        keeps = (losses[0] - losses[1] > options.min_gain) | ~answered
        return level._replace(used=torch.where(keeps, level.used, -1))

    def models(server):
        levels = levels_of(server)
        strangers = torch.where(count(levels, n) == 0, 0, -1)
        return ClientModels([*levels, Level([server["global"]], strangers)], mean)

    def levels(server):
        progress = server["progress"]
        trained = int(progress["level"]) + bool(progress["rounds"])
        return Levels(list(options.levels), server["structure"]["pathways"].tolist(), trained)

    def keeps(server):
        return names[int(server["progress"]["level"])] == CLIENTS

    return Algorithm(fed, init, client, aggregate, send, models=models, keeps=keeps, levels=levels)


def part_of(at: int, kind: str) -> str:
    """Return the server's part with the models of a level."""
    return CLIENTS if kind == "personal" else f"level{at + 1}"


def levels_of(server: Server) -> list[Level]:
    """Return the levels of a server, with the model that each client predicts with."""
    pathways = server["structure"]["pathways"]
    return [Level(server.get(f"level{at}", server.get(CLIENTS)), used) for at, used in enumerate(pathways, 1)]


def pathways(options: FeMAMOptions, server: Server) -> tuple[tuple[str, ...], ClientModels]:
    """Return what each level holds, and the models that clients add up; see `Method.pathways`.

    A personal level that clients on other machines keep is left out.
    """
    levels = [level for level in levels_of(server) if not is_remote(level.models)]
    return options.levels[: len(levels)], ClientModels(levels, options.combine == "mean")


def validates(options: FeMAMOptions) -> bool:
    """Return whether clients' validation data say when a level ends, or who keeps its model."""
    return len(options.levels) > 1 and (options.prune or not options.level_rounds)


def _kind(fed: Federation, options: FeMAMOptions, clustering: Clustering, name: str) -> LevelType:
    """Return what a level is, by its name among the options."""
    prox = options.prox if name.isdecimal() or options.prox_all_levels else 0.0
    if name == "global":
        return GlobalLevel(fed, prox)
    if name == "personal":
        return PersonalLevel(fed, prox)
    return ClusterLevel(fed, prox, int(name), clustering, options.share_gradients)


def _begun(level: int, members: Tensor, options: FeMAMOptions) -> State:
    """Return the progress of a level that begins, with the model that each client trains."""
    accuracy = torch.zeros(options.window)
    return {"level": torch.tensor(level), "rounds": torch.tensor(0), "members": members, "accuracy": accuracy}


def _over(level: int, progress: State, options: FeMAMOptions) -> bool:
    """Return whether a level ends with this round: as scheduled, or since it has converged (C.1)."""
    if options.level_rounds:
        return int(progress["rounds"]) >= options.level_rounds[min(level, len(options.level_rounds) - 1)]
    full = int(progress["rounds"]) >= options.window
    return full and bool((100 * progress["accuracy"]).var(correction=0) < options.variance)


def _check(fed: Federation, options: FeMAMOptions) -> None:
    kinds, rounds = options.levels, options.level_rounds
    if fed.data.task == "regression" and len(rounds) < len(kinds) - 1:
        raise FLError(
            "femam ends a level when the validation accuracy no longer changes, and numbers to predict have none: give "
            "--femam.level-rounds, one for each level but the last"
        )
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
    if len(kinds) > 1 and options.start == "random" and fed.create is None:
        raise FLError(
            "femam starts each level from other weights, and one module has only one start: give a function that makes "
            "the model, such as model=MyNet (or Federation(create=...)), or --femam.start global"
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
    clients="personalized",
    columns={"level": int, "models_used": float},  # that trained in the round, from 1; a client's mean number
    pathways=pathways,
    validates=validates,
    lacks={"several_classifiers", "masked_logits", "whole_average", "same_model"},
)
