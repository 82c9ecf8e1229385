"""Wrong but plausible arguments: they work where the meaning is beyond doubt, else the error says the way out."""

import contextlib
import inspect
import itertools
import pkgutil
from functools import partial

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery.plan import Plan


def make():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)) for _ in range(3))
    return nn.Sequential(nn.Linear(3, 4), *blocks, nn.Linear(4, 2))


NET, OTHER = make(), nn.Sequential(*make().children())
with torch.no_grad():
    for parameter in OTHER.parameters():
        parameter.add_(1)
STATE, SECOND = surgery.state(NET), surgery.state(OTHER)
STACK = surgery.stack([STATE, SECOND])
LAYERS = surgery.layers(NET)
SEGMENTS = surgery.segments(LAYERS)
PERMUTATIONS = surgery.permutations(len(SEGMENTS), 2, generator=torch.Generator().manual_seed(0))
SMALL, PLAN = surgery.ungraft(NET, keep=[1])
MASK = {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in STACK.items()}
WHOLE = surgery.ungraft(NET, keep=[3])[1]
FACTORS = {"0.bias": [1.0]}

CALLS = {
    surgery.average: {"models": STACK, "weights": [1, 2], "mask": MASK, "fallback": STATE},
    partial(surgery.average): {
        "models": [surgery.state(SMALL)],
        "plans": [PLAN],
        "weights": [1],
        "factors": FACTORS,
        "fallback": STATE,
    },
    surgery.match_norms: {"models": STACK, "mask": MASK, "q": 0.9, "groups": SEGMENTS},
    partial(surgery.match_norms): {"models": [SECOND], "plans": [WHOLE], "q": 0.9, "groups": SEGMENTS},
    surgery.scale.percentile_norm: {"tensor": NET[0].weight.detach(), "q": 0.9},
    surgery.scale.norm_factors: {"models": STACK, "mask": MASK, "q": 0.9, "weights": [1, 2], "groups": SEGMENTS},
    partial(surgery.scale.norm_factors): {
        "models": [surgery.state(SMALL)],
        "plans": [PLAN],
        "q": 0.9,
        "groups": SEGMENTS,
        "weights": [1],
        "measure": "rms",
    },
    surgery.state: {"model": NET},
    surgery.load: {"model": make(), "values": STATE},
    surgery.stack: {"states": [STATE, SECOND]},
    surgery.unstack: {"models": STACK},
    surgery.states.stack_size: {"models": STACK},
    surgery.broadcast: {"values": STATE, "k": 2},
    surgery.distance: {"a": STACK, "b": STACK},
    surgery.cosine: {"a": STACK, "b": STACK},
    surgery.states.check_same: {"a": STATE, "b": SECOND, "name_a": "a", "name_b": "b"},
    surgery.layers: {"model": NET, "unit": "layer"},
    surgery.segments: {"layers": LAYERS, "fraction": 0.5},
    surgery.permutations: {"n": 2, "k": 3, "generator": None},
    surgery.recombine.inverse: {"permutations": PERMUTATIONS},
    surgery.shuffle: {"models": STACK, "segments": SEGMENTS, "permutations": PERMUTATIONS},
    surgery.libraries.make_model: {"name": "timm:resnet10t"},
    surgery.libraries.example_input: {"model": NET, "batch": 2},
    Plan: {"entries": PLAN.entries, "shapes": PLAN.shapes, "edits": PLAN.edits, "dtypes": {}},
    PLAN.extract: {"full": STATE},
    PLAN.embed: {"small": surgery.state(SMALL), "into": STATE},
    PLAN.compose: {"inner": Plan({}, PLAN.small_shapes)},
    Plan.from_json: {"text": PLAN.to_json()},
}
WRONG = {
    "a module": NET, "a state": STATE, "a stack": STACK, "states": [STATE, SECOND], "modules": [NET, OTHER],
    "a tuple": (STATE,), "None": None, "a string": "layer", "an array": np.ones((2, 3)),
    "arrays": {"0.bias": np.ones(4)},
    "an int": 3, "-1": -1, "a float": 0.5, "nan": float("nan"), "a complex": 1j, "a tensor": NET[0].weight.detach(),
    "layers": LAYERS, "a plan": PLAN, "plans": [PLAN], "ints": {"0.weight": 3}, "[]": [], "{}": {}, "strings": ["a"],
    "nested": [[STATE]], "a class": nn.Linear, "numbered": {0: NET[0].weight}, "a set": {1}, "an object": object(),
}  # fmt: skip


