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
    """levels of models: global (one model; only as the first level), a number (of cluster models) or personal (a model
    for each client; only as the last level); default: the paper's levels, with no more clusters than clients"""
    level_rounds: Lengths = ()
    """rounds of each level (the paper: 400,50, where the last number counts for all further levels), or converged:
    train a level until its accuracy varies little; the last level trains to the end"""
    window: Annotated[int, number(int, least=2, most=10**6)] = 10
    """rounds over which convergence is judged (the paper: 50)"""
    variance: AtLeast0 = 1.0
    """a level has converged when the variance of the mean validation accuracy (in %) over the window is below this (the
    paper: 1)"""
    prox: AtLeast0 = 0.02
    """weight of the proximal term that pulls clients to the cluster's model while they train (Eq. 5's lambda)"""
    prox_all_levels: bool = False
    """apply the proximal term on every level, as the released code does"""
    share_gradients: bool = False
    """on cluster levels, scale the gradient of a client's loss by its share of all samples (Eq. B.4)"""
    prune: bool = True
    """remove a finished level's model from each client where it does not lower the validation loss (Eq. 9)"""
    min_gain: float = 0.0
    """smallest drop in validation loss for which a client keeps the level's model (Eq. 9; the paper: 0)"""
    combine: Annotated[str, one_of("sum", "mean")] = "sum"
    """how the logits of a client's levels are combined: sum, or mean as in the released code"""
    start: Annotated[str, one_of("random", "global")] = "random"
    """initial weights of a new level: random, or global (the weights of the first level, as in the released code)"""
    clustering: Annotated[str, one_of(*ASSIGNMENTS)] = "nearest"
    """how clients are assigned to clusters: nearest (to the nearest cluster model, Eq. 4; by K-means in a level's first
    round) or kmeans (by K-means in each round, as in the released code)"""
    compare: Annotated[str, one_of(*COMPARED)] = "all"
    """weights that are compared to assign clients: all, or classifier (the classifier's weights, divided by the
    absolute value of their sum, as in the released code)"""


