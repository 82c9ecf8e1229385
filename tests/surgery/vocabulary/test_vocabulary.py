"""Vocabularies that are cut or grown: the rows, what depends on numbers of tokens, and models of transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

import surgery
from surgery.vocabulary import grow, keep


class Language(nn.Module):
    """A model of words with positions, as large as the vocabulary and as the width, and a head that may be tied."""

    def __init__(self, tied=False, size=16):
        super().__init__()
        self.vocab_size, self.pad_idx = size, 3
        self.tokens, self.positions = nn.Embedding(size, 16, padding_idx=3), nn.Embedding(16, 16)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, size)
        if tied:
            self.head.weight = self.tokens.weight

    def hidden(self, words):
        x = self.tokens(words) + self.positions.weight[: words.shape[1]]
        return self.mix(x).tanh() * (words != self.pad_idx)[..., None]

    def forward(self, words):
        return self.head(self.hidden(words))


def language(tied=False):
    """Weights are whole numbers: sums are exact, whatever their order."""
    torch.manual_seed(0)
    model = Language(tied).double()
    for parameter in model.parameters():
        parameter.data = parameter.data.mul(4).round()
    return model


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 15), min_size=1), st.booleans())
def test_keep__logits_of_kept_tokens_are_the_full_model_s(tokens, tied):
    model, kept = language(tied), sorted(tokens | {3})
    before = {name: tensor.clone() for name, tensor in surgery.state(model).items()}
    small, plan, tokenizer = keep(model, tokens | {3})
    new = torch.arange(len(kept))[None]
    assert torch.equal(small.hidden(new), model.hidden(torch.tensor(kept)[None]))
    assert torch.allclose(small(new), model(torch.tensor(kept)[None])[..., kept], rtol=0, atol=1e-12)
    assert (small.head.weight is small.tokens.weight) is tied
    assert tokenizer is None
    assert (small.vocab_size, small.pad_idx, small.tokens.padding_idx) == (len(kept), kept.index(3), kept.index(3))
    assert small.positions.num_embeddings == small.mix.out_features == 16
    assert all(torch.equal(before[name], tensor) for name, tensor in surgery.state(model).items())
    assert surgery.Plan.from_json(plan.to_json()) == plan
    assert torch.equal(surgery.state(plan.build(model))["tokens.weight"], model.tokens.weight[kept])
    full, mask = plan.embed(surgery.state(small))
    assert all(torch.equal(full[name][mask[name]], before[name][mask[name]]) for name in full)


@settings(max_examples=10, deadline=None)
@given(st.integers(16, 24), st.sampled_from(["mean", "zeros"]), st.booleans())
def test_vocabulary__a_grown_model_keeps_the_logits_of_its_tokens(size, rows, tied):
    model, words = language(tied), torch.arange(16)[None]
    large, plan, _ = grow(model, size, rows=rows)
    assert torch.equal(large.hidden(words), model.hidden(words))
    assert torch.allclose(large(words)[..., :16], model(words), rtol=0, atol=1e-12)
    assert large.tokens.num_embeddings == large.head.out_features == large.vocab_size == size
    assert (large.head.weight is large.tokens.weight) is tied
    mean = model.head.bias.mean() if rows == "mean" else torch.tensor(0.0).double()
    assert torch.allclose(large.head.bias[16:], mean)
    full, _ = plan.embed(surgery.state(large))
    assert torch.equal(full["tokens.weight"], model.tokens.weight)
    back, _, _ = keep(large, range(16))
    assert torch.equal(surgery.state(back)["tokens.weight"], model.tokens.weight)


def test_grow__new_rows_are_means_of_given_tokens():
    model = language()
    large, plan, _ = grow(model, 18, rows=[[4, 6], [2]])
    assert torch.equal(large.tokens.weight[16], model.tokens.weight[[4, 6]].mean(0))
    assert torch.equal(large.head.bias[17], model.head.bias[2])
    assert torch.equal(plan.extract(model)["head.bias"][16:], model.head.bias[[4, 2]])


def test_vocabulary__dtypes_devices_and_flags_stay():
    model = language().bfloat16().to("meta").requires_grad_(False)
    model.head.weight = model.tokens.weight  # which torch unties on its way there
    for made in (keep(model, [3, 5]).model, grow(model, 18).model):
        assert all(p.is_meta and p.dtype == torch.bfloat16 and not p.requires_grad for p in made.parameters())
        assert made.head.weight is made.tokens.weight


def test_keep__a_head_of_computed_weights_follows():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 9))
    model, kept = nn.Sequential(nn.Embedding(9, 4), head), [1, 4, 8]
    small = keep(model, kept).model
    assert torch.allclose(small(torch.arange(3)), model(torch.tensor(kept))[:, kept], atol=1e-6)


def test_vocabulary__what_is_refused_is_named():
    with refused("argument: padding_idx", "token 3"):
        keep(nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.Linear(4, 9)), [1, 2])
    for wrong in ([], [16], [-1], [1.5], "12", 5, None, [True]):
        with refused("argument"):
            keep(language(), wrong)
    for wrong in (15, 20.0, True, None):
        with refused("argument"):
            grow(language(), wrong)
    for rows in ("median", [[1]], [[1], [99]], 3):
        with refused("argument"):
            grow(language(), 18, rows=rows)
    with refused("argument", "tokenizer"):
        grow(language(), tokens=["word"])
    with refused("unsupported: Linear"):
        keep(nn.Linear(2, 2), [0])
    with refused("ambiguous", "modules="):
        keep(nn.ModuleDict({"a": nn.Embedding(5, 2), "b": nn.Embedding(6, 2)}), [0])
    with refused("name: 'heads'"):
        keep(language(), [3], modules=["tokens", "heads"])
    with refused("argument"):
        keep(language(), [3], modules="tokens")


def test_keep__modules_are_given_where_they_are_not_known():
    model = nn.ModuleDict(
        {"a": nn.Embedding(5, 2), "b": nn.Embedding(6, 2), "c": nn.Linear(2, 6), "d": nn.Linear(2, 6)}
    )
    small, _, _ = keep(model, [0, 5], modules=["b", "c"])
    assert [small["b"].num_embeddings, small["c"].out_features, small["d"].out_features] == [2, 2, 6]


def test_keep__numbers_from_which_positions_are_counted_stay():
    """As RoBERTa's, whose positions begin after the number of its padding."""
    model = language()
    model.positions.padding_idx = 3
    with refused("argument: positions.padding_idx", "0 to 3"):
        keep(model, [3, 5])
    assert keep(model, [0, 1, 2, 3, 5]).model.positions.padding_idx == 3


