"""A class per pixel: losses, scores and changes of masks, and the methods that train on them."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from ranks import NEED_ADAPTERS, NEED_EXITS
from rounds import small
from selection import some
from sklearn.metrics import f1_score, jaccard_score, recall_score
from torch import nn

import fl
from fl.algorithms import ALGORITHMS
from fl.data import fingerprint
from fl.data.arrays import UNSCORED
from fl.engine import losses
from fl.federation.cohort import classes_held
from fl.federation.scores import Overlap
from fl.models.custom_model import classes_last
from surgery import broadcast

CLASSES, SIZE = 3, 6
REFUSING = ("fedgen", "fedproto", "moon", *NEED_EXITS, *NEED_ADAPTERS, "flexifed", "inclusivefl", "fedbn", "fedrolex")
"""Methods of one class a sample, and of models that end in a linear layer, have norms, are the zoo's, or concatenate
nothing.
"""


def drawn(n, seed=0, unscored=0.1):
    """Masks, and images that show them dimly; each mask has a pixel that counts."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n, SIZE, SIZE), generator=generator)
    x = y[:, None] + torch.rand(n, 1, SIZE, SIZE, generator=generator)
    dropped = torch.rand(y.shape, generator=generator) < unscored
    dropped[:, 2, 2] = False
    return x, torch.where(dropped, UNSCORED, y)


def masks(n=60, unscored=0.1):
    (x, y), (test_x, test_y) = drawn(n, 0, unscored), drawn(9, 1, unscored)
    return fl.Dataset.from_arrays(x, y, test_x, test_y, task="segmentation", owners=np.arange(n) % 4)


class Net(nn.Module):
    """A U-Net of one level."""

    def __init__(self):
        super().__init__()
        self.first, self.low = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.last = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x):
        seen = self.first(x).relu()
        low = self.low(F.max_pool2d(seen, 2)).relu()
        return self.last(torch.cat([seen, F.interpolate(low, scale_factor=2)], 1))


FEW = {"rounds": 2, "clients": 4, "participants": 4, "partition": "natural", "batch_size": 8, "local_epochs": 1}


def settings(method="fedavg", **more):
    return small(method, **{**FEW, **more})


def squared(outputs, targets):
    """A loss of one's own: it gets what torch's losses take."""
    assert outputs.shape == (len(targets), CLASSES, SIZE, SIZE)
    return F.cross_entropy(outputs, targets, reduction="none").square().mean((1, 2))


def right(outputs, targets):
    """A metric of one's own."""
    counts = targets != UNSCORED
    return (outputs.argmax(1) == targets)[counts].mean()


def slow_dice(logits, labels):
    found = []
    for one, mask in zip(logits, labels):
        counts = mask != UNSCORED
        shares, known = one[counts].softmax(-1), mask[counts]
        each = []
        for k in known.unique():
            p, y = shares[:, k], (known == k).to(shares.dtype)
            each.append(1 - 2 * (p * y).sum() / (p.sum() + y.sum()))
        found.append(torch.stack(each).mean())
    return torch.stack(found)


