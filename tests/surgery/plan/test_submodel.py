import copy
import json
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from refusals import refused
from torch import nn
from torch.func import functional_call, grad, vmap

import surgery
from surgery.depth.tree import Chain, Skip
from surgery.plan import Plan, Source, as_runs
from surgery.plan.edits import apply_edit


def values(shapes, seed=0, dtype=torch.float32, lead=()):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randint(-99, 99, (*lead, *s), generator=generator).to(dtype) for n, s in shapes.items()}


def assert_same(a, b):
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name], b[name]), name


def test_submodel__neighbours_become_one_run():
    assert as_runs([0, 1, 2, 5, 6, 8]) == ((0, 3), (5, 7), (8, 9))
    outer = Plan({"w": (Source("w", (((0, 2), (4, 6)),)),)}, {"w": (8,)})
    inner = Plan({"w": (Source("w", (((0, 1), (2, 4)),)),)}, {"w": (4,)})
    assert outer.compose(inner).entries["w"][0].index == (((0, 1), (4, 6)),)


def test_submodel__plans_that_do_not_fit_do_not_compose():
    half = Plan({"w": (Source("w", (((0, 4),),)),)}, {"w": (8,)})
    with refused("mismatch: 'w'"):
        half.compose(half)
    with refused("mismatch: 'v'"):
        half.compose(Plan({"w": (Source("w", (None,)),)}, {"w": (4,), "v": (2,)}))


def test_submodel__a_plan_with_every_edit_survives_a_file(tmp_path):
    edits = (
        {"do": "set", "module": "a", "attribute": "shape", "value": (3, (4, 5))},
        {"do": "slice", "module": "", "attribute": "table", "index": (None, ((0, 2), (3, 4)))},
    )
    plan = Plan({"w": (Source("w", (((0, 1), (2, 3)), None)),)}, {"w": (4, 2), "é": ()}, edits)
    path = tmp_path / "plan.json"
    path.write_text("an older file")
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)).to_json() == plan.to_json()
    assert list(tmp_path.iterdir()) == [path]


PLAN, MISSING = Plan({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)}), object()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 3}, "plan"),
        ({"version": 1}, "plan"),
        ({"version": True}, "plan"),
        ({"version": None}, "plan"),
        ({"format": "zip"}, "plan: 'zip'"),
        ({"full": {"w": [4]}}, "plan: fingerprint"),
        ({"full": {"w": [3], "v": [1]}}, "plan: fingerprint"),
        ({"full": {"w": ["3"]}}, "plan"),
        ({"full": {"w": 3}}, "plan"),
        ({"full": [3]}, "plan"),
        ({"fingerprint": "0"}, "plan: fingerprint"),
        ({"entries": {"w": [["w", [[[0, 9]]]]]}}, "plan: 'w'"),
        ({"entries": {"w": [["w", [[[0, 1.5]]]]]}}, "plan"),
        ({"entries": {"w": [[3, [None]]]}}, "plan"),
        ({"structure": 3}, "plan"),
        ({"dtypes": ["float32"]}, "plan"),
        ({"dtypes": {"w": "float99"}}, "plan: 'float99'"),
        ({"dtypes": {"w": "nn"}}, "plan: 'nn'"),
        ({"dtypes": {"v": "float32"}}, "plan: 'v'"),
        ({"entries": {"w": [["v", [None]]]}}, "plan: 'v'"),
        ({"entries": {"w": []}}, "plan"),
        ({"entries": {"w": [["w", [[[0]]]]]}}, "plan"),
        ({"entries": {"w": [["w", [[["x", 1]]]]]}}, "plan"),
        ({"entries": {"w": [["w"]]}}, "plan"),
        ({"entries": {"w": "wx"}}, "plan"),
        ({"entries": ["w"]}, "plan"),
        ({"edits": ["skip"]}, "plan"),
        ({"edits": None}, "plan"),
        *(({key: MISSING}, "plan") for key in json.loads(PLAN.to_json()) if key != "structure"),
        *((text, "plan") for text in ("", "{", "[]", "null", "3", '"text"', "{}", "PK\x03")),
    ],
)
def test_submodel__other_text_than_a_plans_is_refused_in_one_line(change, expected, tmp_path):
    if isinstance(change, dict):
        fields = json.loads(PLAN.to_json()) | change
        change = json.dumps({key: value for key, value in fields.items() if value is not MISSING})
    with refused(expected) as caught:
        Plan.from_json(change)
    assert "\n" not in str(caught.value)
    (tmp_path / "plan").write_bytes(b"\x80\xff\x00" + change.encode())
    with refused(f"plan: {tmp_path / 'plan'}"):
        Plan.load(tmp_path / "plan")


