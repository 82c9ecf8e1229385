"""Client-level differential privacy: what one client can change, how much noise there is, and which epsilon that is."""

import math
from dataclasses import replace
from itertools import product

import fl_nodes as nodes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import assert_equal, left, ran, simulate_all, tiny
from refusals import fl_refused
from rounds import assert_same, made, play
from selection import some
from wrapped import within, wrapped

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.extensions.defence import Defence
from fl.extensions.pace import PaceOptions
from fl.extensions.presence import Presence
from fl.extensions.privacy import Privacy
from fl.runs.metrics import read
from surgery import average, broadcast

NAMES = ["w", "b"]
ABLE = [
    "apfl", "ditto", "fedadagrad", "fedadam", "fedasam", "fedavg", "fedavg_plus", "fedavgm", "fedmut", "fedprox",
    "fedyogi", "moon", "perfedavg", "pfedme",
]  # fmt: skip
"""Methods whose servers need no more than the mean of whole models."""


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def moved(*lengths):
    """(starts, models) of clients whose updates have these lengths, in random directions."""
    draws = generator()
    starts = {"w": torch.randn(3, 4, generator=draws), "b": torch.randn(5, generator=draws), "fixed": torch.ones(2)}
    models = {name: tensor.repeat(len(lengths), *[1] * tensor.ndim) for name, tensor in starts.items()}
    for k, length in enumerate(lengths):
        step = {name: torch.randn(starts[name].shape, generator=draws) for name in NAMES}
        whole = math.sqrt(sum(float(one.square().sum()) for one in step.values()))
        for name in NAMES:
            models[name][k] += length / whole * step[name]
    return broadcast(starts, len(lengths)), models


def plain_mean(models, starts, clip, names):
    """Line by line: the mean of the clipped updates."""
    k = len(starts["w"])
    total = {name: torch.zeros_like(starts[name][0]) for name in names}
    for one in range(k):
        step = {name: models[name][one] - starts[name][one] for name in names}
        length = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in step.values()))
        for name in names:
            total[name] += step[name] * min(1, clip / length) if length else 0
    return {name: starts[name][0] + total[name] / k for name in names}


def test_privacy__the_mean_is_that_of_the_clipped_updates():
    starts, models = moved(0.5, 1.0, 3.0, 0.0, 20.0)
    models["fixed"] += 5.0  # which is no parameter
    mean, clip = Privacy(clip=1.0, noise=0.0).mean(models, starts, torch.tensor(1.0), NAMES, generator())
    expected = plain_mean(models, starts, 1.0, NAMES)
    torch.testing.assert_close({name: mean[name] for name in NAMES}, expected)
    assert torch.equal(mean["fixed"], torch.ones(2))
    assert clip == 1


LENGTHS = st.lists(st.sampled_from([0.0, 1e-20, 0.3, 1.0, 7.0, 1e19, 1e38, math.inf, math.nan]), min_size=2, max_size=5)


@given(lengths=LENGTHS, other=st.sampled_from([0.0, 0.3, 1.0, 9.0, 1e38, math.inf, math.nan]), clip=st.floats(0.01, 10))
def test_privacy__no_client_changes_the_sum_by_more_than_two_clips(lengths, other, clip):
    """... whatever it sends, nor by more than one if it stays where it started."""
    means = []
    for first in (lengths[0], other, 0.0):
        starts, models = moved(*[1.0] * len(lengths))
        for k, length in enumerate([first, *lengths[1:]]):
            for name in NAMES:
                models[name][k] = starts[name][k] + length * (models[name][k] - starts[name][k])
        privacy = Privacy(clip=clip, noise=0.0)
        means.append(privacy.mean(models, starts, torch.tensor(clip), NAMES, generator())[0])
    for mean, most in ((means[1], 2), (means[2], 1)):
        change = math.sqrt(sum(float((mean[n] - means[0][n]).double().square().sum()) for n in NAMES)) * len(lengths)
        assert change <= most * clip * (1 + 1e-4) + 1e-5  # of rounding


