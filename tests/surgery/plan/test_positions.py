"""What plans do to tensors, against indexing in NumPy: positions in any order, repeated, in several sources."""

import copy
import itertools

import numpy as np
import torch
from drawn_plans import SIZES, draw_index, draw_plan, few, lists, plans, seeds, slow_embed, slow_extract, values
from hypothesis import given, reject
from hypothesis import strategies as st
from refusals import refused
from torch import nn

import surgery
from surgery.lazy import LazyState, Pieces
from surgery.plan import Plan, Source, as_runs
from surgery.plan.positions import overlapping


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, tensor in got.items():
        assert np.array_equal(tensor.numpy(), np.asarray(expected[name])), name
        assert not isinstance(expected[name], torch.Tensor) or tensor.dtype == expected[name].dtype


def lazy(state):
    return LazyState({name: Pieces.of(tensor) for name, tensor in state.items()})


@few
@given(plans(), seeds, st.sampled_from([torch.float64, torch.float16, torch.int64, torch.bool]))
def test_positions__extract_and_embed_are_indexing_in_memory_and_lazily(plan, seed, dtype):
    full, small = values(plan.shapes, seed, dtype=dtype), values(plan.small_shapes, seed + 1, dtype=dtype)
    before = copy.deepcopy((full, small))
    extracted = plan.extract(full)
    assert_same(extracted, slow_extract(plan, full))
    assert {name: tuple(tensor.shape) for name, tensor in extracted.items()} == plan.small_shapes
    if plan.entries:  # else nothing tells the dtype
        assert_same(plan.extract(lazy(full)), extracted)
    results = [*extracted.values()]
    for into in (None, full):
        got, mask = plan.embed(small, into=into)
        expected, covered = slow_embed(plan, small, into or {n: torch.zeros_like(t) for n, t in full.items()})
        assert_same(got, expected)
        assert_same(mask, covered)
        results += [*got.values(), *mask.values()]
        for pair in ((lazy(small), into), (small, into and lazy(into)), (lazy(small), into and lazy(into))):
            if isinstance(pair[0], LazyState) or pair[1]:
                made, where = plan.embed(pair[0], into=pair[1])
                assert isinstance(made, LazyState)
                assert_same(made, got)
                assert_same(where, mask)
    for tensor in results:  # they have memory of their own
        tensor.zero_()
    assert_same(full, before[0])
    assert_same(small, before[1])


@few
@given(plans(), seeds)
def test_positions__each_undoes_the_other_as_far_as_it_can(plan, seed):
    full, small = values(plan.shapes, seed), values(plan.small_shapes, seed + 1)
    again = plan.extract(plan.embed(small)[0])
    for name, (first, *_) in plan.entries.items():
        # Of copies of one position the first is what all of them become.
        where = lists(first.index, plan.shapes[first.name])
        expected = (
            small[name].numpy()[np.ix_(*([row.index(p) for p in row] for row in where))] if where else small[name]
        )
        assert np.array_equal(again[name].numpy(), np.asarray(expected))
    equal = {}  # where several sources of one tensor are equal, nothing is lost in the other direction
    for name, sources in plan.entries.items():
        equal[name] = sources[:1]
    one = Plan(equal, plan.shapes)
    back, mask = one.embed(one.extract(full))
    for name, tensor in full.items():
        assert torch.equal(back[name], torch.where(mask[name], tensor, 0))


@few
@given(plans(), seeds, st.integers(1, 3), st.booleans())
def test_positions__stacks_are_models_one_by_one(plan, seed, k, keep):
    full, small = values(plan.shapes, seed, (k,)), values(plan.small_shapes, seed + 1, (k,))
    assert_same(
        plan.extract(full), surgery.stack(list(map(plan.extract, surgery.unstack(full)))) if plan.entries else {}
    )
    if plan.entries:
        got, mask = plan.embed(small, into=full if keep else None)
        own = surgery.unstack(full) if keep else [None] * k
        singles = [plan.embed(model, into=into) for model, into in zip(surgery.unstack(small), own)]
        assert_same(got, surgery.stack([single for single, _ in singles]))
        assert_same(mask, singles[0][1])


