"""Image classifiers of timm and torchvision by name, for the classes and images of the data, and the weights that these
libraries publish.

A spec of such a model is a `zoo.Spec` of a class of its own, so that all that takes a spec takes it.
`surgery.libraries.make_model` builds it at full size; `fl.models.create` cuts it.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

import surgery
import zoo
from fl.base.errors import FLError, code_of
from surgery import SurgeryError
from surgery.errors import first_line
from surgery.libraries import check_named
from zoo.architecture import Architecture
from zoo.weights import counterparts

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_OTHERS = {"StochasticDepth": "p", "DropPath": "drop_prob"}  # torchvision's and timm's, known without importing these


class LibrarySpec(zoo.Spec):
    """The spec of a library's model, timm:NAME or torchvision:NAME.

    The library initialises its weights.

    Its dropout is what the library sets, unless it is 0, which switches off all that is dropped at random.

    >>> spec = LibrarySpec("torchvision:resnet18", num_classes=10, in_channels=1, image_size=32)
    >>> spec.build(torch.Generator().manual_seed(0)).fc
    Linear(in_features=512, out_features=10, bias=True)
    """

    @property
    def architecture(self) -> Architecture:
        """The fields of a spec: one width of at most 1, a depth, and what data ask for."""
        return Architecture(None, {"depths": None, **_defaults(self.name)}, self.name.partition(":")[0])

    def build(self, generator: torch.Generator | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """Make the full model, with torch's generator seeded from this one."""
        if self.width != (1.0,) or self.depth is not None:
            raise FLError(
                f"{self.name} is built at full size only: fl.models.create makes it narrow and shallow",
                code="unsupported",
            )
        if self.dropout:
            raise FLError(f"{self.name}: dropout 0 switches all dropout off, and None keeps what the library sets")
        with seeded(generator), torch.device("meta" if torch.device(device).type == "meta" else "cpu"):
            try:
                model = self._make()
            except SurgeryError as error:
                size, why = f"{self.image_size}x{self.image_size}", first_line(error.__cause__ or error)
                raise FLError(f"{self.name} cannot be built for images of {size}: {why}", code="unsupported") from error
            if self.name.startswith("torchvision:") and self.in_channels != 3:
                self._take_grey(model)
        if self.dropout == 0:
            switch_off_dropout(model)
        return model.to(device)

    def _make(self) -> nn.Module:
        """Make the library's model, told the size of the images if it asks for that."""
        size, options = "image_size", {"num_classes": self.num_classes}
        if self.name.startswith("timm:"):
            size, options["in_chans"] = "img_size", self.in_channels
        try:
            return surgery.libraries.make_model(self.name, **options, **{size: self.image_size})
        except SurgeryError as error:
            if not isinstance(error.__cause__, TypeError) or f"'{size}'" not in str(error):
                raise
        return surgery.libraries.make_model(self.name, **options)  # it has no such argument

    def _take_grey(self, model: nn.Module) -> None:
        """Sum the first layer over colours.

        To a grey image it does what it did to three equal channels.
        """
        first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        if self.in_channels != 1 or first is None or first.in_channels != 3 or first.groups != 1:
            raise FLError(
                f"{self.name} takes 3 channels, not {self.in_channels}: choose a timm model", code="unsupported"
            )
        first.weight = nn.Parameter(first.weight.detach().sum(1, keepdim=True))
        first.in_channels = 1


def spec_class(name: Any) -> type[zoo.Spec]:
    """Return the class that describes a model by name, of a library or of the zoo.

    >>> spec_class("timm:resnet18").__name__, spec_class("resnet18").__name__
    ('LibrarySpec', 'Spec')
    """
    return LibrarySpec if isinstance(name, str) and ":" in name else zoo.Spec