@pytest.mark.parametrize("privacy", [Privacy(3.0, 0.8), Privacy(3.0, 0.8, quantile=0.5, quantile_noise=0.5)])
def test_privacy__the_noise_has_the_deviation_that_it_says(privacy):
    k, n = 4, 40_000
    starts = {"w": torch.zeros(k, n)}
    mean, _ = privacy.mean(starts, starts, torch.tensor(3.0), ["w"], generator())
    factor = 0.8 if not privacy.quantile else (0.8**-2 - 1.0) ** -0.5  # Andrew et al.: 2 * 0.5 is the other's
    assert mean["w"].std().item() == pytest.approx(factor * 3.0 / k, rel=0.02)
    assert abs(mean["w"].mean().item()) < 5 * factor * 3.0 / k / math.sqrt(n)
    again = privacy.mean(starts, starts, torch.tensor(3.0), ["w"], generator())[0]
    other = privacy.mean(starts, starts, torch.tensor(3.0), ["w"], generator(1))[0]
    assert torch.equal(mean["w"], again["w"])
    assert not torch.equal(mean["w"], other["w"])


@pytest.mark.slow
def test_privacy__the_number_of_short_updates_has_noise_as_well():
    privacy, start = Privacy(1.0, 0.8, quantile=0.5, quantile_noise=2.0), {"w": torch.zeros(4, 1)}
    clips = [privacy.mean(start, start, torch.tensor(1.0), ["w"], generator(seed))[1] for seed in range(3000)]
    counts = 4 * (0.5 - torch.stack(clips).log() / 0.2)  # of which all four are short
    assert counts.mean().item() == pytest.approx(4, abs=0.15)
    assert counts.std().item() == pytest.approx(2.0, rel=0.06)


@pytest.mark.parametrize(
    ("first", "quantile"), some(product((0.01, 100.0), (0.25, 0.5, 0.9)), [(0.01, 0.9), (100.0, 0.25)])
)
def test_privacy__the_clip_comes_to_the_quantile(quantile, first):
    lengths = torch.linspace(1, 5, 101).tolist()
    starts, models = moved(*lengths)
    privacy, clip, seen = Privacy(first, 0.5, quantile=quantile), torch.tensor(first), []
    for number in range(200):
        _, clip = privacy.mean(models, starts, clip, NAMES, generator(number))
        seen.append(clip.item())
    assert sum(seen[-50:]) / 50 == pytest.approx(1 + 4 * quantile, rel=0.05)


# Whole rounds.


def test_privacy__without_noise_and_bound_it_is_fedavg_with_equal_weights(make_federation):
    fed = make_federation("cnn", sizes=(7, 7, 7, 7))
    hidden = within(fedavg(fed), privacy=Privacy(clip=1e9, noise=0.0))
    for (one, _), (other, update) in zip(play(fedavg(fed), fed), play(hidden, fed)):
        torch.testing.assert_close(one["global"], other["global"])
        assert update.metrics["update_clip"] == 1e9
        assert "epsilon" not in update.metrics


def test_privacy__how_many_samples_a_client_has_does_not_count(make_federation):
    fed = make_federation("cnn", sizes=(3, 40, 12, 5))
    algorithm = within(fedavg(fed), privacy=Privacy(clip=1e9, noise=0.0))
    server = algorithm.init()
    after, update = algorithm.round(server, [0, 1, 2], Rng(0, 1))
    torch.testing.assert_close(after["global"], average(update.received))
    assert update.sizes == (3, 40, 12)


@pytest.mark.parametrize("name", some(ALGORITHMS, ["fedavg", "fedadam", "fedmr"]))
def test_privacy__methods_see_only_the_private_mean_or_refuse(name, make_federation):
    """With updates that are cut to nothing, what clients have does not reach what the server stores."""
    pytest.importorskip("dp_accounting")
    fed, privacy = make_federation("cnn"), Privacy(clip=1e-30, noise=1.0)
    if name not in ABLE:
        with pytest.raises(FLError, match=f"{name} .*: leave --privacy.clip out"):
            within(made(name, fed), privacy=privacy)
        return
    history = []
    for labels in (fed.data.y, (fed.data.y + 1) % 3):
        algorithm = within(made(name, replace(fed, data=replace(fed.data, y=labels))), privacy=privacy)
        server = algorithm.init()
        for number in (1, 2):
            server, update = algorithm.round(server, [0, 1, 2], Rng(0, number))
            assert update.metrics["epsilon"] == privacy.spent(number, 4, 3)
        history.append((server, update.states))
    (one, trained), (other, others) = history
    assert any(not torch.equal(trained[key], others[key]) for key in trained)
    assert one.keys() - {"privacy"} == play(made(name, make_federation("cnn")), fed, 1)[0][0].keys()
    for part in one.keys() - {"clients"}:
        assert_same(one[part], other[part])


