import copy

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import graft, ungraft
from zoo import Spec


def part(first=None, width=6):
    return nn.Sequential(first or nn.Identity(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))


class Experts(nn.Module):
    """A mixture of experts, of which each gets the rows that are routed to it."""

    def __init__(self, first=None):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4, bias=False), nn.ModuleList(part(first) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return x + y


class Written(Experts):
    """A mixture of experts that write into the rows of one tensor, which they also read."""

    def forward(self, x):
        x, chosen = x.clone(), self.gate(x).argmax(-1)
        for i, expert in enumerate(self.experts):
            x[chosen == i] = expert(x[chosen == i])
        return x


class Thirds(nn.Module):
    """Branches, each of which changes its own channels in place."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(part(width=2) for _ in range(3))

    def forward(self, x):
        x = x.clone()
        for k, branch in enumerate(self.branches):
            x[:, 2 * k : 2 * k + 2] += branch(x[:, 2 * k : 2 * k + 2])
        return x


class Branches(nn.Module):
    """Modules that all run on one input, which the first of each may change in place or pass on."""

    def __init__(self, together, first=None):
        super().__init__()
        self.together, self.branches = together, nn.ModuleList(part(first) for _ in range(3))

    def forward(self, x):
        return self.together([branch(x) for branch in self.branches])


class Running(nn.Module):
    """Heads in numbered attributes that write into one tensor."""

    def __init__(self):
        super().__init__()
        self.head1, self.head2, self.head3 = (part() for _ in range(3))

    def forward(self, x):
        y = torch.zeros(len(x), 18)
        for i, head in enumerate((self.head1, self.head2, self.head3)):
            y[:, 6 * i : 6 * i + 6] += head(x)
        return y


class Pairs(nn.Module):
    """Experts of two layers that are never called themselves."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 6)]) for _ in range(3))

    def forward(self, x):
        return sum(down(up(x).relu()) for up, down in self.experts)


class Row(nn.Module):
    """Blocks that run one after another, in a list."""

    def __init__(self, *blocks, backwards=False):
        super().__init__()
        self.backwards, self.blocks = backwards, nn.ModuleList(blocks)

    def forward(self, x):
        for block in reversed(self.blocks) if self.backwards else self.blocks:
            x = x + block(x)
        return x


class Steps(nn.Module):
    """A list of pairs, of which the forward pass calls the parts."""

    def __init__(self):
        super().__init__()
        norms = [nn.LayerNorm(6) for _ in range(3)]
        self.layers = nn.ModuleList(nn.ModuleList([norm, part()]) for norm in norms)

    def forward(self, x):
        for norm, feed in self.layers:
            x = x + feed(norm(x))
        return x


X = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
BESIDE = {
    "experts": lambda: Experts(),
    "experts behind a dropout": lambda: Experts(nn.Dropout(0.1)),
    "experts that write rows": Written,
    "thirds in place": Thirds,
    "inception": lambda: Branches(lambda found: torch.cat(found, -1)),
    "ensemble": lambda: Branches(lambda found: torch.stack(found).mean(0), nn.ReLU(inplace=True)),
    "classifiers": lambda: Branches(tuple),
    "numbered heads": Running,
    "pairs": Pairs,
}
ROWS = {
    "list": lambda: Row(part(), part(), part()),
    "in place": lambda: Row(*(part(nn.Dropout(0.1)) for _ in range(3))),
    "backwards": lambda: Row(part(), part(), part(), backwards=True),
    "shared activation": lambda: Row(*(part(shared) for shared in [nn.GELU()] * 3)),
    "pairs": Steps,
    "mixtures": lambda: Row(Experts(), Experts(), Experts()),
}


def sized(net, sections, change):
    return {section.name: len(section.blocks) + change for section in sections}


@pytest.mark.parametrize("kind", BESIDE)
def test_order__modules_beside_each_other_are_no_section(kind):
    net = BESIDE[kind]().eval()
    found = surgery.sections(net)
    assert len(found) == 1  # they look like one
    assert surgery.sections(net, example=X) == []
    before = copy.deepcopy(net.state_dict())
    for example in (None, X):
        numbers, names = ("ambiguous", "ambiguous") if example is None else ("argument", "name")
        for depths, code in (([len(found[0].blocks) + 1], numbers), (sized(net, found, 1), names)):
            with refused(code):
                graft(net, depths=depths, example=example)
        with refused(numbers):
            ungraft(net, keep=[(0, 1)], example=example)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("kind", ROWS)
def test_order__blocks_of_a_list_are_a_section_where_an_example_shows_that_they_follow_each_other(kind):
    net = ROWS[kind]().eval()
    (section,) = surgery.sections(net)
    assert surgery.sections(net, example=X) == [section]
    deep, plan = graft(net, depths=[5], example=X)
    assert len(surgery.sections(deep, example=X)[0].blocks) == 5
    assert torch.equal(plan.build(deep)(X), net(X))
    assert len(surgery.sections(ungraft(net, keep=[2], example=X)[0])[0].blocks) == 2
    with refused("ambiguous"):
        graft(net, depths=[5])
    with refused("ambiguous"):
        ungraft(net, keep=[2])
    assert graft(net, depths=[3])[1].entries  # nothing changes


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class HiddenRow(nn.Module):
    """Blocks that `run` calls in a way that operations do not show."""

    def __init__(self, run):
        super().__init__()
        self.run, self.blocks = run, nn.ModuleList(Hidden() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


HIDDEN = {
    "vmap": lambda block, x: torch.vmap(block)(x),
    "NumPy": lambda block, x: block(torch.from_numpy(x.numpy())),
    "numbers": lambda block, x: block(torch.tensor(x.tolist())),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_graft__blocks_whose_order_is_not_seen_are_a_section_once_they_are_registered(way, monkeypatch):
    net = HiddenRow(HIDDEN[way]).eval()
    with torch.no_grad(), refused("argument"):
        graft(net, depths=[4], example=X)
    monkeypatch.setattr("surgery.depth.sections.BLOCKS", {Hidden: None})
    deep, _ = graft(net, depths=[4])
    with torch.no_grad():
        torch.testing.assert_close(deep(X), net.blocks[-1](net(X)))


def test_order__blocks_within_modules_beside_each_other_are_found():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList(nn.Sequential(part(), part()) for _ in range(2))

        def forward(self, x):
            return sum(tower(x) for tower in self.towers)

    net = Towers()
    assert [section.name for section in surgery.sections(net, example=X)] == ["towers.0", "towers.1"]
    deep, _ = graft(net, depths={"towers.1": 3}, example=X)
    assert list(map(len, deep.towers)) == [2, 3]


def test_order__what_takes_blocks_for_pieces_leaves_out_modules_beside_each_other_where_an_example_shows_them():
    net = nn.Sequential(Row(part(), part(), part()), Branches(sum))
    rows, beside = [f"0.blocks.{i}" for i in range(3)], [f"1.branches.{i}" for i in range(3)]
    pieces = [{piece.name for piece in surgery.layers(net, unit="block", example=x)} for x in (None, X)]
    assert pieces[0] >= {*rows, *beside}
    assert pieces[1] >= {*rows}
    assert pieces[1].isdisjoint(beside)


def test_ungraft__a_section_beside_heads_changes_and_the_heads_do_not():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = Row(part(), part(), part()), Branches(tuple)

        def forward(self, x):
            return self.heads(self.body(x))

    net = Several()
    small, _ = ungraft(net, keep=[2], example=X)
    assert (len(small.body.blocks), len(small.heads.branches)) == (2, 3)


def test_graft__a_section_that_the_example_does_not_run_is_left_alone():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Row(part(), part()), Row(part(), part())

        def forward(self, x, both=False):
            return self.second(self.first(x)) if both else self.first(x)

    net = Optional()
    assert len(graft(net, depths=[3, 2], example=X)[0].first.blocks) == 3
    with refused("ambiguous"):
        graft(net, depths=[2, 3], example=X)
    assert len(graft(net, depths=[2, 3], example=(X, True))[0].second.blocks) == 3


def test_order__sequentials_and_declared_blocks_need_no_example():
    assert len(graft(nn.Sequential(part(), part()), depths=[3])[0]) == 3
    net = Spec("resnet20").build()
    depths = [len(section.blocks) + 1 for section in surgery.sections(net)]
    assert set(graft(net, depths=depths)[0].state_dict()) == set(graft(surgery.state(net), depths=depths)[0])


def test_order__a_state_shows_no_order_so_its_caller_names_the_section():
    values = surgery.state(Row(part(), part()))
    with refused("ambiguous"):
        graft(values, depths=[3])
    with refused("ambiguous"):
        ungraft(values, keep=[1])
    assert len(graft(values, depths={"blocks": 3})[0]) == len(values) * 3 / 2
    assert len(ungraft(values, keep={"blocks": 1})[0]) == len(values) / 2
    with refused("argument"):
        surgery.sections(values, example=X)
    for net in (nn.Sequential(part(), part()), nn.Sequential(nn.Linear(6, 6), nn.Sequential(part(), part()))):
        assert len(graft(surgery.state(net), depths=[3])[0]) == len(surgery.state(net)) + len(values) / 2
