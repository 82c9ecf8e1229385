"""Recipes: named steps on checkpoints, in a YAML file.

What needs no weights is planned before anything is read: its results are lazy states.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from surgery.errors import SurgeryError, about, first_line
from surgery.operations import OPERATIONS, carry_out, check_arguments, checkpoints
from surgery.operations.arguments import shown, type_and_kind
from surgery.operations.checkpoint import Model

_LARGEST = 2**20  # bytes


@dataclass(frozen=True)
class Input:
    """A checkpoint that a recipe reads.

    Attributes:
        path: of the file or folder.
        model: the name of its model, as --model takes it, or None.
        shape: of one input of the model, or None.
    """

    path: Path
    model: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Recipe:
    """What a recipe says.

    Attributes:
        inputs: checkpoints by name; their paths are relative to the recipe's folder.
        steps: by the name of its result each step's operation ("do") and arguments, in order.
        outputs: by path the name of what is written there.
        text: of the file.
    """

    inputs: Mapping[str, Input]
    steps: Mapping[str, Mapping[str, Any]]
    outputs: Mapping[Path, str]
    text: str


class _Once(yaml.SafeLoader):
    """A safe loader that refuses a key that is there twice, of which YAML would keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            keys = [key.value for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), keys[-1])
            raise yaml.constructor.ConstructorError(problem=f"{twice!r} is there twice", problem_mark=node.start_mark)
        return found


def read_yaml(path: Path) -> tuple[str, Any]:
    """The text of a YAML file, and what it says; SurgeryError that names the file and the place if it is none."""
    try:
        if path.stat().st_size > _LARGEST:
            raise SurgeryError(f"{path} is too large for a recipe")
        text = path.read_text()
        return text, yaml.load(text, _Once)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise SurgeryError(f"{path}{line} is no YAML: {getattr(error, 'problem', None) or first_line(error)}") from None


def read_recipe(path: Path) -> Recipe:
    """The recipe of a YAML file; SurgeryError that names the file and the place for one that is none."""
    text, found = read_yaml(path)
    if (
        not isinstance(found, dict)
        or set(found) - {"inputs", "steps", "outputs"}
        or not {"inputs", "outputs"} <= set(found)
    ):
        raise SurgeryError(f"{path}: a recipe has `inputs`, `steps` and `outputs`, and nothing else")
    parts = {part: found.get(part) or {} for part in ("inputs", "steps", "outputs")}
    for part, entries in parts.items():
        if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
            raise SurgeryError(f"{path}: `{part}` are entries NAME: VALUE")
    if odd := [name for name, value in parts["outputs"].items() if not isinstance(value, str)]:
        raise SurgeryError(f"{path}: {odd[0]!r} of `outputs` needs the name of an input or of a step")
    for name, step in parts["steps"].items():
        if (
            not isinstance(step, dict)
            or not isinstance(step.get("do"), str)
            or not all(isinstance(k, str) for k in step)
        ):
            raise SurgeryError(f"{path}: step {name!r} needs an operation, `do: linear`, and arguments by name")
        if name in parts["inputs"]:
            raise SurgeryError(f"{path}: {name!r} is an input and a step: give them different names")
    if not parts["outputs"]:
        raise SurgeryError(f"{path}: `outputs` names no file to write")
    folder = path.parent
    files = [os.path.normpath(folder / file) for file in parts["outputs"]]
    if twice := [file for file in parts["outputs"] if files.count(os.path.normpath(folder / file)) > 1]:
        raise SurgeryError(f"{path}: {' and '.join(map(repr, twice))} are the same file: give each output its own")
    return Recipe(
        {name: _input(path, name, value) for name, value in parts["inputs"].items()},
        parts["steps"],
        {folder / file: name for file, name in parts["outputs"].items()},
        text,
    )


