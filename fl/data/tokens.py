"""Tokens of text: words of a vocabulary, or bytes.

Words joined by spaces split into the same words again. The end of a line is a word of its own, as in WikiText's
published counts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

UNKNOWN = "<unk>"
"""Stands for every word that is not in the vocabulary; its token is 0. In WikiText's files it is a word already."""

_WORDS = re.compile(rf"\n|{UNKNOWN}|\w+(?:'\w+)*|[^\w\s]")
_SPACED = re.compile(r"\n|\S+")


def words(text: str, spaced: bool = False) -> list[str]:
    r"""The words of a text: runs of letters, digits and underscores, single other characters, and ends of lines.

    Args:
        spaced: whether the text is tokenised already, so that words are separated by spaces.

    >>> words("Don't panic:\nit's <unk>.")
    ["Don't", 'panic', ':', '\n', "it's", '<unk>', '.']
    >>> words("a U.S. film @-@ maker", spaced=True)
    ['a', 'U.S.', 'film', '@-@', 'maker']
    """
    return (_SPACED if spaced else _WORDS).findall(text)


def vocabulary_of(documents: Iterable[Sequence[str]], limit: int = 0, least: int = 1) -> tuple[str, ...]:
    """`<unk>` and the most frequent words of the documents; ties are in alphabetical order.

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
    """The tokens of words, int32 [n]; 0 for words without a number.

    >>> encode_words(["c", "a", "d"], {"<unk>": 0, "c": 1, "a": 2})
    array([1, 2, 0], dtype=int32)
    """
    return np.fromiter((numbers.get(word, 0) for word in document), np.int32, len(document))


def encode_bytes(text: str) -> np.ndarray:
    """The bytes of a text in UTF-8, int32 [n] from 0 to 255.

    >>> encode_bytes("né")
    array([110, 195, 169], dtype=int32)
    """
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def decode(tokens: Tensor | Sequence[int], vocabulary: Sequence[str] = ()) -> str:
    """The text of tokens [n]: words joined by spaces; without a vocabulary, tokens are bytes.

    >>> decode([1, 0], ("<unk>", "spam")), decode([110, 195, 169])
    ('spam <unk>', 'né')
    """
    numbers = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if not vocabulary:
        return bytes(numbers).decode(errors="replace")  # a sequence may begin or end within a character
    return " ".join(vocabulary[number] for number in numbers)
