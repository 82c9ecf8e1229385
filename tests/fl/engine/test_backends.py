"""Local training: every backend is plain PyTorch, whatever is trained and how; what none of them can is refused."""

import re
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from oracles import epoch_batches, local_training
from refusals import fl_refused
from rounds import assert_same, row
from selection import some
from torch import nn
from torch.utils.checkpoint import checkpoint

import fl
import surgery
import zoo
from fl import engine
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Adam, Job, Precision, check
from fl.engine import vmap as vmap_backend
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.engine.eager import workers
from fl.engine.objectives import cross_entropy, proximal, with_logits
from fl.engine.optimizers import schedule
from fl.federation import Federation, LocalTraining
from fl.partition import Split

BACKENDS = ["loop", "workers", "vmap"]


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


def large():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.Linear(512, 3))


def smooth():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 3))


class Odd(nn.Module):
    """Tied, frozen and unused parameters, a counter of steps, and a buffer that changes and is no state."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3)
        self.b.weight = self.a.weight
        self.frozen, self.unused, self.norm = nn.Linear(3, 3).requires_grad_(False), nn.Linear(2, 2), nn.BatchNorm1d(64)
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        out = self.frozen(self.head(self.norm(self.b(torch.tanh(self.a(x.flatten(1)))))))
        if self.training:
            self.mean.mul_(0.9).add_(out.detach().mean(0))
        return out - self.mean


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


class Dropping(nn.Module):
    """A model whose forward pass is random."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Linear(108, 3)

    def forward(self, x):
        return self.second(F.dropout(F.dropout2d(self.first(x), 0.3), 0.5, self.training).flatten(1))


DECAYING = SGD(0.05, 0.9, 1e-2)
PEERS = {  # name: (model, its norm, optimizer, more settings)
    **{
        f"{model}, {norm} norm": (model, norm, DECAYING, {})
        for model, norm in [
            ("cnn", None), ("cnn", "batch"), ("cnn", "group"), ("resnet20", None), ("resnet20", "static_batch"),
            ("resnet20", "group"), ("resnet20", "none"), ("preresnet20", "layer"), ("resnet20_fedmr", None),
        ]
    },
    "odd": (Odd, None, SGD(0.01, 0.9, 0.1), {}),
    "moving": (Moving, None, DECAYING, {}),
    "nesterov": ("resnet20", "group", SGD(0.05, 0.9, nesterov=True), {}),
    "clip": ("resnet20", "group", SGD(0.05, 0.0, 1e-2, clip=0.5), {}),  # gradients have norms from 0.1 to 3
    "nesterov and clip": ("resnet20", "group", SGD(0.05, 0.9, 1e-2, nesterov=True, clip=1.0), {}),
    "adam": ("cnn", "group", Adam(0.01), {}),
    "all of adam": ("cnn", "group", Adam(0.003, 0.8, 0.9, 1e-6, weight_decay=0.1, clip=0.5), {}),
    "adamw": ("cnn", "group", Adam(0.003, 0.8, 0.9, 1e-6, weight_decay=0.5, clip=0.5, decoupled=True), {}),
    **{
        f"partial batches of {size}": (smooth, None, DECAYING, {"batch_size": size, "last_batch": "partial"})
        for size in (4, 5, 100)
    },
}  # fmt: skip
SLOW = (
    "cnn, group norm", "resnet20, None norm", "resnet20, group norm", "resnet20, none norm",
    "resnet20_fedmr, None norm",
    "nesterov", "clip", "adam", "partial batches of 4",
)  # fmt: skip
PAIRS = [  # `vmap` refuses two of them, see below
    (case, backend)
    for case in PEERS
    for backend in BACKENDS
    if backend != "vmap" or case[:7] not in ("moving", "partial")
]


QUICK = [  # `workers` is `loop` in threads
    (case, backend)
    for case, backend in PAIRS
    if case not in SLOW and (backend != "workers" or case.startswith(("cnn", "nesterov", "moving")))
]


