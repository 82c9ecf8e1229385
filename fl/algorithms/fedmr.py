"""FedMR: Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination"
(KDD 2024), algorithm 1.
"""

from dataclasses import dataclass

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.base.errors import FLError, naming
from fl.federation import Federation
from fl.federation.own import shared
from fl.secure import recombine, require
from surgery import broadcast, layers, permutations, segments, shuffle


@dataclass(frozen=True)
class FedMROptions:
    """FedMR."""

    fraction: float = 0.0
    """share of the layers that travel together (Fig. 11's px); 0 shuffles each layer on its own, 1 is Indep"""
    unit: str = "layer"
    """what is shuffled as one piece: layer (with all its tensors), block (residual blocks whole) or tensor (each on
    its own, as the released code does)"""
    stage1_rounds: int = 0
    """rounds at the start that average instead of recombining (section 4.3; the paper: 100 for ResNet-20 and
    VGG-16, 0 for the CNN)"""
    secure: int = 0
    """repeats of secure recombination among the clients before they upload, so that the server receives recombined
    models only (Appendix B); 0: none; needs the extra `secure`; a client then uploads its number of pieces times the
    longest piece (VGG-16 for CIFAR-10: 14.5 times its model)"""


def fedmr(fed: Federation, options: FedMROptions = FedMROptions()) -> Algorithm:
    """Keep K models; train each on another client, then shuffle every layer among them.

    The i-th model goes to the i-th drawn client. The global model, which is evaluated and deployed but never
    trained (except in stage 1, where it replaces all K models), is the uniform mean of the K trained models,
    taken before recombination.

    With `secure`, the clients exchange layers before they upload (see `fl.secure`), in stage 1 as well. The mean
    stays the same, but for the order in which floats are added; the models that a round returns are those that the
    server received, so metrics of clients' models are of recombined ones. A client uploads its number of pieces times
    the longest piece: for VGG-16 on CIFAR-10 14.5 times its model.
    """
    if options.stage1_rounds < 0:
        raise FLError(f"--fedmr.stage1-rounds is a number of rounds, got {options.stage1_rounds}")
    with naming("--fedmr.unit"):
        every = layers(fed.model, unit=options.unit)
    with naming("--fedmr.fraction"):
        pieces = segments(every, fraction=options.fraction)
    _check_secure(options, fed.participants, len(pieces))

    def init():
        start = fed.initial()
        return {"global": start, "slots": broadcast(start, fed.participants)}

    def round(server, clients, rng):
        trained = fed.train(server["slots"], clients, rng)
        if options.secure:
            trained = recombine(trained, server["slots"], clients, pieces, options.secure, rng)
            if not any(trained.sizes):  # nobody could upload: a warning said why, and the next round may do better
                return server, trained
        mean = fed.average(trained.sent, [size > 0 for size in trained.sizes])  # without those that were dropped
        if rng.round <= options.stage1_rounds:
            slots = broadcast(mean, len(clients))
        else:
            shuffles = permutations(len(pieces), len(clients), generator=rng.torch("recombine"))
            slots = shuffle(trained.sent, segments=pieces, permutations=shuffles)
        return {"global": mean, "slots": slots}, trained

    def predict(server, images, client=None):
        return fed.predict(server["global"], images)

    return Algorithm(init, round, predict, own=lambda server: shared(server["global"], len(fed.clients)))


def _check_secure(options: FedMROptions, participants: int, pieces: int) -> None:
    if options.secure < 0:
        raise FLError(f"--fedmr.secure is a number of repeats, 0 for none, got {options.secure}")
    if not options.secure:
        return
    if participants < 2:
        raise FLError("--fedmr.secure needs two or more --participants: a single model cannot be hidden among others")
    if pieces < 2:
        raise FLError(
            "--fedmr.secure needs models of two or more pieces: in one piece they would only change hands; "
            f"take a smaller --fedmr.fraction than {options.fraction} or another --fedmr.unit"
        )
    require()


METHOD = Method(fedmr, FedMROptions())
