import copy
import itertools
from collections import Counter, OrderedDict
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from selection import some
from symmetric import Made
from torch import nn

import surgery
from surgery import graft, narrow, state, ungraft
from surgery.depth.sections import BLOCKS
from surgery.depth.tree import Chain, Skip
from surgery.plan import Plan
from zoo import Spec


class Block(nn.Module):
    """A residual block that may change its width; `scale` comes beside the input."""

    def __init__(self, inputs, outputs, norm):
        super().__init__()
        self.a, self.b = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)
        self.norm = nn.BatchNorm1d(outputs) if norm else nn.Identity()
        self.down = nn.Linear(inputs, outputs, bias=False) if inputs != outputs else nn.Identity()
        self.register_buffer("seen", torch.arange(3), persistent=False)

    def forward(self, x, scale=1.0):
        return self.down(x) + scale * self.norm(self.b(torch.tanh(self.a(x))))


class Net(nn.Module):
    """Stages of blocks, held in one of four ways."""

    def __init__(self, widths, depths, way, norm=True):
        super().__init__()
        self.way, self.stages, inputs = way, [], 3
        flat = []
        for i, (width, depth) in enumerate(zip(widths, depths)):
            blocks = [Block(inputs if j == 0 else width, width, norm) for j in range(depth)]
            inputs = width
            if way == "flat":
                flat += [*blocks, nn.Tanh()]
            elif way == "named":
                names = [f"stage{i}_{j}" for j in range(depth)]
                self.stages += names
                for name, block in zip(names, blocks):
                    setattr(self, name, block)
            else:
                setattr(self, f"stage{i}", nn.Sequential(*blocks) if way == "sequential" else nn.ModuleList(blocks))
                self.stages.append(f"stage{i}")
        if flat:
            self.flat = nn.Sequential(*flat)
        self.head = nn.Linear(inputs, 2)

    def forward(self, x):
        if self.way == "flat":
            return self.head(self.flat(x))
        for name in self.stages:
            stage = getattr(self, name)
            if isinstance(stage, nn.ModuleList):
                for block in stage:
                    x = block(x, 0.5)
            else:
                x = stage(x) if self.way == "sequential" else stage(x, 0.5)
        return self.head(x)


WAYS = ["sequential", "list", "flat", "named"]


@st.composite
def nets(draw, ways=WAYS):
    """A net with its depths and deeper ones."""
    n = draw(st.integers(1, 3))
    depths = draw(st.lists(st.integers(2, 4), min_size=n, max_size=n))
    deeper = [depth + draw(st.integers(0, 3)) for depth in depths]
    widths = draw(st.lists(st.sampled_from([4, 5, 6, 7]), min_size=n, max_size=n, unique=True))
    way = draw(st.sampled_from(ways))
    torch.manual_seed(draw(st.integers(0, 9)))
    return Net(widths, depths, way).eval(), depths, deeper


def shown(net):
    """What shows that blocks of a net follow each other, where its structure does not."""
    return {} if net.way in ("sequential", "flat") else {"example": torch.zeros(2, 3)}


def assert_equal_modules(a, b):
    assert str(a) == str(b)
    assert_equal_states(surgery.state(a), surgery.state(b))
    assert [m.training for m in a.modules()] == [m.training for m in b.modules()]
    assert [p.requires_grad for p in a.parameters()] == [p.requires_grad for p in b.parameters()]


def assert_equal_states(a, b):
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
        assert a[name].dtype == b[name].dtype


def storages(model):
    return {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()}


def runs(model, x, kind):
    """The output and how many modules of a class ran for it."""
    count = Counter()
    handles = [
        m.register_forward_hook(lambda m, *_: count.update([type(m)])) for m in model.modules() if type(m) is kind
    ]
    with torch.no_grad():
        out = model(x)
    for handle in handles:
        handle.remove()
    return out, count[kind]


@settings(max_examples=6)
@given(nets())
def test_graft__ungraft_undoes_graft_and_plans_are_exact(case):
    net, depths, deeper = case
    before = copy.deepcopy(net)
    assert [len(s.blocks) for s in surgery.sections(net)] == depths
    full, plan = surgery.graft(net, depths=deeper, **shown(net))
    assert_equal_modules(net, before)
    assert not storages(full) & storages(net)
    assert [len(s.blocks) for s in surgery.sections(full)] == deeper
    out, count = runs(full, torch.randn(2, 3), Block)
    assert count == sum(deeper)
    assert out.isfinite().all()
    assert_equal_states(plan.extract(surgery.state(full)), surgery.state(net))
    embedded, mask = plan.embed(surgery.state(net))
    assert all(m.all() for m in mask.values())
    assert_equal_states(embedded, {name: surgery.state(full)[name] for name in embedded})
    assert_equal_modules(Plan.from_json(plan.to_json()).build(full), net)
    back, small = surgery.ungraft(full, keep=depths, **shown(net))
    assert_equal_modules(back, net)
    assert not storages(back) & storages(full)
    assert small.entries == plan.entries


