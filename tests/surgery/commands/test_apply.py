"""`python -m surgery apply`: steps give what the functions give, and nothing is written if one of them cannot."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from surgery import merge
from surgery.__main__ import main
from surgery.plan import Source, Submodel

RECIPE = """
inputs:
  base: base.safetensors
  a: a.pt
  b: b.safetensors
steps:
  tasks:
    do: ties
    models: [a, b]
    base: base
    weights: {body: [1, 2], "*": [1, 1]}
    density: {body: 0.5}
  mixed: {do: replace, first: tasks, others: {head: a}}
  mean: {do: linear, models: [mixed, base], weights: [3, 1]}
  half: {do: cast, model: mean, dtype: bfloat16}
outputs:
  mean.safetensors: mean
  half.safetensors: half
"""


TWICE = "  two: {do: shuffle, models: [a, b]}\n  two.1: {do: cast, model: tasks, dtype: float16}\n"


@pytest.fixture
def states(tmp_path):
    draw = torch.Generator().manual_seed(0)
    found = {}
    for name in ("base", "a", "b"):
        found[name] = {"body.w": torch.randn(9, 4, generator=draw), "head.w": torch.randn(5, generator=draw)}
        save_file(found[name], tmp_path / f"{name}.safetensors")
    torch.save(found["a"], tmp_path / "a.pt")
    return found


def test_the_steps_are_carried_out(states, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["apply", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "step    tasks = ties(models=['a', 'b'], base=base" in text
    assert "half = cast(model=mean, dtype=bfloat16): 2 tensors, 82 B\n" in text
    assert not (tmp_path / "mean.safetensors").exists()
    assert main(["apply", str(tmp_path / "recipe.yaml")]) == 0
    assert capsys.readouterr().out.startswith(text)
    weights = {"body": [1, 2], "*": [1, 1]}
    tasks = merge.ties([states["a"], states["b"]], base=states["base"], weights=weights, density={"body": 0.5})
    mixed = {"body.w": tasks["body.w"], "head.w": states["a"]["head.w"]}
    mean = merge.linear([mixed, states["base"]], weights=[3, 1])
    for file, expected in [("mean", mean), ("half", {n: t.bfloat16() for n, t in mean.items()})]:
        found = load_file(tmp_path / f"{file}.safetensors")
        assert set(found) == set(expected)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    with safe_open(tmp_path / "mean.safetensors", "pt") as file:
        made = json.loads(file.metadata()["layer_surgery"])
    assert made["recipe"] == RECIPE
    assert set(made["inputs"]) == {"base", "a", "b"}


def test_a_plan_lies_in_the_folder_of_the_recipe(states, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    plan = Submodel({"head.w": (Source("head.w", (((0, 2),),)),)}, {"body.w": (9, 4), "head.w": (5,)})
    plan.save(tmp_path / "plans" / "cut.json")
    (tmp_path / "recipe.yaml").write_text(
        "inputs: {base: base.safetensors}\n"
        "steps: {cut: {do: extract, model: base, plan: plans/cut.json}}\n"
        "outputs: {cut.safetensors: cut}"
    )
    assert main(["apply", "../recipe.yaml"]) == 0
    assert torch.equal(load_file(tmp_path / "cut.safetensors")["head.w"], states["base"]["head.w"][:2])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("do: ties", "do: tie", "step 'tasks': unknown operation 'tie': did you mean 'ties'?"),
        ("density:", "densities:", "step 'tasks': ties takes no 'densities'"),
        ("    base: base\n", "", "step 'tasks': ties needs 'base'"),
        ("models: [a, b]", "models: [a, c]", "step 'tasks': 'c' is no input and no earlier step; there are base, a, b"),
        ("body: 0.5", "tail: 0.5", "step 'tasks': density: no tensor matches 'tail'"),
        ("dtype: bfloat16", "dtype: int8", "step 'half': dtype='int8': give a floating-point type"),
        ("others: {head: a}", "others: a", "step 'mixed': replace takes 'others' as entries"),
        ("models: [a, b]", "models: a", "step 'tasks': ties takes a list of names as 'models'"),
        ("density: {body: 0.5}", "normalize: 'false'", "step 'tasks': normalize='false': give true or false"),
        ("b: b.safetensors", "b: {path: b.safetensors}", "'b' of `inputs` is a file, a.safetensors, or"),
        ("b: b.safetensors", "a: b.safetensors", "'a' is there twice"),
        ("half.safetensors: half", "./mean.safetensors: half", "are the same file"),
        ("others: {head: a}", "others: {tail: a}", "step 'mixed': others: no tensor matches 'tail'"),
        ("half.safetensors: half", "half.safetensors: quarter", "there is no step 'quarter'"),
        ("half.safetensors: half", "b.safetensors: half", "b.safetensors exists already"),
        ("b: b.safetensors", "b: c.safetensors", "c.safetensors: there is no such file"),
        ("outputs:", "output:", "a recipe has `inputs`, `steps` and `outputs`"),
        ("steps:", "steps: [", "line"),
        ("do: linear, ", "", "step 'mean' needs an operation"),
        ("  mixed:", "  base:", "'base' is an input and a step"),
        ("do: ties", "do: !!python/name:os.system", "is no YAML"),
        ("  half:", TWICE + "  half:", "'two.1' is there twice, as a step and as a result of shuffle"),
        ("  half:", "  cut: {do: extract, model: a, plan: no.json}\n  half:", "step 'cut': there is no file "),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(states, tmp_path, capsys, old, new, text):
    assert old in RECIPE
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace(old, new))
    before = sorted(tmp_path.iterdir())
    assert main(["apply", str(tmp_path / "recipe.yaml")]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before
