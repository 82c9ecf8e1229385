"""NeFL: Kang et al., "NeFL: Nested Federated Learning for Heterogeneous Clients" (2023), algorithm 1."""

from dataclasses import dataclass, replace

from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.submodels import with_own_tensors
from fl.base.errors import FLError, code_of
from fl.base.settings import Names
from fl.base.torch_private import BatchOrInstanceNorm
from fl.federation import Federation
from fl.models.fleet import make_example, plan_within
from surgery import Plan, SurgeryError, layers, sections
from zoo import Spec


@dataclass(frozen=True)
class NeFLOptions:
    """NeFL."""

    step_sizes: bool = True
    """give residual branches a learnable step size, as the paper does (zoo models only)"""
    keep: Names = ()
    """blocks that a section is cut to, as patterns: 101 keeps the first and the third of three where two are to stay.
    Without one that fits, the first blocks stay"""

    def adapt(self, spec: Spec) -> Spec:
        """Return the models that the method trains."""
        return replace(spec, step_size=True) if self.step_sizes and "step_size" in spec.architecture.defaults else spec


def nefl(fed: Federation, options: NeFLOptions = NeFLOptions()) -> Algorithm:
    """Train submodels nested in width and depth, which share all but their norms and step sizes.

    Norms and step sizes are averaged over the clients of the same architecture. All other tensors are averaged, element
    by element, over the clients that hold the element, as in HeteroFL. Clients are weighted by their samples. Blocks
    that change the shape always stay (the paper's smallest ResNet-18 leaves two of them out). Clients' widths are
    --architectures.widths; the paper's are sqrt(gamma) for gamma from 0.2 to 1. With one architecture this is FedAvg.

    If no client has the global model's architecture, the global model gets the norms and step sizes that HeteroFL would
    make of the others', so that there is a model to deploy.
    """
    fleet = fed.fleet_or_uniform
    choose = _chooser(options.keep)
    example = make_example(fed.model, fed.spec or fleet.architectures[0].spec)
    depths = {len(section.blocks) for section in sections(fed.model, example=example)}
    if strange := [pattern for pattern in options.keep if len(pattern) not in depths]:
        raise FLError(f"--nefl.keep {strange[0]}: no section has {len(strange[0])} blocks; they have {sorted(depths)}")
    try:
        plans = [plan_within(fed.model, kind.model, "none", choose, kind.spec) for kind in fleet.architectures]
    except SurgeryError as error:
        raise FLError(f"--nefl.keep {','.join(options.keep)}: {error}", code=code_of(error)) from None
    return with_own_tensors(fed, plans, [_apart(kind.model, plan) for kind, plan in zip(fleet.architectures, plans)])


def _chooser(patterns: tuple[str, ...]):
    """(blocks of a section, how many stay) -> their positions."""
    known = {}
    for pattern in patterns:
        if not pattern or set(pattern) - {"0", "1"} or "1" not in pattern:
            raise FLError(f"--nefl.keep {pattern}: a pattern has a 1 for a block that stays and a 0 for others, as 101")
        if (key := (len(pattern), pattern.count("1"))) in known:
            raise FLError(
                f"--nefl.keep has two patterns for {key[1]} of {key[0]} blocks: leave {pattern} or the other out"
            )
        known[key] = [i for i, digit in enumerate(pattern) if digit == "1"]
    return lambda blocks, count: known.get((blocks, count), list(range(count)))


def _apart(model: nn.Module, plan: Plan) -> set[str]:
    """Return the names of an architecture's norms and step sizes."""
    norms = (BatchOrInstanceNorm, nn.GroupNorm, nn.LayerNorm)
    steps = {name for name in plan.entries if name.rpartition(".")[2] == "step"}
    return steps | {
        name for layer in layers(model) if isinstance(model.get_submodule(layer.name), norms) for name in layer.tensors
    }


METHOD = Method(nefl, NeFLOptions(), clients="heterogeneous", lacks={"low_rank"})
