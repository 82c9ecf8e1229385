"""A stack and a list of the same states: every operation gives the same models, each in its own form."""

import pytest
import torch

from fl.engine import Results
from fl.federation import cohort
from surgery import stack, unstack


@pytest.fixture
def states():
    generator = torch.Generator().manual_seed(0)
    each = [{"w": torch.randn(2, 3, generator=generator), "steps": torch.tensor(k)} for k in range(4)]
    return {"stack": stack(each), "list": each}


FORMS = ["stack", "list"]


def same(found, expected, form):
    """`found` has this form, and is the list `expected`."""
    assert isinstance(found, dict if form == "stack" else list)
    found = unstack(found) if form == "stack" else found
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [[2, 0], [1, 2], [3], [0, 1, 2, 3], [1, 3]])
def test_rows_are_selected_and_replaced(states, form, rows):
    own, every = states[form], states["list"]
    chosen = cohort.select(own, rows)
    same(chosen, [every[k] for k in rows], form)
    assert torch.equal(cohort.select(own, rows, stacked=True)["w"], torch.stack([every[k]["w"] for k in rows]))
    new = [{name: tensor + 7 for name, tensor in every[k].items()} for k in rows]
    after = [new[rows.index(k)] if k in rows else state for k, state in enumerate(every)]
    same(cohort.replace_rows(own, rows, new if form == "list" else stack(new)), after, form)


@pytest.mark.parametrize("form", FORMS)
def test_stacks_have_an_inverse(states, form):
    parts = cohort.stacks(states[form])
    assert [len(part["w"]) for part in parts] == ([4] if form == "stack" else [1] * 4)
    same(cohort.as_before(states[form], parts), states["list"], form)
    same(cohort.per_client(states[form]), states["list"], "list")


@pytest.mark.parametrize("form", FORMS)
def test_parts_come_together_in_the_cohorts_order(states, form):
    every, losses = states["list"], torch.arange(4.0)
    rows = [[0, 1], [2, 3]] if form == "stack" else [[2, 0], [3, 1]]
    parts = [(some, Results(stack([every[k] for k in some]), losses[some])) for some in rows]
    found, loss = cohort.joined(parts, states[form])
    same(found, every, form)
    assert torch.equal(loss, losses)


def test_an_entry_is_each_clients_own():
    values = torch.tensor([[1.0], [2.0]])
    assert cohort.with_entry({}, "held", values) == {"held": values}
    first, second = cohort.with_entry([{"a": 0}, {"a": 1}], "held", values)
    assert (first, second) == ({"a": 0, "held": values[0]}, {"a": 1, "held": values[1]})
