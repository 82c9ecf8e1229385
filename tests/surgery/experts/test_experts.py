"""Experts that are kept or merged: plain mixtures, and those of transformers, against what they must compute."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

import surgery
from surgery.experts import frequency, keep, merge, mixtures, norm


class Listed(nn.Module):
    """A mixture whose experts are modules in a list."""

    def __init__(self, experts=6, k=2, width=4):
        super().__init__()
        self.gate, self.k, self.num_experts = nn.Linear(width, experts), k, experts
        expert = (nn.Sequential(nn.Linear(width, 5), nn.GELU(), nn.Linear(5, width)) for _ in range(experts))
        self.experts = nn.ModuleList(expert)

    def forward(self, x):
        weights, chosen = self.gate(x).topk(self.k)
        result = torch.zeros_like(x)
        for number in range(self.num_experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            share = weights.softmax(1)[rows, place, None]
            result = result.index_add(0, rows, share * self.experts[number](x[rows]))
        return result


class FusedMoE(nn.Module):
    """A mixture whose experts lie in one tensor, with a router of rows in its columns, which counts its choices."""

    def __init__(self, experts=6, k=2, width=4):
        super().__init__()
        self.w_gate, self.top_k = nn.Parameter(torch.randn(width, experts)), k
        self.moe_weight = nn.Parameter(torch.randn(experts, width, width))
        self.register_buffer("seen", torch.zeros(experts))

    def forward(self, x):
        weights, chosen = (x @ self.w_gate).topk(self.top_k)
        each = torch.einsum("nd,nkde->nke", x, self.moe_weight[chosen])
        return (each * weights.softmax(1)[..., None]).sum(1)


class Net(nn.Module):
    """Two layers of mixtures beside a layer that is none."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), kind(**options), kind(**options)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def net(kind=Listed, **options):
    torch.manual_seed(0)
    return Net(kind, **options).double().eval()


def avoid(layer, dropped):
    """The router never chooses these experts."""
    if isinstance(layer, Listed):
        layer.gate.bias.data[dropped] = -1e9
    else:  # inputs are positive in the first column
        layer.w_gate.data[:, dropped] = torch.tensor([-1e9, 0, 0, 0], dtype=torch.float64)[:, None]


X = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 5), min_size=2, max_size=6))
def test_keep__experts_that_are_never_chosen_can_go(kept):
    model = net()
    for layer in model.layers[1:]:
        avoid(layer, [number for number in range(6) if number not in kept])
    before = {name: tensor.clone() for name, tensor in surgery.state(model).items()}
    small, plan = keep(model, sorted(kept))
    assert len(small.layers[1].experts) == small.layers[2].gate.out_features == small.layers[2].num_experts == len(kept)
    assert torch.allclose(small(X), model(X), rtol=0, atol=1e-14)
    assert surgery.Plan.from_json(plan.to_json()) == plan
    assert all(torch.equal(before[name], tensor) for name, tensor in surgery.state(model).items())
    assert len(model.layers[1].experts) == 6
    full, mask = plan.embed(surgery.state(small))
    assert all(torch.equal(full[name][mask[name]], before[name][mask[name]]) for name in full)


def test_keep__fused_experts_and_counters_follow():
    model, first = net(FusedMoE), X.abs()
    for layer in model.layers[1:]:
        avoid(layer, [1, 4])
    model = nn.Sequential(model.layers[1])
    small, plan = keep(model, [5, 0, 2, 3])
    assert small[0].moe_weight.shape == (4, 4, 4)
    assert small[0].w_gate.shape == (4, 4)
    assert small[0].seen.shape == (4,)
    assert torch.allclose(small(first), model(first), rtol=0, atol=1e-14)
    assert small[0].moe_weight.dtype == torch.float64
    assert torch.equal(plan.extract(model)["0.moe_weight"], model[0].moe_weight[[0, 2, 3, 5]])


def test_keep__each_mixture_may_keep_its_own():
    small, _ = keep(net(), {"layers.1": [0, 3, 4], "layers.2": 2}, scores={"layers.2": torch.arange(6)})
    assert [len(layer.experts) for layer in small.layers[1:]] == [3, 2]
    assert small(X).shape == X.shape
    small, _ = keep(net(), {"layers.2": [0, 1]})
    assert [len(layer.experts) for layer in small.layers[1:]] == [6, 2]


def test_keep__plans_of_two_cuts_compose():
    model = net()
    first, outer = keep(model, [0, 2, 3, 5])
    second, inner = keep(first, [1, 3])
    both = outer.compose(inner)
    assert torch.equal(both.build(model)(X), second(X))
    assert torch.equal(keep(model, [2, 5])[0](X), second(X))