@pytest.mark.slow
@settings(max_examples=12)
@given(nets([way for way in WAYS if way != "flat"]))  # a state shows no activation between two sections
def test_graft__a_state_is_deepened_as_the_module_is(case):
    net, depths, deeper = case
    values = surgery.state(net)
    found = surgery.sections(values)
    full, plan = surgery.graft(values, depths={s.name: depth for s, depth in zip(found, deeper)})
    assert_equal_states(plan.extract(full), values)
    assert_equal_states(full, surgery.state(surgery.graft(net, depths=deeper, **shown(net))[0]))
    back, _ = surgery.ungraft(full, keep={s.name: depth for s, depth in zip(found, depths)})
    assert_equal_states(back, values)


@pytest.mark.parametrize("way", WAYS)
def test_graft__identity_keeps_outputs_and_zeroes_only_the_last_tensors(way):
    torch.manual_seed(0)
    net = Net([4, 6], [2, 3], way)
    net(torch.randn(16, 3))  # norm statistics that are not trivial
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    before, x = copy.deepcopy(net), torch.randn(5, 3)
    full, plan = surgery.graft(net, depths=[4, 3] if way != "flat" else [2, 5], mode="identity", example=x)
    assert_equal_modules(net, before)
    assert full.training
    assert torch.allclose(full.eval()(x), net.eval()(x), atol=1e-5)
    new = [name for name in surgery.state(full) if name not in {s[0].name for s in plan.entries.values()}]
    zero = {name.rpartition(".norm.")[2] for name in new if not surgery.state(full)[name].any() and "norm" in name}
    assert zero - {"num_batches_tracked"} == {"weight", "bias"}
    assert all(surgery.state(full)[name].any() for name in new if ".norm." not in name)
    assert_equal_states(plan.extract(surgery.state(full)), surgery.state(before))
    _, mask = plan.embed(surgery.state(before))
    assert not any(mask[name].any() for name in new)


MODELS = [
    ("torchvision", "resnet18", "BasicBlock"),
    ("timm", "swin_tiny_patch4_window7_224", "SwinTransformerBlock"),
    ("torchvision", "mobilenet_v2", "InvertedResidual"),
    ("timm", "resnet18", "BasicBlock"),
    ("timm", "vit_tiny_patch16_224", "Block"),
    ("timm", "convnext_atto", "ConvNeXtBlock"),
    ("timm", "efficientnet_b0", "InvertedResidual"),
    ("timm", "regnetx_002", "Bottleneck"),
    ("timm", "mobilenetv3_small_050", "InvertedResidual"),
    ("timm", "eva02_tiny_patch14_224", "EvaBlock"),
]


SMALLER = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 48},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 4},
}


def make(library, name):
    torch.manual_seed(0)
    if library == "torchvision":
        model = torchvision.models.get_model(name)
    else:
        model = timm.create_model(name, **SMALLER.get(name, {}))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # some start as zero, and then every block is the identity
            nn.init.uniform_(module.weight, 0.5, 1)
    return model.eval()


def one_more(model):
    return {s.name: len(s.blocks) + 1 for s in surgery.sections(model) if surgery.depth.sections.repeatable(model, s)}


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name", "kind"), some(MODELS, [MODELS[0], MODELS[4]]))
@pytest.mark.parametrize("mode", ["copy", "identity"])
def test_graft__real_models_grow_and_shrink_back(library, name, kind, mode):
    model = make(library, name)
    x = torch.randn(1, 3, *((56, 56) if "eva" in name or "swin" in name else (64, 64)))
    asked = one_more(model)
    full, plan = surgery.graft(model, depths=asked, mode=mode, example=x if mode == "identity" else None)
    kinds = {type(m) for m in model.modules() if type(m).__name__ == kind}
    (block,) = kinds
    expected, before = runs(model, x, block)
    out, after = runs(full, x, block)
    assert after - before == sum(
        type(model.get_submodule(s.blocks[-1])) is block for s in surgery.sections(model) if s.name in asked
    )
    assert out.isfinite().all()
    if mode == "identity":
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)
    else:
        assert not torch.equal(out, expected)
    assert_equal_modules(plan.build(full), model)
    depths, shown = [len(s.blocks) for s in surgery.sections(model)], x if mode == "identity" else None
    assert_equal_modules(surgery.ungraft(full, keep=depths, example=shown)[0], model)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(["resnet50", "vit_b_16", "swin_t", "mobilenet_v2", "dla60"], ["vit_b_16"]))
def test_graft__meta_models_have_their_structure_changed(name):
    with torch.device("meta"):  # dla's blocks append to a list that they are given
        model = timm.create_model(name) if name == "dla60" else torchvision.models.get_model(name)
    depths = [len(s.blocks) for s in surgery.sections(model)]
    full, plan = surgery.graft(model, depths=one_more(model))
    assert sum(len(s.blocks) for s in surgery.sections(full)) == sum(depths) + len(one_more(model))
    x = torch.empty(2, 3, 224, 224, device="meta")
    assert full(x).shape == (2, 1000)
    assert str(plan.build(full)) == str(model) == str(surgery.ungraft(full, keep=depths)[0])
    shallow, _ = surgery.ungraft(model, keep=[1] * len(depths))
    assert shallow(x).shape == (2, 1000)


