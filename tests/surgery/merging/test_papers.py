"""Methods compared with the formulas and algorithms of their papers, written out slowly."""

import math

import pytest
import torch
from refusals import refused
from torch import nn
from torch.nn import functional as F

import surgery
from surgery import lazy, merging, state
from surgery.merging.parts import of_rank, uniform
from tests.surgery.merging.test_every_method import models, same

STEPS = "a.steps"
BASE = models(1, seed=7)[0]


def close(found, expected, **tolerances):
    same(found, expected, **({"rtol": 1e-7, "atol": 1e-7} | tolerances))


def by_tensor(function, states):
    """A formula for the float tensors of states; for counters the maximum of the first three."""
    largest = torch.stack([s[STEPS] for s in states[:3]]).amax(0)
    return {n: largest if n == STEPS else function(*[s[n] for s in states]) for n in states[0]}


def test_papers__linear_is_the_weighted_mean():
    states = models()
    close(merging.linear(states, weights=[1, 2, 5]), by_tensor(lambda x, y, z: (1 * x + 2 * y + 5 * z) / 8, states))
    close(merging.linear(states), surgery.average(states))
    found = merging.linear(states, weights=[1, -2, 0.5], normalize=False)
    close(found, by_tensor(lambda x, y, z: x - 2 * y + z / 2, states))


def slow_slerp(x, y, t):
    angle = math.acos((x * y).sum() / x.norm() / y.norm())
    return (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)


def test_slerp__is_shoemakes_formula():
    states = models(2)
    close(merging.slerp(states, t=0.3), by_tensor(lambda x, y: slow_slerp(x, y, 0.3), states))
    expected = by_tensor(lambda x, y, o: o + slow_slerp(x - o, y - o, 0.3), [*states, BASE])
    close(merging.slerp(states, t=0.3, base=BASE), expected | {STEPS: states[1][STEPS]})


def slow_multislerp(weights, *tensors):
    """As it is written in mergekit."""
    flat = torch.stack([x.reshape(-1) for x in tensors])
    w, lengths = torch.tensor(weights, dtype=flat.dtype)[:, None], flat.norm(dim=1, keepdim=True)
    units = flat / lengths
    mean = F.normalize((w * units).sum(0), dim=0)
    tangent = (w * (units - (units @ mean)[:, None] * mean)).sum(0)
    size = tangent.norm() + 1e-300
    return ((mean * size.cos() + tangent * size.sin() / size) * (w * lengths).sum()).view(tensors[0].shape)


def slow_karcher(weights, *tensors):
    """Gradient descent with the tensors themselves."""
    units, lengths = [x / x.norm() for x in tensors], [x.norm() for x in tensors]
    mean = sum(w * u for w, u in zip(weights, units))
    mean, step = mean / mean.norm(), torch.ones(1)
    while step.norm() > 1e-13:
        step = torch.zeros_like(mean)
        for w, u in zip(weights, units):
            angle = torch.acos((mean * u).sum().clamp(-1, 1))
            step = step + w * angle / angle.sin() * (u - angle.cos() * mean)
        mean = mean * step.norm().cos() + step * torch.sinc(step.norm() / math.pi)
        mean = mean / mean.norm()
    return sum(w * n for w, n in zip(weights, lengths)) * mean


@pytest.mark.parametrize(("method", "slow"), [(merging.multislerp, slow_multislerp), (merging.karcher, slow_karcher)])
def test_slerp__means_of_directions(method, slow):
    states = models()
    expected = by_tensor(lambda *tensors: slow([0.2, 0.5, 0.3], *tensors), states)
    close(method(states, weights=[2, 5, 3]), expected, rtol=1e-9, atol=1e-9)
    unit = [{"w": F.normalize(s["a.weight"].view(-1), dim=0)} for s in models(2)]
    close(method(unit), merging.slerp(unit, t=0.5))
    scalars = [{"w": torch.tensor(2.0)}, {"w": torch.tensor(4.0)}]
    close(method(scalars), {"w": torch.tensor(3.0)})


