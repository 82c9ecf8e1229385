"""Pages of `--help`."""

from fl.settings.help import _lines


def test_lines__keep_commands_on_one_line_where_they_fit():
    assert _lines("all settings: `python -m train --help all`. More", 35) == [
        "all settings:",
        "`python -m train --help all`. More",
    ]
    assert _lines("see `python -m train --help all`", 12) == ["see `python", "-m train", "--help all`"]
