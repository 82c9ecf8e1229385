"""A merge planned tensor by tensor: which tensors of which models become each one of the result, and its settings."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

import surgery
from surgery import lazy
from surgery.adapters import fold
from surgery.configuration import first_difference, made_from
from surgery.errors import SurgeryError, first_line
from surgery.files import Checkpoint, open_state
from surgery.lazy import LazyState, Pieces
from surgery.mergekit.card import card
from surgery.mergekit.config import Config, Slice, Source, parts_of
from surgery.mergekit.methods import METHODS
from surgery.mergekit.vocabulary import TOKENIZER_FILES, Vocabulary, templates
from surgery.operations.checkpoint import example_for

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Merged:
    """What a merge makes.

    Attributes:
        values: the tensors, which are computed when they are read.
        donor: the checkpoint whose other files a folder gets, too.
        config: what its config.json holds, or None.
        beside: what its other files hold by name; None for those that are left out.
    """

    values: LazyState
    donor: Checkpoint
    config: dict[str, Any] | None
    beside: Mapping[str, bytes | None]


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the result: its name, where it comes from in each model, and how far along the layers it lies."""

    name: str
    slice: Slice
    names: Mapping[str, str]
    t: float


def merge_folders(config: Config) -> Merged:
    """The merge that a configuration describes; models are opened, and nothing is read of their tensors.

    What is outside of the layers has the parameters of the first slice if the model runs it before its layers, those of
    the last slice otherwise, both at the beginning of gradients. Configuration and tokenizer are the base model's, or
    the first one's.

    Raises:
        SurgeryError: for models that are not there, whose tensors differ in name or shape, or that have no such layers;
            and if the class that config.json names would make other tensors than the result has.
    """
    opened = {path: _open(path) for path in config.models}
    donor = opened[config.models[0]]
    described = _described(donor)
    vocabulary = None
    if config.tokenizer is not None:
        vocabulary = Vocabulary(config, opened, _built(donor, described, "tokenizer_source"))
    counts = {path: _lists(one, _described(one)) for path, one in opened.items()}
    whole = config.slices[0].sources[0].layers is None
    plan = [*(_by_models(config, donor, counts) if whole else _by_slices(config, opened, counts))]
    _tell_unmatched(config, [name for one in plan for name in (one.name, *one.names.values())])
    entries = {one.name: _pieces(config, one, opened, vocabulary) for one in plan}
    values = LazyState(entries, "the result")
    if config.out_dtype is not None:
        values = lazy.cast(values, config.out_dtype)
    changed = None
    if described is not None:
        changed = _rewritten(config, described, opened, counts, vocabulary)
        if vocabulary is not None or not whole:  # otherwise the result has the donor's tensors, as it has its sizes
            _check(changed, donor, values)
    beside: dict[str, bytes | None] = {"README.md": card(config).encode()}
    if vocabulary is not None:
        beside |= dict.fromkeys(TOKENIZER_FILES) | vocabulary.files()
    if config.chat_template is not None:
        beside |= templates(config, opened, beside)
    return Merged(values, donor, changed, beside)


def _tell_unmatched(config: Config, names: Sequence[str]) -> None:
    """Log the filters that no tensor has in its name: mergekit passes over them, too."""
    every = "\n".join(names)
    levels = [config.parameters, *(one.parameters for one in config.slices)]
    levels += [source.parameters for one in config.slices for source in one.sources]
    filters = dict.fromkeys(
        (key, entry.get("filter"))
        for level in levels
        for key, setting in level.items()
        for entry in (setting if isinstance(setting, list) else ())
        if isinstance(entry, dict)
    )
    for key, text in filters:
        if text not in (None, "*") and text not in every:
            _log.warning("%s: the filter %r is a part of no tensor's name, so it says nothing", key, text)


def _open(path: str) -> Checkpoint:
    model, adapter = parts_of(path)
    for one in filter(None, (model, adapter)):
        if not Path(one).exists():
            raise SurgeryError(f"model: there is no file or folder {one!r}: fetch it first, `hf download {one}`")
    base = open_state(model)
    if adapter is None:
        return base
    folded = fold(base, adapter)
    return Checkpoint({name: folded.pieces(name) for name in folded}, base.path, base.metadata, base.files)


