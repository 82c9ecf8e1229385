"""Rules in one line: beside functions written by hand, on operations of a user, and notations that are wrong."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from symmetric import Made
from torch import Tensor, nn

import surgery
from surgery import narrow
from surgery.width import rules
from surgery.width.axes import Axis, find, mark_grouping, unify
from surgery.width.rules import RuleResult, View, registry
from surgery.width.rules.notation import rule_of
from tests.surgery.test_narrow import assert_plan, assert_zero_oracle, randomized

X = torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """What a test registers goes away again."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))


# Beside functions written by hand


def matmul(left, right, added=""):
    """The rule of a matrix product, written by hand."""

    def rule(view, args, out):
        x, y = view.axes_of(args[left]), view.axes_of(args[right])
        unify(x[-1], y[-2] if len(y) > 1 else y[-1])
        weights = [view.is_weight(args[name]) for name in (left, right)]
        made = y[-1:] if weights[1] and len(y) > 1 else x[-2:-1] if weights[0] and len(x) > 1 else ()
        if len(y) > 1 and all(weights):
            made = (*made, x[-1])
        if len(x) == 3:
            unify(x[0], y[0])
            mark_grouping(x[0], "heads")
        result = [*x[:-1], *(y[-1:] if len(y) > 1 else ())]
        registry.unify_last(view.axes_of(args[added]) if added else (), result)
        return RuleResult([result], features=made, summed=x[-1])

    return rule


def outer(view, args, out):
    (rows,), (columns,) = view.axes_of(args["vec1"]), view.axes_of(args["vec2"])
    registry.unify_last(view.axes_of(args["self"]), (rows, columns))
    return RuleResult([[rows, columns]])


BY_HAND = {  # the arguments' axes, the result's, and the rule
    "mm": ({"self": "ik", "mat2": "kj"}, "ij", matmul("self", "mat2")),
    "bmm": ({"self": "bik", "mat2": "bkj"}, "bij", matmul("self", "mat2")),
    "addmm": ({"self": "ij", "mat1": "ik", "mat2": "kj"}, "ij", matmul("mat1", "mat2", "self")),
    "baddbmm": ({"self": "bij", "batch1": "bik", "batch2": "bkj"}, "bij", matmul("batch1", "batch2", "self")),
    "mv": ({"self": "ik", "vec": "k"}, "i", matmul("self", "vec")),
    "addmv": ({"self": "i", "mat": "ik", "vec": "k"}, "i", matmul("mat", "vec", "self")),
    "dot": ({"self": "k", "tensor": "k"}, "", matmul("self", "tensor")),
    "vdot": ({"self": "k", "other": "k"}, "", matmul("self", "other")),
    "addr": ({"self": "ij", "vec1": "i", "vec2": "j"}, "ij", outer),
}


def learned(rule, tensors, weights, out):
    """All that a rule says of a call: which axes are the same, groups, features and the sum."""
    axes = {id(tensor): tuple(map(Axis, tensor.shape)) for tensor in tensors.values()}
    view = View(lambda tensor: axes[id(tensor)], lambda tensor: any(tensor is tensors[name] for name in weights))
    result = rule(view, tensors, out)
    every = [*(axis for found in axes.values() for axis in found), *(axis for found in result.axes for axis in found)]
    classes = [find(axis) for axis in every]
    number = {axis: classes.index(axis) for axis in classes}
    return (
        [(number[axis], axis.size, axis.grouping, axis.why) for axis in classes],
        {number[find(axis)] for axis in result.features},
        result.summed and result.summed.size > 1 and number[find(result.summed)],
    )


@given(st.sampled_from([*BY_HAND]), st.data())
def test_notation__a_notation_says_what_a_function_does(name, data):
    arguments, result, by_hand = BY_HAND[name]
    size = {axis: data.draw(st.integers(1, 4), axis) for axis in "bijk"}
    shapes = {argument: [size[axis] for axis in axes] for argument, axes in arguments.items()}
    if len(arguments) > 2:  # what is added is broadcast
        missing = data.draw(st.integers(0, len(result)))
        shapes["self"] = [data.draw(st.sampled_from([1, n])) for n in shapes["self"][missing:]]
    tensors = {argument: torch.empty(shape) for argument, shape in shapes.items()}
    weights = data.draw(st.sets(st.sampled_from([*tensors])))
    out = torch.empty([size[axis] for axis in result])
    assert learned(registry.RULES[name].function, tensors, weights, out) == learned(by_hand, tensors, weights, out)


