"""Jobs that users of other tools asked for: benchmarks/wishes does most, and its page is of these."""

import re
from pathlib import Path

import pytest

from benchmarks.wishes import attempt, count_lines, wishes

PAGE = (Path(__file__).parent.parent / "docs/results/wishes.md").read_text()
QUICK = (
    "folders_of_classes", "own_test_rows", "given_channels", "zeroed_channels", "other_shapes", "backbones",
    "read_rslora", "subtract", "fake_quantisers", "experts_in_a_list",
)  # fmt: skip
ALL = {one.name: one for one in wishes()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in ALL])
def test_wishes__a_wish(name):
    if name == "text_labels":
        pytest.importorskip("datasets")
    outcome = attempt(ALL[name])
    assert outcome.works == (not ALL[name].code)
    assert count_lines(ALL[name].run) <= 20


def test_wishes__most_wishes_work():
    assert len(ALL) == 83
    assert sum(not one.code for one in ALL.values()) >= 72
    assert all(one.why in ("on purpose", "not yet") for one in ALL.values() if one.code)


def test_wishes__the_page_has_all_wishes():
    rows = re.findall(r"^\| (?!job|---)(.+?) \| (\d+ \||refused)", PAGE, re.MULTILINE)
    assert rows == [(one.job, "refused" if one.code else f"{count_lines(one.run)} |") for one in ALL.values()]
