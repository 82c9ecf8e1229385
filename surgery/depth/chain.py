"""The modules that grafting and dropping leave in a model: rows of blocks, and gaps."""

from typing import Any

from torch import nn


class Chain(nn.Sequential):
    """A block followed by blocks grafted onto it. Each gets the first one's other arguments besides its own input."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        out, inputs = None, (x, *args)
        for block in self:
            before, named = (
                tuple(map(_copied_list, inputs)),
                {key: _copied_list(value) for key, value in kwargs.items()},
            )
            out = block(*inputs, **kwargs)
            inputs = passed_on(out, tuple(map(_as_before, inputs, before)))
            kwargs = {key: _as_before(value, named[key]) for key, value in kwargs.items()}
        return out


def _copied_list(value: Any) -> Any:
    return list(value) if type(value) is list else value


def _as_before(value: Any, before: Any) -> Any:
    """A list without what a block appended to it (aggregation trees do that); slots that it filled stay (caches)."""
    return before if type(value) is list and len(value) != len(before) else value


def passed_on(out: Any, inputs: tuple) -> tuple:
    """The inputs of a chain's next block. If a block returns several values, those like its inputs replace these."""
    if not isinstance(out, tuple) or isinstance(inputs[0], tuple):
        return (out, *inputs[1:])
    rest = (o if _same_form(o, i) else i for o, i in zip(out[1:], inputs[1:]))
    return (out[0], *rest, *inputs[len(out) :])


class Skip(nn.Module):
    """Takes the place of a dropped block and returns its input."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def _same_form(a: Any, b: Any) -> bool:
    return type(a) is type(b) and getattr(a, "shape", None) == getattr(b, "shape", None)
