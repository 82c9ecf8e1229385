"""Conditions of a choice of backend: device, versions, model, shapes and code."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fl.base.torch_private import tree_map
from fl.data.inputs import map_inputs
from fl.engine.job import Group
from fl.engine.trial import Backend, closure
from surgery import Stack


def name_device(device: torch.device) -> str:
    """Return the name of a device, and the versions of its libraries."""
    name, versions = device.type, [f"torch {torch.__version__}"]
    with suppress(RuntimeError, AssertionError):
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
            versions += [platform, f"cuDNN {torch.backends.cudnn.version()}"]
    return f"{name} ({', '.join(versions)})"


def describe(groups: Sequence[Group], candidates: Mapping[str, Backend]) -> str:
    """Return the models' classes, and a digest of what a trial depends on.

    The digest leaves out the device. It rounds the number of clients up to a power of two, and the ratio of the mean to
    the largest number of steps down to a quarter.
    """
    steps = [n for job, _, _ in groups for n in job.batches.steps]
    clients, equality = 1 << (len(steps) - 1).bit_length(), 4 * sum(steps) // (len(steps) * max(steps))
    computations = sorted({_describe_step(group) for group in groups})
    content = json.dumps(
        [_digest_code(), _environment(), sorted(candidates), clients, equality, len(computations), computations]
    )
    names = " and ".join(sorted({type(job.model).__name__ for job, _, _ in groups}))
    return f"{names} {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _describe_step(group: Group) -> str:
    """Describe what a step computes, without the weights and the learning rate."""
    job, starts, context = group
    per_sample = {} if job.per_sample is None else {"": job.per_sample}
    shapes = _shapes([context, per_sample])
    inputs = map_inputs(lambda t: str((tuple(t.shape[1:]), t.dtype)), job.data.x)
    step = job.batches.size, job.batches.augment, job.optimizer._replace(lr=0.0), job.precision, job.trainable()
    functions = (
        type(job.optimizer).__name__,
        _describe_function(job.objective, set()),
        _describe_function(job.ascent, set()),
    )
    return str((_describe_model(job.model, starts), shapes, inputs, step, functions))


_MODEL_DIGESTS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def _describe_model(model: nn.Module, starts: Stack) -> str:
    """Return a digest of a model's layers, code and shapes, once for each model."""
    if model not in _MODEL_DIGESTS:
        code = [type(module).forward.__code__.co_code for module in model.modules() if _has_code(type(module))]
        text = re.sub(r" at 0x[0-9a-f]+", "", str((model, code, _shapes(starts))))
        _MODEL_DIGESTS[model] = hashlib.sha256(text.encode()).hexdigest()
    return _MODEL_DIGESTS[model]


def _shapes(stacks: Any) -> Any:
    return tree_map(lambda t: (tuple(t.shape[1:]), t.dtype), stacks)


def _has_code(kind: type) -> bool:
    return isinstance(getattr(kind, "forward", None), FunctionType)


def _describe_function(value: Any, seen: set[int]) -> Any:
    """Return the name and the code of a function, or the type of another value.

    The functions in its closure are included.
    """
    if not isinstance(value, FunctionType) or id(value) in seen:
        return type(value).__qualname__
    seen.add(id(value))
    inner = [_describe_function(function, seen) for function in closure(value) if isinstance(function, FunctionType)]
    return value.__module__, value.__qualname__, value.__code__.co_code, inner


@cache
def _digest_code() -> str:
    """Return a digest of the engine's files: the version does not tell their changes."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SWITCHES = ("CUDA_", "CUBLAS", "CUDNN_", "PYTORCH_", "NVIDIA_TF32")


def _environment() -> list[str]:
    """Return the driver's version, and the environment that changes kernels or memory."""
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_SWITCHES) and name != "CUDA_VISIBLE_DEVICES"
    ]
    with suppress(OSError):
        settings.append(Path("/proc/driver/nvidia/version").read_text())
    return settings