@st.composite
def chains(draw):
    """Three plans, each within the small model of the one before."""
    shapes, found = {f"{t}{i}": shape for i, shape in enumerate(draw(SIZES)) for t in "tu"}, []
    for _ in range(3):
        found.append(draw_plan(draw, shapes))
        shapes = found[-1].small_shapes
    return found


@few
@given(chains(), seeds)
def test_positions__composition_is_associative_and_extracts_one_after_the_other(chain, seed):
    a, b, c = chain
    try:
        left, right = a.compose(b).compose(c), a.compose(b.compose(c))
    except surgery.SurgeryError:  # two tensors would share copies of one element
        reject()
    assert left == right
    assert left.small_shapes == c.small_shapes
    full, small = values(a.shapes, seed), values(c.small_shapes, seed + 1)
    assert_same(left.extract(full), c.extract(b.extract(a.extract(full))))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    assert_same(left.embed(small)[0], slow_embed(left, small, zeros)[0])


@few
@given(plans(), seeds)
def test_positions__parts_of_one_tensor_compose_with_a_permutation_of_it(plan, seed):
    generator = torch.Generator().manual_seed(seed)
    orders = {n: [torch.randperm(size, generator=generator) for size in shape] for n, shape in plan.shapes.items()}

    def permuting(inverse):
        return Plan(
            {
                n: (Source(n, tuple(as_runs(o.argsort() if inverse else o) or None for o in own)),)
                for n, own in orders.items()
            },
            plan.shapes,
        )

    there, back = permuting(False), permuting(True)
    same = Plan({n: (Source(n, (None,) * len(s)),) for n, s in plan.shapes.items()}, plan.shapes)
    assert there.compose(back) == back.compose(there) == same
    full, small = values(plan.shapes, seed), values(plan.small_shapes, seed + 1)
    assert_same(there.compose(plan).extract(full), plan.extract(there.extract(full)))
    assert_same(there.compose(plan).embed(small)[0], there.embed(plan.embed(small)[0])[0])


@few
@given(plans())
def test_positions__json_gives_an_equal_plan(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.fingerprint, again.small_shapes) == (plan.fingerprint, plan.small_shapes)
    assert [list(again.entries), list(again.shapes)] == [list(plan.entries), list(plan.shapes)]
    assert again.describe() == plan.describe()


