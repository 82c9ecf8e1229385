"""What holds for every method: what it takes, keeps and refuses, and that slabs of files give what memory gives."""

import inspect
import math

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

import surgery
from surgery import lazy, merging
from surgery.files import open_state, write
from surgery.lazy import LazyState

MEASURED = {"fisher": merging.fisher, "regmean": merging.regmean}
METHODS = merging.METHODS | MEASURED
FROM_BASE = [name for name, method in METHODS.items() if "base" in inspect.signature(method).parameters]
NEED_BASE = [n for n in FROM_BASE if inspect.signature(METHODS[n]).parameters["base"].default is inspect._empty]
COUNT = {"slerp": 2, "nearswap": 1}
DENSE = {name: {"density": 1.0} for name in ("ties", "dare", "della", "breadcrumbs")}
SYMMETRIC = ["linear", "multislerp", "karcher", "task_arithmetic", "ties", "breadcrumbs", "sce", "model_stock"]


def models(k=3, seed=0, dtype=torch.float64):
    """Models with tensors of several shapes and a counter."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 3, 2), "a.bias": (4,)}
    result = [{name: torch.randn(s, generator=draw, dtype=dtype) for name, s in shapes.items()} for _ in range(k)]
    return [state | {"a.steps": torch.tensor(10 * i + 3)} for i, state in enumerate(result)]


def call(name, states, base=None, **settings):
    """A method on as many of the models as it takes, with whatever else it needs."""
    states = states[: COUNT.get(name, 3)]
    if name in NEED_BASE or (base is not None and name in FROM_BASE):
        settings["base"] = base
    first = {n: tuple(t.shape) for n, t in sorted(states[0].items()) if n != "a.steps"}
    draw = torch.Generator().manual_seed(1)
    if name == "nearswap":
        settings = {"t": 0.3} | settings
    if name == "fisher":
        settings["fishers"] = [{n: torch.rand(s, generator=draw) for n, s in first.items()} for _ in states]
    if name == "regmean":
        inputs = {n: math.prod(s[1:]) for n, s in first.items() if len(s) > 1}
        settings["grams"] = [{n: torch.rand(i, generator=draw).diag() for n, i in inputs.items()} for _ in states]
    return METHODS[name](states, **settings)


def same(found, expected, **tolerances):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **({"rtol": 0, "atol": 0} | tolerances))


@pytest.mark.parametrize("name", METHODS)
def test_every_method__nothing_given_is_changed_and_counters_have_the_maximum(name):
    states, base = models(), models(1, seed=9)[0]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in (*states, base)]
    assert call(name, states, base)["a.steps"] == 3 + 10 * (COUNT.get(name, 3) - 1)
    for now, then in zip((*states, base), before):
        same(now, then)


@pytest.mark.parametrize("name", METHODS)
def test_every_method__lazy_states_are_merged_as_those_in_memory(tmp_path, name, monkeypatch):
    states = models(4, dtype=torch.float32)
    for k, values in enumerate(states):
        save_file(values, tmp_path / f"{k}.safetensors")
    *files, base = [open_state(tmp_path / f"{k}.safetensors") for k in range(4)]
    settings = {"density": 0.5} if name in DENSE else {"select": 0.5} if name == "sce" else {}
    expected = call(name, states[:3], states[3], **settings)
    monkeypatch.setattr(lazy, "SLAB", 7)
    found = call(name, files, base, **settings)
    assert isinstance(found, LazyState)
    write(tmp_path / "out.safetensors", found)
    written = load_file(tmp_path / "out.safetensors")
    same({n: written[n] for n in expected}, expected, rtol=1e-6, atol=1e-6)
    same({n: written[n] for n in expected}, {n: found[n] for n in expected})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear", "multislerp", "karcher", "task_arithmetic", *DENSE])
def test_every_method__a_weight_for_one_model_gives_that_model_bit_for_bit(name, dtype):
    states, base = models(dtype=dtype), models(1, seed=7, dtype=dtype)[0]
    states[0]["a.bias"][0] = math.nan
    weight = 1 if name in DENSE or name == "task_arithmetic" else 7
    same(
        call(name, states, base if name in NEED_BASE else None, weights=[0, weight, 0], **DENSE.get(name, {})),
        states[1],
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", METHODS)
def test_every_method__eight_bits_are_merged_in_32_and_rounded(name, dtype):
    states = [{n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()} for state in models(4)]
    wide = [{n: t.float() if t.is_floating_point() else t for n, t in state.items()} for state in states]
    base, wide_base = (every[3] if name in NEED_BASE else None for every in (states, wide))
    exact = call(name, wide[:3], wide_base)
    same(call(name, states[:3], base), {n: t.to(states[0][n].dtype) for n, t in exact.items()})


@pytest.mark.parametrize("name", SYMMETRIC)
def test_every_method__the_order_of_models_does_not_matter(name):
    (a, b, c), base = models(), models(1, seed=7)[0]
    one, other = ({}, {}) if name in ("sce", "model_stock") else ({"weights": [1, 2, 3]}, {"weights": [3, 1, 2]})
    same(call(name, [c, a, b], base, **other), call(name, [a, b, c], base, **one), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NEED_BASE)
def test_every_method__models_that_are_the_base_give_the_base_bit_for_bit(name):
    """What is frozen in fine-tuning must not move by a rounding."""
    base = models(1, seed=7, dtype=torch.float32)[0]
    same(call(name, [base] * 3, base), base)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", METHODS)
def test_every_method__what_is_not_finite_is_an_error_of_every_method(name, value):
    good, bad, zero = ({"w": torch.tensor([[1.0, x]])} for x in (3.0, value, 0.0))
    states, k = ([bad], 0) if name == "nearswap" else ([good, bad], 1)
    with refused("values: 'w'", f"model {k}"):
        call(name, states, zero if name in NEED_BASE else None)
    if name in NEED_BASE:
        with refused("values: 'w'"):
            call(name, [good, good], bad)


@pytest.mark.parametrize("name", METHODS)
def test_every_method__infinities_that_all_models_share_stay(name):
    """As those of the mask of an attention, which is a buffer: a method sees 0 there."""
    mask = torch.full((2, 2), -math.inf).triu(1)
    states = [{"w": mask + torch.tensor([[k], [0.0]])} for k in (1.0, 3.0, 0.0)]
    zeros = [{"w": state["w"].nan_to_num(neginf=0)} for state in states]
    own = lambda values: (values[:2], values[2] if name in NEED_BASE else None)  # noqa: E731
    same(call(name, *own(states)), {"w": mask + call(name, *own(zeros))["w"]})
    with refused("values: 'w'"):
        call(name, *own([{"w": -states[0]["w"]}, *states[1:]]))


def test_slerp__settings_by_pattern():
    states = models(2)
    found = merging.slerp(states, t={"a.bias": 0, "a": 1})
    assert torch.equal(found["a.bias"], states[0]["a.bias"])
    assert torch.equal(found["a.weight"], states[1]["a.weight"])
    found = merging.slerp(states, t={"a.bias": 0})
    same(found, merging.slerp(states) | {"a.bias": states[0]["a.bias"]} | {"a.steps": states[1]["a.steps"]})
    found = merging.linear(states, weights={"a.weight": [0, 1], "*": [1, 0]})
    same(found, states[0] | {"a.weight": states[1]["a.weight"]})


A, B = models(2)
BASE = models(1, seed=7)[0]
OPPOSITE = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([-1.0, -2.0])}]
TWO, ONE, EYE = [{"w": torch.ones(2, 3)}] * 2, {"w": torch.ones(2, 3)}, {"w": torch.eye(3)}
NAN = [ONE, {"w": ONE["w"] * math.nan}]
LARGE = [{"w": torch.full((2,), 1e200, dtype=torch.float64)}] * 2
HALF = [{"w": torch.tensor([6e4]).half()} for _ in range(2)]
REFUSED = [
    ("linear", [[A, {n: t for n, t in B.items() if n != "a.bias"}]], {}, "mismatch: 'a.bias'"),
    ("linear", [[A, B | {"a.bias": torch.zeros(5)}]], {}, "mismatch"),
    ("linear", [[A, B | {"a.steps": torch.zeros(())}]], {}, "mismatch"),
    ("linear", [[A, B | {"a.bias": torch.zeros(4) * 1j}]], {}, "unsupported: 'a.bias'"),
    ("linear", [[A, B | {"a.bias": torch.zeros(4, device="meta")}]], {}, "mismatch"),
    ("linear", [[{"w": torch.zeros(4, device="meta")}]], {}, "values: 'w'"),
    ("linear", [A], {}, "argument"),
    ("linear", [5], {}, "argument"),
    ("linear", [[]], {}, "argument"),
    ("linear", [torch.nn.Linear(1, 1)], {}, "argument"),
    ("linear", [[A, B]], {"weights": [1]}, "argument"),
    ("linear", [[A, B]], {"weights": [1, math.inf]}, "argument"),
    ("linear", [[A, B]], {"weights": "ab"}, "argument: 'ab'"),
    ("linear", [[A, B]], {"weights": [1, -1]}, "argument"),
    ("linear", [[A, B]], {"weights": [0, 0]}, "argument"),
    ("linear", [[A, B]], {"weights": {"x": [1, 1]}}, "name: 'x'"),
    ("linear", [[A, B]], {"weights": {3: [1, 1]}}, "argument: weights"),
    ("linear", [[A, B]], {"normalize": "no"}, "argument: 'no'"),
    ("slerp", [[A, B, A]], {}, "argument"),
    ("slerp", [[A, B]], {"t": 1.5}, "argument: t="),
    ("slerp", [[A, B]], {"t": {"a": "x"}}, "argument: 'x'"),
    ("slerp", [[A, B]], {"t": {"c": 0.5}}, "name: 'c'"),
    ("slerp", [OPPOSITE], {}, "values: 'w'"),
    ("slerp", [LARGE], {}, "values: 'w'"),
    ("multislerp", [OPPOSITE], {}, "values: 'w'"),
    ("karcher", [OPPOSITE], {}, "values: 'w'"),
    ("ties", [[A, B]], {"base": BASE, "density": 0}, "argument: density="),
    ("dare", [[A, B]], {"base": BASE, "density": 2}, "argument: density="),
    ("ties", [[A, B]], {"base": BASE, "weights": [1, -1]}, "argument"),
    ("ties", [[A, B]], {"base": BASE, "across": "all"}, "argument: 'all'"),
    ("ties", [[A, B]], {"base": BASE, "across": "model", "density": {"*": 0.5}}, "argument: 'model'"),
    ("ties", [[A, B]], {"base": {"a.weight": A["a.weight"]}}, "mismatch: 'a.bias'"),
    ("ties", [NAN], {"base": ONE, "across": "model"}, "values: 'w'"),
    ("della", [[A, B]], {"base": BASE, "density": 0.9, "epsilon": 0.5}, "argument"),
    ("dare", [[A, B]], {"base": BASE, "seed": 0.5}, "argument: seed="),
    ("sce", [[A, B]], {"base": BASE, "select": 0}, "argument: select="),
    ("model_stock", [[A]], {"base": BASE}, "argument"),
    *((name, [[A, B]], {"base": None, **({"t": 1} if name == "nearswap" else {})}, "argument")
      for name in NEED_BASE),
    ("fisher", [TWO], {"fishers": 3}, "argument: fishers"),
    ("fisher", [TWO], {"fishers": [ONE]}, "argument"),
    ("fisher", [TWO], {"fishers": [ONE] * 3}, "argument"),
    ("fisher", [TWO], {"fishers": [ONE, {}]}, "mismatch: 'w'"),
    ("fisher", [TWO], {"fishers": [ONE, {"w": -ONE["w"]}]}, "values: 'w'"),
    ("fisher", [TWO], {"fishers": [ONE, {"w": ONE["w"] / 0}]}, "values: 'w'"),
    ("fisher", [TWO], {"fishers": [NAN[1], ONE]}, "values"),
    ("fisher", [TWO], {"fishers": [ONE, EYE]}, "mismatch: 'w'"),
    ("fisher", [TWO], {"fishers": [{"v": ONE["w"]}] * 2}, "name: 'v'"),
    ("regmean", [TWO], {"grams": [EYE, {"w": EYE["w"] / 0}]}, "values: 'w'"),
    ("regmean", [TWO], {"grams": [EYE, {"w": torch.eye(2)}]}, "mismatch: 'w'"),
    ("regmean", [TWO], {"grams": [{"w": torch.ones(3, 3)}] * 2, "alpha": 1}, "values: 'w'"),
    ("greedy_soup", [TWO], {"score": lambda s: math.nan}, "values"),
    ("greedy_soup", [NAN], {"score": lambda s: 1.0}, "values: 'w'"),
    ("task_arithmetic", [HALF], {"base": {"w": torch.zeros(1).half()}}, "values: 'w'"),
    ("fisher_information", [torch.nn.ReLU(), []], {}, "unsupported"),
    ("fisher_information", [torch.nn.Linear(1, 1), []], {}, "argument"),
    ("fisher_information", [torch.nn.Linear(1, 1), [{"x": ONE}]], {}, "argument"),
    ("fisher_information", [torch.nn.Linear(1, 1), [torch.ones(2, 1)]], {}, "argument"),
    ("fisher_information", [torch.nn.Linear(1, 1), [(torch.ones(2, 1), torch.ones(3))]], {}, "argument"),
    ("fisher_information", [torch.nn.Linear(1, 1), [(1, 2)]], {}, "argument"),
    ("input_grams", [torch.nn.ReLU(), []], {}, "unsupported"),
    ("input_grams", [torch.nn.Linear(1, 1), []], {}, "argument"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "settings", "expected"), REFUSED, ids=[f"{r[0]}: {r[3]}" for r in REFUSED])
def test_every_method__what_does_not_fit_is_named(name, given, settings, expected):
    with refused(expected):
        getattr(merging, name)(*given, **settings)


def test_every_method__a_stack_is_merged_as_a_list():
    same(
        merging.linear(surgery.stack(models()), weights=torch.tensor([1, 2, 5])),
        merging.linear(models(), weights=[1, 2, 5]),
    )


def test_every_method__measuring_leaves_every_module_in_its_mode():
    """Also a frozen norm in a model that trains."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout()).train()
    model[1].eval()
    merging.input_grams(model, [torch.randn(2, 4)])
    merging.fisher_information(model, [(torch.randn(2, 4), torch.randn(2, 4))], loss=torch.nn.functional.mse_loss)
    assert [module.training for module in model] == [True, False, True]