def femam(fed: Federation, options: FeMAMOptions = FeMAMOptions()) -> Algorithm:
    """Train levels of models in turn: a global model, cluster models, a model for each client.

    A client has at most one model on each level, and predicts with the sum of their logits. Only the newest level
    trains: it corrects the predictions of the earlier levels.

    A level ends when it has converged, or after its number of rounds. Then each client keeps the level's model only if
    the model lowers its validation loss. The clusters are averaged once more without the clients that left. The first
    level is never pruned, so that every client has a model. The last level does not end. After every round of it each
    client decides again whether it predicts with the level's model; it trains this model in either case.

    All clusters of a level begin with the same model. After the first round, K-means over the trained models makes the
    first clusters (see `fesem`). An empty cluster keeps its model, and clients may choose it again. A client that joins
    a cluster level after its first round begins with the mean of the level's models. If a client missed all rounds of a
    level, it is offered a model at the end: among the models in use, the model with the smallest loss on its validation
    data. It keeps this model on the same condition as other clients. (Without pruning, and on the personal level, such
    a client has no model.)

    The server's "global" is the model for new clients: the first level's model, or the clients' mean if that level has
    several models. The method remembers the logits of earlier levels, so images cannot be augmented; see
    `fl.algorithms.parts.additive.Cache` for the cost.

    With a single level this is a simpler method: FedAvg (`global`), Local (`personal`), or FeSEM (a number of clusters,
    with `prox` 0).
    """
    _check(fed, options)
    clustering = Clustering.make(fed, options.clustering, options.compare, "femam")
    level_types = [_level_type(fed, options, clustering, name) for name in options.levels]
    parts, last = [part_of(at, name) for at, name in enumerate(options.levels)], len(level_types) - 1
    n, mean = len(fed.clients), options.combine == "mean"
    objectives = [with_logits(kind.objective()) if at else kind.objective() for at, kind in enumerate(level_types)]
    cache = Cache(fed) if last else None
    validation = Validation(fed, cache, mean) if validates(options) else None

    def init():
        start, used, unused = fed.initial(), level_types[0].start(), torch.full((last, n), -1)
        levels = {name: kind.begin(start) for name, kind in zip(parts, level_types)}
        structure = {"pathways": torch.cat([used[None], unused])}
        return {"global": start, **levels, "structure": structure, "progress": _start_progress(0, used, options)}

    def newest_level(server) -> tuple[int, Level]:
        """Return the index of the newest level, and the level with the trained models."""
        at = int(server["progress"]["level"])
        return at, Level(server[parts[at]], server["progress"]["members"])

    def send(server, clients, rng):
        """Return each client's newest model (line 5), and one copy of the earlier levels."""
        at, level = newest_level(server)
        message = {"levels": levels_of(server)[:at], **level_types[at].message(level, clients)}
        if at and mean:
            message["share"] = upload(1 / (1 + count(message["levels"], n)[clients]), fed.data.device)
        return message

    def client(message, client_states, clients, rng):
        """Train the newest level on top of the earlier levels' logits (lines 6 to 9)."""
        at = len(message["levels"])
        kind, starts = level_types[at], message.get("model", client_states)
        context = kind.anchor(starts) | {name: message[name] for name in ("weight", "share") if name in message}
        logits = cache.table(message["levels"]) if at else None
        return kind.upload(fed.train(starts, clients, rng, objectives[at], context, per_sample=logits))

    def aggregate(server, clients, update, rng):
        """Do lines 10 to 13 for the newest level.

        If it ends, do lines 14 to 17, and line 2 for the next level.
        """
        (at, level), pathways, metrics = newest_level(server), server["structure"]["pathways"], {}
        kind, earlier = level_types[at], levels_of(server)[:at]
        level = kind.collect(level, clients, update, rng)  # lines 10 to 12
        progress = {**server["progress"], "rounds": server["progress"]["rounds"] + 1, "members": level.used}
        if at < last and not options.level_rounds:
            accuracy = torch.tensor([validation.accuracy(earlier, level)])
            progress["accuracy"] = torch.cat([progress["accuracy"][1:], accuracy])
        has_ended = at < last and _has_ended(at, progress, options)
        prunes = options.prune and at > 0
        pruned_level = prune(kind, level, earlier) if prunes and (has_ended or at == last) else level  # lines 14 and 15
        if has_ended:
            offer_count = len(kind.offers(level)) if prunes else 0
            metrics = add_level_traffic(update.metrics, len(clients), level, pruned_level, offer_count)
            pruned_level = pruned_level._replace(
                models=cluster_means(fed, pruned_level.models, pruned_level.used, clients, update)
            )  # line 16
        new_global = {"global": kind.mean(pruned_level, otherwise=server["global"])} if at == 0 else {}
        pathways = pathways.index_copy(0, torch.tensor([at]), pruned_level.used[None])
        server = {
            **server,
            **new_global,
            parts[at]: pruned_level.models,
            "structure": {"pathways": pathways},
            "progress": progress,
        }
        if has_ended:  # line 2
            server[parts[at + 1]] = level_types[at + 1].begin(new_model(server, at + 1, rng))
            server["progress"] = _start_progress(at + 1, torch.full((n,), -1), options)
        return server, {**metrics, "level": at + 1, "models_used": (pathways >= 0).sum().item() / n}

    def new_model(server, at: int, rng: Rng) -> State:
        """Return a level's initial model, the same for all of its clusters or clients."""
        return server["global"] if options.start == "global" else fed.initial(Rng(rng.seed).torch("level", at))

    def prune(kind: LevelType, level: Level, earlier: list[Level]) -> Level:
        """Return the level after pruning (equation 9).

        Clients that do not gain by its model have none (-1).
        """
        has_none, offers = level.used < 0, kind.offers(level)
        if has_none.any() and len(offers):
            offered_levels = [level._replace(used=torch.where(has_none, k, -1)) for k in offers]
            losses, answered = validation.ask_losses(earlier, offered_levels)
            level = level._replace(used=torch.where(has_none & answered, offers[losses.argmin(0)], level.used))
        losses, answered = validation.ask_losses(earlier, [None, level])
        is_kept = (losses[0] - losses[1] > options.min_gain) | ~answered
        return level._replace(used=torch.where(is_kept, level.used, -1))

    def models(server):
        levels = levels_of(server)
        fallback = torch.where(count(levels, n) == 0, 0, -1)
        return ClientModels([*levels, Level([server["global"]], fallback)], mean)

    def levels(server):
        progress = server["progress"]
        trained = int(progress["level"]) + bool(progress["rounds"])
        return Levels(list(options.levels), server["structure"]["pathways"].tolist(), trained)

    def keeps(server):
        return parts[int(server["progress"]["level"])] == CLIENTS

    return Algorithm(fed, init, client, aggregate, send, models=models, keeps=keeps, levels=levels)


def part_of(at: int, kind: str) -> str:
    """Return the name of the server's part that holds the models of a level."""
    return CLIENTS if kind == "personal" else f"level{at + 1}"


