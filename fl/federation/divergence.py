"""Clients that diverge are dropped from the round, so that the run goes on without them."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl.base.errors import Diverged
from fl.federation.cohort import States, replace_rows, select, stacks
from surgery import Stack

_log = logging.getLogger("fl")


def drop_failed(
    states: States, loss: Tensor, starts: States, clients: Sequence[int], sizes: Sequence[int], round: int
) -> tuple[States, tuple[int, ...]]:
    """Give clients whose loss or weights are no longer finite their start back, and the size 0.

    Numbers that are huge and still finite are no failure. A warning names the clients and the round. Waits for the
    device, once in a round in which nobody fails.

    Args:
        loss: of each client [K].
        starts: what the clients started from, in the same form as the states: a stack or a list.
        sizes: the clients' numbers of training samples.

    Returns:
        The states and the sizes, changed for the clients that failed.

    Raises:
        Diverged: if no client is left.
    """
    # A sum is finite only if all of its terms are: this fast look at everything settles nearly every round.
    if bool((loss.isfinite() & torch.cat([_finite_sums(after) for after in stacks(states)])).all()):
        return states, tuple(sizes)
    fine = torch.cat([finite_rows(after, before) for after, before in zip(stacks(states), stacks(starts))])
    kept = (loss.isfinite() & fine).tolist()
    if all(kept):
        return states, tuple(sizes)
    if not any(kept):
        saved = " What came before is saved." if round > 1 else ""
        raise Diverged(
            f"training diverged: in round {round} loss or weights of every client ({len(kept)}) became infinite "
            f"or not a number.{saved} Start a new run with a smaller --lr, or a --clip such as 1"
        )
    lost = [str(client) for client, keep in zip(clients, kept) if not keep]
    who = f"client{'s' * (len(lost) > 1)} {', '.join(lost)}"
    _log.warning("warning: round %d: %s dropped: loss or weights became infinite or not a number", round, who)
    return restored(states, starts, kept), tuple(size if keep else 0 for size, keep in zip(sizes, kept))


def restored(states: States, starts: States, kept: Sequence[Any]) -> States:
    """Return the states of the clients that are kept, and the starts of the others.

    Args:
        kept: true or false for each client, or its size, which is 0 if it was dropped.

    >>> restored({"w": torch.ones(2)}, {"w": torch.zeros(2)}, [False, True])["w"]
    tensor([0., 1.])
    """
    lost = [row for row, keep in enumerate(kept) if not keep]
    return replace_rows(states, lost, select(starts, lost)) if lost else states


def _finite_sums(stack: Stack) -> Tensor:
    """Whether the sums of all floating-point tensors are finite, for each of the K entries of a stack: bool [K]."""
    sums = [t.reshape(len(t), -1).sum(1) for t in stack.values() if t.is_floating_point()]
    return torch.stack(sums).isfinite().all(0)


def finite_rows(stack: Stack, starts: Stack) -> Tensor:
    """Whether all floating-point numbers that were finite at the start still are, for each of K entries: bool [K].

    >>> finite_rows({"w": torch.tensor([1.0, torch.nan])}, {"w": torch.zeros(2)})
    tensor([ True, False])
    """
    rows = []
    for name, tensor in stack.items():
        if tensor.is_floating_point() and tensor.numel():
            fine = tensor.isfinite() | ~starts[name].isfinite()  # a mask of -inf, for example, is as it should be
            rows.append(fine.reshape(len(tensor), -1).all(1))
    return torch.stack(rows).all(0)
