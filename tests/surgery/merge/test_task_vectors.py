"""Merging of task vectors, compared with the papers' algorithms element by element."""

import math

import pytest
import torch

from surgery import lazy, merge
from surgery.merge.parts import of_rank, uniform


def models(k=3, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    return [{n: torch.randn(s, generator=draw, dtype=dtype) for n, s in (("w", (5, 8)), ("b", (7,)))} for _ in range(k)]


BASE = models(1, seed=7)[0]


def close(found, expected, **tolerances):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], equal_nan=True, **tolerances)


def slowly(states, sparse, weights, scale, elect, normalize):
    """Element by element: sparsify, elect the sign, add or average, scale."""
    result = {}
    for name, base in BASE.items():
        origin = base.reshape(-1).tolist()
        vectors = [
            sparse(k, name, [x - o for x, o in zip(s[name].reshape(-1).tolist(), origin)]) for k, s in enumerate(states)
        ]
        values = []
        for j, o in enumerate(origin):
            column = [vector[j] for vector in vectors]
            total = sum(w * x for w, x in zip(weights, column))
            members = [(w, x) for w, x in zip(weights, column) if not elect or x * total > 0]
            added, share = sum(w * x for w, x in members), sum(w for w, _ in members) if elect else sum(weights)
            values.append(o + scale * (added / share if normalize and share else added))
        result[name] = torch.tensor(values, dtype=base.dtype).view(base.shape)
    return result  # fmt: skip


def all_of(k, name, vector):
    return vector


def largest(density):
    def sparse(k, name, vector):
        limit = sorted(map(abs, vector), reverse=True)[max(1, int(density * len(vector))) - 1]
        return [x if abs(x) >= limit else 0.0 for x in vector]

    return sparse


def middle(density, gamma):
    def sparse(k, name, vector):
        n, kept = len(vector), int(density * len(vector))
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
        n, draws = {"w": 8, "b": 7}[name], uniform(seed, name, k, 0, len(vector)).tolist()
        result = []
        for row in range(0, len(vector), n):
            part = vector[row : row + n]
            for j, x in enumerate(part):
                rank = sum(abs(y) > abs(x) for y in part)
                p = (1 - density) - epsilon / 2 + epsilon / n * rank
                result.append(x / (1 - p) if draws[row + j] >= p else 0.0)
        return result

    return sparse


ELECTED = {"density": 0.9, "gamma": 0.5, "elect": True}
LINEAR = {"elect": False, "normalize": False}
CASES = {
    "task_arithmetic": (merge.task_arithmetic, {}, all_of, False, False),
    "task_arithmetic, mean": (merge.task_arithmetic, {"normalize": True}, all_of, False, True),
    "ties": (merge.ties, {"density": 0.4}, largest(0.4), True, True),
    "ties, all": (merge.ties, {"density": 1.0}, all_of, True, True),
    "ties, sum": (merge.ties, {"density": 0.01, "normalize": False}, largest(0.01), True, False),
    "dare": (merge.dare, {"density": 0.3, "seed": 4}, dropped(0.3, 4), False, False),
    "dare_ties": (merge.dare, {"density": 0.6, "elect": True, "normalize": True}, dropped(0.6, 0), True, True),
    "breadcrumbs": (merge.breadcrumbs, {"density": 0.6, "gamma": 0.2}, middle(0.6, 0.2), False, False),
    "breadcrumbs_ties": (merge.breadcrumbs, ELECTED, middle(0.9, 0.5), True, False),
    "della": (merge.della, {"density": 0.6, "epsilon": 0.3, "seed": 2}, by_rank(0.6, 0.3, 2), True, True),
    "della_linear, all": (merge.della, {"density": 1.0} | LINEAR, all_of, False, False),
    "della_linear, mean": (merge.della, {"density": 1.0, "elect": False, "normalize": True}, all_of, False, True),
    "della_linear": (merge.della, LINEAR, by_rank(0.5, 0.1, 0), False, False),
}  # fmt: skip


