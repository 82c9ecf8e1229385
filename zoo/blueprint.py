"""What a family's `build` is given: a spec's fields, checked and filled in, and what is made of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from zoo.kit import Kit
from zoo.norms import Norm
from zoo.widths import Rounding, scaled


@dataclass(frozen=True)
class Blueprint:
    """All that a model's construction needs, see `zoo.Spec`.

    Attributes:
        widths: the width rates by the parts of the model that they belong to.
        depth: blocks of each section; None where the sections are not known.
    """

    name: str
    num_classes: int
    in_channels: int | None
    image_size: int | None
    tokens: int | None
    widths: Mapping[str, float]
    depth: tuple[int, ...] | None
    rounding: Rounding
    stem: str | None
    norm: Norm | None
    norm_eps: float
    dropout: float | None
    drop_path: float | None
    scaler: bool
    step_size: bool | None

    def channels(self, full: int, part: str) -> int:
        """The number of channels of a part of the model (one of `widths`) that has `full` at rate 1."""
        return scaled(full, self.widths[part], self.rounding)

    def kit(self, part: str) -> Kit:
        """What the blocks of a part of the model are made from."""
        rate = self.widths[part] if self.scaler else None
        return Kit(self.norm or "none", self.norm_eps, rate, bool(self.step_size))
