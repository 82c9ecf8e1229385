"""Wishes about widths: networks of all kinds that have to become narrower, by half or by what is chosen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import surgery
from benchmarks.calls import outputs
from benchmarks.models.handwritten import MODELS
from benchmarks.wishes import networks
from benchmarks.wishes.networks import IMAGE, WORDS, Net, llama


def halve(build: Callable[[int], nn.Module], example: Any) -> Callable[[], None]:
    """Return the wish that a network becomes half as wide, which its class at half the width has to agree with.

    Args:
        build: makes the network, for 2 at full width and for 1 at half of it.
    """

    def run() -> None:
        small, plan = surgery.narrow(build(2).eval(), 0.5, example)
        assert same_as(build(1), small, example)
        assert all(torch.equal(t, small.state_dict()[n]) for n, t in plan.extract(plan.embed(small)[0]).items())

    return run


def same_as(half: nn.Module, small: nn.Module, x: Any) -> bool:
    """Return whether the class at half the width computes the same with the narrow model's tensors."""
    half = surgery.load(half.eval(), surgery.state(small))
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs(half, x), outputs(small, x)))


coordinate_attention_block = halve(networks.coordinate_attention_block, IMAGE)
implicit_parameters = halve(networks.implicit_parameters, IMAGE)
weighted_fusion = halve(networks.weighted_fusion, IMAGE)


def recurrent():
    for name in ("lstm", "gru", "lstm_both_ways", "gru_cell"):
        net = MODELS[name].build().eval()
        x = MODELS[name].example(net)
        small, _ = surgery.narrow(net, 0.5, x)
        assert same_as(MODELS[name].half(), small, x)


linear_as_image = halve(networks.linear_as_image, torch.rand(2, 6))
one_output_channel = halve(networks.one_output_channel, IMAGE)


def diffusion_transformer():
    x = (torch.rand(2, 7, 5), torch.rand(2))
    small, _ = surgery.narrow(networks.diffusion_net(2).eval(), 0.5, x, strict=True)
    half = surgery.load(networks.diffusion_net(1).eval(), surgery.state(small))
    assert torch.allclose(half(*x), small(*x), atol=1e-6)


def zeroed_channels():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 3))
    prune.ln_structured(net[0], "weight", amount=3, n=2, dim=0)
    small, _ = surgery.pruning.drop_zeros(net, example=IMAGE)
    assert small[0].out_channels == small[2].in_channels == 5
    assert torch.allclose(small(IMAGE), net(IMAGE), atol=1e-6)


def given_channels():
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 4, 3))
    small, _ = surgery.pruning.drop(net, {"0": [2, 6, 9]}, example=IMAGE)
    assert torch.equal(small[2].weight, net[2].weight[:, [0, 1, 3, 4, 5, 7, 8, 10, 11]])


packed_lstm = halve(networks.packed_lstm, (torch.rand(2, 6, 5), torch.tensor([6, 4])))


def reloads(model: nn.Module) -> bool:
    """Return whether save_pretrained and from_pretrained give a model that computes the same."""
    model.save_pretrained("saved")
    again = type(model).from_pretrained("saved").eval()
    return torch.allclose(again(**WORDS).logits, model(**WORDS).logits, atol=1e-5)


def one_key_head():
    net = llama(num_key_value_heads=1)
    small, _ = surgery.narrow(net, {"*.q_proj": 0.5}, WORDS, heads="drop", output=lambda y: y.logits)
    assert small.config.num_attention_heads == 2
    assert small.model.layers[3].self_attn.q_proj.out_features == 16
    assert reloads(small)


def one_dimension():
    small, _ = surgery.narrow(llama(), {"*.mlp.up_proj": 0.5}, WORDS, output=lambda y: y.logits)
    assert (small.config.intermediate_size, small.config.hidden_size) == (24, 32)
    assert reloads(small)


def heads():
    net = llama(num_key_value_heads=4, num_hidden_layers=2)
    small, _ = surgery.narrow(net, {"*.q_proj": 0.5}, WORDS, heads="drop", output=lambda y: y.logits)
    rows = net.model.layers[0].self_attn.q_proj.weight[:16]
    assert torch.equal(small.model.layers[0].self_attn.q_proj.weight, rows)
    assert reloads(small)


def exact_size():
    net = nn.Sequential(nn.Linear(3, 25), nn.ReLU(), nn.Linear(25, 2))
    small, _ = surgery.narrow(net, {"0": 7}, torch.rand(2, 3))
    assert small[0].out_features == surgery.narrow(net, 7 / 25, torch.rand(2, 3))[0][0].out_features == 7


u_net = halve(networks.u_net, IMAGE)


