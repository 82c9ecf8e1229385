"""Drop clients that diverge from the round; end a run if its server diverges."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl.base.errors import Diverged
from fl.base.torch_private import foreach_norm
from fl.federation.cohort import States, replace_rows, select, stacks
from fl.federation.trainer import Stage, Trainer, Training
from fl.federation.update import ClientUpdate
from surgery import Stack, State

_log = logging.getLogger("fl")


class WithoutDiverged(NamedTuple):
    """The middleware that drops clients that diverge, see `drop_failed`."""

    @property
    def stage(self) -> Stage:
        """Its place in the order."""
        return Stage.DIVERGENCE

    def __call__(self, fed: Any, train: Trainer) -> Trainer:
        """Wrap local training."""

        def run(training: Training) -> ClientUpdate:
            update, cohort = train(training), training.cohort
            received, sizes = drop_failed(
                update.received, update.loss, cohort.states, cohort.clients, update.sizes, training.rng.round
            )
            is_one = update.received is update.states
            states = received if is_one else restore(update.states, cohort.states, sizes)
            return update._replace(states=states, sizes=sizes, received=received)

        return run


def drop_failed(
    states: States, loss: Tensor, starts: States, clients: Sequence[int], sizes: Sequence[int], round: int
) -> tuple[States, tuple[int, ...]]:
    """Reset clients with non-finite loss or weights to their start, and size 0.

    Numbers that are huge and still finite are no failure. A warning names the clients and the round. Waits for the
    device, once in a round without a failure.

    Args:
        loss: of each client [K].
        starts: what the clients started from, in the same form as the states: a stack or a list.
        sizes: the clients' numbers of training samples.

    Returns:
        The states and the sizes, changed for the clients that failed.

    Raises:
        Diverged: if no client is left.
    """
    every = [tensor for after in stacks(states) for tensor in after.values() if tensor.is_floating_point()]
    if bool(loss.isfinite().all() & _have_finite_norms(every)):
        return states, tuple(sizes)
    fine = torch.cat([finite_rows(after, before) for after, before in zip(stacks(states), stacks(starts))])
    intact = (loss.isfinite() & fine).tolist()
    if all(intact):
        return states, tuple(sizes)
    if not any(intact):
        raise _divergence_error(round, f"loss or weights of every client ({len(intact)})", "or a --clip such as 1")
    lost = [str(client) for client, keep in zip(clients, intact) if not keep]
    who = f"client{'s' * (len(lost) > 1)} {', '.join(lost)}"
    _log.warning("warning: round %d: %s dropped: loss or weights became infinite or not a number", round, who)
    return restore(states, starts, intact), tuple(size if keep else 0 for size, keep in zip(sizes, intact))


def check_finite(server: Mapping[str, State], before: Mapping[str, State], loss: Tensor, round: int) -> Tensor:
    """Return the losses [K] on the CPU, if the server's tensors are still finite.

    A number that was infinite or not a number before the round may stay so: a mask of -inf, for example. Waits for the
    device once, for the losses and what they are checked with.

    Args:
        before: what the server kept before the round.

    Raises:
        Diverged: naming the first tensor that is no longer finite.

    >>> before = {"momentum": {"w": torch.zeros(2)}}
    >>> check_finite({"momentum": {"w": torch.ones(2)}}, before, torch.tensor([0.5, 0.25]), 1)
    tensor([0.5000, 0.2500])
    """
    named = [(part, name, tensor) for part, state in server.items() for name, tensor in state.items()]
    named = [(part, name, tensor) for part, name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    changed: dict[torch.device, list[Tensor]] = {loss.device: []}
    for part, name, tensor in named:
        if tensor is not before.get(part, {}).get(name):
            values = tensor[:1] if tensor.ndim and not tensor.stride(0) else tensor  # of a stack of one model
            changed.setdefault(tensor.device, []).append(values)
    fine = {device: _have_finite_norms(some or [loss.new_zeros(())]) for device, some in changed.items()}
    numbers = torch.cat([loss, fine.pop(loss.device)[None].to(loss)]).cpu()
    if not (numbers[-1] and all(fine.values())):
        for part, name, tensor in named:
            if not _stays_finite(tensor, [before.get(some, {}).get(name) for some in (part, "global")]):
                more = "a --clip such as 1, or a limit for what single clients send"
                raise _divergence_error(round, f"the server's {part}/{name}", more)
    return numbers[:-1]


def _stays_finite(tensor: Tensor, before: Sequence[Tensor | None]) -> bool:
    """Return whether a tensor is finite where it was before.

    For a new stack of models: where the one model was.
    """
    fine = tensor.isfinite()
    for old in before:
        if old is not None and old.shape in (tensor.shape, tensor.shape[1:]):
            fine = fine | ~old.isfinite()
            break
    return bool(fine.all())


def _divergence_error(round: int, subject: str, more: str) -> Diverged:
    saved = " What came before is saved." if round > 1 else ""
    return Diverged(
        f"training diverged: in round {round} {subject} became infinite or not a number.{saved} Start a new run with a "
        f"smaller --lr, {more}"
    )


def restore(states: States, starts: States, counted: Sequence[Any]) -> States:
    """Return the states of the clients that count, and the starts of the others.

    Args:
        counted: true or false for each client, or its size, which is 0 if it was dropped.

    >>> restore({"w": torch.ones(2)}, {"w": torch.zeros(2)}, [False, True])["w"]
    tensor([0., 1.])
    """
    lost = [row for row, keep in enumerate(counted) if not keep]
    return replace_rows(states, lost, select(starts, lost)) if lost else states


def _have_finite_norms(tensors: list[Tensor]) -> Tensor:
    """Return whether norms of tensors are finite, a bool on the device.

    If a norm is finite, all numbers of its tensor are. The opposite does not hold: squares of huge finite numbers may
    be infinite. It takes few launches.
    """
    return torch.stack(foreach_norm(tensors)).isfinite().all()


def finite_rows(stack: Stack, starts: Stack) -> Tensor:
    """Return whether entries stay finite where they were at the start, bool [K].

    >>> finite_rows({"w": torch.tensor([1.0, torch.nan])}, {"w": torch.zeros(2)})
    tensor([ True, False])
    """
    rows = []
    for name, tensor in stack.items():
        if tensor.is_floating_point() and tensor.numel():
            fine = tensor.isfinite() | ~starts[name].isfinite()  # a mask of -inf, for example, is as it should be
            rows.append(fine.reshape(len(tensor), -1).all(1))
    return torch.stack(rows).all(0)