def test_karcher__of_models_that_are_hardly_apart():
    base = models(1)[0]["a.weight"]
    draw = torch.Generator().manual_seed(1)
    near = [{"w": base + 1e-4 * torch.randn(base.shape, generator=draw, dtype=base.dtype)} for _ in range(3)]
    close(merging.karcher(near), merging.linear(near), rtol=1e-6, atol=1e-7)
    close(merging.karcher([{"w": base}] * 3), {"w": base})
    unit = [{"w": F.normalize(s["a.weight"].view(-1), dim=0)} for s in models(2)]
    close(merging.karcher(unit, weights=[3, 1]), merging.slerp(unit, t=0.25))


def test_nearswap__moves_by_at_most_t():
    (other,) = models(1)

    def slow(x, o):
        weight = (0.7 / (x - o).abs()).clamp(0, 1)
        return weight * x + (1 - weight) * o

    close(merging.nearswap([other], base=BASE, t=0.7), by_tensor(slow, [other, BASE]))
    same(merging.nearswap([other], base=BASE, t=100.0), other)
    same(merging.nearswap([other], base=BASE, t=0), BASE)


def slowly(states, sparse, weights, scale, elect, normalize):
    """Task vectors element by element: sparsify, elect the sign, add or average, scale."""

    def merged(name):
        origin = BASE[name].reshape(-1).tolist()
        vectors = [
            sparse(k, name, [x - o for x, o in zip(s[name].reshape(-1).tolist(), origin)]) for k, s in enumerate(states)
        ]
        for o, *column in zip(origin, *vectors):
            total = sum(w * x for w, x in zip(weights, column))
            members = [(w, x) for w, x in zip(weights, column) if not elect or x * total > 0]
            added, share = sum(w * x for w, x in members), sum(w for w, _ in members) if elect else sum(weights)
            yield o + scale * (added / share if normalize and share else added)

    values = {n: torch.tensor([*merged(n)], dtype=t.dtype).view(t.shape) for n, t in BASE.items() if n != STEPS}
    return values | {STEPS: states[-1][STEPS]}


def all_of(k, name, vector):
    return vector


def by_magnitude(density, gamma=0.0):
    """Without the share gamma of the largest, and of the others the largest."""

    def sparse(k, name, vector):
        n, kept = len(vector), max(1, int(density * len(vector)))
        below = max(0, n - kept - int(gamma * n))
        order = sorted(range(n), key=lambda j: abs(vector[j]))[below : below + kept]
        return [x if j in order else 0.0 for j, x in enumerate(vector)]

    return sparse


def dropped(density, seed):
    def sparse(k, name, vector):
        draws = uniform(seed, name, k, 0, len(vector)).tolist()
        return [x / density if u < density else 0.0 for x, u in zip(vector, draws)]

    return sparse


