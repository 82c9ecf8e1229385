"""Jobs that users of other tools reported or asked for, each done with this library and checked.

A wish is a row of wishes.csv and a function of its name: the body is what a user writes, asserts compare with something
independent. What cannot be done is in the table, too: its function has to end in the error of the column `code`.
"""

import ast
import csv
import inspect
import io
import os
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch


class Wish(NamedTuple):
    """A job, in plain words, and a function that does it.

    Attributes:
        theme: the module that the function stands in.
        name: of the function.
        job: what the user wants.
        source: the projects and issues where it was reported or asked for.
        seen: what was reported there.
        code: for a job that is refused: the code of the SurgeryError, or the name of the error's type.
        why: for such a job: "on purpose", or "not yet".
    """

    theme: str
    name: str
    job: str
    source: str
    seen: str
    code: str
    why: str

    @property
    def run(self) -> Callable[[], None]:
        """The function."""
        function: Callable[[], None] = getattr(import_module(f"benchmarks.wishes.{self.theme}"), self.name)
        return function


class Outcome(NamedTuple):
    """What became of a wish: whether the job was done, else the library's words, and how long it took."""

    wish: Wish
    works: bool
    message: str
    seconds: float


def wishes() -> list[Wish]:
    """Read the table."""
    with (Path(__file__).parent / "wishes.csv").open(newline="") as file:
        return [Wish(**row) for row in csv.DictReader(file)]


def attempt(one: Wish) -> Outcome:
    """Run a wish in an empty folder, with random numbers of its own.

    Raises what the function raises, unless it is the error that is named; AssertionError if that one does not come.
    """
    torch.manual_seed(0)
    run = one.run
    before, start = os.getcwd(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                run()
        except Exception as error:
            if not one.code or one.code not in (getattr(error, "code", ""), type(error).__name__):
                raise
            return Outcome(one, False, str(error), time.perf_counter() - start)
        finally:
            os.chdir(before)
    assert not one.code, f"{one.job}: it works, and should be refused"
    return Outcome(one, True, "", time.perf_counter() - start)


def count_lines(job: Callable) -> int:
    """Count the lines of a function without its asserts, comments, docstring and blank lines."""
    text = textwrap.dedent(inspect.getsource(job))
    function = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    rows = set(range(function.body[0].lineno, (function.end_lineno or 0) + 1))
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            rows -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = text.splitlines()
    return sum(1 for row in rows if lines[row - 1].strip() and not lines[row - 1].strip().startswith("#"))


def error_of(function: Callable[[], object]) -> BaseException | None:
    """Return the error that a function raises, None if it returns."""
    try:
        function()
    except Exception as error:
        return error
    return None
