"""Text: its tokens (words of a vocabulary, or bytes), and documents as a Dataset of sequences of them.

Words joined by spaces split into the same words again. The end of a line is a word of its own, as in WikiText's
published counts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.settings import AtLeast1, OnlyWith, check_values, number, one_of
from fl.data.dataset import Dataset

UNKNOWN = "<unk>"
"""Stands for every word that is not in the vocabulary; its token is 0. In WikiText's files it is a word already."""

_WORDS = re.compile(rf"\n|{UNKNOWN}|\w+(?:'\w+)*|[^\w\s]")
_SPACED = re.compile(r"\n|\S+")


@dataclass(frozen=True)
class TextOptions:
    """Text."""

    tokens: Annotated[str, one_of("word", "byte")] = "word"
    """what a token is: word or byte"""
    vocabulary: Annotated[int, number(int, least=2, zero=True), OnlyWith("tokens", "word")] = 10_000
    """word: number of the most frequent words that are kept; all others become <unk>, as do words that occur only once
    in the training part; 0: no limit"""
    length: AtLeast1 = 64
    """tokens of a sequence; each sequence is a sample"""


def dataset(
    name: str,
    documents: Sequence[str],
    options: TextOptions,
    test: Sequence[str] | None = None,
    owned: bool = True,
    spaced: bool = False,
) -> Dataset:
    """Make a data set of documents: sequences of tokens, whose labels are the tokens that come next.

    A document is cut into consecutive sequences of T tokens. What is left at its end, up to T tokens, is too short for
    another sequence and is dropped. (A document that is too short has no sequence, and its number does not occur in
    `owners`.) The test documents are cut as one stream, since nobody owns them, so that short ones count as well.
    Which tokens are for testing does not depend on T.

    Args:
        documents: training documents; each is an owner, numbered from 0.
        test: test documents; if None, the last tenth of the tokens of each training document is for testing.
        owned: if False, the data has no owners.
        spaced: see `words`.

    Returns:
        x int32 [N, T], y int64 [N, T] with y[:, :-1] = x[:, 1:]. Classes are the words of the vocabulary, which is made
        from the training part only, or the 256 bytes; see `Dataset`.

    Raises:
        FLError: for options that make no sense, and text that is too short.

    >>> small = dataset("abc", ["abcdefghij" * 4], TextOptions("byte", length=3))
    >>> bytes(small.x[1].tolist()), bytes(small.y[1].tolist()), len(small.x), bytes(small.test_x[0].tolist())
    (b'def', b'efg', 11, b'ghi')
    """
    check_values(options, "text")
    by_word, vocabulary = options.tokens == "word", ()
    train, held = ([words(d, spaced) if by_word else encode_bytes(d) for d in part] for part in (documents, test or ()))
    if test is None:
        cuts = [len(document) - len(document) // 10 for document in train]
        held = [document[cut:] for document, cut in zip(train, cuts)]
        train = [document[:cut] for document, cut in zip(train, cuts)]
    if by_word:
        # Without rare words in training, nobody would learn about <unk>, which occurs in the test part.
        vocabulary = vocabulary_of(train, options.vocabulary, least=1 if spaced else 2)
        numbers = {word: number for number, word in enumerate(vocabulary)}
        train, held = ([encode_words(document, numbers) for document in part] for part in (train, held))
    stream = np.concatenate(held)
    for part, longest in (("longest training document", max(map(len, train), default=0)), ("test part", len(stream))):
        if longest <= options.length:
            raise FLError(
                f"{name} is too short: its {part} has {longest} tokens, and a sequence needs --text.length "
                f"{options.length} and one more"
            )
    pieces = [windows(document, options.length) for document in train]
    x, y = (torch.cat(part) for part in zip(*pieces))
    owners = torch.repeat_interleave(torch.tensor([len(x) for x, _ in pieces])) if owned else None
    classes = len(vocabulary) or 256
    return Dataset(name, x, y, *windows(stream, options.length), classes, owners=owners, vocabulary=vocabulary)


def windows(stream: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    """Cut a stream of tokens into sequences x, int32 [n, length], and the tokens after each, y, int64.

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
    """List `<unk>` and the most frequent words of the documents; ties are in alphabetical order.

    Args:
        limit: how many words at most, `<unk>` included; 0 for all.
        least: how often a word must occur.

    >>> vocabulary_of([["b", "a", "c"], ["c"]], limit=3)
    ('<unk>', 'c', 'a')
    """
    counts = Counter(word for document in documents for word in document)
    del counts[UNKNOWN]
    ranked = sorted((word for word, n in counts.items() if n >= least), key=lambda word: (-counts[word], word))
    return (UNKNOWN, *(ranked[: limit - 1] if limit else ranked))


def encode_words(document: Sequence[str], numbers: dict[str, int]) -> np.ndarray:
    """Convert words to tokens, int32 [n]; 0 for words without a number.

    >>> encode_words(["c", "a", "d"], {"<unk>": 0, "c": 1, "a": 2})
    array([1, 2, 0], dtype=int32)
    """
    return np.fromiter((numbers.get(word, 0) for word in document), np.int32, len(document))


def encode_bytes(text: str) -> np.ndarray:
    """Convert a text to the bytes of its UTF-8, int32 [n] from 0 to 255.

    >>> encode_bytes("né")
    array([110, 195, 169], dtype=int32)
    """
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: Tensor | Sequence[int], vocabulary: Sequence[str] = ()) -> str:
    """Convert tokens [n] to text: words joined by spaces; without a vocabulary, tokens are bytes.

    >>> decode([1, 0], ("<unk>", "spam")), decode([110, 195, 169])
    ('spam <unk>', 'né')
    """
    numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if not vocabulary:
        return bytes(numbers).decode(errors="replace")  # a sequence may begin or end within a character
    return " ".join(vocabulary[number] for number in numbers)