@pytest.mark.parametrize(
    ("notation", "weights", "made", "summed"),
    [
        ("x: ... i, weight: o i -> ... o", "weight", "o", "i"),
        ("x: ... i, gate: o i, value: o i -> ... o", "gate value", "o", "i"),
        ("x: ... i, first: h i, second: o h -> ... o", "first second", "o h", "i h"),
        ("x: ... i, left: r i, right: o r -> ... o", "left", "", "i r"),
        ("index: n, table: _ c -> n c", "table", "c", ""),
        ("table: _ c -> c", "table", "", ""),
        ("x: n c ..., scale: c -> n c ...", "scale", "", ""),
        ("x: n c, scale: 1 c -> n c", "scale", "", ""),
        ("q: n d, k: m d, v: m e -> n e", "", "", "d m"),
        ("a: i k, b: k j -> i j", "a b", "j k", "k"),
        ("a: k k, b: k -> k", "a b", "", ""),
    ],
)
def test_notation__what_weights_make_and_what_is_summed(notation, weights, made, summed):
    """`left` alone is a weight where `right` is computed: the rank between them is not made, as its factor is data."""
    read = rule_of(notation, "testlib::unknown").__closure__
    (parsed,) = (cell.cell_contents for cell in read if hasattr(cell.cell_contents, "split_words"))
    given = tuple((name, name in weights.split()) for name in parsed.arguments)
    assert tuple(map(set, parsed.split_words(given))) == (set(made.split()), set(summed.split()))


# Operations of a user


def operation(function):
    """An operation as users register them; it runs on the meta device as what it computes does."""
    made = torch.library.custom_op(f"notation::{function.__name__}", function, mutates_args=())
    made.register_fake(lambda *args: torch.empty_like(function(*args)))
    return made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, weight, bias).clone()


def gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, value = (x @ weight.T).chunk(2, dim=-1)
    return gate.sigmoid() * value


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2).clone()


def rows(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def mixed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("...tc,ts->...sc", x, weight)


OPERATIONS = {function.__name__: operation(function) for function in (linear, gated, scaled, split, rows, mixed)}


def narrowed(name, notation, forward, *, head=8, weights=None, x=X, **options):
    """The narrow model and its plan of a model around an operation, after one line; it computes what it should."""
    surgery.register_rule(f"notation::{name}", notation)
    layers = {"body": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 8)), "head": nn.Linear(head, 3)}
    net = Made(lambda net, x: forward(net, x, OPERATIONS[name]), **layers)
    for key, shape in (weights or {}).items():
        setattr(net, key, nn.Parameter(torch.empty(shape)))
    net = randomized(net.double()).eval()
    small, plan = narrow(net, 0.5, x, **{"strict": True, **options})
    assert_plan(net, small, plan)
    assert_zero_oracle(net, small, plan, x)
    return {key: tuple(tensor.shape) for key, tensor in small.state_dict().items()}


@pytest.mark.parametrize("bias", [True, False])
def test_notation__a_linear_layer(bias):
    weights = {"weight": (10, 8)} | ({"bias": (10,)} if bias else {})
    shapes = narrowed(
        "linear",
        "x: ... i, weight: o i, bias: o -> ... o",
        lambda net, x, op: net.head(op(net.body(x), net.weight, net.bias if bias else None)),
        head=10,
        weights=weights,
    )
    assert (shapes["weight"], shapes["head.weight"]) == ((5, 4), (3, 5))
    assert not bias or shapes["bias"] == (5,)


def test_notation__the_rows_of_a_gate_and_of_its_values():
    forward = lambda net, x, op: net.head(op(net.body(x), net.weight))  # noqa: E731
    shapes = narrowed("gated", "x: ... i, weight: (2 o) i -> ... o", forward, head=10, weights={"weight": (20, 8)})
    assert (shapes["weight"], shapes["head.weight"]) == ((10, 4), (3, 5))


@pytest.mark.parametrize("shape", [(8,), (1, 8), (5, 8), (1, 1)])
def test_notation__a_scale_that_is_broadcast(shape):
    forward = lambda net, x, op: net.head(op(net.body(x), net.scale))  # noqa: E731
    shapes = narrowed("scaled", "x: ... c, scale: [t] c -> ... c", forward, weights={"scale": shape})
    assert shapes["scale"] == (*shape[:-1], min(4, shape[-1]))
    assert shapes["head.weight"] == (3, 4)


