import copy
import importlib
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import recombine
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
def test_lemma_4_4_sums_and_squared_distances_are_invariant(case):
    net, states, unit, fraction, generator = case
    models = surgery.stack(states)
    parts = surgery.segments(surgery.layers(net, unit=unit), fraction=fraction)
    mixed = surgery.shuffle(
        models, segments=parts, permutations=surgery.permutations(len(parts), len(states), generator=generator)
    )
    anywhere = {n: torch.randn(1, *t.shape[1:], dtype=torch.float64, generator=generator) for n, t in models.items()}
    floats = [n for n, t in models.items() if t.is_floating_point()]
    for name in models:
        torch.testing.assert_close(mixed[name].sum(0), models[name].sum(0), rtol=1e-12, atol=1e-12)
    before, after = (
        surgery.distance({n: m[n] for n in floats}, {n: anywhere[n] for n in floats}).square().sum()
        for m in (models, mixed)
    )
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


@given(cases())
def test_every_layer_of_every_model_is_used_exactly_once_and_whole(case):
    net, states, unit, fraction, generator = case
    k = len(states)
    # Entry (k, name) is the number k: what comes out tells where it came from.
    marked = {n: torch.arange(k).view(k, *[1] * t.ndim).expand(k, *t.shape) for n, t in states[0].items()}
    parts = surgery.segments(surgery.layers(net, unit=unit), fraction=fraction)
    mixed = surgery.shuffle(
        marked, segments=parts, permutations=surgery.permutations(len(parts), k, generator=generator)
    )
    for names in parts:
        sources = [{mixed[n][slot].unique().item() for n in names if mixed[n][slot].numel()} for slot in range(k)]
        assert all(len(source) == 1 for source in sources)  # the segment travelled as one piece
        assert {next(iter(source)) for source in sources} == set(range(k))


@given(cases())
def test_the_inverse_undoes_a_shuffle_bit_for_bit(case):
    net, states, unit, fraction, generator = case
    models = surgery.stack(states)
    parts = surgery.segments(surgery.layers(net, unit=unit), fraction=fraction)
    there = surgery.permutations(len(parts), len(states), generator=generator)
    back = surgery.shuffle(
        surgery.shuffle(models, segments=parts, permutations=there),
        segments=parts,
        permutations=surgery.recombine.inverse(there),
    )
    assert all(torch.equal(back[name], models[name]) for name in models)


@given(cases())
def test_shuffle_equals_the_paper_s_lists(case):
    net, states, unit, _, generator = case
    pieces = surgery.layers(net, unit=unit)
    permutations = surgery.permutations(len(pieces), len(states), generator=generator)
    mixed = surgery.shuffle(surgery.stack(states), segments=surgery.segments(pieces), permutations=permutations)
    for slot, expected in zip(surgery.unstack(mixed), recombine(states, pieces, permutations), strict=True):
        assert all(torch.equal(slot[name], expected[name]) for name in expected)


@settings(max_examples=40, deadline=None)
@given(cases())
def test_all_three_kinds_of_input_and_inplace_agree_and_change_nothing_else(case):
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


