"""The models that can be trained: the zoo's for images and for text, any image classifier of timm and torchvision by
name, and users' own.
"""

import copy
import dataclasses
from functools import lru_cache
from typing import Any

import torch
from torch import nn

import zoo
from fl.base.errors import FLError, ask_memory, code_of
from fl.data.inputs import map_inputs
from fl.models import custom_model
from fl.models.library import spec_class
from surgery import SurgeryError, narrow, sections, state, ungraft
from surgery.errors import first_line


def make_spec(
    name: str,
    num_classes: int | None = None,
    in_channels: int | None = None,
    image_size: int | None = None,
    width: float | tuple[float, ...] = 1.0,
    depth: int | tuple[int, ...] | None = None,
    norm: str | None = None,
    stem: str | None = None,
    tokens: int | None = None,
    dropout: float | None = None,
    exits: bool = False,
) -> zoo.Spec:
    """Make the spec of a model that can be trained on such images or text.

    Args:
        name: of the zoo, timm:NAME or torchvision:NAME; for a model of your own, this only checks the settings, and
            nothing can be built of the result (see `custom_model.describe`).
        width, depth, norm, stem: see `zoo.Spec`; a library's models have one width, at most 1, and their own norms and
            stems.
        tokens: the length of sequences, for text; None for images.
        dropout: its rate; None is the model's own.
        exits: whether there is a classifier after each section, see `zoo.Spec`.

    Raises:
        FLError: for an unknown name, for a width, depth or norm that the model cannot have, and for text with a model
            of images or the other way round.

    >>> make_spec("vgg11", 10, image_size=32).dropout, make_spec("vgg11", 10, image_size=32, dropout=0.1).dropout
    (0.5, 0.1)
    """
    try:
        if custom_model.is_custom(name):
            for flag, value in (("norm", norm), ("stem", stem), ("dropout", dropout)):
                if value is not None:
                    raise FLError(
                        f"--{flag} {value} is for models of the zoo, not for your own ({name}): leave it out",
                        code="unsupported",
                    )
            if exits:
                raise FLError(
                    f"--exits is for models of the zoo, not for your own ({name}): leave it out, and give the module "
                    "an attribute exits = True if it returns [n, exits, classes] in training",
                    code="unsupported",
                )
            if name != custom_model.GIVEN:
                custom_model.by_name(name)
            return custom_model.CustomSpec(name, width=width, depth=depth)
        kind = spec_class(name)
        takes = kind(name).architecture.defaults
        if "tokens" in takes and tokens is None:
            raise FLError(
                f"--model {name} is made for text, whose labels are the next tokens, and these data have one label a "
                "sample: choose --dataset pydoc, say, or another --model",
                code="unsupported",
            )
        if "tokens" not in takes and tokens is not None:
            raise FLError(
                f"--model {name} is made for images, and the data set is text: choose --model transformer",
                code="unsupported",
            )
        if ":" in name and norm is not None:
            raise FLError(
                f"--norm {norm}: {name} brings its own norm layers; leave --norm out, or take a zoo model",
                code="unsupported",
            )
        if stem is not None and "stem" not in takes:
            raise FLError(
                f"--stem {stem}: {name} has one stem only; leave it out, or choose another model", code="unsupported"
            )
        if dropout is not None and "dropout" not in takes:
            raise FLError(
                f"--dropout {dropout:g}: {name} has no dropout to set; leave it out, or choose another model",
                code="unsupported",
            )
        if exits and "exits" not in takes:
            able = [candidate for candidate in zoo.names() if "exits" in zoo.Spec(candidate).architecture.defaults]
            raise FLError(
                f"--exits: {name} cannot have exits; leave it out, or choose one of {', '.join(able)}",
                code="unsupported",
            )
        return kind(
            name, num_classes, in_channels, image_size, tokens=tokens, width=width, depth=depth, norm=norm, stem=stem,
            dropout=dropout, exits=exits or None,
        )  # fmt: skip
    except zoo.ZooError as error:
        known = ":" in name or name in zoo.names()
        more = "" if known else "; --model takes timm:NAME, torchvision:NAME and my_module:MyNet, too"
        raise FLError(f"{error}{more}", code=error.code) from None


