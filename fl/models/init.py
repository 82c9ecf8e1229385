"""The weights that a run begins with, if they are not random: from a file, or as timm and torchvision publish them,
fitted to its model.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import surgery
import zoo
from fl.base.errors import FLError, code_of
from fl.base.tensors import sha256_of
from fl.models.create import create, cut
from fl.models.custom_model import LIBRARIES, CustomSpec, is_custom, name_of
from fl.models.fleet import plan_within
from fl.models.library import counterpart, fetch
from surgery import State, SurgeryError
from surgery.errors import first_line
from zoo import weights

SUFFIXES = (".safetensors", ".pt", ".pth")


def check_init(init: str, model: str) -> None:
    """Raise FLError unless --init has a form that `find` takes. Nothing is opened.

    >>> check_init("timm", "resnet18")
    >>> try:
    ...     check_init("weights.txt", "resnet18")
    ... except FLError as error:
    ...     print(error)
    --init weights.txt: give timm, torchvision or a file *.safetensors, *.pt or *.pth
    """
    if init not in LIBRARIES and Path(init).suffix not in SUFFIXES:
        raise FLError(f"--init {init}: give timm, torchvision or a file *.safetensors, *.pt or *.pth")
    if init in LIBRARIES and is_custom(model):
        raise FLError(
            f"--init {init}: {init} publishes no weights for a model of your own ({name_of(model)}): save "
            f"a state_dict() with the names of your model to a file, and give --init FILE.pt; or choose "
            f"--model {init}:NAME",
            code="unsupported",
        )


def _read(init: str, spec: zoo.Spec) -> tuple[dict[str, Tensor], str, str]:
    """Read the weights that --init names, under the names that their source gives them, with that source (a file, or
    timm:NAME or torchvision:NAME) and its SHA-256 (of the file; of weights that a library fetched, of their names and
    values).
    """
    check_init(init, spec.name)
    if init in LIBRARIES:
        try:
            name = counterpart(init, spec)
            tensors = fetch(init, name).state_dict()
        except FLError as error:
            raise FLError(f"--init {init}: {error} (--init FILE.safetensors, .pt or .pth)", code=error.code) from None
        return tensors, f"{init}:{name}", sha256_of(tensors)
    try:
        tensors = weights.read(init)
    except zoo.ZooError as error:
        raise FLError(f"--init {error}", code=error.code) from None
    if any("/" in name for name in tensors):
        raise FLError(
            f"--init {init} is a checkpoint: give the file that `python -m fl.export RUN FILE` makes of it", code="file"
        )
    with open(init, "rb") as file:
        return tensors, init, hashlib.file_digest(file, "sha256").hexdigest()


class Start(NamedTuple):
    """Trained weights under the names, and in the shapes, of a run's model.

    Attributes:
        taken: the tensors that come from the source; all others are initialised as usual.
        source: where they come from: a file, timm:NAME or torchvision:NAME. sha256: see `_read`.
        left: the tensors of the classifier, if it is another one there and is initialised.
        summed: the tensors that are summed over their input channels.
    """

    taken: State
    source: str
    sha256: str
    left: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()

    def describe(self) -> str:
        """Say in one line where the weights come from, and what was not taken."""
        line = f"the model begins from {self.source} (sha256 {self.sha256[:12]})"
        if self.left:
            line += f"; its classifier ({', '.join(self.left)}) is not there, or for other classes, and stays random"
        if self.summed:
            line += f"; {', '.join(self.summed)} is summed over its 3 input channels, as the images are grey"
        return line

    def create(self, generator: torch.Generator, spec: zoo.Spec) -> nn.Module:
        """Create a spec's model with these weights; the generator initialises the rest."""
        model = create(generator, spec)
        try:
            strange = model.load_state_dict(self.taken, strict=False).unexpected_keys
        except RuntimeError as error:
            raise FLError(
                f"the weights of {self.source} are of another model: {first_line(error)}", code="mismatch"
            ) from None
        if strange:
            raise FLError(
                f"the weights of {self.source} are of another model: {name_of(spec.name)} has no {strange[0]}",
                code="mismatch",
            )
        return model


