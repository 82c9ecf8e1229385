"""A rotated residual stream changes no output, a planted rotation is found again, and what is not linear is refused."""

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from symmetric import image, randomized
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import surgery
import zoo
from surgery import SurgeryError, align, permute, state
from surgery.width.rotate import rotate

pytestmark = pytest.mark.slow
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class Block(nn.Module):
    """A pre-norm network of one residual block; `middle` sees the stream, `last` is the norm before the head."""

    def __init__(self, norm=nn.LayerNorm, middle=None, last=None, width=6):
        super().__init__()
        self.stem, self.norm = nn.Linear(3, width), norm(width)
        self.up, self.down = nn.Linear(width, 5), nn.Linear(5, width)
        self.middle, self.last = middle or nn.Identity(), last or norm(width)
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.middle(self.stem(x))
        return self.head(self.last(x + self.down(self.up(self.norm(x)).relu())))


class Gate(nn.Module):
    def forward(self, x):
        return x * x.sigmoid()


def encoder(norm_first=True):
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=norm_first)
    last = nn.LayerNorm(8) if norm_first else None
    layers = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(5, 8), layers, nn.Linear(8, 3))


def gpt2(tie=False):
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tie}
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=16, n_layer=2, n_head=2, **ends))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, num_key_value_heads=2, **sizes))


def small_vit():
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2, num_classes=3)


MODELS = {
    "timm": (small_vit, image((2, 3, 16, 16)), 1e-9),
    "torchvision": (lambda: torchvision.models.VisionTransformer(16, 8, 2, 2, 12, 20, num_classes=3), None, 1e-9),
    "encoder": (encoder, image((2, 4, 5)), 1e-9),
    "zoo": (lambda: zoo.create("vit_tiny", depth=1, width=0.2, image_size=16), None, 1e-9),
    "gpt2": (gpt2, {"input_ids": IDS}, 1e-9),
    "llama": (llama, {"input_ids": IDS}, 1e-5),  # its norms compute in float32
}


def model(name, seed=0):
    make, example, near = MODELS[name]
    return randomized(make(), seed), image((2, 3, 16, 16)) if example is None else example, near


def orthogonal(size, keeps_ones, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    if not keeps_ones:
        return matrix
    mirror = torch.ones(size, dtype=torch.float64) - matrix.sum(0)  # of a reflection that brings the ones back
    return matrix - 2 * torch.outer(matrix @ mirror, mirror) / mirror.dot(mirror)


@torch.no_grad()
def outputs(net, example):
    found = net(**example) if isinstance(example, dict) else net(example)
    return getattr(found, "logits", found)


def distance(one, other):
    return sum((state(one)[n] - state(other)[n]).square().sum() for n in state(one)).sqrt().item()


def stream(net, example):
    """The name and size of the only width that may be rotated."""
    found = align([net, net], example=example, maps="orthogonal").rotations[1]
    ((name, matrix),) = found.items()
    return name, len(matrix)


LONG = [pytest.param(name, marks=[pytest.mark.slow] if name in ("gpt2", "llama", "zoo") else []) for name in MODELS]


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_planted_rotation_is_found(name):
    net, example, near = model(name)
    width, size = stream(net, example)
    other = rotate(net, {width: orthogonal(size, name != "llama")}, example=example)
    free = [w for w in surgery.widths(net, example=example) if not w.order and w.name != width]
    other, _ = permute(other, {w.name: torch.randperm(w.size) for w in free}, example=example)
    assert distance(net, other) > 1
    assert torch.allclose(outputs(other, example), outputs(net, example), rtol=0, atol=near)
    found = align([net, other], example=example, maps="orthogonal")
    assert distance(*found.models) < 1e-9
    assert list(found.rotations[1]) == [width]
    assert set(found.only_permuted) == set(found.permutations[1]) == {w.name for w in free}
    assert torch.allclose(outputs(found.models[1], example), outputs(net, example), rtol=0, atol=near)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LONG if name.values[0] in ("timm", "gpt2", "llama")])
