"""Parse command lines with tyro, so that a mistake in one is an error of one line."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from io import StringIO
from itertools import pairwise
from typing import Any

from surgery.errors import SurgeryError

_SHORTER = {
    r"could not convert string to float: ('.*')": r"\1 is not a number",
    r"invalid literal for int\(\) with base 10: ('.*')": r"\1 is not a whole number",
    r"invalid choice ('.*') for argument '(.+)'\. Expected one of \((.*?),?\)\.": r"\2: \1 is none of \3",
    r"Missing value for argument '(.+)'\..*": r"\1 needs a value",
    r"Unrecognized options: (.*)": r"\1 is one word too many",
}
"""From what tyro and Python say to what is said here."""


def parse(kind: Callable[..., Any], argv: Sequence[str], prog: str, **options: Any) -> Any:
    """Parse a command line as the arguments of a class or function, and call it.

    Nothing else that is called may print errors.

    Args:
        prog: how the command is called.
        options: further ones of tyro.cli.

    Raises SurgeryError for an unknown flag, and for a value that is missing or wrong.

    >>> parse(lambda: 0, ["--round", "5"], "python -m train")
    Traceback (most recent call last):
    surgery.errors.SurgeryError: unknown flag --round: `python -m train --help` lists the flags
    """
    import tyro  # takes long

    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "1000"  # tyro says each thing on a line
    try:
        with redirect_stderr(StringIO()) as stream:
            return tyro.cli(kind, args=argv, prog=prog, **options)
    except SystemExit as ended:
        if not ended.code:
            raise
        with redirect_stdout(StringIO()) as page, suppress(SystemExit):
            tyro.cli(kind, args=["--help"], prog=prog, **options)
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    declared = re.findall(r"(?:^\W*|  )(--.*?)(?=  |$)", page.getvalue(), re.MULTILINE)  # a wide page has two columns
    flags = {flag for forms in declared for flag in re.findall(r"--([a-z][\w.-]*)", forms)}
    for word in argv:
        flag = word.partition("=")[0].replace("_", "-").removeprefix("--")
        if word.startswith("--") and flag not in flags:
            near = get_close_matches(flag, sorted(flags), n=1)
            way_out = f"did you mean --{near[0]}?" if near else f"`{prog} --help` lists the flags"
            raise SurgeryError(f"unknown flag --{flag}: {way_out}", code="argument")
    message = _core(stream.getvalue())
    for word, after in pairwise([*argv, ""]):
        flag, _, value = word.removeprefix("--").partition("=")
        value = value or after
        if word.startswith("--") and f"no-{flag}" in flags and message.startswith(f"{value} is one word too many"):
            message = f"--{flag} takes no value: it is --{flag} or --no-{flag}, not {value!r}"
    raise SurgeryError(f"{message}: see `{prog} --help`", code="argument")


def _core(box: str) -> str:
    """Return the text of one of tyro's boxes in a line: its first part and the flag."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", box).replace("│", " ").splitlines()  # without colours
    if len(plain) < 3:
        return " ".join(plain).strip()
    title = 2 if set(plain[1].strip()) == {"-"} else 1  # where the output is ASCII, a line is below it
    rows = [line[2:].rstrip() for line in plain[title:]]
    end = next((at for at, row in enumerate(rows) if re.fullmatch("[─-]+", row)), len(rows))
    missing = rows[0].startswith("Missing from ")
    forms = [row.strip() for row in rows[: end if missing else None] if re.match(r" {4}\S", row)]  # as `--lr FLOAT>0`
    if missing:
        return f"missing: {', '.join(forms)}"
    text = " ".join(map(str.strip, rows[:end]))
    for pattern, shorter in _SHORTER.items():
        text = re.sub(pattern, shorter, text)
    return f"{forms[0]}: {text.partition(': ')[2]}" if "Argument helptext:" in rows else text