def find(init: str, spec: zoo.Spec) -> Start:
    """Read the weights that --init names, and fit them to the model of a spec.

    They may be of the model itself, or of the same model at full width and depth. It then gets its part: the same
    channels and blocks that `surgery.narrow` and `ungraft` keep, or for a model of the zoo `narrow(..., like=)`.
    Models of the zoo also take the layouts that `zoo.load` knows; a model of one's own takes the names of its own state
    dict. A classifier for other classes, or none, keeps its initial weights, and so do all exits where the weights are
    of a model with one classifier. A first layer for colours is summed over them where images are grey, but in a model
    of one's own. Nothing else may differ.

    Raises:
        FLError: for a file that cannot be read or holds no weights; if the library publishes none for the model, or
            they cannot be fetched; and naming the tensors that do not fit.
    """
    tensors, source, sha256 = _read(init, spec)
    full, misfits = replace(spec, width=1.0, depth=None), []
    for whole in dict.fromkeys((spec, full)):
        try:
            taken, left, summed = _fit(tensors, whole)
        except _Misfit as error:
            misfits.append(error)
            continue
        if whole != spec:
            taken, left = _part(taken, full, spec), [name for name in left if name in _layout(spec)]
        taken = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in taken.items()}
        taken = {name: tensor for name, tensor in taken.items() if name not in left}
        return Start(taken, source, sha256, tuple(left), tuple(summed))
    which = name_of(spec.name) + (", neither as it is nor at full width and depth" if spec != full else "")
    why = min(misfits, key=lambda misfit: misfit.count)
    patches = "position" in str(why) and not isinstance(spec, CustomSpec) and "stem" in spec.architecture.defaults
    hint = (
        "; positions depend on the size of images and of their patches: --stem imagenet has patches of 16x16 pixels, "
        "--stem cifar of 4x4, and --pad enlarges images"
    ) * patches
    raise FLError(f"--init {source} does not fit {which}: {why}{hint}", code="mismatch")


class _Misfit(Exception):
    """The reason why weights do not fit a model; `count` is how many do not."""

    def __init__(self, text: str, count: float) -> None:
        super().__init__(text)
        self.count = count


def _fit(tensors: Mapping[str, Tensor], spec: zoo.Spec) -> tuple[State, list[str], list[str]]:
    """Rename tensors as in a spec's model; list the unused and the summed ones.

    Raises:
        _Misfit: naming the tensors that do not fit.
    """
    layout = _layout(spec)
    tensors = _rename(tensors, spec, layout)
    missing = [name for name in layout if name not in tensors and not _optional(name)]
    strange = [name for name in tensors if name not in layout and not _optional(name)]
    unequal = [name for name in layout if name in tensors and tensors[name].shape != layout[name].shape]
    heads = _heads(spec) if missing or unequal else frozenset()
    left = _list_left(tensors, {name: layout[name] for name in layout if name in heads})
    stems = _list_varying(spec, in_channels=3) if spec.in_channels == 1 and unequal else frozenset()
    summed = [
        name
        for name in unequal
        if name in stems and tensors[name].shape == (len(layout[name]), 3, *layout[name].shape[2:])
    ]
    problems = _list("it lacks", [name for name in missing if name not in left])
    problems += _list("the model has no", strange)
    other = [name for name in unequal if name not in (*left, *summed)]
    problems += _list("shapes differ:", [f"{n} {list(tensors[n].shape)} for {list(layout[n].shape)}" for n in other])
    kinds = [n for n in layout if n in tensors and tensors[n].is_floating_point() != layout[n].is_floating_point()]
    problems += _list("other kinds of numbers:", [f"{n} {tensors[n].dtype}" for n in kinds])
    problems += _list(
        "numbers that are not finite:", [n for n in layout if n in tensors and not tensors[n].isfinite().all()]
    )
    if problems:
        raise _Misfit("; ".join(problems), len(missing) + len(strange) + len(other) + 1)
    taken = {name: tensors[name] for name in layout if name in tensors and name not in left}
    for name in summed:
        taken[name] = taken[name].sum(1, keepdim=True)
    return {name: tensor.to(layout[name].dtype) for name, tensor in taken.items()}, left, summed


def _list_left(tensors: Mapping[str, Tensor], heads: State) -> list[str]:
    """List the classifier's tensors if it is for other classes, or missing.

    There are none if it is another layer.
    """
    there = [tensors.get(name) for name in heads]
    if all(tensor is None for tensor in there):
        return list(heads)
    same = all(t is not None and t.shape[1:] == layout.shape[1:] for t, layout in zip(there, heads.values()))
    classes = {len(tensor) for tensor in there if same}
    return list(heads) if len(classes) == 1 and classes != {len(layout) for layout in heads.values()} else []


