"""Texts by name (Python's documentation topics, WikiText-2, Shakespeare's speakers, any file of plain text), their
tokens (words of a vocabulary, bytes, or a model's tokenizer's), and documents as a Dataset of sequences of them.

Words joined by spaces split into the same words again. The end of a line is a word of its own, as in WikiText's
published counts.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.files import replacing
from fl.base.plugins import transformers
from fl.base.settings import AtLeast1, Flag, OnlyWith, check_values, number
from fl.data.dataset import Dataset
from fl.data.loader import DataFiles, Loader

WIKITEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
MD5 = {  # of the files at these addresses; we could not verify one for train.txt
    "wikitext-2/valid.txt": "d756d22ab2310e7e60c094bea5c5a8eb",
    "wikitext-2/test.txt": "781c9418ab9414bd09e4aad825aae752",
    "tinyshakespeare/input.txt": "6fb458f1232090904fb40fe944165e91",
}

UNKNOWN = "<unk>"
"""Stands for every word that is not in the vocabulary; its token is 0. In WikiText's files it is a word already."""

_WORDS = re.compile(rf"\n|{UNKNOWN}|\w+(?:'\w+)*|[^\w\s]")
_SPACED = re.compile(r"\n|\S+")


@dataclass(frozen=True)
class TextOptions:
    """Text."""

    tokens: Annotated[str, Flag(str, "{word,byte,tokenizer:FOLDER}")] = "word"
    """what a token is: word, byte, or a token of a tokenizer of transformers, which a folder holds"""
    vocabulary: Annotated[int, number(int, least=2, zero=True), OnlyWith("tokens", "word")] = 10_000
    """word: number of the most frequent words that are kept; all others become <unk>, as do words that occur only once
    in the training part; 0: no limit"""
    length: AtLeast1 = 64
    """tokens of a sequence; each sequence is a sample"""
    template: str = "{prompt}\n{answer}\n"
    """prompts:FILE: text of a sample, with names of its fields in braces; the last field and what follows is the
    answer, which alone counts"""

    def check(self) -> None:
        """Raise FLError for tokens that there are not. No tokenizer is opened."""
        kind, _, folder = self.tokens.partition(":")
        if self.tokens not in ("word", "byte") and (kind != "tokenizer" or not folder):
            raise FLError(f"--text.tokens {self.tokens}: give word, byte or tokenizer:FOLDER")


