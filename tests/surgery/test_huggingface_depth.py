"""Depth surgery on HuggingFace models, built from small configurations with random weights."""

import logging

import pytest
import torch
from refusals import refused

import surgery
from surgery import graft, ungraft

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = {**SIZES, "vocab_size": 64, "num_hidden_layers": 3}
DECODER = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
WHISPER = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in [("layers", 3), ("ffn_dim", 32)]},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64, "d_model": 16, "num_mel_bins": 8},
    **{"max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "decoder_start_token_id": 3,
}
WAV2VEC2 = {
    **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
IMAGE = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 3}
TOKENS, PIXELS = {"input_ids": IDS}, {"pixel_values": IMAGES}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
# family: (model, configuration's arguments, example, whether blocks can start as the identity)
MODELS = {
    "llama": ("LlamaForCausalLM", DECODER, TOKENS, True),
    "llama_tied": ("LlamaForCausalLM", {**DECODER, "tie_word_embeddings": True}, TOKENS, True),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_embd": 16, "n_layer": 3, "n_head": 2}, TOKENS, True),
    "gpt_neox": ("GPTNeoXForCausalLM", {**TEXT, "max_position_embeddings": 64}, TOKENS, True),
    "mistral": ("MistralForCausalLM", DECODER, TOKENS, True),
    "mixtral": ("MixtralForCausalLM", {**DECODER, "num_local_experts": 4}, TOKENS, True),
    "qwen2": ("Qwen2ForCausalLM", DECODER, TOKENS, True),
    "mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3}, TOKENS, True),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 16, "d_kv": 8, "num_layers": 3, "decoder_start_token_id": 0},
        PAIR,
        True,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        WHISPER,
        {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": IDS[:, :5]},
        True,
    ),
    "vit": ("ViTForImageClassification", {**SIZES, **IMAGE}, PIXELS, True),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 3], "num_heads": [2, 2], "window_size": 4},
        PIXELS,
        True,
    ),
    "clip": (
        "CLIPModel",
        {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": {**SIZES, **IMAGE}, "projection_dim": 8},
        {**TOKENS, **PIXELS},
        True,
    ),
    # Its configuration counts the blocks as those of an encoder that it has not.
    "bart": (
        "BartForCausalLM",
        {
            "d_model": 16,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "decoder_ffn_dim": 32,
            "decoder_attention_heads": 2,
            "encoder_attention_heads": 2,
            "vocab_size": 64,
            "max_position_embeddings": 64,
        },
        TOKENS,
        False,
    ),
    # The number of a block is that of its attention or of its linear attention.
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **DECODER,
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
        TOKENS,
        True,
    ),
    # Two sections in one list, which the configuration counts as one.
    "mimo": (
        "MiMoV2FlashForCausalLM",
        {
            **DECODER,
            "num_attention_heads": 4,
            "head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        },
        TOKENS,
        True,
    ),
    # A configuration counts the blocks of the text, and one inside of it as many of the image.
    "git": (
        "GitForCausalLM",
        {**TEXT, "vision_config": {**SIZES, **IMAGE}, "max_position_embeddings": 64},
        {**TOKENS, **PIXELS},
        False,
    ),
    # The decoder has a copy of the configuration, and the number of its blocks is in the whole one.
    "mae": (
        "ViTMAEForPreTraining",
        {
            **{**SIZES, **IMAGE, "decoder_num_hidden_layers": 3, "decoder_hidden_size": 16},
            **{"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32},
        },
        {**PIXELS, "noise": torch.rand(2, 16, generator=torch.Generator().manual_seed(0))},
        True,
    ),
    "bert": ("BertForMaskedLM", TEXT, TOKENS, False),
    # The windows are a list with an entry for each block.
    "longformer": (
        "LongformerForMaskedLM",
        {**TEXT, "attention_window": [4, 8, 4], "max_position_embeddings": 40},
        TOKENS,
        False,
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", {**TEXT, **WAV2VEC2}, {"input_values": torch.randn(2, 400)}, False),
    "deberta": (
        "DebertaV2ForMaskedLM",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        TOKENS,
        False,
    ),
}


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity(logging.ERROR)


def make(family):
    torch.manual_seed(0)
    kind, arguments, example, identical = MODELS[family]
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**arguments)).eval(), transformers.BatchEncoding(example), identical


