"""Clients' models brought into one order before they are combined."""

from collections.abc import Sequence

from fl.algorithms.algorithm import Step
from fl.base.errors import naming
from fl.federation import Federation
from surgery import Stack, stack, unstack
from surgery.width.align import Aligner


def alignment_steps(fed: Federation, align: bool) -> list[Step]:
    """The step that permutes hidden widths so that the clients' models match; none without `align`.

    Raises SurgeryError, which names --fedmr.align, for a model whose widths cannot be followed.
    """
    if not align:
        return []
    with naming("--fedmr.align"):
        aligner = Aligner(fed.model, example=fed.data.normalise(fed.data.x[:2]).cpu())
    return [lambda update, *_: update._replace(received=aligned(update.received, update.sizes, aligner))]


def aligned(models: Stack, sizes: Sequence[int], aligner: Aligner) -> Stack:
    """The models in the order of the first that arrived, each permuted so that its weights match that one's best.

    A client of size 0 was dropped: its model stays.
    """
    arrived = [k for k, size in enumerate(sizes) if size]
    states = unstack(models)
    for k in arrived[1:]:
        states[k] = aligner.plan(aligner.by_weights(states[arrived[0]], states[k])).extract(states[k])
    return stack(states)
