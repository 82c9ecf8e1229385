"""Models of transformers, from configs of small sizes with random weights; nothing is downloaded.

Widths that a config has in common with another one (heads times head dimension and hidden size) are equal only where
the architecture wants it. Half a model is the same config with every width halved, the numbers of heads kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.case import Case

BATCH, LENGTH, VOCABULARY, CLASSES = 3, 10, 100, 5
Sizes = Callable[[int], dict[str, Any]]  # of a scale: 2 is the full model, 1 half of it


def build(name: str, sizes: Sizes, options: dict[str, Any], scale: int) -> nn.Module:
    """Return the model of this class, whose config has these sizes."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**{**sizes(scale), **options}))


def case(name: str, sizes: Sizes, example: Callable[[], dict[str, Any]], blocks: bool = True, **options: Any) -> Case:
    """Return a class of transformers with a config of these sizes and options."""
    make = partial(build, name, sizes, options)
    return Case(lambda: make(2), lambda model: example(), lambda: make(1), blocks=blocks)


def bare(name: str, sizes: Sizes, example: Callable[[], dict[str, Any]], **options: Any) -> Case:
    """A class whose output has hidden features: these stay whole, and no config makes such a model half as wide."""
    return replace(case(name, sizes, example, **options), half=None)


def bert(s: int) -> dict[str, Any]:
    """BERT and those whose config has its names."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 44 * s, "max_position_embeddings": 20, "num_labels": CLASSES,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def distilbert(s: int) -> dict[str, Any]:
    """DistilBERT."""
    return {
        "vocab_size": VOCABULARY, "dim": 32 * s, "n_layers": 2, "n_heads": 4, "hidden_dim": 44 * s,
        "max_position_embeddings": 20, "num_labels": CLASSES,
    }  # fmt: skip


def deberta(s: int) -> dict[str, Any]:
    """DeBERTa v2 with all that makes it one: relative attention by content and position, shared keys."""
    return {
        **bert(s), "relative_attention": True, "position_buckets": 6, "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True, "norm_rel_ebd": "layer_norm", "pooler_hidden_size": 32 * s,
    }  # fmt: skip


def albert(s: int) -> dict[str, Any]:
    """ALBERT: one block used several times, a factorised embedding."""
    return {**bert(s), "embedding_size": 12 * s}


def gpt2(s: int) -> dict[str, Any]:
    """GPT-2, whose linear layers are transposed (Conv1D)."""
    return {
        "vocab_size": VOCABULARY, "n_embd": 32 * s, "n_layer": 2, "n_head": 4, "n_inner": 44 * s, "n_positions": 20,
        "num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def llama(s: int, kv: int = 4) -> dict[str, Any]:
    """Llama and its like: rotary positions, a gated feed-forward part, RMS norms."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": kv, "head_dim": 8 * s, "intermediate_size": 44 * s, "max_position_embeddings": 20,
        "num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def phi(s: int) -> dict[str, Any]:
    """Phi, which takes a head's share from the hidden size and rotates a part of it."""
    return {name: value for name, value in llama(s).items() if name != "head_dim"}


def mixtral(s: int) -> dict[str, Any]:
    """Mixtral: four experts, of which each token takes two."""
    return {**llama(s, kv=2), "num_local_experts": 4, "num_experts_per_tok": 2}


def qwen_moe(s: int) -> dict[str, Any]:
    """Qwen2-MoE: routed experts and a shared one."""
    return {
        **llama(s, kv=2), "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20 * s,
        "shared_expert_intermediate_size": 26 * s, "decoder_sparse_step": 1,
    }  # fmt: skip


def neox(s: int) -> dict[str, Any]:
    """GPT-NeoX: rotary positions for a share of each head, one matrix for q, k and v."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 44 * s, "max_position_embeddings": 20, "num_labels": CLASSES, "pad_token_id": 0,
    }  # fmt: skip


def opt(s: int) -> dict[str, Any]:
    """OPT: learned positions, embeddings that are projected."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 44 * s, "max_position_embeddings": 20, "word_embed_proj_dim": 12 * s, "pad_token_id": 0,
        "dropout": 0.0,
    }  # fmt: skip


def t5(s: int) -> dict[str, Any]:
    """T5: encoder and decoder, relative positions, heads wider than the model, whose width is that of an output."""
    return {
        "vocab_size": VOCABULARY, "d_model": 56, "d_kv": 8 * s, "num_heads": 4, "d_ff": 44 * s, "num_layers": 2,
        "num_decoder_layers": 2, "relative_attention_num_buckets": 6, "relative_attention_max_distance": 9,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }  # fmt: skip