def logits_of(n, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, SIZE, SIZE, CLASSES, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(
    ("name", "options"),
    [("cross_entropy", {}), ("cross_entropy", {"weights": (1, 2, 0.5), "smoothing": 0.1}), ("focal", {})],
)
def test_masks__losses_of_pixels_are_those_of_the_pixels_that_count(name, options):
    (_, y), logits = drawn(5), logits_of(5)
    loss, counts = losses.by_name(name, "segmentation", outputs=CLASSES, **options), y != UNSCORED
    expected = loss(logits[counts], y[counts])
    torch.testing.assert_close(losses.mean(loss, logits, y), expected.mean())
    both = torch.stack([logits, -logits], 1)
    total = losses.mean(loss, logits, y) + losses.mean(loss, -logits, y)
    torch.testing.assert_close(losses.mean(loss, both, y), total)  # of a model with exits


@given(st.integers(0, 10**6), st.floats(0, 0.9))
def test_dice__is_that_of_one_mask_and_class_at_a_time(seed, unscored):
    (_, y), logits = drawn(3, seed, unscored), logits_of(3, seed)
    found = losses.dice(logits, y)
    torch.testing.assert_close(found, slow_dice(logits, y))
    assert ((found >= 0) & (found <= 1)).all()
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(losses.dice(logits[:, order], y[:, order]), found)  # pixels have no order
    sure = 1e3 * F.one_hot(y.clamp(min=0), CLASSES).double()
    torch.testing.assert_close(losses.dice(sure, y), torch.zeros(3, dtype=torch.float64))


def test_dice__and_cross_entropy_are_added_for_each_mask():
    (_, y), logits = drawn(4), logits_of(4)
    both = losses.by_name("dice_cross_entropy", "segmentation", weights=(1, 2, 3), outputs=CLASSES)
    pixels = losses.by_name("cross_entropy", "segmentation", weights=(1, 2, 3), outputs=CLASSES)
    single = torch.stack([losses.mean(pixels, logits[k : k + 1], y[k : k + 1]) for k in range(4)])
    torch.testing.assert_close(losses.per_sample(both, logits, y), single + losses.dice(logits, y))
    torch.testing.assert_close(losses.mean(both, logits, y), (single + losses.dice(logits, y)).mean())


@pytest.mark.parametrize("name", ["cross_entropy", "focal", "dice", "dice_cross_entropy"])
def test_masks__without_a_pixel_that_counts_teach_nothing(name):
    logits = logits_of(2).requires_grad_()
    loss = losses.mean(losses.by_name(name, "segmentation"), logits, torch.full((2, SIZE, SIZE), UNSCORED))
    loss.backward()
    assert loss == 0
    assert not logits.grad.any()


@pytest.mark.parametrize("backend", ["loop", "vmap", "workers"])
def test_masks__crops_and_flips_move_image_and_mask_alike(backend):
    y = torch.randint(1, CLASSES, (40, SIZE, SIZE), generator=torch.Generator().manual_seed(0))
    data = fl.Dataset.from_arrays(
        y[:, None].float(), y, y[:3, None].float(), y[:3], classes=CLASSES, task="segmentation"
    )

    def apart(call, params, context, batch):
        x, mask = batch
        other = torch.where(mask == UNSCORED, 0, mask) != x[:, 0]
        return call(params, x).sum() * 0 + other.sum() + 1e-3 * (mask == UNSCORED).sum()

    config = settings(partition="iid", crop=2, flip=True, backend=backend)
    fed, _ = fl.build(config, data, Net())
    trained = fed.train(broadcast(fed.initial(), 4), [0, 1, 2, 3], fl.Rng(0, 1), apart)
    assert ((trained.loss > 0) & (trained.loss < 1)).all()  # borders alone, which do not count


@pytest.mark.parametrize("loss", ["cross_entropy", "dice"])
def test_masks__backends_agree(loss):
    after, data = {}, masks()
    for backend in ("loop", "vmap", "workers"):
        _, algorithm = fl.build(settings(backend=backend, loss=loss, crop=1, flip=True), data, Net())
        server = algorithm.init()
        if not after:
            start = server
        after[backend] = algorithm.round(start, [0, 1, 2, 3], fl.Rng(0, 1))[0]["global"]
    for backend in ("vmap", "workers"):
        torch.testing.assert_close(after[backend], after["loop"], rtol=1e-4, atol=1e-5)
    assert not torch.equal(after["loop"]["last.weight"], start["global"]["last.weight"])


def overlaps(predicted, y):
    predicted, y = predicted[y != UNSCORED], y[y != UNSCORED]
    return {
        "accuracy": (predicted == y).double().mean().item(),
        "mean_iou": jaccard_score(y, predicted, average="macro"),
        "dice": f1_score(y, predicted, average="macro"),
    }


def test_simulate__scores_are_scikit_learns_of_all_pixels(tmp_path):
    config = settings(local_test=0.3, metrics=["iou_per_class", "recall_per_class", right])
    data, net = masks(), Net()
    final = fl.simulate(config, tmp_path / "run", dataset=data, model=net)["final"]
    trained = fl.load_model(tmp_path / "run", model=net)
    predicted = trained(data.test_x).argmax(1)
    for name, value in overlaps(predicted, data.test_y).items():
        assert final[name] == pytest.approx(value)
    assert final["test_right"] == final["accuracy"]
    counts = data.test_y != UNSCORED
    for what, score in (("iou", jaccard_score), ("recall", recall_score)):
        each = score(data.test_y[counts], predicted[counts], average=None, labels=range(CLASSES))
        assert [final[f"test_{what}_{k}"] for k in range(CLASSES)] == pytest.approx(each.tolist())
    logits = trained(data.test_x).double()
    assert final["loss"] == pytest.approx(F.cross_entropy(logits, data.test_y).item())
    fed, _ = fl.build(config, data, net)
    own = [overlaps(trained(data.x[index]).argmax(1), data.y[index]) for index in fed.clients.test]
    for name in own[0]:
        assert final[f"local_test_{name}"] == pytest.approx(np.mean([scores[name] for scores in own]))
    assert fed.predict(fed.initial(), data.test_x).shape == (9, SIZE, SIZE, CLASSES)


def test_masks__a_class_that_nobody_has_or_predicts_has_no_overlap():
    seen = Overlap(hit=np.array([2, 0, 0]), true=np.array([3, 0, 0]), said=np.array([2, 1, 0]))
    assert seen.per_class("iou")[:2].tolist() == [2 / 3, 0]
    assert np.isnan([seen.per_class(what)[2] for what in ("iou", "dice", "precision", "recall")]).all()
    assert np.isnan(seen.per_class("recall")[1])
    assert seen.mean("iou") == 1 / 3


@pytest.mark.parametrize("method", some(sorted(ALGORITHMS.keys() - {*REFUSING}), ("fedavg", "fedmr")))
def test_simulate__every_method_trains_on_them(method, tmp_path):
    more = {"local_valid": 0.2} if method in ("femam", "fltrust") else {}
    if ALGORITHMS[method].clients == "heterogeneous":
        more["architectures"] = fl.ArchitectureOptions(choose="cycle", widths=(0.5, 1.0), depths=())
    config = settings(method, local_test=0.2, lr=0.1, rounds=3, **more)
    final = fl.simulate(config, tmp_path / "run", dataset=masks(120), model=Net)["final"]
    assert all(math.isfinite(final[name]) for name in ("loss", "accuracy", "mean_iou", "local_test_dice"))


def test_simulate__a_run_goes_on_and_its_model_gives_classes_second(tmp_path):
    config, data = settings(rounds=1, loss=squared), masks(24)
    fl.simulate(config, tmp_path / "run", dataset=data, model=Net)
    longer = config.replace(rounds=2)
    fl.simulate(longer, tmp_path / "run", resume=True, dataset=data, model=Net)
    fl.simulate(longer, tmp_path / "once", dataset=data, model=Net)
    first, again = (fl.load_model(tmp_path / name, model=Net) for name in ("run", "once"))
    assert torch.equal(first(data.test_x), again(data.test_x))
    assert first(data.test_x).shape == (9, CLASSES, SIZE, SIZE)
    fl.build(config, data, classes_last(first))  # one that gives classes last already is not turned twice


def test_masks__clients_have_the_classes_of_their_masks():
    x, y = torch.rand(3, 1, 2, 2), torch.tensor([[[0, 2], [-100, 0]], [[1, 1], [1, 1]], [[3, -100], [3, 3]]])
    data = fl.Dataset.from_arrays(x, y, x, y, task="segmentation")
    held = classes_held(data, [torch.tensor([0]), torch.tensor([1, 2])], [0, 1])
    assert held.int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_masks__a_border_around_images_does_not_count():
    data = masks(5)
    padded = data.pad(2)
    assert torch.equal(padded.y[:, 2:-2, 2:-2], data.y)
    assert (padded.y != UNSCORED).sum() == (data.y != UNSCORED).sum()
    assert padded.test_x.shape[2:] == padded.test_y.shape[1:] == (SIZE + 4, SIZE + 4)


def test_simulate__steps_and_voxels_have_classes_too(tmp_path):
    for axes, net in ((1, nn.Conv1d(2, CLASSES, 3, padding=1)), (3, nn.Conv3d(2, CLASSES, 3, padding=1))):
        x = torch.randn(20, 2, *[4] * axes)
        y = (x[:, 0] > 0).long() + (x[:, 0] > 1)
        data = fl.Dataset.from_arrays(x, y, x, y, task="segmentation")
        config = settings(partition="iid", lr=0.5, rounds=3, loss="dice_cross_entropy")
        final = fl.simulate(config, tmp_path / str(axes), dataset=data, model=net)["final"]
        assert final["accuracy"] > 0.6


def test_simulate__inputs_by_name_have_masks(tmp_path):
    class Both(Net):
        def forward(self, image, level):
            return super().forward(image + level[:, :, None, None])

    plain = masks(24)
    parts = ({"image": x, "level": 0 * x[:, :, 0, 0]} for x in (plain.x, plain.test_x))
    data = fl.Dataset.from_arrays(next(parts), plain.y, next(parts), plain.test_y, task="segmentation")
    found = [
        fl.simulate(settings(partition="iid"), tmp_path / name, dataset=one, model=model)["final"]["loss"]
        for name, one, model in (("one", plain, Net), ("two", data, Both))
    ]
    assert found[0] == found[1]


def test_masks__data_sets_of_pairs_have_masks():
    y = np.array([[[0, 1], [255, 2]], [[2, 2], [0, 255]]], np.uint8)
    pairs = [(Image.fromarray(mask), Image.fromarray(mask)) for mask in y]
    pairs[1][1].putpalette([0, 0, 0, 9, 9, 9, 50, 0, 0])  # the numbers are the classes, whatever their colours
    data = fl.Dataset.from_torch(pairs, pairs, task="segmentation")
    assert data.y.tolist() == [[[0, 1], [-100, 2]], [[2, 2], [0, -100]]]
    assert (data.classes, data.x.shape, data.unscored) == (3, (2, 1, 2, 2), True)
    assert fingerprint(data)["task"] == "segmentation"
    assert repr(data).endswith("3 classes for each of 2x2 places")


X, Y = drawn(4, unscored=0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"y": Y[:, 0, 0]}, r"\[4\]"),
        ({"y": Y[:, None]}, r"give|y\[:, 0\]"),
        ({"y": F.one_hot(Y, CLASSES).movedim(-1, 1)}, r"y.argmax\(1\)"),
        ({"y": Y[:, :4]}, r"\[4, 1, 6, 6\].*\[4, 6, 6\]"),
        ({"y": Y[:3]}, "x has 4 samples"),
        ({"y": Y.float()}, r"y.astype\(int\)"),
        ({"y": Y - 1}, "test_y.*100"),
        ({"y": 0 * Y - 100}, r"y\[0\].*100"),
        ({"y": 255 * (Y > 0), "test_y": 255 * (Y > 1)}, r"0 and 255.*\(y > 0\).astype\(int\)"),
        ({"x": X.flatten(1), "test_x": X.flatten(1), "test_y": Y[:, :4]}, "give all masks one size"),
        ({"classes": 2}, "with 2 classes they go from 0 to 1"),
        ({"task": "classification"}, "task='segmentation'"),
    ],
)
def test_masks__that_are_none(more, message):
    given = {"x": X, "y": Y, "test_x": X, "test_y": Y, "task": "segmentation", **more}
    with pytest.raises(fl.FLError, match=message):
        fl.Dataset.from_arrays(**given)


