"""The models of each suite of benchmarks/coverage.py, by name: SUITE:NAME."""

from benchmarks.models.case import Case

SUITES = ("smallest", "torchvision", "huggingface", "handwritten", "all")


def suite(name: str) -> list[str]:
    """The names of a suite's models."""
    from benchmarks.models import libraries

    named = {
        "smallest": libraries.smallest_names, "torchvision": libraries.torchvision_names, "all": libraries.timm_names
    }  # fmt: skip
    return named[name]() if name in named else [f"{name}:{model}" for model in _own(name)]


def case(name: str) -> Case:
    """The model of a name such as timm:resnet18, handwritten:unet, huggingface:t5_base."""
    origin, _, model = name.partition(":")
    if origin in ("timm", "torchvision"):
        from benchmarks.models.libraries import library_case

        return library_case(name)
    return _own(origin)[model]


def _own(origin: str) -> dict[str, Case]:
    if origin == "huggingface":
        from benchmarks.models.huggingface import MODELS

        return MODELS
    from benchmarks.models.handwritten import MODELS

    return MODELS
