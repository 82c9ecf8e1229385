"""Any method whose server averages whole models, with differential privacy of its clients; and any that uses samples in
clipped steps alone, with the epsilon that these have spent.
"""

import secrets
from bisect import bisect_right
from dataclasses import replace

import torch
from torch import nn

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
SAMPLES = "sample_privacy"
"""The server's part that holds how often each client has taken part."""


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


def sample_private(algorithm: Algorithm) -> Algorithm:
    """The same method, whose server counts the rounds of each client, and reports what their samples have spent.

    `sample_epsilon` is the largest epsilon of all clients so far; without noise there is none. It counts on a method
    whose clients train once a round, by `Federation.train`, and do nothing else with their samples. Clients that were
    dropped count as well.

    Raises:
        FLError: for a federation in which samples would be seen otherwise.
    """
    fed = algorithm.fed
    _check_samples(fed)
    local, samples = fed.local, fed.clients.train.sizes.tolist()

    def init():
        return {**algorithm.init(), SAMPLES: {"rounds": torch.zeros(len(samples), dtype=torch.int64)}}

    def server(state, clients, update, rng):
        rounds = state[SAMPLES]["rounds"] + torch.bincount(torch.tensor(clients), minlength=len(samples))
        public = {name: part for name, part in state.items() if name != SAMPLES}
        after, metrics = algorithm.served(public, clients, update, rng)
        if local.sample_privacy.noise:
            passes = (rounds * local.epochs * local.repeats).tolist()
            size = local.size_of_batches(fed.clients.train)
            spent = local.sample_privacy.spent(passes, samples, size, local.last_batch)
            metrics = {**metrics, "sample_epsilon": spent}
        return {**after, SAMPLES: {"rounds": rounds}}, metrics

    return replace(algorithm, init=init, server=server)


def _check_samples(fed: Federation) -> None:
    """Raise FLError if samples do more than to be clipped one by one."""
    if fed.remote:
        raise FLError(
            "--sample-privacy.clip: clients on other machines would draw the noise from a seed that the server knows: "
            "leave it out, or simulate them"
        )
    if fed.attack:
        raise FLError(
            "--attack trains malicious clients twice, which --sample-privacy.clip does not count: leave one out"
        )
    if fed.local.masked:
        raise FLError(
            "--masked-loss tells which classes a client has, which --sample-privacy.clip does not count: leave it out"
        )
    mixing = [name for name, module in fed.model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    buffers = [name for name in fed.initial() if name not in dict(fed.model.named_parameters())]
    if mixing or lacks_statistics(fed.model, {}):
        raise FLError(
            "--sample-privacy.clip takes each sample's gradient alone, and batch norms mix those of a batch: take "
            "--norm group, layer or none"
        )
    if buffers:
        raise FLError(
            f"--sample-privacy.clip is for parameters, and {buffers[0]} is a buffer, which may follow samples without "
            "noise: take a model without"
        )
