"""The same models on a GPU."""

import copy
import warnings

import pytest
import torch
from torch.func import functional_call, stack_module_state, vmap
from zoo_models import FAMILIES, inputs, quiet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.mark.parametrize("name", FAMILIES)
def test_gpu__the_same_weights_and_outputs_as_on_the_cpu(name):
    spec = quiet(name)
    here, there = (spec.build(torch.Generator().manual_seed(0), device).double() for device in ("cpu", "cuda"))
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b.cpu())
    x = inputs(spec)
    x = x if spec.tokens else x.double()
    for mode in (True, False):
        torch.testing.assert_close(there.train(mode)(x.cuda()).cpu(), here.train(mode)(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", FAMILIES)
def test_gpu__many_models_train_at_once(name):
    spec = quiet(name)
    models = [spec.build(torch.Generator().manual_seed(k), "cuda").double() for k in range(3)]
    x = inputs(spec).cuda()
    x = x if spec.tokens else x.double()
    expected = torch.stack([copy.deepcopy(model)(x) for model in models])
    params, buffers = stack_module_state(models)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an operation without a rule for vmap would run one by one
        out = vmap(lambda p, b: functional_call(models[0], {**p, **b}, (x,)))(params, buffers)
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", FAMILIES)
def test_gpu__bfloat16_autocast(name):
    spec = quiet(name)
    model = spec.build(torch.Generator().manual_seed(0), "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = model(inputs(spec).cuda())
    out.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