def _described(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What config.json says; None if there is none."""
    found = checkpoint.config
    if not isinstance(found, dict | None):
        raise SurgeryError(f"config.json of {checkpoint.path} is no configuration: fetch it again")
    return found


_COUNT = re.compile(r"(num|n)_?(hidden)?_?(layers?|blocks)|depth")


def _lists(checkpoint: Checkpoint, described: Mapping[str, Any] | None) -> dict[str, int]:
    """The lists of layers that the names of tensors show: the name before a layer's number, and how many there are.

    A layer has several tensors. Where config.json tells how many layers there are, lists of other lengths are none.
    """
    found: dict[str, dict[int, int]] = {}
    for name in checkpoint:
        if match := re.match(r"((?:[^.\d][^.]*\.)*)(\d+)\.", name):
            layers = found.setdefault(match[1], {})
            layers[int(match[2])] = layers.get(int(match[2]), 0) + 1
    told = {value for _, key, value in _leaves(dict(described or {})) if type(value) is int and _COUNT.search(key)}
    return {
        prefix: len(layers)
        for prefix, layers in found.items()
        if sorted(layers) == [*range(len(layers))] and min(layers.values()) > 1 and (not told or len(layers) in told)
    }


def _leaves(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(the dict that holds it, key, value) of everything in a configuration that is no dict."""
    for key, value in found.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield found, key, value


def _by_models(config: Config, donor: Checkpoint, counts: Mapping[str, Mapping[str, int]]) -> Iterator[_Tensor]:
    own = counts[config.models[0]]
    for name in donor:
        prefix = next((prefix for prefix in own if re.match(re.escape(prefix) + r"\d+\.", name)), None)
        t = 0.0
        if prefix is not None:
            t = _along(int(name.removeprefix(prefix).partition(".")[0]), own[prefix])
        yield _Tensor(name, config.slices[0], dict.fromkeys(config.models, name), t)


def _along(i: int, count: int) -> float:
    return i / (count - 1) if count > 1 else 1.0


def _by_slices(
    config: Config, opened: Mapping[str, Checkpoint], counts: Mapping[str, Mapping[str, int]]
) -> Iterator[_Tensor]:
    prefixes = {path: _only(path, found) for path, found in counts.items()}
    first, last = config.slices[0], config.slices[-1]
    outside = {
        path: [name for name in opened[path] if not re.match(re.escape(prefixes[path]) + r"\d+\.", name)]
        for path in {first.sources[0].model, last.sources[0].model}
    }
    later: set[str] = set()
    if _who(first) != _who(last):
        path = config.models[0]
        module = _built(opened[path], _described(opened[path]), "`slices` of several models")
        later = _after(module, prefixes[path], path)
    new, k = prefixes[config.models[0]], 0

    def beside(one: Slice, chosen: bool) -> Iterator[_Tensor]:
        for name in outside[one.sources[0].model]:
            if (name in later) is chosen:
                yield _Tensor(name, one, {source.model: name for source in one.sources}, 0.0)

    yield from beside(first, False)
    for one in config.slices:
        spans = {source.model: source.layers or (0, 0) for source in one.sources}
        for path, (_, end) in spans.items():
            if end > counts[path][prefixes[path]]:
                raise SurgeryError(f"layer_range: {path} has {counts[path][prefixes[path]]} layers, not {end}")
        length = len(range(*one.sources[0].layers or (0, 0)))
        for i in range(length):
            places = {path: f"{prefixes[path]}{start + i}." for path, (start, _) in spans.items()}
            path = one.sources[0].model
            rests = [name.removeprefix(places[path]) for name in opened[path] if name.startswith(places[path])]
            for rest in rests:
                names = {path: place + rest for path, place in places.items()}
                yield _Tensor(f"{new}{k}.{rest}", one, names, _along(i, length))
            k += 1
    yield from beside(last, True)


def _only(path: str, found: Mapping[str, int]) -> str:
    if len(found) != 1:
        lists = ", ".join(prefix.rstrip(".") for prefix in found) or "none"
        raise SurgeryError(f"slices: {path} needs one list of layers, and has {lists}: merge it by `models`")
    return next(iter(found))


def _who(one: Slice) -> Any:
    return [(source.model, source.parameters) for source in one.sources], one.base, one.parameters


def _built(checkpoint: Checkpoint, described: Mapping[str, Any] | None, key: str) -> nn.Module:
    """The model of a folder with all of its tensors on the meta device; `key` is what needs it."""
    try:
        if described is None:
            raise SurgeryError("there is no config.json")
        return _made(dict(described), checkpoint)
    except Exception as error:  # transformers' own, of all kinds
        raise SurgeryError(f"{key}: {checkpoint.path} cannot be built: {first_line(error)}") from None


def _made(described: dict[str, Any], checkpoint: Checkpoint) -> nn.Module:
    import transformers

    kind = getattr(transformers, described["architectures"][0])
    settings = {key: value for key, value in described.items() if key != "model_type"}
    return made_from(kind, transformers.AutoConfig.for_model(described["model_type"], **settings)).eval().to("meta")


def _after(module: nn.Module, prefix: str, path: str) -> set[str]:
    """The tensors that a model runs after its layers have begun."""
    example = example_for(module, None)
    if isinstance(example, dict):
        example = {key: value.to("meta") for key, value in example.items()}
    else:
        example = example.to("meta")
    try:
        order = [name for layer in surgery.layers(module, example=example) for name in layer.tensors]
    except Exception as error:  # of a model that does not run without data
        raise SurgeryError(
            f"slices: what {path} runs after its layers is not known ({first_line(error)}): let the first and the last "
            "slice have the same sources and parameters"
        ) from None
    begun = next(i for i, name in enumerate(order) if name.startswith(prefix))
    return set(order[begun:])


def _pieces(config: Config, one: _Tensor, opened: Mapping[str, Checkpoint], vocabulary: Vocabulary | None) -> Pieces:
    """A tensor of the result, computed when it is read."""
    method, base = METHODS[config.method], one.slice.base
    listed = {source.model: source for source in one.slice.sources}
    merged = method.models([*listed], base)
    shared_base = base if method.base in ("needed", "possible") else None
    every = [*merged, *([shared_base] if shared_base else [])]
    found = {}
    for path in every:
        if path not in one.names:
            raise SurgeryError(f"slices: list the base_model {path} as a source of each slice, with its layer_range")
        name = one.names[path]
        if name not in opened[path]:
            raise SurgeryError(f"{path} has no tensor {name!r}, which {every[0]} has: merge models of one architecture")
        found[path] = opened[path].pieces(name)
        if config.dtype is not None:
            found[path] = found[path].cast(config.dtype, name)
    if vocabulary is not None:
        found = vocabulary.permuted(one.name, found, base)
    dtype = found[shared_base].dtype if shared_base else reduce(torch.promote_types, (p.dtype for p in found.values()))
    like = found[every[0]].shape
    for path, pieces in found.items():
        if pieces.shape != like:
            raise SurgeryError(
                f"{one.name!r} is {like} in {every[0]} and {pieces.shape} in {path}: where vocabularies differ give "
                "tokenizer_source, where widths differ lay the smaller model into the larger first: "
                "python -m surgery fit LARGE --small SMALL --out LAID"
            )
    states = {path: LazyState({one.name: pieces.cast(dtype, one.name)}, path) for path, pieces in found.items()}
    shared = config.shared(one.name, one.slice, one.t)
    own = [config.own(one.names[path], one.slice, listed.get(path, Source(path)), one.t) for path in merged]
    result = method.call([states[path] for path in merged], states.get(shared_base or ""), shared, own)
    return lazy.pieces_of(result, one.name)


def _rewritten(
    config: Config,
    described: dict[str, Any],
    opened: Mapping[str, Checkpoint],
    counts: Mapping[str, Mapping[str, int]],
    vocabulary: Vocabulary | None,
) -> dict[str, Any]:
    """config.json with the number of layers, lists with an entry for each of them, dtype and size of the vocabulary."""
    result = json.loads(json.dumps(described))
    if config.slices[0].sources[0].layers is not None:
        (old,) = counts[config.models[0]].values()
        picked = [(one.sources[0].model, i) for one in config.slices for i in range(*one.sources[0].layers or (0, 0))]
        theirs = {path: {key: value for _, key, value in _leaves(_described(opened[path]) or {})} for path, _ in picked}
        for holder, key, value in [*_leaves(result)]:
            if type(value) is int and value == old and _COUNT.fullmatch(key):
                holder[key] = len(picked)
            elif isinstance(value, list) and len(value) == old and "layer" in key:
                holder[key] = [theirs[path][key][i] for path, i in picked]
    if dtype := config.out_dtype or config.dtype:
        result["torch_dtype" if "torch_dtype" in result else "dtype"] = str(dtype).removeprefix("torch.")
    if vocabulary is not None:
        for holder, key, _ in [*_leaves(result)]:
            if key == "vocab_size":
                holder[key] = vocabulary.size
    return result


def _check(described: dict[str, Any], donor: Checkpoint, values: LazyState) -> None:
    """SurgeryError unless the class that config.json names makes the tensors of the result.

    Tensors that the class does not make are left to it: it ignores tables that older versions saved.
    """
    try:
        _made(_described(donor) or {}, donor)
    except Exception as error:  # transformers is not installed, or does not know this class
        _log.warning("config.json could not be tried on its class: %s", first_line(error))
        return
    what = ""
    try:
        made = _made(described, donor).state_dict(keep_vars=True)
    except Exception as error:  # whatever the class raises
        made, what = {}, first_line(error)
    there = {id(tensor) for name, tensor in made.items() if name in values}  # of tied tensors one name is enough
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items() if name in values or id(tensor) not in there}
    what = what or first_difference({name: values.pieces(name).shape for name in shapes if name in values}, shapes)
    if what:
        raise SurgeryError(f"the configuration of {donor.path} does not describe what is merged: {what}")
