"""FedMR: Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination"
(KDD 2024), algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from fl.algorithms.algorithm import Algorithm, Step
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
    """share of the layers that travel together (Fig. 11's px); 0 shuffles each layer on its own, 1 is Indep"""
    unit: Annotated[str, one_of("layer", "block", "tensor")] = "layer"
    """what is shuffled as one piece: layer (with all its tensors), block (residual blocks whole) or tensor (each on
    its own, as the released code does)"""
    stage1_rounds: Natural = 0
    """rounds at the start that average instead of recombining (section 4.3; the paper: 100 for ResNet-20 and
    VGG-16, 0 for the CNN)"""
    secure: Annotated[int, number(int, least=0, most=100), Rare()] = 0
    """repeats of secure recombination among the clients before they upload, so that the server receives recombined
    models only (Appendix B); 0: none; needs the extra `secure`; a client then uploads its number of pieces times the
    longest piece (VGG-16 for CIFAR-10: 14.5 times its model), and passes all that it has on once more in each repeat"""
    align: Annotated[bool, Rare()] = False
    """permute the hidden widths of the clients' models so that they match the first one's, before they are averaged and
    recombined (Git Re-Basin, Ainsworth et al., 2023); each model computes what it did"""


def fedmr(fed: Federation, options: FedMROptions = FedMROptions()) -> Algorithm:
    """Keep K models; train each on another client, then shuffle every layer among them.

    The i-th model goes to the i-th sampled client. The global model is the uniform mean of the K trained models, taken
    before recombination. It is evaluated and deployed, but never trained (except in stage 1, where it replaces all K
    models).

    With `secure`, the clients exchange layers before they upload (see `fl.secure`), in stage 1 as well. The mean stays
    the same up to the order in which floats are added. The models that a round returns are those that the server
    received, so metrics of clients' models describe recombined models. A client uploads its number of pieces times the
    longest piece: for VGG-16 on CIFAR-10 14.5 times its model.

    With `align`, the server first permutes the hidden widths of each model so that its weights match those of the first
    one (`surgery.symmetry.align`): layers do not fit together if the models' features lie in different orders.
    Metrics of clients' models describe the models as they were trained.
    """
    with naming("--fedmr.unit"):
        every = layers(fed.model, unit=options.unit)
    with naming("--fedmr.segment-fraction"):
        pieces = segments(every, fraction=options.segment_fraction)

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

    steps: list[Step] = [
        *secure_steps(fed, pieces, options.secure, options.align),
        *_alignment_steps(fed, options.align),
    ]
    lacks = frozenset({"open_updates"} if options.secure else ())
    return replace(fedavg(fed), init=init, send=send, aggregate=aggregate, steps=steps, lacks=lacks)


def _alignment_steps(fed: Federation, align: bool) -> list[Step]:
    """Return the step that permutes hidden widths so that the clients' models match; none without `align`."""
    if not align:
        return []
    with naming("--fedmr.align"):  # if the model's widths cannot be followed
        aligner = Aligner(fed.model, example=map_inputs(Tensor.cpu, fed.data.example()))
    return [lambda update, *_: update._replace(received=_aligned(update.received, update.sizes, aligner))]


def _aligned(models: Stack, sizes: Sequence[int], aligner: Aligner) -> Stack:
    """Return the models in the order of the first that arrived, each permuted so that its weights match that one's
    best.

    A client of size 0 was dropped: its model stays.
    """
    arrived = [k for k, size in enumerate(sizes) if size]
    states = unstack(models)
    for k in arrived[1:]:
        states[k] = aligner.plan(aligner.by_weights(states[arrived[0]], states[k])).extract(states[k])
    return stack(states)


METHOD = Method(fedmr, FedMROptions(), lacks={"same_model"})
