"""The commands that write checkpoints. Those of one operation are made of its signature."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from surgery import merging as merging
from surgery.commands.flags import texts_of
from surgery.commands.shared import File, Files, ModelName, NewFile, save, source, summary
from surgery.errors import SurgeryError
from surgery.files import check_absent, check_new
from surgery.merging import METHODS
from surgery.operations import MERGES, OPERATIONS, carry_out, checkpoints
from surgery.operations.arguments import (
    Floats,
    Function,
    Kind,
    PlanFile,
    Shape,
    shown,
    value_of,
)
from surgery.operations.checkpoint import Model

Size = Annotated[str, Kind("SIZE")]
Settings = Annotated[tuple[str, ...], Kind("[PATTERN:]NAME=VALUE", repeated=True)]

_NAMES = "timm:NAME, torchvision:NAME or module:factory"
_SHARED = {
    "input": (Shape | None, "shape of one input of the --model [the one that the model was made for]"),
    "plan": (PlanFile | None, "where to write "),
    "shard_size": (
        Size | None,
        "in a folder: the size above which it is split into several files, such as 5GB",
    ),
    "dry_run": (bool, "check everything and print what would be written"),
}
"""What commands of an operation take beside its arguments."""


def command_of(do: str) -> Callable[..., None]:
    """The command of an operation: files, its own arguments, and what all share that write a result."""
    takes, texts = dict(inspect.signature(OPERATIONS[do]).parameters), texts_of(OPERATIONS[do])
    first, *beside = checkpoints(do)
    several = checkpoints(do)[first] is list
    annotation = takes.pop(first).annotation
    annotated = get_args(annotation)[0] if several else annotation
    about_model = next((one for one in get_args(annotated) if type(one) is str), "")
    about_out, _, about_plan = texts["return"].partition("; ")

    flags: dict[str, tuple[Any, Any, str]] = {
        "files" if several else "file": (Files if several else File, inspect.Parameter.empty, texts[first])
    }
    for name, parameter in takes.items():
        kind = parameter.annotation
        if name in beside:
            kind = NewFile if parameter.default is parameter.empty else NewFile | None
        flags[name] = (kind, parameter.default, texts[name])
    flags["out"] = (NewFile, inspect.Parameter.empty, about_out)
    if about_model:
        flags["model"] = (ModelName | None, None, f"{_NAMES}; {about_model}")
    for name, (kind, text) in _SHARED.items():
        if (name == "input" and not about_model) or (name == "plan" and not about_plan):
            continue
        flags[name] = (kind, False if kind is bool else None, text + about_plan if name == "plan" else text)

    def command(**given: Any) -> None:
        own = {name: value for name in takes if name not in beside and (value := given.pop(name)) is not None}
        others = {name: given.pop(name) for name in beside}
        files = given.pop("files", None) or [given.pop("file")]
        carry_out_on(do, files, own, others, **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(n, keyword, default=d, annotation=kind) for n, (kind, d, _) in flags.items()]
    required = [one for one in parameters if one.default is one.empty]
    vars(command)["__signature__"] = inspect.Signature([*required, *(one for one in parameters if one not in required)])
    arguments = "\n".join(f"    {name}: {text}" for name, (_, _, text) in flags.items())
    command.__doc__ = f"{OPERATIONS[do].__doc__.splitlines()[0]}\n\nArgs:\n{arguments}"
    return command


def carry_out_on(
    do: str,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    others: Mapping[str, Path | None],
    *,
    out: Path,
    model: str | None = None,
    input: tuple[int, ...] | None = None,
    plan: Path | None = None,
    shard_size: str | None = None,
    dry_run: bool = False,
    called: str = "do",
) -> None:
    """Carry an operation out on files, write what comes out, and say where it is.

    Args:
        do: its name.
        files: the checkpoints that it works on. others: further ones, by the name of the argument.
        settings: its other arguments.
        out, model, input, plan, shard_size, dry_run: as the flags of commands.
        called: under which key the operation's name is written into the file.
    """
    shard_bytes = size_in_bytes(shard_size)
    inputs = [Model.open(file, model, input) for file in files]
    beside = {name: Model.open(path) for name, path in others.items() if path is not None}

    def check() -> None:
        check_new(out)
        if plan is not None:
            check_absent(plan)

    for one in inputs:
        one.before = check
    (first, kind), *_ = checkpoints(do).items()
    result = carry_out(do, {first: inputs if kind is list else inputs[0], **beside, **settings})
    check()
    if dry_run:
        print(f"would write {out}: {summary(result.values)}")
        return
    made = {called: do} | {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    made["inputs"] = [source(one.checkpoint) for one in inputs]
    made |= {name: source(one.checkpoint) for name, one in beside.items()}
    save(out, result, made=made, shard_bytes=shard_bytes)
    if plan is not None:
        result.plan.save(plan)
        print(f"{plan}: {result.plan!r}")


_NEEDS = {
    "base": "the model that the others were fine-tuned from: give --base FILE",
    "data": "data to measure the models on: give --data MODULE:FUNCTION, a function that gives batches",
    "score": "a score to choose models by: give --score MODULE:FUNCTION, a function from a model to a number",
}
"""What is said where a method needs one of these."""


def merge(
    method: Annotated[str, Kind("METHOD", positional=True)],
    files: Files,
    *,
    out: NewFile,
    base: NewFile | None = None,
    weights: Floats | None = None,
    set: Settings = (),
    data: Function | None = None,
    loss: Function | None = None,
    score: Function | None = None,
    model: ModelName | None = None,
    input: Shape | None = None,
    shard_size: Size | None = None,
    dry_run: bool = False,
) -> None:
    """Merge checkpoints by one of {count} methods.

    The checkpoints have one architecture; they are merged tensor by tensor, without holding them in memory. `merge
    METHOD --help` lists the settings of a method.

    Args:
        method: {by_numbers}; with a --model and --data also fisher and regmean, with a --score greedy_soup
        files: .safetensors or .pt files, or folders as HuggingFace's libraries write them
        out: the new file, or a new folder, which also gets the other files of the first folder
        base: the model that the others were fine-tuned from
        weights: a weight for each file [1 each]
        set: a setting of the method, for all tensors or for those whose name matches: --set density=0.5 --set
            'layer4:density=0.2'
        data: a function of yours that gives batches one after another: pairs of inputs and targets for fisher, inputs
            for regmean
        loss: for fisher, a function of outputs and targets [cross-entropy]
        score: for greedy_soup, a function from a model (without --model from a state dict) to a number; larger is
            better
        model: timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none
        input: shape of one input of the --model [the one that the model was made for]
        shard_size: in a folder: the size above which the result is split into several files, such as 5GB
        dry_run: check everything and print what would be written
    """
    if method not in MERGES:
        near = difflib.get_close_matches(method, MERGES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(MERGES)}"
        raise SurgeryError(f"unknown method {method!r}: {hint}")
    takes = inspect.signature(MERGES[method]).parameters
    flags = {"base": base, "weights": weights, "data": data, "loss": loss, "score": score}
    own = {name: p for name, p in takes.items() if name not in ("models", *flags)}
    given = settings(set, list(own))
    for name, value in flags.items():
        if value is not None and name not in takes:
            raise SurgeryError(f"{method} takes no --{name}: leave it out")
        if value is None and name in takes and takes[name].default is inspect.Parameter.empty:
            raise SurgeryError(f"{method} needs {_NEEDS[name]}")
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in given:
            raise SurgeryError(f"{method} needs --set {name}=VALUE")
    if not files:
        raise SurgeryError("there are no models to merge: give two or more files")
    others: dict[str, Any] = {"base": flags.pop("base")} if base is not None else {}
    given |= {name: list(value) if isinstance(value, tuple) else value for name, value in flags.items() if value}
    where: dict[str, Any] = {"out": out, "model": model, "input": input, "shard_size": shard_size, "dry_run": dry_run}
    carry_out_on(method, files, given, others, called="method", **where)


def settings_of(method: str) -> str:
    """What `merge METHOD --help` prints: what the method does, its settings with their defaults, and its flags."""
    function = getattr(merging, method) if method in METHODS else MERGES[method]
    takes, texts = inspect.signature(MERGES[method]).parameters, texts_of(function)
    named = {name: text for names, text in texts.items() for name in re.split(r",\s*", names)}
    if any(text.startswith("as for `task_arithmetic`") for text in named.values()):
        named |= {name: text for name, text in texts_of(merging.task_arithmetic).items() if name in named}
    about = (function.__doc__ or "").partition("\n\n    Args:")[0]
    paragraphs = [textwrap.fill(" ".join(one.split()), 80) for one in about.split("\n\n")]
    lines = ["\n\n".join(paragraphs), "", f"usage: {{module}} merge {method} FILE... --out FILE", ""]
    flags = [name for name in takes if name in _FLAGS]
    lines += ["flags of this method:", *(_entry(f"--{one}", takes[one], named.get(one, "")) for one in flags)]
    own = [name for name in takes if name not in ("models", *_FLAGS)]
    lines += ["", "settings, each as --set NAME=VALUE or --set PATTERN:NAME=VALUE:" if own else "it has no settings"]
    lines += [_entry(one, takes[one], named.get(one, "")) for one in own]
    return "\n".join([*lines, "", "`merge --help` lists what all methods take."])


_FLAGS = ("base", "weights", "data", "loss", "score")


def explained(first: str) -> str | None:
    """What `merge FIRST --help` prints, unless it is what `merge --help` does."""
    if first in MERGES:
        return settings_of(first)
    if first.startswith("-") or Path(first).suffix or Path(first).exists():
        return None
    return f"{first} is no method: there are {', '.join(MERGES)}"


def _entry(name: str, parameter: inspect.Parameter, text: str) -> str:
    needed = parameter.default is parameter.empty
    default = "(required)" if needed else "" if parameter.default is None else f"[{shown(parameter.default)}]"
    return textwrap.fill(f"{text} {default}".strip(), 80, initial_indent=f"  {name:12} ", subsequent_indent=" " * 15)


merge.__doc__ = merge.__doc__.format(count=len(MERGES), by_numbers=", ".join(METHODS))
vars(merge)["explained"] = explained


def average(files: Files, *, out: NewFile, weights: Floats | None = None) -> None:
    """Average checkpoints of one architecture.

    Integer tensors (step counters) carry the maximum.

    Args:
        files: .safetensors or .pt files, or folders as HuggingFace's libraries write them
        out: the new file or folder
        weights: a weight for each file [1 each]
    """
    merge("linear", files, out=out, weights=weights)


def settings(texts: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """Settings of a method from texts NAME=VALUE or PATTERN:NAME=VALUE; patterns keep their order.

    >>> settings(["density=0.5", "layer4:density=0.2", "elect=true"], ["density", "elect"])
    {'density': {'layer4': 0.2, '*': 0.5}, 'elect': True}
    """
    found: dict[str, Any] = {}
    everywhere: dict[str, Any] = {}
    for text in texts:
        left, equals, right = text.partition("=")
        pattern, _, name = left.rpartition(":")
        if not equals or name not in known:
            choice = f"one of {', '.join(known)}" if known else "none, as this method has no settings"
            raise SurgeryError(f"--set {text}: write NAME=VALUE or PATTERN:NAME=VALUE, where NAME is {choice}")
        if name in everywhere if not pattern else pattern in found.get(name, {}):
            raise SurgeryError(f"--set {text}: {left} is there twice, give it once")
        if pattern:
            found.setdefault(name, {})[pattern] = value_of(right)
        else:
            everywhere[name] = value_of(right)
    for name, value in everywhere.items():
        found[name] = {**found[name], "*": value} if name in found else value
    return found


def size_in_bytes(text: str | None) -> int | None:
    """The number of bytes that a text such as 5GB says; None for None.

    >>> size_in_bytes("5GB"), size_in_bytes("200 kB")
    (5000000000, 200000)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    size = int(float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[match[2]]) if match else 0
    if size < 1:
        raise SurgeryError(f"--shard-size {text}: give a number of bytes, such as 500MB or 5GB")
    return size
