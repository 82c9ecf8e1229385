import re

import pytest
import torch
import torchvision
from oracles import epoch_batches, local_sgd
from selection import some
from torch import nn

import surgery
import zoo
from fl import engine
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Job, Precision, check, train
from fl.engine import vmap as vmap_backend
from fl.engine.batches import make_batches
from fl.engine.objectives import cross_entropy, proximal
from fl.engine.optimizers import clipped, schedule

MODELS = [("cnn", None), ("cnn", "batch"), ("cnn", "group")]
MODELS += [("resnet20", None), ("resnet20", "static_batch"), ("resnet20", "group"), ("resnet20", "none")]
MODELS += [("preresnet20", "layer"), ("resnet20_fedmr", None)]


def several_rounds(fed, backend, rounds=3, objective=cross_entropy):
    """Trained stacks and losses of rounds that continue from one another, with the clients changing."""
    models = surgery.broadcast(fed.initial(), fed.participants)
    history = []
    for number in range(1, rounds + 1):
        rng = Rng(0, number)
        clients = fed.sample(rng)
        batches = make_batches([fed.clients[c].train for c in clients], clients, 2, 4, rng, "cpu")
        job = Job(fed.model, fed.data, batches, fed.local.optimizer, objective)
        (trained,) = train([(job, models, {"anchor": models})], backend)
        models = trained.states
        history.append(trained)
    return history


