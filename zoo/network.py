"""What all models of the zoo are: named parts, one after the other."""

from torch import nn


class Network(nn.Sequential):
    """stem (or embedding), section1, section2, ..., tail, pool, head: a Sequential of named parts.

    `net.section2[0]` is a block, `net[:3]` a network of the first three parts. A smaller model of the same name has a
    subset of the larger one's tensors, each of which is the leading corner of the larger one's: `surgery.narrow` with
    `like=` and `surgery.ungraft` relate them by shape and name alone. (By a rate `surgery.narrow` may choose other
    channels: of appended ones the first of each part, of group norm's the first of each group.) Pooling before the head
    is global, but for the CNN and VGG, which flatten channel by channel, so that corners are corners there too.
    """

    torch_init = False  # whether convolutions start as torch's do, which few papers say; see zoo/init.py

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """timm's description of what the blocks are, by patterns of parameter names.

        `surgery.sections` reads it, as does timm's layer-wise learning rate decay.
        """
        return {"stem": r"^(?:stem|embedding)", "blocks": r"^section(\d+)" if coarse else r"^section(\d+)\.(\d+)"}
