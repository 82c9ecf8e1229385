import pytest
import torch

from fl.base.rng import Rng
from fl.engine import SGD, Adam, Precision
from fl.engine.augment import Augment
from fl.extensions.attack import AttackOptions
from fl.extensions.defence import Defence
from fl.extensions.presence import PresenceOptions
from fl.federation.aggregator import WeightedMean
from fl.runs.assembly import build
from fl.settings import Config


def test_simulation__every_setting_reaches_the_federation():
    config = Config.of(
        algorithm="fedavg", clients=7, participants=3, local_epochs=2, batch_size=9, lr=0.3, momentum=0.4,
        weight_decay=0.05, partition="iid", backend="vmap", width=0.5, norm="group", model="resnet20",
        local_valid=0.1, local_test=0.2, nesterov=True, clip=0.7, max_parallel_clients=2, lr_schedule="step",
        lr_factor=0.5,
        lr_steps=(0.25,), rounds=8,
    )  # fmt: skip
    fed, _ = build(config)
    adam = Config.of(algorithm="fedavg", optimizer="adam", lr=0.1, betas=(0.8, 0.99), weight_decay=0.1, clip=2.0)
    assert build(adam)[0].local.optimizer == Adam(0.1, 0.8, 0.99, weight_decay=0.1, clip=2.0)
    adamw = build(adam.replace(optimizer="adamw", lr_schedule="exponential", lr_decay=0.5, lr_warmup=1))[0].local
    assert adamw.optimizer == Adam(0.1, 0.8, 0.99, weight_decay=0.1, clip=2.0, decoupled=True)
    assert [adamw.schedule(number) for number in (1, 2, 3)] == [0.5, 0.5, 0.25]
    assert (fed.participants, fed.local.epochs, fed.local.batch_size, fed.local.backend) == (3, 2, 9, "vmap")
    assert fed.local.optimizer == SGD(lr=0.3, momentum=0.4, weight_decay=0.05, nesterov=True, clip=0.7)
    assert fed.local.max_parallel_clients == 2
    assert [fed.local.schedule(number) for number in (2, 3)] == [1, 0.5]
    assert fed.model.head.in_features == 32
    assert isinstance(fed.model.stem.norm, torch.nn.GroupNorm)
    totals = [sum(map(len, split)) for split in fed.clients]
    assert len(totals) == 7
    assert max(totals) - min(totals) <= 1  # IID
    assert all(len(s.valid) == round(0.1 * t) for s, t in zip(fed.clients, totals, strict=True))
    assert all(len(s.test) == round(0.2 * t) for s, t in zip(fed.clients, totals, strict=True))


def test_simulation__what_happens_to_clients_and_their_models_reaches_the_federation():
    attack, defence = AttackOptions(share=0.3, amplify=4.0), Defence("trimmed", trim=0.3, clip=2.0)
    config = Config.of(
        algorithm="fedavg", clients=10, participants=3, rounds=6, partition="clusters", clusters=(2,), crop=2,
        flip=True, precision="bf16", channels_last=True, deterministic=False, masked_loss=True,
        presence=PresenceOptions(0.2, 0.3), attack=attack, defence=defence,
    )  # fmt: skip
    fed, algorithm = build(config)
    (attacking,) = fed.training
    assert fed.local.augment == Augment(crop=2, flip=True)
    assert fed.local.precision == Precision("bf16", channels_last=True, deterministic=False)
    assert fed.local.masked
    assert len(fed.malicious) == 3
    assert attacking.malicious == fed.malicious
    assert attacking.amplify == 4.0
    assert not torch.equal(attacking.data.y, fed.data.y)
    assert fed.aggregator == defence
    assert len(algorithm.steps) == 1
    drawn = [{*algorithm.choose({}, Rng(seed, number))} for number in (1, 6) for seed in range(99)]
    assert [len(set().union(*some)) for some in (drawn[:99], drawn[99:])] == [8, 7]
    assert fed.truth.unique().tolist() == [0, 1]
    assert fed.needs().keys() == {"masked_logits", "changed_updates", "plain_average", "open_updates"}
    plain, _ = build(Config.of(algorithm="fedavg"))
    assert (plain.local.augment, plain.local.precision, plain.aggregator) == (Augment(), Precision(), WeightedMean())
    assert (plain.training, plain.malicious, plain.local.masked, plain.needs()) == ((), set(), False, {})


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_simulation__streams_differ_by_seed_round_client_and_purpose(kind):
    def first(purpose, client, rng):
        generator = getattr(rng, kind)(purpose, client)
        return generator.random() if kind == "numpy" else torch.rand((), generator=generator).item()

    base = ("batches", 3, Rng(0, 1))
    others = [("sample", 3, Rng(0, 1)), ("batches", 4, Rng(0, 1)), ("batches", 3, Rng(1, 1)), ("batches", 3, Rng(0, 2))]
    assert len({first(*base), *(first(*other) for other in others)}) == 5
    assert first(*base) == first(*base)
