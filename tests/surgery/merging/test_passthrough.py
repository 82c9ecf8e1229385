"""Networks made of blocks of others compute what the blocks compute one after another."""

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import merging


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def body(depth):
    return nn.Sequential(*(Block() for _ in range(depth)))


def nets(k=2, depth=3):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), body(depth), nn.Linear(4, 2)) for _ in range(k)]


X = torch.ones(5, 3)


@pytest.mark.parametrize(
    "chosen", [[(0, 0), (1, 1)], [(1, 2), (0, 0), (1, 0)], [(0, 0), (0, 1), (1, 1), (1, 2), (0, 2)]], ids=len
)
@pytest.mark.parametrize(("twice", "outside"), [(False, {"2": 1}), (False, {}), (True, {})])
def test_passthrough__blocks_run_one_after_another(chosen, twice, outside):
    """What lies outside of them is the first model's; a model may be listed twice."""
    a, b = models = nets(1) * 2 if twice else nets()
    before = [{name: tensor.clone() for name, tensor in net.state_dict().items()} for net in models]
    x = a[0](X)
    for k, i in chosen:
        x = models[k][1][i](x)
    net, plan = merging.passthrough(models, blocks={"1": chosen}, outside=outside, example=X)
    torch.testing.assert_close(net(X), (b if outside else a)[2](x))
    found = plan.extract(merging.union(models))
    assert all(torch.equal(found[name], tensor) for name, tensor in surgery.state(net).items())
    state, again = merging.passthrough([surgery.state(net) for net in models], blocks={"1": chosen}, outside=outside)
    assert again.entries == plan.entries
    assert all(torch.equal(state[name], found[name]) for name in found)
    assert surgery.Plan.from_json(plan.to_json()).entries == plan.entries
    for net, then in zip(models, before):
        assert all(torch.equal(then[name], tensor) for name, tensor in net.state_dict().items())


def test_passthrough__what_is_not_there_is_named():
    a, b = nets()
    wide = nn.Sequential(nn.Linear(3, 4), body(3), nn.Linear(4, 5))
    for call, expected in [
        (lambda: merging.passthrough([a, b], blocks={"x": [(0, 0)]}), "name: 'x'"),
        (
            lambda: merging.passthrough([a, b], blocks={"1.*.experts": [(0, 0), (1, 0)]}),
            "unsupported: mixture of experts",
        ),
        (lambda: merging.passthrough([a, b], blocks={"1": [(0, 3)]}), "name"),
        (lambda: merging.passthrough([a, b], blocks={"1": [(2, 0)]}), "name"),
        (lambda: merging.passthrough([a, b], blocks={"1": [(0, 0), (0, 0)]}), "argument"),
        (lambda: merging.passthrough([a, wide], blocks={"1": [(0, 0)]}, outside={"2": 1}), "mismatch: '2.weight'"),
        (lambda: merging.passthrough([a, b], blocks={"1": [(0, 0)]}, outside={"tail": 1}), "name: 'tail'"),
        (lambda: merging.passthrough([a, b], blocks={"1": [(0, 0)]}, outside={"1": 1}), "name: '1'"),
        (lambda: merging.passthrough(a, blocks={}), "argument"),
    ]:
        with refused(expected):
            call()


class Mixture(nn.Module):
    """Blocks that run one after another, or beside each other."""

    def __init__(self, beside):
        super().__init__()
        self.beside, self.blocks = beside, nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        if self.beside:
            return sum(block(x) for block in self.blocks)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("order", [[(0, 0), (1, 1), (0, 2)], [(0, 0), (1, 1)]])
def test_passthrough__modules_beside_each_other_are_no_blocks(order):
    x = torch.ones(5, 4)
    for beside, example, code in [(True, x, "name: 'blocks'"), (True, None, "ambiguous"), (False, None, "ambiguous")]:
        with refused(code):
            merging.passthrough([Mixture(beside), Mixture(beside)], blocks={"blocks": order}, example=example)
    models = [Mixture(beside=False) for _ in range(2)]
    net, _ = merging.passthrough(models, blocks={"blocks": order}, example=x)
    expected = x
    for k, i in order:
        expected = models[k].blocks[i](expected)
    torch.testing.assert_close(net(x), expected)


def test_passthrough__nan_is_an_error_of_the_tensors_that_are_taken():
    one = {f"{i}.{part}.weight": torch.full((2, 2), float(i)) for i in range(3) for part in "ab"}
    one["0.a.weight"][0] = -torch.inf
    two = {name: tensor * torch.nan if name == "1.a.weight" else tensor for name, tensor in one.items()}
    net, _ = merging.passthrough([one, two], blocks={"": [(0, 0), (0, 1), (1, 2)]})
    assert net["0.a.weight"].isinf().any()
    with refused("values: '1.a.weight'"):
        merging.passthrough([one, two], blocks={"": [(0, 0), (1, 1), (1, 2)]})
    with refused("values: '1.a.weight'"):
        dict(merging.union([one, two]))
