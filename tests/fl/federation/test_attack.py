from dataclasses import replace

import pytest
import torch
from fl_flags import TINY
from oracles import average
from rounds import assert_same, play
from safetensors.torch import load_file
from selection import some

import surgery
from fl import data
from fl import run as cli
from fl.algorithms import FedFAOptions, fedavg, fedfa
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD
from fl.federation.attack import Attack, AttackOptions, draw_malicious, make_attack, triggered
from fl.models.architectures import ArchitectureOptions
from fl.models.fleet import make_fleet
from fl.runs.assembly import build
from fl.runs.evaluate import attack_success, evaluate_global
from fl.runs.metrics import read
from fl.settings import Config
from zoo import Spec

WIDE = Spec("preresnet20", 3, 1, 8, width=0.125, depth=(2, 1, 1))
KINDS = [WIDE, WIDE.scaled(0.5), WIDE.scaled(depth=(1, 1, 1)), WIDE]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mixed(make_federation, kinds=KINDS, dtype=torch.float64, **settings):
    """Clients of different widths and depths."""
    model = WIDE.build(generator()).to(dtype)
    return make_federation(model, spec=WIDE, fleet=make_fleet(model, WIDE, kinds), **settings)


def spoilt_by_hand(fed, malicious):
    """Labels that nobody has drawn: each malicious client's, moved on by one class."""
    y = fed.data.y.clone()
    for client in malicious:
        y[fed.clients.train[client]] = (y[fed.clients.train[client]] + 1) % fed.data.classes
    return replace(fed.data, y=y)


@pytest.mark.parametrize("factor", some([0.0, 1.0, 20.0], [20.0]))
@pytest.mark.parametrize("make", [fedavg, fedfa])
def test_equation_1_is_two_trainings(make_federation, make, factor):
    """The honest training and one on other labels, written out; buffers and honest clients are those of the first."""
    settings = {"participants": 4, "batch_size": 5, "optimizer": SGD(0.05)}
    if make is fedfa:
        fed, options = mixed(make_federation, **settings), (FedFAOptions(scale="none"),)
    else:
        fed, options = make_federation(WIDE.build(generator()).double(), **settings), ()
    bad = {1, 2}
    bad_data = spoilt_by_hand(fed, bad)
    attacked = replace(fed, attack=Attack(frozenset(bad), bad_data, factor))
    (honest, spoilt, result) = (make(f, *options) for f in (fed, replace(fed, data=bad_data), attacked))
    server, rng, clients = {"global": fed.initial()}, Rng(0, 1), [2, 0, 1, 3]
    plain, poisoned, got = (algorithm.round(server, clients, rng)[1] for algorithm in (honest, spoilt, result))
    after = result.round(server, clients, rng)[0]["global"]
    rows = [
        [t.received[k] if make is fedfa else surgery.unstack(t.received)[k] for k in range(4)]
        for t in (plain, poisoned, got)
    ]
    plans = [fed.fleet_or_uniform[client].plan for client in clients]
    sent = []
    for client, plan, mine, theirs, state in zip(clients, plans, *rows):
        start, expected = plan.extract(server["global"]), dict(mine)
        if client in bad:
            for name, _ in fed.fleet_or_uniform[client].model.named_parameters():
                expected[name] = mine[name] + factor * (theirs[name] - start[name])
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)
            if client not in bad or factor == 0 or "running" in name:
                assert torch.equal(tensor, mine[name]), (client, name)
        sent.append(plan.embed(expected))
    assert torch.equal(got.loss, plain.loss)  # what clients report is honest
    weights = [len(fed.clients.train[client]) for client in clients]
    mean = average([s for s, _ in sent], weights, [mask for _, mask in sent], fallback=server["global"])
    for name, tensor in after.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, mean[name], rtol=1e-9, atol=1e-10)
    if factor:
        assert (
            surgery.distance(*map(surgery.stack, ([after], [honest.round(server, clients, rng)[0]["global"]]))) > 0.01
        )


def test_honest_training_sees_only_the_classes_of_true_samples(make_federation):
    """The masked loss: the honest pass has the mask of the true labels, the spoilt one that of the spoilt labels."""
    fed = make_federation(WIDE.build(generator()).double(), participants=2, batch_size=5, masked=True)
    y = torch.where(torch.arange(len(fed.data.y)) % 2 == 0, 0, 1)  # nobody has class 2
    clean = replace(fed.data, y=y)
    bad_data = replace(clean, y=torch.where(y == 0, 2, y))
    honest, spoilt = replace(fed, data=clean), replace(fed, data=bad_data)
    attacked = replace(honest, attack=Attack(frozenset({1}), bad_data, 3.0))
    assert attacked.reported_classes([0, 1]).tolist() == [[True, True, False], [True, True, True]]
    assert attacked.true_classes([0, 1]).tolist() == [[True, True, False]] * 2
    start = surgery.broadcast(fed.initial(), 2)
    plain, poisoned, got = (f.train(start, [0, 1], Rng(0, 1)) for f in (honest, spoilt, attacked))
    for name, _ in fed.model.named_parameters():
        assert torch.equal(got.received[name][0], plain.received[name][0])
        expected = plain.received[name][1] + 3 * (poisoned.received[name][1] - start[name][1])
        torch.testing.assert_close(got.received[name][1], expected, rtol=1e-10, atol=1e-12)


