"""The base of the topics of a run's settings: plain values of Python."""

from contextlib import suppress
from dataclasses import dataclass, fields

from fl.base.settings import as_plain, from_yaml, types_of


@dataclass(frozen=True)
class Topic:
    """Settings of a run that are about one thing."""

    def __post_init__(self) -> None:
        """Take numbers of NumPy, lists, and one value where several could be: `width=0.5`."""
        for field in fields(self):
            if (value := getattr(self, field.name)) is field.default:
                continue
            value = as_plain(value)
            if types_of(field.type)[1] and not isinstance(value, tuple):
                with suppress(TypeError):  # which the check of values explains
                    value = from_yaml(field.type, value)
            object.__setattr__(self, field.name, value)
