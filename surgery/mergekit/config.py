"""What mergekit's YAML says: methods, slices of models, and parameters at every level. Unknown keys are errors."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from surgery.errors import SurgeryError, about
from surgery.mergekit.methods import METHODS, NEEDED, Method
from surgery.operations.arguments import shown
from surgery.recipe import read_yaml

Parameters = Mapping[str, Any]
KEYS = (
    "merge_method", "models", "slices", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source",
    "tokenizer", "chat_template",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A model in a slice.

    Attributes:
        model: its path, or "PATH+ADAPTER".
        layers: (first, end) of its layers, the end exclusive; None for all of them.
        parameters: that hold for this model.
    """

    model: str
    layers: tuple[int, int] | None = None
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """Layers of the result, which come from the same number of layers of each source.

    Attributes:
        sources: the models, without the base unless it is listed.
        base: the base model's path.
        parameters: that hold in this slice.
    """

    sources: tuple[Source, ...]
    base: str | None
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """What a file says.

    Attributes:
        method: the name of the method.
        slices: of the result, in order; of a file with `models` the only one.
        base: the base model's path.
        parameters: that hold everywhere.
        dtype: in which models are read.
        out_dtype: in which the result is written.
        tokenizer: where the tokenizer comes from: "base", "union" or a model's path.
        pad: the number of which the number of tokens becomes a multiple, or None.
        chat_template: the template itself, or "auto".
        text: of the file.
    """

    method: str
    slices: tuple[Slice, ...]
    base: str | None
    parameters: Parameters
    dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    tokenizer: str | None
    pad: int | None
    chat_template: str | None
    text: str

    @property
    def models(self) -> list[str]:
        """The paths of all models, the base first."""
        listed = [source.model for one in self.slices for source in one.sources]
        bases = [base for base in (self.base, *(one.base for one in self.slices)) if base]
        return list(dict.fromkeys([*bases[:1], *listed, *bases]))

    def shared(self, name: str, slice_: Slice, t: float) -> dict[str, Any]:
        """The method's settings for a tensor of the result that lies at t along its layers."""
        return self._found(METHODS[self.method].shared, name, t, [slice_.parameters, self.parameters], name)

    def own(self, name: str, slice_: Slice, source: Source, t: float) -> dict[str, Any]:
        """The settings of a model for its tensor `name`."""
        levels = [source.parameters, slice_.parameters, self.parameters]
        return self._found(METHODS[self.method].own, name, t, levels, f"{name} of {source.model}")

    def _found(self, takes: Parameters, name: str, t: float, levels: Sequence[Parameters], what: str) -> dict[str, Any]:
        result = {}
        for key, default in takes.items():
            values = (value_of(level[key], name, t) for level in levels if key in level)
            result[key] = next((value for value in values if value is not None), default)
            if result[key] is NEEDED:
                raise SurgeryError(f"{self.method} needs the parameter {key!r} for {what}")
        return result


def value_of(setting: Any, name: str, t: float) -> Any:
    """What a setting is for a tensor at t in [0, 1] along its layers; None where no filter matches its name.

    A list of numbers is spread evenly over the layers and interpolated; of a list of filters the first counts whose
    text is a part of the name.

    >>> value_of([0, 1, 4], "", 0.75), value_of([{"filter": "mlp", "value": 2}, {"value": 3}], "model.mlp.w", 0)
    (2.5, 2)
    """
    if not isinstance(setting, list):
        return setting
    if not any(isinstance(one, dict) for one in setting):
        place = t * (len(setting) - 1)
        low = int(place)
        high = min(low + 1, len(setting) - 1)
        if any(isinstance(one, bool) for one in setting):
            return setting[low]
        return (1 - (place - low)) * setting[low] + (place - low) * setting[high]
    for one in setting:
        if one.get("filter") in (None, "*") or one["filter"] in name:
            return value_of(one["value"], name, t)
    return None


