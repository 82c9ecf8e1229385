"""Secure aggregation: the server gets the weighted mean of what a round's clients send, and nothing of any one of them.

Masks, keys and shares are those of flwr's SecAgg+ (Bell et al., "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead", CCS 2020) among all clients of the round: its mod runs on the nodes, its workflow here.
These speak of Flower's older messages, FitIns and FitRes, which are made here and seen nowhere else.
"""

import json
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.deploy.flower import Grid, GridLink, Message, RecordDict, TooLong, bounded, packed, reason, unpacked
from fl.deploy.messages import InvalidMessage, NodeMessage, printable

LEAST = 3
"""Clients of a round at least: of two, each knows the other's update from the mean and its own."""
_EXTRA = 1 << 20  # bytes of an answer beside its numbers: keys and shares
_BROKEN = (
    FLError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
)  # what flwr raises for odd content


def levels(clients: int) -> int:
    """How many steps the range of an update is divided into: as many as the sum of all has room for in 32 bits.

    >>> levels(3) == levels(2) == 2**30, levels(10) == 2**28
    (True, True)
    """
    return 1 << (32 - clients.bit_length())


def needed(clients: int) -> int:
    """How many of a round's clients have to stay to its end; so many can take the masks of lost ones away.

    >>> needed(3), needed(10)
    (3, 7)
    """
    return max(LEAST, math.ceil(2 * clients / 3))


class MaskedLink(GridLink):
    """Requests over a Flower grid, with or without secure aggregation."""

    def mean(
        self,
        requests: Sequence[tuple[int, NodeMessage]],
        most: int,
        span: float,
        length: int,
        check: Callable[[NodeMessage, NodeMessage], None],
        timeout: float,
    ) -> tuple[Tensor | None, dict[int, NodeMessage], dict[int, str]]:
        """The mean of the vectors with which nodes answer, weighted by their numbers of samples.

        Nobody has trained before all keys are there, so without those who fall silent until then the rest begin again.
        Who is lost later is left out, as long as `needed` stay.

        Args:
            requests: what each node is asked.
            most: the largest of their numbers of samples.
            span: the largest number of a vector, and the least is its negative.
            length: of a vector.
            check: (answer, request) -> None. Raises InvalidMessage for a header that does not fit.
            timeout: seconds for each of the four exchanges.

        Returns:
            The mean [length] in float64, None if too few stayed; the answers, without any number of a vector; why
            others are lost.
        """
        from flwr.common import FitIns, Parameters, parameters_to_ndarrays
        from flwr.server.workflow import SecAggPlusWorkflow
        from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
        from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState

        asked, results = dict(requests), []
        carrier = _Carrier(self.grid, asked, length, check)

        def keep(round, fitres, failures):
            results.extend(fitres)
            return None, {}

        def instructions(round, parameters, manager):
            return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in asked]

        nothing = packed(NodeMessage({}, {}))["tensors"]
        round = {Key.CURRENT_ROUND: requests[0][1].header["round"]}
        context: Any = SimpleNamespace(  # what the workflow reads of a run in Flower's older form
            state=SimpleNamespace(
                config_records={MAIN_CONFIGS_RECORD: round}, array_records={MAIN_PARAMS_RECORD: nothing}
            ),
            strategy=SimpleNamespace(configure_fit=instructions, aggregate_fit=keep),
            client_manager=SimpleNamespace(num_available=lambda: len(asked)),
        )
        try:
            while len(asked) >= LEAST:
                workflow: Any = SecAggPlusWorkflow(
                    1.0,
                    needed(len(asked)),
                    max_weight=float(most),
                    clipping_range=float(span),
                    quantization_range=levels(len(asked)),
                    timeout=timeout,
                )
                state = WorkflowState()
                agreed = workflow.setup_stage(carrier, context, state)
                agreed = agreed and workflow.share_keys_stage(carrier, context, state)
                if silent := asked.keys() - state.active_node_ids:
                    for node in silent:
                        del asked[node]
                    continue
                state.nid_to_fitins = {node: packed(request) for node, request in asked.items()}
                if agreed and workflow.collect_masked_vectors_stage(carrier, context, state):
                    workflow.unmask_stage(carrier, context, state)
                break
        except (*_BROKEN, TooLong) as error:
            raise FLError(f"secure aggregation: what a node sent cannot be used: {printable(error)}") from error
        if not results:
            return None, {}, carrier.lost
        (mean,) = parameters_to_ndarrays(results[0][1].parameters)
        said = {proxy.node_id: NodeMessage(json.loads(one.metrics["header"]), {}) for proxy, one in results}
        return torch.from_numpy(mean), said, {node: why for node, why in carrier.lost.items() if node not in said}


