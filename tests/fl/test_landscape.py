import csv
from pathlib import Path

import pytest
import torch
from fl_flags import TINY
from refusals import fl_refused
from selection import some
from torch import nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import fl
import zoo
from fl import landscape
from fl import run as cli
from fl.analysis.groups import find_runs
from fl.analysis.landscape import Landscape, grid, hessian_traces, mean_loss, random_direction, samples, surface
from fl.analysis.landscape import landscape as around
from fl.runs import checkpoint
from fl.runs.metrics import read
from fl.settings import Config
from surgery import state

pytestmark = pytest.mark.drawn


def train(tmp_path, name, *flags):
    assert cli.main([*TINY, "--rounds", "2", "--out", str(tmp_path), "--name", name, *flags]) == 0
    return tmp_path / name


def look(tmp_path, *arguments, code=0):
    """The rows of the grid that the command leaves, with numbers as numbers."""
    out = tmp_path / "figure.png"
    assert landscape.main([*map(str, arguments), "--out", str(out), "--device", "cpu"]) == code
    if code:
        return None
    assert out.read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "figure.csv") as file:
        return [
            {k: v if k in ("model", "folder") else float(v) for k, v in row.items()} for row in csv.DictReader(file)
        ]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_landscape__filters_have_the_norms_of_the_models_own_and_the_rest_stands_still():
    model = zoo.create("resnet20", generator(), num_classes=10, width=0.25, norm="batch")
    direction, weights = random_direction(model, generator(1)), dict(model.named_parameters())
    assert set(direction) == {name for name, w in weights.items() if w.ndim > 1}
    for name, d in direction.items():
        for own, filter in zip(weights[name], d, strict=True):  # one by one
            assert filter.norm().item() == pytest.approx(own.norm().item(), rel=1e-5)
        assert not torch.allclose(d, weights[name])
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.LayerNorm([2, 6, 6]), nn.Embedding(3, 4))
    assert list(random_direction(model, generator())) == ["0.weight", "2.weight"]
    with fl_refused("unsupported", "BatchNorm1d"):
        random_direction(nn.BatchNorm1d(3), generator())


def test_landscape__models_of_one_architecture_share_the_direction_before_normalisation():
    a, b = (zoo.create("cnn", generator(seed), num_classes=10, in_channels=1, image_size=8) for seed in (0, 1))
    one, two = random_direction(a, generator(5)), random_direction(b, generator(5))
    for name, d in one.items():
        assert torch.nn.functional.cosine_similarity(d.flatten(1), two[name].flatten(1)).min() > 1 - 1e-5
    name, d = next(iter(one.items()))
    assert not torch.equal(d, two[name])
    assert not torch.allclose(d, random_direction(a, generator(6))[name])


@pytest.mark.parametrize("together", [1, 4])
def test_landscape__a_quadratic_has_its_known_surface(together):
    """f(w) = |w - c|^2 / 2 along orthogonal u and v: f(0) - a u.c - b v.c + (a^2 |u|^2 + b^2 |v|^2) / 2."""
    c = torch.tensor([[1.0, 2.0], [0.0, -1.0]], dtype=torch.float64)
    u = {"w": torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)}
    v = {"w": torch.tensor([[0.0, 3.0], [0.0, 0.0]], dtype=torch.float64)}
    axis = grid(5, 1.5)
    values = surface(lambda s: (s["w"] - c).square().sum() / 2, {"w": torch.zeros_like(c)}, (u, v), axis, together)
    a, b = axis[:, None], axis[None, :]
    assert torch.allclose(values, 3 - a * (2 - 1) - b * 6 + (a**2 * 5 + b**2 * 9) / 2)
    inside = [(i, j) for i in range(5) for j in range(5) if 0 < axis[i] ** 2 + axis[j] ** 2 <= 1.5**2]
    rises = [(values[i, j] - 3).item() for i, j in inside]
    found = Landscape("a", Path("a"), axis, values, 1)
    assert found.rise() == pytest.approx((sum(rises) / len(rises), max(rises)))
    assert len(inside) == 12


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_landscape__side_by_side_equals_one_by_one(name, make_federation):
    fed = make_federation(name, norm="batch" if name == "resnet20" else None)
    data, model = fed.data, fed.model
    pair, axis = [random_direction(model, generator(seed)) for seed in (1, 2)], grid(3, 0.5)
    loop, vmapped = (
        surface(mean_loss(model, data, data.test_x, data.test_y, k), state(model), pair, axis, k) for k in (1, 4)
    )
    torch.testing.assert_close(loop, vmapped, rtol=1e-4, atol=1e-5)
    assert len(loop.unique()) == 9


