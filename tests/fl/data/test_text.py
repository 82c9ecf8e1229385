"""Text: tokens, sequences, the data sets of text, and a language model trained and measured on them."""

import math

import pytest
import torch
import torch.nn.functional as F
from data_files import complaint
from hypothesis import given
from hypothesis import strategies as st
from refusals import fl_refused
from rounds import scores

import fl
import surgery
from fl import data
from fl import run as cli
from fl.data import TextOptions
from fl.data import text as text_module
from fl.data.__main__ import main as look
from fl.data.text import UNKNOWN, decode, encode_bytes, encode_words, vocabulary_of, words
from fl.runs import evaluate
from fl.runs.metrics import read

# Tokens


CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]))  # surrogates are no text in UTF-8


@given(CHARACTERS)
def test_text__bytes_come_back(text):
    assert decode(encode_bytes(text)) == text


@given(CHARACTERS, st.booleans())
def test_text__words_of_the_vocabulary_come_back(text, spaced):
    document = words(text, spaced)
    vocabulary = vocabulary_of([document])
    tokens = encode_words(document, {word: n for n, word in enumerate(vocabulary)})
    assert words(decode(tokens, vocabulary), spaced) == document
    assert "".join(text.split()) == "".join("".join(document).split())  # nothing but spaces is lost


@given(st.lists(st.sampled_from("abcdefg"), min_size=1), st.integers(2, 9))
def test_text__the_vocabulary_is_the_most_frequent_words(document, limit):
    vocabulary = vocabulary_of([document], limit)
    assert vocabulary[0] == UNKNOWN
    assert len(vocabulary) == min(limit, 1 + len(set(document)))
    assert vocabulary == vocabulary_of([document[::-1][:3], document[::-1][3:]], limit)  # whatever the order
    ranks = [(-document.count(word), word) for word in sorted(set(document))]
    assert list(vocabulary[1:]) == [word for _, word in sorted(ranks)][: limit - 1]
    tokens = encode_words(document, {word: n for n, word in enumerate(vocabulary)})
    assert [vocabulary[t] for t in tokens] == [w if w in vocabulary else UNKNOWN for w in document]


# Sequences