def test_submodel__other_json_says_what_is_missing_and_what_to_give():
    with refused("plan: 'format'", "plan.save"):
        Plan.from_json('{"hidden_size": 64}')


def test_submodel__save_replaces_a_file(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN


TWO = {"v": (2,), "w": (3, 4)}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({"v": ()}, "plan: 'v'"),
        ({"v": (Source("u", (None,)),)}, "plan: 'u'"),
        ({"v": (Source("v", (None,)), Source("v", (None,)))}, "plan: 'v'"),
        ({"a": (Source("v", (None,)),), "b": (Source("v", (None,)),)}, "plan: 'b'"),
        ({"v": (Source("v", ()),)}, "plan: 'v'"),
        ({"w": (Source("w", (((0, 3),), ((0, 5),))),)}, "plan: 'w'"),
        ({"w": (Source("w", (((-1, 2),), None)),)}, "plan: 'w'"),
        ({"w": (Source("w", (((1, 1),), None)),)}, "plan"),
        ({"w": (Source("w", ((), None)),)}, "plan"),
        ({"w": (Source("w", (((2, 1),), None)),)}, "plan"),
        ({"a": (Source("w", (((0, 2),), None)),), "b": (Source("w", (((2, 3), (1, 2)), None)),)}, "plan: 'b'"),
        ({"v": Source("v", (None,))}, "plan"),
        ({"v": (Source("v", (3,)),)}, "plan"),
        ({"a": (Source("v", (None,)), Source("w", (None, None)))}, "plan: 'a'"),
    ],
)
def test_submodel__malformed_plans_are_refused(entries, expected):
    with refused(expected):
        Plan(entries, TWO)


WIDE = Plan({"w": (Source("w", (((0, 2),), None)),)}, {"w": (3, 4), "v": (2,)})
SMALL, FULL = {"w": torch.zeros(2, 4)}, {"w": torch.zeros(3, 4), "v": torch.zeros(2)}
STACK = {"w": torch.zeros(2, 3, 4), "v": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("call", "given", "expected"),
    [
        *((call, given, expected)
          for call in ("extract", "into")
          for given, expected in (
              ({"w": FULL["w"]}, "plan: 'v'"),
              (FULL | {"u": torch.zeros(2)}, "plan: 'u'"),
              (FULL | {"w": torch.zeros(3, 5)}, "plan: 'w'"),
              (FULL | {"w": torch.zeros(3)}, "plan: 'w'"),
              (FULL | {"w": STACK["w"]}, "plan: 'w'"),
              (STACK | {"v": torch.zeros(3, 2)}, "plan"),
              (STACK | {"u": torch.zeros(())}, "plan: 'u'"),
              ({}, "plan"),
          )),
        ("embed", {"w": torch.zeros(3, 4)}, "plan: 'w'"),
        ("embed", SMALL | {"v": torch.zeros(2)}, "plan: 'v'"),
        ("into", STACK, "argument"),
    ],
)  # fmt: skip
def test_submodel__a_state_of_another_model_is_refused_by_name(call, given, expected):
    calls = {"extract": WIDE.extract, "embed": WIDE.embed, "into": lambda given: WIDE.embed(SMALL, into=given)}
    with refused(expected):
        calls[call](given)


