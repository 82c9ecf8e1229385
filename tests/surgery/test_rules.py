"""Each rule on a small module: what shrinks, and a numeric oracle; rules and blocks that a user adds."""

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
import torchvision
from refusals import refused
from symmetric import Made
from torch import nn
from torch.nn.utils import prune

import surgery
from surgery import narrow
from surgery.depth import sections as declared
from surgery.forward import in_mode
from surgery.width import rules
from surgery.width.rules import registry
from tests.surgery.test_narrow import assert_plan, assert_zero_oracle, randomized

ops = torchvision.ops
D = {"dtype": torch.float64}


def assert_narrows(model, example, **expected):
    """The tensors have these shapes at half the width, and the narrow model computes what it should."""
    model = randomized(model.double()).eval()
    small, plan = narrow(model, 0.5, example)
    for name, shape in expected.items():
        assert tuple(small.state_dict()[name.replace("__", ".")].shape) == shape, name
    assert_plan(model, small, plan)
    assert_zero_oracle(model, small, plan, example)
    return small


def ints(*shape, high, seed=0):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), **D)


HALF = {"body__weight": (4, 3), "head__weight": (3, 4)}  # the hidden width shrinks
WHOLE = {"body__weight": (8, 3), "head__weight": (3, 8)}


def tokens(function):
    """A function of 8 hidden features of 5 tokens, between two linear layers; a layer in front shrinks anyway."""
    model = Made(lambda net, x: net.head(function(net.body(net.front(x)))), front=nn.Linear(4, 6), body=nn.Linear(6, 8))
    model.head = nn.Linear(8, 3)
    return model


def assign_zero(h):
    h = h.clone()
    h[h < 0.2] = 0
    return h


# Functions of tokens [2, 5, 8], whose features are a width that shrinks
FEATURES_SHRINK = {
    "mask": lambda h: h[torch.ones(2, 5, dtype=torch.bool)],
    "where": lambda h: h[torch.where(torch.ones(2, 5) > 0)],
    "assign by mask": assign_zero,
    "index apart": lambda h: h[..., None][:, torch.tensor([3, 0, 1]), :, torch.zeros(3, dtype=torch.long)],
    "norm of matrix": lambda h: h / torch.linalg.matrix_norm(h, keepdim=True),
    "cdist, many": lambda h: torch.cdist(h, h, compute_mode="use_mm_for_euclid_dist") @ h,
    "pairwise": lambda h: h * F.pairwise_distance(h[:, :1], h, eps=0)[..., None],
}


@pytest.mark.parametrize("case", FEATURES_SHRINK)
def test_rules__operations_along_tokens_leave_the_features_free(case):
    assert_narrows(tokens(FEATURES_SHRINK[case]), floats(2, 5, 4), **HALF)


def put_other(h, g):
    index = torch.tensor([0, 2, 2])
    return h.index_put((torch.zeros(3, dtype=torch.long), index), g[0, :3], accumulate=True)


def put_by_mask(h, g):
    h, mask = h.clone(), torch.ones(2, 5, dtype=torch.bool)
    h[mask] = g[mask]
    return h


def zero_by_other(h, g):
    h = h.clone()
    h[g < 0.2] = 0
    return h


def deformed_features(h, offset):
    """The features are the batch of a deformable convolution."""
    return ops.deform_conv2d(h.permute(2, 0, 1)[:, None], offset, torch.ones(1, 1, 1, 1, **D))[:, 0].permute(1, 2, 0)