def test_graft__tied_tensors_frozen_ones_and_formats_are_kept(monkeypatch):
    monkeypatch.setitem(BLOCKS, Block, None)
    net = Net([4], [3], "list")
    blocks = net.stage0
    blocks[1].a.weight = blocks[2].a.weight  # with a block before: the copy is tied to it too
    blocks[2].b.weight.requires_grad_(False)
    net.to(torch.float64)
    full, plan = surgery.graft(net, depths=[5])
    last = full.stage0[2]
    assert isinstance(last, Chain)
    assert last[0].a.weight is last[1].a.weight is last[2].a.weight is full.stage0[1].a.weight
    assert not last[2].b.weight.requires_grad
    assert last[2].a.bias.requires_grad
    assert {p.dtype for p in full.parameters()} == {torch.float64}
    assert last[1].a.bias is not last[2].a.bias
    assert torch.equal(last[2].seen, blocks[2].seen)
    assert_equal_modules(plan.build(full), net)
    again = plan.build(full)
    assert again.stage0[1].a.weight is again.stage0[2].a.weight
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2)))
    net = net.to(memory_format=torch.channels_last)
    full, _ = surgery.graft(net, depths=[3])
    assert full[2][0].weight.stride() == net[1][0].weight.stride()


def test_graft__dropping_puts_a_skip_where_no_sequential_is():
    net = Net([4], [3], "named").eval()
    shallow, _ = surgery.ungraft(net, keep=[1], **shown(net))
    assert [type(m) for m in (shallow.stage0_1, shallow.stage0_2)] == [Skip, Skip]
    net = Net([4], [3], "sequential")
    assert len(surgery.ungraft(net, keep=[1])[0].stage0) == 1


def test_graft__later_children_of_a_sequential_move_up():
    net = Net([4, 5], [2, 2], "flat")
    full, _ = surgery.graft(net, depths=[4, 3])
    assert [type(m).__name__ for m in full.flat] == ["Block"] * 4 + ["Tanh"] + ["Block"] * 3 + ["Tanh"]
    assert list(full.flat._modules) == [str(i) for i in range(9)]


def test_graft__a_sequential_of_numbered_names_grows_at_its_end():
    def net(depth):
        blocks = {f"layer_{i}": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for i in range(depth)}
        return nn.ModuleDict({"layers": nn.Sequential(OrderedDict(blocks))})

    full, plan = graft(net(2), depths=[4])
    assert list(state(full)) == list(state(net(4)))
    assert str(plan.build(full)) == str(ungraft(full, keep=[2])[0]) == str(net(2))
    open_end = net(2)["layers"].append(nn.ReLU())
    assert isinstance(graft(open_end, depths=[3])[0][1], Chain)


def two_linear(linear=nn.Linear):
    return nn.Sequential(linear(4, 4), nn.ReLU(), linear(4, 4))


def experts():
    """Modules of one class that run side by side."""
    blocks = nn.ModuleList(two_linear() for _ in range(3))
    return Made(lambda net, x: sum(expert(x) for expert in net.experts), experts=blocks)


def one_by_one(net, x):
    """Counts on the number of children of a Sequential."""
    for i in range(5):
        x = net.all[i](x)
    return x


def into_the_children(net, x):
    for i in (1, 2, 3):
        x = net.all[i][2](net.all[i][1](net.all[i][0](x if i > 1 else net.all[0](x))))
    return net.all[4](x)


def indexing(function):
    return Made(function, all=nn.Sequential(nn.Linear(3, 4), *(two_linear() for _ in range(3)), nn.Linear(4, 4)))


def attend(net, x):
    q, k, v = net.qkv(x).chunk(3, -1)
    return net.out(nn.functional.scaled_dot_product_attention(q, k, v))


def attend_and_feed(net, x):
    for attention, feed in net.layers:
        x = x + attention(x)
        x = x + feed(x)
    return x


def lists(depth):
    """Each entry of the list is a list of an attention and a feed-forward, which is not called itself."""
    pairs = (
        [Made(attend, qkv=nn.Linear(4, 12), out=nn.Linear(4, 4)),
         nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))]
        for _ in range(depth)
    )  # fmt: skip
    return Made(attend_and_feed, layers=nn.ModuleList(map(nn.ModuleList, pairs)))


@pytest.mark.slow
def test_graft__lists_of_pairs_grow_and_shrink_where_an_example_shows_that_they_run():
    net, x = lists(3), torch.randn(2, 5, 4)
    assert surgery.sections(net) == [surgery.Section("layers", ("layers.0", "layers.1", "layers.2"))]
    for mode in ("copy", "identity"):
        full, plan = graft(net, depths=[5], mode=mode, example=x)
        assert list(state(full)) == list(state(lists(5)))
        assert torch.equal(full(x), net(x)) == (mode == "identity")
        assert_equal_modules(plan.build(full), net)
        assert_equal_modules(ungraft(full, keep=[3], example=x)[0], net)
    zero = [name for name, tensor in state(full).items() if name.startswith("layers.4") and not tensor.any()]
    assert zero == [f"layers.4.{part}" for part in ("0.out.weight", "0.out.bias", "1.2.weight", "1.2.bias")]
    for change in (lambda: graft(net, depths=[4]), lambda: ungraft(net, keep=[2])):
        with refused("ambiguous"):
            change()


