"""The description of a model as a value: name, width, depth, and everything else that its construction needs."""

import dataclasses
import difflib
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple, get_args

import torch
import yaml
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from zoo.errors import ZooError, first_line
from zoo.layers import Kit, Rounding, initialise
from zoo.norms import Norm
from zoo.plain_yaml import read_yaml

FAMILIES = ("cnn", "resnet", "mobilenet", "vgg", "vit", "transformer")
"""The files of the zoo with a table MEMBERS of architectures by name."""


COMMON: dict[str, Any] = {"norm_eps": 1e-5, "rounding": "ceil", "scaler": False}
"""The fields that every architecture of the zoo takes, with their defaults."""


@dataclass(frozen=True)
class Member:
    """A named architecture: one row of a family's table.

    Attributes:
        build: makes a model from a `Spec`, on the meta device.
        depth: blocks of each section at full depth; None where they are not known, as of models from elsewhere that
            subclasses of `Spec` describe and build. These have one width rate, of at most 1.
        source: where it is described.
        defaults: the fields of `Spec` that this architecture takes besides width and depth, with their defaults; a
            function is given the size of the images.
        also: the parts besides the sections that have a width rate of their own.
        torchvision, timm: the library's name of the same architecture, where it has that.
        torchvision_plain: torchvision's name of the same architecture for `norm="none"`.

    >>> Member(nn.Identity, (2, 2), "nowhere", COMMON, also=("tail",)).rated_parts
    ('section1', 'section2', 'tail')
    """

    build: Callable[[Any], nn.Module]
    depth: tuple[int, ...] | None
    source: str
    defaults: Mapping[str, Any]
    also: tuple[str, ...] = ()
    torchvision: str = ""
    torchvision_plain: str = ""
    timm: str = ""

    @property
    def rated_parts(self) -> tuple[str, ...]:
        """The parts that have a width rate: the sections, then those of `also`."""
        return (*(f"section{i}" for i, _ in enumerate(self.depth or (), start=1)), *self.also)


def stem_for(image_size: int) -> str:
    """The stem of members that choose it by the image: `cifar` up to 64x64, `imagenet` for larger ones.

    >>> stem_for(32), stem_for(224)
    ('cifar', 'imagenet')
    """
    return "cifar" if image_size <= 64 else "imagenet"


@cache
def members() -> dict[str, Member]:
    """All architectures of the zoo by name, family by family."""
    tables = [import_module(f"zoo.{family}").MEMBERS for family in FAMILIES]  # these import this file
    return {name: row for table in tables for name, row in table.items()}


def names() -> list[str]:
    """The names of the architectures of the zoo, family by family.

    >>> names()[:4]
    ['cnn', 'lenet', 'resnet18', 'resnet34']
    """
    return list(members())


def find(name: str) -> Member:
    """The architecture of that name; the ZooError for an unknown name lists similar ones."""
    if not isinstance(name, str):
        raise ZooError(f"the name of a model must be a string, got {name!r}")
    if name in members():
        return members()[name]
    if name.startswith(("timm:", "torchvision:")):
        raise ZooError(
            f"unknown model {name!r}: the zoo has its own only, and surgery.libraries.named makes those of libraries"
        )
    if near := difflib.get_close_matches(name, members(), n=3):
        raise ZooError(f"unknown model {name!r}: did you mean {' or '.join(near)}? `python -m zoo` lists all")
    raise ZooError(f"unknown model {name!r}: there are {', '.join(names())}")


class Count(NamedTuple):
    """Parameters, and multiply-accumulates of one input's forward pass through convolutions and matrix products."""

    parameters: int
    macs: int


