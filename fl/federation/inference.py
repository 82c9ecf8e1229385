"""Logits of trained models, and the statistics that static batch norms need."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fl.data import Dataset
from fl.data.inputs import Inputs, leaves, map_inputs, split_inputs
from fl.engine import Precision
from fl.engine.precision import arithmetic
from surgery import Stack, State
from surgery.attention import plain_attention
from zoo.norms import StaticBatchNorm2d, collect_statistics

_CHUNK = 500  # samples of one forward pass: enough to keep a GPU busy
# Of one forward pass on the CPU: few enough for feature maps to stay in its cache, which is several times as fast.
_PIXELS = 2**16


@torch.no_grad()
def infer(model: nn.Module, state: State, data: Dataset, samples: Inputs, precision: Precision) -> Tensor:
    """Compute the logits of a state in evaluation mode, for samples of a data set."""
    model.eval()
    state = {name: precision.lay_out(tensor) for name, tensor in state.items()}
    pixels = max(math.prod(values.shape[2:]) for values in leaves(samples))
    chunk = _CHUNK if data.device.type != "cpu" else min(_CHUNK, max(1, _PIXELS // pixels))
    with arithmetic(precision, data.device):
        batches = _batches(data, state, split_inputs(samples, chunk), precision)
        return torch.cat([functional_call(model, state, (x,)) for x in batches])


@torch.no_grad()
def infer_each(model: nn.Module, models: Stack, data: Dataset, samples: Inputs, precision: Precision) -> Tensor:
    """Compute the logits of K states side by side: [K, n, ...] -> [K, n, classes].

    Each state has its own samples. Of text there is one for each token.
    """
    model.eval()
    with arithmetic(precision, data.device), plain_attention:
        x = data.normalise(samples, next(t.dtype for t in models.values() if t.is_floating_point()))
        return vmap(lambda state, x: functional_call(model, state, (x,)), randomness="different")(models, x)


def lacks_statistics(model: nn.Module, state: State) -> bool:
    """Return whether the state lacks the statistics of static batch norms."""
    norms = [name for name, module in model.named_modules() if isinstance(module, StaticBatchNorm2d)]
    return bool(norms) and f"{norms[0]}.running_mean" not in state


@torch.no_grad()
def collect(model: nn.Module, state: State, data: Dataset, index: Tensor, precision: Precision) -> State:
    """Collect the statistics of static batch norms over training samples.

    The samples are indices [N], on the CPU.
    """
    state = {name: precision.lay_out(tensor) for name, tensor in state.items()}
    parts = data.beside(index).tensor_split(math.ceil(len(index) / _CHUNK))
    with arithmetic(precision, data.device):
        return collect_statistics(model, _batches(data, state, map(data.samples_at, parts), precision), state)


def _batches(data: Dataset, state: State, pieces: Iterable[Inputs], precision: Precision) -> Iterator[Inputs]:
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    return (map_inputs(precision.lay_out, data.normalise(piece, dtype)) for piece in pieces)
