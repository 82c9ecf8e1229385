"""Means weighted by curvature or inputs, and greedy soups."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from surgery import load, merge, state


def nets(k=2, dtype=torch.float64):
    torch.manual_seed(0)

    def net():
        head = nn.Linear(48, 4)
        return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), head).to(dtype)

    return [net() for _ in range(k)]


def batch(n=6, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 4, 4, generator=draw, dtype=torch.float64), torch.randint(0, 4, (n,), generator=draw)


def test_fisher_is_equation_four():
    models = [state(net) for net in nets()]
    known = [{n: t.square() for n, t in m.items() if n.endswith(("weight", "bias"))} for m in models]
    known[0]["4.bias"][0] = known[1]["4.bias"][0] = 0
    found = merge.fisher(models, fishers=known, weights=[1, 3])
    for name, tensor in found.items():
        a, b = (m[name] for m in models)
        if name not in known[0]:
            continue
        f, g = known[0][name], 3 * known[1][name]
        expected = torch.where(f + g > 0, (f * a + g * b) / (f + g), (a + 3 * b) / 4)
        torch.testing.assert_close(tensor, expected)
    torch.testing.assert_close(
        found["1.running_var"], (models[0]["1.running_var"] + 3 * models[1]["1.running_var"]) / 4
    )


def test_fisher_information_is_the_mean_squared_gradient_of_samples():
    (net,), (x, y) = nets(1), batch()
    net.train()
    net[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = merge.fisher_information(net, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert net.training
    assert not net[0].weight.requires_grad
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    net.eval()
    net[0].weight.requires_grad_(True)
    functional = lambda p, x, y: F.cross_entropy(torch.func.functional_call(net, p, (x[None],)), y[None])  # noqa: E731
    parameters = dict(net.named_parameters())
    rows = torch.func.vmap(torch.func.grad(functional), (None, 0, 0))(parameters, x, y)
    assert set(found) == set(parameters)
    for name in parameters:
        torch.testing.assert_close(found[name], rows[name].square().mean(0))


def test_regmean_is_least_squares():
    """With alpha 1 no other weight comes closer to the outputs of all models on their inputs."""
    models = nets()
    inputs = [batch(60, seed=k)[0] for k in range(2)]
    grams = [merge.input_grams(net, [x]) for net, x in zip(models, inputs)]
    assert set(grams[0]) == {"0.weight", "4.weight"}
    merged = merge.regmean([state(net) for net in models], grams=grams, alpha=1.0)
    rows, targets = [], []
    for net, x in zip(models, inputs):
        net.eval()
        rows.append(net[:4](x).detach())
        targets.append(rows[-1] @ net[4].weight.detach().T)
    expected = torch.linalg.lstsq(torch.cat(rows), torch.cat(targets)).solution.T
    torch.testing.assert_close(merged["4.weight"], expected)
    windows = [F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 18) for x in inputs]
    outputs = [w @ net[0].weight.detach().view(3, 18).T for w, net in zip(windows, models)]
    expected = torch.linalg.lstsq(torch.cat(windows), torch.cat(outputs)).solution.T
    torch.testing.assert_close(merged["0.weight"], expected.view(3, 2, 3, 3))


def test_regmean_of_diagonal_products_is_fisher_merging_of_inputs():
    models = [{"w": torch.randn(3, 5)} for _ in range(2)]
    known = [torch.rand(5) + 0.1 for _ in range(2)]
    found = merge.regmean(models, grams=[{"w": row.diag() + 0.01} for row in known], alpha=0, weights=[1, 2])
    fishers = [{"w": (row + 0.01).expand(3, 5)} for row in known]
    torch.testing.assert_close(found["w"], merge.fisher(models, fishers=fishers, weights=[1, 2])["w"])


def test_a_greedy_soup_takes_what_helps():
    torch.manual_seed(0)
    models = [{"w": torch.randn(5)} for _ in range(6)]
    target = torch.randn(5)
    score = lambda s: -(s["w"] - target).norm().item()  # noqa: E731
    soup = merge.greedy_soup(models, score=score)
    order = sorted(range(6), key=lambda k: score(models[k]), reverse=True)
    taken, best = [], None
    for k in order:
        mean = {"w": torch.stack([models[j]["w"] for j in [*taken, k]]).mean(0)}
        if not taken or score(mean) >= best:
            taken, best = [*taken, k], score(mean)
    assert soup.taken == taken
    assert 1 < len(taken) < 6
    assert soup.score == pytest.approx(best)
    assert soup.score >= max(soup.scores)
    assert merge.greedy_soup(models, score=lambda s: 0.0).taken == [0, 1, 2, 3, 4, 5]


def test_a_merged_model_runs():
    models = nets()
    x, y = batch()
    fishers = [merge.fisher_information(net, [(x, y)]) for net in models]
    merged = load(nets(1)[0], merge.fisher(models, fishers=fishers))
    assert merged.eval()(x).isfinite().all()
