"""What holds for every method: what it takes, keeps and refuses, and that slabs of files give what memory gives."""

import inspect
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import surgery
from surgery import SurgeryError, lazy, merging
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
def test_nothing_given_is_changed_and_counters_have_the_maximum(name):
    states, base = models(), models(1, seed=9)[0]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in (*states, base)]
    assert call(name, states, base)["a.steps"] == 3 + 10 * (COUNT.get(name, 3) - 1)
    for now, then in zip((*states, base), before):
        same(now, then)


@pytest.mark.parametrize("name", METHODS)
def test_lazy_states_are_merged_as_those_in_memory(tmp_path, name, monkeypatch):
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
def test_a_weight_for_one_model_gives_that_model_bit_for_bit(name, dtype):
    states, base = models(dtype=dtype), models(1, seed=7, dtype=dtype)[0]
    states[0]["a.bias"][0] = math.nan
    weight = 1 if name in DENSE or name == "task_arithmetic" else 7
    same(
        call(name, states, base if name in NEED_BASE else None, weights=[0, weight, 0], **DENSE.get(name, {})),
        states[1],
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", METHODS)
def test_eight_bits_are_merged_in_32_and_rounded(name, dtype):
    states = [{n: t.to(dtype) if t.is_floating_point() else t for n, t in state.items()} for state in models(4)]
    wide = [{n: t.float() if t.is_floating_point() else t for n, t in state.items()} for state in states]
    base, wide_base = (every[3] if name in NEED_BASE else None for every in (states, wide))
    exact = call(name, wide[:3], wide_base)
    same(call(name, states[:3], base), {n: t.to(states[0][n].dtype) for n, t in exact.items()})


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_order_of_models_does_not_matter(name):
    (a, b, c), base = models(), models(1, seed=7)[0]
    one, other = ({}, {}) if name in ("sce", "model_stock") else ({"weights": [1, 2, 3]}, {"weights": [3, 1, 2]})
    same(call(name, [c, a, b], base, **other), call(name, [a, b, c], base, **one), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NEED_BASE)
def test_models_that_are_the_base_give_the_base_bit_for_bit(name):
    """What is frozen in fine-tuning must not move by a rounding."""
    base = models(1, seed=7, dtype=torch.float32)[0]
    same(call(name, [base] * 3, base), base)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", METHODS)
def test_what_is_not_finite_is_an_error_of_every_method(name, value):
    good, bad, zero = ({"w": torch.tensor([[1.0, x]])} for x in (3.0, value, 0.0))
    states, k = ([bad], 0) if name == "nearswap" else ([good, bad], 1)
    with pytest.raises(SurgeryError, match=rf"'w' of model {k} \(from 0\) holds NaN or infinity"):
        call(name, states, zero if name in NEED_BASE else None)
    if name in NEED_BASE:
        with pytest.raises(SurgeryError, match=r"'w' of the base holds NaN or infinity"):
            call(name, [good, good], bad)


@pytest.mark.parametrize("name", METHODS)
def test_infinities_that_all_models_share_stay(name):
    """As those of the mask of an attention, which is a buffer: a method sees 0 there."""
    mask = torch.full((2, 2), -math.inf).triu(1)
    states = [{"w": mask + torch.tensor([[k], [0.0]])} for k in (1.0, 3.0, 0.0)]
    zeros = [{"w": state["w"].nan_to_num(neginf=0)} for state in states]
    own = lambda values: (values[:2], values[2] if name in NEED_BASE else None)  # noqa: E731
    same(call(name, *own(states)), {"w": mask + call(name, *own(zeros))["w"]})
    with pytest.raises(SurgeryError, match=r"'w' of .* holds NaN or infinity"):
        call(name, *own([{"w": -states[0]["w"]}, *states[1:]]))


def test_settings_by_pattern():
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
    ("linear", [[A, {n: t for n, t in B.items() if n != "a.bias"}]], {}, "'a.bias' of model 0 is missing in model 1"),
    ("linear", [[A, B | {"a.bias": torch.zeros(5)}]], {}, r"has shape \(4,\) in model 0 and \(5,\) in model 1"),
    ("linear", [[A, B | {"a.steps": torch.zeros(())}]], {}, "is torch.int64 in model 0 and torch.float32 in model 1"),
    ("linear", [[A, B | {"a.bias": torch.zeros(4) * 1j}]], {}, "'a.bias' of model 1 is torch.complex64"),
    ("linear", [[A, B | {"a.bias": torch.zeros(4, device="meta")}]], {}, "is on cpu in model 0 and on meta in model 1"),
    ("linear", [[{"w": torch.zeros(4, device="meta")}]], {}, "'w' of model 0 has no data"),
    ("linear", [A], {}, "stack"),
    ("linear", [5], {}, "not a int"),
    ("linear", [[]], {}, "no models"),
    ("linear", [torch.nn.Linear(1, 1)], {}, "one model cannot be merged"),
    ("linear", [[A, B]], {"weights": [1]}, r"2 numbers, one for each model, got 1: \[1.0\]"),
    ("linear", [[A, B]], {"weights": [1, math.inf]}, r"finite numbers, got \[1.0, inf\]"),
    ("linear", [[A, B]], {"weights": "ab"}, "weights must be 2 numbers, one for each model, got 'ab'"),
    ("linear", [[A, B]], {"weights": [1, -1]}, "not negative"),
    ("linear", [[A, B]], {"weights": [0, 0]}, "all models have the weight 0"),
    ("linear", [[A, B]], {"weights": {"x": [1, 1]}}, "weights: no tensor matches 'x'"),
    ("linear", [[A, B]], {"weights": {3: [1, 1]}}, "weights has 3 as a pattern"),
    ("linear", [[A, B]], {"normalize": "no"}, "normalize='no': give true or false"),
    ("slerp", [[A, B, A]], {}, "slerp merges 2 models, got 3"),
    ("slerp", [[A, B]], {"t": 1.5}, "t=1.5 is out of range"),
    ("slerp", [[A, B]], {"t": {"a": "x"}}, "t='x' for 'a' is no finite number"),
    ("slerp", [[A, B]], {"t": {"c": 0.5}}, "no tensor matches 'c'"),
    ("slerp", [OPPOSITE], {}, "'w'.*opposite"),
    ("slerp", [LARGE], {}, r"'w' of model 0 \(from 0\) holds numbers too large for a direction"),
    ("multislerp", [OPPOSITE], {}, "'w'.*cancel"),
    ("karcher", [OPPOSITE], {}, "'w'.*cancel"),
    ("ties", [[A, B]], {"base": BASE, "density": 0}, "density=0 is out of range"),
    ("dare", [[A, B]], {"base": BASE, "density": 2}, "density=2 is out of range"),
    ("ties", [[A, B]], {"base": BASE, "weights": [1, -1]}, "not negative"),
    ("ties", [[A, B]], {"base": BASE, "across": "all"}, "across='all'"),
    ("ties", [[A, B]], {"base": BASE, "across": "model", "density": {"*": 0.5}}, "across='model'"),
    ("ties", [[A, B]], {"base": {"a.weight": A["a.weight"]}}, "'a.bias' of model 0 is missing in the base"),
    ("ties", [NAN], {"base": ONE, "across": "model"}, r"'w' of model 1 .* holds NaN"),
    ("della", [[A, B]], {"base": BASE, "density": 0.9, "epsilon": 0.5}, "an epsilon of at most 0.2"),
    ("dare", [[A, B]], {"base": BASE, "seed": 0.5}, "seed=0.5"),
    ("sce", [[A, B]], {"base": BASE, "select": 0}, "select=0 is out of range"),
    ("model_stock", [[A]], {"base": BASE}, "model_stock merges at least 2 models, got 1"),
    *((name, [[A, B]], {"base": None, **({"t": 1} if name == "nearswap" else {})}, "give the model that was fine-tuned")
      for name in NEED_BASE),
    ("fisher", [TWO], {"fishers": 3}, "fishers is a list with the Fisher information of each model"),
    ("fisher", [TWO], {"fishers": [ONE]}, "1 models have Fisher information, and model 1 has none"),
    ("fisher", [TWO], {"fishers": [ONE] * 3}, "3 models have Fisher information, and 2 are merged"),
    ("fisher", [TWO], {"fishers": [ONE, {}]}, "model 1 has no Fisher information of 'w'"),
    ("fisher", [TWO], {"fishers": [ONE, {"w": -ONE["w"]}]}, "'w' is negative, NaN or infinite in model 1"),
    ("fisher", [TWO], {"fishers": [ONE, {"w": ONE["w"] / 0}]}, "'w' is negative, NaN or infinite in model 1"),
    ("fisher", [TWO], {"fishers": [NAN[1], ONE]}, "NaN or infinite in model 0"),
    ("fisher", [TWO], {"fishers": [ONE, EYE]}, r"'w' is \(3, 3\) in model 1: need \(2, 3\)"),
    ("fisher", [TWO], {"fishers": [{"v": ONE["w"]}] * 2}, "'v', but the models have no such tensor"),
    ("regmean", [TWO], {"grams": [EYE, {"w": EYE["w"] / 0}]}, "'w' hold NaN or infinity in model 1"),
    ("regmean", [TWO], {"grams": [EYE, {"w": torch.eye(2)}]}, r"'w' have shape \(2, 2\) in model 1"),
    ("regmean", [TWO], {"grams": [{"w": torch.ones(3, 3)}] * 2, "alpha": 1}, "'w' cannot be inverted"),
    ("greedy_soup", [TWO], {"score": lambda s: math.nan}, "NaN"),
    ("greedy_soup", [NAN], {"score": lambda s: 1.0}, r"'w' of model 1 \(from 0\) holds NaN"),
    ("task_arithmetic", [HALF], {"base": {"w": torch.zeros(1).half()}}, r"'w' does not fit into torch.float16 .*1.2e"),
    ("fisher_information", [torch.nn.ReLU(), []], {}, "no parameters"),
    ("fisher_information", [torch.nn.Linear(1, 1), []], {}, "no samples"),
    ("fisher_information", [torch.nn.Linear(1, 1), [{"x": ONE}]], {}, r"batch 0 .* is a dict: give pairs"),
    ("fisher_information", [torch.nn.Linear(1, 1), [torch.ones(2, 1)]], {}, "batch 0 .* is a Tensor: give pairs"),
    ("fisher_information", [torch.nn.Linear(1, 1), [(torch.ones(2, 1), torch.ones(3))]], {}, "of 2 and 3 samples"),
    ("fisher_information", [torch.nn.Linear(1, 1), [(1, 2)]], {}, "no tensors of samples"),
    ("input_grams", [torch.nn.ReLU(), []], {}, "no linear layer"),
    ("input_grams", [torch.nn.Linear(1, 1), []], {}, "no layer was run"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "settings", "text"), REFUSED, ids=[f"{r[0]}: {r[3]}" for r in REFUSED])
