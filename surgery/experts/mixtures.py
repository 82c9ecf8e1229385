"""Mixtures of experts in any module: their experts, and the router over them."""

import re
from typing import NamedTuple

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import hint, is_inside, join, matches, outwards
from surgery.plan import structure
from surgery.states import shapes_of

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_EXPERTS = re.compile(r"expert|moe|mixture")
_ROUTER = re.compile(r"gat(e|ing)|rout|noise|noisy|correction|score|switch|classif|statics|expert", re.IGNORECASE)
_CHOSEN = re.compile(r"^(moe_)?(top_?k|k)$|experts?_per_tok|num_select|activated_experts|active_experts")
_GROUPS = re.compile(r"^(n|num)_(expert_)?groups?$")


class Mixture(NamedTuple):
    """Experts, from which a router chooses some for each token.

    Attributes:
        name: of the module that holds the router and the experts.
        size: how many experts there are.
        lists: names of the modules that hold one child for each expert.
        fused: (module, attribute) of tensors with a first axis of experts.
        router: (module, attribute, axis) of the router's tensors, and the axis that has one position for each expert.
        chosen: how many of them the router chooses for a token; 0 if no attribute says it.
        groups: how many groups the router divides them into, each of consecutive ones (DeepSeek).
    """

    name: str
    size: int
    lists: tuple[str, ...]
    fused: tuple[tuple[str, str], ...]
    router: tuple[tuple[str, str, int], ...]
    chosen: int
    groups: int

    @property
    def axes(self) -> dict[tuple[str, str], int]:
        """The axes of experts of fused and router tensors, by (module, attribute)."""
        return dict.fromkeys(self.fused, 0) | {(module, key): axis for module, key, axis in self.router}


def mixtures(model: nn.Module, *, experts: str | None = None) -> list[Mixture]:
    """Find the mixtures of experts of a model, in the order of registration.

    Experts are the children of a list, or the positions along the first axis of tensors of three axes, in a module that
    is called so ("experts", or a class of this name). Shared experts, which every token passes, are none. The router
    lies beside them: tensors with one position for each expert in a module called gate, router or the like.

    Args:
        experts: a pattern of the names of the modules that hold experts, if they are called otherwise.

    Raises:
        SurgeryError: for a model without a mixture; for experts beside which no router is found, or which differ.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.k = nn.Linear(4, 3), 2
    ...         self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    >>> mixtures(nn.Sequential(nn.Linear(2, 4), Layer()))[0][:3]
    ('1', 3, ('1.experts',))
    """
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"a mixture is looked for in a module, got a {type(model).__name__}", code="argument")
    holders = _holders(model, experts)
    if not holders:
        names = [name for name, _ in model.named_modules()]
        raise SurgeryError(
            f"no experts pattern {experts!r}: {hint(experts, names)}" if experts else
            f"{type(model).__name__} has no experts: none of its modules is called so and is a list, or holds tensors "
            "with an axis of experts; name such modules with experts='*.branches'. A mixture out of dense models has "
            "new routers: make it from its own class, and surgery.load(mixture, states, fit='whole') fills its experts",
            code="name" if experts else "unsupported",
        )  # fmt: skip
    inside: dict[str, list[str]] = {}
    for holder, size in holders.items():
        around = next((name for name in outwards(holder) if _router(model, name, size, holders)), None)
        if around is None:
            raise SurgeryError(
                f"no gate or router with an axis of {size} positions is found beside the experts {holder!r}",
                code="unsupported",
            )
        inside.setdefault(around, []).append(holder)
    return [_mixture(model, name, holder_names, holders) for name, holder_names in inside.items()]


