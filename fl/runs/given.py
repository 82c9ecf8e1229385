"""Which data and which model of a user's own a run needs, so that it goes on with no others: its checkpoint says so.

The settings name such data `given` or `my_module:load`, which does not say what they hold; likewise models.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl import data
from fl.base.errors import FLError
from fl.config import Config
from fl.federation import Federation
from fl.models import custom_model
from zoo import Spec


def said(config: Config, dataset: data.Dataset | None, model: custom_model.Model | None) -> Config:
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
    return (config if model is None else replace(config, model=custom_model.GIVEN)).holding_out()


def identified(config: Config, fed: Federation) -> dict[str, Any]:
    """What a checkpoint keeps of the data and of the model of a run, as JSON has it; None for those by name."""
    return {
        "data": data.fingerprint(fed.data) if data.is_custom(config.dataset) else None,
        "model": custom_model.identity(fed.spec) if isinstance(fed.spec, custom_model.CustomSpec) else None,
    }


def check_given(folder: Path, known: Mapping[str, Any], fed: Federation, now: Mapping[str, Any]) -> None:
    """Raise FLError if a run folder holds a run of other data or another model; it says in what they differ.

    Args:
        known: what the checkpoint in it keeps of them. now: `identified` of the run that is to go on.
    """
    _check_data(folder, known.get("data"), now["data"])
    model = known.get("model")
    if (model is None) != (now["model"] is None):
        which = "a model by name" if model is None else f"the model {model['class']}, given"
        raise FLError(f"{folder} holds a run of {which}: resume it with that, or start a new run")
    if model:
        custom_model.check_same(fed.spec.full(), model, str(folder))


def spec_of(
    where: Path, values: Mapping[str, Any], known: Mapping[str, Any] | None, model: custom_model.Model | None = None
) -> Spec:
    """The spec of a model from its fields, as a checkpoint or a file of pathways has them.

    Args:
        where: the run folder or the file.
        known: what that keeps of a model of the user's own, as `identified` said it.
        model: the user's model, if it has no name to find it by.

    Raises:
        FLError: if the model is needed and not given, or is another one; ZooError for fields that no model has.
    """
    name = str(values.get("name"))
    if not custom_model.is_custom(name):
        if model is not None:
            raise FLError(f"{where} holds the model {name}, which is found by its name: leave model= out")
        return Spec.from_dict(values)
    if model is None and name.partition(":")[0] == custom_model.GIVEN:
        raise FLError(f"{where} holds a model of your own, {known['class']}: give it from Python, as model=...")
    return custom_model.restored(dict(values), known, str(where), model)


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