def levels_of(server: Server) -> list[Level]:
    """Return the levels of a server, with the model that each client predicts with."""
    pathways = server["structure"]["pathways"]
    return [Level(server.get(f"level{at}", server.get(CLIENTS)), used) for at, used in enumerate(pathways, 1)]


def pathways(options: FeMAMOptions, server: Server) -> tuple[tuple[str, ...], ClientModels]:
    """Return each level's name, and the models that clients add up.

    See `Method.pathways`. A personal level that clients on other machines keep is left out.
    """
    levels = [level for level in levels_of(server) if not is_remote(level.models)]
    return options.levels[: len(levels)], ClientModels(levels, options.combine == "mean")


def validates(options: FeMAMOptions) -> bool:
    """Return whether levels need validation data: to end, or to be pruned."""
    return len(options.levels) > 1 and (options.prune or not options.level_rounds)


def _level_type(fed: Federation, options: FeMAMOptions, clustering: Clustering, name: str) -> LevelType:
    """Return the type of a level, by its name in the option `levels`."""
    prox = options.prox if name.isdecimal() or options.prox_all_levels else 0.0
    if name == "global":
        return GlobalLevel(fed, prox)
    if name == "personal":
        return PersonalLevel(fed, prox)
    return ClusterLevel(fed, prox, int(name), clustering, options.share_gradients)


def _start_progress(level: int, members: Tensor, options: FeMAMOptions) -> State:
    """Return the progress of a level that begins.

    Args:
        members: the number of the model that each client trains; -1 for none yet.
    """
    accuracy = torch.zeros(options.window)
    return {"level": torch.tensor(level), "rounds": torch.tensor(0), "members": members, "accuracy": accuracy}


def _has_ended(level: int, progress: State, options: FeMAMOptions) -> bool:
    """Return whether a level ends with this round: by its rounds or convergence (C.1)."""
    if options.level_rounds:
        return int(progress["rounds"]) >= options.level_rounds[min(level, len(options.level_rounds) - 1)]
    has_full_window = int(progress["rounds"]) >= options.window
    return has_full_window and bool((100 * progress["accuracy"]).var(correction=0) < options.variance)


def _check(fed: Federation, options: FeMAMOptions) -> None:
    kinds, rounds = options.levels, options.level_rounds
    if fed.data.task == "regression" and len(rounds) < len(kinds) - 1:
        raise FLError(
            "femam ends a level when the validation accuracy no longer changes, but a regression has no accuracy: give "
            "--femam.level-rounds, one number for each level except the last"
        )
    for at, kind in enumerate(kinds):
        cluster = kind.isdecimal() and 1 <= int(kind) <= len(fed.clients)
        if not (cluster or (kind == "global" and at == 0) or (kind == "personal" and at == len(kinds) - 1)):
            raise FLError(
                f"--femam.levels {','.join(kinds)}: {kind!r} is not allowed there; levels are global (as the first), "
                f"numbers of clusters (1 to {len(fed.clients)}, the number of clients) and personal (as the last)"
            )
    if not kinds or (rounds and (len(rounds) > len(kinds) - 1 or min(rounds) < 1)):
        raise FLError(
            f"--femam.level-rounds {','.join(map(str, rounds))} for --femam.levels {','.join(kinds)}: give numbers of "
            "at least 1, at most one for each level except the last (it trains to the end); or give converged"
        )
    if len(kinds) > 1 and options.start == "random" and fed.create is None:
        raise FLError(
            "femam starts each level from different weights, but a module has only one set of weights: give a function "
            "that makes the model, such as model=MyNet (or Federation(create=...)), or --femam.start global"
        )
    if len(kinds) > 1 and (fed.local.augment.crop or fed.local.augment.flip or fed.local.augment.mask):
        raise FLError(
            "FeMAM remembers what earlier levels predict for each sample, but augmentation changes samples: remove "
            "--crop and --flip, and choose another model than transformer_masked",
            code="unsupported",
        )
    if len(kinds) > 1 and any(isinstance(module, StaticBatchNorm2d) for module in fed.model.modules()):
        raise FLError(
            "FeMAM would have to collect the statistics of static batch norms for each of its models: choose another "
            "--norm than static_batch",
            code="unsupported",
        )


METHOD = Method(
    femam,
    FeMAMOptions(),
    clients="personalized",
    # the level that trained in the round, from 1; the mean number of models that a client uses
    columns={"level": int, "models_used": float},
    pathways=pathways,
    validates=validates,
    lacks={"several_classifiers", "masked_logits", "whole_average", "same_model"},
)
