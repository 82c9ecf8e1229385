"""Any method that uses samples in clipped steps alone, with the epsilon that these have spent."""

from dataclasses import replace

import torch
from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.base.errors import FLError
from fl.federation import Federation
from fl.federation.inference import lacks_statistics

PART = "sample_privacy"
"""The server's part that holds how often each client has taken part."""


def sample_private(algorithm: Algorithm) -> Algorithm:
    """The same method, whose server counts the rounds of each client, and reports what their samples have spent.

    `sample_epsilon` is the largest epsilon of all clients so far; without noise there is none. It counts on a method
    whose clients train once a round, by `Federation.train`, and do nothing else with their samples. Clients that were
    dropped count as well.

    Raises:
        FLError: for a federation in which samples would be seen otherwise.
    """
    fed = algorithm.fed
    _check(fed)
    local, samples = fed.local, fed.clients.train.sizes.tolist()

    def init():
        return {**algorithm.init(), PART: {"rounds": torch.zeros(len(samples), dtype=torch.int64)}}

    def server(state, clients, update, rng):
        rounds = state[PART]["rounds"] + torch.bincount(torch.tensor(clients), minlength=len(samples))
        public = {name: part for name, part in state.items() if name != PART}
        result = algorithm.server(public, clients, update, rng)
        after, metrics = result if isinstance(result, tuple) else (result, {})
        if local.sample_privacy.noise:
            passes = (rounds * local.epochs * local.repeats).tolist()
            size = local.size_of_batches(fed.clients.train)
            spent = local.sample_privacy.spent(passes, samples, size, local.last_batch)
            metrics = {**metrics, "sample_epsilon": spent}
        return {**after, PART: {"rounds": rounds}}, metrics

    return replace(algorithm, init=init, server=server)


def _check(fed: Federation) -> None:
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