def _optional(name: str) -> bool:
    """Return whether weights may come without this tensor.

    It is a norm's counter of steps, or NeFL's step size (1 at first).
    """
    return name.endswith(("num_batches_tracked", ".step"))


def _list(heading: str, names: list[str], most: int = 3) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{heading} {', '.join(names[:most])}{more}"]


def _rename(tensors: Mapping[str, Tensor], spec: zoo.Spec, layout: State) -> Mapping[str, Tensor]:
    """Rename tensors as in the zoo's model, if they are its counterpart's."""
    if not _foreign(spec) and spec.exits and not any(name.startswith("exit") for name in tensors):
        return _without_classifier(tensors, spec)
    if _foreign(spec) or 2 * len(layout.keys() & tensors.keys()) >= len(layout):
        return tensors
    plain = {name: False for name in ("scaler", "step_size") if name in spec.architecture.defaults}
    if spec.tokens is None:
        plain["num_classes"] = weights.classes(tensors) or spec.num_classes
    errors = []
    for channels in dict.fromkeys((3, spec.in_channels) if spec.tokens is None else (None,)):
        try:
            model = zoo.load(replace(spec, **plain, in_channels=channels).build(device="meta"), tensors)
            return {name: tensor for name, tensor in model.state_dict().items() if name in layout}
        except zoo.ZooError as error:
            errors.append(error)
    raise _Misfit(str(errors[0]), float("inf")) from None


def _without_classifier(tensors: Mapping[str, Tensor], spec: zoo.Spec) -> Mapping[str, Tensor]:
    """Rename the weights of a model with one classifier for the model with exits.

    The classifier itself is left out.
    """
    try:
        plain = replace(spec, exits=False)
    except zoo.ZooError as error:  # it ends after an earlier section
        raise _Misfit(str(error), float("inf")) from None
    heads = _heads(plain)
    return {name: tensor for name, tensor in _rename(tensors, plain, _layout(plain)).items() if name not in heads}


def _part(taken: State, full: zoo.Spec, spec: zoo.Spec) -> State:
    """Cut the tensors of a spec's model out of the full model's."""
    model = full.build(torch.Generator())
    model.load_state_dict(taken, strict=False)
    try:
        if _foreign(spec):
            return cut(spec, model).state_dict()
        return plan_within(model, spec.build(torch.Generator()), stand="none").extract(surgery.state(model))
    except SurgeryError as error:
        raise FLError(
            f"--init: the weights cannot be cut for {name_of(spec.name)}: {error}", code=code_of(error)
        ) from None


def _foreign(spec: zoo.Spec) -> bool:
    """Return whether a model is a library's or a user's, made narrow by cutting."""
    return spec.architecture.depth is None


def _heads(spec: zoo.Spec) -> frozenset[str]:
    """Name the tensors of a model's classifier; none for text."""
    if isinstance(spec, CustomSpec):
        return frozenset() if spec.targets else spec.classifier()
    return _list_varying(spec, num_classes=spec.num_classes + 1)


def _list_varying(spec: zoo.Spec, **change: int) -> frozenset[str]:
    """Name the tensors of a spec's model that depend on a field; none for text."""
    if spec.tokens is not None:
        return frozenset()
    layout, other = _layout(spec), _layout(replace(spec, **change))
    return frozenset(name for name in layout if name not in other or layout[name].shape != other[name].shape)


@lru_cache(maxsize=8)
def _layout(spec: zoo.Spec) -> State:
    """Return the state of a spec's model, on the meta device."""
    if not _foreign(spec) or spec == replace(spec, width=1.0, depth=None):
        with suppress(zoo.ZooError, FLError, RuntimeError, NotImplementedError):  # a constructor may need numbers
            return spec.build(device="meta").state_dict()
    return {name: t.to("meta") for name, t in create(torch.Generator(), spec).state_dict().items()}


def maker(spec: zoo.Spec, start: Start | None) -> Callable[[torch.Generator], nn.Module]:
    """Make a function of a generator that creates a model with the initial weights."""
    return lambda generator: start.create(generator, spec) if start else create(generator, spec)
