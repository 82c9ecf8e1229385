"""Architecture manipulation on any `torch.nn.Module` or state dict."""

from importlib import import_module as _import_module
from importlib import metadata as _metadata
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from surgery.averaging import average as average
from surgery.decomposition import Layer as Layer
from surgery.decomposition import layers as layers
from surgery.depth.graft import graft as graft
from surgery.depth.graft import ungraft as ungraft
from surgery.depth.sections import Section as Section
from surgery.depth.sections import register_block as register_block
from surgery.depth.sections import sections as sections
from surgery.errors import SurgeryError as SurgeryError
from surgery.plan import Plan as Plan
from surgery.recombine import permutations as permutations
from surgery.recombine import segments as segments
from surgery.recombine import shuffle as shuffle
from surgery.scale import match_norms as match_norms
from surgery.states import Stack as Stack
from surgery.states import State as State
from surgery.states import broadcast as broadcast
from surgery.states import cosine as cosine
from surgery.states import distance as distance
from surgery.states import load as load
from surgery.states import stack as stack
from surgery.states import state as state
from surgery.states import unstack as unstack
from surgery.width.narrow import narrow as narrow
from surgery.width.narrow import widths as widths
from surgery.width.rules import register_rule as register_rule

if _TYPE_CHECKING:  # a type checker sees the packages, which are imported when they are first used
    from surgery import adapters as adapters
    from surgery import experts as experts
    from surgery import libraries as libraries
    from surgery import merging as merging
    from surgery import optimizers as optimizers
    from surgery import pruning as pruning
    from surgery import symmetry as symmetry
    from surgery import transformers as transformers
    from surgery import vocabulary as vocabulary
    from surgery import widening as widening

__version__ = next((one.version for one in _metadata.distributions(name="layer-surgery")), "not installed")
__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _ModuleType)]
_PACKAGES = (
    "adapters",
    "experts",
    "libraries",
    "merging",
    "optimizers",
    "pruning",
    "symmetry",
    "transformers",
    "vocabulary",
    "widening",
)


def __getattr__(name: str) -> _Any:
    """Import an operation's package when it is first used: `surgery.pruning.prune`."""
    if name in _PACKAGES:
        return _import_module(f"surgery.{name}")
    packages = () if name.startswith("_") else _PACKAGES  # Python and its tools ask for many
    package = next((package for package in packages if name in vars(_import_module(f"surgery.{package}"))), "")
    raise AttributeError(
        f"module 'surgery' has no attribute {name!r}" + (package and f": it is surgery.{package}.{name}")
    )
