"""Calls of the previous version give what the present ones give, with a warning that says what to write."""

import pytest
import torch
from torch import nn

import surgery
from surgery.plan import Source

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
    "average": (
        lambda: surgery.average(BLOCK, [1, 3], MASK, KEEP),
        lambda: surgery.average(BLOCK, weights=[1, 3], mask=MASK, fallback=KEEP),
    ),
    "trimmed_mean": (
        lambda: surgery.trimmed_mean(BLOCK, 0.5, [1, 1], MASK, KEEP),
        lambda: surgery.trimmed_mean(BLOCK, trim=0.5, weights=[1, 1], mask=MASK, fallback=KEEP),
    ),
    "match_norms": (
        lambda: surgery.match_norms(BLOCK, None, 0.5, [["w"]]),
        lambda: surgery.match_norms(BLOCK, mask=None, q=0.5, groups=[["w"]]),
    ),
    "percentile_norm": (
        lambda: surgery.scale.percentile_norm(BLOCK["w"], 0.5, True),
        lambda: surgery.scale.percentile_norm(BLOCK["w"], q=0.5, stacked=True),
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
    "segments": (
        lambda: surgery.segments(surgery.layers(net()), 0.4),
        lambda: surgery.segments(surgery.layers(net()), fraction=0.4),
    ),
    "permutations": (
        lambda: surgery.permutations(4, 3, seeded(), True),
        lambda: surgery.permutations(4, 3, generator=seeded(), derange=True),
    ),
    "shuffle": (
        lambda: surgery.shuffle(BLOCK, [("w",)], SWAPS, False),
        lambda: surgery.shuffle(BLOCK, segments=[("w",)], permutations=SWAPS, inplace=False),
    ),
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


def test_a_value_given_twice_and_too_many_are_errors():
    with (
        pytest.warns(DeprecationWarning, match="surgery"),
        pytest.raises(TypeError, match="multiple values for argument 'weights'"),
    ):
        surgery.average(BLOCK, [1, 1], weights=[1, 1])
    with (
        pytest.warns(DeprecationWarning, match="surgery"),
        pytest.raises(TypeError, match="multiple values for argument 'keep'"),
    ):
        surgery.ungraft(net(), keep=[1], depths=[1])
    with pytest.raises(TypeError):
        surgery.average(BLOCK, [1, 1], None, None, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wieghts'"):
        surgery.average(BLOCK, wieghts=[1, 1])