def bart(s: int) -> dict[str, Any]:
    """BART: encoder and decoder with learned positions."""
    return {
        "vocab_size": VOCABULARY, "d_model": 32 * s, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 44 * s,
        "decoder_ffn_dim": 52 * s, "max_position_embeddings": 20, "dropout": 0.0, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }  # fmt: skip


def vit(s: int) -> dict[str, Any]:
    """ViT, DeiT and BEiT."""
    return {
        "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44 * s,
        "image_size": 24, "patch_size": 8, "num_labels": CLASSES, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip


def swin(s: int) -> dict[str, Any]:
    """Swin: two stages of windows that shift."""
    return {
        "image_size": 32, "patch_size": 2, "embed_dim": 12 * s, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4, "mlp_ratio": 2.0, "num_labels": CLASSES, "drop_path_rate": 0.0,
    }  # fmt: skip


def convnext(s: int) -> dict[str, Any]:
    """ConvNeXt."""
    return {"hidden_sizes": [8 * s, 12 * s, 20 * s], "depths": [1, 2, 2], "num_stages": 3, "num_labels": CLASSES}


def resnet(s: int) -> dict[str, Any]:
    """ResNet with bottlenecks."""
    return {"embedding_size": 6 * s, "hidden_sizes": [16 * s, 24 * s], "depths": [2, 2], "num_labels": CLASSES}


def segformer(s: int) -> dict[str, Any]:
    """SegFormer: attention over a map that was made smaller."""
    return {
        "num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [4, 2], "hidden_sizes": [8 * s, 20 * s],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 12 * s, "num_labels": CLASSES,
    }  # fmt: skip


def whisper(s: int) -> dict[str, Any]:
    """Whisper: spectra in, tokens out."""
    return {
        "vocab_size": VOCABULARY, "num_mel_bins": 14, "d_model": 32 * s, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 44 * s,
        "decoder_ffn_dim": 52 * s, "max_source_positions": 15, "max_target_positions": 20, "pad_token_id": 1,
        "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "suppress_tokens": None,
        "begin_suppress_tokens": None, "classifier_proj_size": 26 * s, "num_labels": CLASSES,
    }  # fmt: skip


def clip(s: int) -> dict[str, Any]:
    """CLIP: a tower for text, one for images, a common space."""
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 44 * s, "max_position_embeddings": 20, "projection_dim": 18 * s, "eos_token_id": 2,
        "bos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    image = {
        "hidden_size": 24 * s, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40 * s,
        "image_size": 24, "patch_size": 8, "projection_dim": 18 * s,
    }  # fmt: skip
    return {"text_config": text, "vision_config": image, "projection_dim": 18 * s}


def wav2vec2(s: int) -> dict[str, Any]:
    """wav2vec 2.0: convolutions over samples, a weight-normed grouped convolution for positions."""
    return {
        "vocab_size": 32, "hidden_size": 32 * s, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 44 * s, "conv_dim": [12 * s, 12 * s, 14 * s], "conv_stride": [5, 2, 2],
        "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
        "num_feat_extract_layers": 3, "classifier_proj_size": 26 * s, "num_labels": CLASSES, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False,
    }  # fmt: skip


def mamba(s: int) -> dict[str, Any]:
    """Mamba with the scan in plain torch."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": 32 * s, "num_hidden_layers": 2, "state_size": 3 * s, "conv_kernel": 4,
        "expand": 2, "time_step_rank": 5 * s, "pad_token_id": 0, "use_mambapy": False,
    }  # fmt: skip


def tokens(low: int = 3) -> Tensor:
    """Token numbers [BATCH, LENGTH] without special ones."""
    return torch.randint(low, VOCABULARY, (BATCH, LENGTH))


def text(*, labels: str = "", mask: bool = True) -> dict[str, Any]:
    """Return what a tokenizer gives, and labels: for each token, or for each text."""
    given: dict[str, Any] = {"input_ids": tokens()}
    if mask:
        given["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        given["attention_mask"][1, 7:] = 0
    if labels == "tokens":
        given["labels"] = tokens()
    elif labels == "text":
        given["labels"] = torch.tensor([0, 4, 2])
    return given


def images(side: int = 24, labels: bool = False) -> dict[str, Any]:
    """Pixels, and a class for each image."""
    given = {"pixel_values": torch.randn(BATCH, 3, side, side)}
    return {**given, "labels": torch.tensor([0, 4, 2])} if labels else given


def translation() -> dict[str, Any]:
    """Tokens for an encoder and for a decoder."""
    return {**text(), "decoder_input_ids": tokens()[:, :7]}


def spectra() -> dict[str, Any]:
    """Return a spectrum for Whisper's encoder, tokens for its decoder."""
    return {"input_features": torch.randn(BATCH, 14, 30), "decoder_input_ids": tokens()[:, :7]}


