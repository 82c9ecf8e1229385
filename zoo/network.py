"""The class of all models of the zoo: named parts, one after the other."""

from collections.abc import Mapping

from torch import Tensor, nn


class Network(nn.Sequential):
    """stem (or embedding), section1, section2, ..., tail, pool, head: a Sequential of named parts.

    `net.section2[0]` is a block, `net[:3]` a network of the first three parts. A smaller model of the same name has
    some of the larger one's tensors, each the leading corner of the larger one's, so that `surgery.corner` and
    `surgery.ungraft` relate the two by names and shapes alone. (`surgery.narrow` by a rate may choose other channels:
    if channels are concatenated, the first ones of each part; with group norm, the first ones of each group.) Pooling
    before the head is global, except in the CNN and VGG. These flatten channel by channel, so that a smaller model's
    weights are a leading corner there as well.
    """

    torch_init = False  # whether convolutions are initialised as torch does it; see zoo/init.py

    def from_foreign(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of torchvision's or timm's model of this architecture as this model has them, in its order.

        Only families whose tensors the libraries lay out otherwise have a rule of their own; names are left to
        `zoo.load`.
        """
        return dict(state)

    def to_foreign(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """The inverse of `from_foreign`: the tensors of this model's state as torchvision has them, in its order."""
        return list(state.values())

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Patterns of parameter names that say what the blocks are, in timm's form.

        `surgery.sections` and timm's layer-wise learning rate decay read it.
        """
        return {"stem": r"^(?:stem|embedding)", "blocks": r"^section(\d+)" if coarse else r"^section(\d+)\.(\d+)"}
