"""The models of each suite of benchmarks/coverage.py, by name: SUITE:NAME."""

from itertools import zip_longest

from benchmarks.models.case import Case

SUITES = ("smallest", "torchvision", "transformers", "huggingface", "handwritten", "all", "support")


def suite(name: str) -> list[str]:
    """Return the names of a suite's models."""
    from benchmarks.models import libraries, registry

    named = {
        "smallest": libraries.smallest_names, "torchvision": libraries.torchvision_names, "all": libraries.timm_names,
        "transformers": registry.names, "support": support_names,
    }  # fmt: skip
    return named[name]() if name in named else [f"{name}:{model}" for model in _own(name)]


def support_names() -> list[str]:
    """Return the models of all registries, their families in turns: a run may be stopped at any time.

    The families whose inputs are large come last.
    """
    from benchmarks.models import libraries, registry

    families: dict[str, list[str]] = {"timm": libraries.smallest_names()}
    for name in libraries.torchvision_names():
        task = libraries.torchvision_tasks()[model := name.partition(":")[2]]
        families.setdefault(task, []).append(f"int8:{model}" if task == "quantization" else name)
    for name in registry.names():
        families.setdefault(registry.family(name.partition(":")[2]), []).append(name)
    large = [families.pop(task) for task in ("segmentation", "detection", "video", "optical_flow")]
    parts = list(families.values()), large
    return [name for part in parts for several in zip_longest(*part) for name in several if name]


def case(name: str) -> Case:
    """Return the model of a name such as timm:resnet18, handwritten:unet, huggingface:t5_base."""
    origin, _, model = name.partition(":")
    if origin in ("timm", "torchvision", "int8"):
        from benchmarks.models.libraries import library_case

        return library_case(name)
    if origin == "transformers":
        from benchmarks.models.registry import registry_case

        return registry_case(model)
    return _own(origin)[model]


def _own(origin: str) -> dict[str, Case]:
    if origin == "huggingface":
        from benchmarks.models.huggingface import MODELS

        return MODELS
    from benchmarks.models.handwritten import MODELS

    return MODELS
