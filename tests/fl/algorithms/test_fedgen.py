import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from rounds import assert_same, play, played
from torch import nn

import fl
import surgery
import zoo
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedgen import FedGenOptions, distilling, fedgen, generate, train_generator
from fl.base.errors import FLError
from fl.data import Dataset
from fl.engine import Adam
from fl.engine.draws import Drawing, Draws
from fl.federation import Federation

SMALL = FedGenOptions(alpha=1.0, beta=1.0, noise=5, hidden=8, steps=3, batch=6)
LEARNED = ("fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias")


class Generator(nn.Module):
    """The released generator, as a module."""

    def __init__(self, noise, hidden, classes, latent):
        super().__init__()
        self.fc1, self.norm, self.fc2 = (
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, latent)
        )  # fmt: skip

    def forward(self, noise, labels):
        onehot = torch.zeros(len(labels), self.fc1.in_features - noise.shape[1], dtype=noise.dtype)
        onehot[torch.arange(len(labels)), labels] = 1
        return self.fc2(F.relu(self.norm(self.fc1(torch.cat([noise, onehot], 1)))))


def random_generator(classes=3, latent=7, noise=5, hidden=8):
    """(module, the same as a state)."""
    torch.manual_seed(0)
    net = Generator(noise, hidden, classes, latent).double()
    nn.init.uniform_(net.norm.running_mean, -0.5, 0.5)
    nn.init.uniform_(net.norm.running_var, 0.5, 2)
    state = {n: t.clone() for n, t in net.state_dict().items() if "tracked" not in n}
    return net, {**state, "seen": torch.ones(classes, dtype=torch.bool)}


@pytest.mark.parametrize("without", ["alpha", "beta"])
def test_fedgen__each_term_counts_from_the_second_round_on(make_federation, without):
    fed = make_federation("cnn", sizes=(8, 8, 8, 8), participants=4)
    plain = play(fedavg(fed), fed, 2)
    distilled = play(fedgen(fed, dataclasses.replace(SMALL, **{without: 0.0})), fed, 2)
    assert_same(plain[0][0]["global"], distilled[0][0]["global"])
    difference = surgery.distance(*[surgery.stack([history[1][0]["global"]]) for history in (plain, distilled)])
    assert difference.item() > 1e-4


def test_fedgen__the_objective_is_its_formula(monkeypatch):
    """Loss and gradients against a plain module, with the noise and the labels that it is said to draw."""
    net, state = random_generator()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 2, 1, 0])
    own, others, share = torch.randn(6, 5).double(), torch.randn(6, 5).double(), torch.rand(6)
    others_y = torch.tensor([2, 0])[(share * 2).long()]  # label 1 is not known

    context = {"labels": torch.tensor([2, 0, 1]), "known": torch.tensor(2), "generator": state}
    context |= {"alpha": torch.tensor(0.7, dtype=torch.float64), "beta": torch.tensor(1.9, dtype=torch.float64)}
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def call(params, x):
        return torch.func.functional_call(model, {**params, **buffers}, (x,))

    noises = iter([own, others])
    monkeypatch.setattr(torch, "randn", lambda size, dtype, device: next(noises))
    monkeypatch.setattr(torch, "rand", lambda size, device: share)
    loss = distilling("3.weight", "3.bias")(call, params, context, (x, y))
    gradients = torch.autograd.grad(loss, list(params.values()))

    net.eval()
    logits = model(x)
    with torch.no_grad():
        latents, other_latents = net(own, y), net(others, others_y)
        wanted = F.softmax(model[3](latents), 1)
    expected = sum(-F.log_softmax(logits[i], 0)[y[i]] for i in range(6)) / 6
    generated = model[3](other_latents)
    expected = expected + 0.7 * sum(-F.log_softmax(generated[i], 0)[others_y[i]] for i in range(6)) / 6
    for i in range(6):
        expected = expected + 1.9 / 6 * sum(p * (p.log() - q) for p, q in zip(wanted[i], F.log_softmax(logits[i], 0)))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for gradient, p in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-10, atol=1e-12)


