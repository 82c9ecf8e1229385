"""The way to clients on other machines, for a federation: their training is a letter to each and its answer."""

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fl.algorithms import ALGORITHMS
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.config import Config
from fl.data import Dataset
from fl.deploy import secret
from fl.deploy.letters import DTYPES, Letter, Refused, check_tensors, fields, flat, once, shapes, whole
from fl.deploy.objectives import told
from fl.deploy.visits import Visits
from fl.federation import Federation
from fl.federation.cohort import Cohort, States, per_client, select
from fl.federation.local_training import LocalTraining
from fl.federation.own import Level, Own
from fl.federation.trained import Trained
from fl.federation.training import LocalObjective
from fl.federation.visit import Visit
from fl.models.architectures import announced
from fl.models.search import Space, largest_within
from fl.partition import Parts, Splits
from fl.runs.evaluate import held_out
from surgery import Stack, State, stack
from zoo import Spec

_log = logging.getLogger("fl")

Address: TypeAlias = Any
"""Where a node is, as the link knows it."""

_HEADER = 1 << 20  # bytes that an answer may have beside its tensors


class Link(Protocol):
    """Who carries letters, see `fl.deploy.flower`."""

    def nodes(self) -> Sequence[Address]:
        """The nodes that are connected."""

    def ask(
        self, letters: Sequence[tuple[Address, Letter]], timeout: float, limits: Sequence[int]
    ) -> tuple[list[Letter | str], list[tuple[Address, str]]]:
        """Send the letters and wait for the answers; an answer that cannot be used is the reason.

        Args:
            timeout: seconds.
            limits: bytes of each answer that may be read.

        Returns:
            An answer for each letter, and what else came from which node: a second answer, or one to an earlier letter.
        """


class Waiting(NamedTuple):
    """How long the server waits for whom.

    Attributes:
        round: seconds for the answers of a round.
        quorum: how many of a round's clients have to answer.
        nodes: how many nodes there have to be before the first round.
        start: seconds to wait for these.
    """

    round: float = 600.0
    quorum: int = 1
    nodes: int = 1
    start: float = 120.0


