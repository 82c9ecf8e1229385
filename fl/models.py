"""The models that can be trained: those of the zoo, and any image classifier of timm and torchvision by name."""

import copy

import torch
from torch import nn

import zoo
from fl.errors import FLError
from surgery import SurgeryError
from surgery.errors import first_line
from surgery.named import check_named, named
from surgery.width.narrow import narrow

_RANDOM = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check(name: str, width: float, norm: str | None) -> None:
    """Raise FLError for a model that there is not, or of which this width or these norms cannot be had.

    >>> check("timm:resnet18", 0.5, None)
    """
    if ":" not in name:
        if name not in zoo.names():
            raise FLError(f"unknown model {name!r}: there are {', '.join(zoo.names())}, timm:NAME and torchvision:NAME")
        return
    try:
        check_named(name)
    except SurgeryError as error:
        raise FLError(f"--model {name}: {error}") from None
    if width > 1:
        raise FLError(f"--width {width:g}: {name} can only be made narrower; give a rate up to 1, or a larger model")
    if norm is not None:
        raise FLError(f"--norm {norm}: {name} brings its own norm layers; leave --norm out, or take {zoo.names()[0]}")


def create(
    generator: torch.Generator,
    name: str,
    num_classes: int,
    in_channels: int,
    image_size: int,
    width: float = 1.0,
    norm: str | None = None,
) -> nn.Module:
    """Build a model of the zoo, or one of timm or torchvision with the initial weights that its library gives it.

    Models of a library are made narrower by `surgery.narrow`. Dropout and stochastic depth are switched off in them:
    they draw from torch's global generator, so that runs could not be repeated.

    Args:
        generator: the weights are a function of it; no global generator is changed.
        width: rate of the hidden widths; at most 1 for models of a library.
        norm: batch, group or none, for models of the zoo.

    Raises:
        FLError: for a name, width or norm that cannot be had, and a model that does not take such images.

    >>> net = create(torch.Generator(), "torchvision:resnet18", 10, in_channels=1, image_size=8, width=0.25)
    >>> net.conv1
    Conv2d(1, 16, kernel_size=(7, 7), stride=(2, 2), padding=(3, 3), bias=False)
    """
    check(name, width, norm)
    if ":" not in name:
        shape = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
        return zoo.create(name, generator, **shape, width=width, norm=norm)
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs as well
        model = _classifier(name, num_classes, in_channels, image_size)
        _switch_off_dropout(model)
        images = torch.zeros(2, in_channels, image_size, image_size)
        _check_runs(name, model, images, num_classes)
        return narrow(model, width, images)[0] if width < 1 else model


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _RANDOM) or type(module).__name__ == "StochasticDepth":  # torchvision's
            module.p = 0.0
        elif type(module).__name__ == "DropPath":  # timm's
            module.drop_prob = 0.0


def _classifier(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """The library's model for such images, told their size where its factory takes one."""
    if name.startswith("timm:"):
        return _sized(name, "img_size", image_size, num_classes=num_classes, in_chans=in_channels)
    model = _sized(name, "image_size", image_size, num_classes=num_classes)
    return model if in_channels == 3 else _grey(name, model, in_channels)


def _sized(name: str, argument: str, size: int, **arguments) -> nn.Module:
    try:
        return named(name, **{argument: size}, **arguments)
    except SurgeryError as error:
        if f"'{argument}'" not in str(error):  # an unexpected keyword is named in quotes
            raise FLError(f"--model {error}; choose a model for images of {size} x {size}") from None
        return named(name, **arguments)


def _grey(name: str, model: nn.Module, channels: int) -> nn.Module:
    """The first convolution summed over colours: does to a grey image what it did to three equal channels."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if channels != 1 or first is None or first.in_channels != 3 or first.groups != 1:
        raise FLError(f"--model {name} takes 3 channels, the data have {channels}: choose a timm model")
    first.weight = nn.Parameter(first.weight.detach().sum(1, keepdim=True))
    first.in_channels = 1
    return model


def _check_runs(name: str, model: nn.Module, images: torch.Tensor, classes: int) -> None:
    """Training mode gives logits [2, classes] for such images; the model does not change."""
    try:
        with torch.no_grad():
            output = copy.deepcopy(model).train()(images)
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError, ZeroDivisionError) as error:
        reason = first_line(error)
        shape = "x".join(map(str, images.shape[1:]))
        raise FLError(f"--model {name} cannot take images of {shape}: {reason}; choose another model") from None
    if not isinstance(output, torch.Tensor) or output.shape != (len(images), classes):
        what = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise FLError(f"--model {name} is no plain classifier (it gives {what} in training): choose another model")
