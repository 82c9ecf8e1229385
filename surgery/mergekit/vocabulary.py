"""Tokenizers of a merge, and the tables with a row for each token, brought into the order of the new one."""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, first_line
from surgery.files import Checkpoint
from surgery.lazy import Pieces
from surgery.mergekit.config import Config, parts_of

_log = logging.getLogger(__name__)
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""What a tokenizer may have written: of another one these files are left out."""


class Vocabulary:
    """The tokens of the result, and where each is in every model.

    A token that a model lacks has the row of the base model, or if that lacks it, too, the mean of the rows of those
    that have it; 0 where none has it.

    Args:
        config: says where the tokenizer comes from.
        opened: the models by their paths.
        module: the first model, which shows the tables that belong to tokens.
    """

    def __init__(self, config: Config, opened: Mapping[str, Checkpoint], module: nn.Module) -> None:
        loaded = {path: _tokenizer(path) for path in config.models}
        sizes = {path: _rows(module, one, path) for path, one in opened.items()}
        self.tables = _tables(module)
        if config.tokenizer == "union":
            self.tokenizer = _union(config, loaded, sizes)
        else:
            self.tokenizer = _tokenizer(str(config.base if config.tokenizer == "base" else config.tokenizer))
        self.tokens = self.tokenizer.get_vocab()
        count = len(self.tokens)
        if sorted(self.tokens.values()) != [*range(count)]:
            raise SurgeryError(f"tokenizer_source: the tokens of {config.tokenizer} are not numbered 0 to {count - 1}")
        self.size = -(-count // (config.pad or 1)) * (config.pad or 1)
        self.places: dict[str, Tensor] = {}
        for path, tokenizer in loaded.items():
            own, places = tokenizer.get_vocab(), torch.full((count,), -1)
            for token, i in self.tokens.items():
                places[i] = own.get(token, -1)
            self.places[path] = places.where(places < sizes[path], -1)
        nowhere = [token for token, i in self.tokens.items() if all(one[i] < 0 for one in self.places.values())]
        if nowhere:
            _log.warning("%d tokens such as %r have a row in no model, and get zeros", len(nowhere), nowhere[0])

    def files(self) -> dict[str, bytes]:
        """What the tokenizer writes, by name."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            return {file.name: file.read_bytes() for file in Path(folder).iterdir()}

    def permuted(self, name: str, found: Mapping[str, Pieces], base: str | None) -> dict[str, Pieces]:
        """The tensors of the models with a row for each token of the result, if they are a table of tokens."""
        if name not in self.tables:
            return dict(found)
        there = torch.stack([self.places[path] >= 0 for path in found])
        donors = there.clone()  # by model which tokens it gives to those that lack them
        if base in found:
            donors[:, self.places[base] >= 0] = False
            donors[[*found].index(base)] = self.places[base] >= 0

        def make(path: str) -> Tensor:
            own, places = found[path].whole(), self.places[path]
            result = own.new_zeros(self.size, *own.shape[1:])
            lacking = (places < 0) & donors.any(0)
            result[: len(places)][places >= 0] = own[places[places >= 0]]
            shares = donors.sum(0)
            for other, gives in zip(found, donors):
                rows = (lacking & gives).nonzero().flatten()
                if len(rows):
                    given = _some_rows(found[other], self.places[other][rows]).to(result)
                    result[rows] += given / shares[rows].view(-1, *[1] * (given.ndim - 1))
            if self.size > len(places):
                result[len(places) :] = result[: len(places)].mean(0)
            return result

        return {
            path: Pieces.computed((self.size, *one.shape[1:]), one.dtype, partial(make, path))
            for path, one in found.items()
        }


def _some_rows(pieces: Pieces, rows: Tensor) -> Tensor:
    width = pieces.size // pieces.shape[0]
    read = [pieces.read(row * width, (row + 1) * width) for row in rows.tolist()]
    return torch.stack(read).view(-1, *pieces.shape[1:])


def _tokenizer(path: str) -> Any:
    try:
        import transformers

        return transformers.AutoTokenizer.from_pretrained(parts_of(path)[0], local_files_only=True)
    except Exception as error:  # transformers' own, of all kinds
        raise SurgeryError(f"tokenizer_source: {path} holds no tokenizer: {first_line(error)}") from None


def _tables(module: Any) -> dict[str, int]:
    """The tensors with a row for each token, by all of their names, and how many rows each has."""
    holders = [module.get_input_embeddings(), module.get_output_embeddings()]
    mine = {id(one): len(one) for holder in holders if holder is not None for one in holder.parameters()}
    return {name: mine[id(one)] for name, one in module.state_dict(keep_vars=True).items() if id(one) in mine}


def _rows(module: nn.Module, checkpoint: Checkpoint, path: str) -> int:
    """How many tokens a model has rows for."""
    names = [name for name in _tables(module) if name in checkpoint]
    if not names:
        raise SurgeryError(f"tokenizer_source: {path} has no table of tokens such as {next(iter(_tables(module)))!r}")
    return min(checkpoint.pieces(name).shape[0] for name in names)


def _union(config: Config, loaded: Mapping[str, Any], sizes: Mapping[str, int]) -> Any:
    """The first model's tokenizer with the tokens that only others have, in the order of their numbers there."""
    made = _tokenizer(config.models[0])
    known, added = set(made.get_vocab()), {}
    for path, tokenizer in loaded.items():
        special = {i: one for i, one in tokenizer.added_tokens_decoder.items() if i < sizes[path]}
        contents = {one.content for one in special.values()}
        for token, i in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
            if i < sizes[path] and token not in contents and token not in known:
                made.add_tokens(token)
                known.add(token)
        for one in special.values():
            added.setdefault(one.content, one)
    for content, one in added.items():
        if content not in known:
            made.add_tokens(one)
    return made


def templates(
    config: Config, opened: Mapping[str, Checkpoint], beside: Mapping[str, bytes | None]
) -> dict[str, bytes | None]:
    """The files by which the folder's tokenizer has the chat template: the given one, or that of most models."""
    template = config.chat_template
    if template == "auto":
        found = [text.strip() for path in opened if (text := _template(Path(parts_of(path)[0])))]
        if not found:
            raise SurgeryError("chat_template: auto, but no model has one: leave it out, or give the template itself")
        template = Counter(found).most_common(1)[0][0]
    donor = Path(parts_of(config.models[0])[0])
    settings = beside.get("tokenizer_config.json")
    if settings is None and (donor / "tokenizer_config.json").is_file():
        settings = (donor / "tokenizer_config.json").read_bytes()
    if settings is None:
        raise SurgeryError(f"chat_template: {donor} has no tokenizer, which would use it")
    others = {key: value for key, value in json.loads(settings).items() if key != "chat_template"}
    return {
        "chat_template.jinja": str(template).encode(),
        "chat_template.json": None,
        "tokenizer_config.json": (json.dumps(others, indent=2) + "\n").encode(),
    }


def _template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text()
    if (folder / "tokenizer_config.json").is_file():
        found = json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")
        return found if isinstance(found, str) else None
    return None