# Functions of two hidden tensors, whose features are one width because of this operation
ONE_WIDTH = {
    "index_put": put_other,
    "mask": put_by_mask,
    "mask of features": zero_by_other,
    "index_add": lambda h, g: h.index_add(1, torch.tensor([3, 0]), g[:, :2]),
    "scatter": lambda h, g: h.scatter(1, torch.zeros_like(h, dtype=torch.long), g),
    "slice_scatter": lambda h, g: h.slice_scatter(g[:, 1:3], dim=1, start=2, end=4),
    "select_scatter": lambda h, g: h.select_scatter(g[:, 1], dim=1, index=2),
    "mse": lambda h, g: F.mse_loss(h, g, reduction="none"),
    "cdist": lambda h, g: torch.cdist(h, g) @ h,
    "queries and keys": lambda h, g: F.scaled_dot_product_attention(h[None], g[None], h[None], scale=1.0)[0],
    "baddbmm": lambda h, g: torch.baddbmm(g, h @ h.mT, h),
    "addr": lambda h, g: torch.addr(g[0], h[0].sum(-1), h[0, 0])[None],
    "glu": lambda h, g: F.glu(torch.cat([h, g], -1)),
    "convolution without a batch": lambda h, g: h * F.conv1d(h[0].mT, g.mT).sum(),
    "deform, as a batch": lambda h, g: deformed_features(h, g.permute(2, 0, 1)[:, None].expand(-1, 2, -1, -1)),
    "unpool": lambda h, g: F.max_unpool1d(F.max_pool1d(h.mT, 5), F.max_pool1d(g.mT, 5, return_indices=True)[1], 5).mT,
}


@pytest.mark.parametrize("case", ONE_WIDTH)
def test_rules__two_tensors_become_one_width(case):
    function = ONE_WIDTH[case]
    model = Made(
        lambda net, x: net.head(function(net.body(x), net.other(x))),
        body=nn.Linear(6, 8), other=nn.Linear(6, 8), head=nn.Linear(8, 3),
    )  # fmt: skip
    assert_narrows(model, floats(2, 5, 6), body__weight=(4, 6), other__weight=(4, 6))
    hidden = [set(width.members) for width in surgery.widths(model, floats(2, 5, 6)) if width.size == 8]
    assert [{("body.weight", 0), ("other.weight", 0), ("head.weight", 1)} <= members for members in hidden] == [True]


# Functions of tokens of which the features must stay whole; the layer in front shrinks nevertheless
FEATURES_STAY = {
    "cumsum": lambda h: h.cumsum(-1),
    "cummax": lambda h: h.cummax(-1).values,
    "argsort": lambda h: h + h.argsort(-1),
    "sort, all of it": lambda h: (lambda found: found.values + found.indices)(h.sort(-1)),
    "topk, indices": lambda h: h + h.topk(2, dim=-1).indices.sum(-1, keepdim=True),
    "topk of more than are left": lambda h: h + h.topk(6, dim=-1).values.sum(-1, keepdim=True),
    "max, indices": lambda h: h + h.gather(-1, h.max(-1, keepdim=True)[1]),
    "argmax": lambda h: h + h.argmax(-1, keepdim=True),
    "kthvalue of more than are left": lambda h: h + h.kthvalue(6, dim=-1, keepdim=True).values,
    "unique": lambda h: h + h.unique().sum(),
    "nonzero": lambda h: h + h.nonzero().sum(),
    "crop": lambda h: F.pad(h, (-1, 1)),
    "scatter": lambda h: h.scatter(-1, torch.zeros(2, 5, 3, dtype=torch.long), h[:, :, :3]),
}


@pytest.mark.parametrize("case", FEATURES_STAY)
def test_rules__features_stay_whole_where_positions_are_told_apart(case):
    assert_narrows(tokens(FEATURES_STAY[case]), floats(2, 5, 4), **WHOLE, front__weight=(3, 4))


# Reductions of features that return indices too, which nothing reads here, and others that know no order
FEATURES_REDUCED = {
    "max": lambda h: h.max(-1, keepdim=True)[0],
    "torch.max": lambda h: torch.max(h, 2).values[..., None],
    "min": lambda h: torch.min(h, -1, True)[0],
    "median": lambda h: h.median(-1, keepdim=True).values,
    "nanmedian": lambda h: torch.nanmedian(h, 2, True)[0],
    "mode": lambda h: h.round().mode(-1, keepdim=True)[0],
    "kthvalue": lambda h: h.kthvalue(2, dim=-1, keepdim=True).values,
    "kthvalue, the last": lambda h: h.kthvalue(h.shape[-1], keepdim=True).values,
    "topk": lambda h: h.topk(2, dim=-1)[0].sum(-1, keepdim=True),
    "sort": lambda h: h.sort(-1)[0].square().mean(-1, keepdim=True),
    "whole numbers": lambda h: (10 * h).int().max(-1, keepdim=True)[0].to(h.dtype),
    "any": lambda h: (h > 0.5).any(-1, keepdim=True).to(h.dtype),
    "argmax, unused": lambda h: (h.argmax(-1), h.amax(-1, keepdim=True))[1],
}


