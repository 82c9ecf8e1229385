"""Who shares a width with whom, in the picture of a model."""

from symmetric import SMALL

from surgery.inspect.draw import bars
from surgery.inspect.report import inspect
from surgery.inspect.shared import in_rows, shared


def lines(net, shape):
    report = inspect(net, shape=shape)
    names = [bar.name for bar in bars(report)]
    found = shared(report, names, dict.fromkeys(names, 0))
    return names, {(tuple(names[i] for i in one.makes), tuple(names[i] for i in one.reads)) for one in found}, found


def test_a_residual_stream_is_one_line_and_an_inner_width_another():
    names, found, packed = lines(SMALL["residual"](), (3, 6, 6))
    assert names == ["stem", "conv1", "conv2", "head"]
    assert found == {(("stem", "conv2"), ("conv1", "head")), (("conv1",), ("conv2",))}
    assert [len(row) for row in in_rows(packed)] == [1, 1]


def test_heads_and_what_is_inside_them_are_two_lines():
    _, found, _ = lines(SMALL["attention"](), (3, 6, 6))
    stream = (("embed", "proj", "down"), ("qkv", "up", "head"))
    assert found == {stream, (("qkv",), ("proj",)), (("up",), ("down",))}
