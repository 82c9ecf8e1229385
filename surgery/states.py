"""The algebra of states and stacks.

A *state* maps state-dict names to tensors, both parameters and buffers. Each tensor appears once: of tied names only
the first is kept. A *stack* is the same with a leading axis K, one entry for each model. No function here changes its
input, except `load`.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surgery.errors import SurgeryError
from surgery.fitting import Fit, How, find_packed, fit_state
from surgery.lazy import LazyState, metas
from surgery.names import join, named_modules

State: TypeAlias = dict[str, Tensor]
Stack: TypeAlias = dict[str, Tensor]
Models: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor] | nn.Module]  # a stack, or what makes one


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    """Yield (name, module, its own tensors by state name) in registration order.

    Each tensor appears once: with the first module that has it as a parameter, or if none has, as a buffer.
    Non-persistent buffers are left out, as in state dicts.
    """
    modules = dict(named_modules(model))
    parameters = {id(p) for module in modules.values() for p in module._parameters.values()}
    seen: set[int] = set()
    for module_name, module in modules.items():
        buffers = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        own_tensors = {}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            tied_buffer = name in buffers and id(tensor) in parameters
            if tensor is not None and id(tensor) not in seen and not tied_buffer:
                seen.add(id(tensor))
                own_tensors[join(module_name, name)] = tensor
        if own_tensors:
            yield module_name, module, own_tensors


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state themselves, not detached, by state name."""
    return {name: tensor for _, _, own_tensors in owners(model) for name, tensor in own_tensors.items()}


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the state name of each tensor of a model's state, by the tensor's id."""
    return {id(tensor): name for name, tensor in tensors(model).items()}


def ties(model: nn.Module) -> dict[str, str]:
    """Return for every name of a tensor the name that it has in the state."""
    names = names_by_id(model)
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: names[id(tensor)] for name, tensor in every if id(tensor) in names}


def state(model: nn.Module) -> State:
    """Return the state of a model: detached tensors by name that share its memory.

    Modules come in registration order, within a module parameters before buffers. A tied tensor appears once,
    under its first name as a parameter; non-persistent buffers are left out. `load` is the inverse.

    Raises SurgeryError for a model with weights outside of parameters and buffers (as quantised ones have), or with
    weights that do not exist yet (lazy modules).

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> list(state(net))[:3], state(net)["0.weight"].shape
    (['0.weight', '0.bias', '1.weight'], torch.Size([3, 2]))
    """
    if not isinstance(model, nn.Module):
        hint = "a state dict is a state already: give it as it is" if isinstance(model, Mapping) else "give one module"
        raise SurgeryError(f"state takes a module, not a {type(model).__name__}: {hint}", code="argument")
    registered = set()
    for name, module in named_modules(model, tied=True):
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if is_lazy(tensor):
                raise SurgeryError(f"module {name!r} is lazy: run one forward pass first", code="unsupported")
            registered.add(join(name, attribute))
    if lost := [key for key in model.state_dict(keep_vars=True) if key not in registered]:
        raise SurgeryError(
            f"{lost[0]!r} of the state dict is neither a parameter nor a buffer (extra state, quantised weights), so "
            "it would be lost: convert the model to plain modules first",
            code="unsupported",
        )
    return {name: tensor.detach() for name, tensor in tensors(model).items()}


def as_state(values: Mapping[str, Tensor] | nn.Module, label: str = "a state") -> Mapping[str, Tensor]:
    """Return a state or a module's state; errors for other values name `label`.

    >>> list(as_state(nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    if isinstance(values, nn.Module):
        return state(values)
    if not isinstance(values, Mapping):
        raise SurgeryError(
            f"{label} must be a module or a mapping from names to tensors, as surgery.state(model) gives it, not a "
            f"{type(values).__name__}"
            + ("; take one, or surgery.stack of all" if isinstance(values, list | tuple) else "")
            + ("; optimizers follow by surgery.optimizers.follow" if hasattr(values, "param_groups") else ""),
            code="argument",
        )
    if odd := [name for name, tensor in values.items() if not isinstance(tensor, Tensor) or not isinstance(name, str)]:
        kind = type(values[odd[0]]).__name__
        raise SurgeryError(
            f"{odd[0]!r} of {label} is a {kind}: give tensors by name (of a checkpoint, the part that holds them)",
            code="argument",
        )
    for name, tensor in values.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            kind = f"{tensor.layout}, {tensor.dtype}: give plain tensors (to_dense and dequantize make them)"
            raise SurgeryError(f"{name!r} of {label} is {kind}", code="unsupported")
    return values


def as_stack(models: Models) -> Mapping[str, Tensor]:
    """Return a stack, given so or as a list; SurgeryError for anything else.

    >>> as_stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
    torch.Size([2, 2])
    """
    if isinstance(models, Sequence):
        return stack(models)
    if isinstance(models, nn.Module):
        raise SurgeryError(f"one {type(models).__name__} is no stack: give a list, or its stack", code="argument")
    return as_state(models, "a stack")


@overload
def load(model: nn.Module, values: Mapping[str, Tensor] | nn.Module, *, fit: None = None) -> nn.Module: ...
@overload
def load(model: nn.Module, values: Mapping[str, Tensor] | nn.Module, *, fit: How) -> tuple[nn.Module, Fit]: ...
def load(model, values, *, fit=None):
    """Copy a state, or another module's, into `model` in place, and return the model.

    Tied tensors are set through one of their names.

    Args:
        model: any module with data.
        values: a state, or a module.
        fit: None takes all tensors or none: names and shapes have to be the same. For a checkpoint of another head, of
            other sizes or with a prefix (`module.`, `backbone.`) before its names: `whole` takes what has the model's
            names and shapes, and leaves the rest of the model as it is. `corner` also takes, of floating-point tensors
            of another size, the positions that both have: the first ones along every axis. A prefix is taken off or put
            on if one makes more names and shapes agree than any other does.

    Returns:
        The model; with `fit`, the model and a `surgery.fitting.Fit`, which prints as a table of what was taken, cut and
        left.

    Raises SurgeryError if a name is missing or unknown, or if a shape differs, unless `fit` is given; with `fit`,
    if less than a tenth of the tensors fits (of the model's or of the state's, whichever are fewer), or if several
    prefixes fit equally well. In both cases, if floating-point numbers would go into an integer tensor, or if one side
    has no data (meta device).

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> torch.equal(load(b, state(a)).weight, a.weight)
    True
    >>> larger, fit = load(nn.Linear(2, 3), nn.Sequential(a), fit="corner")
    >>> torch.equal(larger.weight[:2], a.weight)
    True
    >>> fit
    0 of 2 tensors taken, 2 cut, 0 left as they were; 0 of the state's not used
    names of the state without '0.'
      weight  [2, 2] in the state, [3, 2] here: [2, 2] taken
      bias    [2] in the state, [3] here: [2] taken
    """
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"load takes a module first, not a {type(model).__name__}", code="argument")
    own_state, values = state(model), as_state(values, "what is loaded")
    is_lazy_state = isinstance(values, LazyState)
    known = metas(values) if is_lazy_state else values
    if fit is None:
        check_same(own_state, known, "the model", "the given state")
        report, sources = None, {name: name for name in own_state}
    else:
        report = fit_state(own_state, ties(model), known, fit, find_packed(model))
        sources = {**report.taken, **{name: origin for name, (origin, _, _) in report.cut.items()}}
    for name, source in sources.items():
        if own_state[name].is_meta or (known[source].is_meta and not is_lazy_state):
            raise SurgeryError(f"tensor {name!r} has no data: call model.to_empty(device=...) first", code="values")
        if not torch.can_cast(known[source].dtype, own_state[name].dtype):
            raise SurgeryError(
                f"tensor {name!r} is {own_state[name].dtype} in the model, {known[source].dtype} in the state",
                code="mismatch",
            )
    if not is_lazy_state:  # a lazy state is read one tensor at a time
        # Views of the model's own memory, of layers that change places say, are read before any of it is written.
        memory = {_memory(tensor) for tensor in own_state.values()}
        values = {n: t.clone() if _memory(t) in memory else t for n, t in values.items()}
    with torch.no_grad():
        for name, source in sources.items():
            target, value = own_state[name], values[source]
            if target.shape != value.shape:
                both = tuple(slice(size) for size in map(min, target.shape, value.shape))
                target, value = target[both], value[both]
            target.copy_(value)
    return model if report is None else (model, report)


def _memory(tensor: Tensor) -> int | None:
    """Return where a tensor's numbers lie; None for a wrapper such as a DTensor."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def stack(states: Sequence[Mapping[str, Tensor] | nn.Module]) -> Stack:
    """Stack K states or modules of one architecture: shapes S become [K, *S].

    `unstack` is the inverse.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"]
    tensor([[0., 0.],
            [1., 1.]])
    """
    if not isinstance(states, list | tuple):
        raise SurgeryError(f"stack takes a list of states or modules, not a {type(states).__name__}", code="argument")
    if not states:
        raise SurgeryError("cannot stack zero states: give at least one", code="argument")
    mappings = [as_state(values, f"state {k}") for k, values in enumerate(states)]
    for k, other in enumerate(mappings[1:], 1):
        check_same(mappings[0], other, "state 0", f"state {k}")
        for name, tensor in mappings[0].items():
            if tensor.device != other[name].device:
                raise SurgeryError(
                    f"tensor {name!r} is on {tensor.device} in state 0, {other[name].device} in state {k}: move one",
                    code="mismatch",
                )
    return {name: torch.stack([s[name] for s in mappings]) for name in mappings[0]}


def unstack(models: Mapping[str, Tensor]) -> list[State]:
    """Split a stack into its K states, as views. The inverse of `stack`.

    >>> [s["w"].tolist() for s in unstack({"w": torch.tensor([[0.0], [1.0]])})]
    [[0.0], [1.0]]
    """
    return [{name: tensor[k] for name, tensor in models.items()} for k in range(stack_size(models))]


def broadcast(values: Mapping[str, Tensor], k: int) -> Stack:
    """Return a read-only stack of k views of `values`, which takes no memory.

    >>> broadcast({"w": torch.ones(2)}, 3)["w"].shape
    torch.Size([3, 2])
    """
    if not isinstance(k, Integral) or k < 1:
        raise SurgeryError(f"a stack holds at least one model, got k={repr(k)[:40]}", code="argument")
    return {name: tensor.expand(k, *tensor.shape) for name, tensor in as_state(values).items()}


def stack_size(models: Mapping[str, Tensor]) -> int:
    """Return K, the number of models in a stack; SurgeryError if it is none.

    >>> stack_size({"w": torch.zeros(5, 2)})
    5
    """
    if not isinstance(models, Mapping):
        raise SurgeryError(f"a {type(models).__name__} is no stack: surgery.stack makes one of models", code="argument")
    models = as_state(models, "a stack")
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in models.values()}
    if len(sizes) != 1 or None in sizes:
        shapes = {name: tuple(tensor.shape) for name, tensor in list(models.items())[:4]}
        raise SurgeryError(f"no stack of one length K: {shapes}; surgery.stack makes one", code="argument")
    if sizes == {0}:
        raise SurgeryError("the stack holds no model (K = 0)", code="argument")
    return sizes.pop()


def distance(a: Models, b: Models) -> Tensor:
    """Return euclidean distances between models of two stacks over all float tensors.

    Args:
        a, b: stacks (or lists) of K and of M models of one architecture.

    Returns:
        [K, M], where entry (k, m) is ||a_k - b_m||.

    >>> distance({"w": torch.zeros(1, 2)}, {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]])})
    tensor([[5., 0.]])
    """
    # Differences, not the |a|^2 - 2ab + |b|^2 expansion, which loses all digits for models that are close together.
    return sum(
        torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() for x, y in _flat_pairs(a, b)
    ).sqrt()


def cosine(a: Models, b: Models | None = None) -> Tensor:
    """Return cosine similarities between the models of two stacks, or of one.

    It is over all floating-point tensors together.

    Returns:
        [K, M] in [-1, 1]. The similarity with a model that is zero everywhere is 0.

    >>> cosine({"w": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}).round(decimals=3)
    tensor([[1.0000, 0.7070],
            [0.7070, 1.0000]])
    """
    pairs = list(_flat_pairs(a, a if b is None else b))
    left, norm_a = _scale([x for x, _ in pairs])
    right, norm_b = (left, norm_a) if b is None else _scale([y for _, y in pairs])
    dot = sum(x @ y.T for x, y in zip(left, right))
    scale = norm_a[:, None] * norm_b[None, :]
    return torch.where(scale == 0, torch.zeros_like(scale), dot / scale).clamp(-1, 1)


def _scale(flat: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Scale models to a largest entry of 1: squares neither overflow nor underflow.

    Returns:
        The scaled tensors [K, n], and the norm of each model over all of them [K].
    """
    top = torch.stack([x.abs().amax(1) for x in flat]).amax(0)
    top = torch.where(top == 0, 1, top)[:, None]
    scaled = [x / top for x in flat]
    return scaled, sum(x.square().sum(1) for x in scaled).sqrt()


