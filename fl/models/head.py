"""The classifier of a user's model: the layer whose output is the logits."""

import torch
from torch import Tensor, nn

from fl.models.own import OwnSpec


def classifier(spec: OwnSpec) -> frozenset[str]:
    """The tensors of the layer whose output the model returns as it is; none if it computes further with the logits.

    Args:
        spec: of the user's model at full size.

    >>> from fl.data import load
    >>> from fl.models.own import describe
    >>> sorted(classifier(describe("given", lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))))
    ['1.bias', '1.weight']
    """
    model, outputs = spec.full(), {}
    leaves = {name: module for name, module in model.named_modules() if not [*module.children()]}
    hooks = [module.register_forward_hook(_noting(name, outputs)) for name, module in leaves.items()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        logits = model.train()(spec.example(2))
    for hook in hooks:
        hook.remove()
    for name, output in outputs.items():
        if output is logits:
            return frozenset(f"{name}.{key}" if name else key for key in leaves[name].state_dict())
    return frozenset()


def _noting(name: str, outputs: dict[str, Tensor]):
    def note(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        outputs[name] = output

    return note
