"""Clients' records: messages to them, their updates, and their own states."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.torch_private import tree_leaves
from fl.federation.cohort import replace_rows, select
from fl.federation.update import ClientUpdate
from surgery import Stack, State

CLIENTS = "clients"

Message: TypeAlias = dict[str, Any]
"""What the server sends to the K clients of a round: "model", the states that they train, and whatever else the method
sends, tensors [K, ...] or dicts of them; "levels" are finished models whose logits are added up, a list of `Level`, of
which each client is sent its own once."""

Client: TypeAlias = Callable[[Message, Stack, Sequence[int], Rng], ClientUpdate]
"""(what each client receives, its client state, the clients, rng) -> what comes of it."""


def update_states(client_states: Stack, clients: Sequence[int], update: ClientUpdate) -> Stack:
    """Return the states of all clients after a round in this process.

    A client that was dropped keeps its state.

    Args:
        client_states: of all clients before it [clients, ...]; empty where they keep nothing.
    """
    if not client_states or not update.client_states:
        return client_states
    check_names(client_states, update.client_states)
    took = [row for row, size in enumerate(update.sizes) if size]
    return replace_rows(client_states, [clients[row] for row in took], select(update.client_states, took))


def check_names(client_states: Stack, new: Stack) -> None:
    """Raise FLError if clients' new states have other names than those that they had."""
    if strange := client_states.keys() ^ new.keys():
        raise FLError(
            f"a client's state has {', '.join(client_states)}, and the client function returned another one: {strange}",
            code="run",
        )


def check_message(message: Message) -> None:
    """Raise FLError for what cannot be sent to clients.

    They can receive tensors with a row for each, or dicts of them.
    """
    if not isinstance(message, dict):
        raise FLError(f'a message is a dict such as {{"model": stack}}, got a {type(message).__name__}', code="run")
    for name, part in message.items():
        listed = name == "levels" or (name == "model" and isinstance(part, list))
        if not listed and (isinstance(part, list) or not all(isinstance(leaf, Tensor) for leaf in tree_leaves(part))):
            raise FLError(
                f"the message's {name!r} is a {type(part).__name__}: give a tensor [K, ...], or a dict of them, with a "
                "row for each client",
                code="run",
            )


def check_update(update: ClientUpdate, message: Message) -> None:
    """Raise FLError for an update that could not come from clients on other machines."""
    if update.metrics:
        raise FLError(
            f"clients report no columns ({', '.join(update.metrics)}): return them from the server function", code="run"
        )
    received, model = update.received, message.get("model", {})
    if received and model:
        sent, before = (part[0] if isinstance(part, list) else part for part in (received, model))
        if strange := sent.keys() ^ before.keys():
            raise FLError(
                f"clients send {min(strange)}, and the message's model does not have it (or the other way round): what "
                'they send has the names of message["model"], or is nothing',
                code="run",
            )


def is_remote(client_states: Stack | Sequence[State]) -> bool:
    """Return whether these are versions that clients on other machines keep."""
    return isinstance(client_states, dict) and {"run", "version"} <= client_states.keys()
