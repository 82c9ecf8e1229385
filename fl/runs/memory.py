"""Whether a run fits into the CPU's memory, asked before that is taken. A GPU says itself that it is full."""

from collections.abc import Sequence

from fl.base.memory import ask
from fl.engine.work import activation_bytes
from fl.federation import Federation
from fl.models.create import weight_bytes
from zoo import Spec


def check_models(specs: Sequence[Spec], participants: int) -> None:
    """Raise FLError if the models of a round do not fit, each as small as the smallest: the initial one, the server's,
    those that clients send, and the weights, gradients and momentum of a client that trains.

    Models of timm and torchvision, which come in one size, are not looked at.
    """
    needed = (participants + 5) * min(map(weight_bytes, specs))
    what = f"a round of {participants:,} clients"
    ask(needed, what, "use fewer --participants, or a smaller --width or --depth")


def check_batch(fed: Federation) -> None:
    """Raise FLError if what a client's step keeps of one batch does not fit, even if half of it can be freed early."""
    if fed.data.x.device.type != "cpu":
        return
    models = [kind.model for kind in fed.fleet.architectures] if fed.fleet else [fed.model]
    size = fed.local.size_of_batches(fed.clients.train)
    kept = size * min(activation_bytes(model, fed.data) for model in models) // 2
    ask(kept, f"a batch of {size:,} samples", "use a smaller --batch-size, --width or --pad")