@pytest.mark.parametrize(("case", "backend"), some(PAIRS, QUICK))
def test_backends__equal_plain_pytorch(make_federation, case, backend):
    """float64, a proximal term, ragged clients with starts of their own, each against a deep copy trained by
    torch.optim on batches written out sample by sample.
    """
    model, norm, optimizer, settings = PEERS[case]
    torch.manual_seed(0)
    if isinstance(model, str):
        settings = {**settings, "norm": norm}
    else:
        model = model().double()
    fed = make_federation(model, dtype=torch.float64, optimizer=optimizer, backend=backend, **settings)
    rng, clients, mu = Rng(3, 1), [0, 2, 3], 0.3
    starts = surgery.stack(
        [{n: t + 0.01 * k if t.is_floating_point() else t for n, t in fed.initial().items()} for k in range(3)]
    )
    before = {name: tensor.clone() for name, tensor in starts.items()}
    trained = fed.train(starts, clients, rng, proximal(mu), {"anchor": starts})
    assert_same(starts, before)

    def make(parameters):
        if isinstance(optimizer, SGD):
            return torch.optim.SGD(
                parameters, optimizer.lr, optimizer.momentum, weight_decay=optimizer.weight_decay,
                nesterov=optimizer.nesterov,
            )  # fmt: skip
        betas = (optimizer.beta1, optimizer.beta2)
        kind = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
        return kind(parameters, optimizer.lr, betas, optimizer.eps, optimizer.weight_decay)

    x = fed.data.x.double() / 255 * 2 - 1
    for k, client in enumerate(clients):
        generator, part = rng.torch("batches", client), fed.clients[client].train
        batches = []
        for _ in range(fed.local.epochs):
            order = torch.randperm(len(part), generator=generator)
            batches += epoch_batches(part, order, min(fed.local.batch_size, 12), fed.local.last_batch == "partial")
        start = {name: tensor[k] for name, tensor in starts.items()}
        expected, loss = local_training(fed.model, start, x, fed.data.y, batches, make, mu, optimizer.clip)
        assert trained.loss[k].item() == pytest.approx(loss, rel=1e-9)
        expected = {name: expected[name] for name in trained.states}  # of tied tensors a state has one
        torch.testing.assert_close(row(trained.states, k), expected, rtol=1e-7, atol=1e-9)
    assert not any(b.any() for name, b in fed.model.named_buffers() if name == "mean")  # nothing leaks into the model


def trained(fed, backend, k=3, number=1, **how):
    """The first k clients from one start."""
    starts = surgery.broadcast(fed.initial(), k)
    return fed.with_local(backend=backend).train(starts, list(range(k)), Rng(0, number), **how)


def assert_close(one, other, rtol=1e-9, atol=1e-9):
    for part, expected in ((one.loss, other.loss), (one.states, other.states)):
        torch.testing.assert_close(part, expected, rtol=rtol, atol=atol)


RANDOM = {
    "dropout": (Dropping, {}),
    "crops and flips": ("cnn", {"augment": Augment(crop=2, flip=True)}),
    "two steps on a batch": (smooth, {"repeats": 2}),
}


@pytest.mark.parametrize("case", RANDOM)
def test_backends__random_steps_with_partial_batches_are_the_same_in_every_backend(make_federation, case):
    model, settings = RANDOM[case]
    fed = make_federation(model if isinstance(model, str) else model(), last_batch="partial", **settings)
    assert_close(trained(fed, "workers", 4), trained(fed, "loop", 4), rtol=1e-4, atol=1e-5)


def test_backends__values_of_samples_stay_with_them(make_federation):
    fed = make_federation("cnn", last_batch="partial")
    logits = torch.randn(len(fed.data.y), 3, generator=torch.Generator().manual_seed(0))
    how = {"objective": with_logits(cross_entropy), "per_sample": logits}
    assert_close(trained(fed, "workers", 4, **how), trained(fed, "loop", 4, **how), rtol=1e-4, atol=1e-5)
    swapped = {**how, "per_sample": logits.flip(0)}
    assert not torch.allclose(trained(fed, "loop", 4, **swapped).loss, trained(fed, "loop", 4, **how).loss)


def test_backends__of_text_every_token_counts_once():
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randint(9, (15, 6), generator=draw) for _ in range(2))
    data, none = Dataset("random", x.int(), y, x[:2].int(), y[:2], 9), torch.empty(0, dtype=torch.int64)
    parts = [Split(part, none, none) for part in torch.arange(15).split([3, 7, 4, 1])]
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    fed = Federation(net, data, parts, 2, LocalTraining(1, 4, SGD(0.0), last_batch="partial"))
    loop = trained(fed, "loop", 4)
    assert_close(trained(fed, "workers", 4), loop, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="none").view(15, 6)
    assert losses[:3].mean().item() == pytest.approx(loop.loss[0].item(), rel=1e-5)
    assert losses[14:].mean().item() == pytest.approx(loop.loss[3].item(), rel=1e-5)