def test_privacy__what_is_not_private_is_refused(make_federation):
    on = Privacy(clip=1.0, noise=0.0)
    plain, clip, median = make_federation("cnn"), Defence(clip=2.0), Defence("median")
    there = Presence(torch.ones(4), torch.full((4,), 9))
    for algorithm, others, message in (
        (fedavg(make_federation("cnn", norm="batch")), {}, "running_mean"),
        (fedavg(make_federation("cnn", norm="static_batch")), {}, "static batch norms look at"),
        (fedavg(wrapped(plain, defence=median)), {}, "with --defence"),
        (fedavg(plain), {"defence": clip}, "only average whole models"),
        (fedavg(plain), {"presence": there}, "--presence"),
    ):
        with pytest.raises(FLError, match=message):
            within(algorithm, privacy=on, **others)
    with fl_refused("argument", "--privacy.quantile-noise", "0.25"):
        within(fedavg(plain), privacy=Privacy(clip=1.0, noise=0.5, quantile=0.5)).init()


# Epsilon.


@pytest.mark.parametrize(
    ("noise", "clients", "participants", "rounds"),
    some(
        ((noise, *them) for noise in (0.7, 4.0) for them in ((20, 5, 10), (1000, 100, 50), (10, 10, 3))),
        [(0.7, 10, 10, 3), (4.0, 20, 5, 10)],
    ),
)
def test_privacy__epsilon_is_the_librarys(noise, clients, participants, rounds):
    dp = pytest.importorskip("dp_accounting")
    replaced = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    added = dp.rdp.RdpAccountant()
    of_sum = dp.GaussianDpEvent(noise / 2)  # two clips are what changes if one client is replaced by another
    replaced.compose(dp.SampledWithoutReplacementDpEvent(clients, participants, of_sum), rounds)
    added.compose(dp.PoissonSampledDpEvent(participants / clients, dp.GaussianDpEvent(noise)), rounds)
    for accounting, accountant in (("fixed", replaced), ("poisson", added)):
        privacy = Privacy(1.0, noise, delta=1e-6, accounting=accounting)
        assert privacy.spent(rounds, clients, participants) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)
        assert privacy.spent(0, clients, participants) == 0


def test_privacy__noise_on_both_counts_as_the_noise_that_was_asked_for():
    """Both together are one Gaussian mechanism: 1 / z^2 of the parts, each over its own sensitivity, adds up."""
    on_sum, on_count = Privacy(clip=1.0, noise=1.5, quantile=0.5).deviations(100)
    assert on_count == 5
    assert (2 / on_sum) ** 2 + (1 / on_count) ** 2 == pytest.approx((2 / 1.5) ** 2)  # one client replaced
    assert (1 / on_sum) ** 2 + (0.5 / on_count) ** 2 == pytest.approx((1 / 1.5) ** 2)  # one added, counted as +-1/2


def config(**privacy):
    return tiny("fedavg", rounds=4, privacy=Privacy(**{"clip": 0.5, "noise": 2.0, **privacy}))


def test_simulate__every_row_has_epsilon_and_runs_resume_exactly(tmp_path):
    pytest.importorskip("dp_accounting")
    settings = config(quantile=0.5, quantile_noise=2.0)
    fl.simulate(settings, tmp_path / "whole")
    fl.simulate(settings, tmp_path / "parts", on_round=lambda row: row["round"] == 2)
    fl.simulate(settings, tmp_path / "parts", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "parts")
    whole, _ = left(tmp_path / "whole")
    spent = [row["epsilon"] for row in whole]
    k, n = settings.clients.cohort(), settings.clients.number
    assert spent == [pytest.approx(settings.extensions["privacy"].spent(number, n, k)) for number in (1, 2, 3, 4)]
    clips = [row["update_clip"] for row in whole]
    assert clips[0] == 0.5
    assert len(set(clips)) == 4