def _input(recipe: Path, name: str, value: Any) -> Input:
    """What an entry of `inputs` says: a file, or a file with its model."""
    said = {"file": value} if isinstance(value, str) else value
    sizes = said.get("input") if isinstance(said, dict) else None
    if (
        not isinstance(said, dict)
        or not {"file"} <= set(said) <= {"file", "model", "input"}
        or not isinstance(said["file"], str)
        or not isinstance(said.get("model", ""), str)
        or not (sizes is None or (isinstance(sizes, list) and sizes and all(type(size) is int for size in sizes)))
    ):
        raise SurgeryError(
            f"{recipe}: {name!r} of `inputs` is a file, a.safetensors, or a file with its model, "
            '{file: a.safetensors, model: "timm:resnet18,num_classes=10", input: [3, 224, 224]}'
        )
    return Input(recipe.parent / said["file"], said.get("model"), None if sizes is None else tuple(sizes))


def planned(recipe: Recipe, folder: Path, before: Callable[[], None]) -> tuple[dict[str, Model], dict[str, Model]]:
    """The inputs and the results of all steps by name.

    Names and arguments of all steps are checked first, before a file is opened. Then each step is planned in turn: what
    it computes is computed when it is written, other than by steps that decide by the weights (prune, align, ...),
    which read them now, after `before` was called.

    Raises:
        SurgeryError: that names the step, for an unknown operation or argument, for a name that is no input and no
            earlier step, and for everything that the operation refuses.
    """
    names = list(recipe.inputs)
    for name, step in recipe.steps.items():
        with about(f"step {name!r}"):
            _arguments(step, dict.fromkeys(names), folder)
        names += _results(name, step)
    for path, name in recipe.outputs.items():
        if name not in names:
            raise SurgeryError(f"output {path.name}: there is no step {name!r}; there are {', '.join(names)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise SurgeryError(f"{twice[0]!r} is there twice, as a step and as a result of shuffle: rename the step")
    inputs = {name: Model.open(one.path, one.model, one.shape) for name, one in recipe.inputs.items()}
    for one in inputs.values():
        one.before = before
    results: dict[str, Model] = {}
    for name, step in recipe.steps.items():
        with about(f"step {name!r}"):
            made = carry_out(step["do"], _arguments(step, {**inputs, **results}, folder))
        for place, one in zip(_results(name, step), made if isinstance(made, list) else [made]):
            one.what = f"{place!r}"
            results[place] = one
    return inputs, results


def _results(name: str, step: Mapping[str, Any]) -> list[str]:
    """What the results of a step are called."""
    return [f"{name}.{k}" for k in range(len(step["models"]))] if step["do"] == "shuffle" else [name]


def _arguments(step: Mapping[str, Any], known: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of a step, with what is known by the names of checkpoints, and paths from the recipe's folder."""
    do, given = step["do"], {key: value for key, value in step.items() if key != "do"}

    def one(name: Any) -> Any:
        if not isinstance(name, str):
            raise SurgeryError(f"{do} takes names of inputs and steps, not {shown(name)}")
        if name not in known:
            raise SurgeryError(f"{name!r} is no input and no earlier step; there are {', '.join(known)}")
        return known[name]

    check_arguments(do, given)
    kinds = checkpoints(do)
    for key, value in given.items():
        kind = kinds.get(key) or type_and_kind(inspect.signature(OPERATIONS[do]).parameters[key].annotation)[0]
        if kind is Model:
            given[key] = one(value)
        elif kind is list:
            if not isinstance(value, list) or not value:
                raise SurgeryError(f"{do} takes a list of names as {key!r}, such as [a, b], not {shown(value)}")
            given[key] = [one(name) for name in value]
        elif kind is dict:
            if not isinstance(value, dict) or not value:
                example = f"as entries PATTERN: NAME, such as {{head: a}}, not {shown(value)}"
                raise SurgeryError(f"{do} takes {key!r} {example}")
            given[key] = {str(pattern): one(name) for pattern, name in value.items()}
        elif kind is Path:
            given[key] = folder / str(value)
            if not given[key].exists():
                raise SurgeryError(f"there is no file {given[key]}, which is to be the {key} of {do}")
    return given
