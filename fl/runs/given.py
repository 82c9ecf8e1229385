"""given.json: which data and which model of a user's own a run needs, so that it goes on with no others.

The settings name such data `given` or `my_module:load`, which does not say what they hold; likewise models. Runs on
data sets and models that this project has by name leave no such file.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl import data
from fl.base.errors import FLError
from fl.base.files import regular, write_json
from fl.config import Config
from fl.federation import Federation
from fl.models import own
from zoo import Spec

FILE = "given.json"


def said(config: Config, dataset: data.Dataset | None, model: own.Model | None) -> Config:
    """The settings of a run on these data with this model: they say what was given, and not found by name, and how many
    samples are held out for a method that needs some. Data that were changed since they were loaded are given.
    """
    if not isinstance(dataset, data.Dataset | None):
        raise FLError(
            f"dataset is a {type(dataset).__name__}: give what fl.Dataset.from_arrays, from_torch or from_huggingface "
            "makes of it"
        )
    if dataset is not None and not config.names(dataset):
        config = replace(config, dataset=data.GIVEN)
    return (config if model is None else replace(config, model=own.GIVEN)).holding_out()


def keep(folder: Path, config: Config, fed: Federation, begun: bool) -> None:
    """Write the file into a run folder, or compare it with the one that is there already.

    Args:
        begun: whether the folder has a checkpoint.

    Raises:
        FLError: if the run in the folder is one of other data or another model; it says in what they differ.
    """
    now = {
        "data": data.fingerprint(fed.data) if data.is_own(config.dataset) else None,
        "model": own.identity(fed.spec) if isinstance(fed.spec, own.OwnSpec) else None,
    }
    known = _read(folder)
    if known is None and begun and any(now.values()):
        raise FLError(
            f"{folder} has no {FILE}: either its run has data and model by name, then resume it without others, or the "
            "file is lost, then put it back"
        )
    if known is not None:
        _check_data(folder, known["data"], now["data"])
        if (known["model"] is None) != (now["model"] is None):
            which = "a model by name" if known["model"] is None else f"the model {known['model']['class']}, given"
            raise FLError(f"{folder} holds a run of {which}: resume it with that, or start a new run")
        if known["model"]:
            own.check_same(fed.spec.full(), known["model"], str(folder))
            _check_samples(folder, known["model"], now["model"])
    elif any(now.values()):
        write_json(folder / FILE, now)


def spec_of(folder: Path, values: Mapping[str, Any], model: own.Model | None = None) -> Spec:
    """The spec of a run folder's model from its fields, as a checkpoint has them.

    Args:
        model: the user's model, if it has no name to find it by.

    Raises:
        FLError: if the model is needed and not given, or is another one; ZooError for fields that no model has.
    """
    name = str(values.get("name"))
    if not own.is_own(name):
        if model is not None:
            raise FLError(f"{folder} holds a run of {name}, which is found by its name: leave model= out")
        return Spec.from_dict(values)
    if (known := _read(folder)) is None or not known["model"]:
        raise FLError(f"{folder} has no {FILE}, which says which model its run needs: put it back")
    if model is None and name.partition(":")[0] == own.GIVEN:
        raise FLError(
            f"{folder} holds a run of a model of your own, {known['model']['class']}: give it, as in "
            f"fl.load_model({str(folder)!r}, model=...) or fl.export({str(folder)!r}, file, model=...)"
        )
    return own.restored(dict(values), known["model"], str(folder), model)


def _check_data(folder: Path, known: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    if known == now:
        return
    if known is None or now is None:
        which = "a data set by name" if known is None else f"data of your own, with x {known['x']}"
        raise FLError(f"{folder} holds a run on {which}: resume it with that, or start a new run")
    part = next(name for name in (*known, *now) if known.get(name) != now.get(name))
    if part == "sha256":
        raise FLError(f"{folder} holds a run on other data: of the same shapes, and with other values")
    raise FLError(f"{folder} holds a run on other data: {part} was {known.get(part)}, and is {now.get(part)}")


def _check_samples(folder: Path, known: dict[str, Any], now: dict[str, Any]) -> None:
    for part in ("sample", "targets", "tokens"):
        if known[part] != now[part]:
            raise FLError(
                f"{folder / FILE} says of the samples that the model takes: {part} {known[part]}, and here they have "
                f"{now[part]}: put back the file that the run left, or start a new run"
            )


def _read(folder: Path) -> dict[str, Any] | None:
    """The content of the file; None if there is none. FLError for one that is damaged, or no regular file."""
    path = folder / FILE
    try:
        found = json.loads(regular(path).read_text())
        if (found["data"] is None or _is_data(found["data"])) and (found["model"] is None or _is_model(found["model"])):
            return found
    except FileNotFoundError:
        return None
    except FLError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise FLError(f"{path} is damaged: put back the one that the run left, or start a new run")


def _is_data(said: dict[str, Any]) -> bool:
    """Whether this is what `fl.data.fingerprint` returns."""
    texts = all(type(said[name]) is str for name in ("x", "sha256"))
    return texts and all(type(value) in (str, int) for value in said.values())


def _is_model(said: dict[str, Any]) -> bool:
    """Whether this is what `fl.models.own.identity` returns."""
    texts = all(type(said[name]) is str for name in ("class", "structure"))
    sizes = [said["sample"], said["targets"]]
    counts = all(type(size) is list and all(type(n) is int and n > 0 for n in size) for size in sizes)
    return texts and counts and type(said["tokens"]) is bool
