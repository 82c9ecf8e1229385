"""Values as people write them, on the command line and in recipes."""

import ast
from collections.abc import Mapping
from typing import Any


def value_of(text: str) -> Any:
    """A number, true, false, a list of them, or else the text itself.

    >>> value_of("0.5"), value_of("true"), value_of("tensor"), value_of("[1, 2]")
    (0.5, True, 'tensor', [1, 2])
    """
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def shown(value: Any) -> str:
    """A value as a recipe has it, cut to one line.

    >>> shown(True), shown([1, "a"]), shown({"a": None})
    ('true', "[1, 'a']", '{a: null}')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    else:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
