"""Tokenizers of merges, and tables of tokens in unequal vocabularies."""

import json

import pytest
import torch
import yaml
from command_files import refused

from surgery.__main__ import main
from surgery.files import open_state

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # transformers takes seconds to import
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
WORDS = {"o": ["[UNK]", "one", "two", "three"], "a": ["[UNK]", "two", "new"], "b": ["three", "new", "[UNK]", "other"]}


@pytest.fixture
def made(tmp_path, monkeypatch):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    monkeypatch.chdir(tmp_path)
    for seed, (name, words) in enumerate(WORDS.items()):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(vocab_size=len(words) + (name == "a"), **sizes)  # a has a row without a token
        transformers.LlamaForCausalLM(config).save_pretrained(name)
        made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
        tokenizer.chat_template = "{{ a }}" if name == "o" else "{{ messages }}"
        tokenizer.save_pretrained(name)
    return tmp_path


def merged(**said):
    weights = {"o": 1, "a": 2, "b": 3} if said.get("base_model") else {"a": 2, "b": 3}
    models = [{"model": name, "parameters": {"weight": weight}} for name, weight in weights.items()]
    with open("c.yml", "w") as file:
        yaml.safe_dump({"merge_method": "linear", "models": models, **said}, file)
    assert main(["merge", "c.yml", "out"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("out")
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    return tokenizer, model


def row(table, name, word):
    return open_state(name)[table][WORDS[name].index(word)]


def means(table, word, base):
    """mergekit's rule: a token that a model lacks has the base's row, or else the mean of those that have it."""
    weights = {"o": 1, "a": 2, "b": 3} if base else {"a": 2, "b": 3}
    have = [name for name in weights if word in WORDS[name]]
    other = (
        row(table, "o", word) if base and "o" in have else sum(row(table, n, word) for n in have) / max(len(have), 1)
    )
    rows = [w * (row(table, n, word) if n in have else other) for n, w in weights.items()]
    return sum(rows) / sum(weights.values()) if have else torch.zeros(8)


@pytest.mark.parametrize("base", ["o", None])
@pytest.mark.parametrize("source", ["union", "base", "b"])
def test_every_token_has_the_row_of_its_models(made, source, base):
    if source == "base" and base is None:
        return
    tokenizer, model = merged(tokenizer_source=source, **({"base_model": base} if base else {}))
    vocabulary = tokenizer.get_vocab()
    names = {"union": [*"oab"] if base else [*"ab"], "base": ["o"], "b": ["b"]}[source]
    assert set(vocabulary) == {word for name in names for word in WORDS[name]}
    assert model.config.vocab_size == len(vocabulary)
    for table in TABLES:
        for word, i in vocabulary.items():
            torch.testing.assert_close(model.state_dict()[table][i], means(table, word, base), msg=f"{table} {word}")
    assert tokenizer("two other")["input_ids"]


def test_rows_are_added_up_to_a_multiple(made):
    tokenizer, model = merged(base_model="o", tokenizer={"source": "union", "pad_to_multiple_of": 4})
    assert (len(tokenizer), model.config.vocab_size) == (6, 8)
    table = model.state_dict()["lm_head.weight"]
    torch.testing.assert_close(table[6:], table[:6].mean(0).expand(2, -1))


def test_chat_templates(made):
    tokenizer, _ = merged(base_model="o", tokenizer_source="base", chat_template="{{ mine }}")
    assert tokenizer.chat_template == "{{ mine }}"


def test_the_chat_template_of_most(made, capsys):
    for name in WORDS:  # whose tokens and tables are then o's
        for file in ("tokenizer.json", "model.safetensors", "config.json"):
            (made / name / file).write_bytes((made / "o" / file).read_bytes())
    tokenizer, _ = merged(base_model="o", chat_template="auto")
    assert tokenizer.chat_template == "{{ messages }}"
    assert json.loads((made / "out" / "tokenizer_config.json").read_text())["unk_token"] == "[UNK]"
    for name in WORDS:
        (made / name / "chat_template.jinja").unlink()
    capsys.readouterr()
    assert "no model has one" in refused(capsys, "merge", "c.yml", "again")
