"""The description of a model as a value: name, width, depth, and other arguments."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from zoo import cnn, mobilenet, resnet, transformer, vgg, vit
from zoo.architecture import Architecture, Rounding, check, check_depths, check_rates
from zoo.errors import ZooError, first_line
from zoo.layers import initialise
from zoo.norms import Norm
from zoo.plain_yaml import read_yaml

PRESETS: dict[str, Architecture] = {
    **cnn.PRESETS, **resnet.PRESETS, **mobilenet.PRESETS, **vgg.PRESETS, **vit.PRESETS, **transformer.PRESETS,
}  # fmt: skip
"""All architectures of the zoo by name, family by family."""


def names() -> list[str]:
    """Return the names of the architectures of the zoo, family by family.

    >>> names()[:4]
    ['cnn', 'lenet', 'resnet18', 'resnet34']
    """
    return list(PRESETS)


def find(name: str) -> Architecture:
    """Return the architecture of a name; the ZooError for others lists similar ones."""
    if not isinstance(name, str):
        raise ZooError(f"the name of a model must be a string, got {name!r}", code="argument")
    if name in PRESETS:
        return PRESETS[name]
    if name.startswith(("timm:", "torchvision:")):
        raise ZooError(f"the zoo has no {name!r}: surgery.libraries.make_model makes models of libraries", code="name")
    if near := difflib.get_close_matches(name, PRESETS, n=3):
        raise ZooError(f"unknown model {name!r}: did you mean {' or '.join(near)}? See `python -m zoo`", code="name")
    raise ZooError(f"unknown model {name!r}: there are {', '.join(names())}", code="name")


class Count(NamedTuple):
    """Parameters, and multiply-accumulates of one input's convolutions and products."""

    parameters: int
    macs: int


