"""Models whose width and depth are arguments: `python -m zoo` lists them.

>>> import zoo
>>> net = zoo.create("resnet20", num_classes=10, width=0.5, depth=(2, 2, 2), norm="static_batch")
"""

from importlib import metadata

from zoo.errors import ZooError
from zoo.layers import divisor8, initialise
from zoo.norms import collect_statistics
from zoo.spec import Count, Spec, names
from zoo.transformer import mask_tokens
from zoo.weights import create, load, to_torchvision

__all__ = [
    "Count",
    "Spec",
    "ZooError",
    "collect_statistics",
    "create",
    "divisor8",
    "initialise",
    "load",
    "mask_tokens",
    "names",
    "to_torchvision",
]
__version__ = next((one.version for one in metadata.distributions(name="layer-surgery")), "not installed")
