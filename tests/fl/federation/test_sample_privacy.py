"""DP-SGD: what one sample can change, how much noise there is, and which epsilon that is."""

import math
from dataclasses import replace

import fl_nodes as nodes
import pytest
import torch
import torch.nn.functional as F
from ranks import NEED_ADAPTERS, assert_equal, left, tiny
from rounds import assert_same, made, play, played
from selection import some
from torch import nn

import fl
from fl.algorithms import ALGORITHMS, fedavg, methods_of
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Adam, train
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.engine.clipping import SampleClip
from fl.engine.objectives import cross_entropy, proximal
from fl.engine.precision import Precision
from fl.federation import Federation, LocalTraining
from fl.federation.local_training import LocalObjective
from fl.federation.privacy import SamplePrivacy, most_in_a_pass
from fl.partition import Split
from surgery import broadcast

ABLE = set(methods_of("global")) - {"fedasam", "fedgen", "fltrust"}
PLAIN = SGD(0.1, 0.0)


def trained(fed, backend="loop", k=4, privacy=None, **how):
    fed = fed.with_local(backend=backend, **({"sample_privacy": privacy} if privacy else {}))
    return fed.train(broadcast(fed.initial(), k), list(range(k)), Rng(0, 1), **how)


def assert_close(one, other, **tolerance):
    for part, expected in ((one.loss, other.loss), (one.states, other.states)):
        torch.testing.assert_close(part, expected, **tolerance)


# The gradient.


def by_hand(fed, objective, k, clip):
    """Line by line: plain SGD with the mean of single samples' gradients, each clipped as clip_grad_norm_ does."""
    job, starts, _ = fed.group(fed.model, broadcast(fed.initial(), 4), range(4), LocalObjective(objective), Rng(0, 1))
    state = {name: tensor[k].clone() for name, tensor in starts.items()}
    anchor, norms = {name: tensor[k].clone() for name, tensor in starts.items()}, []
    for s in range(job.batches.steps[k]):
        step = job.batches.of_client(k, s)
        total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for i in step.index.tolist():
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
            x, y = fed.data.normalise(fed.data.x[i : i + 1], torch.float64), fed.data.y[i : i + 1]
            loss = objective(
                lambda p, x: torch.func.functional_call(fed.model, p, (x,)), leaves, {"anchor": anchor}, (x, y)
            )
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(leaves.values(), clip)))
            for name, leaf in leaves.items():
                total[name] += leaf.grad
        for name in state:
            state[name] -= job.optimizer.lr * total[name] / len(step.index)
    return state, norms


@pytest.mark.parametrize(
    ("backend", "last"),
    some(
        [("loop", "filled"), ("vmap", "filled"), ("workers", "filled"), ("loop", "partial"), ("workers", "partial")],
        [("loop", "filled")],
    ),
)
def test_the_gradient_is_the_mean_of_the_samples_clipped_gradients(make_federation, backend, last):
    """FedProx's term is part of each sample's gradient, and clipped with it."""
    fed = make_federation("cnn", dtype=torch.float64, optimizer=PLAIN, last_batch=last)
    objective, clip = proximal(0.5), 1.35
    starts = broadcast(fed.initial(), 4)
    found = trained(
        fed, backend, privacy=SamplePrivacy(clip, noise=0.0), objective=objective, context={"anchor": starts}
    )
    every = []
    for k in range(4):
        expected, norms = by_hand(fed, objective, k, clip)
        every += norms
        torch.testing.assert_close({n: t[k] for n, t in found.states.items()}, expected, rtol=1e-5, atol=1e-6)
    assert min(every) < clip < max(every)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loop", "vmap", "workers"])
@pytest.mark.parametrize("optimizer", [SGD(0.05, 0.9, 1e-2), Adam(0.003)])
def test_with_a_large_clip_and_no_noise_it_is_plain_training(make_federation, backend, optimizer):
    fed = make_federation("cnn", norm="group", dtype=torch.float64, optimizer=optimizer)
    assert_close(
        trained(fed, backend, privacy=SamplePrivacy(1e9, noise=0.0)), trained(fed, backend), rtol=1e-7, atol=1e-9
    )


