"""Checkpoints of a run: a file of the server's tensors, round and best model."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

import zoo
from fl import data
from fl.algorithms.algorithm import Server
from fl.base import tensors as files
from fl.base.errors import FLError
from fl.engine.constants import digest
from fl.federation import Federation
from fl.models import custom_model
from fl.models.custom_model import CustomSpec, Model
from fl.models.fleet import ClientArchitecture
from fl.models.library import spec_class
from fl.settings import Config
from surgery import State, SurgeryError
from surgery.states import check_same
from zoo import Spec

FILE = "checkpoint.safetensors"
_FORMAT = "checkpoint-3"
_STATISTICS, _BEST = "statistics", "best"  # stored beside the parts of the server


class Best(NamedTuple):
    """The best model so far, as --keep-best stores it.

    It has the round, and parts of the server, with `statistics`.
    """

    round: int
    parts: Server


def save(
    folder: Path,
    server: Server,
    round: int,
    spec: Spec,
    statistics: State,
    settings: Mapping[str, Any] | None = None,
    *,
    rows: Sequence[str] | None = None,
    backends: Mapping[str, str] | None = None,
    best: Best | None = None,
    given: Mapping[str, Any] | None = None,
) -> None:
    """Write the checkpoint of a run folder atomically.

    A reader finds either the old one or the new one, complete. The checkpoint is one file of `fl.base.tensors`, so that
    tensors, round and best model always belong together, with tensors named `part/tensor`, the best model's
    `best/part/tensor`.

    Args:
        spec: of the model.
        statistics: of the global model's static batch norms, if it has any.
        settings: those that the run must keep, see `fl.runs.folder.list_fixed`.
        rows: `fl.runs.metrics.checksums` of the table's rows; None: the table is not compared.
        backends: what --backend auto has chosen.
        best: of a run with --keep-best.
        given: which data and model of a user's own the run needs, see `identify_inputs`.
    """
    if taken := {_STATISTICS, _BEST} & server.keys():
        raise FLError(
            f"a server has no part called {taken.pop()!r}: that is a name of what checkpoints keep beside it",
            code="name",
        )
    parts = flatten({**server, _STATISTICS: statistics})
    if best:
        parts |= flatten({_BEST: flatten(best.parts)})
    header = {
        "round": round,
        "model": dataclasses.asdict(spec),
        "settings": dict(settings or {}),
        "rows": None if rows is None else list(rows),
        "backends": dict(sorted((backends or {}).items())),
        "best": best.round if best else None,
        "given": dict(given or {}),
    }
    files.write(folder / FILE, _FORMAT, parts, header)


def restore(folder: Path, like: Server, spec: Spec) -> tuple[Server, int]:
    """Read (server, round) from a run folder.

    Args:
        like: a server of the same method and model, `algorithm.init()`; the result has its devices and dtypes.
        spec: of the model.

    Raises:
        FLError: if the file is missing, damaged, of another format, or holds another model or method.
    """
    parts, header = _read(folder)
    other = f"{folder / FILE} holds another model"
    for name, now in json.loads(json.dumps(dataclasses.asdict(spec))).items():
        if (was := header["model"].get(name)) != now:
            raise FLError(f"{other}: {name} was {was}, the settings now mean {now}; start a new run", code="folder")
    expected, stored = flatten(like), flatten({part: state for part, state in parts.items() if part != _STATISTICS})
    try:
        check_same(expected, stored, "this run", "the checkpoint")
    except SurgeryError as error:
        raise FLError(f"{other}: {error}", code="folder") from None
    for name, tensor in expected.items():
        if (was := stored[name].dtype) != tensor.dtype:
            raise FLError(
                f"{other}: {name} is {was} there, and {tensor.dtype} in this run; start a new run", code="folder"
            )
    server = {part: {name: parts[part][name].to(now) for name, now in state.items()} for part, state in like.items()}
    return server, header["round"]


def read_best(folder: Path) -> Best | None:
    """Read the best model that a run folder keeps; None if it keeps none."""
    round = read_header(folder)["best"]
    return None if round is None else Best(round, _read(folder, best=True)[0])


def read_model(folder: Path, model: Model | None = None, *, best: bool = False) -> tuple[Spec, State]:
    """Read (spec, state) of a run's global model, with static batch norms' statistics.

    Args:
        model: the user's model, if it was given from Python.
        best: the one that --keep-best has kept.
    """
    spec, parts = read_parts(folder, model, best=best)
    if "global" not in parts:
        raise FLError(
            f"{folder / FILE} holds no global model: put back a copy of the file, or train again", code="file"
        )
    return spec, parts["global"] | parts.get(_STATISTICS, {})


def read_parts(folder: Path, model: Model | None = None, *, best: bool = False) -> tuple[Spec, dict[str, State]]:
    """Read the model's spec and all parts of the server.

    The arguments are as of `read_model`.
    """
    parts, header = _read(folder, best)
    try:
        return spec_of(folder, header["model"], header["given"].get("model"), model), parts
    except (zoo.ZooError, TypeError) as error:
        raise FLError(
            f"{folder / FILE} holds a model that this version does not have ({error}): use the version that trained it",
            code="file",
        ) from None


def read_parts_of_one(folder: Path, model: Model | None = None) -> tuple[Spec, dict[str, State]]:
    """Read as `read_parts`, for the given one of several models that clients have."""
    parts, header = _read(folder, best=False)
    inputs = header["given"]
    if not inputs.get("models"):
        return read_parts(folder, model)
    if model is None or custom_model.first(model) is not model:
        raise FLError(
            f"{folder} holds a run of {1 + len(inputs['models'])} architectures: give the one that the new clients "
            "have, as model=models[1]"
        )
    for known in (inputs["model"], *inputs["models"]):
        with suppress(FLError):
            return spec_of(folder, header["model"], known, model), parts
    raise FLError(
        f"{folder} holds a run of other architectures than this {type(model).__name__}: give one of them", code="folder"
    )


def read_header(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint keeps beside its tensors.

    It has the arguments of `save` that are not tensors, by their names, but the spec as `model`, and only the round of
    `best`.
    """
    return files.read_header(folder / FILE, _FORMAT)


