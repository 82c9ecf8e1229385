"""FedRolex: Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction"
(NeurIPS 2022), section 3.
"""

from functools import lru_cache

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.heterofl import HeteroFLOptions, heterofl
from fl.algorithms.method import Method
from fl.base.errors import FLError, code_of
from fl.federation import Federation
from fl.models.fleet import as_shallow
from surgery import SurgeryError
from surgery.width.corner import rolling


def fedrolex(fed: Federation, options: HeteroFLOptions = HeteroFLOptions()) -> Algorithm:
    """HeteroFL; the channels that a client gets move on by one each round, and begin again after the last.

    A client that has n of a layer's C channels is sent, in round r, the channels r, r + 1, ..., r + n - 1 modulo C. It
    predicts with its leading channels. With full widths this is HeteroFL.

    Raises:
        FLError: for a model with channels that cannot be followed.
    """
    fleet = fed.fleet_or_uniform
    dtype = next(fed.model.parameters()).dtype
    example = fed.data.example(dtype=dtype)

    @lru_cache(maxsize=len(fleet.architectures))
    def moves(kind: int):
        model, _, spec = fleet.architectures[kind]
        try:
            shallow, depth = as_shallow(fed.model, model, stand="none", spec=spec)
            return depth, rolling(shallow, model, example=example)
        except SurgeryError as error:
            raise FLError(
                f"FedRolex cannot move the channels of {type(model).__name__}: {error}", code=code_of(error)
            ) from None

    for kind in range(len(fleet.architectures)):  # errors come before the first round
        moves(kind)

    @lru_cache(maxsize=len(fleet.architectures))
    def placed(kind: int, by: int):
        depth, roll = moves(kind)
        return depth.compose(roll(by))

    return heterofl(fed, options, lambda client, number: placed(fleet.owned[client], number))


METHOD = Method(
    fedrolex,
    HeteroFLOptions(),
    clients="heterogeneous",
    labels=lambda options: options.own_rows,
    lacks={"low_rank"},
)