def _holders(model: nn.Module, pattern: str | None) -> dict[str, int]:
    """Return by name of the modules that hold experts how many these are."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        called = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        is_called = matches(name, pattern) if pattern else _EXPERTS.search(called) and "shared" not in name.lower()
        if not is_called or any(is_inside(name, other) and isinstance(model.get_submodule(other), _LISTS)
                                for other in sizes):  # fmt: skip
            continue
        shapes = [tuple(p.shape) for p in module._parameters.values() if p is not None]
        firsts = {shape[0] for shape in shapes if len(shape) == 3}
        if isinstance(module, _LISTS) and len(module) > 1 and (pattern or "expert" in called):
            _check_alike(name, module)
            sizes[name] = len(module)
        elif len(firsts) == 1 and firsts != {1}:
            sizes[name] = firsts.pop()
        elif (
            len(shapes) > 1
            and not firsts
            and "expert" in type(module).__name__.lower()
            and not any(child._parameters for child in module.children())
        ):
            raise SurgeryError(
                f"the experts {name!r} lie as {shapes[0]}: give a list of modules, or tensors [experts, ...]",
                code="unsupported",
            )
    return sizes


def _find_fused(model: nn.Module, holder: str, size: int) -> list[tuple[str, str]]:
    module = model.get_submodule(holder)
    if isinstance(module, _LISTS):
        return []
    return [(holder, key) for key, p in module._parameters.items() if p is not None and p.shape[:1] == (size,)]


def _check_alike(name: str, module: nn.Module) -> None:
    first, *others = module.children()
    for number, other in enumerate(others, 1):
        if shapes_of(other) != shapes_of(first) or structure(other) != structure(first):
            raise SurgeryError(f"expert {number} of {name!r} is not like expert 0, as they must be", code="unsupported")


def _router(model: nn.Module, around: str, size: int, holders: dict[str, int]) -> tuple[tuple[str, str, int], ...]:
    """Return a module's router tensors and their axes of experts, if any is a matrix."""
    inner = model.get_submodule(around)
    lists = [holder for holder in holders if isinstance(model.get_submodule(holder), _LISTS)]
    experts = {place for holder, count in holders.items() for place in _find_fused(model, holder, count)}
    rows, weighs = [], False
    for (module, key), tensor in named_tensors(inner):
        full, path = join(around, module).removesuffix("."), join(module, key)
        is_counter = not module and key in inner._buffers
        if (
            (full, key) in experts
            or "shared" in path.lower()
            or any(is_inside(full, holder) for holder in lists)
            or not (is_counter or _ROUTER.search(path))
            or tensor.ndim > 2
        ):
            continue
        axes = [axis for axis, length in enumerate(tensor.shape) if length == size]
        if key in ("weight", "bias"):
            axes = [axis for axis in axes if axis == 0]
        if not (axes or tensor.is_floating_point() or is_counter or tensor.numel() < 2):
            raise SurgeryError(f"routing by a table, {join(full, key)}, is not supported", code="unsupported")
        if len(axes) > 1:
            raise SurgeryError(
                f"two axes of {join(full, key)} have {size} positions: which is the experts' is not known",
                code="ambiguous",
            )
        if axes:
            rows.append((full, key, axes[0]))
            weighs = weighs or (tensor.ndim == 2 and (key == "weight" or min(tensor.shape) > 1))
    return _without_inner(model, rows, size) if weighs else ()


def _without_inner(model: nn.Module, rows: list[tuple[str, str, int]], size: int) -> tuple[tuple[str, str, int], ...]:
    """Return a router's tensors without inner layers as wide as there are experts."""
    wide = [module for module, key, _ in rows if getattr(model.get_submodule(module), key).shape == (size, size)]
    layers = [*dict.fromkeys(module for module, key, _ in rows if key == "weight")]
    if not wide or len(layers) < 2:
        return tuple(rows)
    around = {module.rpartition(".")[0] for module in layers}
    if len(around) > 1 or not isinstance(model.get_submodule(min(around)), nn.Sequential):
        raise SurgeryError(f"the layers {layers} have {size} outputs: which is the experts'?", code="ambiguous")
    return tuple(row for row in rows if row[0] not in layers[:-1])


def _mixture(model: nn.Module, name: str, names: list[str], holders: dict[str, int]) -> Mixture:
    sizes = {holders[holder] for holder in names}
    if len(sizes) > 1:
        raise SurgeryError(f"{name!r} holds experts of unequal numbers {sorted(sizes)}", code="ambiguous")
    size = sizes.pop()
    router = _router(model, name, size, holders)
    lists = tuple(holder for holder in names if isinstance(model.get_submodule(holder), _LISTS))
    fused = tuple(place for holder in names for place in _find_fused(model, holder, size))
    places = [place for module in (*(module for module, *_ in router), *names) for place in outwards(module)]
    near = {model.get_submodule(place): None for place in (*places, name) if is_inside(place, name)}
    greedy = any(getattr(module, "topk_method", "") == "greedy" for module in near)
    groups = 1 if greedy else _number(near, _GROUPS)
    return Mixture(name, size, lists, fused, router, _number(near, _CHOSEN), max(1, groups))


def _number(modules: dict[nn.Module, None], names: re.Pattern) -> int:
    """Return the first integer attribute of modules with such a name; 0 without one."""
    held = (value for module in modules for key, value in vars(module).items() if names.search(key))
    return next((value for value in held if type(value) is int), 0)


def experts_of(model: nn.Module, mixture: Mixture) -> list[list[Tensor]]:
    """Return the tensors of each expert."""
    result: list[list[Tensor]] = [[] for _ in range(mixture.size)]
    for holder in mixture.lists:
        for expert, child in zip(result, model.get_submodule(holder).children()):
            expert += [tensor for _, tensor in named_tensors(child) if tensor.is_floating_point()]
    for module, key in mixture.fused:
        for expert, part in zip(result, getattr(model.get_submodule(module), key)):
            expert.append(part)
    return result