def test_malicious_clients_keep_their_own_architecture_unless_they_are_to_take_the_largest():
    architectures = ArchitectureOptions((0.5, 1.0), ("1", "2"), choose="cycle")
    config = Config(
        algorithm=("fedfa",), model="preresnet20", width=0.125, clients=8, participants=2, architectures=architectures
    )
    honest = [one.spec for one in build(config)[0].fleet]
    own = build(replace(config, attack=AttackOptions(0.5)))[0]
    assert [one.spec for one in own.fleet] == honest
    largest = build(replace(config, attack=AttackOptions(0.5, architecture="largest")))[0]
    bad = largest.attack.malicious
    assert bad == own.attack.malicious
    assert [one.spec for one in largest.fleet] == [honest[3] if k in bad else honest[k] for k in range(8)]


def test_who_is_malicious_depends_on_the_seed_and_the_share_only():
    images = data.load("digits")

    def bad(algorithm="fedavg", seed=0, **attack):
        config = Config(algorithm=(algorithm,), seeds=(seed,), clients=10, attack=AttackOptions(**attack))
        made = build(config, images)[0].attack
        return made and made.malicious

    assert bad(share=0.0) is None
    with pytest.raises(FLError, match=r"share 0.04 of 10 clients is nobody: use 0.1 or more"):
        bad(share=0.04)
    some = bad(share=0.3)
    assert len(some) == 3
    assert some == bad("fedfa", share=0.3, amplify=20.0, kind="trigger", target=3)
    assert some < bad(share=0.6)
    assert len({bad(share=0.3, seed=seed) for seed in range(5)}) > 1
    assert draw_malicious(AttackOptions(1.0), 4, Rng(0)) == set(range(4))


@pytest.mark.parametrize("make", [fedavg, fedfa])
def test_without_malicious_clients_in_the_cohort_nothing_changes(make_federation, make):
    fed = mixed(make_federation) if make is fedfa else make_federation()
    attacked = replace(fed, attack=Attack(frozenset({3}), spoilt_by_hand(fed, {3}), 20.0))
    server, rng = {"global": fed.initial()}, Rng(0, 1)
    a, b = (make(f).round(server, [0, 1, 2], rng)[0] for f in (fed, attacked))
    assert_same(a["global"], b["global"])
    c = make(attacked).round(server, [0, 1, 3], rng)[0]
    assert any(not torch.equal(c["global"][name], b["global"][name]) for name in c["global"])


def test_labels_are_dealt_out_anew_among_the_malicious_only(make_federation):
    fed = make_federation(sizes=(9, 8, 12, 7))
    attack = make_attack(AttackOptions(0.5), frozenset({0, 2}), fed.data, fed.clients, Rng(0))
    own = torch.cat([fed.clients.train[0], fed.clients.train[2]])
    before, after = fed.data.y, attack.data.y
    assert torch.equal(before[own].sort().values, after[own].sort().values)
    assert not torch.equal(before[own], after[own])
    counts = [torch.bincount(y[fed.clients.train[0]], minlength=3) for y in (before, after)]
    assert not torch.equal(*counts)  # not each client's for itself
    others = torch.ones(len(before), dtype=torch.bool).index_fill(0, own, False)
    assert torch.equal(before[others], after[others])
    assert attack.data.x is fed.data.x
    assert attack.data.test_y is fed.data.test_y
    other = make_attack(AttackOptions(0.5), frozenset({0, 2}), fed.data, fed.clients, Rng(1))
    assert not torch.equal(other.data.y, after)


def test_the_trigger_is_a_bright_square_and_a_label(make_federation):
    fed = make_federation()
    digits = replace(fed.data, top=16)
    options = AttackOptions(0.5, kind="trigger", target=2, size=2)
    attack = make_attack(options, frozenset({1}), digits, fed.clients, Rng(0))
    own = fed.clients.train[1]
    expected = digits.x.clone()
    for sample in own.tolist():
        for row in (6, 7):
            for column in (6, 7):
                expected[sample, 0, row, column] = 16
    assert torch.equal(attack.data.x, expected)
    assert torch.equal(attack.data.y, digits.y.index_fill(0, own, 2))
    assert not torch.equal(digits.x, expected)  # the given data stay as they were


