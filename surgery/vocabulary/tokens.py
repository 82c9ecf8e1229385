"""Tokenizers with fewer or more tokens, in the file format of `tokenizers`."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from surgery.errors import SurgeryError, explain

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_MODELS = ("WordLevel", "WordPiece", "Unigram", "BPE")


def needed(
    tokenizer: Any, texts: Iterable[str] = (), *, tokens: Iterable[int] = (), characters: bool = True
) -> list[int]:
    """Return the numbers of tokens that a tokenizer needs for texts, ascending.

    These are the tokens of the texts, all special ones, and for BPE the tokens from which these are merged.

    Args:
        tokenizer: of transformers (a fast one) or of tokenizers.
        texts: a corpus.
        tokens: the numbers of further tokens.
        characters: whether tokens of one character or byte stay, too, so that other texts can be written still.

    Raises:
        SurgeryError: for a tokenizer of another kind.

    >>> from tokenizers import Tokenizer, models  # doctest: +SKIP
    >>> vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5}
    >>> merges = [("a", "b"), ("ab", "c"), ("b", "c")]
    >>> bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))  # doctest: +SKIP
    >>> needed(bpe, ["abc"], characters=False), needed(bpe, tokens=[5])  # doctest: +SKIP
    ([0, 1, 2, 3, 4], [0, 1, 2, 5])
    """
    if isinstance(texts, str):
        raise SurgeryError("texts is a list of texts, got one text", code="argument")
    backend, data = _read(tokenizer)
    numbers = {int(token) for token in tokens}
    for text in texts:
        with explain("the tokenizer does not read a text"):
            numbers.update(backend.encode(text).ids)
    numbers |= {token["id"] for token in data["added_tokens"] if token["special"]}
    vocab = _vocabulary(data["model"])
    model = data["model"]
    numbers |= {vocab[model["unk_token"]]} if model.get("unk_token") in vocab else set()
    numbers |= {model["unk_id"]} if isinstance(model.get("unk_id"), int) else set()
    numbers |= {number for holder, key in _special(data["post_processor"]) for number in _as_list(holder[key])}
    if characters:
        marks = (model.get("continuing_subword_prefix") or "", model.get("end_of_word_suffix") or "")
        numbers |= {
            number
            for token, number in vocab.items()
            if len(_bare(token, *marks)) == 1 or _BYTE.fullmatch(token) or token == "▁"
        }
    if model["type"] == "BPE":
        numbers |= _parts(model, vocab, numbers)
    return sorted(numbers)


def reduced(tokenizer: Any, numbers: Sequence[int]) -> Any:
    """Return a tokenizer of some tokens, renumbered; SurgeryError for missing ones."""
    _, data = _read(tokenizer)
    new = {old: place for place, old in enumerate(numbers)}
    model = data["model"]
    vocab = _vocabulary(model)
    texts = {number: token for token, number in vocab.items()}

    def moved(number: int, role: str) -> int:
        if number not in new:
            raise SurgeryError(
                f"token {number} ({texts.get(number, role)!r}) is {role} of the tokenizer and not among those to keep: "
                "surgery.vocabulary.needed(tokenizer, tokens=...) adds what is needed",
                code="argument",
            )
        return new[number]

    if model.get("unk_token") in vocab:
        moved(vocab[model["unk_token"]], "the unknown token")
    if model["type"] == "Unigram":
        model["unk_id"] = None if model["unk_id"] is None else moved(model["unk_id"], "the unknown token")
        model["vocab"] = [model["vocab"][old] for old in numbers if old < len(model["vocab"])]
    else:
        left = sorted((new[number], token) for token, number in vocab.items() if number in new)
        model["vocab"] = {token: number for number, token in left}
    if model["type"] == "BPE":
        for number in sorted(_parts(model | {"vocab": vocab}, vocab, numbers)):
            moved(number, "a part that kept tokens are merged from")
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [[a, b] for a, b in pairs if {a, b, a + b} <= model["vocab"].keys()]
    added = [token for token in data["added_tokens"] if token["id"] in new]
    data["added_tokens"] = [token | {"id": new[token["id"]]} for token in added]
    for holder, key in _special(data["post_processor"]):
        places = [moved(number, "a token that is put around texts") for number in _as_list(holder[key])]
        holder[key] = places if isinstance(holder[key], list) else places[0]
    if data.get("padding"):
        data["padding"]["pad_id"] = moved(data["padding"]["pad_id"], "the padding")
    return _write(tokenizer, data)


def extend(tokenizer: Any, tokens: Sequence[str]) -> Any:
    """Return a copy of a tokenizer with further tokens."""
    if not hasattr(tokenizer, "add_tokens"):
        raise SurgeryError(f"{type(tokenizer).__name__} is no tokenizer: it has no add_tokens", code="unsupported")
    if isinstance(tokens, str):
        raise SurgeryError("tokens is a list of texts, got one text", code="argument")
    twin = copy.deepcopy(tokenizer)
    twin.add_tokens(list(tokens))
    return twin


def _read(tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer of `tokenizers` in another one, and what its file says."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise SurgeryError(
            f"{type(tokenizer).__name__} is not made of the library `tokenizers`: give a fast tokenizer",
            code="unsupported",
        )
    data = json.loads(backend.to_str())
    model = data["model"]
    if model.get("type") not in _MODELS:
        raise SurgeryError(f"a tokenizer of type {model.get('type')!r} is not supported", code="unsupported")
    if model["type"] == "BPE" and model.get("continuing_subword_prefix"):
        raise SurgeryError("BPE with a prefix of continued words is not supported", code="unsupported")
    return backend, data


def _write(tokenizer: Any, data: Mapping[str, Any]) -> Any:
    """Return a tokenizer like another one that says what a file says."""
    from tokenizers import Tokenizer

    with explain("the tokenizer of fewer tokens cannot be made"):
        backend = Tokenizer.from_str(json.dumps(data))
    if not hasattr(tokenizer, "backend_tokenizer"):
        return backend
    twin = copy.deepcopy(tokenizer)
    twin._tokenizer = backend
    return twin


def _vocabulary(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each token."""
    vocab = model["vocab"]
    return dict(vocab) if isinstance(vocab, Mapping) else {token: number for number, (token, _) in enumerate(vocab)}