def test_graft__identities_of_two_sections_of_lists():
    """What is tried for one section once left the model changed in which the next one was tried."""
    net = Made(lambda net, x: net.two(net.between(net.one(x))), one=lists(2), between=nn.Linear(4, 4), two=lists(2))
    x = torch.randn(2, 5, 4)
    full, _ = graft(net, depths=[3, 4], mode="identity", example=x)
    assert torch.equal(full(x), net(x))


class _Counting(nn.Module):
    """Runs as many blocks of a list as a number says."""

    def __init__(self, num_blocks):
        super().__init__()
        self.num_blocks = num_blocks
        self.blocks = nn.ModuleList(Block(4, 4, False) for _ in range(num_blocks))

    def forward(self, x):
        for i in range(self.num_blocks):
            x = self.blocks[i](x)
        return x


@pytest.mark.parametrize("hide", [False, True])
def test_graft__a_list_grows_with_the_number_of_its_blocks_or_has_a_chain(hide):
    net, x = _Counting(2), torch.randn(2, 4)
    if hide:  # where the number of blocks cannot be found, the list keeps its length
        net.num_blocks = type("Number", (int,), {})(2)
    full, plan = graft(net, depths=[4], example=x)
    assert [type(block) for block in full.blocks] == ([Block, Chain] if hide else [Block] * 4)
    assert (full.num_blocks, plan.build(full).num_blocks, net.num_blocks) == (2 if hide else 4, 2, 2)
    assert runs(full, x, Block)[1] == 4
    assert_equal_modules(plan.build(full), net)
    small, _ = ungraft(net, keep=[1], example=x)
    assert torch.equal(small(x), net.blocks[0](x))


def test_graft__sections_of_different_forms_are_found_one_by_one():
    def both(net, x):
        for block in net.a:
            x = block(x)
        return net.b[1](net.b[0](net.mid(x)))

    a, b = (nn.ModuleList(Block(width, width, False) for _ in range(2)) for width in (4, 5))
    net, x = Made(both, a=a, b=b, mid=nn.Linear(4, 5)), torch.randn(2, 4)
    full, plan = graft(net, depths=[3, 4], example=x)
    assert [type(block) for block in (*full.a, *full.b)] == [Block] * 4 + [Chain]
    assert runs(full, x, Block)[1] == 7
    assert_equal_modules(plan.build(full), net)
    small, _ = ungraft(net, keep=[1, 1], example=x)
    assert [type(block) for block in (*small.a, *small.b)] == [Block, Block, Skip]
    assert torch.equal(small(x), net.b[0](net.mid(net.a[0](x))))


def test_graft__blocks_with_computed_weights_are_copied():
    with pytest.warns(FutureWarning, match="weight_norm"):
        net = nn.Sequential(*(two_linear(lambda i, o: nn.utils.weight_norm(nn.Linear(i, o))) for _ in range(2)))
    x = torch.randn(2, 4)
    full, plan = graft(net, depths=[3], example=x)
    assert torch.equal(full(x), net[1](net(x)))
    assert torch.equal(plan.build(full)(x), net(x))


def test_graft__containers_whose_code_indexes_them_keep_their_length():
    net, x = indexing(one_by_one), torch.randn(2, 3)
    full, plan = graft(net, depths=[5], example=x)
    blocks = [net.all[i] for i in (0, 1, 2, 3, 3, 3, 4)]
    assert torch.equal(full(x), nn.Sequential(*blocks)(x))
    assert [type(child) for child in full.all[3:]] == [Chain, nn.Linear]
    assert_equal_modules(plan.build(full), net)
    assert_equal_modules(ungraft(full, keep=[3], example=x)[0], net)
    shallow, _ = ungraft(net, keep=[(0, 2)], example=x)
    assert torch.equal(shallow(x), nn.Sequential(*(net.all[i] for i in (0, 1, 3, 4)))(x))
    assert isinstance(shallow.all[2], Skip)


def test_graft__plans_build_only_from_modules_of_their_structure():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    other = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.Sigmoid(), nn.Conv2d(8, 4, 3))
    _, plan = narrow(net, 0.5, torch.zeros(1, 3, 9, 9))
    plan.extract(state(other))  # states of these shapes will do
    with refused("plan"):
        plan.build(other)