def test_landscape__what_cannot_be_computed_side_by_side_is_computed_one_by_one():
    start, pair, axis = {"w": torch.zeros(1, 2)}, [{"w": torch.eye(2)[k : k + 1]} for k in (0, 1)], grid(3, 1.0)

    def by_value(s):  # control flow on values, which vmap refuses
        return s["w"].square().sum() if s["w"].sum().item() > -5 else s["w"].sum()

    def by_shape(s):  # answers, but not the same, when it is called inside vmap
        return s["w"].square().sum() + 7 * torch._C._functorch.is_batchedtensor(s["w"])

    expected = (axis[:, None] ** 2 + axis**2).tolist()
    for loss in (by_value, by_shape):
        assert surface(loss, start, pair, axis, 4).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--model resnet20 --norm static_batch --width 0.25 --depth 1"])
def test_landscape__the_centre_is_the_loss_that_the_run_measured(tmp_path, flags):
    folder = train(tmp_path, "a", *flags.split(), "--backend", "loop")
    rows = look(tmp_path, folder, "--points", 3, "--together", 4)
    assert [(row["a"], row["b"]) for row in rows] == [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    assert rows[4]["loss"] == pytest.approx(read(folder / "metrics.csv")[-1]["loss"], rel=1e-12)  # other sums


@pytest.mark.nightly
@pytest.mark.parametrize("model", some(["transformer", "transformer_masked"], ["transformer_masked"]))
def test_landscape__text_is_looked_at_as_it_is_asked(tmp_path, model):
    flags = ["--dataset", "text:book.txt", "--data-root", str(tmp_path), "--text.tokens", "byte", "--text.length", "8"]
    (tmp_path / "book.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    flags += ["--partition", "iid", "--model", model, "--min-samples", "1", "--rounds", "1", "--samples", "0"]
    folder = train(tmp_path, "a", *flags)
    (row,) = [r for r in look(tmp_path, folder, "--points", 3, "--samples", 0) if r["a"] == r["b"] == 0]
    assert row["loss"] == pytest.approx(read(folder / "metrics.csv")[-1]["loss"], rel=1e-5)


@pytest.mark.nightly
def test_landscape__several_runs_stand_side_by_side(tmp_path, capsys):
    folder = train(tmp_path, "pair", "--algorithm", "fedavg,fedmr")
    rows = look(tmp_path, folder, "--points", 3, "--radius", 0.5, "--samples", 50, "--part", "train")
    assert list(dict.fromkeys(row["model"] for row in rows)) == ["fedavg", "fedmr"]
    assert {row["a"] for row in rows} == {-0.5, 0.0, 0.5}
    printed = capsys.readouterr().out
    assert "50 train samples" in printed
    table = printed.partition("trace of H")[2].partition("\n\n")[0].splitlines()
    for k, name in enumerate(("fedavg", "fedmr")):
        values = torch.tensor([row["loss"] for row in rows[9 * k : 9 * k + 9]]).double().view(3, 3)
        (line,) = [line.split() for line in table if line.startswith(name)]
        expected = [values[1, 1].item(), *Landscape(name, folder, grid(3, 0.5), values, 50).rise()]
        assert [float(cell) for cell in line[1:4]] == pytest.approx(expected, abs=1e-4)
        fed, _ = fl.build(Config.read(folder / f"{name}-seed0"))
        x, y = samples(fed, "train", 50, fl.Rng(0))
        with torch.no_grad():
            logits = fl.load_model(folder / f"{name}-seed0")(fed.data.normalise(x))
        assert values[1, 1].item() == pytest.approx(nn.functional.cross_entropy(logits, y).item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "resnet20", "transformer"])
def test_landscape__the_trace_is_that_of_the_whole_hessian(name):
    """Each term v·Hv is that of the Hessian written out, and the trace their mean."""
    if name == "transformer":  # fused attention has no second derivative
        net = zoo.create(name, generator(0), num_classes=5, tokens=4, width=0.03125, depth=1)
        x, y = torch.randint(5, (3, 4), generator=generator(1)), torch.randint(5, (3, 4), generator=generator(2))
    else:
        net = zoo.create(name, generator(0), num_classes=3, in_channels=1, image_size=8, width=0.125)
        x, y = torch.randn(6, 1, 8, 8, generator=generator(1)), torch.arange(6) % 3
    net = net.double().eval()
    x = x.double() if x.is_floating_point() else x
    vectors, matrices = ([name for name, weight in net.named_parameters() if weight.ndim == n] for n in (1, 2))
    at = {name: net.get_parameter(name).detach() for name in (*vectors[:3], matrices[-1])}

    def loss(values):
        logits = torch.func.functional_call(net, values, (x,))
        return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())

    with sdpa_kernel(SDPBackend.MATH):
        blocks = jacrev(jacrev(loss))(at)
    sizes = [tensor.numel() for tensor in at.values()]
    rows = [torch.cat([blocks[a][b].reshape(m, n) for b, n in zip(at, sizes)], 1) for a, m in zip(at, sizes)]
    whole, drawn = torch.cat(rows), generator(7)
    terms = []
    for _ in range(5):
        v = torch.cat([torch.randint(2, t.shape, generator=drawn).mul(2).sub(1).flatten() for t in at.values()])
        terms.append(v.double() @ whole @ v.double())
    assert hessian_traces(loss, at, generator(7), 5).tolist() == pytest.approx(torch.stack(terms).tolist(), rel=1e-8)
    many = hessian_traces(loss, at, generator(8), 400).mean()
    spread = (2 * (whole.square().sum() - whole.diagonal().square().sum()) / 400).sqrt()  # Hutchinson's variance
    assert abs(many - whole.trace()) < 4 * spread