@pytest.mark.parametrize("case", FEATURES_REDUCED)
@torch.no_grad()
def test_permute__features_whose_order_nothing_reads_shrink(case):
    function, x = FEATURES_REDUCED[case], floats(2, 5, 4)

    def made(hidden):
        model = Made(lambda net, x: net.head(net.body(x) + function(net.body(x))), body=nn.Linear(4, hidden))
        model.head = nn.Linear(hidden, 3)
        return model.double().eval()

    model = randomized(made(8))
    small, plan = narrow(model, 0.5, x, strict=True)
    half = made(4)
    half.load_state_dict(plan.extract(model.state_dict()))
    assert torch.equal(small(x), half(x))
    if case != "sort":
        order = [3, 0, 1, 2, 7, 5, 6, 4]
        permuted, _ = surgery.symmetry.permute(model, {"body.weight:0": order}, example=x)
        torch.testing.assert_close(permuted(x), model(x))


@pytest.mark.parametrize(("read", "size"), [("topk", 3), ("sort", 8)])
@torch.no_grad()
def test_narrow__ranks_keep_their_order(read, size):
    """A layer that reads the largest features in order has a weight for each rank; the first ranks stay."""
    function = {"topk": lambda h: h.topk(3)[0], "sort": lambda h: h.sort(descending=True)[0]}[read]
    model = Made(lambda net, x: net.head(function(net.body(x))), body=nn.Linear(4, 8), head=nn.Linear(size, 3))
    model = randomized(model.double()).eval()
    x = floats(2, 5, 4)
    small, _ = narrow(model, 0.5, x)
    ranks = min(size, 4)
    assert small.head.weight.equal(model.head.weight[:, :ranks])
    expected = function(F.linear(x, model.body.weight[:4], model.body.bias[:4]))
    torch.testing.assert_close(small(x), F.linear(expected, model.head.weight[:, :ranks], model.head.bias))