def test_models_compute_what_they_did_and_come_nearer_than_by_permutations(name):
    (one, example, near), (other, _, _) = model(name), model(name, 1)
    gaps = []
    folded = align([one, one, other], example=example, maps="orthogonal").models[0]
    for to in (0, 1):
        found = align([one, other], example=example, to=to, maps="orthogonal")
        for before, after in zip((one, other), found.models):
            assert torch.allclose(outputs(before, example), outputs(after, example), rtol=0, atol=near * 10)
        gaps.append(distance(*found.models))
    assert not found.rotations[1]
    assert found.rotations[0]
    ours = rotate(
        other, {n: torch.eye(len(m), dtype=torch.float64) for n, m in found.rotations[0].items()}, example=example
    )
    permuted = align([folded, ours], example=example).models
    assert gaps[0] < distance(*permuted) < distance(folded, ours)


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), layer=st.booleans())
def test_a_rotation_keeps_outputs_and_its_transpose_undoes_it(seed, layer):
    net, x = randomized(Block(nn.LayerNorm if layer else nn.RMSNorm), seed), image((4, 3), seed)
    matrix = orthogonal(6, layer, seed)
    folded = rotate(net, {"stem.weight:0": torch.eye(6, dtype=torch.float64)}, example=x)
    turned = rotate(net, {"stem.weight:0": matrix}, example=x)
    for other in (folded, turned):
        assert torch.allclose(outputs(net, x), outputs(other, x), rtol=1e-9, atol=1e-9 * outputs(net, x).abs().max())
    back = rotate(turned, {"stem.weight:0": matrix.T}, example=x)
    assert all(torch.allclose(state(back)[n], t, rtol=1e-9, atol=1e-9) for n, t in state(folded).items())
    assert torch.equal(folded.last.weight, torch.ones(6))
    expected = net.head.weight * net.last.weight @ matrix  # by hand
    assert torch.allclose(turned.head.weight, expected)
    assert torch.allclose(turned.down.bias, net.down.bias @ matrix)


class Square(nn.Module):
    """An RMS norm written out, as transformers' models do, with the mean over another power if asked."""

    def __init__(self, width=6, power=2):
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.ones(width)), power

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(self.power).mean(-1, keepdim=True) + 1e-6))