@pytest.mark.slow
def test_parameters_that_the_objective_does_not_name_are_trained_as_well(make_federation):
    def objective(call, params, context, batch):
        x, y = batch
        return F.cross_entropy(call({"fc2.bias": 2 * params["fc2.bias"]}, x), y)

    fed, privacy = make_federation("cnn", dtype=torch.float64), SamplePrivacy(1e9, noise=0.0)
    for backend in ("loop", "vmap"):
        plain = trained(fed, "vmap", objective=objective)
        assert_close(trained(fed, backend, privacy=privacy, objective=objective), plain, rtol=1e-7, atol=1e-9)


BAD = [0.0, 1e-30, 3.0, 1e19, 3e38, math.inf, math.nan]


@pytest.mark.parametrize("one", BAD)
@pytest.mark.parametrize("other", BAD)
def test_a_sample_changes_the_sum_by_no_more_than_two_clips(one, other):
    means = []
    for first in (one, other):
        x = torch.tensor([[1.0, 2.0], [first, -first], [0.1, 0.2]])
        _, mean = SampleClip(0.5).gradients(
            lambda p, b, _: (p["w"] * b[0]).sum(), {"w": torch.ones(2)}, (x,), torch.tensor(3)
        )
        means.append(mean["w"])
    assert (means[0] - means[1]).norm() * 3 <= 2 * 0.5 * (1 + 1e-5)


# Random numbers.


def test_the_noise_has_the_deviation_that_it_says(make_federation):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 500), nn.Linear(500, 3))
    fed = make_federation(model, sizes=(4, 4, 4, 4), epochs=1, optimizer=SGD(1.0, 0.0))
    private = SamplePrivacy(clip=3.0, noise=0.8)
    for backend in ("loop", "vmap"):
        noisy, clean = (trained(fed, backend, privacy=p).states for p in (private, replace(private, noise=0.0)))
        drawn = {name: (clean[name] - noisy[name]).flatten(1) * 4 / (0.8 * 3.0) for name in clean}
        every = torch.cat(list(drawn.values()), 1)
        assert every.std(1).tolist() == pytest.approx([1.0] * 4, rel=0.02)
        assert every.mean().abs() < 5 / math.sqrt(every.numel())
        assert (torch.corrcoef(every) - torch.eye(4)).abs().max() < 0.03  # clients
        weights = torch.stack([drawn["1.weight"][0][:1500], drawn["2.weight"][0]])
        assert torch.corrcoef(weights)[0, 1].abs() < 0.1  # parameters


def test_no_two_steps_have_the_same_noise():
    zero, key = {"w": torch.zeros(50)}, torch.arange(3)
    drawn = [
        SampleClip(1.0, 1.0).gradients(lambda p, b, _: 0 * p["w"].sum(), zero, (torch.zeros(2, 1),), k)[1]["w"]
        for k in key
    ]
    assert all(not torch.equal(drawn[a], drawn[b]) for a in range(3) for b in range(a))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Linear(108, 3)

    def forward(self, x):
        return self.second(F.dropout(F.dropout2d(self.first(x), 0.3), 0.5, self.training).flatten(1))


def test_each_sample_has_random_numbers_of_its_own():
    seen = []

    def loss(params, batch, draws):
        seen.append(draws.uniform((5,)))
        return (params["w"] * draws.uniform((5,))).sum()

    x = torch.zeros(2, 1)  # twice the same
    one = [SampleClip(100.0).gradients(loss, {"w": torch.ones(5)}, (x[:n],), torch.tensor(7))[1]["w"] for n in (1, 2)]
    assert not torch.allclose(one[0], one[1])  # the mean of two draws, not of one


