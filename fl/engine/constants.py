"""Frozen parameters, once for all clients: in the model, and in no state.

A state is what a client trains, keeps and sends, so that K clients on a frozen base take the memory of the base and of
K times what they train.
"""

import hashlib
from collections.abc import Collection

from torch import Tensor, nn

from surgery.transfer import as_bytes

_CONSTANTS = "constants"  # the attribute of a module that has their names


def as_constants(model: nn.Module, but: Collection[int] = ()) -> nn.Module:
    """Make a model's frozen parameters constants, in place: buffers in no state.

    Args:
        but: ids of parameters that stay frozen parameters, which states have.

    >>> net = nn.Linear(2, 1)
    >>> net.weight.requires_grad = False
    >>> list(as_constants(net).state_dict()), [*constants(net).values()][0].shape
    (['bias'], torch.Size([1, 2]))
    """
    detached: dict[int, Tensor] = {}
    for module in model.modules():
        frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
        names = [name for name, parameter in frozen.items() if id(parameter) not in but]
        for name in names:
            parameter = module._parameters.pop(name)
            module.register_buffer(name, detached.setdefault(id(parameter), parameter.detach()), persistent=False)
        if names:
            setattr(module, _CONSTANTS, names)
    return model


def constants(model: nn.Module) -> dict[int, Tensor]:
    """Return the constants of a model by their ids, as copy.deepcopy's memo."""
    tensors = (getattr(module, name) for module in model.modules() for name in vars(module).get(_CONSTANTS, ()))
    return {id(tensor): tensor for tensor in tensors}


def digest(model: nn.Module) -> str | None:
    """SHA-256 of the constants of a model; None if it has none."""
    if not (tensors := constants(model)):
        return None
    total = hashlib.sha256()
    for tensor in tensors.values():
        total.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        total.update(as_bytes(tensor.cpu()).numpy().data)
    return total.hexdigest()


def as_parameters(model: nn.Module) -> nn.Module:
    """Make the constants of a model frozen parameters again, in place.

    >>> net = nn.Linear(2, 1).requires_grad_(False)
    >>> [*as_parameters(as_constants(net)).state_dict()]
    ['weight', 'bias']
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name in vars(module).pop(_CONSTANTS, ()):
            tensor = module._buffers.pop(name)
            module._non_persistent_buffers_set.discard(name)
            if id(tensor) not in parameters:
                parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=False)
            module.register_parameter(name, parameters[id(tensor)])
    return model
