"""Folders of small models merged by mergekit's YAML, compared with numpy's versions of mergekit's formulas."""

import json

import numpy as np
import pytest
import torch
import yaml
from command_files import refused

from surgery.__main__ import main
from surgery.files import open_state, write

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # transformers takes seconds to import
LAYERS = 4


def llama(path, seed, *, base=None, **other):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**{"vocab_size": 32, "num_hidden_layers": LAYERS, **sizes, **other})
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    if base is not None:
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), base.parameters()):
                mine.copy_(theirs + 0.02 * torch.randn(mine.shape))
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = llama(folder / "o", 0)
    for seed, name in enumerate("ab", 1):
        llama(folder / name, seed, base=base)
    (folder / "a" / "README.md").write_text("of a")
    return folder


@pytest.fixture
def merged(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(made)

    def merged(**said):
        (tmp_path / "c.yml").write_text(yaml.safe_dump(said))
        assert main(["merge", str(tmp_path / "c.yml"), str(tmp_path / "out")]) == 0, capsys.readouterr().err
        return tmp_path / "out"

    return merged


def arrays(path):
    return {name: tensor.float().numpy().astype(np.float64) for name, tensor in open_state(path).items()}


def along(name):
    """How far along the layers a tensor lies: 0 for what is outside of them."""
    return int(name.split(".")[2]) / (LAYERS - 1) if ".layers." in name else 0.0


def check(out, expected, tolerance=1e-6):
    found = arrays(out)
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=tolerance * np.abs(values).max(), err_msg=name)
    transformers.AutoModelForCausalLM.from_pretrained(out)


def numbers(name, attention, other):
    return np.interp(along(name), np.linspace(0, 1, 3), attention) if "self_attn" in name else other


def test_linear_with_filters_and_gradients(merged, made):
    weight = [{"filter": "self_attn", "value": [0.2, 0.9, 0.4]}, {"value": 0.5}]
    models = [{"model": "a", "parameters": {"weight": 0.7}}, {"model": "b", "parameters": {"weight": weight}}]
    a, b = arrays("a"), arrays("b")
    expected = {}
    for name in a:
        w = numbers(name, [0.2, 0.9, 0.4], 0.5)
        expected[name] = (0.7 * a[name] + w * b[name]) / (0.7 + w)
    out = merged(merge_method="linear", models=models)
    check(out, expected)
    text = (out / "README.md").read_text()
    assert '- "a"\n- "b"' in text
    assert "filter: self_attn" in text
    assert "of a" not in text


def slow_slerp(t, x, y):
    cosine = (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)
    if abs(cosine) > 0.9995:
        return (1 - t) * x + t * y
    angle = np.arccos(cosine)
    return (np.sin((1 - t) * angle) * x + np.sin(t * angle) * y) / np.sin(angle)


def test_slerp_begins_with_the_base_and_is_straight_along_short_arcs(merged):
    t = [{"filter": "self_attn", "value": [0.3, 0.8, 0.1]}, {"value": 0.4}]
    a, b = arrays("a"), arrays("b")
    expected = {name: slow_slerp(numbers(name, [0.3, 0.8, 0.1], 0.4), b[name], a[name]) for name in a}
    check(
        merged(merge_method="slerp", base_model="b", models=[{"model": "a"}, {"model": "b"}], parameters={"t": t}),
        expected,
    )


def slow_arithmetic(base, models, sparse, *, elect=False, normalize=False, scale=1.0):
    """mergekit's generalized task arithmetic; `models` are pairs (weight, tensor)."""
    vectors = np.stack([w * sparse(k, x - base) for k, (w, x) in enumerate(models)])
    weights = np.array([w for w, _ in models]).reshape(-1, *[1] * base.ndim)
    mask = np.ones_like(vectors)
    if elect:
        mask = np.sign(vectors) == np.where(vectors.sum(0) >= 0, 1, -1)
    share = (weights * mask).sum(0)
    total = (vectors * mask).sum(0)
    return base + scale * (total / np.where(share == 0, 1, share) if normalize else total)


def kept(vector, density, gamma=0.0):
    order, n = np.argsort(np.abs(vector), axis=None), vector.size
    top = int(gamma * n)
    result = np.zeros(n)
    chosen = order[max(0, n - int(density * n) - top) : n - top]
    result[chosen] = vector.reshape(-1)[chosen]
    return result.reshape(vector.shape)