def swin():
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }
    net, x = SwinForImageClassification(SwinConfig(**sizes)).eval(), {"pixel_values": IMAGE}
    small, _ = surgery.narrow(net, 0.75, x, output=lambda y: y.logits)
    small.save_pretrained("swin")
    again = SwinForImageClassification.from_pretrained("swin").eval()
    assert small.config.embed_dim == 12
    assert torch.allclose(again(**x).logits, small(**x).logits, atol=1e-5)


def fake_quantisers():
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).train()
    net.qconfig = get_default_qat_qconfig("fbgemm")
    surgery.narrow(prepare_qat(net), 0.5, IMAGE, strict=True)


def wrapped():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    x = torch.rand(2, 3)
    plain, _ = surgery.narrow(net, 0.5, x)
    forms = (torch.fx.symbolic_trace(net), torch.export.export(net, (x,)).module(), nn.DataParallel(net))
    for form in (*forms, torch.optim.swa_utils.AveragedModel(net)):
        small, _ = surgery.narrow(form, 0.5, x)
        assert torch.equal(small(x), plain(x))


chunks_and_remainders = halve(networks.chunks_and_remainders, IMAGE)


def restormer_heads():
    small, _ = surgery.narrow(networks.restormer_net(4).eval(), 0.5, IMAGE, heads="drop")
    half = surgery.load(networks.restormer_net(2).eval(), surgery.state(small))
    assert torch.allclose(half(IMAGE), small(IMAGE), atol=1e-6)


def point_net():
    parts = {"first": nn.Conv1d(3, 8, 1), "turn": nn.Linear(8, 64), "second": nn.Conv1d(8, 16, 1)}
    net, x = Net(networks.point_cloud, **parts, last=nn.Linear(16, 4)).eval(), torch.rand(2, 3, 9)
    small, plan = surgery.narrow(net, 0.5, x)
    net.load_state_dict(plan.embed(surgery.state(small))[0])
    assert small.second.out_channels == 8
    assert torch.allclose(net(x), small(x), atol=1e-6)


dynamic_convolutions = halve(networks.dynamic_convolutions, IMAGE)
cbam = halve(networks.cbam, IMAGE)


def by_hand():
    for name in ("message_passing", "mamba_scan", "nerf"):
        net = MODELS[name].build().eval()
        x = MODELS[name].example(net)
        small, _ = surgery.narrow(net, 0.5, x)
        assert same_as(MODELS[name].half(), small, x)


def computed_weights():
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 5, 3))
    net[0].weight.data *= 5
    prune.ln_structured(net[0], "weight", amount=6, n=2, dim=0)
    scores = surgery.pruning.importance(net, example=IMAGE, by="l2")
    alive = net[0].weight.flatten(1).abs().sum(1) > 0
    small, _ = surgery.narrow(net, 0.5, IMAGE, scores=scores)
    assert torch.equal(small[0].weight, net[0].weight[alive])


def adapted_scores():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    adapted = surgery.adapters.add(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), rank=2)
    nn.init.normal_(adapted[0].lora_B.weight)
    net[0].parametrizations.weight.original1.data[0] *= 9  # the direction's length does not matter
    merged = surgery.adapters.merge(adapted)
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    plain[0].weight.data, plain[2].weight.data = net[0].weight.data.clone(), net[2].weight.data.clone()
    for one, same in ((adapted, merged), (net, plain)):
        scores = [surgery.pruning.importance(m, example=torch.rand(2, 4), by="l2") for m in (one, same)]
        assert torch.allclose(*(next(iter(score.values())) for score in scores), rtol=1e-4)


def combined_targets():
    net = nn.Sequential(nn.Conv2d(3, 40, 3), nn.ReLU(), nn.Conv2d(40, 40, 3), nn.ReLU(), nn.Conv2d(40, 4, 3))
    target = surgery.pruning.Target(parameters=6_000, macs=0.5)
    small, _, sizes = surgery.pruning.prune(net, example=IMAGE, target=target)
    assert sum(p.numel() for p in small.parameters()) <= 6_000
    assert sizes[-1].macs <= sizes[0].macs / 2


def moments():
    net, x = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(5, 3)
    optimizer = torch.optim.Adam(net.parameters())
    net(x).square().sum().backward()
    optimizer.step()
    small, plan = surgery.pruning.drop(net, {"0": [1, 4]}, example=x)
    followed = surgery.optimizers.follow(optimizer, net, small, plan)
    full = optimizer.state[net[0].weight]["exp_avg"]
    assert torch.equal(followed.state[small[0].weight]["exp_avg"], full[[0, 2, 3, 5, 6, 7]])


def classes():
    net, kept = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10)), [0, 4, 9]
    small = surgery.vocabulary.keep(net, kept, modules=["2"]).model
    assert small[2].out_features == 3
    assert torch.allclose(small(torch.ones(1, 3)), net(torch.ones(1, 3))[:, kept])
