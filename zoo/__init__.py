"""Models whose width and depth are arguments: `python -m zoo` lists them.

>>> import zoo
>>> net = zoo.create("resnet20", num_classes=10, width=0.5, depth=(2, 2, 2), norm="static_batch")
>>> net = zoo.ResNet(zoo.resnet.BasicBlock, [2, 2, 2, 2], [64, 128, 256, 512], num_classes=10)
"""

from importlib import metadata

from zoo.cnn import CNN, LeNet
from zoo.errors import ZooError
from zoo.layers import divisor8, initialise
from zoo.mobilenet import EfficientNetV2, MobileNetV2
from zoo.norms import collect_statistics
from zoo.resnet import ResNet
from zoo.spec import Count, Spec, names
from zoo.transformer import Transformer, mask_tokens
from zoo.vgg import VGG
from zoo.vit import VisionTransformer
from zoo.weights import create, load, to_torchvision

__all__ = [
    "CNN", "VGG", "Count", "EfficientNetV2", "LeNet", "MobileNetV2", "ResNet", "Spec", "Transformer",
    "VisionTransformer", "ZooError", "collect_statistics", "create", "divisor8", "initialise", "load",
    "mask_tokens", "names", "to_torchvision",
]  # fmt: skip
__version__ = next((one.version for one in metadata.distributions(name="layer-surgery")), "not installed")
