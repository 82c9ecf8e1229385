"""Wishes about depth, experts and vocabularies: blocks, experts and tokens that come and go."""

import copy
from itertools import pairwise

import torch
from torch import nn

import surgery
from benchmarks.models.handwritten import MODELS
from benchmarks.wishes.networks import WORDS, llama
from benchmarks.wishes.width import reloads


def drop_layers():
    net = llama()
    scores = surgery.pruning.score_blocks(net, [WORDS])["model.layers"]
    keep = scores.topk(3).indices.sort().values.tolist()
    small, _ = surgery.ungraft(net, keep=[keep], example=WORDS)
    states = net(**WORDS, output_hidden_states=True).hidden_states[:4]
    changes = [1 - torch.cosine_similarity(a, b, dim=2).mean() for a, b in pairwise(states)]
    assert torch.allclose(scores[:3].float(), torch.stack(changes), atol=1e-4)
    assert torch.equal(small.model.layers[2].mlp.up_proj.weight, net.model.layers[keep[2]].mlp.up_proj.weight)
    assert reloads(small)


def mixture(experts: int, chosen: int = 2) -> nn.Module:
    """Return a small Mixtral with random weights."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    more = {
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes, **more)).eval()


def drop_experts():
    net = mixture(8)
    small, _ = surgery.experts.keep(net, 4, scores=surgery.experts.frequency(net, [WORDS]))
    assert small.config.num_local_experts == 4
    assert small.model.layers[1].mlp.gate.weight.shape == (4, 16)
    assert reloads(small)


def experts_in_a_list():
    net = MODELS["experts_max"].build().eval()
    small, _ = surgery.experts.keep(net, [0, 2])
    masked = copy.deepcopy(net)
    masked.gate.bias.data[[1, 3]] = -1e9  # which these are never chosen with
    x = torch.rand(3, 9, 7)
    assert torch.allclose(small(x), masked(x), atol=1e-6)
    assert (len(small.experts), small.gate.out_features) == (2, 2)


def trim_vocabulary():
    net, kept = llama(bos_token_id=3, eos_token_id=7), [3, 7, 10, 25, 40]
    small = surgery.vocabulary.keep(net, kept).model
    few = small(input_ids=torch.tensor([[0, 2, 4, 1]])).logits
    assert small.config.vocab_size == 5
    assert torch.allclose(few, net(input_ids=torch.tensor([[3, 10, 40, 7]])).logits[..., kept], atol=1e-6)
    small.save_pretrained("saved")
    assert torch.equal(type(small).from_pretrained("saved").eval()(input_ids=torch.tensor([[0, 2, 4, 1]])).logits, few)


def hybrid():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {
        "vocab_size": 60,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    nets = [Lfm2ForCausalLM(Lfm2Config(**sizes, num_key_value_heads=2, layer_types=kinds)).eval() for _ in range(2)]
    mean = surgery.load(copy.deepcopy(nets[0]), surgery.merging.linear(nets))
    small, _ = surgery.ungraft(mean, keep=[[0, 1, 3]], example=WORDS)
    assert torch.allclose(mean.lm_head.weight, (nets[0].lm_head.weight + nets[1].lm_head.weight) / 2)
    assert small.config.layer_types == ["conv", "full_attention", "full_attention"]
    assert reloads(small)


def identity_block():
    net = llama(num_hidden_layers=2)
    deep, _ = surgery.graft(net, depths=[[0, 0, 1, 1]], mode="identity", example=WORDS)
    assert torch.equal(deep(**WORDS).logits, net(**WORDS).logits)
    optimizer, block = torch.optim.Adam(deep.parameters(), lr=0.01), deep.model.layers[1]
    start = copy.deepcopy(block.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        deep(**WORDS, labels=WORDS["input_ids"]).loss.backward()
        optimizer.step()
    assert not any(torch.equal(start[name], tensor) for name, tensor in block.state_dict().items())