class Added(nn.Module):
    """Something that is not equivariant, added to the stream."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return x + self.what(x)


REFUSED = {
    "batch norm": (lambda: Block(middle=nn.BatchNorm1d(6)), "native_batch_norm in middle"),
    "gate": (lambda: Block(middle=Gate()), "sigmoid in middle"),
    "post-norm": (lambda: Block(middle=nn.LayerNorm(6)), "native_layer_norm in norm"),
    "activation": (lambda: Block(middle=nn.GELU()), "gelu in middle"),
    "another power": (lambda: Block(last=Square(power=4)), "pow in last"),
    "constant": (lambda: Block(middle=Added(lambda x: 1.0)), "add in middle"),
    "largest": (lambda: Block(middle=Added(lambda x: x.amax(-1, keepdim=True))), "amax in middle"),
    "mean": (lambda: Block(middle=Added(lambda x: x.mean(-1, keepdim=True))), "mean in middle"),
    "mean square": (lambda: Block(middle=Added(lambda x: x.pow(2).mean(-1, keepdim=True))), "add in middle"),
    "softmax": (lambda: Block(middle=nn.Softmax(-1)), "softmax in middle"),
    "groups": (lambda: Block(middle=nn.GroupNorm(2, 6)), "no such width"),
    "other eps": (lambda: Block(middle=Added(lambda x: F.layer_norm(x[:, None], (1, 6)))), "layer_norm in middle"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_only_permuted_and_says_why(name):
    make, why = REFUSED[name]
    net, x = randomized(make()), image((4, 3))
    found = align([net, net], example=x, maps="orthogonal")
    assert found.rotations == [{}, {}]
    assert all(torch.equal(a, b) for a, b in zip(state(net).values(), state(found.models[0]).values()))
    if "stem.weight:0" in found.permutations[1]:
        assert why in found.only_permuted["stem.weight:0"]
    with pytest.raises(SurgeryError, match=why):
        rotate(net, {"stem.weight:0": torch.eye(6)}, example=x)


def test_post_norm_models_are_only_permuted():
    net, tokens = randomized(encoder(norm_first=False)), image((2, 4, 5))
    assert "adds a norm's output" in align([net, net], example=tokens, maps="orthogonal").only_permuted["0.weight:0"]
    net = randomized(zoo.create("transformer", num_classes=9, tokens=8, depth=1, width=0.2))
    assert not any(align([net, net], example=IDS % 9, maps="orthogonal").rotations)


@pytest.mark.slow  # where transformers is
def test_tied_embeddings_are_rotated_unless_the_last_norm_has_a_weight_to_fold():
    pytest.importorskip("transformers")
    net, example = randomized(gpt2(tie=True)), {"input_ids": IDS}
    (why,) = [w for w in align([net, net], example=example, maps="orthogonal").only_permuted.values() if "untie" in w]
    assert why.startswith("transformer.ln_f.weight cannot be folded into transformer.wte.weight")
    nn.init.constant_(net.transformer.ln_f.weight, 2)
    other = rotate(net, {"transformer.wte.weight:1": orthogonal(16, True)}, example=example)
    assert other.lm_head.weight is other.transformer.wte.weight
    assert torch.allclose(outputs(other, example), outputs(net, example), rtol=0, atol=1e-9)
    assert distance(*align([net, other], example=example, maps="orthogonal").models) < 1e-9


def test_wrong_arguments_are_refused():
    net, x = randomized(Block()), image((4, 3))
    eye = torch.eye(6, dtype=torch.float64)
    for rotations, why in [
        ({"stem.weight:0": 2 * eye}, "not orthogonal"),
        ({"stem.weight:0": -eye}, "vector of ones"),
        ({"stem.weight:0": torch.eye(5)}, r"\[6, 6\]"),
        ({"up.weight:0": torch.eye(5)}, "relu"),
        ({"nothing": eye}, "no such width"),
    ]:
        with pytest.raises(SurgeryError, match=why):
            rotate(net, rotations, example=x)
    for kwargs, why in [
        ({"maps": "linear"}, "unknown maps"),
        ({"maps": "orthogonal", "by": "activations"}, "by weight"),
    ]:
        with pytest.raises(SurgeryError, match=why):
            align([net, net], example=x, batches=[x], **kwargs)
    net.last.weight.data[2] = 0
    with pytest.raises(SurgeryError, match=r"'last.weight' is 0 where 'last.bias' is not"):
        align([net, net], example=x, maps="orthogonal")


class Beside(nn.Module):
    """A stream that can be rotated, and results of other kinds."""

    def __init__(self, beside, along=lambda h: h):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 2)
        self.beside, self.along = beside, along

    def forward(self, x):
        y = self.b(self.norm(self.along(self.a(x))))
        return y, self.beside(y)


@pytest.mark.parametrize(
    "beside",
    [
        lambda y: torch.full_like(y, -torch.inf),
        lambda y: torch.full_like(y, torch.nan),
        lambda y: y.isnan(),
        lambda y: y[:0],
        lambda y: y * 1j,
    ],
)
def test_results_of_every_kind_are_compared(beside):
    torch.manual_seed(0)
    net, x = Beside(beside), torch.randn(5, 3)
    matrix = torch.linalg.qr(torch.randn(4, 4)).Q
    torch.testing.assert_close(rotate(net, {"a.weight:0": matrix}, example=x)(x)[0], net(x)[0], rtol=1e-4, atol=1e-5)
    for rounding in ("floor", "trunc"):
        rounded = Beside(beside, lambda h, rounding=rounding: torch.div(h, 0.1, rounding_mode=rounding))
        assert "div" in align([rounded, rounded], example=x, maps="orthogonal").only_permuted["a.weight:0"]


def test_a_tensor_without_numbers_is_in_nobodys_way():
    """It ended in an error of torch."""

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
            self.register_parameter("none", nn.Parameter(torch.empty(0, 4)))

        def forward(self, x):
            return super().forward(x) + self.none.sum()

    nets, x = [Net(), Net()], torch.randn(5, 3)
    found = align(nets, example=x, maps="orthogonal")
    torch.testing.assert_close(found.models[1](x), nets[1](x), atol=1e-5, rtol=1e-4)