@pytest.mark.parametrize(("heads", "kept"), [("inside", 2), ("drop", 1)])
def test_register_rule__an_integer_argument_is_the_size_of_its_axis(heads, kept):
    def forward(net, x, op):
        h = op(net.body(x), net.heads)
        return net.head((h @ h.mT @ h).transpose(1, 2).flatten(2))

    surgery.register_rule("notation::split", "x: n t (heads c) -> n heads t c")
    net = Made(lambda net, x: forward(net, x, OPERATIONS["split"]), body=nn.Linear(6, 8), head=nn.Linear(8, 3), heads=2)
    net = randomized(net.double()).eval()
    small, plan = narrow(net, 0.5, X, heads=heads)
    assert_zero_oracle(net, small, plan, X)
    assert small.body.out_features == 4
    assert small.heads == kept


def test_notation__a_table_that_is_read():
    index = torch.tensor([[0, 3, 1], [2, 2, 0]])
    forward = lambda net, x, op: net.head(op(net.table, x).relu())  # noqa: E731
    notation = "table: rows! c, index: ... -> ... c"
    shapes = narrowed("rows", notation, forward, weights={"table": (4, 8)}, x=index, strict=False)
    assert (shapes["table"], shapes["head.weight"]) == ((4, 4), (3, 4))


def test_notation__axes_that_are_marked_stay_whole():
    forward = lambda net, x, op: net.head(op(net.body(x), net.scale))  # noqa: E731
    shapes = narrowed("scaled", "x: ... c!, scale: c -> ... c", forward, weights={"scale": (8,)}, strict=False)
    assert shapes["scale"] == (8,)
    forward = lambda net, x, op: net.head(op(net.body(x), net.weight))  # noqa: E731
    shapes = narrowed("mixed", "x: n t c, weight: t s! -> n s c", forward, weights={"weight": (5, 7)})
    assert (shapes["weight"], shapes["head.weight"]) == ((5, 7), (3, 4))


def test_notation__a_tensor_that_is_not_listed_stays_whole():
    forward = lambda net, x, op: net.head(op(net.body(x), net.weight))  # noqa: E731
    shapes = narrowed("gated", "x: ... i! -> ... _", forward, head=10, weights={"weight": (20, 8)}, strict=False)
    assert (shapes["weight"], shapes["head.weight"]) == ((20, 8), (3, 10))