def test_modules_keep_ties_mode_and_requires_grad_and_can_be_trained():
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
    with pytest.raises(surgery.SurgeryError, match="ties differ"):
        surgery.shuffle([nets[0], untied], segments=parts, permutations=torch.tensor([[1, 0], [0, 1]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_and_device_are_kept(dtype, device):
    models = {"w": torch.zeros(3, 2, dtype=dtype, device=device)}
    rows = torch.tensor([[1, 2, 0]])
    for mixed in (
        surgery.shuffle(models, segments=[("w",)], permutations=rows)["w"],
        surgery.shuffle(models, segments=[("w",)], permutations=rows, inplace=True)["w"],
        torch.stack([s["w"] for s in surgery.shuffle(surgery.unstack(models), segments=[("w",)], permutations=rows)]),
    ):
        assert (mixed.dtype, mixed.device.type, mixed.shape) == (dtype, device, (3, 2))


def test_inplace_needs_no_second_stack():
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


BASE = torch.zeros(2, 6)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"w": torch.zeros(3).expand(2, 3)}, "broadcast"),
        ({"w": torch.zeros(4).as_strided((2, 3), (1, 1))}, "overlapping"),
        ({"w": torch.zeros(2, 3, requires_grad=True)}, "requires grad"),
        ({"v": BASE, "w": BASE}, "'v' and 'w' may share memory"),
        ([{"w": torch.zeros(3)}] * 2, "for stacks"),
        ([nn.Linear(1, 1)] * 2, "for stacks"),
    ],
)
def test_inplace_refuses_what_it_would_scramble(models, message):
    names = models if isinstance(models, dict) else ["w"]
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.shuffle(
            models, segments=[(n,) for n in names], permutations=torch.tensor([[1, 0]] * len(names)), inplace=True
        )


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "at least one"),
        (nn.Linear(1, 1), "a list"),
        ([nn.Linear(1, 1), {"weight": torch.zeros(1, 1)}], "of one kind"),
        ([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}], "the architectures differ"),
        ([{"w": torch.zeros(2)}, {"w": torch.zeros(2).double()}], "'w' is torch.float32"),
    ],
)
def test_lists_are_of_one_architecture_and_dtype(models, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.shuffle(models, segments=[("w",)], permutations=torch.tensor([[1, 0]]))


@given(st.integers(2, 9), st.integers(0, 1000))
def test_derangements_move_every_slot(k, seed):
    rows = surgery.permutations(8, k, generator=torch.Generator().manual_seed(seed), derange=True)
    assert torch.equal(rows.sort(1).values, torch.arange(k).expand(8, k))
    assert not (rows == torch.arange(k)).any()
    assert torch.equal(rows.gather(1, surgery.recombine.inverse(rows)), torch.arange(k).expand(8, k))


def test_derangements_are_uniform_and_one_slot_has_none():
    rows = surgery.permutations(9 * 400, 4, generator=torch.Generator().manual_seed(0), derange=True)
    found, counts = rows.unique(dim=0, return_counts=True)
    assert len(found) == 9  # of four
    assert ((counts - 400).abs() < 5 * 400**0.5).all()
    with pytest.raises(surgery.SurgeryError, match="k of 2"):
        surgery.permutations(1, 1, derange=True)


def numbered(n):
    return [Layer(str(j), "Linear", (f"{j}.weight",)) for j in range(1, n + 1)]


@given(st.integers(1, 60), st.integers(1, 60))
def test_segments_follow_the_formula_exactly(n, denominator):
    """Layer j is in segment ceil(j / (x N)), in exact arithmetic, for x = 1/denominator."""
    groups = surgery.segments(numbered(n), fraction=1 / denominator)
    where = {int(name.split(".")[0]): s for s, names in enumerate(groups, 1) for name in names}
    layer_wise = denominator >= n
    assert where == {j: j if layer_wise else math.ceil(j * denominator / n) for j in range(1, n + 1)}
    assert sum(map(len, groups)) == n


def test_fraction_one_is_the_whole_model_and_zero_each_layer():
    assert len(surgery.segments(numbered(7), fraction=1.0)) == 1
    assert len(surgery.segments(numbered(7), fraction=0.0)) == 7
    assert (
        len(surgery.segments(numbered(30), fraction=0.1)) == 10
    )  # floats: 3 / (0.1 * 30) is a little under 1, 6 / ... over 2
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(surgery.SurgeryError, match="fraction"):
            surgery.segments(numbered(3), fraction=fraction)


@settings(max_examples=20)
@given(st.integers(1, 50), st.integers(0, 1000))
def test_permutations_are_permutations_and_repeat_with_the_seed(k, seed):
    draws = [surgery.permutations(5, k, generator=torch.Generator().manual_seed(seed)) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(draws[0].sort(1).values, torch.arange(k).expand(5, k))


def test_recombined_models_run_and_blocks_stay_together():
    nets = [torchvision.models.resnet18(num_classes=3) for _ in range(3)]
    pieces = surgery.layers(nets[0], unit="block")
    parts = surgery.segments(pieces)
    mixed = surgery.shuffle(
        surgery.stack([surgery.state(net) for net in nets]),
        segments=parts,
        permutations=surgery.permutations(len(parts), 3, generator=torch.Generator().manual_seed(0)),
    )
    for state in surgery.unstack(mixed):
        out = surgery.load(torchvision.models.resnet18(num_classes=3), state)(torch.randn(2, 3, 64, 64))
        assert out.shape == (2, 3)
        assert out.isfinite().all()


MODELS = {"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)}


@pytest.mark.parametrize(
    ("segments", "rows", "message"),
    [
        ([("a",)], [[0, 1]], "no segment holds 'b'"),
        ([("a",), ("a", "b")], [[0, 1], [0, 1]], "'a' is in segments 0 and 1"),
        ([("a", "b", "c")], [[0, 1]], "'c', but the models have no such tensor"),
        ([("a",), ("b",)], [[0, 1]], "expected \\[2 segments, 2 models\\]"),
        ([("a",), ("b",)], [[0, 1], [1, 1]], "every slot"),
    ],
)
def test_shuffle_refuses_what_would_lose_or_double_a_layer(segments, rows, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.shuffle(MODELS, segments=segments, permutations=torch.tensor(rows))


def test_a_tied_state_dict_is_refused_not_half_shuffled():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    parts = surgery.segments(surgery.layers(net))
    with pytest.raises(surgery.SurgeryError, match=r"surgery\.state"):
        surgery.shuffle(
            surgery.stack([net.state_dict()] * 2), segments=parts, permutations=surgery.permutations(len(parts), 2)
        )


def test_zoo_models_decompose_into_the_layers_one_expects():
    assert [layer.name for layer in surgery.layers(zoo.create("cnn"))] == ["conv1", "conv2", "fc1", "fc2"]
    assert len(surgery.layers(zoo.create("resnet20"))) == 2 + 9 * 4 + 1  # convolutions and norms apart
    assert len(surgery.layers(zoo.create("resnet20"), unit="block")) == 2 + 9 + 1


@pytest.mark.slow
def test_the_benchmark_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setattr("sys.argv", ["surgery", "--quick", "--out", str(tmp_path)])
    benchmark = importlib.import_module("surgery_speed")
    monkeypatch.setitem(benchmark.MODELS, "cnn", lambda: zoo.create("cnn", width=0.1))
    monkeypatch.setattr(benchmark, "gc", SimpleNamespace(collect=lambda: None))  # of all that the tests have imported
    benchmark.main()
    rows = json.loads((tmp_path / "surgery-cpu-quick.json").read_text())["rows"]
    assert {row["operation"] for row in rows} >= {"shuffle", "extract", "embed", "average_submodels", "match_norms"}
    assert all(row["surgery_ms"] > 0 for row in rows)