def read_config(path: Path) -> Config:
    """The configuration of a YAML file; SurgeryError that names the file and the key for one that is none."""
    text, found = read_yaml(path)
    with about(str(path)):
        return _config(found, text)


def _config(found: Any, text: str) -> Config:
    _keys("a merge", found, KEYS)
    name = found.get("merge_method")
    if not isinstance(name, str) or name not in METHODS:
        raise SurgeryError(f"merge_method: {shown(name)} is not supported: there are {', '.join(METHODS)}")
    method, base = METHODS[name], _model("base_model", found.get("base_model"))
    if (found.get("models") is None) == (found.get("slices") is None):
        raise SurgeryError("give either `models` or `slices`")
    if found.get("models") is not None:
        entries = _list("models", found["models"])
        sources = tuple(_source(one, method, name, layers=False) for one in entries)
        slices: tuple[Slice, ...] = (Slice(sources, base),)
    else:
        slices = tuple(_slice(one, base, method, name) for one in _list("slices", found["slices"]))
    for one in slices:
        method.check(name, [source.model for source in one.sources], one.base)
    tokenizer, pad = _tokenizer(found)
    if tokenizer == "base" and base is None:
        raise SurgeryError("tokenizer_source: base needs a base_model")
    template = found.get("chat_template")
    if template is not None and template != "auto" and (not isinstance(template, str) or "{" not in template):
        raise SurgeryError(f"chat_template: {shown(template)} is no template: give auto, or the template itself")
    return Config(
        name,
        slices,
        base,
        _parameters(found, {**method.shared, **method.own}, method, name),
        _dtype("dtype", found.get("dtype")),
        _dtype("out_dtype", found.get("out_dtype")),
        tokenizer,
        pad,
        template,
        text,
    )


def _keys(what: str, found: Any, known: Iterable[str]) -> None:
    if not isinstance(found, dict):
        raise SurgeryError(f"{what} is {shown(found)}: give entries NAME: VALUE, with {', '.join(known)}")
    if odd := [key for key in found if key not in known]:
        raise SurgeryError(f"the key {odd[0]!r} of {what} is not supported: there are {', '.join(known)}")


def _list(key: str, found: Any) -> list[Any]:
    if not isinstance(found, list) or not found:
        raise SurgeryError(f"{key}: {shown(found)} is no list with entries")
    return found


def _model(key: str, found: Any) -> str | None:
    """A model as it is called everywhere: its path, or "PATH+ADAPTER"; so "./a" and "a/" are the model "a"."""
    if isinstance(found, dict):
        _keys(f"{key}: {shown(found)}", found, ("model", "lora"))
        model, adapter = (_path(key, found.get(part)) for part in ("model", "lora"))
        return _model(key, model if adapter is None else f"{model}+{adapter}")
    if found is not None and (not isinstance(found, str) or not found):
        raise SurgeryError(f"{key}: {shown(found)} is no path of a folder")
    if found is None:
        return None
    parts = [part for part in parts_of(found) if part is not None]
    if not all(parts) or ("+" in parts[-1] and len(parts) > 1):
        raise SurgeryError(f"{key}: {found!r} is no model with one adapter: write PATH+ADAPTER")
    return "+".join(str(Path(part)) for part in parts)


def _path(key: str, found: Any) -> Any:
    """What a dictionary says of a model or of an adapter: its path, also as {path: PATH}."""
    if isinstance(found, dict) and "path" in found:
        _keys(f"{key}: {shown(found)}", found, ("path",))
        return found["path"]
    return _model(key, found)


def parts_of(model: str) -> tuple[str, str | None]:
    """The path of a model, and that of the adapter in it or None.

    >>> parts_of("base+adapter"), parts_of("base")
    (('base', 'adapter'), ('base', None))
    """
    base, plus, adapter = model.partition("+")
    return (base, adapter) if plus and not Path(model).exists() else (model, None)


