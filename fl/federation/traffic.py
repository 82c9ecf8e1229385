"""The mean traffic of a participant in a round: models and bytes, down and up."""

from collections.abc import Mapping, Sequence

from fl.base.torch_private import tree_leaves
from fl.federation.cohort import States

COLUMNS = ("models_down", "models_up", "bytes_down", "bytes_up", "bytes_peers", "secure_seconds")
"""The last two are from secure recombination (FedMR): bytes sent to other clients, and the time of the exchange."""


def count(sizes: Sequence[int], model: float, received: float, sent: Sequence[int]) -> dict[str, float]:
    """Return the traffic of a round with a message to every client and its update.

    Args:
        sizes: the clients' numbers of samples. A client that was dropped (size 0) sends nothing.
        model: bytes of the participants' models, on average.
        received: bytes that all clients receive together.
        sent: bytes of each client's update.

    Returns:
        models_down, models_up: in models of the participants' mean size. bytes_down, bytes_up: in bytes. Each is a mean
        over the participants.

    >>> count(sizes=[10, 0], model=20, received=40, sent=[20, 20])
    {'models_down': 1.0, 'models_up': 0.5, 'bytes_down': 20.0, 'bytes_up': 10.0}
    """
    down, up = received / len(sizes), sum(n for n, size in zip(sent, sizes) if size) / len(sizes)
    return {"models_down": down / model, "models_up": up / model, "bytes_down": down, "bytes_up": up}


def nbytes(states: States) -> list[int]:
    """Return the bytes of each client's tensors in memory; buffers count too.

    >>> import torch
    >>> nbytes({"w": torch.zeros(2, 5)})
    [20, 20]
    """
    sizes = []
    for tree in states if isinstance(states, list) else [states]:
        leaves = tree_leaves(tree)
        k = 1 if isinstance(states, list) else len(leaves[0]) if leaves else 0
        sizes += [sum(tensor.nbytes for tensor in leaves) // k] * k if k else []
    return sizes


def more(metrics: Mapping[str, float], model: float, down: float = 0, up: float = 0) -> dict[str, float]:
    """Return a round's metrics with more bytes sent beside the models.

    The bytes are a mean over the participants.

    Args:
        model: bytes of the participants' models, on average.

    >>> more(count([10], model=20, received=20, sent=[20]), model=20, down=10)
    {'models_down': 1.5, 'models_up': 1.0, 'bytes_down': 30.0, 'bytes_up': 20.0}
    """
    bytes_down, bytes_up = metrics["bytes_down"] + down, metrics["bytes_up"] + up
    now = {"models_down": bytes_down / model, "models_up": bytes_up / model, "bytes_down": bytes_down}
    return {**metrics, **now, "bytes_up": bytes_up}
