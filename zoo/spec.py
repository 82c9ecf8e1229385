"""The description of a model as a value: name, width, depth, and everything else that its construction needs."""

import dataclasses
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zoo import fields
from zoo.blueprint import Blueprint
from zoo.errors import ZooError
from zoo.init import initialise
from zoo.member import Member
from zoo.members import find
from zoo.norms import Norm
from zoo.widths import Rounding


class Count(NamedTuple):
    """Parameters, and multiply-accumulates of one input's forward pass through convolutions and matrix products."""

    parameters: int
    macs: int


@dataclass(frozen=True)
class Spec:
    """The description of a model: frozen, hashable, equal for equal models. None stands for the architecture's default.

    Attributes:
        name: one of `zoo.names()`, or "timm:NAME" or "torchvision:NAME" (see `zoo.library`).
        num_classes: number of outputs; for a language model the size of its vocabulary.
        in_channels, image_size: of the images [N, in_channels, image_size, image_size].
        tokens: the longest sequence that a language model takes.
        width: rates of the hidden widths: one for all, one for each key of `rates`, or one for each section, the last
            of which is then used for what follows the sections as well. A library's model has one, and `build` refuses
            it unless it is 1.
        depth: number of blocks: one for all sections, or one for each section.
        rounding: of rate times channels: `ceil`, or `divisor8` as in the papers of the mobile families.
        stem: `imagenet` halves the image once or twice before the first section, `cifar` keeps it. (A Vision
            Transformer has patches of 16x16 or 4x4 pixels.)
        norm: batch, static_batch, group, layer or none.
        norm_eps: epsilon of the norms.
        dropout: rate of dropout. For a library's model None keeps what the library sets, 0 switches all dropout off.
        drop_path: rate of stochastic depth; block i of n has i/n of it, as in torchvision. (ConvNeXt and the Vision
            Transformer: i/(n - 1), so that the last block has all of it, as in torchvision and timm.)
        scaler: HeteroFL's Scaler, which divides by the width rate in training. It is the rate of this spec, so the
            server's model should have width 1.
        step_size: NeFL's learnable step size for every residual branch.
        heads: of a Vision Transformer's attention, whatever the width; they must divide the full width.
        layer_scale: where ConvNeXt's learnable factors of channels begin, between 0 and 1; 0 leaves them out.

    Raises:
        ZooError: for an unknown name, a field that the architecture does not have, and values out of range.

    >>> spec = Spec("resnet20", width=0.5, depth=(2, 2, 2))
    >>> spec.width, spec.norm, spec.scaled(0.5).width
    ((0.5, 0.5, 0.5), 'batch', (0.25, 0.25, 0.25))
    >>> Spec.from_yaml(spec.to_yaml()) == spec
    True
    """

    name: str
    num_classes: int | None = None
    in_channels: int | None = None
    image_size: int | None = None
    tokens: int | None = None
    width: float | tuple[float, ...] = 1.0
    depth: int | tuple[int, ...] | None = None
    rounding: Rounding | None = None
    stem: str | None = None
    norm: Norm | None = None
    norm_eps: float | None = None
    dropout: float | None = None
    drop_path: float | None = None
    scaler: bool | None = None
    step_size: bool | None = None
    heads: int | None = None
    layer_scale: float | None = None

    def __post_init__(self) -> None:
        member = self.member
        for field in dataclasses.fields(self):
            if field.name not in ("name", "width", "depth"):
                value = fields.checked_field(self.name, field.name, getattr(self, field.name), member)
                object.__setattr__(self, field.name, value(self.image_size) if callable(value) else value)
        object.__setattr__(self, "width", fields.rates(self.name, self.width, member))
        object.__setattr__(self, "depth", fields.blocks(self.name, self.depth, member))

    @property
    def member(self) -> Member:
        """The architecture at full size."""
        return find(self.name)

    @property
    def rates(self) -> dict[str, float]:
        """The width rate of each part of the model that has one.

        >>> Spec("cnn", width=0.5).rates
        {'conv1': 0.5, 'conv2': 0.5, 'fc1': 0.5}
        """
        assert isinstance(self.width, tuple)
        return dict(zip(self.member.rated_parts, self.width))

    def build(self, generator: torch.Generator | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """The model, in training mode.

        Args:
            generator: draws the initial weights, on the CPU for any device; None draws them from torch's global
                generator.
            device: `meta` gives a model with shapes but no weights.

        Raises:
            ZooError: if the architecture does not take such inputs, or a library's model should be narrow or shallow.
        """
        meta = torch.device(device).type == "meta"
        if self.member.initialised:
            with _seeded(generator), torch.device("meta" if meta else "cpu"):
                return self.member.build(self._blueprint()).to(device)
        with torch.device("meta"):
            model = self.member.build(self._blueprint())
        if meta:
            return model
        return initialise(model.to_empty(device="cpu"), generator).to(device)

    def _blueprint(self) -> Blueprint:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "width"}
        return Blueprint(**values, rates=self.rates)

    def scaled(self, width: float | tuple[float, ...] = 1.0, depth: int | tuple[int, ...] | None = None) -> "Spec":
        """The same model with its width rates multiplied by `width`, and with `depth` blocks if that is given.

        >>> Spec("resnet20").scaled(0.5, depth=2) == Spec("resnet20", width=0.5, depth=2)
        True
        """
        rates = fields.rates(self.name, width, self.member)
        product = tuple(a * b for a, b in zip(self.rates.values(), rates))
        return replace(self, width=product, depth=self.depth if depth is None else depth)

    def example(self, batch: int = 1, size: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """An input of zeros: images [batch, in_channels, size, size] or tokens [batch, size]."""
        size = (self.tokens or self.image_size) if size is None else size
        if self.tokens is not None:
            return torch.zeros(batch, size, dtype=torch.long, device=device)
        return torch.zeros(batch, self.in_channels, size, size, device=device)

    def count(self, size: int | None = None) -> Count:
        """Parameters and MACs, counted without building the model in memory.

        Args:
            size: side of the images or length of the sequences; None takes the spec's own. The model stays the same.

        Raises:
            ZooError: if the model that the spec describes does not take inputs of this size.

        >>> Spec("resnet18").count()
        Count(parameters=11689512, macs=1814073344)
        """
        return _count(self, size)

    def to_yaml(self) -> str:
        """The spec as YAML; `from_yaml` is the inverse."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v != ()}
        for key in ("width", "depth"):
            if key in values:
                equal = (
                    len(set(values[key])) == 1 and self.member.depth is not None
                )  # otherwise one number does not say how many there are
                values[key] = values[key][0] if equal else list(values[key])
        return yaml.safe_dump(values, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Spec":
        """A spec from YAML; missing fields have their defaults.

        Raises ZooError for text that is not a mapping from a spec's fields to values.

        >>> Spec.from_yaml("{name: resnet20, width: 0.5}") == Spec("resnet20", width=0.5)
        True
        """
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ZooError(f"not a model's spec: not YAML ({' '.join(str(error).split())})") from None
        if not isinstance(values, Mapping) or "name" not in values:
            raise ZooError("not a model's spec: not a mapping with a name")
        return cls.from_dict({key: _number(value) if key in _NUMBERS else value for key, value in values.items()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Spec":
        """A spec from its fields; ZooError names the first one that a spec does not have.

        >>> Spec.from_dict({"name": "cnn", "width": [0.5, 0.5, 1]}).width
        (0.5, 0.5, 1.0)
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if strange := [key for key in values if key not in known]:
            raise ZooError(f"a spec has no {strange[0]!r}: there are {', '.join(known)}")
        given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**given)


_NUMBERS = ("width", "norm_eps", "dropout", "drop_path", "layer_scale")


def _number(value: Any) -> Any:
    """The number that a string stands for: YAML 1.1 reads 1.0e-5 as a number, but 1e-5 as a string."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@contextmanager
def _seeded(generator: torch.Generator | None):
    """Seed torch's global generator from this one, and restore it afterwards."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
        yield


@lru_cache(maxsize=1024)
def _count(spec: Spec, size: int | None) -> Count:
    try:
        model = spec.build(device="meta").eval().requires_grad_(False)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(spec.example(size=size, device="meta"))
    except ZooError:
        raise
    except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        at = f"{spec.tokens or spec.image_size}" if size is None else f"{spec.tokens or spec.image_size}, not at {size}"
        raise ZooError(f"{spec.name} cannot be counted: it is made for inputs of size {at}: {reason}") from error
    return Count(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)
