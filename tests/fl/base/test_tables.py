"""Tables as wide as the terminal."""

import sys

import pytest

from fl.base.tables import fit_terminal, wrap_columns

CELLS = [["method", *(f"column {n}" for n in range(12))], ["fedavg", *["1.0"] * 12], ["fedmr", *["2.0"] * 12]]


@pytest.fixture(params=[80, 120])
def width(request, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("NO_COLOR", "1")
    return request.param


def widest(text):
    return max(map(len, text.splitlines()))


def test_tables__a_table_fits_the_terminal_and_keeps_every_column(width):
    assert widest(wrap_columns(CELLS)) > 120
    text = fit_terminal(CELLS)
    assert widest(text) <= width
    assert text.split().count("column") == 12


def test_tables__columns_of_equal_cells_stand_below_a_table_that_does_not_fit(width):
    cells = [[*line, equal] for line, equal in zip(CELLS, ("seeds", "3", "3"))]
    assert fit_terminal(cells) == f"{fit_terminal(CELLS)}\nall rows: seeds 3"
    assert (
        fit_terminal([line[:3] + line[-1:] for line in cells]).split()[-1] == "3"
    )  # fits, so that it stays in the table


def test_tables__headings_are_bold_on_a_terminal(width, monkeypatch):
    plain = fit_terminal(CELLS)
    monkeypatch.delenv("NO_COLOR")
    bold = fit_terminal(CELLS)
    assert bold.replace("\033[1m", "").replace("\033[0m", "") == plain
    assert [line.startswith("\033[1mmethod") and line.endswith("\033[0m") for line in bold.splitlines()] == [
        line.startswith("method") for line in plain.splitlines()
    ]


def test_tables__a_file_or_a_pipe_gets_all_of_it(capsys):
    assert fit_terminal(CELLS) == wrap_columns(CELLS)


def test_tables__numbers_stand_for_long_labels_of_a_table_in_parts():
    long = [[f"{line[0]} clients=10 local_epochs=2 rounds=15", *line[1:]] for line in CELLS]
    text = wrap_columns(long, 100)
    assert all(text.count(line[0]) == 1 for line in long)
    assert widest(text) <= 100
    assert wrap_columns(long, 300).count("clients=10") == len(long)
    assert "#" not in wrap_columns(long, 300)
    assert wrap_columns(long, 1).count("clients=10") == len(long)  # even where nothing fits
