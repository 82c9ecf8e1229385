"""FedMR: Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination"
(KDD 2024), algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from fl.algorithms.algorithm import Algorithm, UpdateStep
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.secure_round import secure_steps
from fl.base.errors import naming
from fl.base.settings import Natural, Rare, Share, number, one_of
from fl.data.inputs import map_inputs
from fl.federation import Federation
from surgery import Stack, broadcast, layers, permutations, segments, shuffle, stack, unstack
from surgery.symmetry.alignment import Aligner


@dataclass(frozen=True)
class FedMROptions:
    """FedMR."""

    segment_fraction: Share = 0.0
    """share of the layers that move together as one piece (px in Fig. 11); 0 shuffles each layer separately, 1 moves
    whole models (Indep)"""
    unit: Annotated[str, one_of("layer", "block", "tensor")] = "layer"
    """the piece that is shuffled: layer (with all its tensors), block (a whole residual block) or tensor (each tensor
    separately, as the released code does)"""
    stage1_rounds: Natural = 0
    """number of first rounds that average the models instead of recombining them (section 4.3; the paper: 100 for
    ResNet-20 and VGG-16, 0 for the CNN)"""
    secure: Annotated[int, number(int, least=0, most=100), Rare()] = 0
    """how often the clients exchange pieces before they upload, so that the server receives only recombined models
    (Appendix B); 0: never; needs the extra `secure`. Upload of a client: (number of pieces) x (longest piece); VGG-16
    for CIFAR-10: 14.5 models. Each repeat sends as much again, to other clients"""
    align: Annotated[bool, Rare()] = False
    """permute the hidden widths of the clients' models so that they match the first model, before the server averages
    and recombines them (Git Re-Basin, Ainsworth et al., 2023); each model still computes the same"""


def fedmr(fed: Federation, options: FedMROptions = FedMROptions()) -> Algorithm:
    """Keep K models: train each on a client of its own, then shuffle each layer among them.

    The i-th model goes to the i-th sampled client. The global model is the uniform mean of the K trained models, taken
    before recombination. It is evaluated and deployed, but never trained (except in stage 1, where it replaces all K
    models).

    With `secure`, the clients exchange layers before they upload (see `fl.secure`), in stage 1 as well. The mean stays
    the same up to rounding, since floats are added in another order. The round returns the models that the server
    received, so metrics of clients' models describe recombined models. `FedMROptions.secure` says what a client sends.

    With `align`, the server first permutes the hidden widths of each model so that its weights match the weights of the
    first model (`surgery.symmetry.align`). Otherwise layers of different models may not fit together, since each model
    has its features in another order. Metrics of clients' models describe the models before this permutation.
    """
    with naming("--fedmr.unit"):
        all_layers = layers(fed.model, unit=options.unit)
    with naming("--fedmr.segment-fraction"):
        pieces = segments(all_layers, fraction=options.segment_fraction)

    def init():
        start = fed.initial()
        return {"global": start, "slots": broadcast(start, fed.participants)}

    def send(server, clients, rng):
        return {"model": server["slots"]}

    def aggregate(server, clients, update, rng):
        mean = fed.average(update.received, update.arrived)
        if rng.round <= options.stage1_rounds:
            slots = broadcast(mean, len(clients))
        else:
            shuffles = permutations(len(pieces), len(clients), generator=rng.torch("recombine"))
            slots = shuffle(update.received, segments=pieces, permutations=shuffles)
        return {"global": mean, "slots": slots}

    steps: list[UpdateStep] = [
        *secure_steps(fed, pieces, options.secure, options.align),
        *_alignment_steps(fed, options.align),
    ]
    lacks = frozenset({"open_updates"} if options.secure else ())
    return replace(fedavg(fed), init=init, send=send, aggregate=aggregate, steps=steps, lacks=lacks)


def _alignment_steps(fed: Federation, align: bool) -> list[UpdateStep]:
    """Return the step that permutes hidden widths so that models match, if `align`."""
    if not align:
        return []
    with naming("--fedmr.align"):  # an error names this flag, if the model's widths cannot be traced
        aligner = Aligner(fed.model, example=map_inputs(Tensor.cpu, fed.data.example()))
    return [lambda update, *_: update._replace(received=_align(update.received, update.sizes, aligner))]


def _align(models: Stack, sizes: Sequence[int], aligner: Aligner) -> Stack:
    """Permute each model so that its weights match the first model that arrived.

    A client of size 0 was dropped: its model does not change.
    """
    arrived = [k for k, size in enumerate(sizes) if size]
    states = unstack(models)
    for k in arrived[1:]:
        states[k] = aligner.plan(aligner.by_weights(states[arrived[0]], states[k])).extract(states[k])
    return stack(states)


METHOD = Method(fedmr, FedMROptions(), lacks={"same_model"})
