"""What a family's `build` function gets: the fields of a spec, checked and with defaults filled in."""

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.kit import Kit
from zoo.norms import Norm
from zoo.widths import Rounding, scaled


@dataclass(frozen=True)
class Blueprint:
    """Everything that the construction of a model needs. `zoo.Spec` explains the fields, but for these:

    Attributes:
        rates: the width rate of each part of the model that has one.
        depth: blocks of each section; None if the sections are not known.
    """

    name: str
    num_classes: int
    in_channels: int | None
    image_size: int | None
    tokens: int | None
    rates: Mapping[str, float]
    depth: tuple[int, ...] | None
    rounding: Rounding
    stem: str | None
    norm: Norm | None
    norm_eps: float
    dropout: float | None
    drop_path: float | None
    scaler: bool
    step_size: bool | None
    heads: int | None
    layer_scale: float | None

    def channels(self, full: int, part: str) -> int:
        """The number of channels of a part of the model (one of `rates`) that has `full` channels at rate 1."""
        return scaled(full, self.rates[part], self.rounding)

    def kit(self, part: str) -> Kit:
        """What to build the blocks of a part of the model from."""
        rate = self.rates[part] if self.scaler else None
        return Kit(self.norm or "none", self.norm_eps, rate, bool(self.step_size))