def test_fedgen__labels_for_clients_are_those_the_generator_knows_equally_often(monkeypatch):
    _, state = random_generator()
    asked = []
    monkeypatch.setattr(
        fl.algorithms.fedgen, "generate", lambda g, noise, labels: asked.append(labels) or generate(g, noise, labels)
    )
    context = {"labels": torch.tensor([2, 0, 1]), "known": torch.tensor(2), "generator": state, "alpha": 1, "beta": 1}
    params = {"weight": torch.randn(3, 7).double(), "bias": torch.zeros(3).double()}
    batch = torch.zeros(4000, 3).double(), torch.ones(4000, dtype=torch.int64)
    with Drawing(Draws(torch.tensor(1, dtype=torch.int32))):
        distilling("weight", "bias")(lambda params, x: x, params, context, batch)
    own, others = asked
    assert (own == 1).all()
    counts = torch.bincount(others, minlength=3)
    assert counts[1] == 0
    assert (counts[[0, 2]] - 2000).abs().max() < 200


@pytest.mark.parametrize("biased", [True, False])
def test_fedgen__the_generator_trains_as_a_loop_over_clients_with_torchs_adam_would(biased):
    net, state = random_generator()
    torch.manual_seed(2)
    heads = [nn.Linear(7, 3, bias=biased).double() for _ in range(4)]
    counts = torch.tensor([[5.0, 0, 1], [3, 2, 1], [0, 0, 0], [4, 0, 1]]).double()
    shares = counts / counts.sum(0)
    noise, labels = torch.randn(9, 10, 5).double(), torch.randint(3, (9, 10))
    values = {"first": [], "second": [], "steps": []}
    for name in LEARNED:
        values["first"].append(torch.zeros_like(state[name]))
        values["second"].append(torch.zeros_like(state[name]))
        values["steps"].append(torch.zeros(()))
    stacked = torch.stack([h.weight.detach() for h in heads]), torch.stack([h.bias for h in heads]) if biased else None
    before = copy.deepcopy((state, values))
    settings = Adam(0.01, weight_decay=0.1), stacked, shares
    half, kept = train_generator(state, values, *settings, noise[:4], labels[:4], 0.6)
    trained, memory = train_generator(half, kept, *settings, noise[4:], labels[4:], 0.6)  # moments last
    assert_same(state, before[0])
    assert all(torch.equal(a, b) for kind in values for a, b in zip(values[kind], before[1][kind]))

    optimizer = torch.optim.Adam(net.parameters(), 0.01, weight_decay=0.1)
    net.train()
    for z, y in zip(noise, labels):
        latents = net(z, y)
        loss = 0.0
        for head, share in zip(heads, shares):
            each = F.cross_entropy(head(latents), y, reduction="none")
            loss = loss + sum(share[label] * one for label, one in zip(y, each)) / len(y)
        pairs = [
            ((z[i] - z[j]) ** 2).mean() * (latents[i] - latents[j]).abs().mean()
            for i in range(len(z)) for j in range(len(z))
        ]  # fmt: skip
        loss = loss + 0.6 * torch.exp(-torch.stack(pairs).mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, tensor in net.state_dict().items():
        if "tracked" not in name:
            torch.testing.assert_close(trained[name], tensor, rtol=1e-8, atol=1e-10)
    for i, p in enumerate(net.parameters()):
        torch.testing.assert_close(memory["first"][i], optimizer.state[p]["exp_avg"], rtol=1e-8, atol=1e-12)
        assert memory["steps"][i] == 9
    assert not any(t.requires_grad for t in trained.values())


def spied(monkeypatch):
    """What the server trains the generator with, round by round."""
    calls, honest = [], train_generator
    monkeypatch.setattr(fl.algorithms.fedgen, "train_generator", lambda *given: calls.append(given) or honest(*given))
    return calls


def labelled(make_federation, labels, **settings):
    """A federation whose i-th client has the samples of the i-th list of labels."""
    fed = make_federation("cnn", sizes=tuple(map(len, labels)), **settings)
    y = torch.tensor([label for part in labels for label in part])
    return dataclasses.replace(fed, data=dataclasses.replace(fed.data, y=y))


def test_fedgen__labels_that_nobody_has_are_not_drawn_and_shares_are_those_of_the_samples(make_federation, monkeypatch):
    calls = spied(monkeypatch)
    fed = labelled(make_federation, [[0, 0, 0, 2], [2, 2, 2], [1, 1]], participants=2)
    algorithm = fedgen(fed, dataclasses.replace(SMALL, steps=25, batch=100, lr=1e-5))
    (first, trained), (second, _) = played(algorithm, [[1, 0], [1, 2]])
    *_, shares, noise, labels, _ = calls[0]
    assert noise.shape == (25, 100, 5)
    torch.testing.assert_close(shares, torch.tensor([[0, 0, 0.75], [1, 0, 0.25]]))
    frequency = torch.bincount(labels.flatten(), minlength=3) / labels.numel()
    torch.testing.assert_close(frequency, torch.tensor([3 / 7, 0, 4 / 7]), atol=0.04, rtol=0)
    assert frequency[1] == 0
    assert first["generator"]["seen"].tolist() == [True, False, True]
    assert second["generator"]["seen"].all()
    assert set(calls[1][-2].unique().tolist()) == {1, 2}
    assert all(t.isfinite().all() for part in second.values() for t in part.values())
    model, generator = (sum(t.nbytes for t in first[part].values()) for part in ("global", "generator"))
    assert generator == 4 * (8 * 8 + 5 * 8 + first["generator"]["fc2.weight"].shape[0] * 9) + 3
    assert trained.metrics["bytes_down"] == model + generator
    assert trained.metrics["bytes_up"] == model + 3 * 8


def test_fedgen__the_decay_is_that_of_all_three_numbers(make_federation, monkeypatch):
    calls, contexts = spied(monkeypatch), []
    honest = Federation.train

    def train(self, starts, clients, rng, objective, context):
        contexts.append(context)
        return honest(self, starts, clients, rng, objective, context)

    monkeypatch.setattr(Federation, "train", train)
    fed = make_federation("cnn")
    play(fedgen(fed, dataclasses.replace(SMALL, alpha=2.0, beta=3.0, decay=0.5, lr=0.1)), fed, 3)
    assert [context["alpha"].tolist() for context in contexts] == [[0.0] * 3, [1.0] * 3, [0.5] * 3]
    assert [context["beta"].tolist() for context in contexts] == [[0.0] * 3, [1.5] * 3, [0.75] * 3]
    assert [given[2].lr for given in calls] == [0.1, 0.05, 0.025]
    assert {given[2].weight_decay for given in calls} == {0.01}


class Softmax(nn.Sequential):
    def forward(self, x):
        return super().forward(x).softmax(1)


def tiny(*last):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), *last)


