"""Any method whose server averages whole models, with differential privacy of its clients."""

import secrets
from bisect import bisect_right
from dataclasses import replace

import torch

from fl.algorithms.algorithm import Algorithm
from fl.base.errors import FLError
from fl.federation import Federation
from fl.federation.clients import CLIENTS
from fl.federation.defence import Defence
from fl.federation.inference import lacks_statistics
from fl.federation.update import ClientUpdate
from surgery import broadcast

PART = "privacy"
"""The server's part that holds the clip of the next round."""


def private(algorithm: Algorithm) -> Algorithm:
    """The same method, whose server function sees nothing of its clients but the private mean of what they sent.

    It sees this K times, in the place of the K models, with equal weights: whatever it makes of it is as private. See
    `fl.federation.privacy.Privacy.mean`. A client that is dropped counts as one that has not moved. Rounds report
    `epsilon`, unless there is no noise, and `update_clip`.

    In a simulation the noise is a function of the run's seed, as all is that is random; with clients on other machines,
    who know the seed and may know who takes part, noise is drawn from the system, and epsilon is that of clients who
    take part in every round.

    Raises:
        FLError: for a federation or a method of which that would not be private.
    """
    fed, privacy = algorithm.fed, algorithm.fed.privacy
    _check(algorithm)

    def init():
        privacy.deviations(fed.participants)
        if privacy.noise and not affordable(fed, 1):
            raise FLError(
                f"--privacy.epsilon {privacy.epsilon} is less than the first round spends ({spent(fed, 1):.2f}): take "
                "more --privacy.noise, more --clients, or fewer --participants"
            )
        return {**algorithm.init(), PART: {"clip": torch.tensor(privacy.clip, device=fed.data.device)}}

    def server(state, clients, update, rng):
        k, device = len(clients), fed.data.device
        starts = algorithm.send(state, clients, rng)["model"] if algorithm.send else broadcast(state["global"], k)
        if starts.keys() != update.received.keys() or k != fed.participants:
            raise FLError("--privacy.clip is for methods whose K clients send all of the model, and nothing else")
        generator = torch.Generator().manual_seed(secrets.randbits(63)) if fed.remote else rng.torch("privacy")
        mean, clip = privacy.mean(update.received, starts, state[PART]["clip"], list(fed.trainable), generator)
        models = broadcast(mean, k)
        seen = ClientUpdate(models, torch.zeros(k, device=device), (1,) * k, models)
        public = {name: part for name, part in state.items() if name not in (PART, CLIENTS)}
        after, metrics = algorithm.served(public, clients, seen, rng)
        metrics = {**metrics, "update_clip": state[PART]["clip"].item()}
        if privacy.noise:
            metrics["epsilon"] = spent(fed, rng.round)
        return {**after, PART: {"clip": clip}}, metrics

    return replace(algorithm, init=init, server=server)


def spent(fed: Federation, rounds: int) -> float:
    """The epsilon that so many rounds spend."""
    return fed.privacy.spent(rounds, fed.participants if fed.remote else len(fed.clients), fed.participants)


def affordable(fed: Federation, rounds: int) -> int:
    """How many of the rounds --privacy.epsilon has room for."""
    privacy = fed.privacy
    if not (privacy.clip and privacy.noise and privacy.epsilon):
        return rounds
    return bisect_right(range(1, rounds + 1), privacy.epsilon, key=lambda number: spent(fed, number))


def _check(algorithm: Algorithm) -> None:
    """Raise FLError if something would see more of clients than the private mean of their updates."""
    fed = algorithm.fed
    if fed.defence != Defence():
        raise FLError(
            "--privacy.clip bounds what one client changes, and with --defence one also changes how others count: "
            "leave one of the two out"
        )
    if fed.privacy.noise and fed.privacy.delta >= 1 / len(fed.clients):
        raise FLError(
            f"--privacy.delta {fed.privacy.delta:g} of {len(fed.clients):,} clients says nothing, since publishing one "
            "client's data in full would meet it: take one well below 1 / clients"
        )
    if fed.presence:
        raise FLError("--privacy.clip counts on as many clients in each round: leave --joining and --leaving out")
    if algorithm.steps or algorithm.sample or algorithm.plan or algorithm.levels:
        raise FLError("--privacy.clip is for methods that only average whole models of drawn clients: take fedavg")
    if buffers := [name for name in fed.initial() if name not in dict(fed.model.named_parameters())]:
        raise FLError(
            f"--privacy.clip is for parameters, and {buffers[0]} is a buffer, which is averaged without noise "
            f"({len(buffers)} such): take --norm group, layer or none, or a model without"
        )
    if lacks_statistics(fed.model, {}):
        raise FLError("--privacy.clip: static batch norms look at all clients' data: take --norm group, layer or none")