@pytest.mark.parametrize("kind", [Listed, FusedMoE])
def test_experts__frequencies_are_shares_of_the_router_s_choices(kind):
    model = nn.Sequential(net(kind).layers[1])
    logits = model[0].gate(X) if kind is Listed else X @ model[0].w_gate
    shares = logits.topk(2).indices.flatten().bincount(minlength=6).double() / 40
    if kind is FusedMoE:  # neither the router nor an expert runs as a module
        with refused("unsupported: '0'"):
            frequency(model, [X])
        return
    assert torch.equal(frequency(model, [X[:7], X[7:]])["0"], shares)
    assert not model[0]._forward_hooks
    small, _ = keep(model, 3, scores=frequency(model, [X]))
    best = shares.argsort(descending=True, stable=True)[:3].sort().values
    assert torch.equal(small[0].gate.weight, model[0].gate.weight[best])


def test_experts__norms_are_those_of_all_tensors_of_an_expert():
    model = net()
    one = model.layers[2].experts[3]
    assert norm(model)["layers.2"][3].item() == pytest.approx(
        sum(p.square().sum().item() for p in one.parameters()) ** 0.5
    )


PARTS = (
    lambda layer, i: layer.experts[i][0].weight,
    lambda layer, i: layer.experts[i][2].bias,
    lambda layer, i: layer.gate.weight[i],
    lambda layer, i: layer.gate.bias[i],
)


def test_merge__merged_experts_are_means_by_their_scores():
    model = net()
    weights = {name: torch.tensor([1.0, 3, 2, 2, 0, 5]) for name in ("layers.1", "layers.2")}
    small, plan = merge(model, [[0, 1], [2], [3, 5]], scores=weights)
    layer, full = small.layers[1], model.layers[1]
    for place, shares in enumerate([{0: 0.25, 1: 0.75}, {2: 1.0}, {3: 2 / 7, 5: 5 / 7}]):
        for of in PARTS:
            mean = sum(share * of(full, number) for number, share in shares.items())
            assert torch.allclose(of(layer, place), mean, atol=1e-14)
    assert torch.equal(plan.extract(model)["layers.1.gate.bias"], full.gate.bias[[1, 2, 5]])
    assert small(X).shape == X.shape


def test_merge__merging_equal_experts_changes_nothing_but_the_router():
    model = net()
    for layer in model.layers[1:]:
        for a, b in [(0, 3), (1, 4), (2, 5)]:
            layer.experts[b].load_state_dict(layer.experts[a].state_dict())
            layer.gate.weight.data[b] = layer.gate.weight[a]
            layer.gate.bias.data[b] = layer.gate.bias[a]
    small, _ = merge(model, 3, scores={name: torch.tensor([3.0, 3, 3, 1, 1, 1]) for name in ("layers.1", "layers.2")})
    assert torch.allclose(small.layers[1].gate.weight, model.layers[1].gate.weight[:3], atol=1e-14)
    assert torch.allclose(small.layers[2].experts[1][0].weight, model.layers[2].experts[1][0].weight, atol=1e-14)


def test_experts__what_is_refused_is_named():
    with refused("argument: 'layers.1'", "2 experts"):
        keep(net(), [3])
    with refused("argument: 'layers.1'", "frequency"):
        keep(net(), 3)
    for wrong in ([0, 6], [-1, 0], [1, 1, 2], [], [True, False], "01", 0, 7, None):
        with refused("argument"):
            keep(net(), wrong, scores=norm(net()))
    with refused("name: 'layers.7'"):
        keep(net(), {"layers.7": [0, 1]})
    with refused("unsupported: Linear"):
        keep(nn.Linear(2, 2), [0])
    with refused("argument"):
        merge(net(), [[0, 1], [1, 2]])
    other = net()
    other.layers[1].experts[2] = nn.Linear(4, 4)
    with refused("unsupported: 'layers.1.experts'", "expert 2"):
        keep(other, [0, 1])
    alone = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(3, 3) for _ in range(4))})
    with refused("unsupported: 'experts'"):
        mixtures(alone)


class Grouped(Listed):
    """A router that chooses groups first, as DeepSeek's."""

    def __init__(self):
        super().__init__()
        self.n_group = 2


def test_experts__groups_of_a_router_stay_equal():
    model = nn.Sequential(Grouped())
    assert len(keep(model, [0, 2, 3, 5])[0][0].experts) == 4
    with refused("argument: '0'", "groups"):
        keep(model, [0, 1, 2, 3])
    small, _ = keep(model, 2, scores={"0": torch.tensor([1.0, 2, 3, 0, 0, 1])})
    assert torch.equal(small[0].gate.weight, model[0].gate.weight[[2, 5]])
    with refused("argument: '0'", "groups"):
        merge(model, [[0, 3], [1, 4]])


def layered(inner):
    """A mixture whose router is two layers, of this width."""
    layer = Listed(width=6)
    layer.gate = nn.Sequential(nn.Linear(6, inner), nn.Tanh(), nn.Linear(inner, 6))
    return nn.Sequential(layer)


@pytest.mark.parametrize("inner", [3, 6])
def test_keep__the_last_layer_of_a_router_has_the_experts(inner):
    small, _ = keep(layered(inner), [0, 2, 4])
    assert [small[0].gate[0].out_features, small[0].gate[2].out_features] == [inner, 3]
    assert small(torch.ones(2, 6)).shape == (2, 6)