@lru_cache
def _defaults(name: str) -> dict[str, Any]:
    """Return the fields of a library model's spec, with their defaults.

    Raises FLError for an unknown name.

    Nothing is built.

    >>> _defaults("timm:resnet18")["image_size"]
    224
    """
    try:
        library, model = check_named(name)
    except SurgeryError as error:
        raise FLError(str(error), code=code_of(error)) from None
    classes, channels, side = 1000, 3, 299 if name == "torchvision:inception_v3" else 224
    if library == "torchvision":
        from torchvision import models

        if model not in models.list_models(module=models):  # those for detection, video, ... are in modules below
            raise FLError(f"{name} is no image classifier: choose another model", code="unsupported")
    else:
        import timm

        try:
            config = timm.get_pretrained_cfg(model)
        except RuntimeError as error:  # an unknown tag
            raise FLError(f"timm has no model {model!r}: {error}", code="name") from None
        if config:
            classes, channels, side = config.num_classes or 1000, config.input_size[0], config.input_size[-1]
    return {"num_classes": classes, "in_channels": channels, "image_size": side, "dropout": None}


@contextmanager
def seeded(generator: torch.Generator | None) -> Iterator[None]:
    """Seed torch's global generator, which models use, within the block.

    Afterwards it is as before.
    """
    with torch.random.fork_rng(devices=[], enabled=generator is not None):
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator))
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
        yield


def switch_off_dropout(model: nn.Module) -> None:
    """Set the rates of all that drops values, or whole branches, at random to 0.

    >>> net = nn.Sequential(nn.Dropout(0.1), nn.ReLU())
    >>> switch_off_dropout(net)
    >>> net[0]
    Dropout(p=0.0, inplace=False)
    """
    for module in model.modules():
        rate = "p" if isinstance(module, _DROPOUTS) else _OTHERS.get(type(module).__name__)
        if rate:
            setattr(module, rate, 0.0)


def counterpart(library: str, spec: zoo.Spec) -> str:
    """Find the name of an architecture in a library that publishes weights for it.

    Raises FLError if it publishes none, with those for which it does.

    >>> counterpart("torchvision", zoo.Spec("mobilenetv2")), counterpart("timm", LibrarySpec("timm:resnet10t"))
    ('mobilenet_v2', 'resnet10t')
    """
    where, _, name = spec.name.rpartition(":")
    if where == library:
        return name
    plain = library == "torchvision" and spec.norm == "none"
    table = counterparts("torchvision_plain" if plain else library)
    known = {ours: theirs for ours, theirs in table.items() if _address(library, theirs)}
    if spec.name not in known:
        which = spec.name + (" without norms" if plain else "")
        raise FLError(
            f"{library} publishes no weights for {which}; it does for {', '.join(known)} and {library}:NAME. Choose "
            "one of them, or give a file",
            code="name",
        )
    return known[spec.name]


def fetch(library: str, name: str) -> nn.Module:
    """Make a library's model with its published weights, from cache or network.

    Args:
        name: of the model there; timm's may end with a tag for weights.

    Raises FLError if the library publishes none, or they cannot be fetched.
    """
    address = _address(library, name)
    if address is None:
        raise FLError(f"{library} publishes no weights for {name}: choose another model, or give a file", code="name")
    try:
        if library == "torchvision":
            return surgery.libraries.make_model(f"{library}:{name}", weights="DEFAULT")
        with _no_retries():
            return surgery.libraries.make_model(f"{library}:{name}", pretrained=True)
    except Exception as error:  # whatever the library's downloader raises: there are several, each with its own errors
        raise FLError(
            f"the weights of {library}:{name} are not in the library's cache, and cannot be fetched from "
            f"{address} ({first_line(error)}). Without a network, save the model's state_dict() to a file on a machine "
            "that has one, and give that file",
            code="file",
        ) from error


def _address(library: str, name: str) -> str | None:
    """Return where a library publishes weights for a model; None if nowhere."""
    if library == "torchvision":
        from torchvision import models

        best = getattr(models.get_model_weights(name), "DEFAULT", None)
        return best.url if best else None
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        return None
    return f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url


@contextmanager
def _no_retries() -> Iterator[None]:
    """Use Hugging Face's cache only where there is no network.

    It would try a dozen times, for most of a minute.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not getproxies():
        try:
            socket.create_connection((urlsplit(constants.ENDPOINT).hostname, 443), timeout=10).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
