"""Models are run to watch them: which module runs, where, and what happens if they cannot."""

import copy
import gc
import logging
import random
import threading
from collections import UserDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refused
from symmetric import Made
from torch import nn

import surgery
from surgery import torch_private
from surgery.errors import InternalError
from surgery.forward import call, observe, pause_collector, tensors_in, watching
from surgery.torch_private import Operations
from surgery.width.rules.registry import RULES
from surgery.width.trace import trace_model


class Looking(nn.Module):
    """Looks at a number, which the meta device does not have."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(self.a(x)) * (2 if x.sum().item() > 1e9 else 1)


class Noting(nn.Module):
    """Notes what the watch says, before and after a module of another model runs in another thread."""

    def __init__(self):
        super().__init__()
        self.stack, self.seen, self.other = None, [], [nn.Linear(1, 1)]  # in a list: no module of this model

    def forward(self, x):
        during = []
        self.other[0].register_forward_hook(lambda *_: during.append(list(self.stack)))
        thread = threading.Thread(target=self.other[0], args=(torch.ones(1),))
        self.seen.append(list(self.stack))
        thread.start()
        thread.join()
        self.seen += during
        return x


def test_forward__only_the_modules_of_the_model_are_watched():
    model = nn.Sequential(nn.Identity(), Noting())
    with watching(model) as model[1].stack:
        model(torch.ones(1))
        assert model[1].stack == [""]
        model[1].other[0](torch.ones(1))
    assert model[1].seen == [["", "", "1"]] * 2  # outside, the model itself, its second part
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_forward__why_a_model_does_not_run_on_the_meta_device_is_kept_and_logged(caplog):
    model, x = Looking(), torch.ones(2, 4)
    with caplog.at_level(logging.INFO, logger="surgery.forward"):
        found = trace_model(model, x)
    assert not found.on_meta
    assert found.model is model
    assert "meta" in found.why_not
    assert found.why_not in caplog.text
    plain = trace_model(nn.Linear(4, 2), x)
    assert (plain.on_meta, plain.why_not) == (True, "")
    assert plain.example.is_meta
    assert all(p.is_meta for p in plain.model.parameters())


def test_forward__what_runs_is_a_copy():
    model = Looking()
    result = observe(model, torch.ones(2, 4), lambda m, x: (m, m(x)))
    assert result.found[0] is not model
    assert result.model is model
    assert torch.equal(result.found[1], copy.deepcopy(model)(torch.ones(2, 4)))


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), Looking()])
def test_forward__a_wrong_rule_is_no_refusal(model, monkeypatch):
    def wrong(view, args, out):
        return view.axes_of(out)[:1]

    monkeypatch.setitem(RULES, "addmm", replace(RULES["addmm"], function=wrong))
    with pytest.raises(InternalError, match=r"the rule for aten::addmm \(.*wrong\) is wrong"):
        surgery.narrow(model, 0.5, torch.ones(3, 4))
    assert not issubclass(InternalError, surgery.SurgeryError)


def test_forward__every_mapping_holds_keyword_arguments():
    class Two(nn.Module):
        def forward(self, a, b):
            return a - b

    example = UserDict(b=torch.ones(2), a=torch.arange(2.0))
    assert call(Two(), example).tolist() == [-1, 0]
    assert [tensor.tolist() for tensor in tensors_in([example])] == [[1, 1], [0, 1]]
    result = observe(Two(), example, lambda model, given: call(model, given).device.type)
    assert result.found == "meta"
    assert all(tensor.is_meta for tensor in tensors_in(result.example))
    assert observe(Looking(), UserDict(x=torch.ones(2, 4)), call).found.shape == (2, 2)


def test_forward__composite_operations_are_taken_apart_in_inference_mode():
    net = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Softmax(1), nn.Flatten(), nn.Linear(8, 3))
    example = torch.zeros(2, 6)
    with torch.inference_mode():
        small, _ = surgery.narrow(net, 0.5, example)
    assert small[0].out_features == surgery.narrow(net, 0.5, example)[0][0].out_features == 4


class Recomputing(Operations):
    """Holds each result of the meta device against what the operation makes when it is asked again."""

    def run(self, func, args, kwargs):
        again = func(*args, **kwargs) if not func._schema.is_mutable else None
        result = self.result(func, args, kwargs)
        memory = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for a, b in zip(tensors_in(result), tensors_in(again)):
            known, new = (
                (t.shape, t.stride(), t.dtype, t.device, t.untyped_storage()._cdata in memory) for t in (a, b)
            )
            assert known == new, func
        return result


def test_forward__known_results_on_the_meta_device_have_the_form_of_new_ones(monkeypatch):
    monkeypatch.setattr(torch_private, "_FORMS", {})
    block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.GroupNorm(2, 4)).eval()
    ones, columns = torch.ones(2, 4, 4, 4), torch.ones(2, 4, 4, 4).to(memory_format=torch.channels_last)
    others = (ones.half(), ones.double(), ones.int(), ones.transpose(2, 3), ones[:1].expand(2, -1, -1, -1))
    with torch.no_grad(), Recomputing():
        for given in (ones, columns, *others):
            for x in (given.to("meta"), given.to("meta")):
                assert [(x + one).dtype for one in (1, 1.0, True)] == [x.dtype, torch.result_type(x, 1.0), x.dtype]
                assert torch.empty_like(x, device="cpu").device.type == "cpu"
                torch.cat([x, x], 1), x.topk(2), x.sum([1, 2]), torch.ops.aten._unsafe_view(x.contiguous(), [8, 16])
                if x.dtype is torch.float32:
                    block.to("meta")(x)
    assert torch_private._FORMS


def test_forward__operations_in_place_give_the_tensor_that_they_were_given_in_its_new_form(monkeypatch):
    monkeypatch.setattr(torch_private, "_FORMS", {})
    with torch.no_grad(), Operations():
        for _ in range(2):
            x = torch.ones(2, 1, 3, device="meta")
            assert (x.relu_() is x, x.add_(x, alpha=2) is x, x.zero_() is x) == (True, True, True)
            version = x._version
            assert x.mul_(2)._version == version + 1
            assert x.squeeze_(1).squeeze_(1).shape == (2, 3)
            assert x.unsqueeze_(0).transpose_(1, 2).shape == (1, 3, 2)
            assert x.resize_(5).resize_(5).shape == (5,)
            assert x.set_(torch.ones(4, device="meta")).shape == (4,)
            with pytest.raises(RuntimeError):
                x.add_(torch.ones(7, device="meta"))
    assert sum(form == () for form in torch_private._FORMS.values()) >= 4


def test_forward__what_is_not_on_the_meta_device_is_computed_anew():
    x = torch.ones(3)
    with Operations():
        first = x * 2
        x += 1
        second = x * 2
    assert (first.tolist(), second.tolist()) == ([2, 2, 2], [4, 4, 4])


def test_forward__what_a_module_s_own_hooks_compute_counts_as_the_module_s():
    net, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []
    net[1].register_forward_pre_hook(lambda module, args: seen.append(("before", stack[-1])))
    net[1].register_forward_hook(lambda module, args, output: seen.append(("after", stack[-1])))
    with watching(net) as stack:
        net(torch.ones(1, 2))
        assert stack == [""]
    assert seen == [("before", "1"), ("after", "1")]
    assert len(net[1]._forward_hooks) == len(net[1]._forward_pre_hooks) == 1


def test_forward__the_collector_of_garbage_waits_and_goes_on():
    def fails():
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        pause_collector()(fails)()
    assert gc.isenabled()
    gc.disable()
    try:
        with pause_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


class Nested(nn.Module):
    """Computes with nested tensors on the way."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        rows = torch.nested.nested_tensor(list(self.a(x)))
        return self.b(torch.nested.to_padded_tensor(rows, 0.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_forward__a_model_that_runs_but_cannot_be_followed_is_not_said_not_to_run():
    with refused("unsupported"):
        surgery.narrow(Nested(), 0.5, torch.zeros(2, 3, 4))
    with refused("run"):
        surgery.narrow(Nested(), 0.5, torch.zeros(2, 3, 5))


def states_of_draws():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("looks", [False, True], ids=["meta", "here"])
@pytest.mark.parametrize(
    "draw",
    [torch.rand, lambda _: torch.rand((), device="cpu").item(), lambda _: random.random(), lambda _: np.random.rand()],  # noqa: NPY002
    ids=["torch", "host", "python", "numpy"],
)
def test_forward__what_a_model_draws_in_evaluation_mode_is_nobody_else_s(draw, looks):
    def forward(net, x):
        times = 2 if looks and x.sum().item() > 1e9 else 1
        return net.b(net.a(x).relu() * draw(()) * times)

    net, x = Made(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2)), torch.zeros(2, 4)
    before = states_of_draws()
    small, _ = surgery.narrow(net, 0.5, x)  # each pass draws the same, so that none seems to be another
    surgery.layers(net, example=x)
    surgery.widths(net, x)
    surgery.symmetry.permute(net, {"a.weight:0": torch.arange(5, -1, -1)}, example=x)
    assert states_of_draws() == before
    assert small.a.out_features == 3


def test_forward__batches_are_drawn_from_the_caller_s_random_numbers():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.manual_seed(0)
    drawn = torch.rand(2, 6, 3)
    torch.manual_seed(0)
    repaired = surgery.symmetry.repair(net, batches=(torch.rand(6, 3) for _ in range(2)))
    means = net[0](drawn.flatten(0, 1)).mean(0)
    torch.testing.assert_close(repaired[1].running_mean, means)