@dataclass(frozen=True)
class Spec:
    """The description of a model: frozen, hashable, equal for equal models. None stands for the architecture's default.

    Attributes:
        name: one of `zoo.names()`.
        num_classes: number of outputs; for a language model the size of its vocabulary.
        in_channels, image_size: of the images [N, in_channels, image_size, image_size].
        tokens: the longest sequence that a language model takes.
        width: rates of the hidden widths: one for all, one for each key of `rates`, or one for each section, the last
            of which is then used for what follows the sections as well.
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
    exits: bool | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        member = self.member
        for field in dataclasses.fields(self):
            if field.name not in ("name", "width", "depth"):
                value = _checked(self.name, field.name, getattr(self, field.name), member)
                object.__setattr__(self, field.name, value(self.image_size) if callable(value) else value)
        object.__setattr__(self, "width", _rates(self.name, self.width, member))
        object.__setattr__(self, "depth", _blocks(self.name, self.depth, member, bool(self.exits)))

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

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of blocks of each section, empty for a model without sections."""
        assert isinstance(self.depth, tuple)
        return self.depth

    def kit(self, part: str) -> Kit:
        """What to build a part of the model from, one of `rates`, of which it has the rate.

        >>> Spec("resnet20", width=0.5).kit("section2").channels(32)
        16
        """
        scaling, step_size = bool(self.scaler), bool(self.step_size)
        return Kit(self.norm or "none", self.norm_eps, self.rates[part], self.rounding, scaling, step_size)

    def build(self, generator: torch.Generator | None = None, device: torch.device | str = "cpu") -> nn.Module:
        """The model, in training mode.

        Args:
            generator: draws the initial weights, on the CPU for any device; None draws them from torch's global
                generator.
            device: `meta` gives a model with shapes but no weights.

        Raises:
            ZooError: if the architecture does not take such inputs.
        """
        with torch.device("meta"):
            model = self.member.build(self)
        if torch.device(device).type == "meta":
            return model
        return initialise(model.to_empty(device="cpu"), generator).to(device)

    def scaled(self, width: float | tuple[float, ...] = 1.0, depth: int | tuple[int, ...] | None = None) -> "Spec":
        """The same model with its width rates multiplied by `width`, and with `depth` blocks if that is given.

        >>> Spec("resnet20").scaled(0.5, depth=2) == Spec("resnet20", width=0.5, depth=2)
        True
        """
        rates = _rates(self.name, width, self.member)
        product = tuple(a * b for a, b in zip(self.rates.values(), rates))
        return replace(self, width=product, depth=self.depth if depth is None else depth)

    def example(self, batch: int = 1, size: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """An input of zeros: images [batch, in_channels, size, size] or tokens [batch, size]."""
        size = (self.tokens or self.image_size) if size is None else size
        if self.tokens is not None:
            return torch.zeros(batch, size, dtype=torch.long, device=device)
        return torch.zeros(batch, self.in_channels, size, size, device=device)

    @lru_cache(maxsize=1024)  # noqa: B019 (small values, few of them)
    def count(self, size: int | None = None) -> Count:
        """Parameters and MACs, counted without building the model in memory.

        Args:
            size: side of the images or length of the sequences; None takes the spec's own. The model stays the same.

        Raises:
            ZooError: if the model that the spec describes does not take inputs of this size.

        >>> Spec("resnet18").count()
        Count(parameters=11689512, macs=1814073344)
        """
        own = self.tokens or self.image_size
        try:
            model = self.build(device="meta").eval().requires_grad_(False)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model(self.example(size=size, device="meta"))
        except ZooError:
            raise
        except (RuntimeError, ValueError, AssertionError, TypeError, IndexError) as error:
            at = f"{own}" if size is None else f"{own}, not at {size}"
            why = first_line(error)
            raise ZooError(f"{self.name} cannot be counted: it is made for inputs of size {at}: {why}") from error
        return Count(sum(p.numel() for p in model.parameters()), counter.get_total_flops() // 2)

    def to_yaml(self) -> str:
        """The spec as YAML; `from_yaml` is the inverse."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and v != ()}
        for key in ("width", "depth"):
            if key in values:
                # one number stands for several equal ones, unless nobody knows how many there are
                equal = len(set(values[key])) == 1 and self.member.depth is not None
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
            values = read_yaml(text)
        except ZooError as error:
            raise ZooError(f"not a model's spec: {error}") from None
        if not isinstance(values, Mapping) or "name" not in values:
            raise ZooError("not a model's spec: not a mapping with a name")
        return cls.from_dict({key: value if key == "name" else _number(value) for key, value in values.items()})

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


_COUNTS = {"num_classes": 2**31, "in_channels": 2**20, "image_size": 2**16, "tokens": 2**24, "heads": 2**16}
"""Fields that are whole numbers, and the most that they may be."""
_CHOICES = {"norm": get_args(Norm), "rounding": get_args(Rounding), "stem": ("imagenet", "cifar")}
_WIDEST, _DEEPEST = 100, 500  # 500 blocks in each section are more than any published network has


def _checked(name: str, field: str, value: Any, member: Member) -> Any:
    """The value of a field other than width and depth: the given one if it is valid, or for None the default."""
    if value is None:
        return member.defaults.get(field)
    if field not in member.defaults:
        raise ZooError(f"{name} takes no {field}; it takes width, depth, {', '.join(member.defaults)}")
    if field in _COUNTS:
        if not _is_count(value):
            raise ZooError(f"{name}: {field} must be a whole number, 1 or more, got {value!r}")
        if value > _COUNTS[field]:
            raise ZooError(f"{name}: {field} must be at most {_COUNTS[field]:,}, got {value:,}")
        return int(value)
    if field in _CHOICES:
        if value not in _CHOICES[field]:
            raise ZooError(f"{name}: unknown {field} {value!r}: choose {', '.join(_CHOICES[field])}")
        return value
    if field in ("scaler", "step_size", "exits"):
        if not isinstance(value, bool):
            raise ZooError(f"{name}: {field} is true or false, got {value!r}")
        return value
    if not _is_number(value) or not 0 <= value < 1 or (field == "norm_eps" and value == 0):
        raise ZooError(f"{name}: {field} must be a number of at least 0 and below 1, got {value!r}")
    return float(value)


def _rates(name: str, width: Any, member: Member) -> tuple[float, ...]:
    """A rate for each rated part. If only the sections have one, that of the last is used for the other parts, too."""
    slots, sections = len(member.rated_parts), len(member.depth or ())
    result = tuple(width) if isinstance(width, tuple | list) else (width,) * slots
    if len(result) == sections:
        result += result[-1:] * (slots - sections)
    if len(result) != slots:
        each = f", or one for each of {', '.join(member.rated_parts)}" if slots > 1 else ""
        raise ZooError(f"{name} takes one width{each}; got {len(result)}")
    for rate in result:
        if not _is_number(rate) or not 0 < rate <= _WIDEST:
            raise ZooError(f"{name}: width is a rate above 0 and at most {_WIDEST} (1 is the full width), got {rate!r}")
        if member.depth is None and rate > 1:
            raise ZooError(f"{name} can only be made narrower, by a width of at most 1, got {rate:g}")
    return tuple(map(float, result))


def _blocks(name: str, depth: Any, member: Member, exits: bool) -> tuple[int, ...] | None:
    """The number of blocks of each section; None is the full depth of a model whose sections are unknown.

    Args:
        exits: whether each section has a classifier, so that the last sections may be missing.
    """
    if depth is None:
        return member.depth
    several = isinstance(depth, tuple | list)
    if member.depth is None:
        result = (tuple(depth) or (0,)) if several else (depth,)
    elif member.depth == () != depth:
        raise ZooError(f"{name} has no sections of blocks, so no depth can be chosen")
    else:
        result = tuple(depth) if several else (depth,) * len(member.depth)
        if len(result) != len(member.depth):
            each = f"one for each of its {len(member.depth)} sections"
            raise ZooError(f"{name} takes one depth, or {each}; got {len(result)}")
    there = result
    while exits and len(there) > 1 and there[-1] == 0 and not isinstance(there[-1], bool):
        there = there[:-1]
    if wrong := [count for count in there if not _is_count(count)]:
        but = " (the last sections of a model with exits may have 0)" if several and "exits" in member.defaults else ""
        raise ZooError(f"{name}: a section has a whole number of blocks, 1 or more{but}; got {wrong[0]!r}")
    if max(result, default=0) > _DEEPEST:
        raise ZooError(f"{name}: a section has at most {_DEEPEST} blocks; got {max(result):,}")
    return tuple(map(int, result))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    """The number that a string stands for: YAML 1.1 reads 1.0e-5 as a number, but 1e-5 as a string."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
