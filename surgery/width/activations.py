"""How large the numbers are that layers read along each width."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import InternalError, SurgeryError, first_line
from surgery.forward import call, copied, in_mode, tensors_in, watching
from surgery.torch_private import TorchDispatchMode
from surgery.width.rules.registry import operation_name, rule_for
from surgery.width.scores import onto_atoms
from surgery.width.solved import SUMS, Atom, Solution, solve
from surgery.width.trace import Trace


def read_activations(
    model: nn.Module, example: Any, batches: list[Any], output: Callable[[Any], Any] | None
) -> tuple[Solution, dict[Atom, Tensor]]:
    """The mean of |x| over batches and all other axes, x being what matrix products (attention's too) and convolutions
    read.

    A copy of the model runs where the model is, once to trace it and once for each batch.
    """
    try:
        twin = clone(model)
        with unfused():
            solution = solve(Trace(clone(model), copied(example), output=output))
    except (SurgeryError, InternalError):
        raise
    except Exception as error:
        raise SurgeryError(f"{type(model).__name__} does not run on the example: {first_line(error)}") from error
    scores: dict[Atom, Tensor] = {}
    for number, batch in enumerate(batches):
        try:
            reads = _Reads(solution, scores, 1 / len(batches))
            with unfused(), in_mode(twin, training=False), watching(twin), reads:
                call(twin, copied(batch))
        except SurgeryError:
            raise
        except Exception as error:
            raise SurgeryError(
                f"{type(model).__name__} does not run on batches[{number}]: {first_line(error)}; by='activation' takes "
                "batches of inputs, without labels"
            ) from error
    return solution, scores


@contextmanager
def unfused() -> Iterator[None]:
    """Recurrent layers run operation by operation, so that what they read is seen."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


class _Reads(TorchDispatchMode):
    def __init__(self, solution: Solution, scores: dict[Atom, Tensor], weight: float):
        super().__init__()
        self.solution, self.scores, self.weight, self.done = solution, scores, weight, 0
        self.held: list[bool] = []  # by step whether it computes something of the model's tensors alone

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if not ((rule := rule_for(func)) and rule.layout):
            name = operation_name(func)
            steps, here = self.solution.steps, self.done
            if here >= len(steps) or steps[here].name != name:
                raise SurgeryError(f"the model computes something else on a batch than on the example: {name}")
            if name in SUMS or name == "scaled_dot_product_attention":
                for tensor, axes, source in zip(given, steps[here].inputs, steps[here].sources):
                    if not self._is_held(source):
                        self._add(tensor, axes)
            self.held.append(all(map(self._is_held, steps[here].sources)))
            self.done += 1
        return func(*args, **kwargs)

    def _is_held(self, source: Any) -> bool:
        """Whether this is a tensor of the model, or computed of such tensors alone."""
        return source is not None and (isinstance(source[0], str) or self.held[source[0]])

    def _add(self, tensor: Tensor, axes) -> None:
        size = tensor.abs().float()
        for position, axis in enumerate(axes):
            mean = size.movedim(position, 0).flatten(1).mean(1).cpu().double()
            if len(mean) == axis.size:  # a batch may have another number of samples or tokens than the example
                for atom, part in onto_atoms(axis, mean).items():
                    if not atom.why:
                        self.scores[atom] = self.scores.get(atom, 0) + self.weight * part