class _Carrier:
    """A grid as the workflow uses one. It passes on only what can be used, and remembers why the rest cannot.

    Attributes:
        lost: why a node has not answered as it should.
    """

    def __init__(
        self, grid: Grid, requests: dict[int, NodeMessage], length: int, check: Callable[[Any, Any], None]
    ) -> None:
        self._grid, self._requests, self._length, self._check = grid, requests, length, check
        self.lost: dict[int, str] = {}

    def send_and_receive(self, messages: Sequence[Message], timeout: float) -> list[Message]:
        with bounded(self._grid, len(messages) * (8 * self._length + _EXTRA)):
            replies = self._grid.send_and_receive(messages, timeout=timeout)
        self.lost |= {message.metadata.dst_node_id: f"no answer within {timeout:g} s" for message in messages}
        fine = []
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                self._read(node, reply)
            except _BROKEN as error:
                self.lost[node] = printable(error)
            else:
                fine.append(reply)
                self.lost.pop(node, None)
        return fine

    def _read(self, node: int, reply: Message) -> None:
        """Raise one of _BROKEN for what the workflow could not use."""
        from flwr.common import bytes_to_ndarray
        from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key
        from flwr.compat.common.recorddict_compat import recorddict_to_fitres

        if reply.has_error():
            raise InvalidMessage(reason(reply))
        said = reply.content.config_records[RECORD_KEY_CONFIGS]
        if Key.MASKED_PARAMETERS not in said:
            return
        header = json.loads(str(recorddict_to_fitres(reply.content, keep_input=True).metrics["header"]))
        self._check(NodeMessage(header, {}), self._requests[node])
        parts = [bytes_to_ndarray(part) for part in said[Key.MASKED_PARAMETERS]]  # NumPy's format, without pickles
        if [(part.shape, str(part.dtype)) for part in parts] != [((1,), "int64"), ((self._length,), "int64")]:
            raise InvalidMessage("it sent other numbers than were asked for")


def is_masked(content: RecordDict) -> bool:
    """Whether a message is one of secure aggregation."""
    from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS

    return RECORD_KEY_CONFIGS in content


def answered_masked(message: Message, context: Any, answer: Callable[[NodeMessage], NodeMessage]) -> Message:
    """A node's reply in one of the four exchanges, or why there is none. Only a masked vector leaves here."""
    from flwr.app import Error, Message, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
    from flwr.common.constant import ErrorCode
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict

    def train(message: Any, context: Any) -> Any:
        request = unpacked(RecordDict({name: message.content[name] for name in ("tensors", "message")}))
        if not request.header.get("masked"):
            raise InvalidMessage("it is asked for a masked vector by a request for something else")
        header, tensors = answer(request)
        vector = ndarrays_to_parameters([tensors["vector"].cpu().numpy()])
        result = FitRes(Status(Code.OK, ""), vector, header["samples"], {"header": json.dumps(header)})
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)

    try:
        return secaggplus_mod(message, context, train)
    except _BROKEN as error:
        return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, str(error)[:300]), reply_to=message)
