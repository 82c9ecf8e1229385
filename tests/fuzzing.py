"""Commands drawn at random from the flags that there are, with values that are right, at a limit, or absurd.

`wrong` judges how they end.
"""

import contextlib
import io
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import Field, fields

from hypothesis import strategies as st

from fl.algorithms import ALGORITHMS
from fl.base.settings import Alternatives, Bounds, Flag, flag_of, marks, types_of
from fl.settings.flags import Command, entries

NONSENSE = ("", "x", "nan", "inf", "-1", "0", "1e300", "1" + "0" * 21, "1,,2", "--", "{}", "\N{SNOWMAN}")
"""Values that hardly any flag takes. None of them asks for a lot of work that could be done."""

FIXED = {"out", "download", "data-root", "resume"}
"""Flags that say where files lie, or that may reach for the network."""

TINY = "--clients 4 --participants 2 --rounds 1 --samples 80 --min-samples 1 --local-epochs 1 --width 0.05 --device cpu"


class TooSlow(BaseException):
    """A command has taken too long. Like KeyboardInterrupt it is no Exception."""


def settings() -> Iterator[tuple[str, Field]]:
    """(flag, field) of all settings."""
    for inside in entries(ALGORITHMS).values():
        for name, one in inside.items():
            several = fields(one.default) if one.group else (one.field,)
            yield from ((flag_of(f.name, name) if one.group else flag_of(name), f) for f in several)
    yield from ((flag_of(f.name), f) for f in fields(Command))


def values(field: Field) -> tuple[str, ...]:
    """Words for a setting: some that it takes, those around its limits, and nonsense."""
    kinds, several = types_of(field.type)
    found: list[str] = [name for mark in marks(field, Alternatives) for name in mark.options()]
    for mark in marks(field, Flag):
        if isinstance(mark.items, Bounds):
            step = 1 if int in kinds else 1e-9
            edges = (mark.items.least, mark.items.above, mark.items.most, mark.items.below)
            for edge in (edge for edge in edges if edge is not None):
                found += [str(edge), str(edge - step), *([str(edge + step)] if abs(edge) < 100 else [])]
        elif mark.items:
            found += list(mark.items)
    found += {int: ("1", "2"), float: ("0.5", "1e-3")}.get(kinds[0] if kinds else str, ())
    if several:
        found += [",".join(found[:2]), ",".join(found[:1] * 3), "all", "own"]
    return (*found, *NONSENSE)


@st.composite
def flags(draw: Callable) -> list[str]:
    """Some flags of a run."""
    argv: list[str] = []
    for flag, field in draw(st.lists(st.sampled_from(EVERY), max_size=4)):
        if types_of(field.type)[0] == (bool,):
            argv.append(draw(st.sampled_from([f"--{flag}", f"--{flag}=x"])))
        else:
            argv += [f"--{flag}", draw(st.sampled_from(values(field)))]
    return argv


EVERY = [(flag, field) for flag, field in settings() if flag not in FIXED]


@st.composite
def helped(draw: Callable) -> list[str]:
    """Some flags of a run and --help among them, which may follow a flag that takes a value."""
    argv = draw(flags())
    methods = st.sampled_from(["fedmr", "femam,heterofl", "fedavg+", *NONSENSE])
    argv += draw(st.one_of(st.just([]), methods.map(lambda name: ["--algorithm", name])))
    place = draw(st.integers(0, len(argv)))
    return [*argv[:place], draw(st.sampled_from(["--help", "-h"])), *argv[place:]]


WORDS = (
    *("1e-9", "0.5", "1", "2", "3", "4", "101", "1001", "65537", "2147483649", "1,0.5", "1,1,1,1", "501,1,1,1"),
    *("3,1,1", "3,99999999,99999999", "test", "train", "inside", "batch", "none", "rounds", "macs", "cpu", "a.gif"),
)
"""Values of which each of the other commands takes some."""


@st.composite
def others(draw: Callable, known: str, most: int = 3) -> list[str]:
    """Some flags of another command, each with some value."""
    flags = draw(st.lists(st.sampled_from(known.split()), max_size=most, unique=True))
    return [word for flag in flags for word in (f"--{flag}", draw(st.sampled_from((*WORDS, *NONSENSE))))]


def wrong(main: Callable[[list[str]], int], argv: list[str], seconds: float = 60) -> str:
    """What is wrong with how a command ends: a traceback, more seconds of the CPU than the limit, an odd exit code, or
    an error of which nothing is said; "" if it ends well.
    """

    def stop(*_: object) -> None:
        raise TooSlow

    err, before = io.StringIO(), signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # surgery's own limit has the other timer
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(argv)
    except SystemExit as error:
        code = error.code or 0
    except TooSlow:
        return f"{argv} took more than {seconds} s"
    except BaseException:
        return f"{argv}\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    said = err.getvalue()
    diverged = code == 1 and "error: training diverged" in said
    if (code not in (0, 2) and not diverged) or "Traceback" in said or (code == 2 and not said.strip()):
        return f"{argv} ended with {code} and said {said!r}"
    return ""
