"""The GPU that is not there refuses what CUDA refuses, and counts what makes the host wait."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from pretend_gpu import Forbidden, PretendGPU
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap


@pytest.fixture
def gpu():
    with PretendGPU() as there:
        yield there


def test_tensors_say_where_they_are(gpu):
    x = torch.ones(2, 3)
    there = x.to("cuda")
    assert (x.device.type, there.device, there.is_cuda, there.get_device()) == ("cpu", torch.device("cuda:0"), True, 0)
    assert there.to("cuda") is there
    assert not there.cpu().is_cuda
    for made in (
        torch.zeros(2, device="cuda"), torch.zeros_like(there), there.new_zeros(2), torch.tensor([1], device="cuda"),
        torch.arange(3, device=there.device), there[0], there * 2, there @ there.T, F.one_hot(there.long(), 4),
        copy.deepcopy(there), torch.nn.Parameter(there), there.to(torch.float64), torch.rand_like(there), x.to(there),
    ):  # fmt: skip
        assert made.is_cuda
    for made in (torch.zeros(2), x * 2, x.new_zeros(2), torch.zeros_like(there, device="cpu")):
        assert not made.is_cuda
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to("cuda")
    assert all(tensor.is_cuda for tensor in (*net.parameters(), *net.buffers(), *copy.deepcopy(net).buffers()))
    net(there).sum().backward()
    assert all(p.grad.is_cuda for p in net.parameters())
    assert vmap(lambda row: row * row.new_ones(3).to(row.device))(there).is_cuda


def test_when_it_is_left_everything_is_as_before():
    names = "device", "is_cuda", "to", "cpu", "tolist", "numpy"
    before = torch.tensor, torch.autocast, torch.cuda.Stream, torch.cuda.is_available
    with PretendGPU():
        torch.ones(2).to("cuda")
    assert before == (torch.tensor, torch.autocast, torch.cuda.Stream, torch.cuda.is_available)
    assert not [name for name in names if name in vars(torch.Tensor)]
    assert not torch.ones(2).is_cuda


MIXED = {
    "add a number": lambda a, b: a + b.sum(),
    "where a number": lambda a, b: torch.where(a > 0, a, b.sum()),
    "index": lambda a, b: a[b.long()],
    "copy_": lambda a, b: a.clone().copy_(b),
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "index of the host": lambda a, b: b[a.long()],
    "index_select": lambda a, b: a.index_select(0, b[0].long()),
    "linear": lambda a, b: F.linear(a, b),
    "batch_norm": lambda a, b: F.batch_norm(a, b[0], b[1]),
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
}


@pytest.mark.parametrize("name", MIXED)
def test_two_devices_in_one_operation(name):
    """What torch's own fake tensors refuse is refused (they let some things pass that CUDA does not)."""
    with FakeTensorMode():
        fake = refuses(MIXED[name], torch.zeros(3, 3, device="cuda"), torch.zeros(3, 3))
    with PretendGPU():
        assert refuses(MIXED[name], torch.zeros(3, 3).to("cuda"), torch.zeros(3, 3)) >= fake


def refuses(call, a, b):
    try:
        call(a, b)
    except (RuntimeError, NotImplementedError):
        return True
    return False


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.sum()),
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
    "eigh": lambda x: torch.linalg.eigh(x @ x.T),
    "bincount": lambda x: torch.bincount(x[0].long()),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NOT_WAITING = {
    "to, non-blocking": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "one_hot": lambda x: F.one_hot(x.long(), 3),
    "products": lambda x: (x * 2).relu() @ x,
    "index_select": lambda x: x.index_select(0, x[0].long()),
    "sort": lambda x: x.sort(),
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "kthvalue": lambda x: x.kthvalue(2),
    "a view": lambda x: x[:, 1:],
}


@pytest.mark.parametrize("name", [*WAITING, *NOT_WAITING])
def test_what_waits_for_the_device_is_counted(gpu, name):
    x = torch.zeros(3, 3).to("cuda")
    with gpu.watch() as seen:
        (WAITING | NOT_WAITING)[name](x)
    assert len(seen.waits) == (name in WAITING)


def test_numpy_needs_the_host(gpu):
    with pytest.raises(Forbidden, match="numpy"):
        torch.ones(2).to("cuda").numpy()


def test_launches(gpu):
    x, net = torch.ones(4, 2, 8, 8).to("cuda"), nn.Conv2d(2, 3, 3).to("cuda")
    for call, expected in (
        (lambda: x[0].view(-1)[3:], 0),
        (lambda: torch.empty_like(x), 0),
        (lambda: x * 2 + 1, 2),
        (lambda: x.zero_(), 1),
        (lambda: net(x), 2),
        (lambda: torch._foreach_mul_([x[0], x[1]], 2.0), 1),
        (lambda: torch._foreach_zero_([x[0]] * 200), 2),
    ):
        with gpu.watch() as seen:
            call()
        assert seen.launches == expected


def captured(gpu, step, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def test_a_capture_repeats_backward_passes_and_what_is_read_by_index(gpu):
    net, rows, at = (
        nn.Linear(2, 1).to("cuda"),
        torch.arange(8.0).view(4, 2).to("cuda"),
        torch.zeros(1).long().to("cuda"),
    )

    def step():
        net.zero_grad()
        net(rows.index_select(0, at)).square().sum().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(net.parameters()), [0.01 * p.grad for p in net.parameters()])
        at.add_(1)

    graph, twin = captured(gpu, step), copy.deepcopy(net)
    at.zero_()
    for k in range(4):
        graph.replay()
        loss = twin(rows[k : k + 1]).square().sum()
        for p, g in zip(twin.parameters(), torch.autograd.grad(loss, list(twin.parameters()))):
            p.data -= 0.01 * g
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(net.parameters(), twin.parameters()))


def test_what_a_capture_does_not_allow(gpu):
    x, host = torch.ones(3).to("cuda"), torch.ones(3)
    for step in (
        lambda: x.sum().item(),
        lambda: x + host.to("cuda"),
        lambda: x + host.to("cuda", non_blocking=True),
        lambda: torch.cuda.synchronize(),
        lambda: x[x > 0],
    ):
        with pytest.raises(Forbidden, match="captured"):
            captured(gpu, step)


def test_a_graph_does_not_keep_its_inputs_alive(gpu):
    y, inputs = torch.zeros(3).to("cuda"), [torch.ones(3).to("cuda")]
    graph = captured(gpu, lambda: y.add_(inputs[0]))
    graph.replay()
    inputs.clear()
    gc.collect()
    with pytest.raises(Forbidden, match="gone"):
        graph.replay()