RANDOM = {
    "dropout": (Dropping, {}),
    "crops and flips": ("cnn", {"augment": Augment(crop=2, flip=True), "repeats": 2}),
    "adam and group norms": ("cnn", {"norm": "group", "optimizer": Adam(0.003)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RANDOM)
def test_steps_are_the_same_in_every_backend(make_federation, case):
    model, settings = RANDOM[case]
    privacy = SamplePrivacy(clip=0.5, noise=0.7)
    fed = make_federation(model if isinstance(model, str) else model(), **settings)
    loop = trained(fed, "loop", privacy=privacy)
    for backend in ("workers", "vmap", "auto"):
        assert_close(trained(fed, backend, privacy=privacy), loop, rtol=1e-3, atol=1e-5)
    fed = fed.with_local(last_batch="partial")
    assert_close(trained(fed, "workers", privacy=privacy), trained(fed, "loop", privacy=privacy), rtol=1e-4, atol=1e-5)


def test_a_sample_of_text_is_a_sequence():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randint(9, (15, 6), generator=draw) for _ in range(2))
    data, none = Dataset("random", x.int(), y, x[:2].int(), y[:2], 9), torch.empty(0, dtype=torch.int64)
    parts = [Split(part, none, none) for part in torch.arange(15).split([3, 7, 4, 1])]
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    fed = Federation(net, data, parts, 2, LocalTraining(1, 15, SGD(1.0, 0.0), last_batch="partial"))
    found = trained(fed, k=1, privacy=SamplePrivacy(clip=0.1, noise=0.0))
    total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for i in range(3):
        grads = torch.autograd.grad(F.cross_entropy(net(x[i]), y[i]), list(net.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        assert norm > 0.1
        for name, g in zip(total, grads):
            total[name] += 0.1 / norm * g
    for name, p in net.named_parameters():
        torch.testing.assert_close(found.states[name][0], p - total[name] / 3)


# Whole rounds.


# B of an adapter begins at 0, to which even steps that are cut to nothing add something.
@pytest.mark.parametrize(
    "name", some([n for n in ALGORITHMS if n not in ABLE.intersection(NEED_ADAPTERS)], ["fedavg", "pfedme"])
)
def test_methods_use_samples_in_clipped_steps_alone_or_refuse(name, make_federation):
    """With gradients that are cut to nothing, what samples are does not reach what clients send and keep."""
    pytest.importorskip("dp_accounting")
    privacy = SamplePrivacy(clip=1e-30, noise=1.0)
    settings = {"sizes": (6,) * 14, "participants": 3} if name == "fedbuff" else {}
    fed = make_federation("cnn", sample_privacy=privacy, backend="loop", epochs=1, **settings)
    if name not in ABLE:
        with pytest.raises(FLError, match=f"{name} .*: leave --sample-privacy.clip out"):
            made(name, fed)
        return
    history = []
    for x, y in ((fed.data.x, fed.data.y), (255 - fed.data.x, (fed.data.y + 1) % 3)):
        there = replace(fed, data=replace(fed.data, x=x, y=y))
        history.append(play(made(name, there), there, 2))
    for (one, sent), (other, received) in zip(*history):
        assert not torch.equal(sent.loss, received.loss)
        assert_same(sent.received, received.received)
        assert one.keys() == other.keys()
        for part in one:
            assert_same(one[part], other[part])
        assert sent.metrics["sample_epsilon"] > 0


@pytest.mark.slow
def test_epsilon_is_of_the_rounds_in_which_a_client_took_part(make_federation):
    pytest.importorskip("dp_accounting")
    privacy = SamplePrivacy(clip=1.0, noise=30.0)
    fed = make_federation("cnn", sizes=(3, 8, 9, 5), sample_privacy=privacy, epochs=2, repeats=3)  # batches of 4
    found = [u.metrics["sample_epsilon"] for _, u in played(fedavg(fed), [[0, 1, 3], [1, 3, 0], [1, 2, 3]])]
    most = [6 * 4, 2 * 6 * 4, 2 * 6 * 4]  # of client 0, whose three samples fill four places: (up to 2)^2 in a pass
    assert found == [privacy.spent([n], [4], 4, "filled") for n in most]
    found = [u.metrics["sample_epsilon"] for _, u in played(fedavg(fed), [[1, 2, 3], [1, 1, 1]])]
    assert found == [privacy.spent([n], [4], 4, "filled") for n in (6 * 2, 4 * 6)]
    partial = fed.with_local(last_batch="partial")
    (_, update) = played(fedavg(partial), [[0, 2, 3]])[0]
    assert update.metrics["sample_epsilon"] == privacy.spent([6], [4], 4, "filled")


def config(**privacy):
    return tiny("fedavg", rounds=4, sample_privacy=SamplePrivacy(**{"clip": 0.5, "noise": 2.0, **privacy}))


@pytest.mark.slow
def test_every_row_has_epsilon_and_runs_resume_exactly(tmp_path):
    pytest.importorskip("dp_accounting")
    fl.simulate(config(), tmp_path / "whole")
    fl.simulate(config(), tmp_path / "parts", on_round=lambda row: row["round"] == 2)
    fl.simulate(config(), tmp_path / "parts", resume=True)
    assert_equal(tmp_path / "whole", tmp_path / "parts")
    rows, server = left(tmp_path / "whole")
    assert int(server["sample_privacy/rounds"].sum()) == 4 * config().cohort()
    spent = [row["sample_epsilon"] for row in rows]
    assert 0 < spent[0] < spent[-1]
    assert spent == sorted(spent)
    fl.simulate(config(noise=0.0), tmp_path / "clipped")
    assert "sample_epsilon" not in left(tmp_path / "clipped")[0][0]


@pytest.mark.slow
def test_clients_and_samples_can_be_private_at_once(make_federation):
    pytest.importorskip("dp_accounting")
    fed = make_federation("cnn", sample_privacy=SamplePrivacy(1.0, 5.0), privacy=fl.Privacy(1.0, 2.0))
    (_, update) = play(fedavg(fed), fed, 1)[0]
    assert update.metrics["epsilon"] == fed.privacy.spent(1, 4, 3)
    assert update.metrics["sample_epsilon"] > 0


def test_what_is_not_private_is_refused(make_federation, tmp_path):
    on = SamplePrivacy(clip=1.0, noise=0.0)
    buffered = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    buffered.register_buffer("mean", torch.zeros(3))
    for fed, message in (
        (make_federation("cnn", norm="batch", sample_privacy=on), "batch norms mix .*: take --norm group"),
        (make_federation("cnn", norm="static_batch", sample_privacy=on), "batch norms mix .*: take --norm group"),
        (make_federation(buffered, sample_privacy=on), "mean is a buffer"),
        (
            replace(make_federation("cnn", sample_privacy=on), attack=object()),
            "--attack trains malicious clients twice",
        ),
        (make_federation("cnn", sample_privacy=on, masked=True), "--masked-loss tells which classes"),
    ):
        with pytest.raises(FLError, match=message):
            fedavg(fed)
    fed = make_federation("cnn", sample_privacy=on)
    with pytest.raises(FLError, match="an ascent is taken along a gradient of samples without noise"):
        trained(fed, ascent=lambda params, gradients: gradients)
    with pytest.raises(FLError, match="clients on other machines would draw the noise from a seed"):
        nodes.deployed(replace(nodes.settings("fedavg"), sample_privacy=on), tmp_path)
    with pytest.raises(FLError, match=r"--sample-privacy\.clip must be"):
        make_federation("cnn", sample_privacy=SamplePrivacy(clip=-1.0))


def test_graphs_refuse_and_auto_takes_another(cuda, make_federation):
    fed = make_federation("cnn", sample_privacy=SamplePrivacy(1.0, 0.0))
    group = fed.group(fed.model, broadcast(fed.initial(), 2), [0, 1], LocalObjective(cross_entropy), Rng(0, 1))
    moved = replace(group[0], model=group[0].model.to("cuda"), data=fed.data.to("cuda"))
    with pytest.raises(FLError, match=r"--sample-privacy\.clip is not for --backend graphs: use vmap or loop"):
        train([(moved, *group[1:])], "graphs")


class Choosing(nn.Module):
    """Goes by a number that it reads, which is another one for each sample."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        return self.out(x.flatten(1)) * (2 if x.mean().item() > 0 else 1)


@pytest.mark.parametrize("backend", ["loop", "vmap", "auto"])
def test_a_model_without_gradients_of_samples_is_refused(make_federation, backend):
    fed = make_federation(Choosing())
    with pytest.raises(FLError, match=r"no gradient for each sample: .*leave --sample-privacy.clip out"):
        trained(fed, backend, privacy=SamplePrivacy(1.0, 0.0))


def test_norms_in_half_precision_are_refused(make_federation):
    """Autocast has no gradient of a layer norm for each sample."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    fed = make_federation(net, precision=Precision("bf16"))
    with pytest.raises(FLError, match=r"no gradient for each sample: .*leave --sample-privacy.clip or --precision out"):
        trained(fed, "loop", privacy=SamplePrivacy(1.0, 0.0))


# Epsilon.


@pytest.mark.parametrize(
    ("noise", "passes", "samples"),
    some(((*how, n) for how in ((8.0, 20), (60.0, 1000)) for n in (20, 21, 7)), [(8.0, 20, 21)]),
)
def test_epsilon_is_the_librarys(noise, passes, samples):
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    squares = {20: [1], 21: [1, 1], 7: [4]}[samples]  # of batches of ten: the last one is filled up
    exact, bound = pld.PLDAccountant(), dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for square in squares:
        event = dp.GaussianDpEvent(noise / 2 / math.sqrt(square))
        exact.compose(event, passes)
        bound.compose(event, passes)
    found = SamplePrivacy(1.0, noise, delta=1e-6).spent([passes], [samples], 10, "filled")
    assert found == pytest.approx(exact.get_epsilon(1e-6), rel=0.01)
    assert found < bound.get_epsilon(1e-6)


def test_what_papers_report_is_the_librarys():
    dp = pytest.importorskip("dp_accounting")
    each = []
    for samples, steps in ((100, 4 * 10), (45, 7 * 5), (6, 2)):
        accountant = dp.rdp.RdpAccountant()
        event = dp.PoissonSampledDpEvent(min(1.0, 10 / samples), dp.GaussianDpEvent(1.5))
        each.append(accountant.compose(event, steps).get_epsilon(1e-5))
    privacy = SamplePrivacy(1.0, 1.5, accounting="poisson")
    passes, samples = [4, 7, 2, 3, 0], [100, 45, 6, 100, 3]
    assert privacy.spent(passes, samples, 10, "filled") == pytest.approx(max(each), rel=1e-9)
    assert privacy.spent([0], [9], 10, "filled") == 0


@pytest.mark.parametrize("last", ["filled", "partial"])
@pytest.mark.parametrize(
    ("samples", "size"), [(12, 4), (13, 4), (15, 4), (4, 4), (3, 4), (1, 4), (3, 7), (5, 10), (1, 1)]
)
def test_how_much_one_sample_counts_in_a_pass(samples, size, last):
    batches = make_batches([torch.arange(samples)], [0], 1, size, Rng(0), "cpu", last=last)
    squares = torch.zeros(samples)
    for s in range(batches.steps[0]):
        squares += torch.bincount(batches.of_client(0, s).index, minlength=samples).square()
    assert squares.max() == most_in_a_pass(samples, size, last)


def test_without_the_package_it_says_which(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(FLError, match=r"pip install 'layer-surgery\[privacy\]'"):
        SamplePrivacy(1.0, 1.2345).spent([3], [7], 2, "filled")