def takes_text(name: str) -> bool:
    """Return whether a model is made for text.

    >>> takes_text("transformer"), takes_text("cnn")
    (True, False)
    """
    return name in zoo.names() and "tokens" in zoo.Spec(name).architecture.defaults


def create(generator: torch.Generator, spec: zoo.Spec) -> nn.Module:
    """Build the model of a spec.

    A library's or a user's is made shallow by `surgery.ungraft` and narrow by `surgery.narrow`.

    Args:
        generator: the initial weights depend only on it; no global generator is changed.

    Raises:
        FLError: if the model does not take such images.

    >>> net = create(torch.Generator(), make_spec("torchvision:resnet18", 10, in_channels=1, image_size=8, width=0.25))
    >>> net.conv1
    Conv2d(1, 16, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
    """
    try:
        if spec.architecture.depth is not None:
            ask_memory(
                weight_bytes(spec),
                f"{custom_model.name_of(spec.name)} of this size",
                "use a smaller --width or --depth",
            )
            return spec.build(generator)
        model = dataclasses.replace(spec, width=1.0, depth=None).build(generator)
        if not isinstance(spec, custom_model.CustomSpec):  # which are checked with the data
            _check_runs(spec, model)
        return cut(spec, model)
    except zoo.ZooError as error:
        raise FLError(str(error), code=error.code) from None
    except SurgeryError as error:
        raise FLError(f"{custom_model.name_of(spec.name)}: {error}", code=code_of(error)) from None


def cut(spec: zoo.Spec, model: nn.Module) -> nn.Module:
    """Cut the part that a spec describes out of a library's full model.

    Raises SurgeryError for a model that cannot be cut like this.
    """
    if spec.depth is not None:
        parts = sections(model, example=spec.example(2))
        if not parts:
            raise FLError(f"{spec.name} has no sections of blocks, so that no depth can be chosen", code="unsupported")
        depth = spec.depth * len(parts) if len(spec.depth) == 1 else spec.depth  # one number is meant for all
        model, _ = ungraft(model, keep=depth, example=spec.example(2))
    rate = spec.width[0]
    return narrow(model, rate, spec.example(2))[0] if rate < 1 else model


def weight_bytes(spec: zoo.Spec) -> int:
    """Count the bytes of a zoo model's parameters and buffers, without building it.

    It is 0 for a library's or a user's model.
    """
    return 0 if spec.architecture.depth is None else _weight_bytes(spec)


@lru_cache(maxsize=1024)
def _weight_bytes(spec: zoo.Spec) -> int:  # never of a user's, whose spec would keep the model in memory
    return sum(tensor.nbytes for tensor in state(spec.build(device="meta")).values())


def _check_runs(spec: zoo.Spec, model: nn.Module) -> None:
    """Raise FLError unless training mode gives logits [2, classes].

    The model does not change.
    """
    images = spec.example(2)
    output = _output(spec, model, images, "choose another model")
    if not isinstance(output, torch.Tensor) or output.shape != (len(images), spec.num_classes):
        actual = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise FLError(
            f"{custom_model.name_of(spec.name)} is no plain classifier (it gives {actual} in training): choose "
            "another one",
            code="unsupported",
        )


def check_shape(spec: zoo.Spec, model: nn.Module, sample: Any) -> None:
    """Raise FLError unless a model for square images takes samples of this shape."""
    if isinstance(sample, dict) or len(sample) != 3:
        raise FLError(
            f"{custom_model.name_of(spec.name)} takes images, and samples are {map_inputs(list, sample)}: give a model "
            "of your own, as in fl.simulate(..., model=...) or --model my_module:MyNet",
            code="unsupported",
        )
    if sample[1] != sample[2]:
        images = torch.zeros(2, *sample, device=next(model.parameters()).device)
        _output(
            spec, model, images, "it is made for square ones; make them square, or choose another, such as resnet20"
        )


def _output(spec: zoo.Spec, model: nn.Module, images: torch.Tensor, way: str) -> Any:
    """Run a copy of a model in training mode; FLError with a way out if it fails."""
    try:
        with torch.no_grad():
            return copy.deepcopy(model).train()(images)
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError, ZeroDivisionError) as error:
        shape = "x".join(map(str, images.shape[1:]))
        raise FLError(
            f"{custom_model.name_of(spec.name)} cannot take images of {shape}: {first_line(error)}; {way}",
            code="unsupported",
        ) from None
