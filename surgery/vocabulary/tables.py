"""Find a model's tables with a row for each token, and numbers of special tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import hint, join, matches, outwards
from surgery.plain import is_settings
from surgery.plan import Edit
from surgery.rows import count_edits

_TOKENS = re.compile(r"word|tok(en)?(?!_?type)|wte|vocab|shared|lexic", re.IGNORECASE)
_OTHERS = re.compile(r"pos|type|seg|time|wpe", re.IGNORECASE)
_HEADS = re.compile(r"head|decoder|generator|out|pred|logit|vocab|unembed|proj_out|classif", re.IGNORECASE)
_COUNTS = re.compile(r"vocab|num_embeddings|n_?words|n_?tokens?$|ntoken|num_tokens|out_features|num_classes")
_NUMBERS = re.compile(r"(token_ids?|token_index|padding_idx|pad_idx|pad_index)$")
_SUPPRESSED = re.compile(r"suppress_tokens$")
_OWN = vars(nn.Module()).keys()


class Tables(NamedTuple):
    """The tensors of a model that have an axis of tokens.

    Attributes:
        size: how many tokens there are.
        axes: by (module, attribute) which axis that is.
    """

    size: int
    axes: dict[tuple[str, str], int]


def tables_of(model: nn.Module, modules: Sequence[str] | None) -> Tables:
    """Find the embeddings of tokens, the heads over tokens, and their biases."""
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"a vocabulary is that of a module, got a {type(model).__name__}", code="argument")
    if isinstance(modules, str):
        raise SurgeryError(f"modules is a list of names, got {modules!r}", code="argument")
    named = dict(model.named_modules(remove_duplicate=False))
    if modules is not None:
        chosen = [name for name in named if any(name == p or matches(name, p) for p in modules)]
        for pattern in modules:
            if not any(name == pattern or matches(name, pattern) for name in named):
                raise SurgeryError(f"no module {pattern!r}: {hint(pattern, [*named])}", code="name")
        sizes = {t.shape[0] for name in chosen for t in _list_tensors(named[name]) if t.ndim == 2}
        if len(sizes) != 1:
            raise SurgeryError(
                f"{chosen} have {sorted(sizes)} rows: name the embedding and the head, with one row a token",
                code="argument",
            )
        size = sizes.pop()
    else:
        first = _embedding(model, named)
        size = named[first]._parameters["weight"].shape[0]
        chosen = [first, *_others(named, first, size), *_heads(model, named, first, size)]
    axes = {}
    for name in chosen:
        for (module, key), tensor in named_tensors(named[name]):
            if tensor.ndim and tensor.shape[0] == size:
                axes[join(name, module).removesuffix("."), key] = 0
    around = {place for name in chosen for place in outwards(name)}
    for (name, key), tensor in named_tensors(model):  # a bias that is added to what a head gives
        if name in around and key.endswith("bias") and tensor.shape[-1:] == (size,) and tensor.numel() == size:
            axes.setdefault((name, key), tensor.ndim - 1)
    tied = {id(tensor): axes[place] for place, tensor in named_tensors(model) if place in axes}
    axes |= {place: tied[id(tensor)] for place, tensor in named_tensors(model) if id(tensor) in tied}
    return Tables(size, axes)


def _list_tensors(module: nn.Module) -> list[Tensor]:
    return [tensor for _, tensor in named_tensors(module)]


def _by_library(model: nn.Module, method: str) -> nn.Module | None:
    """Return a model's own embedding or head, by its method, as in transformers."""
    for module in model.modules():
        say = getattr(module, method, None)
        if callable(say):
            try:
                return say()
            except (NotImplementedError, AttributeError):
                return None
    return None


def _embedding(model: nn.Module, named: Mapping[str, nn.Module]) -> str:
    """Return the name of the embedding of tokens."""
    answer = _by_library(model, "get_input_embeddings")
    if answer is not None and answer._parameters.get("weight") is not None and answer.weight.ndim == 2:
        return next(name for name, module in named.items() if module is answer)
    every = {
        n: m for n, m in named.items() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and "weight" in m._parameters
    }
    likely = [name for name in every if _TOKENS.search(name.rpartition(".")[2])]
    likely = likely or [name for name in every if not _OTHERS.search(name.rpartition(".")[2])] or list(every)
    if len({every[name].weight.shape[0] for name in likely}) != 1:
        raise SurgeryError(
            f"the embedding of tokens is not known among {likely}: give modules=['embedding', 'head']"
            if likely else f"{type(model).__name__} has no nn.Embedding and so no tokens: name what has rows for them, "
            "modules=['embedding', 'head'], or modules=['head'] for the classes of a classifier",
            code="ambiguous" if likely else "unsupported",
        )  # fmt: skip
    return likely[0]