def test_input_grams__inputs_that_are_given_by_name_are_measured():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def forward(self, x):
            return self.layer(input=x)

    x = torch.randn(4, 2)
    assert torch.equal(merging.input_grams(Net(), [x])["layer.weight"], x.T @ x)


def test_every_method__measures_of_models_with_computed_weights_and_with_integers():
    normed = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3)))
    with refused("unsupported"):
        merging.input_grams(normed, [torch.ones(4, 2)])
    net = torch.nn.Linear(2, 2)
    net.codes = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    found = merging.fisher_information(net, [(torch.ones(3, 2), torch.tensor([0, 1, 1]))])
    assert found.keys() == {"weight", "bias"}
    assert not net.codes.requires_grad


@pytest.mark.parametrize("name", merging.METHODS)
def test_open_state__equal_masks_of_pruning_stay_and_different_ones_are_refused(name, tmp_path):
    states, base = models(), models(1, seed=9)[0]
    for state in (*states, base):
        state["a.weight_orig"] = state.pop("a.weight")
        state["a.weight_mask"] = (torch.arange(24.0) % 3 > 0).double().view(4, 3, 2)
    result = call(name, states, base)
    assert torch.equal(result["a.weight_mask"], base["a.weight_mask"])
    assert not torch.equal(result["a.weight_orig"], states[0]["a.weight_orig"])
    states[0]["a.weight_mask"] = 1 - states[0]["a.weight_mask"]
    with refused("mismatch"):
        call(name, states, base)
    for k, state in enumerate(states):
        save_file(state, tmp_path / f"{k}.safetensors")
    lazily = call(name, [open_state(tmp_path / f"{k}.safetensors") for k in range(3)], base)
    with refused("mismatch"):
        dict(lazily)