def test_what_does_not_fit_is_named(name, given, settings, text):
    with pytest.raises(SurgeryError, match=text):
        getattr(merging, name)(*given, **settings)


def test_a_stack_is_merged_as_a_list():
    same(
        merging.linear(surgery.stack(models()), weights=torch.tensor([1, 2, 5])),
        merging.linear(models(), weights=[1, 2, 5]),
    )


def test_measuring_leaves_every_module_in_its_mode():
    """Also a frozen norm in a model that trains."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout()).train()
    model[1].eval()
    merging.input_grams(model, [torch.randn(2, 4)])
    merging.fisher_information(model, [(torch.randn(2, 4), torch.randn(2, 4))], loss=torch.nn.functional.mse_loss)
    assert [module.training for module in model] == [True, False, True]


def test_inputs_that_are_given_by_name_are_measured():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def forward(self, x):
            return self.layer(input=x)

    x = torch.randn(4, 2)
    assert torch.equal(merging.input_grams(Net(), [x])["layer.weight"], x.T @ x)


def test_measures_of_models_with_computed_weights_and_with_integers():
    normed = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 3)))
    with pytest.raises(SurgeryError, match="the weight of a ParametrizedLinear of this Sequential is computed"):
        merging.input_grams(normed, [torch.ones(4, 2)])
    net = torch.nn.Linear(2, 2)
    net.codes = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    found = merging.fisher_information(net, [(torch.ones(3, 2), torch.tensor([0, 1, 1]))])
    assert found.keys() == {"weight", "bias"}
    assert not net.codes.requires_grad


@pytest.mark.parametrize("name", merging.METHODS)
def test_equal_masks_of_pruning_stay_and_different_ones_are_refused(name, tmp_path):
    states, base = models(), models(1, seed=9)[0]
    for state in (*states, base):
        state["a.weight_orig"] = state.pop("a.weight")
        state["a.weight_mask"] = (torch.arange(24.0) % 3 > 0).double().view(4, 3, 2)
    result = call(name, states, base)
    assert torch.equal(result["a.weight_mask"], base["a.weight_mask"])
    assert not torch.equal(result["a.weight_orig"], states[0]["a.weight_orig"])
    states[0]["a.weight_mask"] = 1 - states[0]["a.weight_mask"]
    with pytest.raises(SurgeryError):
        call(name, states, base)
    for k, state in enumerate(states):
        save_file(state, tmp_path / f"{k}.safetensors")
    lazily = call(name, [open_state(tmp_path / f"{k}.safetensors") for k in range(3)], base)
    with pytest.raises(SurgeryError):
        dict(lazily)
