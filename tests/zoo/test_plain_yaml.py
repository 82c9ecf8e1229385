"""Settings as text: plain values, and each key once."""

import math

import pytest
import yaml
from refusals import zoo_refused

from zoo.plain_yaml import read_yaml


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -7, 10**99, 0.5, -1e-9, 1e30, math.inf, "", "a: b", "yes", "1:30", "010", "0x1f", "1e-3",
     "2024-01-01", "null", "0.5", "1_0", "<<", "é\n\t"],
)  # fmt: skip
def test_plain_yaml__what_was_written_comes_back(value):
    whole = {"one": value, "many": [value, [value]], "section": {"one": value}}
    assert read_yaml(yaml.safe_dump(whole)) == whole


@pytest.mark.parametrize(
    "text", ["1:30", "1:30:00", "-1:30", "1:30.5", "010", "08", "0b11", "0x1F", "0o17", "yes", "No", "ON", "off", "y",
             "2024-01-01", "2024-01-01 10:00:00", "="],
)  # fmt: skip
def test_plain_yaml__what_only_old_yaml_takes_for_a_number_a_switch_or_a_date_is_text(text):
    assert read_yaml(f"[{text}]" if text != "=" else "- =") == [text]


def test_plain_yaml__anchors_and_merged_mappings_are_read():
    assert read_yaml("{a: &a {x: 1, y: 2}, b: {<<: *a, y: 3}}")["b"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: 'a' is there twice"),
        ("a: 1\n'a': 1", "line 2: 'a' is there twice"),
        ("a:\n  b: {c: 1, c: 1}", "line 2: 'c' is there twice"),
        ("- {c: 1, c: 1}", "'c' is there twice"),
        ("{a: &a {x: 1}, b: &b {x: 2}, c: {<<: *a, <<: *b}}", "'<<' is there twice"),
        ("a: " + 5000 * "9", "line 1: a number of 5,000 digits"),
        ("a: -" + 5000 * "1", "digits"),
        (1000 * "9" + ": 1", "digits"),
        ("a: !!int " + 5000 * "9", "digits"),
        ("a: !!int 1:30", "no int"),
        ("a: !!float abc", "no float"),
        ("a: !!bool maybe", "no bool"),
        ("a: !!timestamp abc", "timestamp"),
        ("a: !!python/object/apply:os.system [ls]", "python"),
        (1000 * "[", "this is not YAML"),
        ("a: \0", "this is not YAML"),
        ("a: b: c", "line 1: "),
    ],
)  # fmt: skip
def test_plain_yaml__what_is_refused_is_refused_in_a_short_line(text, why):
    with zoo_refused("file") as error:
        read_yaml(text)
    assert why in str(error.value)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)
