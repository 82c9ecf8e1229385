"""The pages that people read, and what is in their fences."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
    ]
}
"""From the path of a page, as seen from the root, to its text."""

EXAMPLES = ("NAME", "fedavgm", "squares", "mlp")
"""What stands in the pages for a file that a reader adds."""

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fence: its language, what is in it, and the fence of text after it, which is what it prints."""

    language: str
    code: str
    output: str
    line: int


def blocks(text: str, *languages: str) -> list[Block]:
    """The fences of these languages, in the order of the page."""
    found = [
        Block(match[1], match[2], match[3] or "", text.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(text)
    ]
    return [block for block in found if block.language in languages]
