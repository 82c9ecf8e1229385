"""What the reader of mergekit's YAML makes of a file: levels, filters, gradients, and what it refuses."""

import json
import sys

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from surgery import SurgeryError
from surgery.__main__ import main
from surgery.files import open_state, write
from surgery.mergekit.config import Source, read_config, value_of
from surgery.mergekit.methods import METHODS


@pytest.fixture
def read(tmp_path):
    def read(said):
        (tmp_path / "c.yml").write_text(said if isinstance(said, str) else yaml.safe_dump(said))
        return read_config(tmp_path / "c.yml")

    return read


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=5), st.floats(0, 1))
def test_a_list_is_interpolated_over_the_layers(numbers, t):
    expected = np.interp(t, np.linspace(0, 1, len(numbers)), numbers) if len(numbers) > 1 else numbers[0]
    assert value_of(numbers, "w", t) == pytest.approx(expected, abs=1e-9)


def test_a_filter_is_a_part_of_the_name_and_the_first_counts():
    setting = [{"filter": "attn", "value": [0, 1]}, {"filter": "*", "value": 3}, {"value": 4}]
    assert value_of(setting, "layers.0.self_attn.q", 0.25) == 0.25
    assert value_of(setting, "layers.0.mlp.w", 0.25) == 3
    assert value_of(setting[:1], "layers.0.mlp.w", 0.25) is None
    assert value_of([True, False], "w", 0.9) is True


CONFIG = """
merge_method: ties
base_model: base
parameters: {weight: 0.1, density: 0.2, normalize: false, lambda: [0, 1]}
slices:
- parameters: {density: [{filter: mlp, value: 0.3}], normalize: true, weight: 0.9}
  sources:
  - {model: base, layer_range: [0, 2]}
  - model: a
    layer_range: [1, 3]
    parameters: {weight: [{filter: attn, value: 0.4}], density: [{filter: attn, value: 0.5}]}
dtype: bfloat16
"""


def test_the_nearest_level_that_says_something_counts(read):
    config = read(CONFIG)
    (one,) = config.slices
    a = one.sources[1]
    assert config.own("mlp.w", one, a, 0) == {"weight": 0.9, "density": 0.3}
    assert config.own("attn.w", one, a, 0) == {"weight": 0.4, "density": 0.5}
    assert config.own("norm", one, Source("b"), 0) == {"weight": 0.9, "density": 0.2}
    assert config.shared("norm", one, 0.25) == {"normalize": True, "lambda": 0.25}
    assert (config.dtype, config.out_dtype, config.models) == (torch.bfloat16, None, ["base", "a"])
    assert a.layers == (1, 3)