@few
@given(st.data(), st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_positions__overlap_is_a_common_element(data, shape):
    a, b = (draw_index(data.draw, shape) for _ in range(2))
    elements = [set(itertools.product(*lists(index, shape))) for index in (a, b)]
    assert overlapping(a, b, shape) == bool(elements[0] & elements[1])


def test_positions__parts_that_overlap_are_refused_by_name():
    def plan(*parts):
        return Plan({n: (Source("qkv", (as_runs(p), None)),) for n, p in zip("qkv", parts)}, {"qkv": (6, 2)})

    split = plan([0, 1], [3, 2], [5, 4])
    assert split.extract({"qkv": torch.arange(12).view(6, 2)})["k"].tolist() == [[6, 7], [4, 5]]
    with refused("plan: 'k'", "'q'", "'qkv'"):
        plan([0, 1], [2, 1])
    twice = (Source("qkv", (as_runs([0, 1]), None)), Source("qkv", (as_runs([1, 2]), None)))
    with refused("plan: 'w'", "'qkv'"):
        Plan({"w": twice}, {"qkv": (6, 2)})
    wider = Plan({"w": (Source("w", (as_runs([0, 0]),)),)}, {"w": (1,)})
    halves = Plan({"a": (Source("w", (((0, 1),),)),), "b": (Source("w", (((1, 2),),)),)}, {"w": (2,)})
    with refused("plan: 'b'", "'a'", "'w'"):
        wider.compose(halves)


def test_positions__long_orders_keep_memory_formats_and_stay_fast():
    """More ranges than are read as views, along every axis, of every layout."""
    generator = torch.Generator().manual_seed(0)
    for shape, layout in (
        ((3, 200, 2, 2), torch.channels_last),
        ((200, 3, 2, 2), torch.channels_last),
        ((2, 200), None),
        ((200, 70, 1, 1), torch.channels_last),
        ((200, 70, 1, 1), None),  # its channels are next to each other in this layout, too
    ):
        full = torch.randn(shape, generator=generator)
        full = full if layout is None else full.to(memory_format=layout)
        orders = [torch.randperm(size, generator=generator) for size in shape]
        plan = Plan({"w": (Source("w", tuple(map(as_runs, orders))),)}, {"w": shape})
        small = plan.extract({"w": full})["w"]
        assert small.stride() == full.stride()
        assert torch.equal(small, full[torch.meshgrid(*orders, indexing="ij")])
        assert torch.equal(plan.embed({"w": small})[0]["w"], full)
        stacked = torch.func.vmap(lambda t, plan=plan: plan.extract({"w": t})["w"])(full[None])
        assert torch.equal(stacked[0], small)


def test_positions__numbers_of_other_kinds_and_lists_become_plain():
    order = np.array([2, 0, 1])
    plan = Plan({"w": [Source("w", [as_runs(torch.tensor(order)), None])]}, {"w": torch.Size([3, 2])})
    assert plan == Plan({"w": (Source("w", (as_runs([2, 0, 1]), None)),)}, {"w": (3, 2)})
    assert plan == Plan({"w": [Source("w", ([[np.int64(2), 3], [0, 2]], None))]}, {"w": (3, 2)})
    assert Plan.from_json(plan.to_json()) == plan


def test_positions__a_wider_model_is_built_and_computes_the_same():
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    wide = as_runs([0, 1, 1])
    plan = Plan(
        {
            "0.weight": (Source("0.weight", (wide, None)),),
            "0.bias": (Source("0.bias", (wide,)),),
            "2.weight": (Source("2.weight", (None, wide)),),
            "2.bias": (Source("2.bias", (None,)),),
        },
        {name: tuple(tensor.shape) for name, tensor in surgery.state(net).items()},
        (
            {"do": "set", "module": "0", "attribute": "out_features", "value": 3},
            {"do": "set", "module": "2", "attribute": "in_features", "value": 3},
        ),
        surgery.plan.structure(net),
    )
    wider = plan.build(net)
    with torch.no_grad():
        wider[2].weight[:, 1:] /= 2  # Net2Net
        x = torch.randn(4, 3)
        torch.testing.assert_close(wider(x), net(x))
    assert str(plan).count("with repeats") == 3
    assert "in another order" in str(Plan({"w": (Source("w", (as_runs([1, 0]),)),)}, {"w": (2,)}))


def test_positions__printing_shows_other_parts_and_what_is_left_out():
    plan = Plan({"w": tuple(Source("w", (as_runs(order),)) for order in ([1, 0], [3, 2]))}, {"w": (4,), "v": (1,)})
    assert plan.describe().endswith("= [1:2|0:1] and w[3:4|2:3]")
    assert str(plan).splitlines()[1:] == ["  w  [4] -> [2]  and for w", "  v  [1] -> left out"]


def test_positions__tensors_outside_of_the_state_are_sliced_in_any_order():
    net = nn.Module()
    net.register_buffer("table", torch.arange(6).view(2, 3), persistent=False)
    edit = {"do": "slice", "module": "", "attribute": "table", "index": [as_runs([1, 0, 1]), as_runs([2, 0])]}
    assert Plan({}, {}, (edit,)).build(net).table.tolist() == [[5, 3], [2, 0], [5, 3]]
    edit["index"] = [as_runs([1, 2]), None]
    with refused("plan: 'table'"):
        Plan({}, {}, (edit,)).build(net)
    edit["index"] = [None]
    with refused("plan: 'table'"):
        Plan({}, {}, (edit,)).build(net)
