"""Prompts with answers: what counts is the answer, wherever the sequence ends."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import fl_refused

import fl
from fl.data.arrays import UNSCORED
from fl.data.text import TextOptions, decode
from fl.extensions.language.data import dataset

ROWS = [{"prompt": f"{i} plus {i}", "answer": f"is {2 * i}", "owner": "ab"[i % 2]} for i in range(40)]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return f"prompts:{path}"


def answers(data, k):
    """The text that counts of a sample, and what stands before it."""
    x, y = data.x[k].tolist(), data.y[k].tolist()
    first = next(i for i, label in enumerate(y) if label != UNSCORED)
    counted = [label for label in y if label != UNSCORED]
    assert y[first : first + len(counted)] == counted  # in one piece
    assert x[first + 1 : first + len(counted)] == counted[:-1]
    return decode(x[: first + 1], data.vocabulary), decode(counted, data.vocabulary)


def test_prompts__the_answer_counts(tmp_path):
    name = write(tmp_path / "sums.jsonl", ROWS)
    data = fl.data.load(name, text=TextOptions("byte", length=32))
    assert (len(data.x), len(data.test_x), data.classes) == (36, 4, 256)
    assert data.owners.bincount().tolist() == [18, 18]
    assert answers(data, 3) == ("3 plus 3\n", "is 6\n")
    words = fl.data.load(name, text=TextOptions("word", length=12, template="Q: {prompt}? A: {answer}."))
    assert answers(words, 2) == ("Q : 2 plus 2 ? A :", "is 4 .")


@pytest.mark.nightly
@given(st.text(max_size=12), st.text(min_size=1, max_size=12), st.integers(1, 20))
def test_prompts__as_much_of_the_answer_as_fits_and_then_of_the_context(context, answer, length):
    rows = [{"c": context, "a": answer}] * 10
    template = "{c}{a}"
    whole, end = (context + answer).encode(), answer.encode()
    if len(whole) < 2 or "\ud800" <= max(context + answer) <= "\udfff":
        return
    data = dataset("drawn", rows, TextOptions("byte", length=length, template=template))
    counted = [label for label in data.y[0].tolist() if label != UNSCORED]
    expected = end if context else end[1:]
    assert bytes(counted) == expected[:length]
    before = (context.encode() or end[:1])[-(length + 1 - len(counted)) :]
    assert bytes(data.x[0, : len(before)].tolist()) == before


def test_prompts__lines_end_where_json_lines_do(tmp_path):
    row = {"prompt": "a\u2028b", "answer": "c"}
    text = "\n".join([json.dumps(row, ensure_ascii=False)] * 10)
    (tmp_path / "mark.jsonl").write_text(f"\ufeff{text}\n", "utf-8")
    assert len(fl.data.load("prompts:mark.jsonl", tmp_path, text=TextOptions("byte", length=16)).x) == 9


@pytest.mark.parametrize("words", [["[UNK]", "[END]"], ["[END]", "[UNK]"]])
def test_prompts__a_tokenizer_ends_answers(tmp_path, words):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*words, "plus", "is", *map(str, range(100))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]").save_pretrained(tmp_path / "t")
    data = dataset("sums", ROWS, TextOptions(f"tokenizer:{tmp_path / 't'}", length=8))
    counted = [label for label in data.y[3].tolist() if label != UNSCORED]
    assert [words[i] for i in counted] == ["is", "6", "[END]"]


def test_simulate__it_trains_and_measures_answers(tmp_path):
    config = fl.Config.of(
        algorithm="fedavg", dataset=write(tmp_path / "sums.jsonl", ROWS), partition="natural", clients=2,
        participants=2, rounds=2, model="transformer", width=0.125, depth=1, text=TextOptions("byte", length=24),
    )  # fmt: skip
    summary = fl.simulate(config, tmp_path / "run")
    assert 1 < summary["final"]["perplexity"] < 300
    net = fl.load_model(tmp_path / "run")
    data = config.load()
    with torch.no_grad():
        logits = net(data.test_x.long())
    counts = data.test_y != UNSCORED
    loss = torch.nn.functional.cross_entropy(logits[counts].double(), data.test_y[counts])
    assert summary["final"]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        (ROWS, "{prompt}{reply}", "'reply'.*--text.template"),
        (ROWS, "no fields", "names of fields alone"),
        (ROWS, "{} {answer}", "names of fields alone"),
        (ROWS, "{prompt} {answer:>5}", "names of fields alone"),
        (ROWS, "{prompt} {answer!z}", "names of fields alone|braces"),
        ([{"prompt": "1", "answer": None}] * 10, TextOptions.template, "'answer'"),
        ([{"prompt": "1", "answer": {"a": 1}}] * 10, TextOptions.template, "'answer'"),
        ([{"prompt": "1", "answer": ""}] * 10, "{prompt}{answer}", "sample 0 has an empty answer"),
        ([{"prompt": "1", "answer": "\ud800"}] * 10, TextOptions.template, "half a character"),
        ([{"prompt": "", "answer": "a"}] * 10, "{prompt}{answer}", "has no token that counts"),
        ([{"prompt": "", "answer": " a", "owner": i // 9} for i in range(72)], TextOptions.template, "no owner has 10"),
        (ROWS, "{prompt", "braces of the text itself are doubled"),
        (ROWS[:5], TextOptions.template, "no owner has 10"),
        ([*ROWS, {"prompt": "1", "answer": "2"}], TextOptions.template, "sample 40 has no owner"),
    ],
)
def test_prompts__refusals(rows, template, message):
    with pytest.raises(fl.FLError, match=message):
        dataset("sums", rows, TextOptions(template=template))


def test_prompts__files_that_are_none(tmp_path):
    with fl_refused("file", "--dataset"):
        fl.data.load("prompts:nothing.jsonl", tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt"\n')
    with fl_refused("file", "JSON"):
        fl.data.load("prompts:bad.jsonl", tmp_path)
    with fl_refused("unsupported", "--dataset", "FILE"):
        fl.data.load("pydoc", text=TextOptions(template="{a}"))


def test_prompts__a_masked_model_names_any_token(tmp_path):
    config = fl.Config.of(
        algorithm="fedavg", dataset=write(tmp_path / "sums.jsonl", ROWS), partition="natural", clients=2,
        participants=2, model="transformer_masked", width=0.125, depth=1, text=TextOptions("byte", length=24),
    )  # fmt: skip
    with fl_refused("unsupported", "--model"):
        fl.build(config)