def by_rank(density, epsilon, seed):
    def sparse(k, name, vector):
        n, draws = {"a.weight": 6, "a.bias": 4}[name], uniform(seed, name, k, 0, len(vector)).tolist()
        result = []
        for i, x in enumerate(vector):
            rank = sum(abs(y) > abs(x) for y in vector[i // n * n : i // n * n + n])
            p = (1 - density) - epsilon / 2 + epsilon / n * rank
            result.append(x / (1 - p) if draws[i] >= p else 0.0)
        return result

    return sparse


ELECTED, LINEAR = {"elect": True, "normalize": False}, {"elect": False, "normalize": False}
MEAN, BOTH = {"elect": False, "normalize": True}, {"elect": True, "normalize": True}
CASES = {
    "task_arithmetic": (merging.task_arithmetic, {}, all_of, LINEAR),
    "task_arithmetic, mean": (merging.task_arithmetic, {"normalize": True}, all_of, MEAN),
    "ties": (merging.ties, {"density": 0.4}, by_magnitude(0.4), BOTH),
    "ties, all": (merging.ties, {"density": 1.0}, all_of, BOTH),
    "ties, sum": (merging.ties, {"density": 0.01, "normalize": False}, by_magnitude(0.01), ELECTED),
    "dare": (merging.dare, {"density": 0.3, "seed": 4}, dropped(0.3, 4), LINEAR),
    "dare_ties": (merging.dare, {"density": 0.6} | BOTH, dropped(0.6, 0), BOTH),
    "breadcrumbs": (merging.breadcrumbs, {"density": 0.6, "gamma": 0.2}, by_magnitude(0.6, 0.2), LINEAR),
    "breadcrumbs_ties": (
        merging.breadcrumbs, {"density": 0.9, "gamma": 0.5, "elect": True}, by_magnitude(0.9, 0.5), ELECTED
    ),
    "della": (merging.della, {"density": 0.6, "epsilon": 0.3, "seed": 2}, by_rank(0.6, 0.3, 2), BOTH),
    "della_linear": (merging.della, LINEAR, by_rank(0.5, 0.1, 0), LINEAR),
    "della_linear, mean": (merging.della, {"density": 1.0} | MEAN, all_of, MEAN),
}  # fmt: skip


@pytest.mark.parametrize("slab", [None, 3], ids=["whole", "slabs"])
@pytest.mark.parametrize("case", CASES)
def test_papers__it_is_the_papers_algorithm(case, slab, monkeypatch):
    method, settings, sparse, kind = CASES[case]
    if slab:
        monkeypatch.setattr(lazy, "SLAB", slab)
    expected = slowly(models(), sparse, [1.0, 2.0, 0.5], 0.7, **kind)
    close(method(models(), base=BASE, weights=[1, 2, 0.5], scale=0.7, **settings), expected)


def test_ties__over_the_whole_model():
    """The limit is that of all elements, so that a tensor of large differences keeps more of them."""
    states, limits = [s | {"a.weight": 10 * s["a.weight"]} for s in models()], []
    for values in states:
        every = torch.cat([(values[n] - BASE[n]).abs().reshape(-1) for n in BASE if n != STEPS])
        limits.append(every.sort(descending=True).values[int(0.4 * len(every)) - 1].item())

    def sparse(k, name, vector):
        return [x if abs(x) >= limits[k] else 0.0 for x in vector]

    found = merging.ties(states, base=BASE, density=0.4, across="model")
    close(found, slowly(states, sparse, [1.0] * 3, 1.0, **BOTH))
    counters = [{STEPS: torch.tensor(k)} for k in range(3)]
    same(merging.ties(counters, base=counters[0], across="model"), counters[2])
    spoilt = [states[0], states[1] | {"a.weight": states[1]["a.weight"] * torch.nan}]
    alone = merging.ties(states[:1], base=BASE, density=0.4, across="model")
    same(merging.ties(spoilt, base=BASE, weights=[1, 0], density=0.4, across="model"), alone)


@pytest.mark.parametrize("select", [1.0, 0.5, 0.001])
def test_sce__selects_calculates_and_erases(select, monkeypatch):
    monkeypatch.setattr(lazy, "SLAB", 16)
    states = models()
    for values in states:
        values["a.bias"][:3] = BASE["a.bias"][:3] + 1  # no variance, same sign

    def slow(*tensors):
        base, deltas = tensors[3], torch.stack([x - tensors[3] for x in tensors[:3]])
        variance = deltas.var(0, correction=0)
        chosen = torch.zeros(base.numel(), dtype=torch.bool)
        chosen[variance.view(-1).topk(int(select * int(variance.count_nonzero()))).indices] = True
        kept = deltas * (chosen.view(base.shape) if select < 1 else 1)
        energy = kept.square().flatten(1).sum(1)
        shares = (energy / energy.sum() if energy.sum() else torch.ones(3) / 3).view(-1, *[1] * base.ndim)
        agrees = kept * kept.sum(0).sign() > 0
        below = (shares * agrees).sum(0)
        return base + torch.where(below > 0, (kept * shares * agrees).sum(0) / below.clamp(min=1e-30), 0)

    close(merging.sce(states, base=BASE, select=select), by_tensor(slow, [*states, BASE]))


def test_sce__keeps_all_elements_of_what_no_pattern_matches():
    given = models()
    found, half, whole = (merging.sce(given, base=BASE, select=select) for select in ({"a.weight": 0.5}, 0.5, 1))
    same(found, {**whole, "a.weight": half["a.weight"]})


def test_model_stock__is_equation_five():
    states = models()

    def slow(*tensors):
        deltas = [(x - tensors[3]).reshape(-1) for x in tensors[:3]]
        cosine = sum(a @ b / a.norm() / b.norm() for i, a in enumerate(deltas) for b in deltas[:i]) / 3
        t = 3 * cosine / (1 + 2 * cosine)
        return t * sum(tensors[:3]) / 3 + (1 - t) * tensors[3]

    close(merging.model_stock(states, base=BASE), by_tensor(slow, [*states, BASE]))
    close(merging.model_stock([states[0]] * 3, base=BASE), states[0])  # no angle between them: their mean


@pytest.mark.parametrize("name", ["dare", "della"])
def test_papers__what_is_drawn_has_the_task_vector_as_its_mean(name):
    (one,), method = models(1), merging.METHODS[name]
    found = [method([one], base=BASE, seed=seed, density=0.5, **LINEAR) for seed in range(100)]
    mean = torch.stack([f["a.weight"] for f in found]).mean(0) - BASE["a.weight"]
    delta = one["a.weight"] - BASE["a.weight"]
    assert ((mean - delta).abs() < 5 * delta.abs() / math.sqrt(100)).all()
    same(method([one], base=BASE, seed=3, density=0.5, **LINEAR), found[3])
    assert not torch.equal(found[0]["a.weight"], found[1]["a.weight"])


def test_papers__draws_do_not_depend_on_where_reading_begins():
    whole = uniform(1, "w", 0, 0, 200_000)
    assert torch.equal(torch.cat([uniform(1, "w", 0, a, b) for a, b in lazy.spans(200_000, 7_001)]), whole)
    assert abs(whole.mean() - 0.5) < 0.01
    assert not torch.equal(whole[:9], uniform(1, "w", 1, 0, 9))
    assert not torch.equal(whole[:9], uniform(1, "v", 0, 0, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_papers__a_rank_is_found_as_by_sorting(dtype, monkeypatch):
    monkeypatch.setattr(lazy, "SLAB", 10)
    draw = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-30, 30, (997,), generator=draw)
    values = (torch.randn(997, generator=draw, dtype=dtype) * sizes).abs()
    values[:50], values[50:60], values[60], values[100:200] = 0, math.inf, math.nan, values[99].item()
    ordered = values.sort().values
    for rank in (0, 49, 50, 300, 500, 984, 985, 995, 996):
        found = of_rank(lambda: iter(values.split(100)), 997, rank)
        torch.testing.assert_close(found, ordered[rank], rtol=0, atol=0, equal_nan=True)


def nets(k=2):
    torch.manual_seed(0)
    parts = lambda: (nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))  # noqa: E731
    return [nn.Sequential(*parts()).double() for _ in range(k)]


def batch(n=6, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 4, 4, generator=draw, dtype=torch.float64), torch.randint(0, 4, (n,), generator=draw)


def test_fisher__is_equation_four():
    states = [state(net) for net in nets()]
    known = [{n: t.square() for n, t in m.items() if n.endswith(("weight", "bias"))} for m in states]
    known[0]["4.bias"][0] = known[1]["4.bias"][0] = 0
    for name, tensor in merging.fisher(states, fishers=known, weights=[1, 3]).items():
        a, b = (m[name] for m in states)
        f, g = (m.get(name, torch.zeros_like(tensor)) for m in known)
        expected = torch.where(f + g > 0, (f * a + 3 * g * b) / (f + 3 * g), (a + 3 * b) / 4)
        torch.testing.assert_close(tensor, expected if tensor.is_floating_point() else torch.maximum(a, b))


def test_fisher_information__is_the_mean_squared_gradient_of_samples():
    (net,), (x, y) = nets(1), batch()
    net.train()[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = merging.fisher_information(net, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert (net.training, net[0].weight.requires_grad) == (True, False)
    same(net.state_dict(), before)
    net.eval()[0].weight.requires_grad_(True)
    loss = lambda p, x, y: F.cross_entropy(torch.func.functional_call(net, p, (x[None],)), y[None])  # noqa: E731
    rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(dict(net.named_parameters()), x, y)
    close(found, {name: rows[name].square().mean(0) for name, _ in net.named_parameters()})


class _Scaled(nn.Module):
    """Two arguments, one of which no sample has of its own."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, scale=1.0, training=None):
        assert training is None
        return self.net(x) * scale


def test_fisher_information__takes_tuples_and_dicts():
    (net,), (x, y) = nets(1), batch()
    scaled, scale = _Scaled(net), torch.full((len(x), 1), 2.0)
    plain = merging.fisher_information(scaled, [(x, y)])
    close(plain, {f"net.{name}": tensor for name, tensor in merging.fisher_information(net, [(x, y)]).items()})
    by_place = merging.fisher_information(scaled, [[(x, scale), y]])
    assert not torch.equal(by_place["net.0.weight"], plain["net.0.weight"])
    same(by_place, merging.fisher_information(scaled, [({"x": x, "scale": scale, "training": None}, y)]))
    same(by_place, merging.fisher_information(scaled, [((x, torch.tensor(2.0)), y)]))
    named = lambda output, target: F.cross_entropy(output, target["label"])  # noqa: E731
    same(by_place, merging.fisher_information(scaled, [((x, 2.0), {"label": y})], loss=named))


def test_regmean__is_least_squares():
    """With alpha 1 no other weight comes closer to the outputs of all models on their inputs."""
    models, inputs = nets(), [batch(60, seed=k)[0] for k in range(2)]
    grams = [merging.input_grams(net, [x]) for net, x in zip(models, inputs)]
    assert set(grams[0]) == {"0.weight", "4.weight"}
    merged = merging.regmean([state(net) for net in models], grams=grams, alpha=1.0)
    seen = {
        0: [F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 18) for x in inputs],
        4: [net.eval()[:4](x).detach() for net, x in zip(models, inputs)],
    }
    for layer, rows in seen.items():
        outputs = [x @ net[layer].weight.detach().flatten(1).T for x, net in zip(rows, models)]
        expected = torch.linalg.lstsq(torch.cat(rows), torch.cat(outputs)).solution.T
        torch.testing.assert_close(merged[f"{layer}.weight"].flatten(1), expected)


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_papers__a_tied_tensor_of_a_state_dict_is_merged_like_that_of_the_model(method):
    """It has two names there, and the measurements one."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x).mean(1))

    nets, x, y = [Tied(), Tied()], torch.randint(7, (9, 3)), torch.randint(7, (9,))
    if method == "fisher":
        measured = {"fishers": [merging.fisher_information(net, [(x, y)]) for net in nets]}
    else:
        measured = {"grams": [merging.input_grams(net, [x]) for net in nets]}
    (expected,) = getattr(merging, method)(nets, **measured).values()
    result = getattr(merging, method)([net.state_dict() for net in nets], **measured)
    assert [*result] == ["embed.weight", "head.weight"]
    assert all(torch.equal(tensor, expected) for tensor in result.values())
    assert not torch.allclose(expected, merging.linear(nets)["embed.weight"])


def test_papers__measures_do_not_read_lazy_states_at_once(monkeypatch):
    """Tensors of files are read one stretch at a time, not when the merge is asked for."""
    states = models(2)
    names = [name for name, tensor in states[0].items() if tensor.is_floating_point()]
    fishers = [{name: torch.ones_like(one[name]) for name in names} for one in states]
    files = [lazy.LazyState({name: lazy.Pieces.of(tensor) for name, tensor in one.items()}, "") for one in states]
    monkeypatch.setattr(lazy.LazyState, "__getitem__", lambda self, name: pytest.fail(f"{name} is read"))
    merged = merging.fisher(files, fishers=fishers)
    assert isinstance(merged, lazy.LazyState)


def test_regmean__of_diagonal_products_is_fisher_merging_of_inputs():
    states, known = [{"w": torch.randn(3, 5)} for _ in range(2)], [torch.rand(5) + 0.1 for _ in range(2)]
    found = merging.regmean(states, grams=[{"w": row.diag() + 0.01} for row in known], alpha=0, weights=[1, 2])
    fishers = [{"w": (row + 0.01).expand(3, 5)} for row in known]
    torch.testing.assert_close(found["w"], merging.fisher(states, fishers=fishers, weights=[1, 2])["w"])


def test_greedy_soup__a_greedy_soup_takes_what_helps():
    torch.manual_seed(0)
    states, target = [{"w": torch.randn(5)} for _ in range(6)], torch.randn(5)
    score = lambda s: -(s["w"] - target).norm().item()  # noqa: E731
    soup, taken, best = merging.greedy_soup(states, score=score), [], -math.inf
    for k in sorted(range(6), key=lambda k: score(states[k]), reverse=True):
        mean = {"w": torch.stack([states[j]["w"] for j in [*taken, k]]).mean(0)}
        if score(mean) >= best:
            taken, best = [*taken, k], score(mean)
    assert soup.taken == taken
    assert 1 < len(taken) < 6
    assert soup.score == pytest.approx(best)
    assert soup.score >= max(soup.scores)
    assert merging.greedy_soup(states, score=lambda s: 0.0).taken == [0, 1, 2, 3, 4, 5]
    with refused("argument: NoneType"):
        merging.greedy_soup(states, score=lambda s: None)


def test_ties__large_numbers_are_finite():
    largest = {"w": torch.full((64,), torch.finfo(torch.float32).max / 2)}
    same(merging.ties([largest, largest], base={"w": torch.zeros(64)}, density=1.0), largest)


LISTS = {"dare": {"density": [0.3, 1.0]}, "breadcrumbs": {"density": [0.9, 0.5], "gamma": {"*": [0.0, 0.25]}}}
LISTS["della"] = {"density": {"*": [0.6, 0.4]}, "epsilon": [0.1, 0.5], "elect": False}


@pytest.mark.parametrize("name", LISTS)
def test_papers__each_model_has_its_own_settings(name):
    def of(k):  # this model alone, with its numbers
        own = {key: value["*"] if isinstance(value, dict) else value for key, value in LISTS[name].items()}
        own = {key: value[k] if isinstance(value, list) else value for key, value in own.items()}
        return method(two, base=BASE, weights=[float(k == 0), float(k == 1)], **own)

    method, two = getattr(merging, name), models(2)
    found, first, second = method(two, base=BASE, **LISTS[name]), of(0), of(1)
    for key, values in found.items():
        torch.testing.assert_close(values, first[key] + second[key] - BASE[key])


def test_ties__has_densities_by_model_and_refuses_another_number_of_them():
    same(merging.ties(models(2), base=BASE, density=[0.4, 0.4]), merging.ties(models(2), base=BASE, density=0.4))
    lone = merging.ties(models(2), base=BASE, density=[1.0, 1e-9], weights=[1, 1e-12], normalize=False)
    close(lone, {**models(2)[0], STEPS: lone[STEPS]})
    with refused("argument"):
        merging.ties(models(2), base=BASE, density={"a": [0.4, 0.4, 0.4]})
    with refused("argument: density="):
        merging.ties(models(2), base=BASE, density=[0.4, 2])


def test_slerp__is_straight_along_short_arcs():
    x, y = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([3.0, 0.3])}  # 0.0997 radians apart
    same(merging.slerp([x, y], straight=0.1), {"w": torch.tensor([2.0, 0.15])})
    assert (merging.slerp([x, y], straight=0.09)["w"] - torch.tensor([2.0, 0.15])).abs().max() > 1e-4
