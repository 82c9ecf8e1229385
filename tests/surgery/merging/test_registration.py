"""Merge methods of a user: one file, in which a function of tensors is a method."""

import importlib
import inspect
import sys

import pytest
import torch
from refusals import refused

from surgery import merging
from surgery.files import open_state, write
from surgery.lazy import LazyState
from surgery.merging import registration

FILE = '''
import torch
from surgery.merging import register_method


@register_method
def median(tensors):
    """Take the median of each element."""
    return torch.stack(tensors).median(0).values


@register_method
def furthest(tensors, *, base, weights, share=1.0, signs=True):
    deltas = torch.stack([weight * (tensor - base) for tensor, weight in zip(tensors, weights)])
    chosen = deltas.gather(0, deltas.abs().argmax(0, keepdim=True))[0]
    return base + (share if isinstance(share, float) else sum(share)) * (chosen if signs else chosen.abs())
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file of a stranger's; what it registers goes away again."""
    (tmp_path / "strange_methods.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(registration.METHODS)
    yield importlib.import_module("strange_methods")
    del sys.modules["strange_methods"]
    registration.METHODS.clear()
    registration.METHODS.update(before)


def models(k=3):
    draw = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "b.weight": (5,)}
    found = [{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()} for _ in range(k)]
    return [state | {"a.steps": torch.tensor(3 * k)} for k, state in enumerate(found)]


def test_registration__a_function_of_tensors_is_a_method(module, tmp_path):
    states = models()
    merged = merging.median(states)
    for name in ("a.weight", "b.weight"):
        assert torch.equal(merged[name], torch.stack([state[name] for state in states]).median(0).values)
    assert merged["a.steps"] == 6
    assert merging.METHODS["median"] is merging.median is module.median
    assert [*inspect.signature(merging.median).parameters] == ["models"]
    assert merging.median.__doc__ == "Take the median of each element."
    for k, state in enumerate(states):
        write(tmp_path / f"{k}.safetensors", state)
    lazy = merging.median([open_state(tmp_path / f"{k}.safetensors") for k in range(3)])
    assert isinstance(lazy, LazyState)
    assert all(torch.equal(lazy[name], merged[name]) for name in merged)
    half = merging.median([{name: tensor.half() for name, tensor in state.items()} for state in states])
    assert half["a.weight"].dtype == torch.float16


def test_registration__a_method_takes_a_base_weights_and_settings(module):
    states, (base,) = models(), models(1)
    base = {name: torch.zeros_like(tensor) for name, tensor in base.items()}
    found = merging.furthest(states, base=base, weights=[1, 0, 2], share={"b": 0.5})
    for name, share in (("a.weight", 1.0), ("b.weight", 0.5)):
        x, y = states[0][name], 2 * states[2][name]
        torch.testing.assert_close(found[name], share * torch.where(x.abs() > y.abs(), x, y))
    listed = merging.furthest(states, base=base, weights=[1, 0, 2], share=[0.25, 7.0, 0.75], signs=False)
    torch.testing.assert_close(
        listed["a.weight"], merging.furthest(states, base=base, weights=[1, 0, 2])["a.weight"].abs()
    )
    parameters = inspect.signature(merging.furthest).parameters
    assert [*parameters] == ["models", "base", "weights", "share", "signs"]
    with refused("argument: base"):
        merging.furthest(states)
    with refused("argument: furthest", "'share'"):
        merging.furthest(states, base=base, shar=0.5)
    with refused("argument: median", "takes models"):
        merging.median(states, weights=[1, 2, 3])
    with refused("argument: median([a, b])"):
        merging.median(*states)
    with refused("argument: base"):
        merging.furthest(states, base=None)
    with refused("name: 'c'"):
        merging.furthest(states, base=base, share={"c": 0.5})


def test_register_method__wrong_methods(module):
    def linear(tensors):
        return tensors[0]

    def needs(tensors, share):
        return tensors[0]

    def short(tensors):
        return tensors[0][:1]

    def broken(tensors):
        raise KeyError("x")

    def nothing(tensors):
        pass

    for wrong, expected in (
        (linear, "argument"),
        (lambda tensors: tensors[0], "argument"),
        (needs, "argument: share"),
        (lambda: 0, "argument"),
    ):
        with refused(expected):
            merging.register_method(wrong)

    def median(tensors):
        return tensors[0]

    with refused("argument: median"):
        merging.register_method(median)

    def undefined(tensors):
        return 0 * tensors[0] / 0

    def imaginary(tensors):
        return tensors[0] * 1j

    def huge(tensors):
        return tensors[0].double() * 1e300

    for wrong, code in (
        (short, "argument"), (imaginary, "argument"), (broken, "run"), (nothing, "argument"), (undefined, "values"),
        (huge, "values"),
    ):  # fmt: skip
        method = merging.register_method(wrong)
        with refused(code, wrong.__name__, "'a.weight'"):
            method(models())
    with pytest.raises(AttributeError):
        _ = merging.shorter


def test_registration__a_method_may_be_registered_again(module):
    before = merging.median
    module = importlib.reload(module)
    assert merging.METHODS["median"] is module.median is not before


def test_registration__a_method_that_works_in_place_leaves_the_models(module):
    @merging.register_method
    def inplace(tensors, *, base, weights, powers=1.0):
        weights.reverse()
        base.zero_()
        return tensors[0].mul_(0).add_(7)

    states = models(4)
    copies = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    weights = [1.0, 2.0, 3.0]
    found = inplace(states[:3], base=states[3], weights=weights)
    assert bool((found["a.weight"] == 7).all())
    assert weights == [1.0, 2.0, 3.0]
    assert all(torch.equal(state[name], copy[name]) for state, copy in zip(states, copies) for name in copy)


@pytest.mark.parametrize("name", ["fisher", "driver", "METHODS", "register_method", "ties"])
def test_register_method__a_method_takes_no_name_that_is_taken(name):
    def function(tensors):
        return tensors[0]

    function.__name__ = name
    with refused(f"argument: {name}"):
        merging.register_method(function)


def test_register_method__a_method_names_its_settings():
    def stars(tensors, *rest, **more):
        return tensors[0]

    with refused("argument: stars"):
        merging.register_method(stars)