@dataclass(frozen=True)
class Spec:
    """The description of a model: frozen, hashable, equal for equal models.

    None stands for the architecture's default.

    Attributes:
        name: one of `zoo.names()`.
        num_classes: number of outputs; for a language model the size of its vocabulary.
        in_channels, image_size: of the images [N, in_channels, image_size, image_size].
        tokens: the longest sequence that a language model takes.
        width: rates of the hidden widths: one for all, one for each key of `rates`, or one for each section; the last
            one is then used for what follows the sections as well.
        depth: number of blocks: one for all sections, or one for each section. With exits the last sections may have 0.
        rounding: of rate times channels: `ceil`, or `divisor8` as in the papers of the mobile families.
        stem: `imagenet` halves the image once or twice before the first section, `cifar` keeps it. (A Vision
            Transformer has patches of 16x16 or 4x4 pixels.)
        norm: batch, static_batch, group, layer or none.
        norm_eps: epsilon of the norms.
        dropout: rate of dropout.
        drop_path: rate of stochastic depth; block i of n has i/n of it, as in torchvision. (The Vision
            Transformer: i/(n - 1), so that the last block has all of it, as in timm.)
        scaler: HeteroFL's Scaler, which divides by the width rate in training. It is the rate of this spec, so the
            server's model should have width 1.
        step_size: NeFL's learnable step size for every residual branch.
        exits: a classifier after each section instead of one at the end. In training the model gives the logits of all
            of them, [N, exits, classes], in evaluation mode their mean, [N, classes].
        heads: of a Vision Transformer's attention, whatever the width; they must divide the full width.

    Raises:
        ZooError: for an unknown name, a field that the architecture does not have, and values out of range.

    >>> spec = Spec("resnet20", width=0.5, depth=(2, 2, 2))
    >>> spec.width, spec.norm, spec.scale(0.5).width
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
    exits: bool | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.name not in ("name", "width", "depth"):
                object.__setattr__(self, field.name, self._value(field.name))
        object.__setattr__(self, "width", self._rates(self.width))
        object.__setattr__(self, "depth", self._blocks())

    def _value(self, field: str) -> Any:
        """Return the value of a field other than width and depth, or its default."""
        value, defaults = getattr(self, field), self.architecture.defaults
        if value is None:
            default = defaults.get(field)
            return default(self.image_size) if callable(default) else default
        if field not in defaults:
            raise ZooError(f"{self.name} takes no {field}, but width, depth, {', '.join(defaults)}", code="argument")
        return check(self.name, field, value)

    def _rates(self, width: Any) -> tuple[float, ...]:
        """Return a rate for each part that has one."""
        full = self.architecture.depth
        rates = check_rates(self.name, width, self.architecture.rate_names, len(full or ()))
        if full is None and max(rates) > 1:
            raise ZooError(
                f"{self.name} can only be made narrower, by a width of at most 1, got {max(rates):g}", code="argument"
            )
        return rates

    def _blocks(self) -> tuple[int, ...] | None:
        """Return the blocks of each section; None is an unknown model's full depth."""
        full = self.architecture.depth
        if self.depth is None or full == () == self.depth:
            return full
        if full == ():
            raise ZooError(f"{self.name} has no sections of blocks, so no depth can be chosen", code="argument")
        return check_depths(self.name, self.depth, None if full is None else len(full), self.exits)

    @property
    def architecture(self) -> Architecture:
        """The architecture at full size."""
        return find(self.name)

    @property
    def rates(self) -> dict[str, float]:
        """The width rate of each part of the model that has one.

        >>> Spec("cnn", width=0.5).rates
        {'conv1': 0.5, 'conv2': 0.5, 'fc1': 0.5}
        """
        assert isinstance(self.width, tuple)
        return dict(zip(self.architecture.rate_names, self.width))

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks of each section, empty for a model without sections."""
        assert isinstance(self.depth, tuple)
        return self.depth

    def build(self, generator: torch.Generator | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """Return the model, in training mode.

        Args:
            generator: gives the initial weights, on the CPU for any device; None: torch's global generator.
            device: `meta` gives a model with shapes but no weights.

        Raises:
            ZooError: if the architecture does not take such inputs.
        """
        fields = {field: getattr(self, field) for field in self.architecture.defaults}
        try:
            with torch.device("meta"):
                model = self.architecture.build(depths=self.depth, width=self.width, **fields)
        except ZooError as error:
            raise ZooError(f"{self.name}: {error}", code=error.code) from None
        if torch.device(device).type == "meta":
            return model
        # As `model.to_empty(device="cpu")`, whose `empty_like` of a meta tensor imports sympy, which takes a second.
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        return initialise(model, generator).to(device)

    def scale(self, width: float | tuple[float, ...] = 1.0, depth: int | tuple[int, ...] | None = None) -> "Spec":
        """Return the same model with rates times `width`, and `depth` blocks if given.

        >>> Spec("resnet20").scale(0.5, depth=2) == Spec("resnet20", width=0.5, depth=2)
        True
        """
        rates = self._rates(width)
        product = tuple(a * b for a, b in zip(self.rates.values(), rates))
        return replace(self, width=product, depth=self.depth if depth is None else depth)

    def example(self, batch: int = 1, size: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return zeros: images [batch, in_channels, size, size] or tokens [batch, size]."""
        size = (self.tokens or self.image_size) if size is None else size
        if self.tokens is not None:
            return torch.zeros(batch, size, dtype=torch.long, device=device)
        return torch.zeros(batch, self.in_channels, size, size, device=device)

    @lru_cache(maxsize=1024)  # noqa: B019 (small values, few of them)
    def count(self, size: int | None = None) -> Count:
        """Return parameters and MACs, counted without building the model in memory.

        Args:
            size: side of the images or length of the sequences; None takes the spec's own. The model stays the same.

        Raises:
            ZooError: if the model that the spec describes does not take inputs of this size.

        >>> Spec("resnet18").count()
        Count(parameters=11689512, macs=1814073344)
        """
        from torch.utils.flop_counter import FlopCounterMode  # imports triton

        own_size = self.tokens or self.image_size
        try:
            model = self.build(device="meta").eval().requires_grad_(False)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(self.example(size=size, device="meta"))
        except ZooError:
            raise
        except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
            at = f"{own_size}" if size is None else f"{own_size}, not at {size}"
            why = first_line(error)
            raise ZooError(f"{self.name} cannot be counted at other sizes than {at}: {why}", code="argument") from error
        return Count(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)

    def to_yaml(self) -> str:
        """Return the spec as YAML; `from_yaml` is the inverse."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v != ()}
        for key in ("width", "depth"):
            if key in values:
                # one number stands for several equal ones, unless their number is not known
                equal = len(set(values[key])) == 1 and self.architecture.depth is not None
                values[key] = values[key][0] if equal else list(values[key])
        return yaml.safe_dump(values, sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Spec":
        """Return a spec from YAML; missing fields have their defaults.

        Raises ZooError for text that is not a mapping from a spec's fields to values.

        >>> Spec.from_yaml("{name: resnet20, width: 0.5}") == Spec("resnet20", width=0.5)
        True
        """
        try:
            values = read_yaml(text)
        except ZooError as error:
            raise ZooError(f"not a model's spec: {error}", code="file") from None
        if not isinstance(values, Mapping) or "name" not in values:
            raise ZooError("not a model's spec: not a mapping with a name", code="file")
        return cls.from_dict({key: value if key == "name" else _number(value) for key, value in values.items()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Spec":
        """Return a spec from its fields; ZooError names the first unknown one.

        >>> Spec.from_dict({"name": "cnn", "width": [0.5, 0.5, 1]}).width
        (0.5, 0.5, 1.0)
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if strange := [key for key in values if key not in known]:
            raise ZooError(f"a spec has no {strange[0]!r}: there are {', '.join(known)}", code="argument")
        arguments: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return cls(**arguments)


def _number(value: Any) -> Any:
    """Return a string's number: YAML 1.1 reads 1.0e-5 as a number, 1e-5 as a string."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