def test_masks__255_is_a_class_where_there_are_as_many():
    y = Y.clone()
    y[:, 0, 0] = 255
    assert (fl.Dataset.from_arrays(X, y, X, Y, task="segmentation").y[:, 0, 0] == UNSCORED).all()
    assert (fl.Dataset.from_arrays(X, y, X, Y, classes=256, task="segmentation").y[:, 0, 0] == 255).all()


class Wrong(Net):
    def forward(self, x):
        return super().forward(x).movedim(1, -1)


@pytest.mark.parametrize(
    ("more", "model", "message"),
    [
        ({"partition": "dirichlet"}, Net, "dirichlet_sizes"),
        ({"masked_loss": True}, Net, "--masked-loss"),
        ({"algorithm": "fedgen"}, Net, "fedgen learns from one class a sample"),
        ({"algorithm": "fedproto"}, Net, "fedproto learns from one class a sample"),
        ({"algorithm": "moon"}, Net, "linear layer"),
        ({"model": "cnn"}, None, "--model"),
        ({}, Wrong, r"\[2, 6, 6, 3\].*\[2, 3, 6, 6\]"),
        ({}, lambda: nn.Sequential(Net(), nn.Softmax(1)), "gives probabilities"),
        ({"loss": "mse"}, Net, "cross_entropy.*dice_cross_entropy"),
        ({"loss": "dice", "class_weights": (1, 1, 1)}, Net, "--class-weights"),
        ({"metrics": ["roc_auc_ovr"]}, Net, "--metrics.*'roc_auc_ovr'.*iou_per_class"),
        ({"metrics": ["right"]}, Net, "unknown --metrics"),
        ({"eval_client_models_every": 1}, Net, "counts right classes"),
    ],
)
def test_simulate__refusals(more, model, message, tmp_path):
    with pytest.raises(fl.FLError, match=message):
        fl.simulate(
            settings(**{"method": more.pop("algorithm", "fedavg"), **more}), tmp_path, dataset=masks(), model=model
        )