METHODS = {
    "task_arithmetic": ({}, [{}, {}], lambda k, v: v, {"normalize": False, "scale": 0.8}),
    "ties": (
        {}, [{"density": 0.4}, {"density": 0.7}], lambda k, v: kept(v, [0.4, 0.7][k]),
        {"elect": True, "normalize": True, "scale": 0.8},
    ),
    "breadcrumbs": (
        {"density": 0.6}, [{"gamma": 0.1}, {"gamma": 0.2}], lambda k, v: kept(v, 0.6, [0.1, 0.2][k]), {"scale": 0.8}
    ),
    "breadcrumbs_ties": (
        {"density": 0.6, "normalize": True}, [{"gamma": 0.1}, {"gamma": 0.2}], lambda k, v: kept(v, 0.6, [0.1, 0.2][k]),
        {"elect": True, "normalize": True, "scale": 0.8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_task_vectors_with_settings_of_each_model(merged, name):
    shared, own, sparse, how = METHODS[name]
    models = [
        {"model": "a", "parameters": {"weight": 0.7, **own[0]}},
        {"model": "b", "parameters": {"weight": [0.2, 0.9], **own[1]}},
    ]
    o, a, b = arrays("o"), arrays("a"), arrays("b")
    expected = {
        key: slow_arithmetic(o[key], [(0.7, a[key]), (0.2 + 0.7 * along(key), b[key])], sparse, **how) for key in o
    }
    check(merged(merge_method=name, base_model="o", models=models, parameters={"lambda": 0.8, **shared}), expected)


def test_a_filter_that_matches_nothing_is_told(merged, caplog):
    weight = [{"filter": "mpl", "value": 0.5}, {"filter": "mlp", "value": 0.2}, {"value": 1.0}]
    models = [{"model": "a", "parameters": {"weight": weight}}, {"model": "b", "parameters": {"weight": 1}}]
    merged(merge_method="linear", models=models)
    assert "weight: the filter 'mpl' is a part of no tensor's name" in caplog.text
    assert "'mlp'" not in caplog.text


def test_a_weight_of_zero_for_all_leaves_the_base(merged):
    models = [{"model": "o"}, {"model": "a", "parameters": {"weight": [0, 1]}}]
    o, a = arrays("o"), arrays("a")
    expected = {name: o[name] + along(name) * (a[name] - o[name]) for name in o}
    check(merged(merge_method="dare_ties", base_model="o", models=models, parameters={"int8_mask": True}), expected)


def test_layers_of_two_models_one_after_another(merged):
    scale = [{"filter": "o_proj", "value": 0.0}, {"value": 2.0}]
    slices = [
        {"sources": [{"model": "a", "layer_range": [0, 3]}]},
        {"sources": [{"model": "b", "layer_range": [1, 4], "parameters": {"scale": scale}}]},
    ]
    out = merged(merge_method="passthrough", slices=slices, dtype="bfloat16")
    a, b = arrays("a"), arrays("b")
    expected = {"model.embed_tokens.weight": a["model.embed_tokens.weight"]}
    expected |= {name: 2 * b[name] for name in ("model.norm.weight", "lm_head.weight")}
    for k, (model, i) in enumerate([(a, 0), (a, 1), (a, 2), (b, 1), (b, 2), (b, 3)]):
        for name in a:
            if name.startswith(f"model.layers.{i}."):
                scaled = model[name] if model is a else model[name] * (0 if "o_proj" in name else 2)
                expected[name.replace(f".{i}.", f".{k}.", 1)] = scaled
    check(out, expected, 0.005)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["dtype"]) == (6, "bfloat16")
    assert open_state(out)["lm_head.weight"].dtype == torch.bfloat16


def test_merged_slices_have_gradients_of_their_own(merged):
    def source(model, first, **parameters):
        return {"model": model, "layer_range": [first, first + 2], "parameters": parameters}

    slices = [
        {"sources": [source("a", 0, weight=[1, 0]), source("b", 2, weight=1)]},
        {"sources": [source("b", 1, weight=3), source("a", 2, weight=[1, 5])]},
    ]
    out = merged(merge_method="linear", slices=slices, out_dtype="bfloat16", dtype="float32")
    a, b = arrays("a"), arrays("b")
    expected = {"model.embed_tokens.weight": (a["model.embed_tokens.weight"] + b["model.embed_tokens.weight"]) / 2}
    for name in ("model.norm.weight", "lm_head.weight"):
        expected[name] = (a[name] + 3 * b[name]) / 4
    for k, ((i, v), (j, w)) in enumerate([((0, 1), (2, 1)), ((1, 0), (3, 1)), ((2, 1), (1, 3)), ((3, 5), (2, 3))]):
        for name in a:
            if name.startswith("model.layers.0."):
                x, y = a[name.replace(".0.", f".{i}.", 1)], b[name.replace(".0.", f".{j}.", 1)]
                expected[name.replace(".0.", f".{k}.", 1)] = (v * x + w * y) / (v + w)
    check(out, expected, 0.005)


def test_gpt2_whose_layers_have_another_name(merged, made):
    config = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0)
    for seed, name in enumerate("xy"):
        torch.manual_seed(seed)
        transformers.GPT2LMHeadModel(config).save_pretrained(made / name)
    slices = [
        {"sources": [{"model": "x", "layer_range": [0, 3]}]},
        {"sources": [{"model": "y", "layer_range": [2, 3]}]},
    ]
    out = merged(merge_method="passthrough", slices=slices)
    x, y, found = arrays("x"), arrays("y"), arrays(out)
    assert json.loads((out / "config.json").read_text())["n_layer"] == 4
    for name, other in (("h.3.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"), ("ln_f.bias", "ln_f.bias")):
        np.testing.assert_array_equal(found[f"transformer.{name}"], y[f"transformer.{other}"])
    np.testing.assert_array_equal(found["transformer.wpe.weight"], x["transformer.wpe.weight"])
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_a_scale_leaves_whole_numbers(merged, made):
    values = {"w": torch.tensor([1.0, 3.0]).bfloat16(), "position_ids": torch.arange(4), "mask": torch.tensor([True])}
    write(made / "whole.safetensors", values)
    out = open_state(
        merged(merge_method="passthrough", models=[{"model": "whole.safetensors"}], parameters={"scale": 0.5})
    )
    assert out["w"].tolist() == [0.5, 1.5]
    assert torch.equal(out["position_ids"], values["position_ids"])
    assert torch.equal(out["mask"], values["mask"])


def test_lists_with_an_entry_for_each_layer_follow(merged, made):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Qwen2Config(
        vocab_size=32, num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, **sizes
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(made / "q")
    slices = [{"sources": [{"model": "q", "layer_range": span}]} for span in ([1, 3], [1, 2])]
    out = merged(merge_method="passthrough", slices=slices)
    found = json.loads((out / "config.json").read_text())
    assert found["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    transformers.AutoModelForCausalLM.from_pretrained(out)


def test_what_does_not_fit_is_refused(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(made)
    llama(made / "wide", 0, vocab_size=40)
    llama(made / "tied", 0, tie_word_embeddings=True)
    llama(made / "unequal", 0, hidden_size=32)
    capsys.readouterr()

    def models(*names):
        return {"models": [{"model": name} for name in names]}

    def slices(first, end):
        return {"slices": [{"sources": [{"model": "a", "layer_range": [first, end]}]}]}

    told = {
        "there is no file or folder 'nowhere'": models("a", "nowhere"),
        "where vocabularies differ give tokenizer_source": models("a", "wide"),
        "python -m surgery fit LARGE --small SMALL": models("a", "unequal"),
        "tied has no tensor 'lm_head.weight'": models("a", "tied"),
        "a has 4 layers, not 5": slices(2, 5),
        "list the base_model o": {"merge_method": "ties", "base_model": "o", **slices(0, 2)},
        "holds no tokenizer": {"tokenizer_source": "union", **models("a", "wide")},
    }
    for message, said in told.items():
        said = {"merge_method": "linear", "parameters": {"weight": 1}, **said}
        (tmp_path / "c.yml").write_text(yaml.safe_dump(said))
        assert message in refused(capsys, "merge", tmp_path / "c.yml", tmp_path / "out"), message
    assert "leave --weights out" in refused(capsys, "merge", tmp_path / "c.yml", tmp_path / "out", "--weights", "1")
    assert "and the new folder" in refused(capsys, "merge", tmp_path / "c.yml")
    assert "give --out" in refused(capsys, "merge", "linear", "a", "b")
    assert not (tmp_path / "out").exists()