def test_keep__no_values_are_needed_but_for_scores():
    model = net().to("meta").requires_grad_(False)
    small, _ = keep(model, [0, 3])
    assert all(p.is_meta and p.dtype == torch.float64 and not p.requires_grad for p in small.parameters())
    with refused("values"):
        norm(model)


def test_keep__experts_of_another_name_are_given_and_shared_ones_stay():
    layer = nn.ModuleDict({
        "router": nn.Linear(4, 3), "branches": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
        "shared_experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
    })  # fmt: skip
    small, _ = keep(layer, [1, 2], experts="branches")
    assert [len(small[name]) for name in ("branches", "shared_experts")] == [2, 2]
    with refused("name: 'twigs'"):
        keep(layer, [1], experts="twigs")


SIZES = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_experts_per_tok": 2,
}  # fmt: skip
DEEP = {
    "intermediate_size": 20, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
MODELS = {
    "Mixtral": {"intermediate_size": 20, "num_local_experts": 8},
    "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 12, "num_experts": 8, "norm_topk_prob": True},
    "Qwen2Moe": {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 10, "num_experts": 8},
    "GptOss": {"head_dim": 8, "intermediate_size": 12, "num_local_experts": 8, "sliding_window": 16},
    "DeepseekV2": {**DEEP, "topk_method": "greedy", "n_group": None, "topk_group": None},
    "DeepseekV3": {**DEEP, "n_group": 2, "topk_group": 1},
    "Olmoe": {"intermediate_size": 20, "num_experts": 8},
    "JetMoe": {"kv_channels": 8, "intermediate_size": 20, "num_local_experts": 8, "num_attention_heads": None},
    "Llama4": {"head_dim": 8, "intermediate_size": 20, "intermediate_size_mlp": 24, "num_local_experts": 8,
               "interleave_moe_layer_step": 1},
}  # fmt: skip


def language_model(name):
    transformers = pytest.importorskip("transformers")
    values = {
        key: value for key, value in (SIZES | MODELS[name]).items() if value is not None or key != "num_attention_heads"
    }
    config = getattr(transformers, f"{name}{'Text' * (name == 'Llama4')}Config")(**values)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def choose_among(router, kept):
    """Its code sees other experts' logits as -1e9."""
    run, linear = router.forward, nn.functional.linear

    def masked(*args, **kwargs):
        logits = linear(*args, **kwargs)
        logits[..., [number for number in range(8) if number not in kept]] = -1e9
        return logits

    def forward(x):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.functional, "linear", masked)
            return run(x)

    router.forward = forward


def chosen_alone(model, kept):
    """A copy whose routers choose among these experts alone, by their own code."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if "Router" in type(module).__name__ or "Gating" in type(module).__name__:
            choose_among(module, kept)
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_experts__models_of_transformers_follow(name, tmp_path, caplog):
    model, words = language_model(name), {"input_ids": torch.randint(3, 60, (2, 9))}
    before = model.config.to_dict()
    kept = [0, 3, 4, 6]
    small, plan = keep(model, kept)
    found = small(**words).logits
    if name != "DeepseekV3":  # sigmoid scores: -1e9 gives 0, which its correction may still choose
        assert torch.allclose(found, chosen_alone(model, kept)(**words).logits, atol=1e-5)
    assert model.config.to_dict() == before
    assert not [record for record in caplog.records if record.name.startswith("surgery")]
    made = type(small)(small.config).eval()
    made.load_state_dict(small.state_dict())
    assert torch.equal(made(**words).logits, found)
    small.save_pretrained(tmp_path)
    read, report = type(small).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    assert torch.allclose(read.eval()(**words).logits, found, atol=1e-5)  # rounding: its tensors lie elsewhere
    assert torch.equal(surgery.Plan.from_json(plan.to_json()).build(model)(**words).logits, found)
    shares = frequency(model, [words])
    assert all(share.sum().item() == pytest.approx(1) for share in shares.values())
    merged, _ = merge(model, 4, scores=shares)
    assert merged(**words).logits.shape == found.shape
    with refused("argument"):
        keep(model, [0])


@pytest.mark.slow
def test_keep__deepseek_s_groups_and_correction_follow():
    model, words = language_model("DeepseekV3"), {"input_ids": torch.randint(3, 60, (2, 9))}
    kept, gate = [1, 2, 5, 7], model.model.layers[1].mlp.gate
    gate.e_score_correction_bias[[0, 3, 4, 6]] = -100.0
    gate.e_score_correction_bias[kept] = torch.tensor([0.1, -0.2, 0.3, 0.0])
    small, _ = keep(model, kept)
    assert torch.allclose(small(**words).logits, model(**words).logits, atol=1e-5)
    with refused("argument", "groups"):
        keep(model, [0, 1, 2, 7])
    with refused("argument", "groups"):
        keep(model, [0, 4])
