"""Which of many cases run by default: those that differ in kind. The rest are slow tests, of which
`.ci/run` runs a few more of each (`tests/conftest.py`), and `.ci/run --all` all.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle

import pytest

METHODS = ("fedavg", "fedgen", "fedmr", "clusamp", "femam", "fedrep", "fedfa", "pfedme")
"""One of each kind of what servers keep: a model, a generator, K models, gradients, levels, bodies and heads, clients'
plans, and personal models and envelopes. Of most tests every other one runs by default."""


def some(cases: Iterable, default: Sequence) -> list:
    """All cases, those slow that are not among the default ones."""
    cases = list(cases)
    assert set(map(str, default)) <= set(map(str, cases)), "a default case is none of the cases"
    marked = [(case if isinstance(case, tuple) else (case,), case in default) for case in cases]
    return [pytest.param(*case, marks=[] if quick else [pytest.mark.slow]) for case, quick in marked]


def in_turn(cases: Iterable, others: Sequence, default: Sequence) -> list:
    """Each case with one of the others, in turn, in place of every pair; the default cases are not marked slow.

    For behaviour that all cases share (one implementation), where testing every pair would find little more. Which of
    the others a case gets depends on its place: a case that is added in the middle moves those behind it.
    """
    pairs = [*zip(default, cycle(others)), *zip([case for case in cases if case not in default], cycle(others))]
    return some(pairs, pairs[: len(default)])
