"""Adapters on models: put on, taken off, folded in and out."""

import copy

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import adapters
from surgery.adapters.layer import LowRank


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


IMAGE = torch.rand(2, 4, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LAYERS = {
    "linear": (lambda: nn.Linear(4, 6), IMAGE[:, 0, 0, :4]),
    "without bias": (lambda: nn.Linear(4, 6, bias=False), IMAGE[0, 0, :, :4]),
    "Conv1D": (lambda: Conv1D(6, 4), IMAGE[:, 0, 0, :4]),
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), IMAGE[..., 0]),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 2), dilation=2, padding="same", padding_mode="circular"), IMAGE),
    "3d": (lambda: nn.Conv3d(4, 6, 2), IMAGE[..., None].expand(-1, -1, -1, -1, 3)),
    "embedding": (lambda: nn.Embedding(9, 6, padding_idx=0), torch.tensor([[1, 0, 8], [2, 2, 3]])),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)).double()


def drawn(model):
    """Both factors of every adapter drawn, as after training."""
    torch.manual_seed(1)
    for _, layer in adapters.adapted_layers(model):
        for factor in layer.factors:
            nn.init.normal_(factor)
        if layer.lora_magnitude_vector is not None:
            nn.init.uniform_(layer.lora_magnitude_vector, 0.5, 2)
    return model


@pytest.mark.parametrize("kind", LAYERS)
def test_model__a_layer_with_an_adapter_computes_with_its_weight_and_the_product(kind):
    make, x = LAYERS[kind]
    plain = make().double()
    adapted = adapters.add(plain, 3, modules=[""] if kind == "embedding" else None, scale=0.5)
    torch.testing.assert_close(adapted(x), plain(x), rtol=0, atol=0)  # B is 0
    drawn(adapted)
    assert not torch.allclose(adapted(x), plain(x))
    expected = copy.deepcopy(plain)
    product = next(iter(adapters.products(adapters.state(adapted)).values())) * 0.5
    with torch.no_grad():
        expected.weight += product.T if kind in ("Conv1D", "embedding") else product
    merged = adapters.merge(adapted)
    assert type(merged) is type(plain)
    torch.testing.assert_close(merged.weight, expected.weight)
    torch.testing.assert_close(adapted(x), expected(x))
    torch.testing.assert_close(adapted.weight, expected.weight)
    back = adapters.unmerge(merged, adapted)
    torch.testing.assert_close(back.base_layer.weight, plain.weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(back(x), adapted(x))


def test_model__only_adapters_and_what_is_trained_whole_learn():
    net = network()
    before = {name: tensor.clone() for name, tensor in surgery.state(net).items()}
    adapted = adapters.add(net, 2, modules=["0"], train=["1", "4"])
    expected = ["0.lora_A.weight", "0.lora_B.weight", "1.weight", "1.bias", "4.weight", "4.bias"]
    assert [name for name, p in adapted.named_parameters() if p.requires_grad] == expected
    statistics = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert set(adapters.state(adapted)) == {*expected, *statistics}
    adapted(IMAGE).sum().backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    assert all(p.requires_grad for p in net.parameters())
    assert adapted[0].base_layer.weight.data_ptr() == net[0].weight.data_ptr()  # no second base
    for name, tensor in surgery.state(net).items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(tensor, before[name])


def test_model__state_and_attach_are_inverse():
    net = network().eval()
    adapted = drawn(adapters.add(net, 2, train=["1"], scale=3.0, dropout=0.5))
    again = adapters.attach(net, adapters.state(adapted), scale=adapters.scales(adapted), dropout=0.5)
    assert str(again) == str(adapted)
    surgery.states.check_same(surgery.state(again), surgery.state(adapted), "one", "the other")
    assert torch.equal(again(IMAGE), adapted(IMAGE))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in adapted.parameters()]
    assert torch.equal(adapters.remove(adapted)(IMAGE), net(IMAGE))


