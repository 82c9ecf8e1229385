"""What a captured step may have read of a model shows in how the model looks."""

from dataclasses import dataclass

import pytest
from torch import nn

from fl.engine.graphs import _looks


@dataclass(slots=True)
class Slots:
    rate: float = 1.0


class Rates(nn.Module):
    """Settings that its printed form does not show."""

    def __init__(self):
        super().__init__()
        self.rate, self.slots, self.known = 1.0, Slots(), {"rates": [1.0]}


def set_rate(module):
    module.rate = 2.0


def set_slot(module):
    module.slots.rate = 2.0


def set_item(module):
    module.known["rates"][0] = 2.0


@pytest.mark.parametrize("change", [set_rate, set_slot, set_item])
@pytest.mark.parametrize("place", range(4))
def test_a_change_shows_in_whichever_module_it_is(place, change):
    model = nn.Sequential(*[Rates() for _ in range(4)])
    before = _looks(model, {})
    assert _looks(model, {}) == before
    hash(before)
    change(model[place])
    assert _looks(model, {}) != before
