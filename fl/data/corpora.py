"""Texts: Python's documentation topics (bundled), WikiText-2, Shakespeare's speakers, and any file of plain text."""

import hashlib
import re
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

from fl.base.errors import FLError
from fl.base.files import replacing
from fl.data.dataset import Dataset
from fl.data.loader import Loader, Source
from fl.data.text import TextOptions, dataset

WIKITEXT = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
MD5 = {  # of the files at these addresses; we could not verify one for train.txt
    "wikitext-2/valid.txt": "d756d22ab2310e7e60c094bea5c5a8eb",
    "wikitext-2/test.txt": "781c9418ab9414bd09e4aad825aae752",
    "tinyshakespeare/input.txt": "6fb458f1232090904fb40fe944165e91",
}


def pydoc(root: Path, download: bool, options: TextOptions = TextOptions()) -> Dataset:
    """Load the topics of Python's own documentation (`help("if")`). Each topic is an owner; a tenth is for testing.

    Source: `pydoc_data.topics` of the Python that runs; the text differs a little from version to version. Long topics
    repeat short ones (a fifth of all text is repetition). Every paragraph is therefore kept once, in the shortest topic
    that has it, so that nothing is in the training part of one topic and in the test part of another.

    Args:
        root, download: unused, since the text comes with Python.

    >>> topics = pydoc(Path(), False)
    >>> topics.x.shape[1], topics.vocabulary[0], "statement" in topics.vocabulary, len(topics.owners.unique()) > 40
    (64, '<unk>', True, True)
    """
    del root, download
    from pydoc_data.topics import topics

    return dataset("pydoc", list(_unrepeated(topics).values()), options)


def wikitext2(root: Path, download: bool, options: TextOptions = TextOptions(), training: str = "train") -> Dataset:
    """Load WikiText-2 (Merity et al. 2016): good and featured articles of Wikipedia, each an owner; it has a test part.

    The files are tokenised already, with <unk> for rare words; `--text.vocabulary 0` keeps the 33,278 words that are
    left. They are in root/wikitext-2, under their published names (wiki.train.tokens, ...) or those of the download:
    train.txt, valid.txt and test.txt.

    Args:
        root: the folder that holds wikitext-2/.
        download: fetch missing files from PyTorch's examples.
        training: the part to train on; `valid` is for small experiments (`--dataset wikitext-2-valid`).

    Raises:
        FLError: for missing or damaged files.
    """
    needed = (training, "test")
    origin = f"The names {training}.txt and test.txt are accepted as well"

    def source() -> Source:
        """Name each file as it is there, or else as it is published."""
        names = []
        for part in needed:
            either = (f"wikitext-2/wiki.{part}.tokens", f"wikitext-2/{part}.txt")
            names.append(next((file for file in either if (root / file).is_file()), either[0]))
        return Source("WikiText-2", root, tuple(names), origin)

    def fetch() -> None:
        for part, file in zip(needed, source().files):
            if not (root / file).is_file():
                _fetch(WIKITEXT, root, f"wikitext-2/{part}.txt")

    valid = any((root / "wikitext-2" / name).is_file() for name in ("valid.txt", "wiki.valid.tokens"))
    hint = "; --dataset wikitext-2-valid trains on the validation file" if training == "train" and valid else ""
    source().require(download, fetch, hint)
    train, test = (_articles(_read(source(), file)) for file in source().files)
    name = "wikitext-2" if training == "train" else f"wikitext-2-{training}"
    return dataset(name, train, options, test=test, spaced=True)


def shakespeare(root: Path, download: bool, options: TextOptions = TextOptions()) -> Dataset:
    """Load 40,000 lines of Shakespeare (Karpathy's tiny Shakespeare). Each speaker is an owner; a tenth is for testing.

    All that a speaker says is one document, in the file's order, without the name above every speech.

    Args:
        root: the folder that holds tinyshakespeare/input.txt.
        download: fetch it from github.com/karpathy/char-rnn if it is missing.

    Raises:
        FLError: if it is missing or damaged.
    """
    file = "tinyshakespeare/input.txt"
    source = Source("Shakespeare", root, (file,))
    source.require(download, lambda: _fetch(SHAKESPEARE, root, file))
    speeches: dict[str, list[str]] = {}
    for block in _read(source, file).split("\n\n"):
        name, _, speech = block.strip("\n").partition("\n")
        if not name.endswith(":"):
            raise source.damaged(file, f"{name[:40]!r} where a speaker's name and a colon should be")
        speeches.setdefault(name, []).append(speech + "\n")
    return dataset("shakespeare", ["\n".join(said) for said in speeches.values()], options)


def plain(root: Path, path: str, options: TextOptions = TextOptions()) -> Dataset:
    """Load a file of text in UTF-8 as one document without owners; its last tenth is for testing.

    Args:
        path: of the file; absolute, or relative to the working directory or, if it is not there, to root.

    Raises:
        FLError: if it is missing or not text.
    """
    name, file = f"text:{path}", Path(path).expanduser()
    where = Path() if file.is_file() else root
    if not (where / file).is_file():
        also = "" if file.is_absolute() else f", nor in {root}"
        raise FLError(f"--dataset {name}: there is no file {path}{also}")
    return dataset(name, [_read(Source(name, where, (path,)), file)], options, owned=False)


def _unrepeated(topics: Mapping[str, str]) -> dict[str, str]:
    r"""Keep every paragraph in the shortest of its texts only. How lines are broken does not matter.

    >>> _unrepeated({"long": "One and\ntwo.\n\nThree.", "short": "One\nand two."})
    {'long': 'Three.', 'short': 'One\nand two.'}
    """
    seen: set[str] = set()
    kept = {}
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        paragraphs = {" ".join(text.split()): text for text in re.split(r"\n\s*\n", topics[name])}
        kept[name] = "\n\n".join(text for key, text in paragraphs.items() if key not in seen)
        seen |= paragraphs.keys()
    return {name: kept[name] for name in sorted(kept)}


def _articles(text: str) -> list[str]:
    r"""Split WikiText into its articles. Each begins with its title, ` = Title = ` between blank lines.

    >>> _articles(" \n = A = \n \n a \n = b = \n \n = = C = = \n \n = D = \n \n")
    [' \n = A = \n \n a \n = b = \n \n = = C = = \n \n', ' = D = \n \n']
    """
    lines = text.splitlines(keepends=True)
    blank = [not line.strip() for line in lines]
    starts = [
        i
        for i, line in enumerate(lines)
        if re.match(r" = [^=].* = *$", line) and all(blank[max(0, i - 1) : i] + blank[i + 1 : i + 2])
    ]
    cuts = [0, *starts[1:], len(lines)]
    return ["".join(lines[a:b]) for a, b in pairwise(cuts)]


def _read(source: Source, file: str | Path) -> str:
    try:
        return (source.root / file).read_text("utf-8")
    except (OSError, ValueError) as error:  # text that is not UTF-8 raises a ValueError
        raise source.damaged(str(file), error) from error


def _fetch(address: str, root: Path, file: str) -> None:
    """Download a file into root, whole or not at all. Raises OSError or ValueError if that fails."""
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
