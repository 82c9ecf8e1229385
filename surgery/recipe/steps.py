"""The steps of a recipe. What needs no weights is planned before anything is read: its results are lazy states."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError
from surgery.operations.subject import Subject
from surgery.operations.table import OPERATIONS, PATHS, SUBJECTS, check_arguments
from surgery.operations.texts import shown
from surgery.recipe.reading import Recipe


def planned(recipe: Recipe, folder: Path, before: Callable[[], None]) -> tuple[dict[str, Subject], dict[str, Subject]]:
    """The inputs and the results of all steps by name.

    Names and arguments of all steps are checked first. Then each step is planned in turn: what it computes is computed
    when it is written, other than by steps that decide by the weights (prune, align, ...), which read them now, after
    `before` was called.

    Raises:
        SurgeryError: that names the step, for an unknown operation or argument, for a name that is no input and no
            earlier step, and for everything that the operation refuses.
    """
    _check(recipe)
    inputs = {name: Subject.open(one.path, one.model, one.shape) for name, one in recipe.inputs.items()}
    for one in inputs.values():
        one.before = before
    results: dict[str, Subject] = {}
    for name, step in recipe.steps.items():
        try:
            made = OPERATIONS[step["do"]](**_given(step, {**inputs, **results}, folder))
        except SurgeryError as error:
            raise SurgeryError(f"step {name!r}: {error}") from None
        for place, one in {name: made}.items() if isinstance(made, Subject) else _numbered(name, made):
            one.what = f"{place!r}"
            results[place] = one
    return inputs, results


def _numbered(name: str, made: list[Subject]) -> list[tuple[str, Subject]]:
    return [(f"{name}.{k}", one) for k, one in enumerate(made)]


def _check(recipe: Recipe) -> None:
    """SurgeryError for what can be seen before a file is opened: operations, arguments, and names in them."""
    known = list(recipe.inputs)
    for name, step in recipe.steps.items():
        given = {key: value for key, value in step.items() if key != "do"}
        try:
            check_arguments(step["do"], given)
            for key in SUBJECTS:
                if key in given:
                    _found(step["do"], key, given[key], dict.fromkeys(known))
        except SurgeryError as error:
            raise SurgeryError(f"step {name!r}: {error}") from None
        several = step["do"] == "shuffle" and isinstance(step["models"], list)
        known += [f"{name}.{k}" for k in range(len(step["models"]))] if several else [name]
    for path, name in recipe.outputs.items():
        if name not in known:
            raise SurgeryError(f"output {path.name}: there is no step {name!r}; there are {', '.join(known)}")
    if twice := [name for name in known if known.count(name) > 1]:
        raise SurgeryError(f"{twice[0]!r} is there twice, as a step and as a result of shuffle: rename the step")


def _given(step: Mapping[str, Any], known: Mapping[str, Subject], folder: Path) -> dict[str, Any]:
    """The arguments of a step, with checkpoints and paths for their names."""
    given = {key: value for key, value in step.items() if key != "do"}
    for key in given.keys() & set(SUBJECTS):
        given[key] = _found(step["do"], key, given[key], known)
    for key in given.keys() & set(PATHS):
        given[key] = folder / str(given[key])
        if not given[key].is_file():
            raise SurgeryError(f"there is no file {given[key]}, which is to be the {key} of {step['do']}")
    return given


def _found(do: str, key: str, value: Any, known: Mapping[str, Any]) -> Any:
    """The checkpoints that an argument names: a list for `models`, by pattern for `others`, else a single one."""
    if key == "models":
        if not isinstance(value, list) or not value:
            raise SurgeryError(f"{do} takes a list of names as {key!r}, such as [a, b], not {shown(value)}")
        return [_one(do, name, known) for name in value]
    if key == "others":
        if not isinstance(value, dict) or not value:
            raise SurgeryError(f"{do} takes {key!r} as entries PATTERN: NAME, such as {{head: a}}, not {shown(value)}")
        return {str(pattern): _one(do, name, known) for pattern, name in value.items()}
    return _one(do, value, known)


def _one(do: str, name: Any, known: Mapping[str, Any]) -> Any:
    if not isinstance(name, str):
        raise SurgeryError(f"{do} takes names of inputs and steps, not {shown(name)}")
    if name not in known:
        raise SurgeryError(f"{name!r} is no input and no earlier step; there are {', '.join(known)}")
    return known[name]
