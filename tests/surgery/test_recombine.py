import copy
import importlib
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import recombine
from refusals import refused
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import surgery
import surgery.recombine as recombine_module
import zoo
from surgery import Layer


@st.composite
def cases(draw):
    """A random model, K states of it, a unit and a fraction."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    modules = []
    for a, b in itertools.pairwise(sizes):
        modules.append(nn.Linear(a, b, bias=draw(st.booleans())))
        if draw(st.booleans()):
            modules.append(nn.BatchNorm1d(b))
    k, seed = draw(st.integers(1, 6)), draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(*modules).double()
    states = [
        {
            n: torch.randn(t.shape, generator=generator, dtype=t.dtype)
            if t.is_floating_point()
            else torch.randint(9, t.shape, generator=generator)
            for n, t in surgery.state(net).items()
        }
        for _ in range(k)
    ]
    return net, states, draw(st.sampled_from(["layer", "tensor"])), draw(st.floats(0, 1)), generator


@given(cases())
def test_recombine__shuffle_equals_the_paper_s_lists_and_its_inverse_undoes_it(case):
    """Lemma 4.4 follows: sums, and squared distances from anywhere, are invariant."""
    net, states, unit, fraction, generator = case
    parts = surgery.segments(surgery.layers(net, unit=unit), fraction=fraction)
    rows = surgery.permutations(len(parts), len(states), generator=generator)
    models = surgery.stack(states)
    mixed = surgery.shuffle(models, segments=parts, permutations=rows)
    pieces = [Layer(str(j), "", tuple(names)) for j, names in enumerate(parts)]
    for slot, expected in zip(surgery.unstack(mixed), recombine(states, pieces, rows), strict=True):
        assert all(torch.equal(slot[name], expected[name]) for name in expected)
    back = surgery.shuffle(mixed, segments=parts, permutations=surgery.recombine.inverse(rows))
    assert all(torch.equal(back[name], models[name]) for name in models)


@settings(max_examples=40)
@given(cases())
def test_recombine__all_three_kinds_of_input_and_inplace_agree_and_change_nothing_else(case):
    net, states, unit, fraction, generator = case
    parts = surgery.segments(surgery.layers(net, unit=unit), fraction=fraction)
    rows = surgery.permutations(len(parts), len(states), generator=generator)
    models = surgery.stack(states)
    expected = surgery.unstack(surgery.shuffle(models, segments=parts, permutations=rows))
    assert all(torch.equal(models[n], t) for n, t in surgery.stack(states).items())

    nets = [surgery.load(copy.deepcopy(net), state) for state in states]
    for mixed in (
        surgery.shuffle(states, segments=parts, permutations=rows),
        [surgery.state(m) for m in surgery.shuffle(nets, segments=parts, permutations=rows)],
    ):
        for slot, wanted in zip(mixed, expected, strict=True):
            assert list(slot) == list(wanted)
            for name, tensor in slot.items():
                assert torch.equal(tensor, wanted[name])
                assert tensor.dtype == wanted[name].dtype
                assert tensor.data_ptr() not in {s[name].data_ptr() for s in states} or not tensor.numel()
    for net, state in zip(nets, states):
        assert all(torch.equal(t, state[n]) for n, t in surgery.state(net).items())

    for small_row in (0, 1 << 16):  # by cycles, by gathers
        here = surgery.stack(states)
        addresses = {n: t.data_ptr() for n, t in here.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recombine_module, "_SMALL_ROW", small_row)
            back = surgery.shuffle(here, segments=parts, permutations=rows, inplace=True)
        assert all(back[n] is t and t.data_ptr() == addresses[n] for n, t in here.items())
        for slot, wanted in zip(surgery.unstack(here), expected, strict=True):
            assert all(torch.equal(slot[n], t) for n, t in wanted.items())


def test_recombine__modules_keep_ties_mode_and_requires_grad_and_can_be_trained():
    def make(seed):
        torch.manual_seed(seed)
        net = nn.ModuleDict({"a": nn.Embedding(3, 2), "norm": nn.BatchNorm1d(2), "b": nn.Linear(2, 3, bias=False)})
        net["b"].weight = net["a"].weight
        net["norm"].bias.requires_grad_(False)
        return net

    nets = [make(0), make(1).eval()]
    parts = surgery.segments(surgery.layers(nets[0]))
    mixed = surgery.shuffle(nets, segments=parts, permutations=torch.tensor([[1, 0], [0, 1]]))
    for slot, other in ((0, 1), (1, 0)):
        assert torch.equal(mixed[slot]["a"].weight, nets[other]["a"].weight)
        assert mixed[slot]["b"].weight is mixed[slot]["a"].weight
        assert mixed[slot].training == nets[slot].training
        assert not mixed[slot]["norm"].bias.requires_grad
        assert mixed[slot]["a"].weight.is_leaf
        mixed[slot]["b"](mixed[slot]["norm"](mixed[slot]["a"](torch.arange(3)))).sum().backward()
        assert nets[0]["a"].weight.grad is None
    untied = make(2)
    untied["b"].weight = nn.Parameter(torch.zeros(3, 2))
    with refused("mismatch"):
        surgery.shuffle([nets[0], untied], segments=parts, permutations=torch.tensor([[1, 0], [0, 1]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recombine__dtype_and_device_are_kept(dtype, device):
    models = {"w": torch.zeros(3, 2, dtype=dtype, device=device)}
    rows = torch.tensor([[1, 2, 0]])
    for mixed in (
        surgery.shuffle(models, segments=[("w",)], permutations=rows)["w"],
        surgery.shuffle(models, segments=[("w",)], permutations=rows, inplace=True)["w"],
        torch.stack([s["w"] for s in surgery.shuffle(surgery.unstack(models), segments=[("w",)], permutations=rows)]),
    ):
        assert (mixed.dtype, mixed.device.type, mixed.shape) == (dtype, device, (3, 2))


def test_recombine__inplace_needs_no_second_stack():
    models = {n: torch.zeros(4, 50_000) for n in "abc"}
    largest = max(t.nbytes for t in models.values())
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in models.values()}
            for tensor in (t for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
                if tensor.untyped_storage().data_ptr() not in known:
                    sizes.append(tensor.untyped_storage().nbytes())
            return out

    with Watch():
        surgery.shuffle(
            models, segments=[(n,) for n in models], permutations=torch.tensor([[1, 0, 3, 2]] * 3), inplace=True
        )
    # Were all of a tensor's temporaries alive at once, they would still be smaller than the tensor.
    assert 0 < sum(sizes) / len(models) < largest


@given(st.integers(1, 20), st.integers(0, 1000), st.booleans())
def test_recombine__rows_are_permutations_repeat_with_the_seed_and_derangements_move_every_slot(k, seed, derange):
    derange = derange and k > 1
    rows, again = (
        surgery.permutations(8, k, generator=torch.Generator().manual_seed(seed), derange=derange) for _ in range(2)
    )
    assert torch.equal(rows, again)
    assert torch.equal(rows.sort(1).values, torch.arange(k).expand(8, k))
    assert not derange or not (rows == torch.arange(k)).any()
    assert torch.equal(rows.gather(1, surgery.recombine.inverse(rows)), torch.arange(k).expand(8, k))


def test_recombine__derangements_are_uniform_and_one_slot_has_none():
    rows = surgery.permutations(9 * 400, 4, generator=torch.Generator().manual_seed(0), derange=True)
    found, counts = rows.unique(dim=0, return_counts=True)
    assert len(found) == 9  # of four
    assert ((counts - 400).abs() < 5 * 400**0.5).all()
    with refused("argument"):
        surgery.permutations(1, 1, derange=True)


def numbered(n):
    return [Layer(str(j), "Linear", (f"{j}.weight",)) for j in range(1, n + 1)]


@given(st.integers(1, 60), st.integers(1, 60))
def test_recombine__segments_follow_the_formula_exactly(n, denominator):
    """Layer j is in segment ceil(j / (x N)), in exact arithmetic, for x = 1/denominator."""
    groups = surgery.segments(numbered(n), fraction=1 / denominator)
    where = {int(name.split(".")[0]): s for s, names in enumerate(groups, 1) for name in names}
    layer_wise = denominator >= n
    assert where == {j: j if layer_wise else math.ceil(j * denominator / n) for j in range(1, n + 1)}
    assert sum(map(len, groups)) == n


def test_recombine__fraction_one_is_the_whole_model_and_zero_each_layer():
    assert len(surgery.segments(numbered(7), fraction=1.0)) == 1
    assert len(surgery.segments(numbered(7), fraction=0.0)) == 7
    assert (
        len(surgery.segments(numbered(30), fraction=0.1)) == 10
    )  # floats: 3 / (0.1 * 30) is a little under 1, 6 / ... over 2
    for fraction in (-0.1, 1.1, float("nan")):
        with refused("argument: fraction"):
            surgery.segments(numbered(3), fraction=fraction)


BASE, PAIR = torch.zeros(2, 6), {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)}
TIED = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
TIED[1].weight = TIED[0].weight
HERE = {"inplace": True}


@pytest.mark.parametrize(
    ("models", "segments", "rows", "options", "expected"),
    [
        (PAIR, [("a",)], [[0, 1]], {}, "mismatch: 'b'"),
        (PAIR, [("a",), ("a", "b")], [[0, 1], [0, 1]], {}, "argument: 'a'"),
        (PAIR, [("a", "b", "c")], [[0, 1]], {}, "name: 'c'"),
        (PAIR, [("a",), ("b",)], [[0, 1]], {}, "argument"),
        (PAIR, [("a",), ("b",)], [[0, 1], [1, 1]], {}, "argument"),
        ([], [("w",)], [[1, 0]], {}, "argument"),
        (nn.Linear(1, 1), [("w",)], [[1, 0]], {}, "argument"),
        ([nn.Linear(1, 1), {"weight": torch.zeros(1, 1)}], [("w",)], [[1, 0]], {}, "argument"),
        ([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}], [("w",)], [[1, 0]], {}, "mismatch"),
        ([{"w": torch.zeros(2)}, {"w": torch.zeros(2).double()}], [("w",)], [[1, 0]], {}, "mismatch: 'w'"),
        (surgery.stack([TIED.state_dict()] * 2), surgery.segments(surgery.layers(TIED)), [[1, 0]] * 2, {},
         "mismatch"),
        ({"w": torch.zeros(3).expand(2, 3)}, [("w",)], [[1, 0]], HERE, "unsupported"),
        ({"w": torch.zeros(4).as_strided((2, 3), (1, 1))}, [("w",)], [[1, 0]], HERE, "unsupported"),
        ({"w": torch.zeros(2, 3, requires_grad=True)}, [("w",)], [[1, 0]], HERE, "unsupported"),
        ({"v": BASE, "w": BASE}, [("v",), ("w",)], [[1, 0]] * 2, HERE, "unsupported: 'v'"),
        ([{"w": torch.zeros(3)}] * 2, [("w",)], [[1, 0]], HERE, "argument"),
        ([nn.Linear(1, 1)] * 2, [("w",)], [[1, 0]], HERE, "argument"),
    ],
)  # fmt: skip
def test_recombine__what_would_lose_double_or_scramble_a_layer_is_refused(models, segments, rows, options, expected):
    with refused(expected):
        surgery.shuffle(models, segments=segments, permutations=torch.tensor(rows), **options)


def test_recombine__zoo_models_decompose_into_the_layers_one_expects():
    assert [layer.name for layer in surgery.layers(zoo.create("cnn"))] == ["conv1", "conv2", "fc1", "fc2"]
    assert len(surgery.layers(zoo.create("resnet20"))) == 2 + 9 * 4 + 1  # convolutions and norms apart
    assert len(surgery.layers(zoo.create("resnet20"), unit="block")) == 2 + 9 + 1


@pytest.mark.nightly
def test_recombine__the_benchmark_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr("sys.argv", ["surgery", "--quick", "--out", str(tmp_path)])
    benchmark = importlib.import_module("surgery_speed")
    monkeypatch.setitem(benchmark.MODELS, "cnn", lambda: zoo.create("cnn", width=0.1))
    monkeypatch.setattr(benchmark, "gc", SimpleNamespace(collect=lambda: None))  # of all that the tests have imported
    benchmark.main()
    rows = json.loads((tmp_path / "surgery-cpu-quick.json").read_text())["rows"]
    assert {row["operation"] for row in rows} >= {"shuffle", "extract", "embed", "average by plans", "match_norms"}
    assert all(row["surgery_ms"] > 0 for row in rows)