LINEAR = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]}
TWO = [{"model": "a"}, {"model": "b"}]
REFUSED = {
    "no such method": ({"merge_method": "arcee_fusion", "models": TWO}, "'arcee_fusion' is not supported"),
    "key at the top": (LINEAR | {"modules": {}}, "the key 'modules' of a merge is not supported"),
    "key of a model": ({**LINEAR, "models": [{"model": "a", "lora": 1}]}, "the key 'lora'"),
    "parameter": (LINEAR | {"parameters": {"density": 0.5}}, "the key 'density' of the parameters of linear"),
    "unsupported value": (
        {"merge_method": "ties", "base_model": "o", "models": TWO, "parameters": {"rescale": True}}, "rescale: true"
    ),
    "row by row": (
        {"merge_method": "nuslerp", "models": TWO, "parameters": {"nuslerp_flatten": False}}, "nuslerp_flatten: false"
    ),
    "a text": (LINEAR | {"parameters": {"weight": "much"}}, "weight: 'much' is no finite number"),
    "not a number": (LINEAR | {"parameters": {"weight": [1, float("nan")]}}, "weight: nan is no finite number"),
    "above all floats": (LINEAR | {"parameters": {"weight": 10**400}}, "is no finite number"),
    "a mask's type": (LINEAR | {"parameters": {"int8_mask": "maybe"}}, "int8_mask: 'maybe' is neither true nor false"),
    "an empty list": (LINEAR | {"parameters": {"weight": []}}, "weight: the list is empty"),
    "mixed lists": (LINEAR | {"parameters": {"weight": [1, {"value": 2}]}}, "weight: {value: 2} is no finite number"),
    "both": (LINEAR | {"slices": []}, "either `models` or `slices`"),
    "neither": (LINEAR | {"models": None, "slices": None}, "either `models` or `slices`"),
    "no models": (LINEAR | {"models": []}, "models: [] is no list with entries"),
    "the base alone": ({"merge_method": "ties", "base_model": "a", "models": [{"model": "./a"}]}, "nothing to merge"),
    "no base": ({"merge_method": "ties", "models": TWO}, "ties needs a base_model"),
    "too many": ({"merge_method": "slerp", "base_model": "a", "models": [*TWO, {"model": "c"}]}, "takes 2 models"),
    "twice": ({"merge_method": "linear", "models": [{"model": "a"}] * 2}, "a is there twice"),
    "twice, in two spellings": ({**LINEAR, "models": [{"model": "a"}, {"model": "./a/"}]}, "a is there twice"),
    "no layers": (
        {"merge_method": "passthrough", "slices": [{"sources": [{"model": "a", "layer_range": [2, 2]}]}]}, "layer_range"
    ),
    "unequal layers": (
        {
            "merge_method": "linear",
            "slices": [{"sources": [{"model": "a", "layer_range": [0, 2]}, {"model": "b", "layer_range": [0, 1]}]}],
        },
        "equally many",
    ),
    "residual": (
        {"merge_method": "linear", "slices": [{"sources": TWO, "residual_weight": 1}]}, "'residual_weight' of a slice"
    ),
    "two adapters": (LINEAR | {"base_model": "a+b+c"}, "'a+b+c' is no model with one adapter"),
    "no adapter": (LINEAR | {"base_model": "a+"}, "'a+' is no model with one adapter"),
    "a revision": (
        LINEAR | {"base_model": {"model": {"path": "a", "revision": "x"}}}, "the key 'revision' of base_model"
    ),
    "dtype": (LINEAR | {"dtype": "int8"}, "dtype: 'int8'"),
    "token": (LINEAR | {"tokenizer": {"tokens": {}}}, "the key 'tokens' of tokenizer"),
    "no tokenizer": (LINEAR | {"tokenizer": {"source": None, "pad_to_multiple_of": 16}}, "source: null"),
    "two tokenizers": (LINEAR | {"tokenizer": {}, "tokenizer_source": "union"}, "one of the two"),
    "the base's tokenizer": (LINEAR | {"tokenizer_source": "base"}, "needs a base_model"),
    "a template's name": (LINEAR | {"chat_template": "chatml"}, "chat_template: 'chatml' is no template"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_supported_is_refused_by_its_key(read, why):
    said, message = REFUSED[why]
    with pytest.raises(SurgeryError) as error:
        read(said)
    assert message in str(error.value)
    assert "c.yml" in str(error.value)


def test_null_is_as_if_the_key_were_not_there(read):
    nothing = dict.fromkeys(["slices", "base_model", "parameters", "dtype", "out_dtype", "tokenizer", "chat_template"])
    plain, config = read(LINEAR), read(LINEAR | nothing)
    assert (config.slices, config.parameters, config.tokenizer) == (plain.slices, plain.parameters, None)


def test_a_needed_parameter_that_is_nowhere(read):
    config = read({"merge_method": "linear", "models": TWO})
    with pytest.raises(SurgeryError, match="linear needs the parameter 'weight' for w of a"):
        config.own("w", config.slices[0], config.slices[0].sources[0], 0)


def test_every_method_can_be_read(read):
    for name, method in METHODS.items():
        if name != "passthrough":
            base = "a" if method.base == "model" else "o"
            found = read({"merge_method": name, "base_model": base, "models": TWO[: method.count or 2]})
            assert found.method == name


def test_a_file_of_any_model_is_merged_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate("ab"):
        torch.save({"w": torch.full((2,), float(k))}, f"{name}.pt")
    models = [{"model": f"{name}.pt", "parameters": {"weight": w}} for name, w in (("a", 1), ("b", 3))]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"merge_method": "linear", "models": models}))
    assert main(["merge", "c.yaml", "c.safetensors", "--dry-run"]) == 0
    assert not (tmp_path / "c.safetensors").exists()
    assert main(["merge", "c.yaml", "--out", "c.safetensors"]) == 0
    assert open_state("c.safetensors")["w"].tolist() == [0.75, 0.75]


def test_folders_are_merged_without_their_library_if_tensors_keep_their_shapes(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)  # whose import takes longer than such a merge
    for k, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        tensors = {f"h.{i}.{w}": torch.full((2,), float(k)) for i in (0, 1) for w in "xy"}
        write(tmp_path / name / "model.safetensors", tensors)
        (tmp_path / name / "config.json").write_text('{"n_layer": 2, "dtype": "float32"}')
    models = [{"model": name, "parameters": {"weight": 1}} for name in "ab"]
    said = {"merge_method": "linear", "models": models, "out_dtype": "bfloat16"}
    (tmp_path / "c.yml").write_text(yaml.safe_dump(said))
    assert main(["merge", "c.yml", "c"]) == 0
    assert not caplog.records
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {"n_layer": 2, "dtype": "bfloat16"}
    assert open_state("c")["h.1.x"].tolist() == [0.5, 0.5]
