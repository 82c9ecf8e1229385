"""The judges of benchmarks/coverage.py: they accept what is right, and nothing else."""

import copy
import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import coverage_table, judges, zeros
from benchmarks.calls import outputs
from benchmarks.judges import Miss
from benchmarks.models.case import Case, scaled
from surgery import narrow, state
from surgery.plan import Submodel


class Normed(nn.Module):
    """Attention with norms, a scale, and an attribute for the width."""

    def __init__(self, s):
        super().__init__()
        self.embed, self.norm = nn.Linear(5, 6 * s), nn.LayerNorm(6 * s)
        self.qkv, self.scale, self.width = nn.Linear(6 * s, 12 * s), (4 * s) ** -0.5, 4 * s
        self.out, self.group = nn.Linear(4 * s, 3), nn.GroupNorm(2, 6 * s)

    def forward(self, x):
        x = self.norm(self.embed(x))
        x = self.group(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).split(self.width, dim=-1)
        return self.out((q @ k.transpose(1, 2) * self.scale).softmax(-1) @ v)


CASE = scaled(Normed, lambda: torch.randn(2, 7, 5))


def narrowed():
    torch.manual_seed(0)
    model, example = CASE.build(), CASE.example(None)
    judges.randomize(model)
    return model, *narrow(model, rate=0.5, example=example), example


def test_a_right_model_is_compared_with_both_and_a_wrong_attribute_is_seen():
    assert judges.narrow(CASE, CASE.build(), CASE.example(None)) == ["half", "zeros"]
    model, small, _, example = narrowed()
    used = judges.used(model, example)
    judges.check_like_half(CASE.half(), small, used, example)
    small.scale = model.scale
    with pytest.raises(Miss, match="the output differs by"):
        judges.check_like_half(CASE.half(), small, used, example)


@pytest.mark.parametrize(
    ("where", "axis"),
    [("embed.weight", 0), ("norm.bias", 0), ("group.weight", 0), ("qkv.weight", 1), ("out.weight", 1)],
)
def test_positions_of_one_width_that_do_not_belong_together_are_seen(where, axis):
    model, small, plan, example = narrowed()
    assert zeros.agrees(model, small, plan, example) == (True, "")
    source, size, kept = plan.entries[where][0], state(model)[where].shape[axis], state(small)[where].shape[axis]
    index = list(source.index)
    index[axis] = ((size - kept, size),)  # the last positions instead of the first
    wrong = Submodel({**plan.entries, where: (source._replace(index=tuple(index)),)}, plan.shapes)
    assert not zeros.agrees(model, small, wrong, example)[0]


def test_a_width_that_stays_whole_is_seen():
    model, _, _, example = narrowed()
    with pytest.raises(Miss, match=r"embed.weight has shape \(12, 5\), in a model built half as wide \(6, 5\)"):
        judges.check_small(CASE, model, model, example)
    with pytest.raises(Miss, match=r"axis 0 of embed.weight went from 12 to 12"):
        judges.check_small(Case(CASE.build, CASE.example), model, copy.deepcopy(model), example)


def test_the_table_counts_models_for_which_there_is_something_to_do(tmp_path):
    rows = [
        {"name": "handwritten:a", "result": {"graft": "ok", "narrow": "ok"}, "compared": {"narrow": ["half"]}},
        {
            "name": "handwritten:b",
            "result": {"graft": "nothing to do", "narrow": "SurgeryError: a | b"},
            "compared": {},
        },
    ]
    (tmp_path / "coverage-handwritten.json").write_text(json.dumps({"rows": rows}))
    lines = coverage_table.tables(tmp_path).splitlines()
    assert lines[2] == "| written by hand (2) | - | - | 1 of 1 | 1 of 2, 1 compared in numbers | - |"
    assert lines[-1] == r"| `handwritten:b` | `narrow` | a \| b |"


def test_the_page_has_the_tables_of_what_is_stored():
    page = Path(__file__).parents[1] / "docs" / "results" / "surgery.md"
    assert coverage_table.tables(coverage_table.RESULTS) in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["handwritten", "huggingface"])
def test_models_run_at_both_widths(suite):
    if suite == "huggingface":
        pytest.importorskip("transformers")
    models = importlib.import_module(f"benchmarks.models.{suite}").MODELS
    assert len(models) >= 27
    for name, case in models.items():
        full = case.build().eval()
        example = case.example(full)
        found = [t.shape for t in outputs(full, example)]
        assert found, name
        if case.half is None:
            continue
        half = case.half().eval()
        assert [t.shape for t in outputs(half, example)] == found, name
        if suite == "handwritten":
            assert judges.held(full).keys() == judges.held(half).keys(), name
            assert any(a.shape != b.shape for a, b in zip(judges.held(full).values(), judges.held(half).values())), name
