"""Clients that diverge are dropped from their round, so that one of them does not end a run."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from fl.base.errors import Diverged
from fl.engine import Trained
from surgery import Stack, State
from surgery.transfer import upload

_log = logging.getLogger("fl")


def drop_failed(
    trained: Trained, starts: Stack | Sequence[State], clients: Sequence[int], sizes: Sequence[int], round: int
) -> Trained:
    """Give clients whose loss or weights are not finite any more their start back, and the size 0.

    One that diverges and is still finite, however large, stays in.

    Waits for the device, once a round in which nothing is amiss. A warning names the clients and the round.

    Args:
        starts: what the clients started from: a stack, or a list of states, as those trained.
        sizes: their numbers of training samples.

    Raises:
        Diverged: if no client is left.
    """
    mixed = isinstance(trained.states, list)
    pairs = list(zip(map(_single, trained.states), map(_single, starts))) if mixed else [(trained.states, starts)]
    # A sum is finite only if all of its terms are: one fast look at everything settles nearly every round.
    if bool((trained.loss.isfinite() & torch.cat([_finite_sums(states) for states, _ in pairs])).all()):
        return trained._replace(sizes=tuple(sizes))
    finite = trained.loss.isfinite() & torch.cat([_finite_rows(states, before) for states, before in pairs])
    kept = finite.tolist()
    if all(kept):
        return trained._replace(sizes=tuple(sizes))
    lost = [client for client, keep in zip(clients, kept) if not keep]
    if not any(kept):
        saved = " What came before is saved." if round > 1 else ""
        raise Diverged(
            f"training diverged: in round {round} loss or weights of every client ({len(lost)}) became infinite "
            f"or not a number.{saved} Start a new run with a smaller --lr, or a --clip such as 1"
        )
    _log.warning(
        "warning: round %d: client %s dropped: loss or weights became infinite or not a number",
        round,
        ", ".join(map(str, lost)),
    )
    states = restored(trained.states, starts, kept)
    return Trained(states, trained.loss, tuple(n if keep else 0 for n, keep in zip(sizes, kept)))


def restored(
    states: Stack | Sequence[State], starts: Stack | Sequence[State], kept: Sequence[bool]
) -> Stack | list[State]:
    """The states of clients that are kept, and the starts of the others.

    >>> restored({"w": torch.ones(2)}, {"w": torch.zeros(2)}, [False, True])["w"]
    tensor([0., 1.])
    """
    if not isinstance(states, dict):
        return [state if keep else start for state, start, keep in zip(states, starts, kept)]
    mask = upload(torch.tensor(kept), next(iter(states.values())).device)
    return {
        name: torch.where(mask.view(-1, *[1] * (tensor.ndim - 1)), tensor, starts[name])
        for name, tensor in states.items()
    }


def _single(state: State) -> Stack:
    return {name: tensor[None] for name, tensor in state.items()}


def _finite_sums(stack: Stack) -> Tensor:
    """For which of the K entries of a stack the sums of all floating-point tensors are finite: bool [K]."""
    sums = [t.reshape(len(t), -1).sum(1) for t in stack.values() if t.is_floating_point()]
    return torch.stack(sums).isfinite().all(0)


def _finite_rows(stack: Stack, starts: Stack) -> Tensor:
    """Which of the K entries of a stack are finite, in all floating-point tensors, where they began so: bool [K]."""
    rows = []
    for name, tensor in stack.items():
        if tensor.is_floating_point() and tensor.numel():
            fine = tensor.isfinite() | ~starts[name].isfinite()  # a mask of -inf, say, is as it should be
            rows.append(fine.reshape(len(tensor), -1).all(1))
    return torch.stack(rows).all(0)
