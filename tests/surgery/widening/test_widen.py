"""Wide models compute what the old ones did, and narrow gives the old ones back."""

import pytest
import torch
import torch.nn.functional as F
from library_models import LIBRARY_MODELS, library_model
from refusals import refused
from symmetric import IMAGE, SMALL, Made, image, randomized, same_outputs
from torch import nn

from surgery import narrow, state
from surgery.widening import widen
from surgery.width.replay import same


def equal(one, other):
    one, other = state(one), state(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_widen__too_little_memory_is_not_taken_for_another_computation():
    """Which once left every width as it was, with a wrong reason."""

    class Hungry(nn.Sequential):
        def forward(self, x):
            if self[0].out_features > 3 and not x.is_meta:
                torch.empty(10**15)
            return super().forward(x)

    net = Hungry(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="allocate memory"):
        widen(net, rate=2, example=torch.randn(5, 2))


@pytest.mark.parametrize("mode", ["copy", "zero"])
@pytest.mark.parametrize("name", SMALL)
def test_widen__outputs_stay_and_narrow_undoes_it(name, mode):
    net, x = randomized(SMALL[name]()), image()
    wide, plan = widen(net, rate=2, example=x, mode=mode, strict=True)
    assert same_outputs(net, wide, x)
    assert sum(p.numel() for p in wide.parameters()) > 2 * sum(p.numel() for p in net.parameters())
    back, _ = narrow(wide, 0.5, x, heads="drop")
    assert {n: t.shape for n, t in state(back).items()} == {n: t.shape for n, t in state(net).items()}
    if mode == "zero":
        assert equal(back, net)
        assert equal(plan.build(wide), net)
        assert same_outputs(plan.build(wide), net, x)


# Models with a width that cannot grow: narrow then makes it smaller than it was. Their plans give them back.
STAYS = {
    "timm:nfnet": "weights are standardised along their inputs",
    "transformers:bert_masked": "the head reads with the embedding's weights",
    "transformers:gpt2_causal": "the head reads with the embedding's weights",
    "transformers:gemma_causal": "the head reads with the embedding's weights",
    "transformers:whisper_generation": "the head reads with the embedding's weights",
    "transformers:wav2vec2_ctc": "a convolution's weights are normed along their inputs",
    "transformers:mamba_causal": "the head reads with the embedding's weights",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_widen__models_of_libraries(name):
    net, example = library_model(name)
    for mode in ("copy", "zero"):
        wide, plan = widen(net, rate=2, example=example, mode=mode)
        assert same_outputs(net, wide, example)
        assert sum(p.numel() for p in wide.parameters()) > sum(p.numel() for p in net.parameters())
    assert equal(plan.build(wide), net)
    back, _ = narrow(wide, 0.5, example, heads="drop")
    assert equal(back, net) == (name not in STAYS)


def test_widen__a_share_of_a_batch_normed_width_is_exact():
    net, x = randomized(SMALL["residual"]()), image()
    wide, _ = widen(net, rate=1.5, example=x)
    assert wide.conv1.out_channels == 6
    assert wide.stem.out_channels == 9
    assert same_outputs(net, wide, x)
    assert torch.equal(wide.conv2.weight[:6, 4:], net.conv2.weight[:, :2] / 2)


def test_widen__a_norm_over_a_width_allows_whole_multiples(caplog):
    net, x = randomized(SMALL["grouped"]()), image()
    wide, _ = widen(net, rate=1.5, example=x)
    assert wide.stem.out_channels == 12
    assert "group_norm in norm" in caplog.text
    assert same_outputs(net, wide, x)
    with refused("width"):
        widen(net, rate=1.5, example=x, strict=True)


def test_widen__heads_grow_and_what_is_inside_them_does_not():
    net, x = randomized(SMALL["attention"]()), image()
    wide, _ = widen(net, rate=2, example=x)
    assert wide.heads == 4
    assert wide.up.out_features == 24
    wide, _ = widen(net, rate=2, example=x, heads="inside")
    assert wide.heads == 2
    assert wide.proj.weight.shape == (16, 8)
    assert same_outputs(net, wide, x)


def mixed():
    """Widths of which operations need all positions, each in a way of its own; `plain` can grow."""

    def forward(net, x):
        soft, unit, c, d = net.a(x).softmax(-1), F.normalize(net.b(x), dim=-1), net.c(x), net.d(x)
        products = (d * d).sum(-1, keepdim=True) + net.plain(x).relu()
        return net.head(torch.cat([soft, unit, c * c.sum(-1, keepdim=True), products], -1))

    return Made(forward, **{name: nn.Linear(4, 6) for name in (*"abcd", "plain")}, head=nn.Linear(24, 2))


def test_widen__what_would_change_stays_with_the_reason(caplog):
    net, x = randomized(mixed()), torch.randn(3, 4, dtype=torch.float64)
    wide, _ = widen(net, rate=2, example=x)
    assert same_outputs(net, wide, x)
    sizes = {name: getattr(wide, name).out_features for name in ("a", "b", "c", "d", "plain")}
    assert sizes == {"a": 6, "b": 6, "c": 6, "d": 6, "plain": 12}
    assert "_softmax" in caplog.text


def test_widen__a_width_along_which_two_computed_tensors_are_multiplied_stays():
    layers = {name: nn.Linear(4, 6) for name in ("query", "key", "value")}
    scores = Made(lambda net, x: (net.query(x) @ net.key(x).mT) @ net.value(x).relu(), **layers)
    with refused("width"):
        widen(scores, rate=2, example=torch.randn(2, 5, 4))


def test_widen__too_many_places_are_named_with_a_way_out(monkeypatch):
    monkeypatch.setattr("surgery.widening.growth._MOST_LEFT", 2)
    net, x = randomized(mixed()), torch.randn(3, 4, dtype=torch.float64)
    with refused("run: a.weight"):
        widen(net, rate=2, example=x)
    wide, _ = widen(net, rate=2, example=x, keep=["a", "b", "c", "d"])
    assert wide.plain.out_features == 12


@pytest.mark.parametrize(("keep", "sizes"), [([], (3, 10, 30)), (["b"], (6, 5, 30))])
def test_widen__a_product_of_two_widths_grows_by_one_of_them(keep, sizes):
    def forward(net, x):
        pairs = net.a(x).relu()[:, :, None] * net.b(x)[:, None, :]
        return net.head(pairs.flatten(1))

    net = Made(forward, a=nn.Linear(4, 3), b=nn.Linear(4, 5), head=nn.Linear(15, 2))
    net, x = randomized(net), torch.randn(3, 4, dtype=torch.float64)
    for mode in ("copy", "zero"):
        wide, plan = widen(net, rate=2, example=x, mode=mode, keep=keep)
        assert (wide.a.out_features, wide.b.out_features, wide.head.in_features) == sizes
        assert same_outputs(net, wide, x)
        assert equal(plan.build(wide), net) == (mode == "zero")


def test_widen__tied_weights_stay_and_the_caller_is_told(caplog):
    def forward(net, x):
        x = net.embed(x)
        return (x + net.down(net.up(x).relu())) @ net.embed.weight.T

    net = Made(forward, embed=nn.Embedding(9, 4), up=nn.Linear(4, 8), down=nn.Linear(8, 4))
    net, x = randomized(net), torch.tensor([[1, 2, 5]])
    wide, _ = widen(net, rate=2, example=x)
    assert "embed.weight" in caplog.text
    with refused("width: embed.weight"):
        widen(net, rate=2, example=x, strict=True)
    assert wide.embed.embedding_dim == 4
    assert wide.up.out_features == 16
    assert same_outputs(net, wide, x)


def test_widen__copies_learn_apart_with_noise_only():
    net, x = randomized(SMALL["residual"]()), image()
    for noise, mode in ((0.0, "copy"), (0.05, "copy"), (0.05, "zero")):
        wide, _ = widen(net, rate=2, example=x, noise=noise, mode=mode, generator=torch.Generator().manual_seed(0))
        assert same_outputs(net, wide, x) == (noise == 0 or mode == "zero")
        assert torch.allclose(wide(x), net(x), atol=0.5)
        if mode == "copy":
            optimizer = torch.optim.SGD(wide.parameters(), lr=0.01)
            F.cross_entropy(wide(x), torch.tensor([0, 3])).backward()
            optimizer.step()
            old, new = wide.conv1.weight[:4], wide.conv1.weight[4:]
            assert torch.allclose(old, new, rtol=1e-9, atol=1e-12) == (noise == 0)


def test_widen__wrong_arguments_are_refused():
    net = SMALL["residual"]()
    with torch.device("meta"):
        empty = SMALL["residual"]()
    for model, kwargs, expected in [
        (net, {"rate": 1}, "argument"),
        (net, {"rate": "2"}, "argument"),
        (net, {"rate": 2, "mode": "half"}, "argument"),
        (net, {"rate": 2, "noise": -1}, "argument: noise"),
        (net, {"rate": 2, "example": None}, "argument"),
        (net, {"rate": 2, "example": torch.zeros(1, 7, 6, 6)}, "run"),
        (net, {"rate": 1.1}, "width"),
        (empty, {"rate": 2}, "values"),
        (state(net), {"rate": 2}, "argument"),
    ]:
        with refused(expected):
            widen(model, **{"example": IMAGE, **kwargs})


def test_widen__a_tied_embedding_is_named_with_the_way_out():
    layers = {"table": nn.Embedding(9, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 9, bias=False)}
    tied = Made(lambda net, x: net.head(torch.tanh(net.inner(net.table(x)))), **layers)
    tied.head.weight = tied.table.weight
    with refused("width: table.weight", "head.weight"):
        widen(tied, rate=2, example=torch.zeros(2, 3, dtype=torch.long))


def test_widen__what_does_not_run_in_float64_is_compared_in_float32():
    class Single(nn.Module):
        """Refuses other precisions, as torch's grouped products do."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("expected float32")
            return self.b(self.a(x).relu())

    torch.manual_seed(0)
    model, x = Single(), torch.randn(5, 4)
    wide, _ = widen(model, rate=2, example=x)
    assert wide.a.out_features == 12
    same_outputs(wide, model, x)


def test_widen__memory_is_compared_once_something_is_written_to_it():
    def forward(net, x):
        both = x.new_empty(len(x), net.a.out_features + net.b.out_features)
        both[:, : net.a.out_features].copy_(net.a(x))
        both[:, net.a.out_features :].copy_(net.b(x))
        return net.head(both.relu())

    layers = {"a": nn.Linear(4, 6), "b": nn.Linear(4, 3), "head": nn.Linear(9, 2)}
    net, x = randomized(Made(forward, **layers)), torch.randn(50, 4, dtype=torch.float64)
    wide, _ = widen(net, rate=2, example=x, strict=True)
    assert wide.head.in_features == 18
    assert same_outputs(net, wide, x)


@pytest.mark.parametrize("mode", ["copy", "zero"])
def test_widen__experts_behind_a_grouped_product_grow(mode):
    def forward(net, x):
        x, offsets = net.body(x), torch.tensor([1, 2, 4, 5], dtype=torch.int32)
        grouped = torch.nn.functional.grouped_mm
        return net.head(grouped(grouped(x, net.up, offs=offsets).relu(), net.down, offs=offsets))

    torch.manual_seed(0)
    net, x = Made(forward, body=nn.Linear(6, 16), head=nn.Linear(16, 2)), torch.randn(5, 6)
    net.up, net.down = (nn.Parameter(torch.randn(4, a, b)) for a, b in ((16, 32), (32, 16)))
    wide, _ = widen(net, rate=2, example=x, mode=mode, strict=True)
    assert wide.up.shape == (4, 32, 64)
    assert torch.allclose(wide(x), net(x), atol=1e-4)


def test_widen__where_nothing_that_grows_could_be_left_the_reason_is_told(monkeypatch):
    monkeypatch.setattr("surgery.widening.growth.find_change", lambda *_: 0)
    net = nn.Sequential(nn.Tanh(), nn.Linear(4, 6), nn.Linear(6, 2))
    with refused("run"):
        widen(net, rate=2, example=torch.randn(3, 4))


def test_widen__complex_numbers_are_compared_up_to_rounding():
    def forward(net, x):
        turned = torch.view_as_complex(net.turn(x).unflatten(-1, (-1, 2))) * net.phase
        return net.head(torch.cat([torch.view_as_real(turned).flatten(-2), net.plain(x)], -1))

    layers = {"turn": nn.Linear(4, 6), "plain": nn.Linear(4, 5), "head": nn.Linear(11, 2)}
    net, x = randomized(Made(forward, **layers)), torch.randn(3, 4, dtype=torch.float64)
    net.phase = torch.polar(torch.ones(3, dtype=torch.float64), torch.arange(3.0, dtype=torch.float64))
    wide, _ = widen(net, rate=2, example=x)
    assert wide.plain.out_features == 10
    assert same_outputs(net, wide, x)
    assert same(net.phase, net.phase * (1 + 1e-9))
    assert not same(net.phase, net.phase.conj())


def test_widen__what_is_tied_keeps_no_other_layer_of_its_class():
    def forward(net, x):
        both = net.table(x) + net.inner(net.other(x))
        return both @ net.table.weight.T

    net = Made(forward, table=nn.Embedding(9, 4), other=nn.Embedding(9, 6), inner=nn.Linear(6, 4))
    net, x = randomized(net), torch.tensor([[1, 2, 5]])
    wide, _ = widen(net, rate=2, example=x)
    assert (wide.table.embedding_dim, wide.other.embedding_dim) == (4, 12)
    assert same_outputs(net, wide, x)


@pytest.mark.parametrize("rate", [1.5, 2])
def test_widen__layers_of_one_list_are_left_together(rate):
    layers = [one for _ in range(14) for one in (nn.Linear(6, 6), nn.Softmax(-1), nn.Linear(6, 8), nn.Linear(8, 6))]
    net, x = randomized(nn.Sequential(*layers)), torch.randn(3, 6, dtype=torch.float64)
    wide, _ = widen(net, rate=rate, example=x)
    assert wide[2].out_features == 8 * rate
    assert same_outputs(net, wide, x)


def test_widen__what_is_wrong_is_followed_to_the_width_in_front_of_it():
    class Mean(nn.Module):
        """Computes with the number of its input's features."""

        def __init__(self, c):
            super().__init__()
            self.inner, self.out = nn.Linear(c, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.out(self.inner(x).relu() + torch.full((5,), float(x.shape[-1])).to(x).mean())

    layers = nn.Linear(4, 6), Mean(6), nn.Linear(2, 7), nn.ReLU(), nn.Linear(7, 2)
    net, x = randomized(nn.Sequential(*layers)), torch.randn(3, 4, dtype=torch.float64)
    wide, _ = widen(net, rate=2, example=x)
    assert (wide[0].out_features, wide[2].out_features) == (6, 14)
    assert same_outputs(net, wide, x)


class Transformed(nn.Module):
    """A fixed transform of patches behind a layer (timm's CSATv2): torch reads its matrix transposed and expanded."""

    def __init__(self):
        super().__init__()
        self.first, self.hidden, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 6, 1), nn.Conv2d(6, 2, 1)
        self.register_buffer("weights", torch.randn(2, 2))

    def forward(self, x):
        patches = self.first(x).unflatten(2, (3, 2)).unflatten(4, (3, 2)).permute(0, 2, 4, 1, 3, 5)
        patches = F.linear(patches, self.weights).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return self.last(self.hidden(patches).relu())


def test_widen__a_matrix_that_is_expanded_before_a_product_is_followed():
    net = randomized(Transformed())
    wide, _ = widen(net, rate=2, example=IMAGE)
    assert same_outputs(net, wide, image())
    assert wide.hidden.weight.shape == (12, 8, 1, 1)


def test_widen__a_rate_that_adds_no_position_names_one_that_does():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    with refused("width: 1.125"):
        widen(net, rate=1.1, example=x)
    assert widen(net, rate=1.125, example=x)[0][0].out_features == 9