def pairs() -> dict[str, Any]:
    """Texts, which end with the end token, and images."""
    given = text()
    given["input_ids"][:, -1] = 2
    return {**given, "pixel_values": torch.randn(BATCH, 3, 24, 24)}


def samples() -> dict[str, Any]:
    """Sound."""
    return {"input_values": torch.randn(BATCH, 400)}


causal = partial(text, labels="tokens")
classify = partial(text, labels="text")
generate = {"use_cache": False}

MODELS = {
    "bert_base": bare("BertModel", bert, text),
    "bert_classifier": case("BertForSequenceClassification", bert, classify),
    "bert_masked": case("BertForMaskedLM", bert, text),
    "distilbert_classifier": case("DistilBertForSequenceClassification", distilbert, text),
    "roberta_tokens": case("RobertaForTokenClassification", bert, text),
    "albert_classifier": case("AlbertForSequenceClassification", albert, text, blocks=False),
    "electra_classifier": case("ElectraForSequenceClassification", albert, text),
    "deberta_v2_classifier": case("DebertaV2ForSequenceClassification", deberta, text),
    "gpt2_causal": case("GPT2LMHeadModel", gpt2, causal),
    "gpt2_cached": case("GPT2LMHeadModel", gpt2, text),
    "gpt2_classifier": case("GPT2ForSequenceClassification", gpt2, text, **generate),
    "neox_rotary_100": case(
        "GPTNeoXForCausalLM",
        neox,
        text,
        **generate,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
    ),
    "neox_rotary_75": case(
        "GPTNeoXForCausalLM",
        neox,
        text,
        **generate,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
    ),
    "neox_rotary_25": case(
        "GPTNeoXForCausalLM",
        neox,
        text,
        **generate,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    ),
    "llama_causal": case("LlamaForCausalLM", llama, causal, tie_word_embeddings=False),
    "llama_tied": case("LlamaForCausalLM", llama, text, **generate, tie_word_embeddings=True),
    "llama_grouped": case("LlamaForCausalLM", partial(llama, kv=2), text, **generate),
    "llama_classifier": case("LlamaForSequenceClassification", llama, text, **generate),
    "mistral_causal": case("MistralForCausalLM", partial(llama, kv=2), text, **generate, sliding_window=4),
    "mixtral_causal": case("MixtralForCausalLM", mixtral, text, **generate),
    "qwen2_causal": case("Qwen2ForCausalLM", partial(llama, kv=2), text, **generate),
    "qwen2_moe_causal": case("Qwen2MoeForCausalLM", qwen_moe, text, **generate),
    "phi_causal": case("PhiForCausalLM", phi, text, **generate),
    "gemma_causal": case("GemmaForCausalLM", partial(llama, kv=1), text, **generate),
    "opt_causal": case("OPTForCausalLM", opt, text, **generate),
    "t5_base": case("T5Model", t5, translation, **generate),
    "t5_generation": case("T5ForConditionalGeneration", t5, causal, **generate),
    "t5_encoder": case("T5EncoderModel", t5, text),
    "bart_generation": bare("BartForConditionalGeneration", bart, translation, **generate),
    "vit_classifier": case("ViTForImageClassification", vit, images),
    "deit_classifier": case("DeiTForImageClassification", vit, partial(images, labels=True)),
    "beit_classifier": case("BeitForImageClassification", vit, images, use_relative_position_bias=True),
    "dinov2_classifier": case("Dinov2ForImageClassification", vit, images, mlp_ratio=2),
    "swin_classifier": case("SwinForImageClassification", swin, partial(images, 32)),
    "convnext_classifier": case("ConvNextForImageClassification", convnext, partial(images, 32, labels=True)),
    "resnet_classifier": case("ResNetForImageClassification", resnet, partial(images, 32)),
    "segformer_segmentation": case("SegformerForSemanticSegmentation", segformer, partial(images, 32)),
    "whisper_generation": bare("WhisperForConditionalGeneration", whisper, spectra, **generate),
    "clip_base": bare("CLIPModel", clip, pairs),
    "clip_images": bare("CLIPVisionModel", lambda s: clip(s)["vision_config"], images),
    "wav2vec2_ctc": case("Wav2Vec2ForCTC", wav2vec2, samples),
    "wav2vec2_classifier": case("Wav2Vec2ForSequenceClassification", wav2vec2, samples),
    "mamba_causal": case("MambaForCausalLM", mamba, partial(text, mask=False), **generate),
}
