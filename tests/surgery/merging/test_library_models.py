"""Merging models of libraries: of a model and its permuted copy, and of blocks of two models."""

import inspect

import pytest
import torch
from library_models import LIBRARY_MODELS, library_model
from symmetric import same_outputs

from surgery import SurgeryError, graft, load, merging, sections, state, widths
from surgery.names import is_inside
from surgery.symmetry import align, permute

NOT_REPEATABLE = {  # models without a block that may follow itself
    "timm:byobnet",
    "timm:efficientnet",
    "timm:efficientnet, group norm",
    "timm:nfnet",
    "torchvision:densenet",
    "torchvision:squeezenet",
    "transformers:albert_classifier",
}


def repeatable(net, example):
    """The last section that can be made deeper."""
    for section in reversed(sections(net)):
        try:
            graft(net, depths={section.name: len(section.blocks) + 1}, example=example)
        except SurgeryError:
            continue
        return section
    raise AssertionError("no section can be made deeper")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LIBRARY_MODELS)[1::3])
def test_a_model_merged_with_its_aligned_copy_is_the_model(name):
    net, example = library_model(name)
    draw = torch.Generator().manual_seed(0)
    found = {w.name: w.size for w in widths(net, example) if not w.order}
    orders = {name: torch.randperm(size, generator=draw) for name, size in found.items()}
    copy = permute(net, orders, example=example)[0]
    apart = merging.linear([net, copy])
    assert not all(torch.allclose(apart[name], tensor) for name, tensor in state(net).items())
    models = align([net, copy], example=example).models
    for method in merging.METHODS.values():
        if method is merging.nearswap:
            merged = merging.nearswap(models[1:], base=net, t=0.1)
        else:
            base = inspect.signature(method).parameters.get("base")
            merged = method(models, **({"base": net} if base is not None and base.default is base.empty else {}))
        for name, tensor in state(net).items():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LIBRARY_MODELS if name not in NOT_REPEATABLE][1::2])
def test_blocks_of_another_model_run_behind_a_models_own(name):
    """The oracle grafts a block and writes the other model's tensors into it."""
    net, example = library_model(name)
    other = load(library_model(name)[0], {n: 0.9 * t if t.is_floating_point() else t for n, t in state(net).items()})
    section = repeatable(net, example)
    own = [(0, i) for i in range(len(section.blocks))]
    same, _ = merging.passthrough([net, other], blocks={section.name: own}, example=example)
    assert all(torch.equal(tensor, state(net)[name]) for name, tensor in state(same).items())
    longer, plan = merging.passthrough([net, other], blocks={section.name: [*own, (1, own[-1][1])]}, example=example)
    expected, _ = graft(net, depths={section.name: len(own) + 1}, example=example)
    new = next(one for one in sections(expected) if one.name == section.name).blocks[-1]
    tensors = dict(state(expected))
    for tensor in tensors:
        if is_inside(tensor, new):
            tensors[tensor] = state(other)[section.blocks[-1] + tensor.removeprefix(new)]
    assert same_outputs(longer, load(expected, tensors), example)
    assert not same_outputs(longer, net, example)
    assert all(torch.equal(t, state(longer)[n]) for n, t in plan.extract(merging.union([net, other])).items())
