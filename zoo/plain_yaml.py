"""YAML as settings need it: plain values, each key once, and no surprises."""

import re
from typing import Any

import yaml

from zoo.errors import ZooError

_MOST = 100  # digits of a whole number; no setting has more, and Python refuses to read or write some thousands
_TAG = "tag:yaml.org,2002:"


class _PlainLoader(yaml.SafeLoader):
    """A safe loader of fewer kinds of values than YAML 1.1; refuses repeated keys."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012
    yaml_constructors: dict = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.composer.ComposerError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
            seen |= {key.value} if isinstance(key, yaml.ScalarNode) else set()
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        kind, problem = node.tag.removeprefix(_TAG), ""
        if kind in _PLAIN and self.resolve(yaml.ScalarNode, node.value, (True, False)) != node.tag:
            problem = f"this is no {kind}"
        elif kind == "int" and len(node.value) > _MOST:
            problem = f"a number of {len(node.value):,} digits"
        if problem:
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return super().construct_object(node, deep)


# As in YAML 1.1, by which they are written, but for what later versions took back: there 1:30 is 90, 010 is 8, `no` is
# false and 2024-01-01 is a date. Here these are text.
_PLAIN = {
    "null": ("~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": ("true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "int": ("[-+]?(?:0|[1-9][0-9_]*)", [*"-+0123456789"]),
    "float": (
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        [*"-+0123456789."],
    ),
}
for _kind, (_pattern, _first) in {**_PLAIN, "merge": ("<<", ["<"])}.items():
    _PlainLoader.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _first)
for _kind in (*_PLAIN, "str", "seq", "map"):
    _PlainLoader.add_constructor(_TAG + _kind, yaml.SafeLoader.yaml_constructors[_TAG + _kind])
_PlainLoader.add_constructor(None, yaml.SafeLoader.construct_undefined)


def read_yaml(text: str) -> Any:
    """Return a YAML text's content: plain values in lists and mappings.

    `1:30`, `010`, `yes`, `on` and dates are text. Raises ZooError, in one line, for text that is not YAML, a mapping
    with a key twice, and whole numbers of more than 100 digits.

    >>> read_yaml("{rounds: 9, lr: 0.5, flip: true, time: 1:30, answer: no}")
    {'rounds': 9, 'lr': 0.5, 'flip': True, 'time': '1:30', 'answer': 'no'}
    >>> read_yaml("rounds: 1\\nrounds: 9")
    Traceback (most recent call last):
    zoo.errors.ZooError: this is not YAML: line 2: 'rounds' is there twice
    """
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        reason = "too many lists or mappings inside each other"
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        reason = (f"line {mark.line + 1}: " if mark else "") + " ".join(str(problem or error).split())
    raise ZooError(f"this is not YAML: {reason}", code="file")
