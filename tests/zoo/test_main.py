"""`python -m zoo`."""

import json

import pytest

import zoo
from zoo.__main__ import main


def run(capsys, *flags):
    code = main(flags)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_main__the_table_has_a_row_for_every_model(capsys):
    code, out, _ = run(capsys)
    head, *rows = out.splitlines()
    assert code == 0
    assert head.split()[:3] == ["model", "parameters", "MACs"]
    assert [row.split()[0] for row in rows] == zoo.names()
    assert "11,689,512  1.81 G  3x224x224  2, 2, 2, 2" in rows[2]
    assert max(map(len, rows)) < 140


def test_main__help_says_what_happens_without_a_flag(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "--help")
    text = capsys.readouterr().out
    assert "[NAME ...] [--FLAG VALUE ...]" in text
    assert not any(f"(default: {value})" in text for value in ("None", "", "False"))
    assert max(map(len, text.splitlines())) <= 85


def test_main__flags_reach_the_specs(capsys):
    flags = ["resnet20", "--width", "0.5,0.5,1", "--depth", "2", "--num-classes", "7", "--in-channels", "1"]
    flags += ["--image-size", "16", "--norm", "group"]
    _, out, _ = run(capsys, *flags, "--yaml")
    spec = zoo.Spec("resnet20", 7, 1, 16, width=(0.5, 0.5, 1), depth=2, norm="group")
    assert zoo.Spec.from_yaml(out) == spec
    _, out, _ = run(capsys, *flags, "--json")
    row = json.loads(out)
    assert (row["parameters"], row["macs"]) == spec.count()
    assert (row["input"], row["sections"], row["width"]) == ([1, 16, 16], [2, 2, 2], [0.5, 0.5, 1])


@pytest.mark.slow
def test_main__models_that_do_not_take_a_flag_are_left_out(capsys):
    code, out, _ = run(capsys, "--norm", "group", "--depth", "2", "--json")
    names = [json.loads(line)["name"] for line in out.splitlines()]
    assert code == 0
    assert "resnet20" in names
    assert not {"cnn", "transformer"} & set(names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["resnet21"], "unknown model 'resnet21': did you mean"),
        (["--norm", "foo"], "unknown norm 'foo'"),
        (["--num-classes", "0"], "1 or more, got 0"),
        (["vgg11", "--image-size", "8"], "32x32 or larger, got 8x8"),
        (["timm:resnet18"], "the zoo has no 'timm:resnet18': surgery.libraries.make_model makes"),
        (["resnet20", "--width", "1e9"], "width is a rate above 0"),
        (["resnet20", "--json", "--yaml"], "give one"),
        (["--width", "1,,1"], "--width '1,,1' is no list of numbers"),
        (["--depth", "2,"], "--depth '2,' is no list of whole numbers"),
        (["--depth", "1.5"], "--depth '1.5' is no list of whole numbers"),
        (["--num-classes", "ten"], "--num-classes: 'ten' is not a whole number"),
        (["--witdh", "1"], "did you mean --width?"),
        (["--wid", "1"], "--wid"),
    ],
)
def test_main__what_cannot_be_shown_is_one_line(capsys, flags, message):
    code, out, err = run(capsys, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