def _bare(token: str, prefix: str, suffix: str) -> str:
    return token.removeprefix(prefix).removesuffix(suffix) if token not in (prefix, suffix) else token


def _special(part: Any) -> list[tuple[Any, str | int]]:
    """Return (holder, key) of the numbers of tokens that a post-processor adds."""
    if not isinstance(part, Mapping):
        return []
    places = [place for inner in part.get("processors", ()) for place in _special(inner)]
    places += [(part[key], 1) for key in ("sep", "cls") if isinstance(part.get(key), list)]
    special = part.get("special_tokens")
    return places + [(holder, "ids") for holder in (special.values() if isinstance(special, Mapping) else ())]


def _as_list(numbers: Any) -> list[int]:
    return numbers if isinstance(numbers, list) else [numbers]


def _parts(model: Mapping[str, Any], vocab: Mapping[str, int], tokens: Iterable[int]) -> set[int]:
    """Return the tokens from which these are merged, one pair after the other.

    Within a token the pairs are merged in the order in which they are when it stands alone: no other pair reaches over
    its ends, or it would not be a token of that text.
    """
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    ranks = {(a, b): rank for rank, (a, b) in enumerate(pairs)}
    texts = {number: token for token, number in vocab.items()}
    suffix = model.get("end_of_word_suffix") or ""
    needed_parts: set[str] = set()
    for token in filter(None, map(texts.get, tokens)):
        bare = token.removesuffix(suffix) if suffix and token != suffix else token
        parts = [*bare[:-1], bare[-1] + token[len(bare) :]]
        token_parts = set(parts)
        while len(parts) > 1:
            rank, place = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts)))
            if rank == len(ranks):
                break
            parts[place : place + 2] = ["".join(parts[place : place + 2])]
            token_parts.add(parts[place])
        if parts == [token]:
            needed_parts |= token_parts
    return {vocab[part] for part in needed_parts if part in vocab}