class Pair(nn.Module):
    """Returns two values, as its code shows."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.b(self.a(x).relu())
        return y, y.mean()


def firsts(net, x):
    for block in net.blocks:
        x, _ = block(x)
    return x


def test_graft__blocks_that_return_several_values_are_not_skipped(monkeypatch):
    monkeypatch.setitem(BLOCKS, Pair, None)
    net, x = Made(firsts, blocks=nn.ModuleList(Pair() for _ in range(3))), torch.randn(2, 4)
    with refused("depth: 'blocks.2'"):
        ungraft(net, keep=[2])
    small, _ = ungraft(net, keep=[2], example=x)  # but their list may become shorter
    assert torch.equal(small(x), net.blocks[1](net.blocks[0](x)[0])[0])


class _Biased(nn.Module):
    """Takes and returns a bias beside its input, as T5's blocks do."""

    def __init__(self):
        super().__init__()
        self.norm, self.bias, self.out = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x, mask, bias=None):
        bias = self.bias(x) if bias is None else bias
        return x + self.out(torch.tanh(self.norm(x) + bias)) * mask, bias + 1


class _Biases(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Biased() for _ in range(2))

    def forward(self, x, mask):
        bias = None
        for block in self.blocks:
            x, bias = block(x, mask, bias=bias)
        return x


def test_graft__only_the_first_output_of_an_identity_block_has_to_be_its_input():
    net, example = _Biases(), {"x": torch.randn(2, 4), "mask": torch.ones(2, 1)}
    full, plan = graft(net, depths=[4], mode="identity", example=example)
    assert torch.equal(full(**example), net(**example))
    new = {name: tensor for name, tensor in state(full).items() if name not in state(net) and "norm" not in name}
    zero = ("bias.weight", "bias.bias", "out.weight")  # the bias, which later blocks do not use, to be safe
    assert [name for name, t in new.items() if not t.any()] == [f"blocks.{i}.{name}" for i in (2, 3) for name in zero]
    assert_equal_modules(plan.build(full), net)


@pytest.mark.slow
@settings(max_examples=15)
@given(nets(), st.data())
def test_graft__blocks_to_keep_leave_the_identity_where_others_were(case, data):
    net, _, deeper = case
    model = surgery.graft(net, depths=deeper, **shown(net))[0].eval() if data.draw(st.booleans()) else net
    sections = surgery.sections(model)
    kept = {s.name: [0, *sorted(data.draw(st.sets(st.integers(1, len(s.blocks) - 1))))] for s in sections}
    before, bare = copy.deepcopy(model), copy.deepcopy(model)
    for section in sections:
        for position, block in enumerate(section.blocks):
            if position not in kept[section.name]:
                parent, _, child = block.rpartition(".")
                bare.get_submodule(parent)._modules[child] = Made(lambda net, x, *scale: x)
    x = torch.randn(2, 3)
    shallow, plan = surgery.ungraft(model, keep=kept, example=x if shown(net) or data.draw(st.booleans()) else None)
    assert_equal_modules(model, before)
    assert_equal_modules(Plan.from_json(plan.to_json()).build(model), shallow)
    assert torch.equal(shallow(x), bare(x))
    owner = {source.name: e[0].name for e in plan.entries.values() for source in e}
    for section in sections:
        for position, block in enumerate(section.blocks):
            nearest = max(k for k in kept[section.name] if k <= position)
            # A block that widens cannot stand for those behind it.
            expected = f"{section.blocks[nearest]}.b.weight" if nearest > 0 or position == 0 else None
            assert owner.get(f"{block}.b.weight") == expected
    if net.way != "flat":
        again, states_plan = surgery.ungraft(surgery.state(model), keep=kept)
        assert {s[0].name for s in states_plan.entries.values()} == {s[0].name for s in plan.entries.values()}
        assert [t.shape for t in again.values()] == [t.shape for t in surgery.state(shallow).values()]


def test_graft__kept_blocks_of_the_zoo_are_numbered_anew_and_fit_narrow_models():
    spec = Spec("preresnet18", image_size=8, width=0.125, depth=(3, 4, 1, 2))
    model, x = spec.build().eval(), torch.randn(2, 3, 8, 8)
    shallow, depth = ungraft(
        model, keep={"section1": (2,), "section2": [0, 3], "section4": (0,)}, example=x, stands_for="corner"
    )
    names = {part: [s.name for s in depth.entries[f"{part}.conv2.weight"]] for part in ("section2.0", "section2.1")}
    assert names == {
        "section2.0": [f"section2.{i}.conv2.weight" for i in (0, 1, 2)],
        "section2.1": ["section2.3.conv2.weight"],
    }
    assert [s.name for s in depth.entries["section1.0.conv1.weight"]] == ["section1.2.conv1.weight"]
    small, width = narrow(shallow, like=spec.scale(0.5, (1, 2, 1, 1)).build())
    assert_equal_states(depth.compose(width).extract(state(model)), state(small))
    assert small.eval()(x).shape == (2, 10)