def test_model__merged_models_are_plain():
    net = network().eval()
    adapted = drawn(adapters.add(net, 2))
    merged = adapters.merge(adapted)
    assert list(surgery.state(merged)) == list(surgery.state(net))
    assert all(p.requires_grad for p in merged.parameters())
    torch.testing.assert_close(merged(IMAGE), adapted(IMAGE))


def test_model__the_rank_is_a_width():
    net = network().eval()
    adapted = drawn(adapters.add(net, 4, scale=2.0))
    keep = [name for name, module in adapted.named_modules() if name.endswith("base_layer")]
    small, plan = surgery.narrow(adapted, 0.5, IMAGE, keep=keep)
    half, error = adapters.resize(adapters.state(adapted), 2, how="truncate")
    assert torch.equal(small(IMAGE), adapters.attach(net, half, scale=2.0)(IMAGE))
    assert adapters.rank_of(plan.extract(surgery.state(adapted))) == {"0": 2, "4": 2}
    assert all(0 < lost < 1 for lost in error.values())
    wide, _ = surgery.widening.widen(adapted, rate=2, keep=keep, example=IMAGE)
    assert adapters.rank_of(adapters.state(wide)) == {"0": 8, "4": 8}
    torch.testing.assert_close(wide(IMAGE), adapted(IMAGE))
    order = {"0.lora_A.weight:0": torch.tensor([2, 0, 3, 1])}
    torch.testing.assert_close(surgery.symmetry.permute(adapted, order, example=IMAGE)[0](IMAGE), adapted(IMAGE))


def test_model__what_reads_the_weight_reads_the_product_too(caplog):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    adapted = drawn(adapters.add(layer, 2))
    assert [name for name, _ in adapters.adapted_layers(adapted)] == ["self_attn.out_proj", "linear1", "linear2"]
    assert "self_attn.in_proj_weight" in caplog.text
    x = IMAGE[:, 0, :4, :1].expand(-1, -1, 8)
    merged = adapters.merge(adapted)
    for mode in (True, False):
        torch.testing.assert_close(adapted.train(mode)(x), merged.train(mode)(x))


class Squashed(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.tanh(), self.bias)


def test_model__a_layer_that_changes_its_weight_is_adapted_and_not_merged():
    adapted = drawn(adapters.add(nn.Sequential(Squashed(4, 4)), 1))
    adapted(torch.rand(1, 4))
    with refused("unsupported"):
        adapters.merge(adapted)


def tied():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    net[2].weight = net[0].weight
    return net


def test_model__tied_layers_stay_as_they_are(caplog):
    adapted = adapters.add(tied(), 1)
    assert list(adapters.scales(adapted)) == ["1"]
    assert "for 2:" in caplog.text
    assert adapted[2].weight is adapted[0].weight
    assert adapters.merge(adapted)[2].weight is not None
    with refused("unsupported"):
        adapters.add(tied(), 1, modules=["2"])


def test_model__a_layer_used_in_several_places_stays_as_it_is(caplog):
    layer = nn.Linear(4, 4)
    adapted = adapters.add(nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(4, 4)), 1)
    assert list(adapters.scales(adapted)) == ["3"]
    assert "for 0:" in caplog.text


def test_model__copies_of_adapted_parametrized_layers_have_adapters():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    adapted, x = drawn(adapters.add(net, 2)), torch.rand(2, 4)
    assert torch.equal(copy.deepcopy(adapted)(x), adapted(x))
    with refused("unsupported"):
        adapters.merge(adapted)


def test_model__layers_with_hooks_are_adapted_and_not_merged():
    net = nn.Sequential(nn.Linear(4, 4))
    net[0].register_forward_hook(lambda module, given, output: output * 2)
    with refused("unsupported"):
        adapters.merge(adapters.add(net, 1))