def _flat_pairs(a: Models, b: Models) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs ([K, n], [M, n]) of the floating-point tensors of two stacks."""
    a, b = as_stack(a), as_stack(b)
    k, m = stack_size(a), stack_size(b)
    check_same({n: t[0] for n, t in a.items()}, {n: t[0] for n, t in b.items()}, "the first stack", "the second")
    names = [name for name, tensor in a.items() if tensor.is_floating_point() and tensor[0].numel()]
    if odd := [
        name for name in a if a[name].is_complex() or a[name].is_floating_point() != b[name].is_floating_point()
    ]:
        raise SurgeryError(f"{odd[0]!r} is {a[odd[0]].dtype} and {b[odd[0]].dtype}: not real", code="unsupported")
    if not names:
        raise SurgeryError("the stacks hold no floating-point tensor to compare", code="unsupported")
    dtype = max((compute_dtype(s[name].dtype) for s in (a, b) for name in names), key=lambda d: d.itemsize)
    for name in names:
        yield a[name].reshape(k, -1).to(dtype), b[name].reshape(m, -1).to(dtype)


def shapes_of(values: Mapping[str, Tensor] | nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a state, or of a model's, by name."""
    values = state(values) if isinstance(values, nn.Module) else values
    return {name: tuple(tensor.shape) for name, tensor in values.items()}