def identify_inputs(config: Config, fed: Federation) -> dict[str, Any]:
    """Identify a user's own data and models that a run needs, in JSON.

    The settings name such data `given`, `my_module:load` or `csv:FILE`, which does not say what they hold; likewise
    models. "data" and "model" are None for data and models that fl knows by name. "base" is a digest of the model's
    constants.
    """
    return {
        "data": data.fingerprint(fed.data) if data.may_change(config.data.dataset) else None,
        "model": custom_model.identity(fed.spec) if isinstance(fed.spec, custom_model.CustomSpec) else None,
        "models": [custom_model.identity(kind.spec) for kind in _list_own_models(fed)],
        "base": digest(fed.model),
    }


def _list_own_models(fed: Federation) -> list[ClientArchitecture]:
    """Return the clients' own architectures beside the first, of models of several."""
    kinds = fed.fleet.architectures if fed.fleet else ()
    return [kind for kind in kinds[1:] if kind.plan is None and isinstance(kind.spec, CustomSpec)]


def check_base(folder: Path, model: nn.Module) -> None:
    """Raise FLError unless a model has the constants that a run folder's has."""
    if read_header(folder)["given"].get("base") != digest(model):
        raise FLError(
            f"{folder} holds a run beside other weights: give the model or the --init that it began with", code="folder"
        )


def check_inputs(folder: Path, fed: Federation, now: Mapping[str, Any]) -> None:
    """Raise FLError if a run folder's data or model are other ones than `now`.

    `now` is the `identify_inputs` of the run that is to resume; the message says in what they differ.
    """
    known = read_header(folder)["given"]
    before, data_now, model = known.get("data"), now["data"], known.get("model")
    if (before is None) != (data_now is None):
        which = (
            "a data set by name" if before is None else "data of your own, with " + " ".join(next(iter(before.items())))
        )
        raise FLError(f"{folder} holds a run on {which}: resume it with that, or start a new run", code="folder")
    for part in (*before, *data_now) if before else ():
        if (was := before.get(part)) != (is_now := data_now.get(part)):
            how = (
                "of the same shapes, and with other values"
                if part == "sha256"
                else f"{part} was {was}, and is {is_now}"
            )
            raise FLError(f"{folder} holds a run on other data: {how}", code="folder")
    if (model is None) != (now["model"] is None):
        which = "a model by name" if model is None else f"the model {model['class']}, given"
        raise FLError(f"{folder} holds a run of {which}: resume it with that, or start a new run", code="folder")
    if model:
        custom_model.check_same(fed.spec.full(), model, str(folder))
    models, before = _list_own_models(fed), known.get("models", [])
    if len(models) != len(before):
        raise FLError(
            f"{folder} holds a run of {len(before) + 1} models, and these are {len(models) + 1}: give the same",
            code="folder",
        )
    for kind, was in zip(models, before):
        custom_model.check_same(kind.spec.full(), was, str(folder))
    check_base(folder, fed.model)


def spec_of(
    where: Path, values: Mapping[str, Any], known: Mapping[str, Any] | None, model: Model | None = None
) -> Spec:
    """Return the spec of a model from its fields in a checkpoint or pathways.

    Args:
        where: the run folder or the file.
        known: the identity of a user's own model in that file, as `identify_inputs` returns it.
        model: the user's model, if it has no name to find it by.

    Raises:
        FLError: if the model is needed and not given, or is another one; ZooError for fields that no model has.
    """
    name = str(values.get("name"))
    # None: another version's field, say
    arguments = {field: value for field, value in values.items() if value is not None}
    if not custom_model.is_custom(name):
        if model is not None:
            raise FLError(f"{where} holds the model {name}, which is found by its name: leave model= out")
        return spec_class(values.get("name")).from_dict(arguments)
    if model is None and name.partition(":")[0] == custom_model.GIVEN:
        raise FLError(f"{where} holds a model of your own, {known['class']}: give it from Python, as model=...")
    return custom_model.restore(arguments, known, str(where), model)


def flatten(server: Server) -> dict[str, Tensor]:
    """Put all tensors of a server under `part/name`."""
    return {f"{part}/{name}": tensor for part, state in server.items() for name, tensor in state.items()}


def unflatten(tensors: dict[str, Tensor]) -> dict[str, State]:
    """Undo `flatten`.

    >>> import torch
    >>> unflatten({"a/b/c": torch.ones(1)})
    {'a': {'b/c': tensor([1.])}}
    """
    parts: dict[str, State] = {}
    for key, tensor in tensors.items():
        part, name = key.split("/", 1)
        parts.setdefault(part, {})[name] = tensor
    return parts


def _read(folder: Path, best: bool = False) -> tuple[dict[str, State], dict[str, Any]]:
    """Return the server, or the best model, with `statistics`; and the header."""
    tensors, header = files.read(folder / FILE, _FORMAT)
    parts = unflatten(tensors)
    best_parts = unflatten(parts.pop(_BEST, {}))
    return best_parts if best else parts, header
