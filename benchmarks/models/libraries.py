"""Models of timm and torchvision by name, each with the input that it was made for."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.models import Inception3, MaxVit, VisionTransformer
from torchvision.models.video import MViT
from torchvision.models.video.s3d import S3D
from torchvision.models.video.swin_transformer import SwinTransformer3d

import surgery
from benchmarks.models.case import Case

SMALLEST = Path(__file__).parents[1] / "timm_smallest.json"
DETECTORS = ("fasterrcnn", "maskrcnn", "keypointrcnn", "retinanet", "fcos", "ssd")
FIXED = (VisionTransformer, MaxVit, MViT, S3D, SwinTransformer3d)  # of torchvision: made for one size, or a least one
SMALL_IMAGES = {"min_size": 128, "max_size": 192}  # of what a detector makes of its images


def library_case(name: str) -> Case:
    """Return the case of timm:NAME or torchvision:NAME; int8:NAME is torchvision's converted to quantized layers."""
    library, _, model = name.partition(":")
    if library == "int8":
        return Case(
            lambda: surgery.libraries.make_model(f"torchvision:{model}", quantize=True),
            lambda net: torch.randn(2, 3, 224, 224),
        )
    if model.startswith(DETECTORS):
        sizes = {} if model.startswith("ssd") else SMALL_IMAGES
        return Case(
            lambda: surgery.libraries.make_model(name, **sizes),
            lambda net: (pictures(),),
            training=lambda net: (pictures(), [target(model, image) for image in pictures()]),
            detects=True,
        )
    if model.startswith("raft"):
        return Case(
            lambda: surgery.libraries.make_model(name),
            lambda net: (torch.rand(2, 3, 128, 136), torch.rand(2, 3, 128, 136)),
        )
    return Case(lambda: surgery.libraries.make_model(name), images)


def images(net: Any) -> Tensor:
    """Two images or films of the size that a model was made for; smaller ones where torchvision's take any size."""
    shape = surgery.libraries.example_input(net).shape
    if type(net).__module__.startswith("torchvision") and not isinstance(net, FIXED):
        side = 112 if isinstance(net, Inception3) else 64
        shape = (*shape[:2], *[8] * (len(shape) - 4), side, side)
    return torch.randn(shape)


def pictures() -> list[Tensor]:
    """Two images of different sizes."""
    return [torch.rand(3, 110, 150), torch.rand(3, 140, 100)]


def target(model: str, image: Tensor) -> dict[str, Any]:
    """Return what a detector is to find in an image: two boxes, with masks or keypoints where it learns these."""
    boxes = torch.tensor([[10.0, 20.0, 60.0, 90.0], [30.0, 15.0, 95.0, 100.0]])
    found = {"boxes": boxes, "labels": torch.tensor([1, 1])}
    if model.startswith("mask"):
        found["masks"] = torch.ones(2, *image.shape[1:], dtype=torch.uint8)
    if model.startswith("keypoint"):
        found["keypoints"] = torch.full((2, 17, 3), 40.0)
    return found


def timm_names() -> list[str]:
    """Return all names of timm."""
    import timm

    return [f"timm:{model}" for model in timm.list_models()]


def smallest_names() -> list[str]:
    """Return the smallest model of each of timm's model files, as stored."""
    return [f"timm:{model}" for model in json.loads(SMALLEST.read_text()).values()]


def torchvision_names() -> list[str]:
    """Return all names of torchvision, those with the fewest operations first, and last those that are to be quantized.

    The layers of the latter are float until they are converted.
    """
    import torchvision

    def last(model: str) -> tuple[bool, float]:
        return model.startswith("quantized"), torchvision.models.get_model_weights(model).DEFAULT.meta["_ops"]

    return [f"torchvision:{model}" for model in sorted(torchvision.models.list_models(), key=last)]


@cache
def torchvision_tasks() -> dict[str, str]:
    """Return the task of each of torchvision's names: the module that registers it."""
    import torchvision

    tasks = ("segmentation", "detection", "video", "optical_flow", "quantization")
    modules = {"classification": torchvision.models} | {task: getattr(torchvision.models, task) for task in tasks}
    return {name: task for task, module in modules.items() for name in torchvision.models.list_models(module=module)}


def find_smallest() -> dict[str, str]:
    """Return the model with the fewest parameters of each of timm's model files, by file, the smallest first."""
    import timm
    from timm.models import list_models, list_modules

    found = {}
    for file in sorted(list_modules()):
        sizes: dict[str, int] = {}
        for name in list_models(module=file):
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
        if sizes:
            name = min(sizes, key=sizes.__getitem__)
            found[file] = sizes[name], name
    return {file: name for file, (_, name) in sorted(found.items(), key=lambda item: item[1])}
