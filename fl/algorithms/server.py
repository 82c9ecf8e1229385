"""The state of a method's server, and checks of what a method makes of it."""

from typing import Any, TypeAlias

from torch import Tensor

from fl.base.errors import FLError
from fl.base.plugins import kind
from surgery import Stack, State

Server: TypeAlias = dict[str, State | Stack]
"""What the server stores from round to round, by name. Checkpoints save and restore it unchanged. It always has a part
"global". The part "clients" is optional: it holds the states that clients keep for themselves, see
`fl.federation.Federation.client_states`."""


def check_server(server: Server) -> Server:
    """Return the server; FLError without "global", or for parts that are no states."""
    for name, part in {"global": None, **server}.items():
        if not isinstance(part, dict) or not all(isinstance(tensor, Tensor) for tensor in part.values()):
            raise FLError(
                f"the server's part {name!r} is a {type(part).__name__}: give each part as a dict of tensors, also "
                'a counter: {"step": {"n": torch.tensor(0)}}; the part "global" must exist',
                code="run",
            )
    return server


def check_aggregated(method: str, server: Any, metrics: Any, before: Server) -> None:
    """Raise FLError unless `aggregate` returns a server with a global model as before.

    The global model keeps its names, shapes and dtypes. Other parts may change: FeMAM's server gets levels.

    Args:
        method: the method's name.
        metrics: what `aggregate` returned beside the server.
        before: the server before the round.
    """
    prefix, old = f"aggregate of {method} returns", before["global"]
    if not isinstance(server, dict) or not isinstance(metrics, dict):
        wrong = kind(server) if isinstance(metrics, dict) else f"metrics that are {kind(metrics)}"
        raise FLError(
            f'{prefix} {wrong}: return {{"global": state}}, or a pair of it and a dict of metrics', code="run"
        )
    if "global" not in server and server.keys() >= old.keys():
        raise FLError(f'{prefix} the tensors of the global model: return {{"global": state}}', code="run")
    try:
        new = check_server(server)["global"]
    except FLError as error:
        raise FLError(f"{prefix} no server: {error}", code="run") from None
    if strange := old.keys() ^ new.keys():
        wrong = "without" if min(strange) in old else "with"
        raise FLError(
            f"{prefix} a global model {wrong} {min(strange)!r}: return the tensors that it had before", code="run"
        )
    for name, tensor in old.items():
        if (shape := tuple(new[name].shape)) != tensor.shape:
            raise FLError(
                f"{prefix} a global model with {name!r} of the shape {shape}, which was {tuple(tensor.shape)}: return "
                "one model, such as fed.average(update.received, update.sizes)",
                code="run",
            )
        if (dtype := new[name].dtype) != tensor.dtype:
            raise FLError(
                f"{prefix} a global model with {name!r} of {dtype}, which was {tensor.dtype}: change the tensors in "
                "fed.model.named_parameters(), and take the others from fed.average",
                code="run",
            )