def test_graft__who_stands_for_whom_by_hand():
    net = Net([4], [3], "sequential", norm=False)  # a.weight: [4, 3], [4, 4], [4, 4]
    full = {name: torch.full_like(tensor, 9.0) for name, tensor in state(net).items()}
    got = {}
    for stand in ("equal", "corner", "none"):
        shallow, plan = ungraft(net, keep=[1], stands_for=stand)
        ones = {name: torch.ones_like(tensor) for name, tensor in state(shallow).items()}
        deep, whole = ungraft(net, keep=[3], stands_for=stand)
        fives = {name: torch.full_like(tensor, 5.0) for name, tensor in state(deep).items()}
        got[stand] = surgery.average([ones, fives], [plan, whole], fallback=full, weights=[3, 1])
        assert plan.entries["stage0.0.down.weight"] == whole.entries["stage0.0.down.weight"]  # no block has another
    assert got["corner"]["stage0.2.a.weight"].tolist() == [[2, 2, 2, 5]] * 4
    assert got["corner"]["stage0.1.b.weight"].tolist() == [[2] * 4] * 4
    for stand in ("equal", "none"):
        assert got[stand]["stage0.2.a.weight"].tolist() == got[stand]["stage0.2.b.weight"].tolist() == [[5] * 4] * 4
    last = [len(ungraft(net, keep=[2], stands_for=stand)[1].entries["stage0.1.b.weight"]) for stand in got]
    assert last == [2, 2, 1]


def test_graft__a_first_block_that_is_like_the_others_may_go():
    """It keeps the shape of its input, which its first and last layers do not show."""
    gated = (Made(lambda net, x: x + net.a(x) * net.gate(x), a=nn.Linear(4, 4), gate=nn.Linear(4, 1)) for _ in range(3))
    net, x = nn.Sequential(*gated), torch.randn(2, 4)
    shallow, _ = ungraft(net, keep=[(1,)], example=x)
    assert torch.equal(shallow(x), net[1](x))


NET = Net([4, 5], [3, 2], "sequential")
PLAIN = nn.Sequential(two_linear(), two_linear())
SCRIPTED = nn.Sequential(nn.ReLU(), torch.jit.script(PLAIN))
LAZY = nn.Sequential(*(two_linear(lambda _, size: nn.LazyLinear(size)) for _ in range(2)))
RESNET = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
NORMS_LAST = [Made(lambda net, x: net.norm(x + net.a(x)), a=nn.Linear(4, 4), norm=nn.LayerNorm(4)) for _ in range(2)]
X, IDENTITY = torch.zeros(2, 4), {"mode": "identity", "example": torch.randn(2, 4)}
REFUSED = [  # a call, its model, its depths or the blocks to keep, options, the code and the name in the message
    (graft, NET, [1, 2], {}, "depth: 'stage0'"),
    (ungraft, NET, [2, 3], {}, "depth: 'stage1'"),
    (ungraft, NET, [0, 2], {}, "argument: 'stage0'"),
    (graft, NET, [2], {}, "argument: 'stage0'"),
    (graft, NET, {"stage7": 2}, {}, "name: 'stage7'"),
    (graft, NET, [3, 3], {"mode": "identity"}, "argument"),
    (graft, state(NET), [3, 3], IDENTITY, "argument"),
    (graft, NET, [3, 3], {"mode": "zero"}, "argument"),
    (graft, NET, [(0, 1), 2], {}, "argument"),
    (graft, nn.Linear(2, 2), [3], {}, "argument"),
    (graft, RESNET, {"layer2": 2}, {}, "depth: 'layer2'"),
    (graft, nn.Sequential(*NORMS_LAST), [3], IDENTITY, "depth: '1'"),
    (graft, torch.jit.script(PLAIN), [3], {}, "unsupported"),
    (ungraft, SCRIPTED, [1], {}, "unsupported: '1'"),
    (graft, LAZY, [3], {}, "unsupported: '0.0'"),
    (graft, [PLAIN], [3], {}, "argument: list"),
    (graft, state(PLAIN), [3], {"example": X}, "argument"),
    (graft, PLAIN, [True], {}, "argument"),
    (graft, PLAIN, [3], {"example": {"y": X}}, "run"),
    (graft, experts(), [4], {"example": X}, "argument"),
    (ungraft, experts(), [2], {"example": X}, "argument"),
    (graft, indexing(into_the_children), [4], {"example": X[:, :3]}, "depth"),
    (ungraft, indexing(into_the_children), [2], {"example": X[:, :3]}, "depth"),
    (ungraft, NET, {"stage0": ()}, {}, "argument: 'stage0'"),
    *((ungraft, NET, {"stage0": [*kept]}, {}, "argument: 'stage0'")
      for kept in ((0, 3), (0, -1), (2, 0), (0, 0, 1))),
    (ungraft, NET, [(1, 2), 2], {}, "depth: 'stage0'"),
    (ungraft, NET, {"stage1": (1,)}, {}, "depth: 'stage1.0'"),
    (ungraft, NET, {"stage1": "01"}, {}, "argument"),
    (ungraft, NET, [1, 1], {"stands_for": "all"}, "argument"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "model", "depths", "options", "expected"), REFUSED, ids=[case[-1] for case in REFUSED]
)
def test_graft__what_cannot_be_done_is_refused_with_the_way_out(change, model, depths, options, expected):
    with refused(expected):
        change(model, **{"depths" if change is graft else "keep": depths, **options})