def test_model__what_is_trained_whole_is_a_copy_and_survives_unmerging():
    net = network()
    adapted = drawn(adapters.add(net, 2, train=["1", "4"]))
    trained = adapters.add(net, 2, train=["4"])
    with torch.no_grad():
        adapted[4].weight += 1
        adapted.train()(IMAGE)
    assert not torch.equal(trained[4].weight, adapted[4].weight)
    assert torch.equal(trained[4].weight, net[4].weight)
    assert not net[1].running_mean.any()  # as it was
    merged = adapters.merge(adapted)
    with torch.no_grad():
        merged[4].weight += 1
    assert torch.equal(adapters.unmerge(merged, adapted)[4].weight, merged[4].weight)


def test_model__a_tied_layer_is_trained_whole_under_any_of_its_names():
    adapted = adapters.add(tied(), 1, modules=["1"], train=["2"])
    assert adapted[0].weight.requires_grad
    assert adapted[2].weight is adapted[0].weight


def test_model__half_precision_keeps_its_dtype_and_meta_its_device():
    half = adapters.add(nn.Linear(4, 4).bfloat16(), 2)
    assert half(torch.rand(1, 4).bfloat16()).dtype == torch.bfloat16
    assert {t.dtype for t in surgery.state(half).values()} == {torch.bfloat16}
    full = adapters.attach(half.base_layer, {n: t.float() for n, t in adapters.state(half).items()})
    assert full(torch.rand(1, 4).bfloat16()).dtype == torch.bfloat16
    assert adapters.merge(full).weight.dtype == torch.bfloat16
    meta = adapters.add(nn.Linear(4, 4, device="meta"), 2)
    assert all(t.is_meta for t in surgery.state(meta).values())
    assert adapters.merge(meta).weight.is_meta


def test_model__dropout_is_that_of_the_adapter_in_training():
    adapted = drawn(adapters.add(nn.Linear(50, 4), 2, dropout=0.5))
    x = torch.ones(1, 50)
    assert not torch.equal(adapted.train()(x), adapted(x))
    assert torch.equal(adapted.eval()(x), adapted(x))


def test_model__generators_draw_the_same():
    a, b = (adapters.add(network(), 2, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(surgery.state(a).values(), surgery.state(b).values()))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda net: adapters.add(net, 0), "argument: rank="),
        (lambda net: adapters.add(net, 2, scale=float("nan")), "argument: '0'"),
        (lambda net: adapters.attach(net, adapters.state(adapters.add(net, 1)), scale=float("inf")), "argument: '0'"),
        (lambda net: adapters.add(net, 2, modules="0"), "argument"),
        (lambda net: adapters.add(net, 2, modules=["1"]), "name"),
        (lambda net: adapters.add(net, 2, modules=["head"]), "name"),
        (lambda net: adapters.add(net, 2, train=["head"]), "name: 'head'"),
        (lambda net: adapters.add(nn.Sequential(net), 2, train=["4"]), "name: '4'"),
        (lambda net: adapters.add(nn.ReLU(), 2), "unsupported"),
        (lambda net: adapters.add(nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), 2, modules=["0"]), "name"),
        (lambda net: adapters.add(adapters.add(net, 2), 2), "argument"),
        (lambda net: adapters.merge(net), "argument"),
        (lambda net: adapters.add(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), 1, modules=["0"]), "name"),
        (lambda net: adapters.attach(net, adapters.state(adapters.add(net, 1)), scale={}), "argument: '0'"),
        (lambda net: adapters.attach(net, {"0.lora_A.weight": torch.ones(2, 4, 3, 3)}), "mismatch: '0.lora_B.weight'"),
        (lambda net: adapters.attach(net, {"0.lora_B.weight": torch.ones(6, 2, 1, 1)}), "mismatch"),
        (lambda net: adapters.attach(net, adapters.state(adapters.add(nn.Sequential(nn.Linear(4, 6)), 2))), "mismatch"),
        (lambda net: adapters.attach(net, {"fc.weight": torch.ones(2)}), "mismatch: 'fc.weight'"),
        (lambda net: adapters.attach(net[:1], adapters.state(adapters.add(net, 2))), "name"),
    ],
)
def test_model__what_is_refused(call, expected):
    with refused(expected):
        call(network())