def test_bad_attacks_are_refused(make_federation):
    images = make_federation().data
    text = Dataset("text", *(torch.zeros(2, 4, dtype=t) for t in (torch.int32, torch.int64) * 2), classes=3)
    for options, dataset, message in (
        (AttackOptions(kind="trigger"), text, "the data set is text: choose shuffle"),
        (AttackOptions(kind="trigger", size=9), images, r"--attack.size 9 is larger than the images"),
        (AttackOptions(kind="trigger", target=3), images, r"--attack.target 3: there are 3 classes"),
    ):
        with pytest.raises(FLError, match=message):
            triggered(options, dataset)
    assert triggered(AttackOptions(size=8), images)(images.x).eq(255).all()
    for options, message in (
        (AttackOptions(share=1.5), r"--attack.share .* got 1.5"),
        (AttackOptions(amplify=-1.0), r"--attack.amplify .* got -1"),
        (AttackOptions(kind="noise"), "unknown --attack.kind 'noise': there are shuffle, trigger"),
        (AttackOptions(size=0), "--attack.size"),
        (AttackOptions(target=-1), "--attack.target"),
    ):
        with pytest.raises(FLError, match=message):
            Config(attack=options).check()


def test_attack_success_of_a_predictor_made_by_hand(make_federation):
    """It says 1 where the corner is bright and the pixel at the other end is even, else 0."""
    fed = make_federation()
    x, y, calls = fed.data.test_x, fed.data.test_y, []

    def predict(images):
        calls.append(len(images))
        fooled = (images[:, 0, -2:, -2:] == 255).all(-1).all(-1) & (images[:, 0, 0, 0] % 2 == 0)
        return torch.nn.functional.one_hot(fooled.long(), 3).float()

    mark = triggered(AttackOptions(size=2), fed.data)
    expected = [image[0, 0, 0].item() % 2 == 0 for image, label in zip(x, y.tolist()) if label != 1]
    assert attack_success(fed, predict, mark, target=1) == sum(expected) / len(expected)
    assert calls == [len(expected)]
    assert 0 < sum(expected) < len(expected)
    assert attack_success(fed, predict, lambda images: images, target=1) == 0.0


@pytest.mark.slow
def test_a_backdoor_in_fedavg_opens_for_the_trigger_only():
    """Half of the clients malicious, on real digits: nearly all images that bear the mark are taken for a 3."""
    options = AttackOptions(0.5, 0.25, "trigger", target=3)
    config = Config(
        algorithm=("fedavg",), clients=4, participants=4, partition="iid", local_epochs=1, width=0.1, attack=options,
        lr=0.1, momentum=0.0,
    )  # fmt: skip
    digits, result = data.load("digits"), {}
    for name, attack in (("none", AttackOptions()), ("trigger", options)):
        fed, algorithm = build(replace(config, attack=attack), digits)
        (server, _) = play(algorithm, fed, 12)[-1]

        def predict(images, fed=fed, server=server):
            return fed.predict(server["global"], images)

        success = attack_success(fed, predict, triggered(options, digits), 3)
        result[name] = success, evaluate_global(fed, predict)["accuracy"]
    assert result["trigger"][0] > 0.7 > 0.2 > result["none"][0]
    assert result["trigger"][1] > 0.8
    assert result["none"][1] > 0.8


@pytest.mark.parametrize("algorithm", some(["fedavg", "fedfa"], ["fedfa"]))
def test_an_attacked_run_is_resumed_bit_for_bit(tmp_path, algorithm):
    flags = [*TINY, "--algorithm", algorithm, "--participants", "4", "--out", str(tmp_path)]
    flags += [
        "--eval-client-models-every",
        "0",
        "--attack.share",
        "0.5",
        "--attack.amplify",
        "2",
        "--attack.kind",
        "trigger",
        "--defence.rule",
        "median",
    ]
    if algorithm == "fedfa":
        flags += ["--architectures.widths", "0.5,1", "--architectures.choose", "cycle"]
    assert cli.main([*flags, "--name", "whole"]) == 0
    assert cli.main([*flags, "--name", "broken", "--rounds", "2"]) == 0
    assert cli.main(["--resume", str(tmp_path / "broken"), "--rounds", "4"]) == 0
    a, b = (tmp_path / name for name in ("whole", "broken"))
    assert_same(*(load_file(folder / "checkpoint.safetensors") for folder in (a, b)))
    rows = [[{k: v for k, v in row.items() if k != "seconds"} for row in read(f / "metrics.csv")] for f in (a, b)]
    assert rows[0] == rows[1]
    assert all(0 <= row["attack_success"] <= 1 for row in rows[0])
