"""Tables as wide as the terminal."""

import sys

import pytest

from fl.base.tables import fitted, terminal, wrapped
from fl.runs.__main__ import Listed, table

CELLS = [["method", *(f"column {n}" for n in range(12))], *([name, *["1.0"] * 12] for name in ("fedavg", "fedmr"))]
LONG = [["method", "seeds"], ["fedavg alpha=0.1 " + 30 * "x", "1"], ["fedavg alpha=0.5 " + 30 * "x", "1"]]
RUNS = [Listed(f"runs/{name}-digits-cnn-seed0", name, "digits", "cnn", "4/4", "9.00%", "finished") for name in "ab"]


@pytest.fixture(params=[80, 120])
def width(request, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def widest(text):
    return max(map(len, text.splitlines()))


def test_a_table_fits_the_terminal_and_keeps_every_column(width):
    assert widest(wrapped(CELLS)) > 120
    text = fitted(CELLS)
    assert widest(text) <= width
    assert text.split().count("column") == 12


def test_long_names_are_shortened_and_the_table_says_so(width):
    text = fitted(LONG)
    assert widest(text) <= width
    if width == 80:
        assert "(names are shortened to fit the terminal" in text
        assert text.splitlines()[1].startswith("fedavg alpha=0.1 xxx…xxx")
    else:
        assert text == wrapped(LONG)
    assert "…" not in fitted(
        [["method", "seeds"], [100 * "x" + "a" + 100 * "x", "1"], [100 * "x" + "b" + 100 * "x", "1"]]
    )


def test_a_file_or_a_pipe_gets_all_of_it(capsys):
    assert terminal() is None
    assert (fitted(CELLS), fitted(LONG)) == (wrapped(CELLS), wrapped(LONG))


@pytest.mark.parametrize(
    ("columns", "heads", "said"),
    [
        (80, "folder method data model rounds accuracy state", ""),
        (70, "folder method data rounds accuracy state", "(without model to fit"),
        (62, "folder method rounds accuracy state", "(without model, data to fit"),
        (50, "folder rounds accuracy state", "(without model, data, method; with shortened folders to fit"),
    ],
)
def test_the_list_of_runs_leaves_out_what_the_folder_s_name_says(columns, heads, said):
    lines = table(RUNS, columns).splitlines()
    assert lines[0].split() == heads.split()
    assert max(map(len, lines[:3])) <= columns
    assert (lines[4] if said else "").startswith(said)
    assert ("…" in lines[1]) == ("shortened" in said)