def name_of(function):
    return f"{function.func.__name__}, plans" if isinstance(function, partial) else function.__qualname__


@pytest.mark.parametrize("function", CALLS, ids=name_of)
def test_wrong_arguments__no_wrong_argument_ends_in_a_raw_error(function):
    right = CALLS[function]

    def call(arguments):
        parameters = inspect.signature(function).parameters.values()
        first = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
        function(*(arguments[n] for n in first), **{n: v for n, v in arguments.items() if n not in first})

    call(right)
    for name, value in itertools.product(right, WRONG.values()):
        with contextlib.suppress(surgery.SurgeryError):  # any other error fails the test
            call({**right, name: value})


def test_wrong_arguments__options_are_never_given_by_position():
    """But of equal operands, of a width with its example, of models, plans and weights, and of a rule's notation."""
    several = ("cosine", "average", "match_norms", "narrow", "widths", "register_rule")
    for name in surgery.__all__:
        value = getattr(surgery, name)
        if inspect.isfunction(value) and name not in several:
            parameters = inspect.signature(value).parameters.values()
            by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert len(by_position) <= 2, name
            assert all(p.default is p.empty for p in by_position), name


def test_wrong_arguments__modules_and_functions_have_names_of_their_own():
    modules = {module.name for module in pkgutil.iter_modules(surgery.__path__)}
    assert not modules & set(surgery.__all__)


def test_wrong_arguments__lists_of_states_and_of_modules_stand_for_their_stack():
    def same(a, b):
        assert a.keys() == b.keys()
        assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())

    masks = [{name: tensor[k] for name, tensor in MASK.items()} for k in range(2)]
    for models in ([STATE, SECOND], (NET, OTHER), [NET, SECOND]):
        same(surgery.stack(models), STACK)
        same(surgery.average(models, weights=[1, 3]), surgery.average(STACK, weights=[1, 3]))
        covered = surgery.average(models, mask=masks, fallback=NET)
        same(covered, surgery.average(STACK, mask=MASK, fallback=STATE))
        same(surgery.match_norms(models)[0], surgery.match_norms(STACK)[0])
        assert torch.equal(surgery.distance(models, STACK), surgery.distance(STACK, STACK))
        assert torch.equal(surgery.cosine(models), surgery.cosine(STACK))
    same(surgery.average([SMALL], [PLAN], fallback=NET), PLAN.embed(SMALL, into=NET)[0])
    same(PLAN.extract(NET), surgery.state(SMALL))
    same(surgery.state(surgery.load(make(), OTHER)), SECOND)


def test_wrong_arguments__a_state_has_the_layers_that_its_names_tell_of():
    assert [(layer.name, layer.tensors) for layer in surgery.layers(STATE)] == [
        (layer.name, layer.tensors) for layer in LAYERS
    ]
    assert [layer.name for layer in surgery.layers(STATE, unit="block")] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: surgery.state(STATE), "argument"),
        (lambda: surgery.state([NET]), "argument"),
        (lambda: surgery.load(STATE, NET), "argument"),
        (lambda: surgery.stack(NET), "argument"),
        (lambda: surgery.unstack(NET), "argument"),
        (lambda: surgery.unstack(STATE), "argument"),
        (lambda: surgery.average(NET), "argument"),
        (lambda: surgery.average({"w": np.ones(3)}), "argument: 'w'"),
        (lambda: surgery.layers(STATE, example=torch.zeros(1, 3)), "argument"),
        (lambda: surgery.segments(NET), "argument"),
        (lambda: surgery.shuffle(STACK, segments=LAYERS, permutations=PERMUTATIONS), "argument"),
        (lambda: surgery.match_norms(STACK, groups=LAYERS), "argument"),
        (lambda: surgery.permutations(2.5, 3), "argument: n"),
        (lambda: surgery.permutations(2, "3"), "argument: k"),
        (lambda: surgery.permutations(2, 3, generator=3), "argument"),
        (lambda: surgery.average(SMALL, PLAN, fallback=NET), "argument"),
        (lambda: surgery.average([SMALL], [NET], fallback=NET), "argument"),
        (lambda: surgery.libraries.make_model(NET), "argument"),
        (lambda: surgery.narrow(NET, example=torch.zeros(1, 3)), "argument"),
    ],
)
def test_wrong_arguments__errors_say_the_way_out(call, expected):
    with refused(expected):
        call()