def check_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor], name_a: str, name_b: str) -> None:
    """Raise SurgeryError with the first difference unless names and shapes agree.

    >>> check_same({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "a", "b")
    Traceback (most recent call last):
    surgery.errors.SurgeryError: tensor 'w' has shape (2,) in a and (3,) in b: the architectures differ \
(average takes plans, load takes fit)
    """
    a, b = as_state(a, name_a), as_state(b, name_b)
    check_same_shapes(shapes_of(a), shapes_of(b), name_a, name_b)


def check_same_shapes(
    a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]], name_a: str, name_b: str
) -> None:
    """Do as `check_same`, for shapes by name."""
    if missing := [name for name in a if name not in b]:
        raise SurgeryError(
            f"tensor {missing[0]!r} of {name_a} is missing in {name_b} ({len(missing)} missing)", code="mismatch"
        )
    if extra := [name for name in b if name not in a]:
        raise SurgeryError(
            f"tensor {extra[0]!r} of {name_b} is unknown to {name_a} ({len(extra)} unknown); "
            "take states with surgery.state(model), which names tied tensors once",
            code="mismatch",
        )
    for name, shape in a.items():
        if shape != b[name]:
            raise SurgeryError(
                f"tensor {name!r} has shape {shape} in {name_a} and {b[name]} in {name_b}: the architectures differ "
                "(average takes plans, load takes fit)",
                code="mismatch",
            )


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as real pairs along a last axis; a real one unchanged.

    >>> as_real(torch.tensor([1 + 2j])).tolist(), as_real(torch.tensor([3])).tolist()
    ([[1.0, 2.0]], [3])
    """
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_pruning_mask(name: str, names: Container[str]) -> bool:
    """Return whether this is torch.nn.utils.prune's mask of another tensor of a state.

    >>> is_pruning_mask("fc.weight_mask", {"fc.weight_orig", "fc.weight_mask"}), is_pruning_mask("mask", {"mask"})
    (True, False)
    """
    return name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in names


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to accumulate in: at least float32 (or complex64).

    >>> compute_dtype(torch.bfloat16)
    torch.float32
    """
    if dtype.is_complex:
        return torch.complex64 if dtype is torch.complex32 else dtype
    return torch.float64 if dtype is torch.float64 else torch.float32