class Conditioned(nn.Module):
    """A residual block with an optional input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(4, 8)

    def forward(self, x, c=None):
        x = x if c is None else x + self.c(c)
        return x + self.b(self.a(x).relu())


class Stacked(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.i, self.o = nn.Linear(4, 8, bias=False), nn.Linear(8, 3)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x, c=None):
        x = self.i(x)
        for layer in self.layers:
            x = layer(x, c)
        return self.o(x)


class Unbiased(nn.Module):
    def __init__(self, end=nn.Identity):
        super().__init__()
        self.norm, self.end = nn.LayerNorm(8, bias=False), end()
        self.a, self.b = nn.Linear(8, 8, False), nn.Linear(8, 8, False)

    def forward(self, x, c=None):
        return self.end(x + self.b(self.a(self.norm(x)).relu()))


@pytest.mark.parametrize("size", some([0, 1e-3, 1], [0, 1e-3]))
def test_graft__an_identity_is_one_for_other_inputs_than_the_example(size, caplog):
    """With activations of zero nothing had to be zeroed, and grafted models computed something else."""
    shown = size * torch.randn(3, 4)
    x = torch.randn(50, 4)
    for net in (Stacked(Unbiased), Stacked(Conditioned)):
        full, _ = graft(net, depths=[4], mode="identity", example=shown)
        assert torch.allclose(full(x), net(x), atol=1e-6)
        assert torch.allclose(full(x, x), net(x, x), atol=1e-6)
    assert "c.bias, c.weight of layers.1" in caplog.text
    images = torch.randn(2, 3, 32, 32)
    resnet = torchvision.models.resnet.ResNet(torchvision.models.resnet.BasicBlock, [2, 1, 1, 1], num_classes=5).eval()
    full, _ = graft(resnet, depths=[4, 1, 1, 1], mode="identity", example=images * size)
    assert torch.allclose(full(images), resnet(images), atol=1e-5)
    with refused("depth"):
        graft(Stacked(lambda: Unbiased(nn.SiLU)), depths=[4], mode="identity", example=shown)


def test_graft__parameters_of_blocks_that_lie_beside_them_are_told(caplog):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))
            self.scale, self.out = nn.Parameter(torch.tensor([1.0, 10, 100])), nn.Linear(4, 2)

        def forward(self, x):
            for scale, block in zip(self.scale, self.blocks):
                x = x + scale * block(x)
            return self.out(x)

    x = torch.randn(2, 4)
    ungraft(Scaled(), keep=[2], example=x)
    assert "scale" not in caplog.text
    ungraft(Scaled(), keep=[[0, 2]], example=x)
    assert "scale" in caplog.text


class UNet(nn.Module):
    """Outputs of the blocks on the way down are put on a list, and taken off it on the way up."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Block(3, 3, False) for _ in range(3))
        self.up = nn.ModuleList(Block(3, 3, False) for _ in range(3))

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(self.put(x))
        for block in self.up:
            x = block(x + skips.pop())
        return x

    def put(self, x):
        return x


class Cloned(UNet):
    def put(self, x):
        return x.clone().view(len(x), -1)


DEEPER = [{"down": 4}, {"up": 4}, {"down": 4, "up": 5}]


@pytest.mark.parametrize(
    ("depths", "kind"), some(itertools.product(DEEPER, [UNet, Cloned]), [*zip(DEEPER, [Cloned, Cloned, UNet])])
)
def test_graft__skip_connections_of_a_stack_lead_to_the_same_blocks_as_before(depths, kind):
    net, x = kind().eval(), torch.randn(2, 3)
    same, _ = graft(net, depths=depths, mode="identity", example=x)
    torch.testing.assert_close(same(x), net(x))
    deeper, plan = graft(net, depths=depths, example=x)
    assert [len(deeper.down), len(deeper.up)] == [3, 3]  # a longer list would pair the others anew
    torch.testing.assert_close(plan.build(deeper)(x), net(x))


def test_graft__outputs_that_are_collected_do_not_keep_a_list_from_growing():
    """Their places are fixed, so that more blocks at the end change nothing about them."""

    class Tapped(UNet):
        def forward(self, x):
            found = []
            for block in self.down:
                x = block(x)
                found.append(x)
            return x + sum(block(one) for block, one in zip(self.up, found))

    class Bare(UNet):
        def forward(self, x):
            for block in self.down:
                x = block(x)
            return x

    for net in (Tapped().eval(), Bare().eval()):
        assert len(graft(net, depths={"down": 5}, example=torch.randn(2, 3))[0].down) == 5


def test_graft__a_section_before_others_of_its_list_grows_in_it():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            blocks = [
                Block(3, 3, False),
                Block(3, 3, False),
                Block(3, 5, False),
                Block(5, 5, False),
                Block(5, 5, False),
            ]
            self.blocks = nn.ModuleList(blocks)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    net = Listed().eval()
    first, *_ = surgery.sections(net)
    assert len(graft(net, depths={first.name: len(first.blocks) + 2}, example=torch.randn(2, 3))[0].blocks) == 7


