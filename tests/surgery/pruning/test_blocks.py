"""Scores of blocks."""

import copy

import pytest
import timm
import torch
from refusals import refused
from torch import nn

import surgery
from surgery.pruning import score_blocks


class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x, mask=None):
        return x + self.scale * self.b(self.a(x).relu()), mask


class Net(nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(4, 8), nn.ModuleList(map(Block, scales)), nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x, _ = block(x, mask=None)
        return self.head(x)


def nets():
    torch.manual_seed(0)
    return Net([1.0, 0.0, 3.0, 0.1]).train(), torch.randn(5, 7, 4)


def test_blocks__block_influence_is_that_of_the_paper():
    net, x = nets()
    before = copy.deepcopy(net.state_dict())
    scores = score_blocks(net, [x, 2 * x])
    expected = torch.zeros(4)
    with torch.no_grad():
        for batch in (x, 2 * x):
            hidden = net.stem(batch)
            for number, block in enumerate(net.blocks):
                after, _ = block(hidden)
                dots = torch.einsum("btd,btd->bt", hidden, after) / (hidden.norm(dim=-1) * after.norm(dim=-1))
                expected[number] += (1 - dots.mean()) / 2
                hidden = after
    assert torch.allclose(scores["blocks"], expected, atol=1e-6)
    assert net.training
    assert not any(module._forward_hooks for module in net.modules())
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert scores["blocks"].argsort()[0] == 1
    shallow, _ = surgery.ungraft(net, keep={"blocks": [0, 2, 3]}, example=x)
    assert torch.allclose(shallow.eval()(x), net.eval()(x), atol=1e-6)


def test_blocks__loss_is_that_of_the_model_without_the_block():
    net, x = nets()
    y = torch.arange(35) % 3
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1])  # noqa: E731
    scores = score_blocks(net, [(x, y)], loss=loss, example=x)["blocks"]
    for gone in range(4):
        shallow, _ = surgery.ungraft(net, keep={"blocks": [i for i in range(4) if i != gone]}, example=x)
        assert scores[gone].item() == pytest.approx((loss(shallow, (x, y)) - loss(net, (x, y))).item(), abs=1e-5)


def test_blocks__that_change_the_shape_cannot_go():
    net = timm.create_model("resnet18", num_classes=3)
    scores = score_blocks(net, [torch.randn(1, 3, 32, 32)])
    assert [scores[f"layer{i}"].isinf().tolist() for i in (1, 2, 3, 4)] == [[False] * 2] + [[True, False]] * 3


def test_blocks__what_cannot_be_scored():
    net, x = nets()
    for wrong, code in (
        (lambda: score_blocks(nn.Linear(4, 2), [x]), "depth"),
        (lambda: score_blocks(net, []), "argument"),
        (lambda: score_blocks(net, [x], loss=lambda m, b: 1 / 0), "run"),
        (lambda: score_blocks(net, [x, torch.zeros(2, 3)]), "run"),
    ):
        with refused(code):
            wrong()