# Functions of tokens along whose features a window slides: they shrink to the first ones
FEATURES_IN_ORDER = {
    "max_pool1d": lambda h: F.max_pool1d(h, 3, 1, 1),
    "max_pool2d": lambda h: F.max_pool2d(h[None], (1, 3), 1, (0, 1))[0],
    "max_pool2d without a batch": lambda h: F.max_pool2d(h.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "avg_pool2d": lambda h: F.avg_pool2d(h[None], (1, 3), 1, (0, 1))[0],
    "max_pool3d": lambda h: F.max_pool3d(h[None, None], (1, 1, 3), 1, (0, 0, 1))[0, 0],
}


@pytest.mark.parametrize("case", FEATURES_IN_ORDER)
def test_rules__features_under_a_sliding_window_keep_their_order(case):
    model = tokens(FEATURES_IN_ORDER[case])
    assert_narrows(model, floats(2, 5, 4), head__weight=(3, 4))
    (width,) = (w for w in surgery.widths(model, floats(2, 5, 4)) if w.size == 8)
    assert "a window or a range runs over it" in width.order


DEFORMED = {  # name: (channels left, groups, channels of the offset, whether there is a mask)
    "plain": (6, 1, 18, False),
    "groups": (8, 2, 36, False),
    "mask": (6, 1, 18, True),
}


@pytest.mark.parametrize("case", DEFORMED)
def test_rules__deformable_convolutions_shrink(case):
    left, groups, offset, masked = DEFORMED[case]
    model = Made(
        lambda net, x: net.head(net.deform(h := net.body(x), net.offset(h), net.mask(h) if masked else None)),
        body=nn.Conv2d(3, 8, 3, padding=1), offset=nn.Conv2d(8, offset, 3, padding=1),
        mask=nn.Conv2d(8, 9, 3, padding=1), deform=ops.DeformConv2d(8, left, 3, padding=1, groups=groups),
        head=nn.Conv2d(left, 3, 1),
    )  # fmt: skip
    small = assert_narrows(model, floats(2, 3, 8, 8), body__weight=(4, 3, 3, 3))
    assert small.head.weight.shape[1] == left // 2


def test_rules__pixels_that_are_features_shrink_where_channels_become_pixels_and_back():
    """A feature's neighbours in the larger image come from other tokens; halves are the first pairs of pixels."""
    shuffle = lambda net, x: net.head(F.pixel_shuffle(net.body(x)[:, :, None], 2))  # noqa: E731
    model = Made(shuffle, body=nn.Linear(6, 8), head=nn.Linear(16, 3))
    assert_narrows(model, floats(2, 4, 6), body__weight=(4, 6), head__weight=(3, 8))
    unshuffle = lambda net, x: net.head(F.pixel_unshuffle(net.body(x)[:, None], 2))  # noqa: E731
    model = Made(unshuffle, body=nn.Linear(6, 16), head=nn.Linear(8, 3))
    assert_narrows(model, floats(2, 4, 6), body__weight=(8, 6), head__weight=(3, 4))


def bagged(mode, weights=False):
    def function(net, indices, *more):
        offsets, weighed = (more[0], more[1:]) if indices.ndim == 1 else (None, more)
        return net.head(net.table(indices, offsets, *weighed))

    return Made(function, table=nn.EmbeddingBag(10, 8, mode=mode), head=nn.Linear(8, 3))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_rules__a_bag_of_embeddings(mode):
    shapes = {"table__weight": (10, 4), "head__weight": (3, 4)}
    small = assert_narrows(bagged(mode), (ints(6, high=10), torch.tensor([0, 2, 5])), **shapes)
    assert small.table.embedding_dim == 4
    assert_narrows(bagged(mode), ints(3, 4, high=10), **shapes)
    if mode == "sum":
        assert_narrows(bagged(mode), (ints(3, 4, high=10), floats(3, 4)), **shapes)


def test_rules__bilinear():
    model = Made(
        lambda net, x: net.head(net.both(net.one(x), net.two(x))),
        one=nn.Linear(4, 8), two=nn.Linear(4, 6), both=nn.Bilinear(8, 6, 10), head=nn.Linear(10, 3),
    )  # fmt: skip
    small = assert_narrows(model, floats(2, 5, 4), both__weight=(5, 4, 3), head__weight=(3, 5))
    assert (small.both.in1_features, small.both.in2_features, small.both.out_features) == (4, 3, 5)


# A forward pass that returns a loss: of 5 outputs and the labels that are given
LOSSES = {
    "cross_entropy": (lambda y, t: F.cross_entropy(y, t), ints(6, high=5)),
    "cross_entropy, smooth, weights": (
        lambda y, t: F.cross_entropy(y, t, weight=torch.arange(1.0, 6, **D), label_smoothing=0.1),
        ints(6, high=5),
    ),
    "cross_entropy of each": (lambda y, t: F.cross_entropy(y, t, reduction="none"), ints(6, high=5)),
    "cross_entropy of pixels": (lambda y, t: F.cross_entropy(y.T.reshape(1, 5, 2, 3), t), ints(1, 2, 3, high=5)),
    "multi_margin": (lambda y, t: F.multi_margin_loss(y, t), ints(6, high=5)),
    "mse": (lambda y, t: F.mse_loss(y, t), floats(6, 5)),
    "bce": (lambda y, t: F.binary_cross_entropy(y.sigmoid(), t, torch.full((5,), 0.5, **D)), floats(6, 5)),
    "kl_div": (lambda y, t: F.kl_div(y.log_softmax(-1), t, reduction="batchmean"), floats(6, 5)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_rules__a_loss_in_the_forward_pass_keeps_the_classes(case):
    loss, labels = LOSSES[case]
    model = Made(lambda net, x, t: loss(net.head(net.body(x)), t), body=nn.Linear(4, 8), head=nn.Linear(8, 5))
    assert_narrows(model, (floats(6, 4), labels), body__weight=(4, 4), head__weight=(5, 4))


def test_rules__a_loss_between_hidden_features_shrinks():
    model = Made(
        lambda net, x: F.mse_loss(net.one(x), net.two(x), reduction="sum"), one=nn.Linear(4, 8), two=nn.Linear(4, 8)
    )
    assert_narrows(model, floats(6, 4), one__weight=(4, 4), two__weight=(4, 4))


class Experts(nn.Module):
    """A gate picks two of four experts for each token; the tokens of an expert are gathered, and its outputs added."""

    def __init__(self, dispatch, width=8, inner=10):
        super().__init__()
        self.dispatch = dispatch
        self.body, self.gate, self.head = nn.Linear(6, width), nn.Linear(width, 4), nn.Linear(width, 3)
        self.up = nn.Parameter(torch.zeros(4, inner, width))
        self.down = nn.Parameter(torch.zeros(4, width, inner))

    def forward(self, x):
        h = self.body(x)
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        return self.head(self.dispatch(self, h, weights, chosen))


def one_by_one(net, h, weights, chosen):
    result = torch.zeros_like(h)
    for expert in range(4):
        token, place = torch.where(chosen == expert)
        y = F.linear(F.linear(h[token], net.up[expert]).relu(), net.down[expert])
        result.index_add_(0, token, y * weights[token, place, None])
    return result


def all_at_once(net, h, weights, chosen):
    dense = torch.zeros(len(h), 4, dtype=h.dtype).scatter(1, chosen, weights)
    y = torch.bmm(torch.bmm(h.expand(4, *h.shape), net.up.mT).relu(), net.down.mT)
    return torch.einsum("etc,te->tc", y, dense)


def gathered(net, h, weights, chosen):
    y = torch.einsum("tkuc,tc->tku", net.up[chosen], h).relu()
    return (torch.einsum("tkcu,tku->tkc", net.down[chosen], y) * weights[..., None]).sum(1)


@pytest.mark.parametrize("dispatch", [one_by_one, all_at_once, gathered])
def test_rules__experts_shrink_and_none_is_lost(dispatch):
    shapes = {"body__weight": (4, 6), "gate__weight": (4, 4), "up": (4, 5, 4), "down": (4, 4, 5)}
    assert_narrows(Experts(dispatch), floats(5, 6), **shapes)


def masked(net, h, weights, chosen):
    high = h.sum(-1) > h.sum(-1).mean()
    result = torch.zeros_like(h)
    result[high] = F.linear(F.linear(h[high], net.up[0]).relu(), net.down[0])
    return result


def listed(net, h, weights, chosen):
    high = (h.sum(-1) > h.sum(-1).mean()).nonzero().squeeze(1)
    return torch.zeros_like(h).index_add(0, high, F.linear(F.linear(h[high], net.up[0]).relu(), net.down[0]))


@pytest.mark.parametrize("dispatch", [one_by_one, masked, listed])
def test_narrow__how_many_tokens_are_picked_may_differ_in_a_narrow_model(dispatch):
    for seed in range(3):
        model = randomized(Experts(dispatch).double(), seed).eval()
        small, plan = narrow(model, 0.5, floats(5, 6))
        assert small.up.shape == (4, 5, 4)
        assert_zero_oracle(model, small, plan, floats(5, 6, seed=1))


def test_rules__grouped_products_follow_both_widths():
    model = Experts(None, 16, 32).bfloat16()  # torch wants rows of multiples of 16 bytes
    offsets = torch.tensor([1, 2, 4, 5], dtype=torch.int32)
    model.dispatch = lambda net, h, w, c: torch._grouped_mm(
        torch._grouped_mm(h, net.up.mT, offs=offsets).relu(), net.down.mT, offs=offsets
    )
    sizes = {width.members: width for width in surgery.widths(model, torch.zeros(5, 6).bfloat16(), 0.5)}
    assert any({("body.weight", 0), ("up", 2)} <= set(members) for members in sizes)
    kept = {name: width.kept for members, width in sizes.items() for name, axis in members if axis == 1}
    assert (kept["up"], kept["down"]) == (16, 8)


def pruned(module):
    return prune.l1_unstructured(module, "weight", amount=0.25)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("norm", "original"),
    [
        (nn.utils.parametrizations.spectral_norm, "0__parametrizations__weight__original"),
        (nn.utils.parametrizations.weight_norm, "0__parametrizations__weight__original1"),
        (nn.utils.spectral_norm, "0__weight_orig"),
        (nn.utils.weight_norm, "0__weight_v"),
        (pruned, "0__weight_orig"),
    ],
)
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_narrow__weights_that_are_computed(norm, original, layer):
    linear = layer == "linear"
    make, x = (nn.Linear, floats(2, 6)) if linear else (lambda i, o: nn.Conv2d(i, o, 3), floats(2, 6, 5, 5))
    model, shape = nn.Sequential(norm(make(6, 8)), nn.Tanh(), norm(make(8, 3))), (4, 6) if linear else (4, 6, 3, 3)
    if norm in (nn.utils.weight_norm, pruned):  # whose modules cannot be copied for the oracle
        small, _ = narrow(model.double(), 0.5, x)
        assert small(x).shape == model(x).shape
        assert small.state_dict()[original.replace("__", ".")].shape == shape
    else:
        small = assert_narrows(model, x, **{original: shape})
    assert getattr(small[0], "out_features" if linear else "out_channels") == 4
    if norm is nn.utils.spectral_norm:
        assert small[0].weight_u.shape == (4,)


@pytest.mark.parametrize("directions", [1, 2])
def test_narrow__a_recurrent_layer_where_it_is(directions):
    """In a model that looks at numbers, and so cannot run on the meta device, it is one operation."""
    model = Made(
        lambda net, x: net.head(net.layers(net.body(x))[0]) * (1 if x.sum().item() else 2),
        body=nn.Linear(6, 8), head=nn.Linear(10 * directions, 3),
        layers=nn.LSTM(8, 10, 2, batch_first=True, bidirectional=directions == 2),
    )  # fmt: skip
    model, x = randomized(model), floats(2, 5, 6)
    small, plan = narrow(model, 0.5, x.float())  # with doubles it is many operations
    assert (small.layers.input_size, small.layers.hidden_size) == (4, 5)
    assert small.head.weight.shape == (3, 5 * directions)
    assert_zero_oracle(model.double(), small.double(), plan, x)


@pytest.fixture
def fused():
    """torch's fused attention is on, and is so again afterwards."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def encoder():
    """A transformer layer in a model that looks at numbers, so that it runs where the fused kernels do."""

    def function(net, x, mask=None):
        more = {"mask": mask} if mask is not None and mask.is_floating_point() else {"src_key_padding_mask": mask}
        return net.head(net.layers(net.body(x), **more)) * (1 if x.sum().item() else 2)

    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    return Made(function, body=nn.Linear(6, 16), layers=nn.TransformerEncoder(layer, 1), head=nn.Linear(16, 3))


@pytest.mark.parametrize(
    "mask", [None, floats(5, 5), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])], ids=["no", "float", "padding"]
)
def test_narrow__fused_transformer_layers_are_followed(mask, fused):
    model = randomized(encoder().double()).eval()
    x = floats(2, 5, 6)
    small, plan = narrow(model, 0.5, x if mask is None else (x, mask))
    assert torch.backends.mha.get_fastpath_enabled()
    assert small.layers.layers[0].linear1.weight.shape == (12, 8)
    assert_plan(model, small, plan)
    with torch.no_grad():
        y = small(x)
        torch.backends.mha.set_fastpath_enabled(False)
        torch.testing.assert_close(y, small(x))


def test_rules__fused_attention_is_followed(fused):
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    model = Made(
        lambda net, x: net.head(net.mix(*[net.body(x)] * 3)[0]) * (1 if x.sum().item() else 2),
        body=nn.Linear(6, 16), mix=attention, head=nn.Linear(16, 3),
    )  # fmt: skip
    assert_narrows(model, floats(2, 5, 6), head__weight=(3, 8))


def test_rules__fused_attention_comes_back_when_the_last_thread_is_done(fused):
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with in_mode(nn.Linear(1, 1), False):
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    with in_mode(nn.Linear(1, 1), True):
        other.start()
        assert inside.wait(60)
    assert not torch.backends.mha.get_fastpath_enabled()
    leave.set()
    other.join(60)
    assert torch.backends.mha.get_fastpath_enabled()


# Rules and blocks of a user


@pytest.fixture
def told(monkeypatch):
    """What a test registers goes away again."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(declared, "BLOCKS", dict(declared.BLOCKS))


@pytest.fixture(scope="module")
def library():
    """Two operations that no rule knows: `norm`, whose name is also one of aten's, and `heads`."""

    @torch.library.custom_op("testlib::norm", mutates_args=())
    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    @norm.register_fake
    def _(x, scale):
        return torch.empty_like(x)

    @torch.library.custom_op("testlib::heads", mutates_args=())
    def heads(x: torch.Tensor, heads: int, length: int) -> list[torch.Tensor]:
        return [part.clone() for part in x.unflatten(-1, (heads, length)).unbind(-2)[:2]]

    @heads.register_fake
    def _(x, heads, length):
        return [x.new_empty(*x.shape[:-1], length) for _ in range(2)]

    return norm, heads


def scaled(library):
    model = Made(
        lambda net, x: net.head(library[0](net.body(x), net.scale)),
        body=nn.Linear(6, 8), head=nn.Linear(8, 3), scale=torch.zeros(8),
    )  # fmt: skip
    return randomized(model.double()).eval()


def test_narrow__an_operation_of_a_user_is_not_taken_for_one_of_the_same_name(library, told):
    """A norm would sum over all axes: a result without axes."""
    with refused("width: testlib::norm"):
        narrow(scaled(library), 0.5, floats(2, 6))


def test_rules__a_rule_of_a_user_is_followed(library, told):
    @surgery.register_rule("testlib::norm")
    def rule(view, args, out):
        *_, features = view.axes_of(args["x"])
        rules.unify(features, *view.axes_of(args["scale"]))
        return view.axes_of(args["x"])

    assert_narrows(scaled(library), floats(2, 6), scale=(4,), head__weight=(3, 4))


def test_rules__sizes_and_lists_of_results(library, told):
    @surgery.register_rule("testlib::heads", sizes={"length"})
    def rule(view, args, out):
        *outer, features = view.axes_of(args["x"])
        which, within = rules.regroup([features], [args["heads"], args["length"]])
        rules.fix(which, rules.role("two heads are picked"))
        return rules.RuleResult([*outer, within], sizes={"heads": which})

    def function(net, x):
        h = net.body(x)
        return net.head(torch.stack(library[1](h, 2, h.shape[-1] // 2)).sum(0))

    assert_narrows(
        Made(function, body=nn.Linear(6, 8), head=nn.Linear(4, 3)),
        floats(2, 6),
        body__weight=(4, 6),
        head__weight=(3, 2),
    )


def test_register_rule__a_wrong_rule_is_named(library, told):
    @surgery.register_rule("testlib::norm")
    def short(view, args, out):
        return view.axes_of(args["x"])[:1]

    with refused("argument: the rule for testlib::norm (", "short) is wrong", "shape (2, 8)"):
        narrow(scaled(library), 0.5, floats(2, 6))

    @surgery.register_rule("testlib::norm", replace=True)
    def misspelt(view, args, out):
        return view.axes_of(args["y"])

    with refused("argument: misspelt) is wrong: no key 'y'", "takes x, scale"):
        narrow(scaled(library), 0.5, floats(2, 6))

    @surgery.register_rule("testlib::norm", replace=True)
    def several(view, args, out):
        return [view.axes_of(args["x"])] * 2

    with refused("argument: the axes of 2 results where there are 1"):
        narrow(scaled(library), 0.5, floats(2, 6))


def test_register_rule__names_of_rules(told):
    with refused("argument: namespace::name"):
        surgery.register_rule("norm")
    with refused("argument: namespace::name"):
        surgery.register_rule("mylib::norm.default")
    with refused("argument: replace="):
        surgery.register_rule("aten::cumsum_")
    kept = surgery.register_rule("aten::cumsum", replace=True)(assert_plan)
    assert kept is assert_plan
    assert registry.RULES["cumsum"].function.__wrapped__ is assert_plan


class Step(nn.Sequential):
    """A block that stands under a name of its own."""


def test_rules__blocks_of_a_registered_class_are_found(told):
    def step():
        return Step(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    model = Made(lambda net, x: net.end(net.fine(net.coarse(x))), coarse=step(), fine=step(), end=nn.Linear(4, 4))
    assert surgery.sections(model) == []
    assert surgery.register_block(Step) is Step
    assert surgery.sections(model) == [("", ("coarse", "fine"))]
    shallow, _ = surgery.ungraft(model, keep=[1])
    x = floats(2, 4).float()
    torch.testing.assert_close(shallow(x), model.end(model.coarse(x)))
    with refused("argument"):
        surgery.register_block(step())
    inside = nn.Sequential(Step(step(), step()), Step(step(), step()))
    assert [section.blocks for section in surgery.sections(inside)] == [("0", "1")]
    derived = type("Derived", (Step,), {})
    both = Made(lambda net, x: net.fine(net.coarse(x)), coarse=derived(*step()), fine=derived(*step()))
    assert surgery.sections(both) == [("", ("coarse", "fine"))]


BLOCK = """
import surgery
from torch import nn


@surgery.register_block
class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).relu())
"""


def test_rules__a_block_of_a_file_of_its_own(told, tmp_path, monkeypatch):
    (tmp_path / "strange_blocks.py").write_text(BLOCK)
    monkeypatch.syspath_prepend(tmp_path)
    import strange_blocks

    del sys.modules["strange_blocks"]
    net = nn.Sequential(nn.Linear(3, 4), strange_blocks.Strange(), strange_blocks.Strange(), nn.Linear(4, 2))
    assert surgery.sections(net) == [("", ("1", "2"))]
    x = floats(2, 3).float()
    torch.testing.assert_close(surgery.ungraft(net, keep=[1])[0](x), net[3](net[1](net[0](x))))


def shuffled(net, x):
    """ShuffleNetV2's unit without its stride: half of the channels pass through, and both halves are interleaved."""
    kept, used = x.chunk(2, 1)
    return torch.cat([kept, net.layer(used)], 1).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@pytest.mark.slow
def test_narrow__what_channel_shuffles_in_a_row_keep_whole_is_said(caplog):
    example = torch.zeros(1, 3, 4, 4)
    unit = lambda: Made(shuffled, layer=nn.Conv2d(12, 12, 1))  # noqa: E731
    one = nn.Sequential(nn.Conv2d(3, 24, 1), unit(), nn.Conv2d(24, 5, 1))
    assert narrow(one, 0.5, example, strict=True)[0][1].layer.out_channels == 6
    alike = nn.Sequential(nn.Conv2d(3, 24, 1), *[unit() for _ in range(3)], nn.Conv2d(24, 8, 1))
    small, plan = narrow(alike, 0.5, example)
    assert [layer.out_channels for layer in (small[0], *(small[i].layer for i in (1, 2, 3)))] == [16, 8, 8, 8]
    assert_zero_oracle(alike.double(), small.double(), plan, floats(2, 3, 4, 4, seed=1))
    unlike = [type(f"Unit{i}", (Made,), {})(shuffled, layer=nn.Conv2d(12, 12, 1)) for i in range(3)]
    units = nn.Sequential(nn.Conv2d(3, 24, 1), *unlike, nn.Conv2d(24, 8, 1))
    with refused("run") as error:
        narrow(units, 0.5, example)
    assert "constant" not in str(error.value)
    net = nn.Sequential(*units, nn.ReLU(), nn.Conv2d(8, 5, 1))
    small, _ = narrow(net, 0.5, example)
    assert small[4].out_channels == 4
    assert small(example).shape == net(example).shape
    assert "2.layer.weight (12, 12, 1, 1)" in caplog.text
    whole = [width.reason for width in surgery.widths(net, example, 0.5) if width.size == width.kept > 5]
    assert any("channel shuffles in a row" in reason for reason in whole)


def test_rules__a_slice_inside_of_a_part_is_the_reason_where_nothing_is_shuffled():
    """As where a detector finds no boxes: the coordinates lie side by side, and the first number alone is dropped."""

    def forward(net, x):
        boxes = net.boxes(x)
        return net.end(boxes[:, 0::4] + boxes[:, 1:].sum(1, keepdim=True))

    net = Made(forward, boxes=nn.Linear(6, 20), end=nn.Linear(5, 2))
    reasons = {width.size: width.reason for width in surgery.widths(net, torch.zeros(1, 6))}
    assert "divided inside of one of its parts" in reasons[5]
    assert not any("shuffles" in reason for reason in reasons.values())