def test_model__attributes_of_the_layer_are_there():
    layer = adapters.add(nn.Linear(4, 6), 2)
    assert (layer.in_features, layer.out_features, layer.rank) == (4, 6, 2)
    assert not hasattr(layer, "missing")
    assert isinstance(copy.deepcopy(layer), LowRank)


class Packed(nn.Linear):
    """A linear layer whose weight is unpacked when it computes, as bitsandbytes' are."""

    def __init__(self):
        super().__init__(8, 4)
        self.weight = nn.Parameter(torch.zeros(16, 1, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize("modules", [None, ["0"]])
def test_model__packed_weights_are_refused_by_name(modules):
    net = nn.Sequential(Packed(), nn.Linear(4, 2))
    with refused("name" if modules else "unsupported", "torch.uint8"):
        adapters.add(net, 2, modules=modules)
    assert list(adapters.scales(adapters.add(net, 2, modules=["1"]))) == ["1"]


def packed(kind):
    """A layer of bitsandbytes; where that is not installed, one that says it is."""
    if kind == "stand-in":

        class Linear4bit(Packed):
            __module__ = "bitsandbytes.nn"

            def forward(self, x):
                return nn.functional.linear(x, self.weight.float().view(4, 4).repeat(1, 2), self.bias)

        return Linear4bit()
    return getattr(pytest.importorskip("bitsandbytes").nn, kind)(
        8, 4, **({"has_fp16_weights": False} if kind == "Linear8bitLt" else {"compute_dtype": torch.float32})
    ).to("cpu")


@pytest.mark.parametrize("kind", ["stand-in", "Linear4bit", "Linear8bitLt"])
def test_model__layers_that_unpack_their_weight_have_an_adapter_beside(kind):
    net, x = nn.Sequential(packed(kind), nn.Linear(4, 2)), torch.rand(3, 8)
    before = net(x).detach()
    adapted = adapters.add(net, 2, scale=0.5)
    assert torch.equal(adapted(x), before)
    assert type(adapted[0].base_layer.weight) is type(net[0].weight)
    assert adapted[0].base_layer.weight.data_ptr() == net[0].weight.data_ptr()
    drawn(adapted)
    a, b = adapted[0].factors
    torch.testing.assert_close(adapted[0](x), net[0](x) + 0.5 * x @ a.T @ b.T)
    adapted(x).sum().backward()
    assert a.grad.abs().sum() > 0
    again = adapters.attach(net, adapters.state(adapted), scale=0.5)
    assert torch.equal(again(x), adapted(x))
    assert torch.equal(adapters.remove(adapted)(x), before)
    with refused("unsupported"):
        adapters.merge(adapted)


def test_model__layers_of_other_kinds_are_left_with_a_word(caplog):
    net = nn.ModuleDict({"up": nn.ConvTranspose2d(2, 2, 2), "gru": nn.GRU(4, 4), "norm": nn.LayerNorm(4)})
    net["fc"], net["depthwise"] = nn.Linear(4, 2), nn.Conv2d(2, 2, 3, groups=2)
    assert list(adapters.scales(adapters.add(net, 1))) == ["fc"]
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "no adapter for up", "no adapter for gru", "no adapter for depthwise",
    ]  # fmt: skip
    caplog.clear()
    adapters.add(net, 1, modules=["fc"])
    assert caplog.messages == []


def test_model__the_row_of_padding_has_no_gradient():
    """As that of the embedding itself has none."""
    adapted = adapters.add(nn.Sequential(nn.Embedding(5, 4, padding_idx=2)), 3, modules=["0"])
    adapted(torch.tensor([[2, 1, 4]])).sum().backward()
    found = adapted[0].lora_embedding_A.grad
    assert found.any(0).tolist() == [False, True, False, False, True]


def test_model__whole_numbers_stay_untrained_when_adapters_are_merged():
    net = nn.Sequential(nn.Linear(3, 3))
    net.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    merged = adapters.merge(adapters.add(net, 1))
    assert merged[0].weight.requires_grad
    assert not merged.codes.requires_grad
