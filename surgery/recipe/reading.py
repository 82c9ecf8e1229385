"""Read a recipe: inputs, steps and outputs by name."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError, first_line

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


def _loader(yaml: Any) -> type:
    """A safe loader that refuses a key that is there twice, of which YAML would keep the last."""

    class Once(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            found = super().construct_mapping(node, deep)
            if len(found) < len(node.value):
                keys = [key.value for key, _ in node.value]
                twice = next((key for key in keys if keys.count(key) > 1), keys[-1])
                raise yaml.constructor.ConstructorError(
                    problem=f"{twice!r} is there twice", problem_mark=node.start_mark
                )
            return found

    return Once


def read_recipe(path: Path) -> Recipe:
    """The recipe of a YAML file; SurgeryError that names the file and the place for one that is none."""
    import yaml

    try:
        if path.stat().st_size > _LARGEST:
            raise SurgeryError(f"{path} is too large for a recipe")
        text = path.read_text()
        found = yaml.load(text, _loader(yaml))
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        raise SurgeryError(f"{path}{line} is no YAML: {getattr(error, 'problem', None) or first_line(error)}") from None
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