@pytest.mark.parametrize("length", [1, 3, 7])
def test_text__sequences_of_documents(length):
    """Words that occur once each, so that every token can be traced to its place."""
    sizes = [60, 3, 17, 0, 29]
    documents = [[f"w{d}_{i}" for i in range(n)] for d, n in enumerate(sizes)]
    made = text_module.dataset("abc", [" ".join(d) for d in documents], TextOptions("word", 0, length), spaced=True)
    assert (made.x.dtype, made.y.dtype, made.owners.dtype) == (torch.int32, torch.int64, torch.int64)
    assert made.text
    assert made.classes == len(made.vocabulary)
    assert torch.equal(made.y[:, :-1].int(), made.x[:, 1:])
    assert torch.equal(made.normalise(made.x, torch.float64), made.x.long())
    for d, document in enumerate(documents):
        train = document[: len(document) - len(document) // 10]
        mine = made.owners == d
        assert int(mine.sum()) == max(0, len(train) - 1) // length
        found = [made.vocabulary[t] for t in made.x[mine].flatten().tolist()]
        assert found == train[: len(found)]
        following = [made.vocabulary[t] for t in made.y[mine].flatten().tolist()]
        assert following == train[1 : len(found) + 1]
    # words of the test parts occur nowhere in training: the vocabulary does not know them
    assert (made.test_x == 0).all()
    assert (made.test_y == 0).all()
    assert len(made.test_x) == (sum(n // 10 for n in sizes) - 1) // length


def test_text__rare_words_are_learnt_as_unknown_and_bytes_are_all_known():
    """Else <unk> occurs in the test part alone."""
    made = text_module.dataset("abc", ["a b a b once " + "a b " * 23], TextOptions(length=2))
    assert made.vocabulary == (UNKNOWN, "a", "b")
    assert (made.x == 0).sum() == 1
    made = text_module.dataset("abc", ["No man is an island" * 9], TextOptions("byte", length=4))
    assert bytes(made.x[:2].flatten().tolist()) == b"No man i"
    assert (made.classes, made.vocabulary) == (256, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TextOptions(length=0), "--text.length"),
        (TextOptions(vocabulary=1), "--text.vocabulary"),
        (TextOptions(length=10**6), "longest training document has"),
    ],
)
def test_text__options_that_cannot_be_are_told(options, message):
    with pytest.raises(fl.FLError, match=message) as error:
        data.load("pydoc", text=options)
    assert "\n" not in str(error.value)
    with fl_refused("data", "--text.length"):
        text_module.dataset("abc", ["x" * 25], TextOptions("byte", length=10))


# The data sets


def test_text__pydoc_is_real_and_always_the_same():
    first, capped = data.load("pydoc", "/nowhere", False), data.load("pydoc", text=TextOptions(vocabulary=100))
    text = decode(first.x.flatten(), first.vocabulary).replace("\n", "")
    assert "statement is used for conditional execution" in text
    assert first.x.max() < first.classes <= 10_000
    assert capped.vocabulary == first.vocabulary[:100]
    assert torch.equal(capped.x, first.x.where(first.x < 100, 0))


def test_text__no_paragraph_of_pydoc_is_both_trained_and_tested_on():
    from pydoc_data.topics import topics

    kept = text_module._drop_repeated(topics)
    paragraphs = [" ".join(p.split()) for text in kept.values() for p in text.split("\n\n") if p.strip()]
    assert len(paragraphs) == len(set(paragraphs))
    everything = {" ".join(p.split()) for text in topics.values() for p in text.split("\n\n")}
    assert everything - {""} <= set(paragraphs)


ARTICLES = """ \n = One = \n \n a b c d e . \n = = Part = = \n \n f g h i j k . \n \n = Two = \n \n a b <unk> d . \n"""
TEST = " \n = Three = \n \n a b z . \n"


def write(root, files):
    for file, content in files.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", ["wiki.{}.tokens", "{}.txt"])
def test_text__wikitext_has_articles_and_its_own_test_part(tmp_path, name):
    write(tmp_path / "wikitext-2", {name.format("train"): ARTICLES, name.format("test"): TEST})
    wiki = data.load("wikitext-2", tmp_path, False, TextOptions(vocabulary=0, length=5))
    assert wiki.owners.tolist() == [0] * 5 + [1] * 2
    assert decode(wiki.x[0], wiki.vocabulary).split(" ") == ["\n", "=", "One", "=", "\n"]
    assert decode(wiki.x[5], wiki.vocabulary).split(" ") == ["=", "Two", "=", "\n", "\n"]
    assert decode(wiki.test_y[1], wiki.vocabulary).split(" ") == ["a", "b", "<unk>", ".", "\n"]


def test_text__shakespeare_s_speakers_own_what_they_say(tmp_path):
    text = "A:\nOne two three\nfour.\n\nB b:\nFive six.\n\nC:\n\nA:\nSeven eight.\n"
    write(tmp_path, {"tinyshakespeare/input.txt": text})
    plays = data.load("shakespeare", tmp_path, False, TextOptions("byte", length=2))
    said = ["".join(map(chr, plays.x[plays.owners == owner].flatten())) for owner in range(3)]
    for found, whole in zip(said, ("One two three\nfour.\n\nSeven eight.\n", "Five six.\n", "")):
        assert found == whole[: len(found)]
        assert bool(found) == bool(whole)
    write(tmp_path, {"tinyshakespeare/input.txt": "One two\n\nA:\nthree\n"})
    assert "(tinyshakespeare/input.txt: 'One two' where a speaker's name" in complaint("shakespeare", tmp_path)


def test_text__any_file_of_text(tmp_path):
    write(tmp_path, {"notes/a.txt": "No man is an island,\r\n" * 30})
    made = data.load("text:notes/a.txt", tmp_path, text=TextOptions(length=6))
    same = data.load(f"text:{tmp_path}/notes/a.txt", "/nowhere", text=TextOptions(length=6))
    assert torch.equal(made.x, same.x)
    assert made.owners is None
    assert decode(made.x[0], made.vocabulary) == "No man is an island ,"
    for content, message in ((b"", "too short: its longest training document has 0"), (b"\xff\xfe" * 99, "damaged")):
        write(tmp_path, {"notes/a.txt": content})
        with pytest.raises(fl.FLError, match=message):
            data.load("text:notes/a.txt", tmp_path)


def test_text__missing_files_of_text_are_named(tmp_path):
    message = complaint("wikitext-2", tmp_path)
    assert "missing wikitext-2/wiki.train.tokens, wikitext-2/wiki.test.tokens; download is off" in message
    assert "train.txt and test.txt" in message
    assert "missing tinyshakespeare/input.txt; download is off" in complaint("shakespeare", tmp_path)
    for name, said in (("a.txt", rf"a\.txt, nor in {tmp_path}"), ("/nope.txt", r"/nope\.txt")):
        with pytest.raises(fl.FLError, match=rf"--dataset text:{name}: there is no file {said}"):
            data.load(f"text:{name}", tmp_path)
    with fl_refused("name", "'text:'", "FILE"):
        data.load("text:", tmp_path)
    write(tmp_path, {"wikitext-2/test.txt": b"\xff", "wikitext-2/train.txt": "a"})
    assert "files are damaged (wikitext-2/test.txt: " in complaint("wikitext-2", tmp_path)
    write(tmp_path / "valid", {"wikitext-2/valid.txt": ARTICLES, "wikitext-2/test.txt": TEST})
    wiki = data.load("wikitext-2-valid", tmp_path / "valid", False, TextOptions(length=5))
    assert (wiki.name, len(wiki.x)) == ("wikitext-2-valid", 7)
    assert "--dataset wikitext-2-valid trains on" in complaint("wikitext-2", tmp_path / "valid")


def test_text__what_is_missing_is_downloaded(tmp_path, monkeypatch):
    """From a folder, which has an address as well."""
    there, here = tmp_path / "there", tmp_path / "here"
    write(there, {"train.txt": ARTICLES, "test.txt": TEST, "input.txt": "A:\n" + "one two " * 20})
    monkeypatch.setattr(text_module, "WIKITEXT", f"{there.as_uri()}/")
    monkeypatch.setattr(text_module, "SHAKESPEARE", f"{there.as_uri()}/")
    options = TextOptions(length=3)
    for name in ("wikitext-2", "shakespeare"):
        with fl_refused("file", "--data-root"):
            data.load(name, here, text=options)
    monkeypatch.setattr(text_module, "MD5", {})
    assert len(data.load("wikitext-2", here, text=options).x)
    assert len(data.load("shakespeare", here, text=options).x)
    (there / "input.txt").unlink()
    assert data.load("shakespeare", here, text=options).classes
    (here / "tinyshakespeare" / "input.txt").unlink()
    with fl_refused("file", "tinyshakespeare/input.txt"):
        data.load("shakespeare", here, text=options)
    assert not list((here / "tinyshakespeare").iterdir())


# Measures


def test_text__scores_of_text_and_of_its_pieces(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, 4, 7, generator=generator)
    labels = torch.randint(7, (11, 4), generator=generator)
    whole = scores(lambda x: x, logits, labels, 7)
    losses, right = [], 0
    for row, label in zip(logits.flatten(0, 1).tolist(), labels.flatten().tolist()):
        losses.append(math.log(sum(map(math.exp, row))) - row[label])
        right += row.index(max(row)) == label
    mean = sum(losses) / 44
    assert whole == pytest.approx({"accuracy": right / 44, "loss": mean, "perplexity": math.exp(mean)})
    for limit, pieces in ((3 * 4 * 7, [3, 3, 3, 2]), (1, [1] * 11)):
        seen = []
        monkeypatch.setattr(evaluate, "_LOGITS", limit)
        found = scores(lambda x, seen=seen: (seen.append(len(x)), x)[1], logits, labels, 7)
        assert seen == pieces
        assert found == pytest.approx(whole, rel=1e-12)
    hopeless = torch.tensor([[[1e4, 0.0]]])
    assert scores(lambda x: x, hopeless, torch.tensor([[1]]), 2)["perplexity"] == math.inf


# Runs


def test_text__who_holds_what_text(capsys):
    assert look(["--dataset", "pydoc", "--partition", "natural"]) == 0
    out = capsys.readouterr().out
    assert [words in out for words in ("samples of 64, ", "different tokens", "classes a client")] == [
        True,
        True,
        False,
    ]


@pytest.mark.slow
def test_text__a_language_model_is_measured_by_perplexity_and_taken_out(tmp_path):
    flags = "--dataset pydoc --model transformer --partition natural --text.vocabulary 50 --text.length 16 --clients 4"
    flags += " --participants 2 --rounds 2 --local-epochs 1 --width 0.125 --depth 1 --batch-size 50 --lr 0.1"
    flags += " --algorithm fedavg --local-test 0.2 --name a"
    assert cli.main([*flags.split(), "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "a" / "metrics.csv")
    for row in rows:
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["local_test_perplexity"] >= math.exp(row["local_test_loss"]) * (1 - 1e-12)  # Jensen
        assert not any("f1" in key for key in row)
    assert rows[-1]["perplexity"] < 50
    topics = fl.Config.read(tmp_path / "a").load()
    with torch.no_grad():
        logits = fl.load_model(tmp_path / "a")(topics.normalise(topics.test_x))
    loss = F.cross_entropy(logits.flatten(0, 1).double(), topics.test_y.flatten()).item()
    assert rows[-1]["loss"] == pytest.approx(loss, rel=1e-6)


def test_text__a_masked_language_model_is_asked_for_what_it_does_not_see():
    config = fl.Config.of(
        algorithm="fedavg", dataset="pydoc", partition="natural", clients=6, participants=3, min_samples=3,
        text=TextOptions(vocabulary=200, length=16), model="transformer_masked", width=0.125, depth=1,
        local_epochs=1, lr=0.05,
    )  # fmt: skip
    fed, algorithm = fl.build(config)
    assert torch.equal(fed.data.x, fed.data.y)
    tokens = fed.data.x[:600].view(2, 300, 16)
    shown = fed.local.augment(tokens, torch.tensor([5, 6], dtype=torch.int32))
    hidden = shown != tokens
    assert abs(hidden.float().mean() - 0.15) < 0.02
    assert (shown[hidden] == 200).all()  # the token after the vocabulary's last
    assert not torch.equal(hidden[0], hidden[1])
    state, model = algorithm.init()["global"], fed.model.eval()
    shown = fed.local.augment(fed.data.test_x[:5], torch.tensor(0, dtype=torch.int32))
    with torch.no_grad():
        expected = surgery.load(model, state)(shown.long())
        assert not torch.allclose(expected, model(fed.data.test_x[:5].long()))
    torch.testing.assert_close(fed.predict(state, fed.data.test_x[:5]), expected)
