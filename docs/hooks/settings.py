"""The reference of `fl.Config` by meaning: what `python -m fl.run --help all` shows, from the same table, as a page."""

import json
import re
import subprocess
import sys
from pathlib import Path

from gallery import ROOT, state

CACHE = ROOT / "build/settings"
NAME = "reference/config.md"
_ASK = "import json; from fl.settings.help import every_setting; print(json.dumps(every_setting()))"


def sections(cache: Path = CACHE) -> str:
    """Return what comes after the page's first words.

    The packages are asked once for each of their states, in a process of its own.
    """
    kept = cache / f"{state(Path(__file__))}.json"
    if not kept.exists():
        asked = subprocess.run([sys.executable, "-c", _ASK], cwd=ROOT, capture_output=True, text=True, check=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(asked.stdout)
    parts = [""]
    for title, settings in json.loads(kept.read_text()).items():
        parts += [f"## {title[0].upper()}{title[1:]}\n", *(_entry(*one) for one in settings.items())]
    return "\n".join(parts)


def _entry(written: str, text: str) -> str:
    """Return a setting of the page.

    >>> print(_entry("--local-epochs INT>=1", "how often (default: 5)"))
    **`local_epochs`** `INT>=1`, default `5`
    :   how often
    <BLANKLINE>
    """
    flag, _, values = written.removeprefix("--").partition(" ")
    values = "yes or no" if flag.endswith(",") else values
    text, _, default = " ".join(text.split()).partition(" (default: ")
    name = flag.rstrip(",").replace("-", "_")
    default = f", default `{default.removesuffix(')')}`" if default else ""
    return f"**`{name}`** `{values}`{default}\n:   {_plain(text)}\n"


def _plain(text: str) -> str:
    """Return a text of the command line, in which Markdown sees no links and no tags."""
    flags = re.sub(r"(?<![`\w-])(--[\w.-]*\w)", r"`\1`", text)
    return re.sub(r"([\[\]*<])(?![^`]*`[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", flags)
