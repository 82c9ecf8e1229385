"""FjORD: Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout"
(NeurIPS 2021), and the authors' code, a baseline of Flower.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.heterofl import HeteroFLOptions, heterofl
from fl.algorithms.method import Method
from fl.base.errors import FLError, code_of
from fl.base.settings import several
from fl.engine.losses import Loss, mean
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from fl.models.fleet import identity_plan, remove_grafting
from surgery import Plan, State, SurgeryError, narrow, state
from surgery.plan.positions import Ranges, positions

WidthLevels = dict[str, dict[int, Tensor]]
"""By tensor and axis: for each position how many of the widths, from the smallest on, are without it."""


@dataclass(frozen=True)
class FjORDOptions:
    """FjORD."""

    widths: Annotated[tuple[float, ...], several(float, "FLOAT,...", above=0, most=1)] = (0.2, 0.4, 0.6, 0.8, 1.0)
    """widths that clients sample in every step, as rates of the global model's (the authors' code: 0.2 to 1); a client
    samples its own width or one below it; 1 alone is no ordered dropout"""
    distil: bool = False
    """train a client's whole model in every step, too, and the narrower one on its predictions instead of the labels"""


def fjord(fed: Federation, options: FjORDOptions = FjORDOptions()) -> Algorithm:
    """Train the left-most channels of the model in every step, of a width that the client samples (ordered dropout).

    The server averages each element over the clients that have it, by their samples. Clients' own widths, the most
    that they sample, are --architectures.widths. With widths 1 this is HeteroFL weighted, with all rows and no Scaler;
    and, with one architecture, FedAvg.

    A step's narrower model is the client's model with the weights of channels beyond the width set to 0. So clients
    with different widths train in one stack. Channels beyond it are computed, without an effect; where a norm
    spans several channels they would have one, and such models are refused. Running statistics of batch norms are
    over the steps of all widths; the authors keep some for each width, --norm static_batch has none to keep.

    Raises:
        FLError: for a model with channels that cannot be followed, or with layer or group norms.
    """
    fleet = fed.fleet_or_uniform
    plans = _narrow_plans(fed, options.widths)
    kinds = [_levels(remove_grafting(kind.plan), plans, fed.data.device) for kind in fleet.architectures]
    objective = ordered_dropout(fed.local.loss, options.distil)
    if options.distil and fed.data.task != "classification":
        raise FLError(
            f"--fjord.distil teaches classes, and the data are for {fed.data.task}: leave it out", code="unsupported"
        )

    def client(message, client_states, clients, rng):
        start = message["model"]
        context = [
            {**kinds[fleet.owned[k]], "frozen": {name: weights[name] for name in fed.frozen & weights.keys()}}
            for k, weights in zip(clients, start)
        ]
        return fed.train(start, clients, rng, objective, context)

    plain = HeteroFLOptions(scaler=False, own_rows=False, weighted=True)
    return replace(heterofl(fed, plain), client=client)


def ordered_dropout(loss: Loss, distil: bool) -> Objective:
    """Return the loss of the narrower model, of a random width for each step.

    The context has "levels", "choices" (a model with n narrower ones has n + 1) and "frozen" (parameters that are not
    trained). With `distil` it is the cross entropy of the narrower model with the predictions of the whole one, plus
    the loss of the whole one, as in the authors' code.
    """

    def objective(call: Call, params: State, context: dict, batch: Batch) -> Tensor:
        x, y = batch
        level = (torch.rand((), device=y.device) * context["choices"]).floor()

        def narrower(params: State, x: Tensor) -> Tensor:
            return call({**params, **without({**context["frozen"], **params}, context["levels"], level)}, x)

        if not distil:
            return mean(loss, narrower(params, x), y)
        whole = call(params, x)
        target = whole.detach().flatten(0, -2).softmax(-1)
        return mean(loss, whole, y) + F.cross_entropy(narrower(params, x).flatten(0, -2), target)

    return objective


def without(tensors: State, levels: WidthLevels, largest: Tensor | int) -> State:
    """Return tensors that read channels, with 0 in channels above the largest level."""
    result = {}
    for name, axes in levels.items():
        result[name] = tensors[name]
        for axis, level in axes.items():
            shape = [-1 if i == axis else 1 for i in range(result[name].ndim)]
            result[name] = result[name] * (level <= largest).to(result[name].dtype).view(shape)
    return result


def _narrow_plans(fed: Federation, widths: Sequence[float]) -> list[Plan]:
    """Return where models of widths below 1 lie in the global one, narrowest first.

    Checked to predict the same.
    """
    start, plans = state(fed.model), []
    generator = torch.Generator().manual_seed(0)
    noise = {n: torch.rand(t.shape, generator=generator).to(t) for n, t in start.items() if t.is_floating_point()}
    full = {
        name: tensor + noise[name] * tensor.abs().mean() if name in noise else tensor for name, tensor in start.items()
    }
    x = fed.data.example(4, next(fed.model.parameters()).dtype)
    whole = identity_plan(fed.model)
    for width in sorted({width for width in widths if width < 1}):
        try:
            small, plan = narrow(fed.model, width, x)
        except SurgeryError as error:
            raise FLError(f"FjORD cannot narrow {type(fed.model).__name__}: {error}", code=code_of(error)) from None
        plans.append(plan)
        masked = full | without(full, _levels(whole, [plan], fed.data.device)["levels"], 0)
        with torch.no_grad():
            expected, other = (
                functional_call(m.eval(), s, (x,)) for m, s in ((fed.model, masked), (small, plan.extract(full)))
            )
        if (expected - other).abs().max() > 1e-3 * other.abs().max():
            raise FLError(
                f"FjORD drops channels of {type(fed.model).__name__}, and its layers look at several channels at once, "
                "as layer and group norms do: use --norm static_batch, batch or none, or another --model",
                code="unsupported",
            )
    return plans


def _levels(own_plan: Plan, plans: Sequence[Plan], device: torch.device) -> dict:
    """Return the part of the objective's context that belongs to an architecture.

    The first axis of a tensor is what a layer makes, the others are what it reads.
    """
    levels: WidthLevels = {}
    for name, (source,) in own_plan.entries.items():
        for axis, runs in enumerate(source.index[1:], start=1):
            absent = torch.zeros(own_plan.shapes[source.name][axis], dtype=torch.int64)
            for plan in plans:
                absent += 1
                absent[_places(plan.entries[source.name][0].index[axis])] -= 1
            if (level := absent[_places(runs)]).any():
                levels.setdefault(name, {})[axis] = level.to(device)
    most = max((int(level.max()) for axes in levels.values() for level in axes.values()), default=0)
    return {"levels": levels, "choices": torch.tensor(most + 1.0, device=device)}


def _places(runs: Ranges | None) -> list[int] | slice:
    return slice(None) if runs is None else positions(runs)


METHOD = Method(fjord, FjORDOptions(), clients="heterogeneous", lacks={"low_rank", "several_classifiers"})