class Remote:
    """See `fl.federation.elsewhere.Elsewhere`.

    Attributes:
        dataset: stands in for the data of all clients, and has the test set that the server was given.
        bytes_down, bytes_up: what the tensors of all letters and answers took so far.
    """

    def __init__(self, link: Link, config: Config, test: Dataset, waiting: Waiting = Waiting()) -> None:
        """Wait for the nodes, and learn what they have."""
        (name,) = config.algorithm
        self._link, self._waiting = link, waiting
        method = ALGORITHMS[name]
        self.labels = bool(
            config.masked_loss or getattr(method, "labels", lambda options: False)(getattr(config, name, None))
        )
        self._places: dict[int, Address] = {}
        self._said: dict[int, dict[str, Any]] = {}
        self._strange: dict[Address, str] = {}
        self._text: str = ""
        self._fed: Federation | None = None
        self._visits = Visits(self)
        self.bytes_down = self.bytes_up = 0
        self._test = test
        self._wait()
        here = [self._said[client] for client in range(len(self._said))]
        self.splits = _splits([said["sizes"] for said in here])
        self.dataset = self._stand_in(here)
        self.config = dataclasses.replace(config, clients=len(here), models_every=0)

    def specs(self, space: Space) -> list[Spec] | None:
        """The architecture of each client, by the width and depth, or the budget, that its node reported."""
        budgets = [self._said[client]["budget"] for client in sorted(self._said)]
        if not any(budgets):
            return None
        if lacking := [client for client, budget in enumerate(budgets) if not budget]:
            raise FLError(f"client {lacking[0]} reported no width, depth or budget, and others did: give each node one")
        specs = []
        for client, budget in enumerate(budgets):
            if "budget" in budget:
                specs.append(largest_within(space, budget["budget"], self.config.architectures.unit))
            else:
                row = {key: list(v) if isinstance(v, list | tuple) else v for key, v in budget.items()}
                specs += announced(space, [row], f"what client {client} reported")
        return specs

    def meet(self, population: Federation) -> None:
        """The federation is complete."""
        if population.attack:
            raise FLError("--attack simulates malicious clients: with real ones leave it out")
        self._fed = population
        settings = dataclasses.replace(self.config, name=None, resume=None)
        self._text = settings.to_yaml()

    def train(
        self, population: Any, local: LocalTraining, cohort: Cohort, objective: LocalObjective, rng: Rng
    ) -> tuple[States, Tensor, Sequence[int]]:
        """See `Elsewhere.train`."""
        self._check(population, local, objective)
        letters, starts = [], []
        for k in range(len(cohort.clients)):
            letter, start = self.letter(cohort, objective, rng, k)
            letters.append(letter)
            starts.append(start)
        limits = [_HEADER + 8 + sum(tensor.nbytes for tensor in start.values()) for start in starts]

        def read(k: int, answer: Letter) -> tuple[State, Tensor]:
            return self.trained(answer, letters[k], starts[k], "trained")

        came = self.exchange(cohort.clients, letters, limits, read, rng.round)
        return self._assembled(cohort, starts, came)

    def kept(self) -> State:
        """See `Elsewhere.kept`."""
        return self._visits.kept(len(self.splits))

    def visit(
        self, one: Visit, received: Stack, mine: State, start: State, clients: Sequence[int], rng: Rng, **more: Any
    ) -> tuple[Trained, State]:
        """See `Elsewhere.visit`."""
        return self._visits.visit(self._fed, one, received, mine, start, clients, rng, **more)

    def recombine(
        self, starts: Stack, clients: Sequence[int], pieces: Sequence[Sequence[str]], repeats: int, rng: Rng
    ) -> Trained:
        """See `Elsewhere.recombine`."""
        return secret.recombine(self, starts, clients, pieces, repeats, rng)

    @property
    def federation(self) -> Federation:
        """The clients, as the server knows them."""
        return self._fed

    def judge(self, what: str, levels: Sequence[Level], more: Sequence[Level | None], mean: bool) -> Tensor:
        """See `Elsewhere.judge`."""
        return self._visits.judge(self._fed, what, levels, more, mean)

    def score(self, own: Own) -> dict[str, list[dict[str, float]]]:
        """See `Elsewhere.score`."""
        return self._visits.score(self._fed, own, held_out(self._fed))

    def exchange(
        self,
        clients: Sequence[int],
        letters: Sequence[Letter],
        limits: Sequence[int],
        read: Callable[[int, Letter], Any],
        round: int | None,
        what: str = "evaluation",
    ) -> dict[int, Any]:
        """Send each client its letter and read the answers, by the clients' positions; those that could not be used
        are missing, and named in one line.

        Args:
            limits: bytes of each answer.
            read: (position, answer) -> what it says. Raises Refused for one that cannot be used.
            round: of the training, which needs a quorum; None: anything else, which does not.
            what: what else.

        Raises:
            FLError: if fewer than the quorum are left.
        """
        self._look_around(clients)
        known = [k for k, client in enumerate(clients) if client in self._places]
        sendable = [(self._places[clients[k]], letters[k]) for k in known]
        answers, notes = ([], [])
        if known:
            answers, notes = self._link.ask(sendable, self._waiting.round, [limits[k] for k in known])
        came, lost = {}, {k: "its node is not connected" for k in range(len(clients)) if k not in known}
        for k, answer in zip(known, answers):
            try:
                if isinstance(answer, str):
                    raise Refused(answer)
                came[k] = read(k, answer)
            except Refused as error:
                lost[k] = str(error)
        self.bytes_down += sum(letter.size for _, letter in sendable)
        self.bytes_up += sum(answer.size for answer in answers if isinstance(answer, Letter))
        self._report(clients, lost, notes, round, what)
        return came

    def _check(self, population: Any, local: LocalTraining, objective: LocalObjective) -> None:
        if population.model is not self._fed.model or local != self._fed.local:
            raise FLError(
                "this method trains another model than the clients have, or in another way, which cannot be told to "
                "other machines: take another --algorithm"
            )
        if objective.per_sample is not None:
            raise FLError("this method gives clients a value for each of their samples: take another --algorithm")

    def letter(self, cohort: Cohort, objective: LocalObjective, rng: Rng, k: int) -> tuple[Letter, State]:
        """What the k-th client of the cohort is sent, and the state that it starts from."""
        fed, client = self._fed, cohort.clients[k]
        start = per_client(cohort.states)[k]
        context = objective.context or {}
        mine = context[k] if isinstance(context, list) else _first(select(context, [k]))
        tensors, same = once({**flat(start, "state"), **flat(mine, "context")})
        more = {"objective": told(objective.objective), "ascent": told(objective.ascent), "same": same}
        spec = fed.fleet[client].spec if fed.fleet else None
        return Letter({**self.header("train", client, rng, spec), **more}, tensors), start

    def header(self, kind: str, client: int, rng: Rng, spec: Spec | None = None) -> dict[str, Any]:
        """What every letter about models says.

        Args:
            spec: of the client's model; None: it is the global one.
        """
        fed = self._fed
        return {
            "kind": kind,
            "config": self._text,
            "method": self.config.algorithm[0],
            "round": rng.round,
            "seed": rng.seed,
            "client": client,
            "clients": len(fed.clients),
            "batch": fed.local.size_of_batches(fed.clients.train),
            "model": None if spec is None else dataclasses.asdict(spec),
            "full": dataclasses.asdict(fed.spec),
            "ticket": secrets.token_hex(8),
        }

    def trained(self, answer: Letter, letter: Letter, start: State, kind: str) -> tuple[State, Tensor]:
        """(state, loss) of an answer. Raises Refused for one that cannot be used.

        Args:
            start: the tensors as they were sent; the answer has the same names, shapes and dtypes.
            kind: what the answer calls itself.
        """
        said = fields(answer.header, {"kind": str, "round": int, "ticket": str, "client": int, "samples": int})
        for name in ("round", "client", "ticket"):
            if said[name] != letter.header[name]:
                if name == "ticket":
                    raise Refused("it answers another letter")
                raise Refused(f"it answers for {name} {said[name]}, and {letter.header[name]} was asked")
        if said["kind"] != kind:
            raise Refused(f"it sent {said['kind']!r} instead of a trained model")
        if said["samples"] != self._said[said["client"]]["sizes"][0]:
            raise Refused(
                f"it trained on {said['samples']} samples, and reported {self._said[said['client']]['sizes'][0]} at "
                "the start"
            )
        tensors = dict(answer.tensors)
        loss = tensors.pop("loss", None)
        if loss is None or loss.ndim or not loss.is_floating_point() or not loss.isfinite():
            raise Refused("its loss is infinite, not a number, or missing")
        before = flat(start, "state")
        check_tensors(tensors, shapes(before), {name: tensor.cpu() for name, tensor in before.items()})
        device = self._fed.data.x.device
        return {name.removeprefix("state/"): tensor.to(device) for name, tensor in tensors.items()}, loss.to(device)

    def quorum(self, clients: Sequence[int]) -> int:
        """How many of these have to answer."""
        return max(1, min(self._waiting.quorum, len(clients)))

    def _report(
        self,
        clients: Sequence[int],
        lost: dict[int, str],
        notes: Sequence[tuple[Address, str]],
        round: int | None,
        what: str = "evaluation",
    ) -> None:
        """Log the outcome of a round in one line if anything went wrong; raise FLError if too few clients are left."""
        what = what if round is None else f"round {round}"
        names = {place: client for client, place in self._places.items()}
        reasons = [f"client {clients[k]} is left out ({reason})" for k, reason in sorted(lost.items())]
        reasons += [f"client {names.get(place, '?')}: {note}" for place, note in notes]
        left = len(clients) - len(lost)
        quorum = self.quorum(clients)
        if left < quorum and round is not None:
            raise FLError(
                f"round {round}: {left} of {len(clients)} clients answered, fewer than --quorum {quorum}: "
                f"{'; '.join(reasons)}. What came before is saved: see to these nodes and go on with --resume"
            )
        if reasons:
            _log.warning("warning: %s: %d of %d clients answered: %s", what, left, len(clients), "; ".join(reasons))

    def _assembled(
        self, cohort: Cohort, starts: Sequence[State], came: dict[int, tuple[State, Tensor]]
    ) -> tuple[States, Tensor, Sequence[int]]:
        dtype = next(loss.dtype for _, loss in came.values())
        nothing = torch.full((), torch.nan, dtype=dtype, device=self._fed.data.x.device)
        each = [came.get(k, (start, nothing)) for k, start in enumerate(starts)]
        states = [state for state, _ in each]
        sizes = [len(self.splits.train[client]) if k in came else 0 for k, client in enumerate(cohort.clients)]
        return (
            stack(states) if isinstance(cohort.states, dict) else states,
            torch.stack([loss.to(dtype) for _, loss in each]),
            sizes,
        )

    def _wait(self) -> None:
        """Until enough nodes have said what they have."""
        wanted, end = self._waiting.nodes, time.monotonic() + self._waiting.start
        while True:
            self._greet(min(self._waiting.start, self._waiting.round))
            if len(self._said) >= wanted and set(self._said) == set(range(len(self._said))):
                return
            if time.monotonic() > end:
                strange = "".join(f"; a node was refused: {reason}" for reason in self._strange.values())
                raise FLError(
                    f"after {self._waiting.start:g} s there are the nodes of clients "
                    f"{', '.join(map(str, sorted(self._said))) or '(none)'}, and {wanted} are needed, numbered from 0 "
                    f"on{strange}: start the others, or give fewer --nodes"
                )
            time.sleep(0.2)

    def _look_around(self, clients: Sequence[int]) -> None:
        """Greet nodes that were started since, if some clients' nodes are gone."""
        there = set(self._link.nodes())
        self._places = {client: place for client, place in self._places.items() if place in there}
        if any(client not in self._places for client in clients):
            self._greet(min(30.0, self._waiting.round))

    def _greet(self, timeout: float) -> None:
        """Ask the nodes that are not known yet what they have."""
        known = set(self._places.values()) | set(self._strange)
        new = [place for place in self._link.nodes() if place not in known]
        if not new:
            return
        hello = Letter({"kind": "hello", "labels": self.labels}, {})
        answers, _ = self._link.ask([(place, hello) for place in new], timeout, [_HEADER] * len(new))
        for place, answer in zip(new, answers):
            try:
                said = self._introduced(answer)
            except Refused as error:
                if isinstance(answer, Letter):  # silence may pass
                    self._strange[place] = str(error)
                    _log.warning("warning: a node is refused: %s", error)
                continue
            self._places[said["client"]], self._said[said["client"]] = place, said

    def _introduced(self, answer: Letter | str) -> dict[str, Any]:
        """What a node says of itself. Raises Refused if it does not fit the test set, or what it said before."""
        if isinstance(answer, str):
            raise Refused(answer)
        wanted = {"kind": str, "client": int, "sizes": list, "sample": list, "target": list, "classes": int, "top": int}
        said = fields(answer.header, {**wanted, "budget": dict})
        client, data = said["client"], self._test
        if said["kind"] != "here" or client < 0 or not whole(said["sizes"]) or len(said["sizes"]) != 3:
            raise Refused("it did not say which client it is and what it has")
        if not said["sizes"][0]:
            raise Refused(f"client {client} has no training samples")
        if client in self._places:
            raise Refused(f"two nodes say that they are client {client}: give each a partition-id of its own")
        ours = [str(data.test_x.dtype).removeprefix("torch."), *data.test_x.shape[1:]]
        for name, here in (
            ("sample", ours),
            ("target", list(data.test_y.shape[1:])),
            ("classes", data.classes),
            ("top", data.top),
        ):
            if said[name] != here:
                raise Refused(f"client {client}'s data have {name} {said[name]}, and the server's test set {here}")
        if self.labels and not (
            whole(said.get("labels"))
            and len(said["labels"]) == data.classes
            and sum(said["labels"]) == said["sizes"][0]
        ):
            raise Refused(f"client {client} did not say how many samples of each class it has")
        if self._fed and (client >= len(self.splits) or said["sizes"] != self._said[client]["sizes"]):
            raise Refused(f"client {client} is no client of this run, or has other data than at the start")
        if not all(isinstance(said["budget"].get(key, 1), int | float | list) for key in said["budget"]):
            raise Refused(f"client {client}'s budget is {said['budget']}")
        return said

    def _stand_in(self, here: Sequence[dict[str, Any]]) -> Dataset:
        """Data of the clients' shapes and sizes, without their content: samples of zeros, which take no memory."""
        count = sum(sum(said["sizes"]) for said in here)
        sample, target = here[0]["sample"], here[0]["target"]
        x = torch.zeros(1, *sample[1:], dtype=DTYPES[sample[0]]).expand(count, *sample[1:])
        y = torch.zeros(1, *target, dtype=torch.int64).expand(count, *target)
        if self.labels:
            order = [torch.arange(len(said["labels"])).repeat_interleave(torch.tensor(said["labels"])) for said in here]
            rest = torch.zeros(count - sum(map(len, order)), dtype=torch.int64)  # validation and test samples
            y = torch.cat([*order, rest])
        return dataclasses.replace(self._test, x=x, y=y)


def _splits(sizes: Sequence[Sequence[int]]) -> Splits:
    """Parts of these sizes, [clients][3]: first the training samples of all clients, one after another, and so on."""
    parts, begin = [], 0
    for each in zip(*sizes):
        offsets = torch.tensor([0, *each]).cumsum(0)
        end = begin + int(offsets[-1])
        parts.append(Parts(torch.arange(begin, end), offsets))
        begin = end
    return Splits(*parts)


def _first(context: Any) -> Any:
    """An objective's input of one client, without the leading axis."""
    if isinstance(context, dict):
        return {name: _first(value) for name, value in context.items()}
    return context[0]