@pytest.mark.parametrize("into", [None, torch.float64])
def test_submodel__what_is_dropped_and_what_is_written_have_the_dtypes_of_the_full_model(into):
    """Without a state to write into, tensors that were dropped have the dtype of their namesakes."""
    shapes = {"a.w": (3,), "a.steps": (), "b.w": (3,), "b.steps": ()}
    plan = Plan({"a.w": (Source("a.w", (((0, 2),),)),), "a.steps": (Source("a.steps", ()),)}, shapes)
    small = {"a.w": torch.ones(2).half(), "a.steps": torch.tensor(7)}
    full, _ = plan.embed(small, into=into and values(shapes, dtype=into))
    kinds = [tensor.dtype for tensor in full.values()]
    assert kinds == ([into] * 4 if into else [torch.float16, torch.int64] * 2)
    assert into or full["b.w"].tolist() == [0, 0, 0]


def test_submodel__memory_formats_are_kept():
    last = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    plain = nn.Conv2d(4, 6, 3)
    for index in ((((0, 2), (4, 5)), None, None, None), (((0, 2),), ((1, 3),), None, None)):
        plan = Plan(
            {"weight": (Source("weight", index),), "bias": (Source("bias", index[:1]),)},
            {name: tuple(tensor.shape) for name, tensor in surgery.state(last).items()},
        )
        for net, into in ((last, None), (last, surgery.state(last)), (plain, None)):
            small = plan.extract(surgery.state(net))
            for weight in (small["weight"], plan.embed(small, into=into)[0]["weight"]):
                assert weight.is_contiguous() == (net is plain)
                assert net is plain or weight.is_contiguous(memory_format=torch.channels_last)
        assert plan.build(last).weight.is_contiguous(memory_format=torch.channels_last)


