"""Models of timm and torchvision by name, each with the input that it was made for."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import surgery
from benchmarks.models.case import Case

SMALLEST = Path(__file__).parents[1] / "timm_smallest.json"
DETECTORS = ("fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd")
SMALL_IMAGES = {"min_size": 128, "max_size": 192}  # of what a detector makes of its images


def library_case(name: str) -> Case:
    """The case of timm:NAME or torchvision:NAME."""
    model = name.partition(":")[2]
    if model.startswith(DETECTORS):
        sizes = {} if model.startswith("ssd") else SMALL_IMAGES
        return Case(
            lambda: surgery.named(name, **sizes),
            lambda net: (pictures(),),
            training=lambda net: (pictures(), [target(model, image) for image in pictures()]),
            detects=True,
        )
    if model.startswith("raft"):
        return Case(lambda: surgery.named(name), lambda net: (torch.rand(2, 3, 128, 136), torch.rand(2, 3, 128, 136)))
    return Case(lambda: surgery.named(name), lambda net: torch.randn(surgery.example_input(net).shape))


def pictures() -> list[Tensor]:
    """Two images of different sizes."""
    return [torch.rand(3, 110, 150), torch.rand(3, 140, 100)]


def target(model: str, image: Tensor) -> dict[str, Any]:
    """What a detector is to find in an image: two boxes, with masks or keypoints where it learns these."""
    boxes = torch.tensor([[10.0, 20.0, 60.0, 90.0], [30.0, 15.0, 95.0, 100.0]])
    found = {"boxes": boxes, "labels": torch.tensor([1, 1])}
    if model.startswith("mask"):
        found["masks"] = torch.ones(2, *image.shape[1:], dtype=torch.uint8)
    if model.startswith("keypoint"):
        found["keypoints"] = torch.full((2, 17, 3), 40.0)
    return found


def timm_names() -> list[str]:
    """All names of timm."""
    import timm

    return [f"timm:{model}" for model in timm.list_models()]


def smallest_names() -> list[str]:
    """The smallest model of each of timm's model files, as stored."""
    return [f"timm:{model}" for model in json.loads(SMALLEST.read_text()).values()]


# A small model of each of torchvision's families: classification, segmentation, detection, video, optical flow.
TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5
    mobilenet_v2 mobilenet_v3_small regnet_y_400mf resnet18 resnext50_32x4d wide_resnet50_2 shufflenet_v2_x0_5
    squeezenet1_1 swin_t swin_v2_t vgg11 vit_b_32 fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large
    fasterrcnn_mobilenet_v3_large_320_fpn maskrcnn_resnet50_fpn keypointrcnn_resnet50_fpn retinanet_resnet50_fpn
    fcos_resnet50_fpn ssd300_vgg16 ssdlite320_mobilenet_v3_large r3d_18 mvit_v1_b swin3d_t s3d raft_small
"""


def torchvision_names() -> list[str]:
    """A model of each of torchvision's families."""
    return [f"torchvision:{model}" for model in TORCHVISION.split()]


def find_smallest() -> dict[str, str]:
    """The model with the fewest parameters of each of timm's model files."""
    import timm
    from timm.models import list_models, list_modules

    found = {}
    for file in sorted(list_modules()):
        sizes: dict[str, int] = {}
        for name in list_models(module=file):
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
        if sizes:
            found[file] = min(sizes, key=sizes.__getitem__)
    return found