@pytest.fixture(scope="module")
def lenient():
    """An operation with another `register_fake` than it does itself."""

    @torch.library.custom_op("notation::lenient", mutates_args=())
    def lenient(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    lenient.register_fake(lambda x, scale: torch.empty_like(x))
    return lenient


@pytest.fixture(scope="module")
def library():
    """Operations of torch.library's other ways: one changed in place, a list of results, one made of torch's own."""
    defined = torch.library.Library("notation", "FRAGMENT")
    defined.define("shift(Tensor x, Tensor by) -> Tensor")
    defined.define("shift_(Tensor(a!) x, Tensor by) -> Tensor(a!)")
    defined.define("composite(Tensor x, Tensor by) -> Tensor")
    defined.define("both(Tensor[] xs) -> Tensor[]")
    for key in ("CPU", "Meta"):
        defined.impl("shift", lambda x, by: x + by, key)
        defined.impl("shift_", lambda x, by: x.add_(by), key)
        defined.impl("both", lambda xs: [xs[0] + xs[1], xs[0] * xs[1]], key)
    defined.impl("composite", lambda x, by: x * 2 + by, "CompositeImplicitAutograd")

    @torch.library.custom_op("notation::silent_", mutates_args=("x",))
    def silent_(x: Tensor, by: Tensor) -> None:
        x.add_(by)

    yield
    defined._destroy()


@pytest.mark.parametrize("name", ["shift", "shift_", "composite", "silent_"])
@torch.no_grad()
def test_register_rule__ways_to_register_an_operation(library, name):
    surgery.register_rule(f"notation::{name}", "x: ... c, by: c -> ... c")

    def forward(net, x):
        h = net.body(x)
        result = getattr(torch.ops.notation, name)(h, net.by)
        return net.head(h if result is None else result)

    net = Made(forward, body=nn.Linear(6, 8), head=nn.Linear(8, 3), by=nn.Parameter(torch.empty(8)))
    net = randomized(net.double()).eval()
    small, plan = narrow(net, 0.5, X, strict=True)
    assert_zero_oracle(net, small, plan, X)
    assert (small.by.shape, small.head.in_features) == ((4,), 4)


@torch.no_grad()
def test_register_rule__lists_of_tensors(library):
    surgery.register_rule("notation::both", "xs: ... -> ...")
    net = Made(
        lambda net, x: net.head(torch.cat(torch.ops.notation.both([net.body(x), net.other(x)]), -1)),
        body=nn.Linear(6, 8), other=nn.Linear(6, 8), head=nn.Linear(16, 3),
    )  # fmt: skip
    net = randomized(net.double()).eval()
    small, plan = narrow(net, 0.5, X, strict=True)
    assert_zero_oracle(net, small, plan, X)
    assert (small.other.out_features, small.head.in_features) == (4, 8)


# What is wrong


@pytest.mark.parametrize(
    ("notation", "place"),
    [
        ("", 0),
        ("x", 1),
        ("x: n c", 6),
        ("x: n c, -> n", 8),
        ("n c -> n", 2),
        ("x: n c -> n d", 12),
        ("x: n c) -> n c", 6),
        ("x: n (c -> n c", 8),
        ("x: (n (c d)) -> n", 6),
        ("x: n (c ...) -> n", 8),
        ("x: ... n ... -> n", 3),
        ("x: [n] ... -> n", 3),
        ("x: n [c] -> n", 5),
        ("x: n c -> [n] c", 10),
        ("x: n c, x: n -> n", 8),
        ("x: n c -> n -> c", 12),
        ("x: n c scale: c -> n", 12),
        ("x: n ! c -> n !!", 15),
        ("x: n -> ...", 8),
        ("x: n % c -> n", 5),
        ("x: n c, weight: c -> n c", 8),
    ],
)
def test_register_rule__a_wrong_notation_is_refused_with_its_place(notation, place):
    with refused("argument") as error:
        surgery.register_rule("notation::scaled", notation)
    _, line, mark = str(error.value).splitlines()
    assert (line, mark) == (f"  {notation}", f"  {' ' * place}^")
    assert "notation::scaled" not in registry.RULES


def test_register_rule__a_notation_of_several_lines():
    surgery.register_rule(
        "notation::scaled",
        """
        x: n
           c,
        scale: c -> n c
        """,
    )
    with refused("argument: replace="):
        surgery.register_rule("notation::scaled_", "x: n c -> n c")
    surgery.register_rule("notation::scaled_", "x: n c -> n c", replace=True)


UNFIT = [
    "x: n c, scale: c -> n c",
    "x: n t c, scale: t -> n t c",
    "x: n t (3 c), scale: _ -> n t _",
    "x: n t (a b), scale: _ -> n t _",
    "x: n t c, scale: c -> n t c, n",
    "x: n t c, scale: c -> n t 5",
    "x: n t c, scale: c -> c",
]


NO_RULES = {  # what a function gives, and what the error names
    "nothing": (lambda view, args, out: None, "NoneType", "here 3"),
    "an axis": (lambda view, args, out: view.axes_of(args["x"])[0], "Axis"),
    "a text": (lambda view, args, out: "... c", "str"),
    "a tensor": (lambda view, args, out: out, "Tensor"),
    "too few": (lambda view, args, out: view.axes_of(args["x"])[1:], "(2, 5, 8)"),
    "two results": (lambda view, args, out: [view.axes_of(args["x"])] * 2, "2 results"),
    "no such argument": (lambda view, args, out: view.axes_of(args["input"]), "'input'", "takes x, scale"),
    "no such size": (lambda view, args, out: RuleResult(view.axes_of(args["x"]), {"length": 3}), "'length'"),
    "one argument": (lambda view: view, "takes 1"),
    "no tensor": (lambda view, args, out: view.axes_of(3), "axes_of", "3"),
    "a new tensor": (lambda view, args, out: view.axes_of(args["x"] + 1), "axes_of"),
    "its own error": (lambda view, args, out: 1 // 0, "division"),
    "other sizes": (lambda view, args, out: unify(*view.axes_of(args["x"])[:2]), "2 and 5"),
    "a text as size": (lambda view, args, out: [*view.axes_of(args["x"])[:2], Axis("8")], "'8'"),
    "a text as reason": (lambda view, args, out: rules.fix(view.axes_of(args["x"])[2], "why"), "fix", "role("),
    "fresh": (lambda view, args, out: rules.fresh(out.shape, "why"), "role(", "'why'"),
    "segment": (lambda view, args, out: rules.segment(view.axes_of(args["x"])[2], 4, 9), "4 to 9"),
    "reversed": (lambda view, args, out: rules.segment(view.axes_of(args["x"])[2], 5, 2), "5 to 2"),
    "before": (lambda view, args, out: rules.segment(view.axes_of(args["x"])[2], -3, 8), "-3 to 8"),
    "a kind": (lambda view, args, out: mark_grouping(view.axes_of(args["x"])[2], "head"), "'head'"),
    "regroup": (lambda view, args, out: rules.regroup(view.axes_of(args["x"])[2:], [2, 2]), "regroup"),
}


@pytest.mark.parametrize("name", NO_RULES)
def test_register_rule__a_function_that_is_no_rule_is_named(name):
    function, *names = NO_RULES[name]
    surgery.register_rule("notation::scaled")(function)
    net = Made(lambda net, x: OPERATIONS["scaled"](net.body(x), net.scale), body=nn.Linear(6, 8), scale=torch.ones(8))
    with refused("argument: the rule for notation::scaled (tests", *names):
        narrow(net, 0.5, X.float())


def test_register_rule__what_no_rule_can_be_registered_for():
    for wrong in (matmul, None):
        with refused("argument: @register_rule('namespace::name')"):
            surgery.register_rule(wrong)
    with refused("argument: register_rule"):
        surgery.register_rule("notation::scaled", matmul)
    with refused("argument: {'heads'}"):
        surgery.register_rule("notation::split", sizes="heads")
    with refused("argument: 'haeds'", "takes x, heads"):
        surgery.register_rule("notation::split", "x: n t (heads c) -> n heads t c", sizes={"haeds"})


@pytest.mark.parametrize(("notation", "sizes"), [("x: ... c, scal: c -> ... c", ()), ("x: ... c -> ... c", {"scal"})])
def test_register_rule__arguments_of_an_operation_that_is_defined_later(notation, sizes):
    surgery.register_rule("notation::later", notation, sizes=sizes)
    defined = torch.library.Library("notation", "FRAGMENT")
    try:
        defined.define("later(Tensor x, Tensor scale) -> Tensor")
        for key in ("CPU", "Meta"):
            defined.impl("later", lambda x, scale: x * scale, key)
        net = Made(lambda net, x: torch.ops.notation.later(net.body(x), net.scale), body=nn.Linear(6, 8))
        net.scale = torch.ones(8)
        with refused("argument: 'scal'", "takes x, scale"), torch.no_grad():
            narrow(net, 0.5, X.float())
    finally:
        defined._destroy()


def test_register_rule__a_rule_for_an_operation_that_there_is_not_is_named():
    surgery.register_rule("notation::scalde", "x: ... c, scale: c -> ... c")
    net = Made(lambda net, x: OPERATIONS["scaled"](net.body(x), net.scale), body=nn.Linear(6, 8), scale=torch.ones(8))
    net = nn.Sequential(net, nn.Linear(8, 2))
    with refused("width: notation::scalde", "did you mean notation::scaled?"):
        narrow(net, 0.5, X.float())


@pytest.mark.parametrize("is_real", [True, False])
def test_register_rule__a_kernel_that_does_not_run_with_a_rule_is_refused(lenient, is_real):
    """`register_fake` accepts any shapes, so that the meta device shows nothing."""
    surgery.register_rule("notation::lenient", "x: ... c, scale: d -> ... c")
    net = Made(
        lambda net, x: net.head(lenient(net.body(x), net.scale)),
        body=nn.Linear(6, 8), head=nn.Linear(8, 3), scale=nn.Parameter(torch.ones(8)),
    )  # fmt: skip
    if is_real:
        with refused("run: notation::lenient", "size of tensor a (4)"):
            narrow(net, {"body": 0.5}, X.float())
        surgery.register_rule("notation::lenient", "x: ... c, scale: c -> ... c", replace=True)
    assert narrow(net if is_real else net.to("meta"), {"body": 0.5}, X.float())[0].head.in_features == 4


def test_register_rule__a_kernel_that_does_not_run_anyway_is_said(lenient, caplog):
    surgery.register_rule("notation::lenient", "x: ... c, scale: _ -> ... c")
    net = Made(
        lambda net, x: net.head(lenient(net.body(x), net.scale)),
        body=nn.Linear(6, 8), head=nn.Linear(8, 3), scale=nn.Parameter(torch.ones(7)),
    )  # fmt: skip
    assert narrow(net, 0.5, X.float())[0].head.in_features == 4
    assert "notation::lenient could not be tried" in caplog.text


@pytest.mark.parametrize("notation", UNFIT)
def test_notation__a_notation_that_does_not_fit_a_call_is_named(notation):
    with refused("argument: the rule for notation::scaled (surgery.register_rule('notation::scaled', "):
        narrowed("scaled", notation, lambda net, x, op: op(net.body(x), net.scale), weights={"scale": (8,)})