def test_narrow__small_models_train_through_extract_under_vmap():
    """The gradient for the full weights is that of the small ones, embedded; for all clients at once."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    scores = {"0.weight:0": torch.tensor([3, 2, 0, 1, 0])}
    small, plan = surgery.narrow(net, 0.6, torch.zeros(1, 3).double(), scores=scores)
    x, y = torch.randn(4, 7, 3, dtype=torch.float64), torch.randn(4, 7, 2, dtype=torch.float64)

    def loss(weights, x, y):
        return (functional_call(small, weights, (x,)) - y).square().mean()

    models = surgery.stack([{name: tensor * (k + 1) for name, tensor in surgery.state(net).items()} for k in range(4)])
    got = vmap(grad(lambda weights, x, y: loss(plan.extract(weights), x, y)))(models, x, y)
    for k, model in enumerate(surgery.unstack(models)):
        expected = plan.embed(grad(loss)(plan.extract(model), x[k], y[k]))[0]
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name][k], tensor)
    for name, tensor in vmap(lambda state: plan.embed(state)[0])(plan.extract(models)).items():
        assert torch.equal(tensor, torch.where(plan.embed(surgery.state(small))[1][name], models[name], 0))


def test_submodel__a_plan_with_dtypes_gives_what_is_dropped_its_own():
    shapes = {"a.w": (2,), "a.steps": (), "b.w": (3,), "b.steps": (), "c.w": (1,), "d.mask": (1,), "e.w": (1,)}
    kinds = dict.fromkeys(shapes, torch.float32) | {"a.steps": torch.int64, "b.steps": torch.float32}
    kinds |= {"c.w": torch.float64, "d.mask": torch.bool}
    del kinds["e.w"]
    held = {"a.w": (Source("a.w", (((0, 1),),)),), "a.steps": (Source("a.steps", ()),)}
    plan = Plan(held, shapes, dtypes=kinds)
    for lead in ((), (2,)):
        small = {"a.w": torch.ones(*lead, 1), "a.steps": torch.full(lead, 7)}
        full, _ = Plan.from_json(plan.to_json()).embed(small)
        assert {n: t.dtype for n, t in full.items()} == kinds | {"e.w": torch.float32}
        assert {n: tuple(t.shape) for n, t in full.items()} == {n: (*lead, *s) for n, s in shapes.items()}
    halved = {"a.w": torch.ones(1).bfloat16(), "a.steps": torch.tensor(7)}  # a model that was converted as a whole
    full, _ = plan.embed(halved)
    assert (full["b.w"].dtype, full["b.steps"].dtype, full["c.w"].dtype) == (*[torch.bfloat16] * 2, torch.float64)
    whole = Plan({n: (Source(n, (None,) * len(s)),) for n, s in plan.small_shapes.items()}, plan.small_shapes)
    assert plan.compose(whole).dtypes == kinds
    assert plan.fingerprint == Plan(held, shapes).fingerprint


def test_submodel__a_tensor_made_of_parts_of_two_dtypes_is_refused_without_a_state_to_write_into():
    plan = Plan({n: (Source("w", (((i, i + 1),),)),) for i, n in enumerate("ab")}, {"w": (2,)})
    small = {"a": torch.ones(1), "b": torch.ones(1).half()}
    with refused("mismatch: 'w'", "'a'", "'b'"):
        plan.embed(small)
    assert plan.embed(small, into={"w": torch.zeros(2)})[0]["w"].tolist() == [1, 1]


def test_submodel__what_makes_plans_stores_dtypes():
    net = nn.Sequential(nn.Linear(3, 4), *(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(2)))
    net[1].bfloat16()
    image, known = torch.zeros(1, 3), {name: tensor.dtype for name, tensor in surgery.state(net).items()}
    _, depth = surgery.ungraft(net, keep=[1])
    deeper, onto = surgery.graft(net, depths=[3])
    assert depth.dtypes == surgery.ungraft(surgery.state(net), keep=[1])[1].dtypes == known
    assert onto.dtypes == {name: tensor.dtype for name, tensor in surgery.state(deeper).items()}
    plain = net.float()
    small, width = surgery.narrow(plain, 0.5, image)
    rolled = surgery.width.corner.rolling(plain, small, example=image)(1)
    floats = dict.fromkeys(known, torch.float32)
    assert width.dtypes == surgery.narrow(plain, like=small)[1].dtypes == rolled.dtypes == floats


SEVERAL = Plan(
    {
        "w": (Source("w", (((0, 2), (3, 4)), ((1, 3),), None, None)),),
        "b": (Source("b", (((1, 3),),)), Source("c", (((0, 2),),))),
    },
    {"w": (5, 4, 3, 3), "b": (4,), "c": (4,), "d": (2, 3, 3, 3)},
)


def test_submodel__meta_tensors_give_shapes_without_data():
    small = SEVERAL.extract({n: torch.empty(s, device="meta") for n, s in SEVERAL.shapes.items()})
    assert all(tensor.is_meta for tensor in small.values())
    for into in (None, {n: torch.empty(s, device="meta") for n, s in SEVERAL.shapes.items()}):
        full, mask = SEVERAL.embed(small, into=into)
        assert all(tensor.is_meta for tensor in (*full.values(), *mask.values()))
        assert {name: tuple(tensor.shape) for name, tensor in full.items()} == SEVERAL.shapes


def test_submodel__gradients_flow_through_extract_and_embed():
    full = {n: t.double().requires_grad_() for n, t in values(SEVERAL.shapes).items()}
    small = {n: t.double().requires_grad_() for n, t in values(SEVERAL.small_shapes).items()}
    assert torch.autograd.gradcheck(
        lambda *t: tuple(SEVERAL.extract(dict(zip(full, t))).values()), tuple(full.values())
    )
    assert torch.autograd.gradcheck(
        lambda *t: tuple(SEVERAL.embed(dict(zip(small, t)), into=full)[0][name] for name in ("w", "b", "c")),
        tuple(small.values()),
    )


class Scaled(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, weight):
        return weight * self.scale[:, None]


class Pair(NamedTuple):
    size: int
    rest: tuple


class Zoo(nn.Module):
    """One of everything that a module may hold."""

    def __init__(self, hidden=6):
        super().__init__()
        self.embed = nn.Embedding(5, hidden)
        self.inner = nn.Linear(hidden, hidden)
        self.head = nn.Linear(hidden, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.arange(hidden).float())
        self.register_buffer("table", torch.arange(hidden * 2).float().view(2, hidden), persistent=False)
        self.plain = torch.arange(hidden)
        self.shape = (2, hidden)
        self.size = torch.Size([hidden, 1])
        self.limits = [hidden, [hidden]]
        self.pair = Pair(hidden, (1, 2))
        self.steps = 3
        self.rnn = nn.LSTM(2, 3)  # which lists its parameters
        self.everything = list(self.parameters())
        nn.utils.parametrize.register_parametrization(self.inner, "weight", Scaled(hidden))

    def forward(self, x):
        return self.head(torch.tanh(self.inner(self.embed(x)) + self.mean * self.table[0] + self.plain))


def zoo_plan(net, keep=((0, 1), (3, 5)), size=3):
    shapes = {name: tuple(tensor.shape) for name, tensor in surgery.state(net).items()}
    hidden = shapes["mean"][0]
    entries = {n: (Source(n, tuple(keep if d == hidden else None for d in s)),) for n, s in shapes.items()}
    edits = (
        {"do": "slice", "module": "", "attribute": "table", "index": (None, keep)},
        {"do": "slice", "module": "", "attribute": "plain", "index": (keep,)},
        {"do": "set", "module": "", "attribute": "shape", "value": (2, size)},
        {"do": "set", "module": "", "attribute": "size", "value": (size, 1)},
        {"do": "set", "module": "", "attribute": "limits", "value": (size, (size,), 7)},
        {"do": "set", "module": "", "attribute": "pair", "value": (size, (3,))},
        {"do": "set", "module": "inner", "attribute": "out_features", "value": size},
    )
    return Plan(entries, shapes, edits)


@pytest.mark.parametrize("through_json", [False, True])
def test_submodel__build_makes_the_small_module_and_keeps_all_else(through_json):
    net = Zoo()
    net.mark = "mine"
    net.embed.weight.tag = {"group": 1}
    net.inner.bias.requires_grad_(False)
    net.inner.bias.grad = torch.ones(6)
    net.train()
    net.inner.eval()
    calls = []
    net.head.register_forward_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(net)
    plan = zoo_plan(net)
    if through_json:
        plan = Plan.from_json(plan.to_json())
    small = plan.build(net)

    assert type(small) is Zoo
    assert_same(surgery.state(small), plan.extract(surgery.state(net)))
    assert small.head.weight is small.embed.weight
    assert small.embed.weight.tag == {"group": 1}
    assert isinstance(small.embed.weight, nn.Parameter)
    assert not small.inner.bias.requires_grad
    assert small.inner.bias.grad is None
    assert small.embed.weight.requires_grad
    assert (small.training, small.inner.training, small.head.training) == (True, False, True)
    assert torch.equal(small.table, net.table[:, [0, 3, 4]])
    assert list(small.plain) == [0, 3, 4]
    assert (small.shape, small.size, small.limits) == ((2, 3), torch.Size([3, 1]), [3, [3], 7])
    assert isinstance(small.size, torch.Size)
    assert small.pair == Pair(3, (3,))
    assert isinstance(small.pair, Pair)
    assert (small.mark, small.steps, small.inner.out_features) == ("mine", 3, 3)
    assert "table" in small._non_persistent_buffers_set
    assert "mean" in small._buffers
    assert small.everything[0] is small.embed.weight
    assert all(a is b for a, b in zip(small.rnn._flat_weights, small.rnn.parameters()))
    assert nn.utils.parametrize.is_parametrized(small.inner)
    assert small(torch.arange(5)).shape == (5, 5)
    assert calls == [1]

    assert_same(surgery.state(net), surgery.state(before))
    assert net.embed.weight.grad is None
    assert (net.shape, net.inner.out_features, net.table.shape) == ((2, 6), 6, (2, 6))
    memory = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers(), net.plain)}
    own = [*small.parameters(), *small.buffers(), small.plain]
    assert memory.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in own)


def test_submodel__build_keeps_dtypes_and_runs_on_meta():
    plan = zoo_plan(Zoo())
    assert plan.build(Zoo().double()).head.weight.dtype is torch.float64
    with torch.device("meta"):
        full = Zoo()
    small = plan.build(full)
    assert all(tensor.is_meta for tensor in surgery.state(small).values())
    assert {n: tuple(t.shape) for n, t in surgery.state(small).items()} == plan.small_shapes


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"do": "explode"}, "plan: explode"),
        ({"module": "inner"}, "plan: 'do'"),
        ({"do": "skip", "module": "nobody"}, "plan: nobody"),
        ({"do": "skip", "module": "inner.nobody"}, "plan: nobody"),
        ({"do": "skip"}, "plan: module"),
        ({"do": "set", "module": "", "attribute": "nothing", "value": 1}, "plan: nothing"),
        ({"do": "slice", "module": "", "attribute": "table", "index": [[[0, 99]], None]}, "plan: table"),
        ({"do": "slice", "module": "", "attribute": "plain", "index": [None, [[0, 1]]]}, "plan: plain"),
        ({"do": "unchain", "module": "inner", "keep": 1}, "plan"),
    ],
)
def test_submodel__an_edit_that_does_not_fit_is_refused(edit, expected):
    plan = zoo_plan(Zoo())
    with refused(expected):
        Plan(plan.entries, plan.shapes, (edit,)).build(Zoo())


def test_submodel__build_refuses_other_models_and_edits_that_leave_other_tensors():
    plan = zoo_plan(Zoo())
    with refused("plan: 'mean'"):
        plan.build(Zoo(8))
    with refused("plan: 'mean'"):
        plan.build(nn.Linear(2, 2))
    edits = ({"do": "skip", "module": "inner"},)
    with refused("mismatch: 'inner.bias'"):
        Plan(plan.entries, plan.shapes, edits).build(Zoo())

    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("no copies")

    with refused("unsupported"):
        Plan({"weight": (Source("weight", (None, None)),)}, {"weight": (1, 1)}).build(Stubborn(1, 1, bias=False))


def test_narrow__build_names_a_tensor_of_another_shape_before_it_speaks_of_settings():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    _, plan = surgery.narrow(net, 0.5, torch.zeros(1, 3))
    with refused("plan: '0.weight'"):
        plan.build(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)))
    with refused("plan"):
        plan.build(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    with refused("argument"):
        plan.build(surgery.state(net))


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_ungraft__graft_and_narrow_compose_to_one_plan_that_builds():
    full = nn.Sequential(nn.Linear(3, 4), block(), block(), block(), nn.Linear(4, 2))
    narrow, width = surgery.narrow(full, 0.5, torch.zeros(1, 3))
    shallow, depth = surgery.ungraft(narrow, keep=[1])
    both = Plan.from_json(width.compose(depth).to_json())
    built = both.build(full)
    assert_same(surgery.state(built), surgery.state(shallow))
    x = torch.randn(5, 3)
    assert torch.equal(built(x), shallow(x))
    _, mask = both.embed(surgery.state(built))
    assert mask["3.0.weight"].sum() == 4  # the block that is left stands for those that were dropped


def test_submodel__printing_names_tensors_sources_and_edits():
    plan = Plan(
        {
            "w": (Source("w", (((0, 1), (2, 3)), None)),),
            "b.bias": (Source("a.bias", (((0, 2),),)), Source("c.bias", (((0, 2),),))),
            "many": (Source("many", (((0, 1), (2, 3), (4, 5), (6, 7)),)),),
        },
        {"w": (4, 2), "a.bias": (3,), "c.bias": (3,), "many": (9,), "v": (1,)},
        ({"do": "skip", "module": "block"},),
    )
    first, *lines = plan.describe().splitlines()
    assert first == f"Plan of {plan.fingerprint}: 10 of 24 elements, 1 edits"
    assert [" ".join(line.split()) for line in lines] == [
        "w [2, 2] = [0:1|2:3, :]",
        "b.bias [2] = a.bias[0:2] and c.bias",
        "many [4] = [0:1|2:3|...|6:7]",
        "{'do': 'skip', 'module': 'block'}",
    ]
    assert repr(plan) == "Plan: 10 of 24 elements (41.7 %), 4 of 5 tensors, 1 edit"
    assert str(plan).splitlines() == [
        repr(plan),
        "  w       [4, 2] -> [2, 2]",
        "  b.bias  [3]    -> [2]  of a.bias, and for c.bias",
        "  many    [9]    -> [4]",
        "  v       [1]    -> left out",
    ]


def test_submodel__a_notebook_shows_the_table():
    plan = Plan({"a<b": (Source("a<b", (((0, 2),), None)),)}, {"a<b": (4, 2)})
    assert "a&lt;b  [4, 2] -&gt; [2, 2]" in plan._repr_html_()


@pytest.mark.parametrize(("n", "lines"), [(0, 1), (1, 2), (12, 13), (13, 14), (40, 14)])
def test_submodel__a_long_table_is_cut(n, lines):
    plan = Plan({f"w{i}": (Source(f"w{i}", (None,)),) for i in range(n)}, {f"w{i}": (3,) for i in range(n)})
    table = str(plan).splitlines()
    assert len(table) == lines
    assert (f"and {n - 12} more" in table[-1]) == (n > 12)


def test_submodel__the_fingerprint_is_that_of_names_and_shapes():
    one = Plan({}, {"a": (1, 2), "b": (3,)})
    assert one.fingerprint == Plan({}, {"b": (3,), "a": (1, 2)}).fingerprint
    others = [{"a": (2, 1), "b": (3,)}, {"a": (1, 2)}, {"a": (1, 2), "c": (3,)}, {"a": (3,), "b": (1, 2)}]
    assert one.fingerprint not in {Plan({}, shapes).fingerprint for shapes in others}


def test_submodel__depth_edits_remove_skip_and_unchain_blocks():
    numbered = nn.Sequential(*(nn.Linear(i + 1, 1) for i in range(4)))
    apply_edit(numbered, {"do": "remove", "module": "", "first": 1, "count": 2})
    assert [(n, m.in_features) for n, m in numbered._modules.items()] == [("0", 1), ("1", 4)]
    named = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in ("first", "second", "third")))
    apply_edit(named, {"do": "remove", "module": "", "first": 1, "count": 1})
    assert list(named._modules) == ["first", "third"]
    net = nn.ModuleDict({"chain": Chain(*(nn.Linear(2, 2) for _ in range(3))), "last": nn.Linear(2, 2)})
    first = net["chain"].eval()[0]
    apply_edit(net, {"do": "unchain", "module": "chain", "keep": 2})
    assert (len(net["chain"]), type(net["chain"]), net["chain"].training) == (2, Chain, False)
    apply_edit(net, {"do": "unchain", "module": "chain", "keep": 1})
    assert net["chain"] is first
    apply_edit(net, {"do": "skip", "module": "last"})
    assert isinstance(net["last"], Skip)
    assert net["last"](3, key=4) == 3


def test_narrow__a_saved_plan_replaces_the_file_and_does_not_change_it(tmp_path):
    """Whoever has opened the old file, which a hard link stands for, reads the old plan."""
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    first, second = (surgery.narrow(net, share, torch.zeros(1, 3))[1] for share in (0.5, 0.25))
    first.save(tmp_path / "plan.json")
    (tmp_path / "opened.json").hardlink_to(tmp_path / "plan.json")
    second.save(tmp_path / "plan.json")
    assert (Plan.load(tmp_path / "opened.json"), Plan.load(tmp_path / "plan.json")) == (first, second)
