import pytest
import torch
from refusals import fl_refused

from fl.base.errors import FLError
from fl.figures import coverage as coverage_file
from fl.figures.coverage import coverage, coverage_maps
from fl.models.fleet import plan_within
from surgery import Plan
from surgery.plan import Source
from zoo import Spec


def fleet():
    """Plans with grafting of a few clients of one global model, and the same without."""
    full = Spec("preresnet20", width=0.5, depth=3).build(device="meta")
    sizes = [(0.125, 1), (0.125, 1), (0.25, 2), ((0.5, 0.25, 0.5), (3, 1, 2)), (0.5, 3)]
    grafted = [plan_within(full, Spec("preresnet20", width=w, depth=d).build(device="meta"), "equal") for w, d in sizes]
    return [Plan({n: sources[:1] for n, sources in plan.entries.items()}, plan.shapes) for plan in grafted], grafted


def by_masks(plans):
    """Coverage from the masks of embedded states."""
    result = {name: torch.zeros(shape[:1] or (1,), dtype=torch.float64) for name, shape in plans[0].shapes.items()}
    for plan in plans:
        _, mask = plan.embed({name: torch.ones(shape) for name, shape in plan.small_shapes.items()})
        for name, covered in mask.items():
            result[name] += covered.double().reshape(len(result[name]), -1).mean(1)
    return result


@pytest.mark.slow
def test_coverage__is_that_of_the_masks():
    window = Plan({"w": (Source("w", (((0, 1), (3, 5)), ((1, 2),), None)),)}, {"w": (5, 4, 2), "v": (2,)})
    for plans in (*fleet(), [window], [window, Plan({"v": (Source("v", (None,)),)}, window.shapes)]):
        found, expected = coverage(plans), by_masks(plans)
        assert found.keys() == expected.keys()
        for name in found:
            assert torch.allclose(found[name], expected[name], atol=1e-12)
    without, grafted = (coverage(plans)["section1.2.norm1.weight"] for plans in fleet())
    assert without.tolist() == [2.0] * 8
    assert grafted.tolist() == [5, 5, 3, 3, 2, 2, 2, 2]


def test_coverage__plans_must_be_of_one_model():
    one, two = (Plan({"w": (Source("w", (None,)),)}, {"w": (size,)}) for size in (2, 3))
    for plans, reason in (([], "no plans to count"), ([one, two], "different global models")):
        with pytest.raises(FLError, match=reason):
            coverage(plans)
    with fl_refused("unsupported"):
        coverage_maps({"a": [one]}, "")


@pytest.mark.slow
def test_coverage__maps_show_shares_of_the_width(monkeypatch):
    without, grafted = fleet()
    figure = coverage_maps({"before": without, "after": grafted}, "")
    layers = [name for name, shape in grafted[0].shapes.items() if len(shape) > 1]
    for axis, title, plans in zip(figure.axes, ("before", "after"), (without, grafted)):
        image, counts = axis.images[0], coverage(plans)
        assert (axis.get_title(), image.get_extent(), image.get_clim()) == (title, [0, 100, len(layers), 0], (0, 1))
        for row, name in zip(image.get_array(), layers, strict=True):
            channels = len(counts[name])
            for at in range(0, len(row), 7):
                assert row[at] == pytest.approx(counts[name][at * channels // len(row)].item() / 5)
        # stem, 6 layers, then 7 with a shortcut each in two sections, and the head
        assert [line.get_ydata()[0] for line in axis.lines if line.get_linewidth() > 1] == [1, 7, 14, 21]
        assert len(axis.lines) == 4 + 6
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [name.removesuffix(".weight") for name in layers]
    monkeypatch.setattr(coverage_file, "_NAMED", 5)
    labels = [label.get_text() for label in coverage_maps({"a": without}, "").axes[0].get_yticklabels()]
    assert labels == ["stem.conv", *(f"section{s}.{b}" for s in (1, 2, 3) for b in range(3)), "head"]
