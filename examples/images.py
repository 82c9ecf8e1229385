"""Folders of images and a pretrained model of timm: `python examples/images.py FOLDER WEIGHTS`.

FOLDER holds train/CLASS/*.png and test/CLASS/*.png, WEIGHTS are timm's for this model, as .safetensors or .pth.
"""

import sys

import timm
from torchvision.datasets import ImageFolder
from torchvision.transforms import Resize

import fl

folder, weights = sys.argv[1:] if len(sys.argv) == 3 else sys.exit(__doc__)
train, test = (ImageFolder(f"{folder}/{part}", Resize((32, 32))) for part in ("train", "test"))
data = fl.Dataset.from_torch(train, test)


def model():
    return timm.create_model("resnet10t", True, pretrained_cfg_overlay={"file": weights}, num_classes=data.classes)


summary = fl.simulate(fl.Config.of(algorithm="fedavg", clients=5, rounds=3), "runs/images", dataset=data, model=model)
print(f"accuracy {summary['final']['accuracy']:.1%}")
