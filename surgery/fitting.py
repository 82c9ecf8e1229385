"""Checkpoints of other heads, sizes and prefixes: what fits into a model."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.names import join, outwards

How = Literal["whole", "corner"]
_FEW = 10  # a share smaller than 1 / 10 fits by chance, as the norms of any two networks may
_Pairs = set[tuple[str, str]]  # (name in the state, name in the model)


class Fit(NamedTuple):
    """Tensors that `surgery.load(..., fit=...)` took, cut and left; prints as a table.

    Attributes:
        taken: the names of the model's tensors that were taken whole, each with its name in the state.
        cut: of those that were cut to the corner that both have their name in the state, and the shapes there and here.
        left: the model's tensors that stay as they were, and why.
        unused: the state's tensors that went nowhere, and why.
        prefixes: what was taken off the state's names, and what was put before them.

    >>> print(Fit({"a": "m.a"}, {"b": ("m.b", (5, 2), (3, 2))}, {}, {"m.c": "the model has none"}, ("m", "")))
    1 of 2 tensors taken, 1 cut, 0 left as they were; 1 of the state's not used
    names of the state without 'm.'
      b    [5, 2] in the state, [3, 2] here: [3, 2] taken
      m.c  not used: the model has none
    """

    taken: Mapping[str, str]
    cut: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]]
    left: Mapping[str, str]
    unused: Mapping[str, str]
    prefixes: tuple[str, str]

    def __repr__(self) -> str:
        count = len(self.taken) + len(self.cut) + len(self.left)
        lines = [
            f"{len(self.taken)} of {count} tensors taken, {len(self.cut)} cut, {len(self.left)} left as they were; "
            f"{len(self.unused)} of the state's not used"
        ]
        off, on = self.prefixes
        if off or on:
            ways = [f"without '{off}.'"] * bool(off) + [f"with '{on}.' before them"] * bool(on)
            lines.append(f"names of the state {' and '.join(ways)}")
        rows = [
            (name, f"{list(shape)} in the state, {list(own_shape)} here: {[*map(min, shape, own_shape)]} taken")
            for name, (_, shape, own_shape) in self.cut.items()
        ]
        rows += [(name, f"left: {why}") for name, why in self.left.items()]
        rows += [(name, f"not used: {why}") for name, why in self.unused.items()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([*lines, *(f"  {name:{width}}  {text}" for name, text in rows)])


def find_packed(model: nn.Module) -> dict[str, int]:
    """Return tensors whose rows are several parts (gates, or q, k and v), with counts.

    >>> find_packed(nn.MultiheadAttention(4, 2))
    {'in_proj_weight': 3, 'in_proj_bias': 3}
    """
    counts = {}
    for place, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and (parts := {"LSTM": 4, "GRU": 3}.get(module.mode)):
            counts |= {join(place, name): parts for name, _ in module.named_parameters() if "_hr" not in name}
        elif isinstance(module, nn.MultiheadAttention):
            counts |= {join(place, name): 3 for name, _ in module.named_parameters() if name.startswith("in_proj")}
    return counts


def fit_state(
    own_state: Mapping[str, Tensor],
    ties: Mapping[str, str],
    loaded: Mapping[str, Tensor],
    how: How,
    parts: Mapping[str, int],
) -> Fit:
    """Return what of a state goes into a model; nothing is written.

    Args:
        own_state, loaded: the state of the model, and the state that is loaded, with or without data.
        ties: every name that the model has for a tensor of its state, and the name there.
        how: as `fit` of `surgery.load`.
        parts: as `find_packed` of the model.
    """
    if how not in get_args(How):
        raise SurgeryError(f"unknown fit={how!r}: choose {' or '.join(get_args(How))}", code="argument")
    pairs, prefixes = _align({name: own_state[first] for name, first in ties.items()}, loaded)
    source = {name: origin for origin, name in pairs}
    source |= {name: name for name in ties if name in loaded and name not in source and (name, name) not in pairs}
    taken, cut, left, used = {}, {}, {}, {}
    for name, tensor in own_state.items():
        names = [name, *(alias for alias, first in ties.items() if first == name != alias)]
        source_name = next((source[alias] for alias in names if alias in source), None)
        used |= {source[alias]: f"one tensor with {source_name!r} here" for alias in names if alias in source}
        if source_name is None:
            left[name] = "the state has none of this name"
            continue
        shape, loaded_shape = tuple(tensor.shape), tuple(loaded[source_name].shape)
        why = f"{list(loaded_shape)} in the state, {list(shape)} here"
        if shape == loaded_shape:
            taken[name] = source_name
        elif how == "whole" or len(shape) != len(loaded_shape):
            left[name] = used[source_name] = why
        elif not tensor.is_floating_point() and not tensor.is_complex():
            left[name] = used[source_name] = f"{why}, and a corner of whole numbers (an index, a mask) has no meaning"
        elif name in parts and shape[0] != loaded_shape[0]:
            left[name] = used[source_name] = f"{why}, and a corner would mix the {parts[name]} parts that its rows are"
        else:
            cut[name] = source_name, loaded_shape, shape
    fits = [*taken, *cut]
    if not fits or _FEW * len(fits) < min(len(own_state), len(loaded)):
        raise SurgeryError(
            f"{len(fits)} of the model's {len(own_state)} tensors fit any of the state's {len(loaded)}"
            f"{': ' * bool(fits)}{', '.join(map(repr, fits[:3]))}. It is the state of another model; if these few are "
            "meant, give a state with them alone",
            code="mismatch",
        )
    goes = {*taken.values(), *(origin for origin, _, _ in cut.values())}
    unused = {name: used.get(name, "the model has none of this name") for name in loaded if name not in goes}
    return Fit(taken, cut, left, unused, prefixes)


def _align(own_state: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> tuple[_Pairs, tuple[str, str]]:
    """Return the best pairs of names once prefixes change, and the two prefixes.

    A prefix for another one is taken only where it is one of all names, whole layers agree behind it, and half of the
    smaller of both agrees. Of several ways that agree equally well none is taken, unless one is to leave the names as
    they are.

    >>> t = Tensor([0.0])
    >>> _align({"fc.bias": t}, {"module.fc.bias": t, "module.out.bias": t})
    ({('module.fc.bias', 'fc.bias')}, ('module', ''))
    """
    options: dict[tuple[str, str], _Pairs] = {("", ""): {(name, name) for name in own_state.keys() & loaded.keys()}}
    for off in _common(loaded):
        for name in own_state:
            for on, rest in _splits(name):
                if join(off, rest) in loaded and ("." in rest or not (on and off)):
                    options.setdefault((off, on), set()).add((join(off, rest), name))
    for on in _common(own_state):
        for name in loaded:
            for off, rest in _splits(name):
                if join(on, rest) in own_state and ("." in rest or not (on and off)):
                    options.setdefault((off, on), set()).add((name, join(on, rest)))

    def score(pairs: _Pairs) -> tuple[int, int]:
        shapes = [(loaded[loaded_name].shape, own_state[own_name].shape) for loaded_name, own_name in pairs]
        return sum(a == b for a, b in shapes), sum(len(a) == len(b) for a, b in shapes)

    ranked = sorted(options, key=lambda way: (*(-n for n in score(options[way])), way != ("", ""), len("".join(way))))
    best = ranked[0]
    if 2 * score(options[best])[1] < min(len(own_state), len(loaded)):  # a layer or two that happen to agree
        best = ("", "")
    others = [
        way for way in ranked[1:] if score(options[way]) == score(options[best]) and options[way] != options[best]
    ]
    if others and best != ("", ""):
        ways = " or ".join(f"{off or 'nothing'!r} for {on or 'nothing'!r}" for off, on in (best, *others[:2]))
        raise SurgeryError(
            f"the state's names agree with the model's in several ways, with {ways}: give the part that is meant, with "
            "the names that the model has",
            code="ambiguous",
        )
    return options[best], best


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield (prefix, rest) of a dotted name, the empty prefix last."""
    for prefix in outwards(name.rpartition(".")[0]):
        yield prefix, name[len(prefix) + bool(prefix) :]


def _common(names: Collection[str]) -> list[str]:
    """Return the modules that hold all of some tensors, the root "" last.

    >>> _common(["a.b.c.weight", "a.b.bias"])
    ['a.b', 'a', '']
    """
    first, *_ = names or [""]
    return [p for p in outwards(first.rpartition(".")[0]) if all(n.startswith(p and f"{p}.") for n in names)]