@pytest.mark.parametrize("slab", [None, 3], ids=["whole", "slabs"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_papers_algorithm(case, slab, monkeypatch):
    method, settings, sparse, elect, normalize = CASES[case]
    if slab:
        monkeypatch.setattr(lazy, "SLAB", slab)
    expected = slowly(models(), sparse, [1.0, 2.0, 0.5], 0.7, elect, normalize)
    close(method(models(), base=BASE, weights=[1, 2, 0.5], scale=0.7, **settings), expected)


def test_ties_over_the_whole_model():
    """The limit is that of all elements, so that a tensor of large differences keeps more of them."""
    states = [{"w": 10 * s["w"], "b": s["b"]} for s in models()]
    size = sum(t.numel() for t in BASE.values())
    limits = []
    for state in states:
        every = torch.cat([(state[n] - BASE[n]).abs().reshape(-1) for n in BASE])
        limits.append(every.sort(descending=True).values[int(0.4 * size) - 1].item())

    def sparse(k, name, vector):
        return [x if abs(x) >= limits[k] else 0.0 for x in vector]

    close(
        merge.ties(states, base=BASE, density=0.4, across="model"), slowly(states, sparse, [1.0] * 3, 1.0, True, True)
    )


@pytest.mark.parametrize("select", [1.0, 0.5, 0.001])
def test_sce_selects_calculates_and_erases(select, monkeypatch):
    monkeypatch.setattr(lazy, "SLAB", 16)
    states = models()
    states[1]["b"][:3] = states[0]["b"][:3] = states[2]["b"][:3] = BASE["b"][:3] + 1  # no variance, same sign
    expected = {}
    for name, base in BASE.items():
        deltas = torch.stack([s[name] - base for s in states])
        variance = deltas.var(0, correction=0)
        chosen = torch.zeros(base.numel(), dtype=torch.bool)
        if select < 1:
            chosen[variance.view(-1).topk(int(select * int(variance.count_nonzero()))).indices] = True
        kept = deltas * (chosen.view(base.shape) if select < 1 else 1)
        energy = kept.square().flatten(1).sum(1)
        shares = (energy / energy.sum() if energy.sum() else torch.ones(3) / 3).view(-1, *[1] * base.ndim)
        agrees = kept * kept.sum(0).sign() > 0
        below = (shares * agrees).sum(0)
        expected[name] = base + torch.where(below > 0, (kept * shares * agrees).sum(0) / below.clamp(min=1e-30), 0)
    close(merge.sce(states, base=BASE, select=select), expected)


def test_model_stock_is_equation_five():
    states, expected = models(), {}
    for name, base in BASE.items():
        deltas = [(s[name] - base).reshape(-1) for s in states]
        cosines = [a @ b / a.norm() / b.norm() for i, a in enumerate(deltas) for b in deltas[:i]]
        cosine = sum(cosines) / 3
        t = 3 * cosine / (1 + 2 * cosine)
        expected[name] = t * sum(s[name] for s in states) / 3 + (1 - t) * base
    close(merge.model_stock(states, base=BASE), expected)
    close(merge.model_stock([states[0]] * 3, base=BASE), states[0])  # no angle between them: their mean
    frozen = [BASE, BASE]
    close(merge.model_stock(frozen, base=BASE), BASE, rtol=0, atol=0)


DENSE = {"task_arithmetic": {}, "ties": {"density": 1.0}, "dare": {"density": 1.0}, "della": {"density": 1.0},
         "breadcrumbs": {"density": 1.0}}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_with_nothing_left_out_and_agreeing_signs_it_is_task_arithmetic(name):
    states = [{n: BASE[n] + s[n].abs() for n in BASE} for s in models()]
    expected = merge.task_arithmetic(states, base=BASE, weights=[1, 2, 3], normalize=True)
    close(merge.METHODS[name](states, base=BASE, weights=[1, 2, 3], normalize=True, **DENSE[name]), expected)


@pytest.mark.parametrize("name", ["dare", "della"])
def test_what_is_drawn_has_the_task_vector_as_its_mean(name):
    (state,), settings = models(1), {"density": 0.5, "elect": False, "normalize": False}
    method = merge.METHODS[name]
    found = [method([state], base=BASE, seed=seed, **settings) for seed in range(100)]
    mean = torch.stack([f["w"] for f in found]).mean(0) - BASE["w"]
    delta = state["w"] - BASE["w"]
    assert ((mean - delta).abs() < 5 * delta.abs() / math.sqrt(100)).all()
    close(method([state], base=BASE, seed=3, **settings), found[3], rtol=0, atol=0)
    assert not torch.equal(found[0]["w"], found[1]["w"])


def test_draws_do_not_depend_on_where_reading_begins(monkeypatch):
    whole = uniform(1, "w", 0, 0, 200_000)
    assert torch.equal(torch.cat([uniform(1, "w", 0, a, b) for a, b in lazy.spans(200_000, 7_001)]), whole)
    assert abs(whole.mean() - 0.5) < 0.01
    assert not torch.equal(whole[:9], uniform(1, "w", 1, 0, 9))
    assert not torch.equal(whole[:9], uniform(1, "v", 0, 0, 9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rank_is_found_as_by_sorting(dtype, monkeypatch):
    monkeypatch.setattr(lazy, "SLAB", 10)
    draw = torch.Generator().manual_seed(0)
    values = (
        torch.randn(997, generator=draw, dtype=dtype) * 10.0 ** torch.randint(-30, 30, (997,), generator=draw)
    ).abs()
    values[:50], values[50:60], values[60] = 0, math.inf, math.nan
    values[100:200] = values[99]
    ordered = values.sort().values
    for rank in (0, 49, 50, 300, 500, 984, 985, 995, 996):
        found = of_rank(lambda: iter(values.split(100)), 997, rank)
        torch.testing.assert_close(found, ordered[rank], rtol=0, atol=0, equal_nan=True)
