"""Wishes about merging: models of one origin, of other heads, names and prefixes."""

import copy

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

import surgery
from benchmarks.wishes import error_of
from benchmarks.wishes.networks import WORDS, llama
from surgery import merging


def head(classes: int, hidden: int = 16) -> nn.Module:
    """Return a network with this many classes."""
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def scaled_layers():
    net = llama()
    deep, _ = merging.passthrough(
        [net, net], blocks={"model.layers": [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)]}, example=WORDS
    )
    for name, weight in deep.named_parameters():
        if name.startswith(("model.layers.3.", "model.layers.4.")) and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            weight.data *= 0.5**0.5
    assert deep.config.num_hidden_layers == 6
    own = net.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(deep.model.layers[3].self_attn.q_proj.weight, own * 0.5**0.5)
    assert torch.equal(deep.model.layers[1].self_attn.q_proj.weight, own)


def ties():
    base, *nets = (llama(seed).bfloat16() for seed in range(3))
    merged = merging.ties(nets, base=base, density=1.0)["lm_head.weight"]
    first, second, start = (net.lm_head.weight.float() for net in (*nets, base))
    a, b = first - start, second - start
    sign = (a + b).sign()
    agree = [(one * sign > 0).float() for one in (a, b)]
    expected = start + (a * agree[0] + b * agree[1]) / (agree[0] + agree[1]).clamp(min=1)
    assert merged.dtype == torch.bfloat16
    assert torch.allclose(merged.float(), expected, atol=2e-3, rtol=1e-2)


def mixture_of_dense():
    merging.passthrough([llama(0), llama(1)], blocks={"model.layers.*.experts": [(0, 0), (1, 0)]}, example=WORDS)


def other_shapes():
    old = head(100)
    new, fit = surgery.load(head(150), old, fit="corner")
    assert torch.equal(new[2].weight[:100], old[2].weight)
    assert torch.equal(new[0].weight, old[0].weight)
    assert {*fit.cut} == {"2.weight", "2.bias"}


def permutations():
    class Block(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    torch.manual_seed(0)
    net, x = (
        nn.Sequential(*[Block(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 30)) for _ in range(2)]),
        torch.rand(4, 30),
    )
    orders = {name: torch.randperm(len(score)) for name, score in surgery.pruning.importance(net, example=x).items()}
    mixed, _ = surgery.symmetry.permute(net, orders, example=x)
    aligned = surgery.symmetry.align([net, mixed], example=x).models[1]
    assert not torch.equal(mixed[0][0].weight, net[0][0].weight)
    assert all(torch.equal(a, b) for a, b in zip(aligned.parameters(), net.parameters()))


def backbones():
    a, b = head(3), head(5)
    states = [{name: t for name, t in surgery.state(net).items() if not name.startswith("2.")} for net in (a, b)]
    net, fit = surgery.load(copy.deepcopy(b), merging.linear(states), fit="whole")
    assert torch.allclose(net[0].weight, (a[0].weight + b[0].weight) / 2)
    assert torch.equal(net[2].weight, b[2].weight)
    assert {*fit.left} == {"2.weight", "2.bias"}


def padded_vocabularies():
    a, b = llama(0), llama(1, vocab_size=64)
    assert error_of(lambda: merging.linear([a, b])).code == "mismatch"
    merged = merging.linear([a, surgery.vocabulary.keep(b, range(60)).model])
    expected = (a.lm_head.weight + b.lm_head.weight[:60]) / 2
    assert torch.allclose(merged["lm_head.weight"], expected)


def language_part():
    nets = [nn.ModuleDict({"language": head(3), "vision": nn.Linear(4, 4)}) for _ in range(2)]
    merged = merging.linear(nets, weights={"vision.*": [1, 0], "*": [1, 1]})
    assert torch.equal(merged["vision.weight"], nets[0]["vision"].weight)
    assert torch.allclose(
        merged["language.0.weight"], (nets[0]["language"][0].weight + nets[1]["language"][0].weight) / 2
    )


def prefix():
    text, both = head(3), nn.ModuleDict({"language_model": head(3), "vision": nn.Linear(4, 4)})
    language, _ = surgery.load(
        head(3), {n: t for n, t in surgery.state(both).items() if "vision" not in n}, fit="whole"
    )
    merged, fit = surgery.load(copy.deepcopy(both), merging.linear([text, language]), fit="whole")
    assert torch.allclose(merged["language_model"][0].weight, (text[0].weight + both["language_model"][0].weight) / 2)
    assert torch.equal(merged["vision"].weight, both["vision"].weight)
    assert {*fit.left} == {"vision.weight", "vision.bias"}


def pooler():
    from transformers import BertConfig, BertModel

    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    a, b = (BertModel(BertConfig(**sizes), add_pooling_layer=pool) for pool in (True, False))
    shared = [{n: t for n, t in surgery.state(net).items() if n in surgery.state(b)} for net in (a, b)]
    merged, fit = surgery.load(copy.deepcopy(a), merging.linear(shared), fit="whole")
    names = "encoder.layer.0.output.dense.weight"
    assert torch.allclose(merged.get_parameter(names), (a.get_parameter(names) + b.get_parameter(names)) / 2)
    assert all(name.startswith("pooler.") for name in fit.left)


def masked_models():
    nets = [head(3) for _ in range(2)]
    for net in nets:
        prune.ln_structured(net[0], "weight", amount=6, n=2, dim=0)
    assert isinstance(error_of(lambda: merging.linear(nets)), surgery.SurgeryError)
    for net in nets:
        prune.remove(net[0], "weight")
    assert torch.allclose(merging.linear(nets)["0.weight"], (nets[0][0].weight + nets[1][0].weight) / 2)


def prefixed_files():
    from surgery.files import open_state

    a, b = surgery.state(head(3)), surgery.state(head(3))
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in a.items()}, "epoch": 3}, "a.pt")
    save_file(b, "b.safetensors")
    nets = [surgery.load(head(3), open_state(file), fit="whole")[0] for file in ("a.pt", "b.safetensors")]
    assert torch.allclose(surgery.average(nets)["0.weight"], (a["0.weight"] + b["0.weight"]) / 2)