@pytest.mark.slow
def test_privacy__ranks_draw_the_same_noise(tmp_path):
    pytest.importorskip("dp_accounting")
    configs = {"fixed": config(), "adaptive": config(quantile=0.5, quantile_noise=2.0)}
    simulate_all(0, configs, tmp_path / "one")
    assert ran(2, simulate_all, configs, tmp_path / "two") == [0, 0]
    for name in configs:
        assert_equal(tmp_path / "one" / name, tmp_path / "two" / name)


@pytest.mark.slow
def test_privacy__clients_on_other_machines_cannot_know_the_noise(tmp_path):
    """They know the seed, and perhaps who takes part; so neither makes epsilon smaller."""
    pytest.importorskip("dp_accounting")
    settings = nodes.settings("fedavg").replace(privacy=Privacy(clip=0.5, noise=1.0))
    one, other = (nodes.deployed(settings, tmp_path / name)[0] for name in ("one", "other"))
    assert not nodes.same(one, other)
    rows = read(tmp_path / "one" / "remote" / "metrics.csv")
    assert [row["epsilon"] for row in rows] == pytest.approx(
        [settings.extensions["privacy"].spent(n, 3, 3) for n in (1, 2)]
    )
    clipped = settings.replace(privacy=Privacy(clip=0.5, noise=0.0))
    assert nodes.same(nodes.deployed(clipped, tmp_path / "third")[0], nodes.simulated(clipped, tmp_path))


def test_simulate__training_ends_when_epsilon_is_spent(tmp_path, caplog):
    pytest.importorskip("dp_accounting")
    settings = config()
    costs = [
        settings.extensions["privacy"].spent(number, settings.clients.number, settings.clients.cohort())
        for number in (1, 2, 3)
    ]
    limited = config(epsilon=(costs[1] + costs[2]) / 2)
    _, algorithm = fl.build(limited)
    assert [algorithm.max_rounds(number)[0] for number in (1, 2, 3, 9)] == [1, 2, 2, 2]
    summary = fl.simulate(limited.replace(eval_every=3), tmp_path / "run")
    assert (summary["rounds"], summary["complete"], summary["final"]["round"]) == (2, True, 2)
    assert "training ends after 2 of 4 rounds: round 3 would spend more than --privacy.epsilon" in caplog.text
    with fl_refused("argument", "--privacy.epsilon"):
        fl.simulate(config(epsilon=costs[0] / 2), tmp_path / "none")


def test_privacy__without_the_package_it_says_which(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with fl_refused("missing", "'layer-surgery[privacy]'"):
        Privacy(1.0, 1.2345).spent(3, 7, 2)


def test_privacy__a_round_that_nobody_ends_is_as_private_as_any_other():
    """Nobody can tell by missing noise, or by a missing epsilon, that all clients were late."""
    pytest.importorskip("dp_accounting", reason="epsilon needs pip install 'layer-surgery[privacy]'")
    settings = {"clients": 6, "participants": 6, "width": 0.125, "partition": "iid", "norm": "none"}
    slow = PaceOptions(speed=1e-3, deadline=1.0, late="drop")
    config = fl.Config.of(algorithm="fedavg", pace=slow, privacy=Privacy(clip=0.5, noise=1.0, delta=1e-3), **settings)
    fed, algorithm = fl.build(config)
    server = algorithm.init()
    after, update = algorithm.round(server, range(6), Rng(0, 1))
    assert not any(update.sizes)
    assert update.metrics["epsilon"] > 0
    moved = torch.cat([(after["global"][name] - server["global"][name]).flatten() for name in fed.trainable])
    assert moved.std().item() == pytest.approx(0.5 / 6, rel=0.05)


def test_privacy__a_delta_that_says_nothing_is_refused(make_federation):
    with fl_refused("argument", "--privacy.delta"):
        fl.build(fl.Config.of(algorithm="fedavg", clients=20, privacy=Privacy(clip=0.5, noise=1.0, delta=0.05)))
