"""The GPU that is not there refuses what CUDA refuses, and counts what makes the host wait."""

import gc

import pytest
import torch
import torch.nn.functional as F
from pretend_gpu import Forbidden, PretendGPU
from torch._subclasses.fake_tensor import FakeTensorMode

MIXED = {
    "add a number": lambda a, b: a + b.sum(),
    "where a number": lambda a, b: torch.where(a > 0, a, b.sum()),
    "index": lambda a, b: a[b.long()],
    "copy_": lambda a, b: a.clone().copy_(b),
    "add": lambda a, b: a + b,
    "cat": lambda a, b: torch.cat([a, b]),
    "index of the host": lambda a, b: b[a.long()],
    "index_select": lambda a, b: a.index_select(0, b[0].long()),
    "linear": lambda a, b: F.linear(a, b),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[1]),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
}
WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "index from the host": lambda x: x[[0, 1]],
    "tensor": lambda x: torch.tensor([1.0], device="cuda"),
    "to": lambda x: torch.ones(3).to(x.device),
    "copy_": lambda x: x.clone().copy_(torch.ones(3, 3)),
    "bincount": lambda x: torch.bincount(x[0].long()),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING = {
    "to, non-blocking": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "one_hot": lambda x: F.one_hot(x.long(), 3),
    "products": lambda x: (x * 2).relu() @ x,
    "index_select": lambda x: x.index_select(0, x[0].long()),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "a view": lambda x: x[:, 1:],
}


@pytest.fixture
def gpu():
    with PretendGPU() as there:
        yield there


def refuses(call, a, b):
    try:
        call(a, b)
    except (RuntimeError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize("name", MIXED)
def test_pretend_gpu__two_devices_in_one_operation(name):
    """What torch's own fake tensors refuse is refused (they let some things pass that CUDA does not)."""
    with FakeTensorMode():
        fake = refuses(MIXED[name], torch.zeros(3, 3, device="cuda"), torch.zeros(3, 3))
    with PretendGPU():
        assert refuses(MIXED[name], torch.zeros(3, 3).to("cuda"), torch.zeros(3, 3)) >= fake
    assert not torch.ones(2).is_cuda


@pytest.mark.parametrize("name", [*WAITING, *NOT_WAITING])
def test_pretend_gpu__what_waits_for_the_device_is_counted(gpu, name):
    x = torch.zeros(3, 3).to("cuda")
    with gpu.watch() as seen:
        (WAITING | NOT_WAITING)[name](x)
    assert len(seen.waits) == (name in WAITING)


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_pretend_gpu__what_a_capture_does_not_allow(gpu):
    x, host = torch.ones(3).to("cuda"), torch.ones(3)
    for step in (
        lambda: x.sum().item(),
        lambda: x + host.to("cuda", non_blocking=True),
        lambda: torch.cuda.synchronize(),
        lambda: x[x > 0],
    ):
        with pytest.raises(Forbidden, match="captured"):
            captured(step)
    with pytest.raises(Forbidden, match="numpy"):
        x.numpy()


def test_pretend_gpu__a_graph_does_not_keep_its_inputs_alive(gpu):
    y, inputs = torch.zeros(3).to("cuda"), [torch.ones(3).to("cuda")]
    graph = captured(lambda: y.add_(inputs[0]))
    graph.replay()
    inputs.clear()
    gc.collect()
    with pytest.raises(Forbidden, match="gone"):
        graph.replay()