BASE = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = BASE | {"num_key_value_heads": 2, "bos_token_id": 11, "eos_token_id": [12, 13], "pad_token_id": 10}
BERT = BASE | {"max_position_embeddings": 60, "pad_token_id": 10}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 10}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "bos_token_id": 10,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "decoder_start_token_id": 12,
    "forced_eos_token_id": 12, "max_position_embeddings": 60,
}  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 60,
                                 "bos_token_id": 11, "eos_token_id": 12}),
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", BERT | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}),
    "t5": ("T5ForConditionalGeneration", T5 | {"vocab_size": 60, "pad_token_id": 10, "eos_token_id": 11}),
    "bart": ("BartForConditionalGeneration", BART | {"vocab_size": 60, "pad_token_id": 11, "eos_token_id": 12}),
    "gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 4}),
    "labels": ("BertForSequenceClassification", BERT | {"num_labels": 60}),
}  # fmt: skip
KEPT = [0, 1, 2, 10, 11, 12, 13, 20, 25, 31, 59]


def transformer(name):
    transformers = pytest.importorskip("transformers")
    kind, values = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    model = kind(kind.config_class(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


def logits(model, words):
    more = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=words, **more).logits


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_vocabulary__models_of_transformers_follow(name, tmp_path, caplog):
    model, new = transformer(name), torch.randint(4, len(KEPT), (2, 7))
    old, columns = torch.tensor(KEPT)[new], slice(None) if name == "labels" else KEPT
    before = model.config.to_dict()
    small, plan, _ = keep(model, KEPT)
    assert model.config.to_dict() == before
    found = logits(small, new)
    assert torch.allclose(found, logits(model, old)[..., columns], atol=1e-5)
    assert small.config.vocab_size == len(KEPT)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        was = before.get(key)
        numbers = [KEPT.index(one) for one in was] if isinstance(was, list) else was if was is None else KEPT.index(was)
        assert getattr(small.config, key, None) == numbers
    small.save_pretrained(tmp_path)
    read, report = type(small).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    assert torch.allclose(logits(read.eval(), new), found, atol=1e-6)
    assert torch.equal(logits(surgery.Plan.from_json(plan.to_json()).build(model), new), found)
    large, _, _ = grow(model, 64)
    assert large.config.vocab_size == 64
    assert torch.allclose(logits(large, old)[..., :60], logits(model, old), atol=1e-5)
    assert not [record for record in caplog.records if record.name.startswith("surgery")]


@pytest.mark.slow
def test_keep__a_model_of_transformers_within_another_follows():
    """As GLiNER's: an encoder, and heads that have nothing to do with words."""
    transformers = pytest.importorskip("transformers")

    class Spans(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = transformers.BertModel(transformers.BertConfig(**BERT))
            self.span, self.out = nn.Linear(16, 60), nn.Linear(60, 3)

        def forward(self, words):
            return self.out(self.span(self.encoder(words).last_hidden_state))

    model, new = Spans().eval(), torch.tensor([[1, 2, 4, 8]])
    small, _, _ = keep(model, KEPT)
    assert torch.equal(small(new), model(torch.tensor(KEPT)[new]))
    assert (small.encoder.config.vocab_size, model.encoder.config.vocab_size) == (len(KEPT), 60)
