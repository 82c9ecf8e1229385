import math

import pytest
import torch

import surgery
import surgery.plan.factors as module
import zoo
from surgery.plan import Source, Submodel, submodel_factors


def mixed():
    """Four clients of a small preresnet: narrow, shallow with grafted blocks, both, full."""
    server = zoo.Spec("preresnet18", width=0.125, norm="static_batch")
    full = server.build()
    states, plans = [], []
    for width, depth in ((0.5, 2), (1.0, 1), (0.5, 1), (1.0, 2)):
        client = server.scaled(width=width, depth=(depth,) * len(server.depth))
        shallow, deep = surgery.ungraft(full, keep=client.depth)
        small, narrow = surgery.corner(shallow, client.build())
        generator = torch.Generator().manual_seed(len(states))
        states.append({
            n: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for n, t in surgery.state(small).items()
        })  # fmt: skip
        plans.append(deep.compose(narrow))
    return full, states, plans


def test_mixed_models_of_a_real_family_with_a_factor_a_layer(monkeypatch):
    full, states, plans = mixed()
    groups = surgery.segments(surgery.layers(full))
    jobs, real = [], module.joint_norms
    monkeypatch.setattr(module, "joint_norms", lambda given, q: jobs.extend(given) or real(given, q))
    got = submodel_factors(states, plans, groups=groups, weights=[5, 1, 2, 1])
    assert any(len(sources) > 1 for plan in plans for sources in plan.entries.values())
    taken = [id(tensor) for job in jobs for tensor in job]
    assert len(taken) == len(set(taken))  # a grafted block's norm is computed once
    old = surgery.state(full)
    embedded, masks = zip(*(plan.embed(state, into=old) for state, plan in zip(states, plans)))
    scaled, expected = surgery.match_norms(surgery.stack(embedded), mask=surgery.stack(masks), groups=groups)
    torch.testing.assert_close({n: f.float() for n, f in got.items()}, expected, rtol=1e-6, atol=0)
    mean = surgery.average_submodels(states, plans, fallback=old, weights=[5, 1, 2, 1], factors=got)
    slow = surgery.average(scaled, weights=[5, 1, 2, 1], mask=surgery.stack(masks), fallback=old)
    torch.testing.assert_close(mean, slow, rtol=1e-5, atol=1e-6)


WIDE = Submodel({"w": (Source("w", (None,)),)}, {"w": (64,)})
NARROW = Submodel({"w": (Source("w", (((0, 16),),)),)}, {"w": (64,)})
PAIR = [{"w": torch.full((16,), 3.0)}, {"w": torch.full((64,), -3.0)}]


def test_rms_does_not_scale_a_model_for_being_narrow():
    assert submodel_factors(PAIR, [NARROW, WIDE])["w"].tolist() == pytest.approx([1.5, 0.75])
    assert submodel_factors(PAIR, [NARROW, WIDE], measure="rms")["w"].tolist() == pytest.approx([1.0, 1.0])
    # 100 stands above the quantile: it counts neither in the norm nor in the number.
    states = [{"w": torch.tensor([2.0] * 15 + [100.0])}, {"w": torch.full((64,), 1.0)}]
    assert submodel_factors(states, [NARROW, WIDE], measure="rms")["w"].tolist() == pytest.approx([0.75, 1.5])


def test_who_has_no_weight_may_hold_anything_and_meta_tensors_have_factor_one():
    states = [{"w": torch.full((16,), math.nan)}, PAIR[1]]
    assert submodel_factors(states, [NARROW, WIDE], weights=[0, 3])["w"].tolist() == [1.0, 1.0]
    meta = [{"w": s["w"].to("meta")} for s in PAIR]
    assert submodel_factors(meta, [NARROW, WIDE])["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": "max"}, "choose norm or rms"),
        ({"q": 2.0}, "q must be a quantile"),
        ({"groups": [("v",)]}, "'v', but the full model has no such tensor"),
        ({"groups": [("w",), ("w",)]}, "in two groups"),
        ({"weights": [1, 2, 3]}, "weights have shape"),
        ({"plans": [WIDE]}, "2 states and 1 plans"),
        ({"plans": [WIDE, WIDE]}, r"plan 0 and \(16,\) in state 0"),
        ({"states": [PAIR[0], {"w": torch.full((64,), math.inf)}]}, "w of state 1 hold NaN or infinity"),
    ],
)
def test_it_refuses(arguments, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        submodel_factors(**{"states": PAIR, "plans": [NARROW, WIDE], **arguments})


@pytest.mark.gpu
def test_cuda_gives_what_the_cpu_gives():
    full, states, plans = mixed()
    old = surgery.state(full)
    there = [{n: t.cuda() for n, t in state.items()} for state in states]
    factors, expected = submodel_factors(there, plans), submodel_factors(states, plans)
    torch.testing.assert_close(factors, expected, rtol=1e-6, atol=0)
    mean = surgery.average_submodels(there, plans, fallback={n: t.cuda() for n, t in old.items()}, factors=factors)
    torch.testing.assert_close(
        {n: t.cpu() for n, t in mean.items()},
        surgery.average_submodels(states, plans, fallback=old, factors=expected),
        rtol=1e-5,
        atol=1e-6,
    )
