"""Clients' models brought into one order before they are combined."""

from collections.abc import Sequence

from fl.federation import Federation
from surgery import Aligner, Stack, stack, unstack


def aligner_of(fed: Federation) -> Aligner:
    """What may be permuted in the federation's model; SurgeryError if it cannot be followed."""
    return Aligner(fed.model, example=fed.data.normalise(fed.data.x[:2]).cpu())


def aligned(models: Stack, sizes: Sequence[int], aligner: Aligner) -> Stack:
    """The models in the order of the first that arrived, each permuted so that its weights match that one's best.

    A client of size 0 was dropped: its model stays.
    """
    arrived = [k for k, size in enumerate(sizes) if size]
    states = unstack(models)
    for k in arrived[1:]:
        states[k] = aligner.plan(aligner.by_weights(states[arrived[0]], states[k])).extract(states[k])
    return stack(states)
