"""What a participant receives and sends in a round, on average: models and bytes."""

from collections.abc import Sequence

from fl.federation.cohort import States, stacks
from fl.federation.trained import Trained
from surgery import stack_size

COLUMNS = ("models_down", "models_up", "bytes_down", "bytes_up", "bytes_peers", "secure_seconds")
"""The last two are from secure recombination (FedMR): bytes sent to other clients, and the time of the exchange."""


def count(starts: States, sizes: Sequence[int]) -> dict[str, float]:
    """The traffic of a round in which every client receives its start and sends its trained model back.

    Tensors count with their size in memory, uncompressed; buffers count too. A client that was dropped (size 0) sends
    nothing.

    Returns:
        models_down, models_up: in models of the participants' mean size. bytes_down, bytes_up: in bytes. Each is a mean
        over the participants.

    >>> import torch
    >>> count({"w": torch.zeros(2, 5)}, sizes=[10, 0])
    {'models_down': 1.0, 'models_up': 0.5, 'bytes_down': 20.0, 'bytes_up': 10.0}
    """
    k = len(sizes)
    each = []
    for stack in stacks(starts):
        models = stack_size(stack)
        each += [sum(tensor.nbytes for tensor in stack.values()) // models] * models
    down, up = sum(each) / k, sum(n for n, size in zip(each, sizes) if size) / k
    return {"models_down": 1.0, "models_up": up / down, "bytes_down": down, "bytes_up": up}


def add_bytes(trained: Trained, down: float = 0, up: float = 0) -> Trained:
    """The same round with more traffic: bytes that a method sends beside the models, a mean over the participants.

    >>> import torch
    >>> trained = Trained({}, torch.zeros(1), (10,), count({"w": torch.zeros(1, 5)}, [10]), {})
    >>> add_bytes(trained, down=10).metrics
    {'models_down': 1.5, 'models_up': 1.0, 'bytes_down': 30.0, 'bytes_up': 20.0}
    """
    before = trained.metrics
    model = before["bytes_down"] / before["models_down"]
    bytes_down, bytes_up = before["bytes_down"] + down, before["bytes_up"] + up
    now = {"models_down": bytes_down / model, "models_up": bytes_up / model, "bytes_down": bytes_down}
    return trained._replace(metrics={**before, **now, "bytes_up": bytes_up})


def no_traffic(trained: Trained) -> Trained:
    """The same round without any traffic: the models stay where they are.

    >>> import torch
    >>> no_traffic(Trained({}, torch.zeros(1), (10,), count({"w": torch.zeros(1, 5)}, [10]), {})).metrics["bytes_up"]
    0.0
    """
    return trained._replace(metrics={**trained.metrics, **dict.fromkeys(COLUMNS[:4], 0.0)})
