"""Tokenizers of fewer tokens cut texts as the full ones do, if the tokens of the text are kept."""

import random

import pytest
import torch
from refusals import refused
from torch import nn

from surgery.vocabulary import grow, keep, needed

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
KINDS = ("WordLevel", "WordPiece", "Unigram", "BPE", "suffixes")
_DRAW = random.Random(0)
WORDS = ["".join(_DRAW.choices("abcdefg", k=_DRAW.randint(1, 7))) for _ in range(120)]
CORPUS = [" ".join(_DRAW.choices(WORDS, k=12)) for _ in range(100)]


def trained(kind):
    tokenizers = pytest.importorskip("tokenizers")
    models, trainers, before = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers
    options = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "Unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, options["unk_token"] = before.Metaspace(), "[UNK]"
    elif kind == "BPE":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, options["initial_alphabet"] = before.ByteLevel(), before.ByteLevel.alphabet()
    elif kind == "suffixes":
        made = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="[UNK]"))
        made.pre_tokenizer, options["end_of_word_suffix"] = before.Whitespace(), "</w>"
    else:
        made = tokenizers.Tokenizer(getattr(models, kind)(unk_token="[UNK]"))
        made.pre_tokenizer = before.Whitespace()
    options |= {} if kind == "WordLevel" else {"vocab_size": 400 if kind == "BPE" else 150}
    trainer = getattr(trainers, f"{'BPE' if kind == 'suffixes' else kind}Trainer".replace("BPE", "Bpe"))
    made.train_from_iterator(CORPUS, trainer(**options))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def network(size):
    return nn.Sequential(nn.Embedding(size, 4), nn.Linear(4, size))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("characters", [True, False])
def test_keep__texts_of_kept_tokens_are_cut_as_before(kind, characters):
    full, written = trained(kind), 0
    kept = needed(full, CORPUS[:2], characters=characters)
    text = full.to_str()
    small, _, few = keep(network(full.get_vocab_size()), kept, tokenizer=full)
    assert full.to_str() == text
    assert few.get_vocab_size() == len(kept) == small[0].num_embeddings
    for text in (*CORPUS, *WORDS):
        numbers = full.encode(text).ids
        if set(numbers) <= set(kept):
            written += 1
            assert [kept[number] for number in few.encode(text).ids] == numbers
    assert written >= 10


@pytest.mark.parametrize("kind", KINDS)
def test_keep__what_a_tokenizer_needs_is_named(kind):
    full = trained(kind)
    kept = needed(full, CORPUS[:1])
    model = network(full.get_vocab_size())
    for gone in (1, 2) if kind != "BPE" else (2,):
        with refused(f"argument: {SPECIAL[gone]}", "needed"):
            keep(model, [number for number in kept if number != gone], tokenizer=full)
    if kind in ("BPE", "suffixes"):
        longest = max(kept, key=lambda number: len(full.id_to_token(number)) * (number > 3))
        with refused("argument", "merged"):
            keep(model, [0, 1, 2, 3, longest], tokenizer=full)
        keep(model, needed(full, tokens=[longest], characters=False), tokenizer=full)


def test_tokenizers__a_merged_token_needs_its_parts():
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5}
    merges = [("a", "b"), ("ab", "c"), ("b", "c")]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    assert needed(bpe, ["abc"], characters=False) == [0, 1, 2, 3, 4]
    assert needed(bpe, tokens=[5]) == [0, 1, 2, 5]


def test_grow__new_tokens_are_the_last():
    full = trained("BPE")
    large, _, more = grow(network(full.get_vocab_size()), tokens=["<ask>", "<end>"], tokenizer=full)
    size = full.get_vocab_size()
    assert large[0].num_embeddings == large[1].out_features == size + 2
    assert more.encode("<end>").ids == [2, size + 1, 3]
    assert full.token_to_id("<end>") is None


def test_keep__other_tokenizers_are_refused():
    with refused("unsupported: dict"):
        keep(network(5), [1], tokenizer={"a": 1})
    with refused("unsupported: object"):
        needed(object(), ["a"])
    with refused("argument"):
        needed(trained("BPE"), "one text")
    tokenizers = pytest.importorskip("tokenizers")
    marked = tokenizers.Tokenizer(tokenizers.models.BPE(continuing_subword_prefix="##"))
    with refused("unsupported: BPE"):
        needed(marked)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_keep__tokenizers_of_transformers_are_saved_and_read(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL))
    full = transformers.PreTrainedTokenizerFast(tokenizer_object=trained(kind), **names)
    kept = needed(full, CORPUS[:2])
    _, _, few = keep(network(len(full)), kept, tokenizer=full)
    few.save_pretrained(tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(read) == len(few) == len(kept) < len(full)
    for text in CORPUS[:2]:
        assert [kept[number] for number in read(text)["input_ids"]] == full(text)["input_ids"]
    assert [kept[number] for number in read.all_special_ids] == full.all_special_ids
    assert torch.tensor(few(CORPUS[0])["input_ids"]).max() < len(kept)
