"""The commands that make one checkpoint of several."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import docstring_parser
from torch import Tensor
from torch.nn import functional as F
from tyro.conf import Positional, UseAppendAction, arg

import surgery
from surgery import merging
from surgery.commands import flags
from surgery.commands.checkpoint import Model, To
from surgery.errors import SurgeryError, explain

_MEASURED: dict[str, Callable[..., Any]] = {
    "fisher": merging.fisher,
    "regmean": merging.regmean,
    "greedy_soup": merging.greedy_soup,
}
"""Methods that need --data or a --score."""
_OTHER_FLAGS = {"fishers": "data", "grams": "data", "score": "score", "base": "base", "weights": "weights"}
"""Arguments of methods that are no settings, and the flags that they come from."""
_NEEDED = {
    "base": "the model that the others were fine-tuned from: give --base FILE",
    "data": "data to measure the models on: give --data MODULE:FUNCTION, a function that gives batches",
    "score": "a score to choose models by: give --score MODULE:FUNCTION, a function from a model to a number",
}


def merge(
    method: Annotated[Positional[str], arg(metavar="METHOD")],
    files: Positional[flags.Files],
    *,
    base: flags.OptionalFile = None,
    weights: flags.WeightList = None,
    set: Annotated[tuple[str, ...], arg(metavar="[PATTERN:]NAME=VALUE"), UseAppendAction] = (),
    data: flags.FunctionPath = None,
    loss: flags.FunctionPath = None,
    score: flags.FunctionPath = None,
    model: flags.ModelName = None,
    input: flags.OptionalCounts = None,
    to: To,
) -> None:
    """Merge checkpoints of one architecture by a method.

    There are these methods:
    - of models alone: linear, slerp, multislerp, karcher
    - with a --base: nearswap, task_arithmetic, ties, dare, breadcrumbs, della, sce,
      model_stock
    - with --model and --data: fisher, regmean; with --score: greedy_soup
    - of your own: module:function, which `surgery.merging.register_method` adds

    Use `merge METHOD --help` to list the settings of a method.

    Args:
        method: see above
        files: .safetensors or .pt files, or folders as HuggingFace's libraries write them
        base: the model that the others were fine-tuned from
        weights: a weight for each file [1 each]
        set: a setting of the method: density=0.5, or of tensors whose name matches: 'layer4:density=0.2'
        data: a function of yours that gives batches: pairs of inputs and targets for fisher, inputs for regmean
        loss: for fisher, a function of outputs and targets [cross-entropy]
        score: for greedy_soup, a function from a model (or state dict) to a number; larger is better
        model: timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none
        input: shape of one input of the --model [the one that the model was made for]
    """
    function = method_of(method)
    takes = inspect.signature(function).parameters
    options = settings(set, [name for name in takes if name not in ("models", *_OTHER_FLAGS)])
    special = {"base": base, "weights": weights, "data": data, "score": score}
    needs = {_OTHER_FLAGS.get(name, name): p.default is p.empty for name, p in takes.items() if name != "models"}
    for name, value in [*special.items(), ("loss", loss if method != "fisher" else None)]:
        if value is not None and name not in needs:
            raise SurgeryError(f"{method} takes no --{name}: leave it out", code="argument")
    for name, needed in needs.items():
        if needed and special.get(name, options.get(name)) is None:
            raise SurgeryError(f"{method} needs {_NEEDED.get(name, f'--set {name}=VALUE')}", code="argument")
    if not files:
        raise SurgeryError("there are no models to merge: give two or more files", code="argument")
    models, inputs = [Model(file, model, input) for file in files], {}
    record = {
        "do": "merge",
        "method": method,
        "weights": weights,
        "data": data,
        "loss": loss,
        "score": score,
        **options,
    }
    if weights is not None:
        options["weights"] = list(weights)
    if base is not None:
        inputs["base"] = Model(base)
        options["base"] = inputs["base"].values
    with explain(f"{method} cannot be measured on --data {data}", "; give batches that the model takes"):
        if method == "fisher":
            measure = flags.import_object(loss, "--loss") if loss else F.cross_entropy
            options["fishers"] = [
                merging.fisher_information(source.load(), _pairs(data), loss=measure) for source in models
            ]
        elif method == "regmean":
            options["grams"] = [merging.input_grams(source.load(), flags.batches_of(data)) for source in models]
    if method == "greedy_soup":
        options["score"] = _scorer(score, models)
    merged = function([source.values for source in models], **options)
    values = merged.state if isinstance(merged, merging.Soup) else merged
    inputs = {f"model {k}": source for k, source in enumerate(models)} | inputs
    to.write(values, record, inputs, like=models[0], module=models[0].module)


def average(files: Positional[flags.Files], *, weights: flags.WeightList = None, to: To) -> None:
    """Average checkpoints of one architecture.

    Integer tensors (step counters) carry the maximum.

    Args:
        files: .safetensors or .pt files, or folders as HuggingFace's libraries write them
        weights: a weight for each file [1 each]
    """
    merge("linear", files, weights=weights, to=to)


def method_of(name: str) -> Callable[..., Any]:
    """Return a method by name or the user's module:function; SurgeryError otherwise."""
    if ":" in name:
        method = inspect.unwrap(flags.import_object(name, "method"), stop=lambda f: f in merging.METHODS.values())
        if method not in merging.METHODS.values():
            raise SurgeryError(f"{name} is no merge method: put @merging.register_method above it", code="argument")
        return method
    methods = {**merging.METHODS, **_MEASURED}
    if name not in methods:
        near = difflib.get_close_matches(name, methods, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        every = f"there are {', '.join(methods)}; your own: MODULE:FUNCTION"
        raise SurgeryError(f"unknown method {name!r}: {hint}{every}", code="name")
    return methods[name]


def help_of(method: str) -> str:
    """Return the text of `merge METHOD --help`: the method and its arguments."""
    function = method_of(method)
    about, takes = docstring_parser.parse(function.__doc__ or ""), inspect.signature(function).parameters
    paragraphs = [about.short_description or "", *(about.long_description or "").split("\n\n")]
    lines = [f"usage: python -m surgery merge {method} FILE... --out FILE ...", ""]
    lines += [f"{textwrap.fill(' '.join(text.split()), 80)}\n" for text in paragraphs]
    for name, parameter in takes.items():
        if name == "models":
            continue
        flag = f"--{_OTHER_FLAGS[name]}" if name in _OTHER_FLAGS else f"--set {name}=VALUE"
        default = "required" if parameter.default is parameter.empty else f"default: {parameter.default}"
        text = f"{flag}  {_text_of(function, name)} ({default})"
        lines.append(textwrap.fill(text, 80, initial_indent="  ", subsequent_indent=" " * 6))
    return "\n".join([*lines, "", "`merge --help` lists what all methods take."])


def _text_of(function: Callable[..., Any], name: str) -> str:
    """Return a docstring's text on an argument; "as for `method`" is looked up there."""
    listed = docstring_parser.parse(function.__doc__ or "").params
    text = " ".join(
        next((entry.description or "" for entry in listed if name in entry.arg_name.split(", ")), "").split()
    )
    if other := re.match(r"as for `(\w+)`;? ?", text):
        return f"{_text_of(method_of(other[1]), name)} {text[other.end() :]}".strip()
    return text


def settings(texts: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """Read settings from texts NAME=VALUE or PATTERN:NAME=VALUE; patterns keep order.

    >>> settings(["density=0.5", "layer4:density=0.2", "elect=true"], ["density", "elect"])
    {'density': {'layer4': 0.2, '*': 0.5}, 'elect': True}
    """
    values_by_name: dict[str, dict[str, Any]] = {}
    for text in texts:
        left, equals, right = text.partition("=")
        pattern, _, name = left.rpartition(":")
        if not equals or name not in known:
            choice = f"one of {', '.join(known)}" if known else "none, as this method has no settings"
            raise SurgeryError(f"--set {text}: write [PATTERN:]NAME=VALUE, where NAME is {choice}", code="argument")
        if (pattern or "*") in values_by_name.setdefault(name, {}):
            raise SurgeryError(f"--set {text}: {left} is there twice, give it once", code="argument")
        values_by_name[name][pattern or "*"] = flags.value_of(right)
    for by_pattern in values_by_name.values():
        if "*" in by_pattern:  # the first pattern that matches counts
            by_pattern["*"] = by_pattern.pop("*")
    return {name: values["*"] if list(values) == ["*"] else values for name, values in values_by_name.items()}


def _pairs(data: str | None) -> list[Any]:
    batches = flags.batches_of(data or "")
    if odd := [batch for batch in batches if not isinstance(batch, list | tuple) or len(batch) != 2]:
        raise SurgeryError(f"--data {data} gives {type(odd[0]).__name__}, no pairs (inputs, targets)", code="argument")
    return batches


def _scorer(score: str | None, models: Sequence[Model]) -> Callable[[Mapping[str, Tensor]], float]:
    """Return the user's score of the model, or of the state dict of an unknown model."""
    function, known = flags.import_object(score or "", "--score"), models[0].described
    for model in models if known else ():
        model.build()

    def scored(values: Mapping[str, Tensor]) -> float:
        value = function(surgery.load(models[0].build(), dict(values)).eval() if known else dict(values))
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise SurgeryError(f"--score {score} gives {type(value).__name__}, not a number", code="argument") from None

    return scored