@pytest.mark.slow
def test_landscape__a_run_s_trace_is_of_all_its_samples_alike(tmp_path):
    """In parts of 100 samples, of which the last is smaller."""
    folder = train(tmp_path, "a")
    (run,) = find_runs([folder])
    data = run.config.load()
    found = around(run, "a", data, grid(3, 0.5), "test", 230, 0, 1, "cpu")
    model = fl.load_model(folder)
    x, y = samples(fl.build(run.config)[0], "test", 230, fl.Rng(0))
    at = {name: weight.detach() for name, weight in model.named_parameters()}
    whole = hessian_traces(mean_loss(model, data, x, y, 1), at, fl.Rng(0).torch("signs")).numpy()
    assert found.trace == pytest.approx((whole.mean(), whole.std(ddof=1) / 4), rel=1e-4)  # of 16 vectors


@pytest.mark.nightly
def test_landscape__a_loss_without_a_second_derivative_has_no_trace(tmp_path, caplog, monkeypatch):
    def refuse(*_):
        raise RuntimeError("derivative for aten::thing is not implemented")

    folder = train(tmp_path, "a")
    monkeypatch.setattr("fl.analysis.landscape.hessian_traces", refuse)
    look(tmp_path, folder, "--points", 3)
    assert "the trace of the Hessian cannot be estimated: derivative for aten::thing" in caplog.text


def test_landscape__what_cannot_be_looked_at_is_refused(tmp_path, capsys):
    wrong = train(tmp_path, "a") / "config.yaml"
    capsys.readouterr()
    wrong.write_text(wrong.read_text().replace("dataset: digits", "dataset: mnist"))
    look(tmp_path, tmp_path, code=2)
    assert "was trained with --dataset digits, and now it is mnist" in capsys.readouterr().err
    assert not (tmp_path / "figure.png").exists()


@pytest.mark.nightly
def test_landscape__a_dead_model_is_not_praised_as_flat(tmp_path, capsys):
    folder = train(tmp_path, "dead")
    spec, server = checkpoint.read_parts(folder)
    dead = {part: {name: 0 * tensor for name, tensor in tensors.items()} for part, tensors in server.items()}
    checkpoint.save(folder, dead, 2, spec, {})
    look(tmp_path, folder, "--points", 3)
    assert "fedmr is no better than chance (2.303)" in capsys.readouterr().out


@pytest.mark.slow
def test_landscape__every_run_is_measured_on_its_own_data(tmp_path):
    runs = [train(tmp_path, name, "--samples", number) for name, number in (("few", "200"), ("more", "300"))]

    def losses(*folders):
        rows = look(tmp_path, *folders, "--points", 3, "--samples", 0, "--part", "train")
        for kind in ("png", "csv"):
            (tmp_path / f"figure.{kind}").unlink()
        return [row["loss"] for row in rows]

    assert losses(*runs) == pytest.approx(losses(runs[0]) + losses(runs[1]))


@pytest.mark.nightly
def test_landscape__the_two_directions_differ(tmp_path):
    """Otherwise the loss would depend on a + b alone."""
    rows = look(tmp_path, train(tmp_path, "a"), "--points", 3, "--samples", 20)
    losses = {(row["a"], row["b"]): row["loss"] for row in rows}
    assert all(losses[a, b] != losses[b, a] for a, b in losses if a != b)
