"""Models whose width and depth are arguments: `python -m zoo` lists them.

>>> import zoo
>>> net = zoo.create("resnet20", num_classes=10, width=0.5, depth=(2, 2, 2), norm="static_batch")
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.by_name import create
    from zoo.errors import ZooError
    from zoo.init import initialise
    from zoo.interop import load, to_torchvision
    from zoo.members import names
    from zoo.norms import collect_statistics
    from zoo.spec import Count, Spec
    from zoo.transformer import mask_tokens
    from zoo.widths import divisor8

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

_WHERE = {
    "Count": "zoo.spec",
    "Spec": "zoo.spec",
    "ZooError": "zoo.errors",
    "collect_statistics": "zoo.norms",
    "create": "zoo.by_name",
    "divisor8": "zoo.widths",
    "initialise": "zoo.init",
    "load": "zoo.interop",
    "mask_tokens": "zoo.transformer",
    "names": "zoo.members",
    "to_torchvision": "zoo.interop",
}
"""Names are imported when they are first used, so that `python -m zoo --help` does not wait for PyTorch."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name == "__version__":
        value = next((one.version for one in metadata.distributions(name="layer-surgery")), "not installed")
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