def _others(named: Mapping[str, nn.Module], first: str, size: int) -> Iterator[str]:
    """Yield other embeddings of the same tokens, such as a decoder's."""
    last = first.rpartition(".")[2]
    for name, module in named.items():
        label = name.rpartition(".")[2]
        table = module._parameters.get("weight") if isinstance(module, nn.Embedding) and name != first else None
        if table is not None and len(table) == size and (label == last or _TOKENS.search(label)):
            yield name


def _heads(model: nn.Module, named: Mapping[str, nn.Module], first: str, size: int) -> list[str]:
    """Return the names of the layers that give one number for each token."""
    answer = _by_library(model, "get_output_embeddings")
    table = named[first].weight
    for name, module in named.items():
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            raise SurgeryError(f"{name!r} divides tokens by their frequency: that is not supported", code="unsupported")
    names = [
        name
        for name, module in named.items()
        if isinstance(module, nn.Linear)
        and module.out_features == size
        and any(t.shape[0] == size for t in _list_tensors(module))
    ]
    if answer is not None or hasattr(model, "get_output_embeddings"):
        return [name for name in named if named[name] is answer]
    tied = [name for name in names if named[name]._parameters.get("weight") is table]
    last = [name for name, module in named.items() if isinstance(module, nn.Linear)][-1:]
    called = [name for name in names if _HEADS.search(name.rpartition(".")[2])]
    heads = tied or [name for name in last if name in names] or called
    if len(heads) > 1 and not tied:
        raise SurgeryError(f"{heads} have {size} outputs: give one, modules={[first, heads[-1]]}", code="ambiguous")
    return heads


def size_edits(model: nn.Module, tables: Tables, new: int) -> list[Edit]:
    """Return edits of the numbers in which modules hold the size of the vocabulary."""
    holders = {module for module, _ in tables.axes}
    near = {place: model.get_submodule(place) for name in holders for place in outwards(name)}
    edits = count_edits(near, _COUNTS, tables.size, new)
    return [e for e in edits if e["module"] in holders or e["attribute"] not in ("out_features", "num_classes")]


def number_edits(model: nn.Module, tables: Tables, numbers: Sequence[int]) -> list[Edit]:
    """Return edits that give tokens new numbers in modules and their configurations.

    SurgeryError for a special token that is not kept.
    """
    new = {old: place for place, old in enumerate(numbers)}
    edits: list[Edit] = []
    seen: set[int] = set()

    def moved(where: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [moved(where, item) for item in value]
        if type(value) is not int or not 0 <= value < tables.size:
            return value
        if value not in new:
            raise SurgeryError(f"{where} is token {value}, which is not among those to keep: add it", code="argument")
        return new[value]

    def look(module: str, path: str, held: Any) -> None:
        for key, value in list(vars(held).items()):
            where = join(path, key)
            if isinstance(held, nn.Module) and key in _OWN:
                continue
            if is_settings(value) and id(value) not in seen:
                seen.add(id(value))
                look(module, where, value)
            elif _SUPPRESSED.search(key) and isinstance(value, list | tuple):
                edits.append({"do": "set", "module": module, "attribute": where,
                              "value": [new[item] for item in value if item in new]})  # fmt: skip
            elif _NUMBERS.search(key) and (after := moved(join(module, where), value)) != _as_list(value):
                if isinstance(held, nn.Embedding) and (module, "weight") not in tables.axes:
                    raise SurgeryError(
                        f"positions count from {join(module, where)} = {value}: keep tokens 0 to {value}",
                        code="argument",
                    )
                edits.append({"do": "set", "module": module, "attribute": where, "value": after})

    for name, module in model.named_modules():
        look(name, "", module)
    return edits


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
