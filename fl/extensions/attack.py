"""Malicious clients, which also train on poisoned data (FedFA, equation 1).

They add what they learnt there, amplified, to what they send.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fl.algorithms.extension import Extension
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import AtLeast0, Bounds, OnlyWith, Share, check_values, one_of
from fl.data import Dataset
from fl.engine.work import Meter
from fl.federation import Federation
from fl.federation.cohort import States, as_before, classes_held, replace_rows, select, stacks
from fl.federation.trainer import Stage, Trainer, Training
from fl.federation.update import ClientUpdate
from fl.partition import Splits
from surgery.transfer import upload

_ATTACKED = OnlyWith("share", Bounds(above=0))
_NEEDS = {"changed_updates": "--attack", "plain_average": "--attack"}


@dataclass(frozen=True)
class AttackOptions:
    """Malicious clients."""

    share: Share = 0.0
    """share of the clients who are malicious, chosen at random; 0: none (FedFA: 0, 0.01, 0.2)"""
    amplify: Annotated[AtLeast0, _ATTACKED] = 1.0
    """lambda of equation 1: how many times the update from poisoned data, labels shuffled among malicious clients, is
    added to the honest one (FedFA: 1, 20)"""
    architecture: Annotated[str, one_of("own", "largest"), _ATTACKED] = "own"
    """which model malicious clients take where clients choose among architectures: own (as if they were honest) or
    largest (FedFA's section 3.1 says that they could, its experiments do not say that they do)"""


@dataclass(frozen=True)
class Attack:
    """The middleware of malicious clients, which train on poisoned data, too.

    They say that they have the classes of both.

    Attributes:
        malicious: who they are.
        data: the data set as they spoil it; the other clients' samples are unchanged.
        amplify: lambda.
    """

    malicious: frozenset[int]
    data: Dataset
    amplify: float

    @property
    def stage(self) -> Stage:
        """Within all others: what malicious clients send may diverge, or come too late."""
        return Stage.TRAINING

    @property
    def needs(self) -> dict[str, str]:
        """The capabilities that a method needs."""
        return dict(_NEEDS)

    def __call__(self, fed: Federation, train: Trainer) -> Trainer:
        """Let malicious clients train again, unmetered, and send a mixture of both."""
        poisoned = replace(fed, data=self.data, training=(), meter=Meter()).train_cohort

        def run(training: Training) -> ClientUpdate:
            update, rows = train(training), self.rows(training.cohort.clients)
            if not rows:
                return update
            malicious = training.select(rows)
            starts, learnt = malicious.cohort.states, poisoned(malicious).states
            sent = self.scale_update(update.received, starts, learnt, rows, fed.trainable.keys())
            return update._replace(received=sent)

        return run

    def report(self, fed: Federation, clients: Sequence[int]) -> Tensor:
        """Return the classes that clients report, see `Federation.reported_classes`."""
        classes, rows = fed.true_classes(clients), self.rows(clients)
        if not rows:
            return classes
        poisoned = classes_held(self.data, fed.clients.train, [clients[row] for row in rows])
        index = upload(torch.tensor(rows), classes.device)
        return classes.index_copy(0, index, classes[index] | poisoned)

    def rows(self, clients: Sequence[int]) -> list[int]:
        """Return the positions of malicious clients in a cohort."""
        return [k for k, client in enumerate(clients) if client in self.malicious]

    @torch.no_grad()
    def scale_update(
        self, honest: States, starts: States, poisoned: States, rows: Sequence[int], names: Set[str]
    ) -> States:
        """Amplify the malicious clients' updates (equation 1).

        Their parameters become start + (honest - start) + lambda (poisoned - start).

        Args:
            honest: the states of the whole cohort. starts, poisoned: of its malicious clients only.
            rows: the positions of the malicious clients in the cohort.
            names: of the parameters. Buffers stay as honestly trained: a negative variance would give the
                attack away.

        >>> attack, one = Attack(frozenset({3}), None, 2.0), lambda x: {"w": torch.full((1, 1), x)}
        >>> attack.scale_update(one(1.0), one(0.5), one(0.0), [0], {"w"})
        {'w': tensor([[0.]])}
        """
        sent = []
        for trained, start, after in zip(stacks(select(honest, rows)), stacks(starts), stacks(poisoned)):
            learnt = names & trained.keys()
            sent.append(trained | {name: trained[name] + self.amplify * (after[name] - start[name]) for name in learnt})
        return replace_rows(honest, rows, as_before(honest, sent))


def draw_malicious(options: AttackOptions, clients: int, rng: Rng) -> frozenset[int]:
    """Sample the malicious clients: their share of all clients, rounded.

    Raises:
        FLError: for options out of their limits, and a share that rounds to no client.
    """
    check_values(options, "attack")
    count = round(options.share * clients)
    if options.share and not count:
        raise FLError(
            f"--attack.share {options.share:g} of {clients} clients is no client: use {1 / clients:.2g} or more, or 0"
        )
    return frozenset(draw(clients, count, rng.torch("malicious")))


def make_attack(
    options: AttackOptions, malicious: frozenset[int], data: Dataset, clients: Splits, rng: Rng
) -> Attack | None:
    """Make the attack of these clients; None for no clients.

    The labels of their samples are shuffled among them.
    """
    if not malicious:
        return None
    samples = torch.cat([clients.train[client] for client in sorted(malicious)]).to(data.y.device)
    order = torch.randperm(len(samples), generator=rng.torch("shuffled labels")).to(samples.device)
    y = data.y.index_copy(0, samples, data.y[samples[order]])
    return Attack(malicious, replace(data, y=y), options.amplify)


def with_attack(fed: Federation, attack: Attack) -> Federation:
    """Return a federation in which some clients are malicious."""
    return replace(fed, training=(*fed.training, attack), malicious=attack.malicious, report=attack.report)


def _malicious(config: Any, rng: Rng) -> frozenset[int]:
    return draw_malicious(config.extensions["attack"], config.clients.number, rng)


def _attack(fed: Federation, config: Any, rng: Rng) -> Federation:
    attack = make_attack(config.extensions["attack"], _malicious(config, rng), fed.data, fed.clients, rng)
    return with_attack(fed, attack) if attack else fed


EXTENSION = Extension(
    AttackOptions(),
    needs=lambda options: _NEEDS if options.share else {},
    federation=_attack,
    largest=lambda config, rng: (
        _malicious(config, rng) if config.extensions["attack"].architecture == "largest" else frozenset[int]()
    ),
)