@pytest.mark.parametrize(("model", "norm"), some(MODELS, MODELS[1:7:2]))
def test_vmap_equals_loop_over_rounds_with_ragged_clients(make_federation, model, norm):
    depth = 2 if model == "resnet20_fedmr" else 3  # whole models: with fewer blocks float32 differs by more
    fed = make_federation(model, norm=norm, depth=depth, optimizer=SGD(lr=0.01, momentum=0.9, weight_decay=1e-3))
    assert len({len(split.train) for split in fed.clients}) == 4  # ragged: different numbers of steps
    for loop, vmap in zip(several_rounds(fed, "loop"), several_rounds(fed, "vmap"), strict=True):
        torch.testing.assert_close(vmap.loss, loop.loss, rtol=1e-5, atol=1e-5)
        assert list(vmap.states) == list(loop.states) == list(surgery.state(fed.model))
        for name in loop.states:
            torch.testing.assert_close(vmap.states[name], loop.states[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
@pytest.mark.parametrize("mu", some([0.0, 0.3], [0.3]))
@pytest.mark.parametrize(("model", "norm"), some(MODELS, [*MODELS[:2], *MODELS[4:6], MODELS[7]]))
def test_backends_equal_plain_pytorch(make_federation, backend, mu, model, norm):
    """float64, against a deep copy trained by torch.optim.SGD on batches written out sample by sample."""
    assert_equal_to_plain_pytorch(make_federation, backend, SGD(0.05, 0.9, 1e-2), mu, model, norm)


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
@pytest.mark.parametrize(
    "sgd",
    [
        SGD(0.05, 0.9, nesterov=True),
        SGD(0.05, 0.0, 1e-2, clip=0.5),  # of gradients with norms from 0.1 to 3: some steps are clipped
        SGD(0.05, 0.9, 1e-2, nesterov=True, clip=1.0),
    ],
    ids=["nesterov", "clip", "both"],
)
def test_every_setting_of_sgd_equals_plain_pytorch(make_federation, backend, sgd):
    assert_equal_to_plain_pytorch(make_federation, backend, sgd, 0.0, "resnet20", "group")


def assert_equal_to_plain_pytorch(make_federation, backend, sgd, mu, model, norm):
    fed = make_federation(model, norm=norm, dtype=torch.float64, optimizer=sgd)
    rng, clients = Rng(3, 1), [2, 0, 3]
    starts = surgery.stack(
        [{n: t + 0.01 * k if t.is_floating_point() else t for n, t in fed.initial().items()} for k in range(3)]
    )
    before = {name: tensor.clone() for name, tensor in starts.items()}
    batches = make_batches([fed.clients[c].train for c in clients], clients, 2, 4, rng, "cpu")
    job = Job(fed.model, fed.data, batches, sgd, proximal(mu))
    (trained,) = train([(job, starts, {"anchor": starts})], backend)
    assert all(torch.equal(starts[name], before[name]) for name in starts)  # the starts stay as they were

    for k, client in enumerate(clients):
        generator = rng.torch("batches", client)
        part = fed.clients[client].train
        rows = [row for _ in range(2) for row in epoch_batches(part, torch.randperm(len(part), generator=generator), 4)]
        x = fed.data.x.double() / 255 * 2 - 1
        start = surgery.unstack(starts)[k]
        expected, loss = local_sgd(
            fed.model, start, x, fed.data.y, rows, sgd.lr, sgd.momentum, sgd.weight_decay, mu, sgd.nesterov, sgd.clip
        )
        assert trained.loss[k].item() == pytest.approx(loss, rel=1e-9)
        for name in expected:
            torch.testing.assert_close(trained.states[name][k], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", some(["loop", "workers", "vmap"], ["loop", "vmap"]))
def test_a_torchvision_model_with_step_counters_trains(make_federation, backend):
    """Integer buffers advance by the client's own number of steps and stay integers."""
    net = torchvision.models.resnet18(num_classes=3, weights=None)
    net.conv1 = nn.Conv2d(1, 64, 3, bias=False)
    fed = make_federation(net, sizes=(3, 7), participants=2, backend=backend)
    trained = fed.train(surgery.broadcast(fed.initial(), 2), [0, 1], Rng(0, 1))
    assert trained.states["bn1.num_batches_tracked"].tolist() == [2, 4]
    assert surgery.average(trained.states)["bn1.num_batches_tracked"].item() == 4


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_frozen_parameters_are_carried_unchanged(make_federation, backend):
    fed = make_federation("cnn", backend=backend)
    fed.model.conv1.requires_grad_(False)
    start = fed.initial()
    trained = fed.train(surgery.broadcast(start, 3), [0, 1, 2], Rng(0, 1))
    assert torch.equal(trained.states["conv1.weight"], surgery.broadcast(start, 3)["conv1.weight"])
    assert not torch.equal(trained.states["conv2.weight"], surgery.broadcast(start, 3)["conv2.weight"])


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_tied_parameters_stay_tied(make_federation, backend):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.head(self.b(torch.relu(self.a(x.flatten(1)))))

    net = Tied().double()
    fed = make_federation(net, sizes=(8, 4), participants=2, backend=backend)
    trained = fed.train(surgery.broadcast(fed.initial(), 2), [0, 1], Rng(0, 1))
    generator = Rng(0, 1).torch("batches", 0)
    rows = [r for _ in range(2) for r in epoch_batches(torch.arange(8), torch.randperm(8, generator=generator), 4)]
    x = fed.data.x.double() / 255 * 2 - 1
    expected, _ = local_sgd(net, net.state_dict(), x, fed.data.y, rows, 0.01, 0.9)
    torch.testing.assert_close(trained.states["a.weight"][0], expected["a.weight"])


class Moving(nn.Module):
    """Puts a new tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        out = self.fc(x.flatten(1))
        if self.training:
            self.mean = 0.9 * self.mean + out.detach().mean(0)
        return out - self.mean


def test_buffers_that_are_replaced_are_kept_or_refused(make_federation):
    fed = make_federation(Moving().double(), backend="loop")
    starts, clients, rng = surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)
    loop, workers = (fed.with_local(backend=b).train(starts, clients, rng).states for b in ("loop", "workers"))
    assert (loop["mean"] != 0).any(1).all()
    assert all(torch.equal(loop[name], workers[name]) for name in loop)
    with pytest.raises(FLError, match="in the place of the buffer mean"):
        fed.with_local(backend="vmap").train(starts, clients, rng)


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_objectives_may_call_with_some_parameters_and_other_models(make_federation, backend):
    """What is left out is the client's own; a teacher that the objective knows gets no gradient."""
    teacher = nn.Linear(64, 3).double()

    def objective(call, params, context, batch):
        x, y = batch
        moved = {"fc2.bias": params["fc2.bias"] * 2}
        soft = teacher(x.flatten(1)).log_softmax(1).exp()
        return nn.functional.cross_entropy(call(moved, x), y) + nn.functional.cross_entropy(call(params, x), soft)

    fed = make_federation("cnn", dtype=torch.float64, backend=backend)
    starts = surgery.stack([{n: t + 0.1 * k for n, t in fed.initial().items()} for k in range(3)])
    trained = fed.train(starts, [0, 1, 2], Rng(0, 1), objective)
    assert all(p.grad is None for p in teacher.parameters())
    reference = fed.with_local(backend="loop").train(starts, [0, 1, 2], Rng(0, 1), objective)
    for name in starts:
        torch.testing.assert_close(trained.states[name], reference.states[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_auto_takes_another_backend_wherever_one_refuses(make_federation, monkeypatch, caplog, where):
    """... and says so once; what all refuse is the model's own fault and told as it is."""
    net = nn.Sequential(
        nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3, momentum=None if where == "forward" else 0.1), nn.Flatten()
    )
    fed = make_federation(net, optimizer=SGD(0.1))
    monkeypatch.setattr(engine, "ranked", lambda groups: ["vmap", "loop"])
    if where == "backward":
        monkeypatch.setattr(vmap_backend.torch.autograd, "grad", refuse(RuntimeError("LSE is not correctly aligned")))
    starts = surgery.broadcast(fed.initial(), 3)
    for number in (1, 2):
        trained = fed.train(starts, [0, 1, 2], Rng(0, number))
    monkeypatch.undo()
    loop = fed.with_local(backend="loop").train(starts, [0, 1, 2], Rng(0, 2))
    assert all(torch.equal(trained.states[name], loop.states[name]) for name in starts)
    (record,) = [record.getMessage() for record in caplog.records]
    assert record.startswith("warning: Sequential trains with --backend loop, since vmap refuses: ")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        FLError("the setting cannot be"),
        ValueError("of an objective"),
    ],
)
def test_auto_raises_what_is_no_refusal(make_federation, monkeypatch, error):
    fed = make_federation("cnn")
    monkeypatch.setitem(engine.BACKENDS, "vmap", refuse(error))
    monkeypatch.setattr(engine, "ranked", lambda groups: ["vmap", "loop"])
    with pytest.raises(type(error), match=re.escape(str(error))):
        fed.train(surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1))


def refuse(error):
    def raising(*_, **__):
        raise error

    return raising


def test_auto_leaves_a_fault_of_the_model_what_it_is(make_federation, caplog):
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x):
            raise KeyError("weights of the moon")

    fed = make_federation(Broken())
    with pytest.raises(KeyError, match="weights of the moon"):
        fed.train(surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1))
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "threads", "model", "shape", "expected"),
    [
        ("cpu", 2, "cnn", (1, 28, 28), ["workers", "loop"]),
        ("cpu", 1, "cnn", (1, 28, 28), ["loop"]),
        ("cpu", 2, "resnet20", (3, 8, 8), ["vmap", "workers", "loop"]),
        ("cuda", 2, "cnn", (1, 28, 28), ["graphs", "vmap", "loop"]),
        ("cuda", 2, "resnet20", (3, 8, 8), ["vmap", "graphs", "loop"]),
    ],
)
def test_the_order_in_which_auto_tries_backends(monkeypatch, device, threads, model, shape, expected):
    """Small steps of several clients as one program, the others as graphs or in threads."""
    monkeypatch.setattr(Job, "device", torch.device(device))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, y = torch.zeros(4, *shape, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    model = zoo.create(model, in_channels=shape[0], image_size=shape[1])

    def found(clients, groups=1, last="filled", **settings):
        batches = make_batches([torch.arange(4)] * clients, range(clients), 1, 4, Rng(0), "cpu", last=last)
        job = Job(model, Dataset("zeros", x, y, x, y, 10), batches, SGD(), cross_entropy, **settings)
        return engine.ranked([(job, {}, {})] * groups)

    alone = "graphs" if device == "cuda" else "workers"
    others = [name for name in expected if name == alone] if device == "cuda" else ["workers"] * (threads > 1)
    assert found(3) == expected
    assert found(2, groups=2) == found(3, precision=Precision(channels_last=True)) == [*others, "loop"]
    assert found(3, last="partial") == (["loop"] if device == "cuda" else [*others, "loop"])
    assert found(2) == (["graphs", "vmap", "loop"] if device == "cuda" else ["loop"])


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_whatever_mode_of_autograd_surrounds_it(make_federation, backend):
    fed = make_federation("cnn", norm="batch", backend=backend)
    starts, clients = surgery.broadcast(fed.initial(), 3), [0, 1, 2]
    expected = fed.train(starts, clients, Rng(0, 1))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            trained = fed.train(starts, clients, Rng(0, 1))
        assert all(torch.equal(trained.states[name], expected.states[name]) for name in starts)


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_losses_of_short_numbers_are_summed_in_longer_ones(make_federation, backend):
    """bfloat16 cannot count beyond 256."""
    fed = make_federation(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(torch.bfloat16), sizes=(400,), participants=1,
        epochs=1, batch_size=1, optimizer=SGD(1e-9, 0.0), backend=backend,
    )  # fmt: skip
    loss = fed.train(surgery.broadcast(fed.initial(), 1), [0], Rng(0, 1)).loss
    assert loss.dtype == torch.float32
    data = fed.data
    with torch.no_grad():
        expected = nn.functional.cross_entropy(fed.model(data.normalise(data.x, torch.bfloat16)).float(), data.y)
    assert loss.item() == pytest.approx(expected.item(), rel=0.02)


class Counting(nn.Module):
    """Has a buffer that is no state, updated in training, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.fc, self.unused = nn.Linear(64, 3), nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        out = self.fc(x.flatten(1))
        if self.training:
            self.mean.mul_(0.9).add_(out.detach().mean(0))
        return out - self.mean


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_non_persistent_buffers_do_not_leak_and_unused_parameters_stay(make_federation, backend):
    fed = make_federation(Counting().double(), backend=backend, optimizer=SGD(weight_decay=0.1))
    start = surgery.broadcast(fed.initial(), 3)
    trained = fed.train(start, [2, 1, 0], Rng(0, 1))
    assert fed.model.mean.abs().max() == 0
    assert torch.equal(trained.states["unused.weight"], start["unused.weight"])
    alone = fed.train(surgery.broadcast(fed.initial(), 1), [0], Rng(0, 1))
    for name in start:
        torch.testing.assert_close(trained.states[name][2], alone.states[name][0], rtol=1e-12, atol=1e-12)


def test_models_that_cannot_be_trained_are_refused_by_name(make_federation):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x):
            return self.fc(nn.functional.rrelu(x.flatten(1), training=self.training))

    counting = nn.Sequential(nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3, momentum=None), nn.Flatten())
    for net, backend, message in (
        (Noisy(), "loop", "Noisy draws from torch's global generator"),
        (Noisy(), "workers", "Noisy draws from torch's global generator"),
        (Noisy(), "vmap", "Noisy cannot train side by side"),
        (counting, "vmap", "cannot train side by side.*--backend loop"),
    ):
        fed = make_federation(net, backend=backend)
        with pytest.raises(FLError, match=message):
            fed.train(surgery.broadcast(fed.initial(), 1), [2], Rng(0, 1))
    with pytest.raises(FLError, match="all are frozen"):
        make_federation(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).requires_grad_(False))


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
def test_one_start_a_client(make_federation, backend):
    fed = make_federation("cnn", backend=backend)
    for k in (2, 4):
        with pytest.raises(FLError, match=f"{k} starting states for 3 clients"):
            fed.train(surgery.broadcast(fed.initial(), k), [0, 1, 2], Rng(0, 1))


def test_batches_follow_their_definition():
    part = torch.tensor([10, 11, 12])
    batches = make_batches([part, torch.arange(8)], [5, 6], epochs=2, size=4, rng=Rng(1, 2), device="cpu")
    assert batches.steps == (2, 4)
    assert batches.index.shape == (2, 4, 4)
    for epoch in batches.index[0, :2]:
        assert epoch[:3].sort().values.tolist() == [10, 11, 12]  # a permutation ...
        assert epoch[3] == epoch[0]  # ... filled from its own start
    for epoch in batches.index[1].reshape(2, 8):
        assert epoch.sort().values.tolist() == list(range(8))


def test_batches_of_a_client_do_not_depend_on_the_others():
    parts = {c: torch.arange(c, c + 9) for c in range(4)}
    together = make_batches([parts[c] for c in (3, 1)], (3, 1), 2, 4, Rng(0, 7), "cpu")
    alone = make_batches([parts[1]], (1,), 2, 4, Rng(0, 7), "cpu")
    later = make_batches([parts[1]], (1,), 2, 4, Rng(0, 8), "cpu")
    assert torch.equal(together.index[1], alone.index[0])
    assert not torch.equal(alone.index, later.index)


def test_unknown_backends_are_refused(make_federation):
    with pytest.raises(FLError, match="there are auto, loop, workers, vmap, graphs"):
        make_federation("cnn", backend="magic")
    with pytest.raises(FLError, match="graphs needs a CUDA device"):
        make_federation("cnn", backend="graphs")
    with pytest.raises(FLError, match="workers is for the CPU"):
        check("workers", torch.device("cuda"), Precision())


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
@pytest.mark.parametrize("chunk", some([1, 2, 3, 9], [2]))
def test_a_cohort_in_parts_is_the_whole(make_federation, backend, chunk):
    whole = make_federation("resnet20", backend=backend, dtype=torch.float64)
    parts = whole.with_local(max_parallel_clients=chunk)
    starts = surgery.stack([{n: t + 0.01 * k for n, t in whole.initial().items()} for k in range(4)])
    context = {"anchor": starts}
    a, b = (fed.train(starts, [3, 1, 0, 2], Rng(0, 1), proximal(0.1), context) for fed in (whole, parts))
    assert a.sizes == b.sizes == (5, 7, 3, 12)
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-9, atol=1e-9)
    for name in a.states:
        torch.testing.assert_close(a.states[name], b.states[name], rtol=1e-9, atol=1e-9)


def test_the_learning_rate_follows_its_schedule(make_federation):
    fed = make_federation("cnn", optimizer=SGD(0.1))
    late = fed.with_local(schedule=schedule("step", 8))
    starts = surgery.broadcast(fed.initial(), 2)
    for number, lr in ((4, 0.1), (5, 0.01), (7, 0.001)):
        trained = late.train(starts, [0, 1], Rng(0, number))
        expected = fed.with_local(optimizer=SGD(lr)).train(starts, [0, 1], Rng(0, number))
        for name in trained.states:
            torch.testing.assert_close(trained.states[name], expected.states[name])


def test_scalar_parameters_are_clipped_alike():
    scalar, vector = torch.tensor(3.0), torch.tensor([0.0, 4.0])
    one = clipped([scalar, vector], 1.0, lead=0)
    two = clipped([scalar[None], vector[None]], 1.0, lead=1)
    torch.testing.assert_close(one[0], torch.tensor(0.6))
    torch.testing.assert_close([g[0] for g in two], one)


def test_schedules_end_where_they_should():
    assert [schedule("step", 1)(1), schedule("step", 2)(1)] == [1, 1]  # the first round is never decayed
    assert [schedule("constant", 10)(r) for r in (1, 10)] == [1, 1]
    assert [schedule("step", 400, 0.1, (0.375, 0.625))(r) for r in (150, 151, 250, 251)] == pytest.approx(
        [1, 0.1, 0.1, 0.01]  # HeteroFL's CIFAR setting: x0.1 at 150 and 250
    )
    cosine = [schedule("cosine", 20)(r) for r in range(1, 21)]
    assert cosine[0] == 1
    assert cosine == sorted(cosine, reverse=True)
    assert 0 < cosine[-1] < 0.01
    for bad in ({"name": "linear"}, {"name": "step", "at": (1.5,)}, {"name": "step", "factor": 0.0}):
        with pytest.raises(FLError):
            schedule(**{"rounds": 10, **bad})
