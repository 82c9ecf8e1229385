import copy
import math

import pytest
import torch
from refusals import refused
from selection import some
from torch import nn

import surgery
import zoo
from surgery import load, narrow, state
from surgery.plan import Plan
from surgery.width import plan as module
from surgery.width.corner import rolling
from zoo import Spec

SPECS = {
    "cnn": Spec("cnn", image_size=8, width=0.25),
    "lenet": Spec("lenet", image_size=16),
    "resnet18": Spec("resnet18", stem="cifar", image_size=8, width=0.25, depth=(1, 2, 1, 1)),
    "preresnet18": Spec("preresnet18", image_size=8, width=0.25, depth=(1, 2, 1, 1), norm="layer"),
    "mobilenetv2": Spec("mobilenetv2", stem="cifar", image_size=16, width=0.25, depth=1, rounding="ceil"),
    "transformer": Spec("transformer", num_classes=11, tokens=5, width=0.25, depth=2, dropout=0.0),
}
RATES = {"cnn": 0.75, "lenet": (0.6, 0.3, 1, 0.5), "resnet18": 0.75, "preresnet18": 0.5, "mobilenetv2": 0.6}


def pair(name):
    """A full model with statistics and weights that are not trivial, a narrower one, an input."""
    torch.manual_seed(0)
    spec = SPECS[name]
    full, small = spec.build().double().eval(), spec.scale(RATES.get(name, 0.5)).build().double().eval()
    for tensor in state(full).values():
        if tensor.is_floating_point() and tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5)
    x = torch.randint(11, (2, 5)) if name == "transformer" else torch.rand_like(spec.example(2), dtype=torch.float64)
    return full, small, x


def rolled(name, full, small, by):
    """The full model with channel c moved to c - by of every width that the small one cuts: the same function.

    Written out for the layouts of the zoo: a digit after the channel is a pixel or a head.
    """
    sizes, result = state(small), {}
    for key, tensor in state(full).items():
        for axis in range(tensor.ndim):
            if tensor.shape[axis] == sizes[key].shape[axis]:
                continue
            inner = 1
            if key == "fc1.weight" and axis == 1:
                inner = {"cnn": 4, "lenet": 1}[name]
            elif any(f".{part}." in key and axis == 0 for part in "qkv") or (".out.weight" in key and axis == 1):
                inner = 8
            tensor = tensor.roll(-by * inner, axis)
        result[key] = tensor
    return load(copy.deepcopy(full), result)


WINDOWS = [(name, by) for name in SPECS for by in (0, 1, 5, 13, 47)]


@pytest.mark.parametrize(
    ("name", "by"), some(WINDOWS, [(name, by) for name, by in WINDOWS if by == 5 or (name == "cnn" and by == 47)])
)
def test_narrow__a_window_is_the_leading_corner_of_the_rolled_model(name, by):
    full, small, x = pair(name)
    plan = rolling(full, small, example=x)(by)
    other = rolled(name, full, small, by)
    torch.testing.assert_close(other(x), full(x))  # rolling is a symmetry of the function
    expected = narrow(other, like=small)[0].eval()(x)
    torch.testing.assert_close(plan.build(full).eval()(x), expected)
    assert not torch.allclose(expected, full(x))
    if by == 1:
        assert not torch.allclose(expected, narrow(full, like=small)[0].eval()(x))


@pytest.mark.parametrize("name", SPECS)
def test_narrow__the_first_window_is_the_plan_of_narrow_and_all_windows_cover_alike(name):
    full, small, x = pair(name)
    roll, leading = rolling(full, small, example=x), narrow(full, like=small)[1]
    assert roll(0) == leading
    assert Plan.from_json(roll(3).to_json()) == roll(3)
    name, size = next((key, size) for key, (size, *_) in leading.shapes.items() if size > leading.small_shapes[key][0])
    ones = {key: torch.ones(shape) for key, shape in leading.small_shapes.items()}
    masks = [roll(by).embed(ones)[1][name] for by in range(size)]
    held = sum(mask.reshape(size, -1)[:, 0].int() for mask in masks)
    assert held.tolist() == [leading.small_shapes[name][0]] * size  # each channel in as many rounds as any other
    every = math.lcm(*(size for shape in leading.shapes.values() for size in shape))
    assert roll(-1) == roll(every - 1) != roll(0)


def test_roll__positions_by_hand():
    net, small = (nn.Sequential(nn.Conv2d(1, c, 1), nn.Flatten(), nn.Linear(2 * c, d)) for c, d in ((4, 3), (3, 3)))
    roll = rolling(net, small, example=torch.zeros(1, 1, 1, 2))
    held = [[p for a, b in roll(by).entries["2.weight"][0].index[1] for p in range(a, b)] for by in range(4)]
    assert held == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7], [0, 1, 4, 5, 6, 7], [0, 1, 2, 3, 6, 7]]
    assert roll(3).entries["2.bias"][0].index == (None,)


class Shifted(nn.Module):
    """Holds a tensor that no state has."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(2, width), nn.Linear(width, 2)
        self.register_buffer("shift", torch.arange(float(width)), persistent=False)

    def forward(self, x):
        return self.b(self.a(x) + self.shift)


def test_roll__tensors_that_no_state_holds_roll_along():
    plan = rolling(Shifted(5), Shifted(3), example=torch.zeros(1, 2))(4)
    assert plan.build(Shifted(5)).shift.tolist() == [0, 1, 4]


@pytest.mark.slow
def test_roll__every_width_is_windowed_once_a_plan_and_models_stay(monkeypatch):
    with torch.device("meta"):
        full, small = (zoo.create("mobilenetv2", width=width) for width in (1.0, 0.5))
    full, small = full.to_empty(device="cpu"), small.to_empty(device="cpu")
    before = copy.deepcopy(full.state_dict())
    axes, runs_of = [], module.runs_of
    monkeypatch.setattr(module, "runs_of", lambda axis, choice: (axes.append(axis), runs_of(axis, choice))[1])
    plan = rolling(full, small, example=torch.zeros(2, 3, 64, 64))
    for by in range(3):
        axes.clear()
        plan(by)
        assert 100 < len(axes) == len(set(map(id, axes)))  # however many tensors run along it
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before.values(), full.state_dict().values()))


def test_roll__corners_that_are_no_windows_are_refused():
    for name, fields in (("resnet20", {}), ("preresnet20", {"norm": "group"})):
        spec = Spec(name, image_size=8, depth=1, **fields)
        with refused("width"):
            rolling(spec.build(), spec.scale(0.5).build(), example=spec.example(2))
    mlps = [nn.Sequential(nn.Linear(2, width), nn.Linear(width, out)) for width, out in ((6, 3), (4, 2))]
    with refused("width: '1.weight'"):
        rolling(*mlps, example=torch.zeros(1, 2))
    with refused("mismatch"):
        rolling(nn.Sequential(*mlps[0], nn.Linear(3, 3)), mlps[1], example=torch.zeros(1, 2))
    assert surgery.width.corner.rolling is rolling


class Counted(nn.Module):
    """Positions of the first width are multiplied by their number."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x):
        h = self.a(x).relu()
        return self.c(self.b(h * torch.arange(h.shape[1], dtype=h.dtype)).relu())


def test_roll__a_width_whose_order_matters_keeps_its_first_positions():
    plan = rolling(Counted(8), Counted(4), example=torch.zeros(1, 3))(3)
    assert [plan.entries[name][0].index for name in ("a.bias", "b.bias")] == [(((0, 4),),), (((3, 7),),)]
