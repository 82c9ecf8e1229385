import pytest
import torch
from refusals import fl_refused, refused
from torch import nn

import zoo
from benchmarks.papers.models.weights import variation_of
from surgery import narrow, state, ungraft


def family():
    """States of a small and two larger networks, and where the small one lies in these."""
    make = lambda **size: zoo.create("preresnet20", torch.Generator().manual_seed(0), image_size=8, **size)  # noqa: E731
    small = make(width=0.25, depth=1)
    wide, deep = make(width=0.5, depth=1), make(width=0.5, depth=(2, 1, 3))
    _, in_wide = narrow(wide, like=small)
    shallow, dropped = ungraft(deep, keep=[1, 1, 1])
    return [small, wide, deep], [in_wide, dropped.compose(narrow(shallow, like=small)[1])]


def test_variation__magnitudes_and_distances_are_mean_norms_of_maps():
    models, plans = family()
    states = [state(model) for model in models]
    found = variation_of(states[0], states[1:], plans)
    small, wide, deep = models
    expected = [n for n, m in small.named_modules() if isinstance(m, nn.Conv2d)]
    assert sorted(found.layers) == sorted(f"{name}.weight" for name in expected)
    assert found.distance.shape == (2, len(expected))
    for at, name in enumerate(found.layers):
        maps = states[0][name].flatten(2).double()
        co, ci, _ = maps.shape
        norms = [maps[i, j].abs().sum() for i in range(co) for j in range(ci)]
        assert found.magnitude[at].item() == pytest.approx(float(sum(norms)) / (co * ci))
        for k, model in enumerate((wide, deep)):
            corner = state(model)[name].flatten(2).double()[:co, :ci]
            norms = [(maps[i, j] - corner[i, j]).abs().sum() for i in range(co) for j in range(ci)]
            assert found.distance[k, at].item() == pytest.approx(float(sum(norms)) / (co * ci))
    mean = [sum(row.tolist()) / len(row) for row in (found.magnitude, *found.distance)]
    assert found.ratio.tolist() == pytest.approx([mean[1] / mean[0], mean[2] / mean[0]])


def test_variation__a_model_is_at_no_distance_from_its_own_corner():
    (_, wide, deep), (in_wide, in_deep) = family()
    for model, plan in ((wide, in_wide), (deep, in_deep)):
        own = plan.extract(state(model))
        assert variation_of(own, [state(model)], [plan]).ratio.tolist() == [0]
        twice = {name: 2 * tensor for name, tensor in state(model).items()}
        assert variation_of(own, [twice], [plan]).ratio.tolist() == [1]


def test_variation__models_and_plans_must_fit():
    models, plans = family()
    small, wide, deep = map(state, models)
    with refused("plan", "'section1.1.norm1.weight'"):
        variation_of(small, [wide], plans[1:])
    with refused("mismatch", "'stem.conv.weight'"):
        variation_of(wide, [deep], plans[1:])
    bare = {"bias": torch.ones(2)}
    with fl_refused("unsupported"):
        variation_of(bare, [bare], plans[:1])