def outputs(model, example):
    with torch.no_grad():
        found = model(**example)
    return found.logits if hasattr(found, "logits") else found.logits_per_image


def generated(model, example, use_cache):
    given = {key: value for key, value in example.items() if not key.startswith("decoder")}
    return model.generate(**given, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=use_cache)


def generates(model, example):
    if hasattr(model, "generate") and model.can_generate():
        assert torch.equal(generated(model, example, True), generated(model, example, False))


def same(a, b):
    assert str(a) == str(b)
    assert a.config.to_dict() == b.config.to_dict()
    for (name, x), (other, y) in zip(a.named_modules(), b.named_modules(), strict=True):
        assert (name, getattr(x, "layer_idx", None)) == (other, getattr(y, "layer_idx", None))
    for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y), name


@pytest.mark.parametrize("family", MODELS)
def test_huggingface_depth__a_deeper_model_is_as_its_constructor_would_build_it(family):
    model, example, _ = make(family)
    found = surgery.sections(model)
    full, plan = graft(model, depths=[len(section.blocks) + 1 for section in found], example=example)
    native = type(model)(full.config).eval()
    native.load_state_dict(full.state_dict())
    if family != "swin":  # its constructor alternates two kinds of blocks, while a copy is of the last one's kind
        assert str(native) == str(full)
        assert torch.equal(outputs(native, example), outputs(full, example))
    generates(full, example)
    same(plan.build(full), model)
    same(ungraft(full, keep=[len(section.blocks) for section in found], example=example)[0], model)
    small, _ = ungraft(model, keep=[(0, len(section.blocks) - 1) for section in found], example=example)
    assert [len(section.blocks) for section in surgery.sections(small)] == [2] * len(found)
    generates(small, example)


@pytest.mark.parametrize("family", [family for family in MODELS if family != "git"])  # one section can, one cannot
def test_huggingface_depth__new_blocks_start_as_the_identity_or_are_refused(family):
    model, example, identical = make(family)
    for section in surgery.sections(model):
        depths = {section.name: len(section.blocks) + 1}
        if not identical:
            with refused("depth"):
                graft(model, depths=depths, mode="identity", example=example)
            continue
        full, _ = graft(model, depths=depths, mode="identity", example=example)
        torch.testing.assert_close(outputs(full, example), outputs(model, example))


def test_ungraft__blocks_keep_their_numbers_where_the_cache_has_other_slots_for_fewer():
    config = transformers.BambaConfig(
        **{**DECODER, "num_hidden_layers": 4}, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=8,
        mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=4,
    )  # fmt: skip
    small, _ = ungraft(transformers.BambaForCausalLM(config).eval(), keep=[(0, 2, 3)], example=TOKENS)
    assert [layer.mamba.layer_idx for layer in small.model.layers] == [0, 2, 3]
    generates(small, TOKENS)


@pytest.mark.parametrize("family", ["llama", "gpt2", "whisper", "mamba", "t5"])
def test_huggingface_depth__without_an_example_the_cache_of_declared_blocks_is_right_too(family, monkeypatch):
    model, example, _ = make(family)
    found = surgery.sections(model)
    with refused("ambiguous"):
        graft(model, depths=[len(section.blocks) + 1 for section in found])
    for section in found:
        monkeypatch.setitem(surgery.depth.sections.BLOCKS, type(model.get_submodule(section.blocks[0])), None)
    full, plan = graft(model, depths=[len(section.blocks) + 1 for section in found])
    generates(full, example)
    same(plan.build(full), model)