def _slice(found: Any, base: str | None, method: Method, name: str) -> Slice:
    _keys("a slice", found, ("sources", "base_model", "parameters"))
    sources = tuple(_source(one, method, name, layers=True) for one in _list("sources", found.get("sources")))
    lengths = {end - first for first, end in (source.layers or (0, 0) for source in sources)}
    if len(lengths) > 1:
        raise SurgeryError(f"the layer_range of a slice's sources have {sorted(lengths)} layers: give equally many")
    own = _model("base_model", found.get("base_model"))
    return Slice(sources, own or base, _parameters(found, {**method.shared, **method.own}, method, name))


def _source(found: Any, method: Method, name: str, *, layers: bool) -> Source:
    what = "a slice's source" if layers else "an entry of models"
    _keys(what, found, ("model", "layer_range", "parameters") if layers else ("model", "parameters"))
    model, span = _model("model", found.get("model")), found.get("layer_range")
    if model is None:
        raise SurgeryError(f"{what} names no model")
    if layers and not (
        isinstance(span, list) and len(span) == 2 and all(type(one) is int for one in span) and 0 <= span[0] < span[1]
    ):
        raise SurgeryError(f"layer_range: {shown(span)} of {model}: give [FIRST, END], the end not included")
    parameters = _parameters(found, method.own, method, name)
    return Source(model, (span[0], span[1]) if layers else None, parameters)


def _parameters(found: Mapping, takes: Parameters, method: Method, name: str) -> Parameters:
    given = found.get("parameters")
    if given is None:
        return {}
    known = dict.fromkeys([*takes, *method.fixed, "int8_mask"])  # int8_mask changes what a mask is held in, no result
    _keys(f"the parameters of {name}", given, known)
    for key, value in given.items():
        if key in method.fixed and value != method.fixed[key]:
            raise SurgeryError(f"{key}: {shown(value)} is not supported for {name}: it is {shown(method.fixed[key])}")
        if key == "int8_mask" and type(value) is not bool:
            raise SurgeryError(f"{key}: {shown(value)} is neither true nor false")
        _setting(key, value)
    return {key: [value] if isinstance(value, dict) else value for key, value in given.items() if key in takes}


def _setting(key: str, value: Any, *, inside: bool = False) -> None:
    """SurgeryError unless a value is a number or true or false, a list of such, or, outside, of filters and values."""
    entries = value if isinstance(value, list) else [value]
    for one in entries:
        if isinstance(one, dict) and not inside and all(isinstance(other, dict) for other in entries):
            _keys(f"an entry of {key!r}", one, ("filter", "value"))
            if "value" not in one or not isinstance(one.get("filter"), str | None):
                raise SurgeryError(f"{key}: {shown(one)} needs a value, and a text as filter")
            _setting(key, one["value"], inside=True)
        elif not isinstance(one, bool | int | float) or not abs(one) <= sys.float_info.max:
            raise SurgeryError(f"{key}: {shown(one)} is no finite number")
    if not entries:
        raise SurgeryError(f"{key}: the list is empty")


def _dtype(key: str, found: Any) -> torch.dtype | None:
    dtype = getattr(torch, str(found).removeprefix("torch."), None)
    if found is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return dtype
    raise SurgeryError(f"{key}: {shown(found)} is no floating-point type, such as float32 or bfloat16")


def _tokenizer(found: Mapping) -> tuple[str | None, int | None]:
    """Where the tokenizer comes from, and the number of which the number of its tokens becomes a multiple."""
    source, about = found.get("tokenizer_source"), found.get("tokenizer")
    if about is None:
        return _model("tokenizer_source", source), None
    if source is not None:
        raise SurgeryError("give `tokenizer_source` or `tokenizer`, one of the two")
    _keys("tokenizer", about, ("source", "pad_to_multiple_of"))
    pad = about.get("pad_to_multiple_of")
    if pad is not None and (type(pad) is not int or pad < 1):
        raise SurgeryError(f"pad_to_multiple_of: {shown(pad)} is no whole number above 0")
    origin = _model("source", about.get("source", "union"))
    if origin is None:
        raise SurgeryError("source: null is no tokenizer: give union, base, or a model")
    return origin, pad