def test_backends__a_gpu_agrees(cuda, make_federation):
    fed = make_federation("cnn", last_batch="partial", augment=Augment(crop=2, flip=True))
    expected = trained(fed, "loop")
    moved = replace(fed, model=fed.model.to("cuda"), data=fed.data.to("cuda"))
    for backend in ("loop", "auto"):
        states = {name: tensor.cpu() for name, tensor in trained(moved, backend).states.items()}
        torch.testing.assert_close(states, expected.states, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends__objectives_may_call_with_some_parameters_and_other_models(make_federation, backend):
    """What is left out is the client's own; a teacher that the objective knows gets no gradient."""
    teacher = nn.Linear(64, 3).double()

    def objective(call, params, context, batch):
        x, y = batch
        moved = {"fc2.bias": params["fc2.bias"] * 2}
        soft = teacher(x.flatten(1)).log_softmax(1).exp()
        return F.cross_entropy(call(moved, x), y) + F.cross_entropy(call(params, x), soft)

    fed = make_federation("cnn", dtype=torch.float64, backend=backend)
    starts = surgery.stack([{n: t + 0.1 * k for n, t in fed.initial().items()} for k in range(3)])
    found = fed.train(starts, [0, 1, 2], Rng(0, 1), objective)
    assert all(p.grad is None for p in teacher.parameters())
    assert_close(found, fed.with_local(backend="loop").train(starts, [0, 1, 2], Rng(0, 1), objective))


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends__whatever_mode_of_autograd_surrounds_it(make_federation, backend):
    fed = make_federation("cnn", norm="batch")
    expected = trained(fed, backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = trained(fed, backend)
        assert_same(found.states, expected.states)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends__losses_of_short_numbers_are_summed_in_longer_ones(make_federation, backend):
    """bfloat16 cannot count beyond 256."""
    one_step = {"epochs": 1, "batch_size": 1, "optimizer": SGD(1e-9, 0.0)}
    fed = make_federation(linear().to(torch.bfloat16), sizes=(400,), participants=1, **one_step)
    loss, data = trained(fed, backend, 1).loss, fed.data
    assert loss.dtype == torch.float32
    with torch.no_grad():
        x = data.normalise(data.x[:400], torch.bfloat16)
        assert loss.item() == pytest.approx(F.cross_entropy(fed.model(x).float(), data.y[:400]).item(), rel=0.01)


@pytest.mark.parametrize("backend", ["loop", "workers"])
def test_backends__channels_last_is_a_layout_only(make_federation, backend):
    fed = make_federation("resnet20", dtype=torch.float64)
    last = fed.with_local(precision=Precision(channels_last=True))
    plain, laid = (trained(f, backend) for f in (fed, last))
    assert_close(laid, plain)
    assert all(laid.states[name].stride() == tensor.stride() for name, tensor in plain.states.items())
    state, seen = fed.initial(), []
    convolution = next(m for m in fed.model.modules() if isinstance(m, nn.Conv2d))
    handle = convolution.register_forward_hook(lambda *given: seen.append(given[2].stride()[1]))
    logits = [f.predict(state, fed.data.test_x[:9]) for f in (fed, last)]
    handle.remove()
    assert seen == [64, 1]  # of 8x8 images: in prediction as well
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends__bf16_computes_in_bfloat16_and_keeps_weights(make_federation, backend):
    fed = make_federation("cnn", optimizer=SGD(0.01, 0.0))
    exact, rough = (trained(fed.with_local(precision=Precision(name)), backend) for name in ("float32", "bf16"))
    for name, tensor in exact.states.items():
        assert rough.states[name].dtype == torch.float32
        difference = (rough.states[name] - tensor).norm() / (tensor - fed.initial()[name]).norm()
        assert 0 < difference < 0.2, name


def test_backends__the_learning_rate_follows_its_schedule(make_federation):
    fed = make_federation("cnn", optimizer=SGD(0.1))
    late = fed.with_local(schedule=schedule("step", 8))
    for number, lr in ((4, 0.1), (5, 0.01), (7, 0.001)):
        expected = trained(fed.with_local(optimizer=SGD(lr)), "loop", number=number)
        assert_close(trained(late, "loop", number=number), expected, rtol=1e-5, atol=1e-6)


# Which backend trains, and what is refused


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_backends__auto_takes_another_backend_wherever_one_refuses(make_federation, monkeypatch, caplog, where):
    """... and says so once; what all refuse is the model's own fault and told as it is."""
    momentum = None if where == "forward" else 0.1
    fed = make_federation(nn.Sequential(nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3, momentum=momentum), nn.Flatten()))
    monkeypatch.setattr(engine, "rank_backends", lambda groups: ["vmap", "loop"])
    if where == "backward":
        monkeypatch.setattr(vmap_backend.torch.autograd, "grad", refuse(RuntimeError("LSE is not correctly aligned")))
    for number, clients in ((1, 4), (2, 3)):  # another choice has to be made in the second round
        found = trained(fed, "auto", clients, number)
    monkeypatch.undo()
    assert_same(found.states, trained(fed, "loop", number=2).states)
    (record,) = [record.getMessage() for record in caplog.records]
    assert record.startswith("warning: Sequential trains with --backend loop, since vmap refuses: ")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        FLError("the setting cannot be"), ValueError("of an objective"), KeyError("of the model"),
    ],
)  # fmt: skip
def test_backends__auto_raises_what_is_no_refusal(make_federation, monkeypatch, caplog, error):
    monkeypatch.setitem(engine.BACKENDS, "vmap", refuse(error))
    monkeypatch.setattr(engine, "rank_backends", lambda groups: ["vmap", "loop"])
    with pytest.raises(type(error), match=re.escape(str(error))):
        trained(make_federation("cnn"), "auto")
    assert not caplog.records