def test_fedgen__heads_are_found_and_what_has_none_is_refused_by_name(make_federation):
    for net in ("cnn", "resnet20", "mobilenetv2", tiny(nn.Linear(4, 3, bias=False)), tiny(nn.Linear(4, 3))):
        init = fedgen(make_federation(net), SMALL).init()
        assert init["generator"]["fc1.weight"].shape == (8, 8)
    frozen, parametrized = tiny(nn.Linear(4, 3)), tiny(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    frozen[3].requires_grad_(False)
    softmax = Softmax(nn.Flatten(), nn.Linear(64, 3))
    wide, conv = tiny(nn.Linear(4, 5)), nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    for net in (frozen, parametrized, softmax, wide, conv):
        with pytest.raises(FLError, match=f"3 classes, and {type(net).__name__}'s is .*choose another --model"):
            fedgen(make_federation(net), SMALL)


def test_fedgen__text_is_refused(make_federation):
    tokens = torch.zeros(27, 4, dtype=torch.int32)
    data = Dataset("text", tokens, tokens.long(), tokens, tokens.long(), classes=9)
    model = zoo.create("transformer", torch.Generator().manual_seed(0), num_classes=9, width=0.125, depth=1, tokens=4)
    with fl_refused("unsupported", "'s logits of 9 classes, and Transformer'"):
        fedgen(dataclasses.replace(make_federation("cnn"), data=data, model=model), SMALL)


def test_fedgen__numbers_to_predict_are_refused_by_their_task():
    x = torch.randn(40, 3)
    data = fl.Dataset.from_arrays(x, x[:, 0], x, x[:, 0], task="regression")
    config = fl.Config.of(algorithm="fedgen", clients=2, participants=2, partition="iid")
    with fl_refused("unsupported: regression"):
        fl.build(config, dataset=data, model=lambda: torch.nn.Linear(3, 1))
