"""Clients that diverge are dropped from their round, so that one of them does not end a run."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fl.engine import Trained
from fl.errors import FLError
from surgery import Stack

_log = logging.getLogger("fl")


def drop_failed(trained: Trained, starts: Stack, clients: Sequence[int], sizes: Sequence[int], round: int) -> Trained:
    """Give clients whose loss or weights are not finite any more their start back, and the size 0.

    One that diverges and is still finite, however large, stays in.

    Waits for the device, once a round. A warning names the clients and the round.

    Args:
        starts: what the clients started from.
        sizes: their numbers of training samples.

    Raises:
        FLError: if no client is left.
    """
    finite = torch.stack([trained.loss.isfinite(), *_finite_rows(trained.states, starts)]).all(0)
    kept = finite.tolist()
    if all(kept):
        return trained._replace(sizes=tuple(sizes))
    lost = [client for client, keep in zip(clients, kept) if not keep]
    if not any(kept):
        saved = " What came before is saved." if round > 1 else ""
        raise FLError(
            f"training diverged: in round {round} loss or weights of every client ({len(lost)}) became infinite "
            f"or not a number.{saved} Start a new run with a smaller --lr, or a --clip such as 1"
        )
    _log.warning(
        "warning: round %d: client %s dropped: loss or weights became infinite or not a number",
        round,
        ", ".join(map(str, lost)),
    )
    states = {
        name: torch.where(finite.view(-1, *[1] * (tensor.ndim - 1)), tensor, starts[name])
        for name, tensor in trained.states.items()
    }
    return Trained(states, trained.loss, tuple(n if keep else 0 for n, keep in zip(sizes, kept)))


def _finite_rows(stack: Stack, starts: Stack) -> Iterator[Tensor]:
    """For each floating-point tensor [K, ...] of a stack, which of its K entries are finite where they began so [K]."""
    for name, tensor in stack.items():
        if tensor.is_floating_point() and tensor.numel():
            fine = tensor.isfinite() | ~starts[name].isfinite()  # a mask of -inf, say, is as it should be
            yield fine.reshape(len(tensor), -1).all(1)