def refuse(error):
    def raising(*_, **__):
        raise error

    return raising


@pytest.mark.parametrize(
    ("threads", "model", "shape", "expected"),
    [
        (2, "cnn", (1, 28, 28), ["workers", "loop"]),
        (1, "cnn", (1, 28, 28), ["loop"]),
        (2, "resnet20", (3, 8, 8), ["vmap", "workers", "loop"]),
    ],
)
def test_backends__the_order_in_which_auto_tries_backends_on_the_cpu(monkeypatch, threads, model, shape, expected):
    """Small steps of several clients as one program, others in threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, y = torch.zeros(4, *shape, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    model = zoo.create(model, in_channels=shape[0], image_size=shape[1])

    def found(clients, groups=1, last="filled", **settings):
        batches = make_batches([torch.arange(4)] * clients, range(clients), 1, 4, Rng(0), "cpu", last=last)
        job = Job(model, Dataset("zeros", x, y, x, y, 10), batches, SGD(), cross_entropy, **settings)
        return engine.rank_backends([(job, {}, {})] * groups)

    others = ["workers"] * (threads > 1)
    assert found(3) == expected
    assert found(2, groups=2) == found(3, precision=Precision(channels_last=True)) == [*others, "loop"]
    assert found(3, last="partial") == [*others, "loop"]
    assert found(2) == ["loop"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "magic"}, "there are auto, loop, workers, vmap, graphs"),
        ({"backend": "graphs"}, "CUDA"),
        ({"backend": "vmap", "last_batch": "partial"}, "--backend"),
        ({"backend": "vmap", "precision": Precision(channels_last=True)}, "--channels-last.*--backend loop"),
        ({"precision": Precision("tf32")}, "CUDA"),
        ({"precision": Precision("fp8")}, "there are float32, tf32, bf16"),
        ({"last_batch": "half"}, "there are filled, partial"),
        ({"augment": Augment(crop=8)}, "--crop"),
        ({"epochs": 0}, r"epochs=0\): give 1 or more"),
    ],
)
def test_backends__settings_that_cannot_be_are_refused(make_federation, settings, message):
    with pytest.raises(FLError, match=message):
        make_federation("cnn", **settings)


@pytest.mark.parametrize(("backend", "message"), [("workers", "CPU"), ("graphs", "--backend")])
def test_backends__settings_that_a_gpu_cannot_have_are_refused(backend, message):
    with fl_refused("unsupported", message):
        check(backend, torch.device("cuda"), Precision(), partial=True)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(F.rrelu(x.flatten(1), training=self.training))


class Saving(nn.Linear):
    def forward(self, x):
        return checkpoint(lambda t: F.dropout(super(Saving, self).forward(t)), x.flatten(1), use_reentrant=False)


COUNTING = nn.Sequential(nn.Conv2d(1, 3, 8), nn.BatchNorm2d(3, momentum=None), nn.Flatten())
NORM = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("net", "backend", "settings", "message"),
    [
        (Noisy(64, 3), "loop", {}, "Noisy draws from torch's global generator"),
        (Noisy(64, 3), "workers", {}, "Noisy draws from torch's global generator"),
        (nn.Sequential(nn.Flatten(), nn.AlphaDropout(), nn.Linear(64, 3)), "loop", {}, "AlphaDropout"),
        (Noisy(64, 3), "vmap", {}, "Noisy cannot train side by side"),
        (COUNTING, "vmap", {}, "--backend"),
        (Saving(64, 3), "loop", {}, "activation checkpointing"),
        (Saving(64, 3), "workers", {}, "activation checkpointing"),
        (Moving(), "vmap", {}, "in the place of the buffer mean"),
        (NORM, "loop", {"batch_size": 1}, "--batch-size"),
        (NORM, "loop", {"batch_size": 2, "last_batch": "partial"}, "--last-batch"),
    ],
)
def test_backends__models_that_cannot_be_trained_are_refused_by_name(make_federation, net, backend, settings, message):
    with pytest.raises(FLError, match=message):
        trained(make_federation(net, **settings), backend)


@pytest.mark.parametrize(("net", "backend", "expected"), [(linear, "loop", 1), (linear, "vmap", 1), (large, "loop", 2)])
def test_backends__tiny_steps_take_one_thread(make_federation, net, backend, expected):
    seen, before = set(), torch.get_num_threads()

    def objective(call, params, context, batch):
        seen.add(torch.get_num_threads())
        return cross_entropy(call, params, context, batch)

    fed = make_federation(net(), backend=backend, batch_size=32)
    torch.set_num_threads(2)
    try:
        fed.train(surgery.broadcast(fed.initial(), 2), [0, 1], Rng(0, 1), objective)
        assert (seen, torch.get_num_threads()) == ({expected}, 2)
    finally:
        torch.set_num_threads(before)


def test_backends__workers_stop_at_the_first_error_and_leave_threads_as_they_were(make_federation, monkeypatch):
    monkeypatch.setitem(engine.BACKENDS, "workers", workers)  # without what the fixture of all tests does with threads
    torch.set_num_threads(2)
    calls = []

    class Fragile(nn.Linear):
        def forward(self, x):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("broken")
            return super().forward(x.flatten(1))

    fed = make_federation(Fragile(64, 3), sizes=(40,) * 12, participants=12, epochs=50)
    with pytest.raises(RuntimeError, match="broken"):
        trained(fed, "workers", 12)
    assert len(calls) < 100  # of 6,000
    assert torch.get_num_threads() == 2


def test_backends__when_one_of_the_workers_fails_the_others_stop_after_their_step(make_federation):
    """Not only at the end of their client, which may be minutes later."""
    steps, began, failed = [], threading.Event(), threading.Event()

    def objective(call, params, context, batch):
        if context["fails"]:
            began.wait(60)
            failed.set()
            raise ValueError("it fails")
        began.set()
        steps.append(failed.wait(60))
        return call(params, batch[0]).sum()

    fed = make_federation("cnn", sizes=(400, 400), participants=2, batch_size=1, backend="workers")
    start, fails = surgery.broadcast(fed.initial(), 2), {"fails": torch.tensor([False, True])}
    with pytest.raises(ValueError, match="it fails"):
        fed.train(start, [0, 1], Rng(0, 1), objective, fails)
    assert 1 <= len(steps) < 100


class Padded(nn.Module):
    """A table of tokens, of which 0 is padding, whose row is drawn and never learned."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(24, 3)
        nn.init.normal_(self.table.weight)

    def forward(self, x):
        return self.head(self.table(x).flatten(1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_simulate__embeddings_learn_nothing_of_padding(backend, tmp_path):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(9, (60, 6), generator=generator).int(), torch.arange(60) % 3
    data, net = Dataset.from_arrays(x[:40], y[:40], x[40:], y[40:]), Padded()
    config = fl.Config.of(
        algorithm="fedavg", clients=3, participants=3, rounds=1, partition="iid", min_samples=1, batch_size=5, lr=0.1,
        backend=backend,
    )  # fmt: skip
    fl.simulate(config, tmp_path / "run", dataset=data, model=net)
    trained = fl.load_model(tmp_path / "run", model=net).table.weight
    torch.testing.assert_close(trained[0], net.table.weight[0])
    assert not torch.equal(trained[1:], net.table.weight[1:])
