"""`python -m surgery merge` and `average` on files."""

import inspect
import json
import textwrap
from pathlib import Path

import pytest
import torch
from command_files import refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery import merging
from surgery.__main__ import main


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)
    states = {}
    for k, name in enumerate(["base", "a", "b"]):
        body, head = torch.randn(6, 5, generator=draw), torch.randn(3, generator=draw)
        states[name] = {"body.w": body, "head.b": head, "n": torch.tensor(k)}
    for name, state in states.items():
        save_file(state, f"{name}.safetensors")
    return states


METHODS = {**merging.METHODS, **{name: getattr(merging, name) for name in ("fisher", "regmean", "greedy_soup")}}


def test_merge__a_method_of_a_module_of_ones_own(files):
    text = """
        from surgery.merging import register_method

        @register_method
        def largest(tensors, *, scale=1.0):
            return scale * max(tensors, key=lambda tensor: tensor.norm())
    """
    Path("own_methods.py").write_text(textwrap.dedent(text))
    arguments = ["merge", "own_methods:largest", "a.safetensors", "b.safetensors", "--out", "c.safetensors"]
    assert main([*arguments, "--set", "scale=2"]) == 0
    large = max((files["a"]["body.w"], files["b"]["body.w"]), key=lambda tensor: tensor.norm())
    assert torch.equal(load_file("c.safetensors")["body.w"], 2 * large)
    del merging.METHODS["largest"]
    assert main(["merge", "own_methods:absent", "a.safetensors", "--out", "d.safetensors"]) == 2
    assert main(["merge", "math:sqrt", "a.safetensors", "--out", "d.safetensors"]) == 2


def test_merge__a_method_of_ones_own_is_not_taken_for_another(files, capsys):
    """An undecorated `linear` is not ours; a method may stand under another name."""
    Path("named_methods.py").write_text(
        "from surgery.merging import ties\nother = ties\ndef linear(tensors): return tensors[0]\n"
    )
    arguments = ["a.safetensors", "b.safetensors", "--out", "c.safetensors"]
    assert "register_method" in refused(capsys, "merge", "named_methods:linear", *arguments)
    assert "write named_methods:linear" in refused(capsys, "merge", "named_methods.py:linear", *arguments)
    assert "write a.b:linear" in refused(capsys, "merge", "a/b.py:linear", *arguments)
    assert main(["merge", "named_methods:other", *arguments, "--base", "base.safetensors"]) == 0


def test_merge__a_merge_and_where_it_comes_from(files, capsys):
    settings = ["--set", "density=0.5", "--set", "head:density=0.9", "--set", "across=tensor", "--weights", "1,2"]
    names = ["a.safetensors", "b.safetensors", "--base", "base.safetensors", "--out", "c.safetensors"]
    assert main(["merge", "ties", *names, *settings]) == 0
    assert capsys.readouterr().out == "c.safetensors: 3 tensors, 140 B\n"
    assert main(["inspect", "c.safetensors"]) == 0
    origin = "\n  model 0: a.safetensors\n  model 1: b.safetensors\n  base: base.safetensors\n"
    assert origin in capsys.readouterr().out
    density = {"head": 0.9, "*": 0.5}
    expected = merging.ties([files["a"], files["b"]], base=files["base"], weights=[1, 2], density=density)
    found = load_file("c.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with safe_open("c.safetensors", "pt") as file:
        made = json.loads(file.metadata()["layer_surgery"])
    assert (made["do"], made["method"]) == ("merge", "ties")
    assert made["density"] == density
    paths = {"model 0": "a.safetensors", "model 1": "b.safetensors", "base": "base.safetensors"}
    assert {name: one["path"] for name, one in made["inputs"].items()} == paths


def test_merge__help_lists_every_method_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["merge", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in METHODS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", METHODS)
def test_merge__help_of_a_method_lists_its_settings(capsys, name):
    assert main(["merge", name, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    given = {"models": "merge", "fishers": "--data", "grams": "--data"}
    for setting in inspect.signature(METHODS[name]).parameters:
        assert given.get(setting, setting) in text


def test_merge__help_of_what_is_no_method_is_refused(capsys):
    assert "'linear'" in refused(capsys, "merge", "lineer", "--help")


def test_merge__an_average_of_files_of_two_kinds(files):
    torch.save(files["b"], "b.pt")
    assert main(["average", "a.safetensors", "b.pt", "--weights", "3,1", "--out", "c.pt"]) == 0
    found = torch.load("c.pt", weights_only=True)
    torch.testing.assert_close(found["body.w"], (3 * files["a"]["body.w"] + files["b"]["body.w"]) / 4)
    assert found["n"] == 2


def test_merge__what_cannot_be_done_is_one_line(files, capsys):
    a, out = "a.safetensors", ("--out", "c.safetensors")
    save_file({"body.w": torch.zeros(6, 4)}, "small.safetensors")
    save_file(files["a"] | {"head.b": torch.tensor([1.0, float("nan"), 2.0])}, "nan.safetensors")
    for arguments, text in [
        (("merge", "blend", a, a, *out), "'blend'"),
        (("merge", "ties", a, a, *out), "--base"),
        (("merge", "linear", a, a, "--base", a, *out), "--base"),
        (("merge", "slerp", a, a, "--weights", "1,2", *out), "--weights"),
        (("merge", "slerp", a, a, "--set", "x=2", *out), "--set x=2"),
        (("merge", "slerp", a, a, "--set", "t=0.1", "--set", "t=0.9", *out), "--set t=0.9"),
        (("merge", "slerp", a, a, "--set", "n:t=1", "--set", "n:t=0", *out), "--set n:t=0"),
        (("merge", "karcher", a, a, "--set", "x=2", *out), "--set x=2"),
        (("merge", "nearswap", a, "--base", a, *out), "--set t="),
        (("merge", "linear", a, "small.safetensors", *out), "small.safetensors"),
        (("merge", "linear", a, "--shard-size", "five", "--out", "folder"), "--shard-size five"),
        (("average", *out), "models"),
        (("merge", "linear", a, "nan.safetensors", *out), "'head.b' of nan.safetensors"),
        (("merge", "ties", a, a, "--base", "nan.safetensors", *out), "'head.b' of nan.safetensors"),
        (("average", a, "nan.safetensors", *out), "'head.b' of nan.safetensors"),
        (("average", a, "none.pt", *out), "none.pt"),
        (("blend",), "'blend'"),
    ]:  # fmt: skip
        assert text in refused(capsys, *arguments)
