"""Calls of the previous version give what the present ones give, with a warning that says what to write."""

import inspect

import pytest
import torch
from torch import nn

import surgery
from surgery.submodel import Source

BLOCK = {"w": torch.tensor([[1.0, 2.0], [5.0, 9.0]])}
KEEP = {"w": torch.zeros(2)}
PLANS = [surgery.Submodel({"w": (Source("w", (runs,)),)}, {"w": (2,)}) for runs in (((0, 1),), None)]
STATES = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0, 4.0])}]
MASK = {"w": torch.tensor([[True, False], [False, False]])}
SWAPS = torch.tensor([[1, 0]])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in "ab"))


def seeded():
    return torch.Generator().manual_seed(0)


X = torch.ones(1, 3)
CASES = {
    "average_submodels": (
        lambda: surgery.average_submodels(STATES, PLANS, KEEP, [1, 3], torch.float64, {"w": torch.tensor([2, 1])}),
        lambda: surgery.average_submodels(
            STATES, PLANS, fallback=KEEP, weights=[1, 3], dtype=torch.float64, factors={"w": torch.tensor([2, 1])}
        ),
    ),
    "trimmed_mean_submodels": (
        lambda: surgery.trimmed_mean_submodels(STATES, PLANS, KEEP, 0.5, [1, 1], {"w": torch.tensor([2, 1])}),
        lambda: surgery.trimmed_mean_submodels(
            STATES, PLANS, fallback=KEEP, trim=0.5, weights=[1, 1], factors={"w": torch.tensor([2, 1])}
        ),
    ),
    "submodel_factors": (
        lambda: surgery.submodel_factors(STATES, PLANS, 1.0, [["w"]], [1, 1], "rms"),
        lambda: surgery.submodel_factors(STATES, PLANS, q=1.0, groups=[["w"]], weights=[1, 1], measure="rms"),
    ),
    "narrow": (lambda: surgery.narrow(net(), 0.5, X), lambda: surgery.narrow(net(), rate=0.5, example=X)),
    "narrow by a model": (
        lambda: surgery.narrow(net(), like=nn.Sequential(*net()[:1], *net()[1:])),
        lambda: surgery.corner(net(), net()),
    ),
    "widths": (lambda: surgery.widths(net(), X, 0.5), lambda: surgery.widths(net(), example=X, rate=0.5)),
    "rolling": (
        lambda: surgery.rolling(net(), net(), X)(1),
        lambda: surgery.rolling(net(), net(), example=X)(1),
    ),
    "rolling like": (
        lambda: surgery.rolling(net(), like=net(), example=X)(1),
        lambda: surgery.rolling(net(), net(), example=X)(1),
    ),
    "graft": (lambda: surgery.graft(net(), [3], "copy", X), lambda: surgery.graft(net(), depths=[3], example=X)),
    "ungraft": (
        lambda: surgery.ungraft(net(), [1], X, "none"),
        lambda: surgery.ungraft(net(), keep=[1], example=X, stands_for="none"),
    ),
    "ungraft stand": (
        lambda: surgery.ungraft(net(), depths=[1], stand="none"),
        lambda: surgery.ungraft(net(), keep=[1], stands_for="none"),
    ),
    "layers": (lambda: surgery.layers(net(), X, "tensor"), lambda: surgery.layers(net(), example=X, unit="tensor")),
    "example_input": (
        lambda: surgery.example_input(nn.Conv2d(3, 1, 1), 3),
        lambda: surgery.example_input(nn.Conv2d(3, 1, 1), batch=3),
    ),
    "embed": (lambda: PLANS[0].embed(STATES[0], KEEP), lambda: PLANS[0].embed(STATES[0], into=KEEP)),
    "count": (lambda: surgery.count(BLOCK), lambda: surgery.stack_size(BLOCK)),
}


def plain(value):
    """What was returned, as something to compare."""
    if isinstance(value, nn.Module):
        return [type(m) for m in value.modules()], plain(surgery.state(value))
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)


@pytest.mark.parametrize("name", CASES)
def test_former_calls_give_the_same_and_warn(name):
    former, present = CASES[name]
    with pytest.warns(DeprecationWarning, match=r"^surgery\..* from the next version on") as caught:
        got = former()
    assert {warning.filename for warning in caught} == {__file__}  # of the caller, not of the package
    assert plain(got) == plain(present())


def test_every_function_with_options_is_covered():
    public = {name: getattr(surgery, name) for name in surgery.__all__}
    functions = [name for name, value in public.items() if inspect.isfunction(value)]
    optional = [
        name
        for name in functions
        if any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(public[name]).parameters.values())
    ]
    # always by keyword
    newer = {"importance", "register_rule", "permute", "sort_by", "align", "repair", "widen", "average", "trimmed_mean"}
    newer |= {
        "match_norms",
        "percentile_norm",
        "segments",
        "permutations",
        "shuffle",
        "block_similarity",
    }  # always by keyword
    assert set(optional) - newer == CASES.keys() - {
        "narrow by a model",
        "rolling like",
        "ungraft stand",
        "embed",
        "count",
    }


def test_options_are_never_given_by_position():
    """But of functions of two or four equal operands, whose order cannot be mistaken."""
    for name in surgery.__all__:
        value = getattr(surgery, name)
        if inspect.isfunction(value) and name not in ("cosine", "check_same", "count"):
            parameters = inspect.signature(value).parameters.values()
            by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert len(by_position) <= 2, name
            assert all(p.default is p.empty for p in by_position), name


def test_a_value_given_twice_and_too_many_are_errors():
    with (
        pytest.warns(DeprecationWarning, match="surgery"),
        pytest.raises(TypeError, match="multiple values for argument 'keep'"),
    ):
        surgery.ungraft(net(), keep=[1], depths=[1])
    with pytest.raises(TypeError):
        surgery.ungraft(net(), [1], X, "none", None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieghts'"):
        surgery.average(BLOCK, wieghts=[1, 1])


def test_modules_and_functions_have_names_of_their_own():
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(surgery.__path__)}
    assert not modules & set(surgery.__all__)