@pytest.mark.parametrize(("stands_for", "blocks"), [("none", [1]), ("equal", [1]), ("corner", [1, 2, 3])])
def test_graft__a_block_stands_for_dropped_ones_of_its_shapes(stands_for, blocks):
    """The first of three blocks reads fewer features than the others."""

    class Block(nn.Module):
        def __init__(self, inputs):
            super().__init__()
            self.a, self.b = nn.Linear(inputs, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x).relu())

    net = nn.Sequential(nn.Linear(2, 4), Block(4), Block(8), Block(8), nn.Linear(8, 2))
    (section,) = surgery.sections(net)
    _, plan = ungraft(net, keep={section.name: 1}, stands_for=stands_for, example=torch.zeros(1, 2))
    assert [source.name for source in plan.entries["1.b.weight"]] == [f"{i}.b.weight" for i in blocks]


def test_graft__a_list_of_the_configuration_with_an_entry_for_each_block_follows_whatever_it_is_called():
    """The class is the judge: a list that is as long by chance stays."""

    class Local(nn.Module):
        def __init__(self, window):
            super().__init__()
            self.window, self.up, self.down = window, nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x):
            return x + self.down(self.up(x).relu())

    class Encoder(nn.Module):
        def __init__(self, config):
            super().__init__()
            if len(config.attention_window) != config.num_layers:
                raise ValueError("a window for each layer is needed")
            self.config = config
            self.layers = nn.ModuleList(map(Local, config.attention_window))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    def windows(net):
        config = net.config
        assert config.colors == (3, 4, 5)
        assert (
            [layer.window for layer in net.layers]
            == config.attention_window
            == [*Encoder(config).config.attention_window]
        )
        return config.attention_window

    net, x = Encoder(SimpleNamespace(num_layers=3, attention_window=[2, 4, 8], colors=(3, 4, 5))), torch.randn(2, 4)
    deeper, plan = graft(net, depths=[5], example=x)
    assert windows(deeper) == [2, 4, 8, 8, 8]
    assert windows(plan.build(deeper)) == windows(net) == [2, 4, 8]
    shallow, plan = ungraft(net, keep=[(0, 2)], example=x)
    assert windows(shallow) == windows(Plan.from_json(plan.to_json()).build(net)) == [2, 8]


PLACES = ([0, 1, 1, 1, 2], [0, 1, 1, 2, 2], [0, 0, 1, 2])


def rows(*blocks):
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(*blocks), nn.Linear(4, 2))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("held", ["module", "state"])
def test_graft__blocks_repeat_at_given_places(held, places):
    net, x = rows(*(Block(4, 4, False) for _ in range(3))), torch.rand(2, 3)
    given_net = net if held == "module" else state(net)
    deep, plan = graft(given_net, depths={"1": places}, example=x if held == "module" else None)
    expected = rows(*(copy.deepcopy(net[1][place]) for place in places))
    expected[0], expected[2] = net[0], net[2]
    values = state(deep) if held == "module" else deep
    assert list(values) == list(state(expected))
    assert all(torch.equal(values[name], tensor) for name, tensor in state(expected).items())
    assert all(torch.equal(tensor, values[name]) for name, tensor in plan.embed(state(net))[0].items())
    if held == "module":
        assert torch.equal(deep(x), expected(x))
        assert torch.equal(plan.build(deep)(x), net(x))


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("way", ["list", "chain"])
def test_graft__new_blocks_at_given_places_change_nothing(way, places):
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block(4, 4, False) for _ in range(3))

        def forward(self, x):
            if way == "chain":  # whose entries the code indexes
                return self.blocks[2](self.blocks[1](self.blocks[0](x)))
            for block in self.blocks:
                x = block(x)
            return x

    net, x = Listed(), torch.rand(2, 4)
    deep, plan = graft(net, depths=[places], mode="identity", example=x)
    blocks = [module for module in deep.modules() if isinstance(module, Block)]
    assert [bool(block.b.weight.any()) for block in blocks] == [
        place not in places[:i] for i, place in enumerate(places)
    ]
    assert all(torch.equal(block.a.weight, net.blocks[place].a.weight) for block, place in zip(blocks, places))
    torch.testing.assert_close(deep(x), net(x))
    torch.testing.assert_close(plan.build(deep)(x), net(x))
    again, back = graft(
        deep, depths={surgery.sections(deep, example=x)[0].name: [0, 0, *range(1, len(places))]}, example=x
    )
    assert len([module for module in again.modules() if isinstance(module, Block)]) == len(places) + 1
    torch.testing.assert_close(back.build(again)(x), net(x))


@pytest.mark.parametrize("places", [[0, 2], [1, 0, 2], [0, 1, 2, 3], [0, 1, 0, 2]])
def test_graft__places_that_are_no_deeper_section_are_refused(places):
    with refused("argument: '1'"):
        graft(rows(*(Block(4, 4, False) for _ in range(3))), depths={"1": places})
