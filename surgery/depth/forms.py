"""How a section may change its depth, and the search for the way in which a model runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar

from torch import nn

from surgery.depth.counts import recounted
from surgery.depth.numbers import numbers
from surgery.depth.sections import Section
from surgery.depth.tree_edits import is_list, is_sequential
from surgery.errors import SurgeryError

T = TypeVar("T")


class Form(NamedTuple):
    """One way in which a section changes its depth.

    Attributes:
        resize: whether the list that holds the blocks changes its length. Otherwise it keeps it: new blocks are chained
            to the last one, and a `Skip` takes the place of a dropped one.
        recount: whether attributes that count the blocks (`config.num_hidden_layers`) follow.
    """

    resize: bool
    recount: bool


def forms(
    model: nn.Module, found: Sequence[Section], section: Section, kept: Sequence[int], example: Any
) -> list[Form]:
    """The ways to try, the first one first. Without an example nothing can be tried, so there is one.

    That one leaves the length of a ModuleList alone, since the code that runs its entries is not known: it may index
    them. Counts then follow where blocks are numbered, since what a block looks up by its number has to be there.
    """
    holder = model.get_submodule(section.name.partition("#")[0])
    counted = bool(recounted(model, found, {section: kept}))
    sequential, fewer = is_sequential(holder), len(kept) < len(section.blocks)
    resizable = is_list(holder) or (sequential and fewer)
    if example is None:
        return [Form(resizable and sequential, counted and bool(numbers(model, section)))]
    ways = product([True, False] if resizable else [False], [True, False] if counted else [False])
    return [Form(resize, recount) for resize, recount in ways]


def first_that_works(ways: Mapping[Section, Sequence[Form]], attempt: Callable[[Mapping[Section, Form]], T]) -> T:
    """What `attempt` returns for the first form of each section for which it does not raise a SurgeryError.

    If the first forms of all do not work together, each section's is found with the other sections left as they are.
    """
    first = {section: options[0] for section, options in ways.items()}
    try:
        return attempt(first)
    except SurgeryError:
        if all(len(options) == 1 for options in ways.values()):
            raise
    chosen = {section: _alone(section, options, attempt) for section, options in ways.items()}
    return attempt(chosen)


def _alone(section: Section, options: Sequence[Form], attempt: Callable[[Mapping[Section, Form]], Any]) -> Form:
    errors = []
    for form in options:
        try:
            attempt({section: form})
        except SurgeryError as error:
            errors.append(error)
        else:
            return form
    raise errors[0]