class TokenPieces(tuple[str, ...]):
    """The tokens of a tokenizer of transformers by number; it knows how to join them."""

    tokenizer: Any

    @classmethod
    def of(cls, tokens: str) -> "TokenPieces":
        """Read the tokens of tokenizer:FOLDER."""
        path = Path(tokens.partition(":")[2]).expanduser()
        with transformers(f"--text.tokens {tokens}", path) as library:
            tokenizer = library.AutoTokenizer.from_pretrained(path, local_files_only=True)
            pieces = cls(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
        pieces.tokenizer = tokenizer
        return pieces

    def encode(self, text: str) -> np.ndarray:
        """Convert a text to tokens, int32 [n]: none for its beginning or end is added."""
        tokens = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(tokens, np.int32)


def dataset(
    name: str,
    documents: Sequence[str],
    options: TextOptions,
    test: Sequence[str] | None = None,
    owned: bool = True,
    spaced: bool = False,
    owner_names: Iterable[str] = (),
) -> Dataset:
    """Make a data set of documents: sequences of tokens, and the tokens after each.

    A document is cut into consecutive sequences of T tokens. What is left at its end, up to T tokens, is too short for
    another sequence and is dropped. (A document that is too short has no sequence, and its number does not occur in
    `owners`.) The test documents are cut as one stream, since no client owns them, so that short ones count as well.
    Which tokens are for testing does not depend on T.

    Args:
        documents: training documents; each is an owner, numbered from 0.
        test: test documents; if None, the last tenth of the tokens of each training document is for testing.
        owned: if False, the data has no owners.
        spaced: see `words`.
        owner_names: of the training documents.

    Returns:
        x int32 [N, T], y int64 [N, T] with y[:, :-1] = x[:, 1:]. Classes are the words of the vocabulary, which is made
        from the training part only, or the 256 bytes, or all tokens of a tokenizer; see `Dataset`.

    Raises:
        FLError: for options that make no sense, and text that is too short.

    >>> small = dataset("abc", ["abcdefghij" * 4], TextOptions("byte", length=3))
    >>> bytes(small.x[1].tolist()), bytes(small.y[1].tolist()), len(small.x), bytes(small.test_x[0].tolist())
    (b'def', b'efg', 11, b'ghi')
    """
    check_values(options, "text")
    options.check()
    check_without_template(name, options)
    split, known = splitter(options, spaced)
    train, held = ([split(document) for document in part] for part in (documents, test or ()))
    if test is None:
        cuts = [len(document) - len(document) // 10 for document in train]
        held = [document[cut:] for document, cut in zip(train, cuts)]
        train = [document[:cut] for document, cut in zip(train, cuts)]
    train, held, vocabulary = number_tokens(train, held, options, known, spaced)
    stream = np.concatenate(held)
    for part, longest in (("longest training document", max(map(len, train), default=0)), ("test part", len(stream))):
        if longest <= options.length:
            raise FLError(
                f"{name} is too short: its {part} has {longest} tokens, and a sequence needs --text.length "
                f"{options.length} and one more",
                code="data",
            )
    pieces = [windows(document, options.length) for document in train]
    x, y = (torch.cat(part) for part in zip(*pieces))
    owners = torch.repeat_interleave(torch.tensor([len(x) for x, _ in pieces])) if owned else None
    classes = len(vocabulary) or 256
    return Dataset(
        name, x, y, *windows(stream, options.length), classes,
        owners=owners, owner_names=tuple(owner_names), vocabulary=vocabulary,
    )  # fmt: skip


def check_without_template(name: str, options: TextOptions) -> None:
    """Raise FLError if there is a template for text without fields."""
    if options.template != TextOptions.template:
        raise FLError(
            f"--text.template is for --dataset prompts:FILE, not for {name}: leave it out", code="unsupported"
        )


def splitter(options: TextOptions, spaced: bool = False) -> tuple[Callable[[str], Any], tuple[str, ...]]:
    """Return what converts a text to words or tokens, and the tokens known already."""
    if ":" in options.tokens:
        pieces = TokenPieces.of(options.tokens)
        return pieces.encode, pieces
    return (partial(words, spaced=spaced) if options.tokens == "word" else encode_bytes), ()


def number_tokens(
    train: list[Any], held: list[Any], options: TextOptions, known: tuple[str, ...], spaced: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[str, ...]]:
    """Convert split texts to tokens: words by the training part's vocabulary."""
    if options.tokens != "word":
        return train, held, known
    # Without rare words in training, no model would learn about <unk>, which occurs in the test part.
    vocabulary = vocabulary_of(train, options.vocabulary, least=1 if spaced else 2)
    numbers = {word: number for number, word in enumerate(vocabulary)}
    train, held = ([encode_words(document, numbers) for document in part] for part in (train, held))
    return train, held, vocabulary


def windows(stream: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Cut tokens into sequences x, int32 [n, length], and the tokens after each, y.

    >>> windows(np.arange(8), 3)
    (tensor([[0, 1, 2],
            [3, 4, 5]], dtype=torch.int32), tensor([[1, 2, 3],
            [4, 5, 6]]))
    """
    count = max(0, len(stream) - 1) // length
    tokens = torch.from_numpy(np.ascontiguousarray(stream[: count * length + 1]))
    x, y = tokens[: count * length], tokens[1 : count * length + 1]
    return x.view(count, length).int(), y.view(count, length).long()


def words(text: str, spaced: bool = False) -> list[str]:
    r"""Split a text into words: runs of letters, digits and underscores, single other characters, and ends of lines.

    Args:
        spaced: whether the text is tokenised already, so that words are separated by spaces.

    >>> words("Don't panic:\nit's <unk>.")
    ["Don't", 'panic', ':', '\n', "it's", '<unk>', '.']
    >>> words("a U.S. film @-@ maker", spaced=True)
    ['a', 'U.S.', 'film', '@-@', 'maker']
    """
    return (_SPACED if spaced else _WORDS).findall(text)


def vocabulary_of(documents: Iterable[Sequence[str]], limit: int = 0, least: int = 1) -> tuple[str, ...]:
    """List `<unk>` and the most frequent words, alphabetically where equally frequent.

    Args:
        limit: how many words at most, `<unk>` included; 0 for all.
        least: how often a word must occur.
    """
    counts = Counter(word for document in documents for word in document)
    del counts[UNKNOWN]
    ranked = sorted((word for word, n in counts.items() if n >= least), key=lambda word: (-counts[word], word))
    return (UNKNOWN, *(ranked[: limit - 1] if limit else ranked))


def encode_words(document: Sequence[str], numbers: dict[str, int]) -> np.ndarray:
    """Convert words to tokens, int32 [n]; 0 for words without a number."""
    return np.fromiter((numbers.get(word, 0) for word in document), np.int32, len(document))


def encode_bytes(text: str) -> np.ndarray:
    """Convert a text to the bytes of its UTF-8, int32 [n] from 0 to 255."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: Tensor | Sequence[int], vocabulary: Sequence[str] = ()) -> str:
    """Convert tokens [n] to text.

    Words are joined by spaces, `TokenPieces` by their tokenizer; without a vocabulary, bytes.

    >>> decode([1, 0], ("<unk>", "spam")), decode([110, 195, 169])
    ('spam <unk>', 'né')
    """
    numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if not vocabulary:
        return bytes(numbers).decode(errors="replace")  # a sequence may begin or end within a character
    if isinstance(vocabulary, TokenPieces):
        return vocabulary.tokenizer.decode(numbers)
    return " ".join(vocabulary[number] for number in numbers)


def pydoc(root: Path, download: bool, options: TextOptions = TextOptions()) -> Dataset:
    """Load the topics of Python's own documentation (`help("if")`).

    Each topic is an owner; a tenth is for testing. Source: `pydoc_data.topics` of the Python that runs; the text
    differs a little from version to version. Long topics repeat short ones (a fifth of all text is repetition). Every
    paragraph is therefore kept once, in the shortest topic that has it, so that nothing is in the training part of one
    topic and in the test part of another.

    >>> topics = pydoc(Path(), False)
    >>> topics.x.shape[1], topics.vocabulary[0], "statement" in topics.vocabulary, len(topics.owners.unique()) > 40
    (64, '<unk>', True, True)
    """
    del root, download
    from pydoc_data.topics import topics

    texts = _drop_repeated(topics)
    return dataset("pydoc", list(texts.values()), options, owner_names=texts)


def wikitext2(root: Path, download: bool, options: TextOptions = TextOptions(), training: str = "train") -> Dataset:
    """Load WikiText-2 (Merity et al. 2016), which has a test part.

    It has good and featured articles of Wikipedia, each an owner. The files are tokenised already, with <unk> for rare
    words; `--text.vocabulary 0` keeps the 33,278 words that are left. They are in root/wikitext-2, under their
    published names (wiki.train.tokens, ...) or as in the download from PyTorch's examples: train.txt, valid.txt and
    test.txt.

    Args:
        training: the part to train on; `valid` is for small experiments (`--dataset wikitext-2-valid`).
    """
    needed = (training, "test")
    origin = f"The names {training}.txt and test.txt are accepted as well"

    def source() -> DataFiles:
        """Name each file as it is there, or else as it is published."""
        names = []
        for part in needed:
            either = (f"wikitext-2/wiki.{part}.tokens", f"wikitext-2/{part}.txt")
            names.append(next((file for file in either if (root / file).is_file()), either[0]))
        return DataFiles("WikiText-2", root, tuple(names), origin)

    def fetch() -> None:
        for part, file in zip(needed, source().files):
            if not (root / file).is_file():
                _fetch(WIKITEXT, root, f"wikitext-2/{part}.txt")

    valid = any((root / "wikitext-2" / name).is_file() for name in ("valid.txt", "wiki.valid.tokens"))
    hint = "; --dataset wikitext-2-valid trains on the validation file" if training == "train" and valid else ""
    source().require(download, fetch, hint)
    train, test = (_articles(_read(source(), file)) for file in source().files)
    name = "wikitext-2" if training == "train" else f"wikitext-2-{training}"
    titles = [article.strip().partition("\n")[0].strip(" =") for article in train]
    return dataset(name, train, options, test=test, spaced=True, owner_names=titles)


def shakespeare(root: Path, download: bool, options: TextOptions = TextOptions()) -> Dataset:
    """Load 40,000 lines of Shakespeare (Karpathy's tiny Shakespeare).

    Each speaker is an owner; a tenth is for testing. All that a speaker says is one document, in the file's order,
    without the name above every speech. It is read from root/tinyshakespeare/input.txt.
    """
    file = "tinyshakespeare/input.txt"
    source = DataFiles("Shakespeare", root, (file,))
    source.require(download, lambda: _fetch(SHAKESPEARE, root, file))
    speeches: dict[str, list[str]] = {}
    for block in _read(source, file).split("\n\n"):
        name, _, speech = block.strip("\n").partition("\n")
        if not name.endswith(":"):
            raise source.damage_error(file, f"{name[:40]!r} where a speaker's name and a colon should be")
        speeches.setdefault(name, []).append(speech + "\n")
    names = [name.removesuffix(":") for name in speeches]
    return dataset("shakespeare", ["\n".join(lines) for lines in speeches.values()], options, owner_names=names)


def plain(root: Path, path: str, options: TextOptions = TextOptions()) -> Dataset:
    """Load a text file in UTF-8 as one document; its last tenth is for testing.

    Args:
        path: of the file; absolute, or relative to the working directory or, if it is not there, to root.
    """
    name, file = f"text:{path}", Path(path).expanduser()
    where = Path() if file.is_file() else root
    if not (where / file).is_file():
        also = "" if file.is_absolute() else f", nor in {root}"
        raise FLError(f"--dataset {name}: there is no file {path}{also}", code="file")
    return dataset(name, [_read(DataFiles(name, where, (path,)), file)], options, owned=False)


def _drop_repeated(topics: Mapping[str, str]) -> dict[str, str]:
    """Keep every paragraph only in its shortest text, however its lines are broken."""
    seen: set[str] = set()
    texts = {}
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        paragraphs = {" ".join(text.split()): text for text in re.split(r"\n\s*\n", topics[name])}
        texts[name] = "\n\n".join(text for key, text in paragraphs.items() if key not in seen)
        seen |= paragraphs.keys()
    return {name: texts[name] for name in sorted(texts)}


def _articles(text: str) -> list[str]:
    """Split WikiText into articles, which begin with ` = Title = ` in blank lines."""
    lines = text.splitlines(keepends=True)
    blank = [not line.strip() for line in lines]
    starts = [
        i
        for i, line in enumerate(lines)
        if re.match(r" = [^=].* = *$", line) and all(blank[max(0, i - 1) : i] + blank[i + 1 : i + 2])
    ]
    cuts = [0, *starts[1:], len(lines)]
    return ["".join(lines[a:b]) for a, b in pairwise(cuts)]


def _read(source: DataFiles, file: str | Path) -> str:
    try:
        return (source.root / file).read_text("utf-8")
    except (OSError, ValueError) as error:  # text that is not UTF-8 raises a ValueError
        raise source.damage_error(str(file), error) from error


def _fetch(address: str, root: Path, file: str) -> None:
    """Download a file into root, whole or not at all.

    Raises OSError or ValueError if that fails.
    """
    path = root / file
    with urlopen(address + path.name, timeout=60) as answer:
        content = answer.read()
    if file in MD5 and hashlib.md5(content).hexdigest() != MD5[file]:
        raise ValueError(f"{address}{path.name} is not the file that it was")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


LOADERS = {
    "pydoc": Loader(pydoc, text=True, bundled=True),
    "wikitext-2": Loader(wikitext2, text=True),
    "wikitext-2-valid": Loader(partial(wikitext2, training="valid"), text=True),
    "shakespeare": Loader(shakespeare, text=True),
    "text:FILE": Loader(lambda root, _, options, path: plain(root, path, options), text=True),
}
