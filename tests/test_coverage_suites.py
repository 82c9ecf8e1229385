"""The judges of benchmarks/coverage.py: they accept what is right, and nothing else."""

import copy
import importlib
import json
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import surgery
from benchmarks import coverage, coverage_table, judges, support, zeros
from benchmarks.calls import outputs
from benchmarks.judges import Miss
from benchmarks.models import case, suite
from benchmarks.models.case import Case, scaled
from surgery import narrow, state
from surgery.plan import Plan


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
    return model, *narrow(model, 0.5, example), example


def test_coverage_suites__a_right_model_is_compared_with_both_and_a_wrong_attribute_is_seen():
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
def test_coverage_suites__positions_of_one_width_that_do_not_belong_together_are_seen(where, axis):
    model, small, plan, example = narrowed()
    assert zeros.agrees(model, small, plan, example) == (True, "")
    source, size, kept = plan.entries[where][0], state(model)[where].shape[axis], state(small)[where].shape[axis]
    index = list(source.index)
    index[axis] = ((size - kept, size),)  # the last positions instead of the first
    wrong = Plan({**plan.entries, where: (source._replace(index=tuple(index)),)}, plan.shapes)
    assert not zeros.agrees(model, small, wrong, example)[0]


def test_coverage_suites__a_width_that_stays_whole_is_seen():
    model, _, _, example = narrowed()
    with pytest.raises(Miss, match=r"embed.weight has shape \(12, 5\), in a model built half as wide \(6, 5\)"):
        judges.check_small(CASE, model, model, example)
    with pytest.raises(Miss, match=r"axis 0 of embed.weight went from 12 to 12"):
        judges.check_small(Case(CASE.build, CASE.example), model, copy.deepcopy(model), example)


def test_coverage_suites__the_table_counts_models_for_which_there_is_something_to_do(tmp_path):
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


def test_coverage_suites__the_page_has_the_tables_of_what_is_stored():
    page = Path(__file__).parents[1] / "docs" / "results" / "surgery.md"
    assert coverage_table.tables(coverage_table.RESULTS) in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["handwritten", "huggingface"])
def test_coverage_suites__models_run_at_both_widths(suite):
    if suite == "huggingface":
        pytest.importorskip("transformers")
    models = importlib.import_module(f"benchmarks.models.{suite}").MODELS
    assert len(models) >= 27
    for name, made in models.items():
        full = made.build().eval()
        example = made.example(full)
        found = [t.shape for t in outputs(full, example)]
        assert found, name
        if made.half is None:
            continue
        half = made.half().eval()
        assert [t.shape for t in outputs(half, example)] == found, name
        if suite == "handwritten":
            assert judges.held(full).keys() == judges.held(half).keys(), name
            assert any(a.shape != b.shape for a, b in zip(judges.held(full).values(), judges.held(half).values())), name


@pytest.mark.parametrize("operation", ["narrow", "prune", "permute", "align", "widen"])
def test_coverage_suites__an_operation_that_is_right_counts(operation):
    torch.manual_seed(0)
    model = CASE.build()
    assert support.JUDGES[operation](CASE, model, CASE.example(model))


@pytest.mark.parametrize("operation", ["narrow", "prune", "permute", "align", "widen"])
def test_coverage_suites__an_operation_that_computes_something_else_is_seen(operation, monkeypatch):
    def wrong(models, *arguments, **options):
        found = right(models, *arguments, **options)
        with torch.no_grad():
            (found.models[1] if operation == "align" else found[0]).out.bias.add_(0.01)
        return found

    torch.manual_seed(0)
    rooms = {"narrow": surgery, "prune": surgery.pruning, "widen": surgery.widening}
    model, room = CASE.build(), rooms.get(operation, surgery.symmetry)
    right = getattr(room, operation)
    monkeypatch.setattr(room, operation, wrong)
    with pytest.raises(support.Wrong):
        support.JUDGES[operation](CASE, model, CASE.example(model))


def test_coverage_suites__a_model_whose_constructor_takes_no_widths_is_restored_by_its_plan():
    with pytest.raises(support.PlanOnly):
        support.save(CASE, CASE.build(), CASE.example(None))


@pytest.mark.slow
def test_coverage_suites__a_registered_class_is_built_small_from_its_defaults():
    transformers = pytest.importorskip("transformers")
    registry = importlib.import_module("benchmarks.models.registry")
    found = registry.small_config(transformers.LlamaConfig)
    assert (found.hidden_size, found.num_attention_heads, found.head_dim, found.num_hidden_layers) == (64, 4, 16, 3)
    assert found.intermediate_size / 64 == pytest.approx(11008 / 4096, abs=0.1)
    for name in ("Qwen3MoeForCausalLM", "SwinForImageClassification", "T5ForConditionalGeneration"):
        model, example = registry.built(name)
        assert support.numbers(model) < registry.BUDGET
        assert all(t.isfinite().all() for t in outputs(model, example, registry.logits))


def test_coverage_suites__registries_are_read_as_wholes():
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    names = suite("support")
    assert len(names) == len({*names})
    causal = {kind for kind in AutoModelForCausalLM._model_mapping._model_mapping.values() if isinstance(kind, str)}
    assert {f"transformers:{name}" for name in causal} <= {*names}
    assert sum(name.startswith(("torchvision:", "int8:")) for name in names) == len(torchvision.models.list_models())


def test_coverage_suites__a_run_goes_on_where_it_was_stopped(tmp_path):
    pytest.importorskip("transformers")  # whose version is stored
    row = {"name": "timm:a", "result": {"narrow": "ok", "graft": "SurgeryError: no"}}
    assert coverage.left(None, ["narrow", "graft"], again=False) == ["narrow", "graft"]
    assert coverage.left(row, ["narrow", "graft", "save"], again=False) == ["save"]
    assert coverage.left(row, ["narrow", "graft", "save"], again=True) == ["graft", "save"]
    file = tmp_path / "coverage-support.json"
    assert coverage.stored(file) == {}
    coverage.write(file, json.dumps({"versions": coverage.versions(), "rows": [row]}))
    assert coverage.stored(file) == {"timm:a": row}
    coverage.write(file, json.dumps({"versions": {"torch": "1.0"}, "rows": [row]}))
    assert coverage.stored(file) == {}


def test_coverage_suites__the_matrix_tells_refusals_mistakes_and_models_that_were_not_built():
    rows = [
        {"name": "timm:a", "result": {"narrow": "ok", "save": "PlanOnly: its class takes no widths"}},
        {"name": "timm:b", "result": {"narrow": "SurgeryError: no rule for x.1", "prune": "Wrong: other numbers"}},
        {"name": "timm:d", "result": {"narrow": "SurgeryError: no rule for y.2", "align": "took too long"}},
        {"name": "timm:c", "result": dict.fromkeys(coverage_table.JUDGED, "NotBuilt: no library")},
    ]
    names = [f"timm:{letter}" for letter in "abcde"]
    text = coverage_table.support_tables({"versions": {"torch": "2"}, "rows": rows}, names)
    assert (
        "| timm, the smallest of each model file (4) | 2 refused, 1 ok, 1 not run | 3 not run, 1 wrong | not run |"
        in text
    )
    assert "3 of 4 models judged by one operation or more, 1 not built." in text
    assert "| `narrow` | no rule for x.1 | 2: `timm:b`, `timm:d` |" in text
    assert "| `timm:b` | `prune` | other numbers |" in text
    assert "| its code fails on our small configuration or inputs | 1: `timm:c` |" in text
    lines = coverage_table.each_model({"versions": {}, "rows": rows}, names).splitlines()
    assert lines[0] == "model,narrow,prune,graft,permute,align,widen,save,why"
    assert lines[2] == (
        "timm:b,refused,wrong,not run,not run,not run,not run,not run,narrow: no rule for x.1; prune: other numbers"
    )


def test_coverage_suites__what_stays_whole_or_was_not_compared_is_not_simply_ok():
    note = "2 hidden widths of Net cannot shrink:\n  axis 0 of a.weight (4, 8) stays whole: the order matters"
    row = {"name": "timm:a", "result": dict.fromkeys(["narrow", "prune", "widen", "align"], "ok")}
    row["compared"] = {"narrow": "zeros; 2 of 9 widths whole", "prune": "not compared: x", "align": "found in part: 1"}
    row["notes"] = {"narrow": [note], "widen": ["a checkpoint does not fit"]}
    found = [coverage_table.verdict(row, operation) for operation in ("narrow", "prune", "widen", "align", "save")]
    assert found == ["some whole", "not compared", "ok", "in part", "not run"]
    rows = [{**row, "name": f"timm:{number}"} for number in range(coverage_table.COMMON)]
    text = coverage_table.support_tables({"versions": {}, "rows": rows}, [row["name"] for row in rows])
    assert f"| the order matters | {len(rows)} | 0 | 0 |" in text
    assert "the order matters" not in coverage_table.support_tables({"versions": {}, "rows": rows[1:]}, ["timm:1"])
    each = coverage_table.each_model({"versions": {}, "rows": rows[1:]}, ["timm:1"])
    assert each.endswith(
        "timm:1,some whole,not compared,not run,not run,in part,ok,not run,narrow: the order matters\n"
    )


def test_coverage_suites__a_width_that_stays_whole_is_counted():
    class Rolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 8)
            self.c = nn.Linear(8, 2)

        def forward(self, x):
            return self.c(self.b(self.a(x).cumsum(-1)))

    judged = Case(Rolled, lambda model: torch.randn(3, 4))
    assert support.narrow(judged, Rolled(), torch.randn(3, 4)).endswith("; 1 of 2 widths whole")


class Towers(nn.Module):
    """A tower for images, which a call without them does not run."""

    def __init__(self):
        super().__init__()
        self.images, self.words = (nn.Sequential(*[Residual() for _ in range(3)]) for _ in range(2))

    def forward(self, words, images=None):
        return self.words(words) if images is None else self.words(words) + self.images(images)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def test_coverage_suites__a_tower_that_the_example_does_not_run_is_not_grafted():
    judged = Case(Towers, lambda model: torch.randn(2, 4))
    assert support.graft(judged, Towers(), torch.randn(2, 4)) == "undone"
    stopped = Towers()
    stopped.words.forward = lambda words: words
    with pytest.raises(surgery.SurgeryError, match="runs on the example"):
        support.graft(judged, stopped, torch.randn(2, 4))


@pytest.mark.nightly
def test_coverage_suites__the_reason_for_plan_only_names_the_tensor():
    pytest.importorskip("transformers")
    bit = case("transformers:BitForImageClassification")
    model = bit.build()
    with pytest.raises(support.PlanOnly, match=r"embedder.convolution.weight is \(4, 3, 7, 7\), and \(8, 3, 7, 7\) in"):
        support.save(bit, model, bit.example(model))


@pytest.mark.slow
def test_coverage_suites__quantized_models_are_refused_with_the_reason():
    quantized = case("int8:quantized_resnet18")
    model = quantized.build()
    with pytest.raises(surgery.SurgeryError, match="quantised weights"):
        support.narrow(quantized, model, quantized.example(model))


def test_coverage_suites__the_page_of_models_has_the_tables_of_what_is_stored():
    pytest.importorskip("transformers")  # whose classes are listed
    page = Path(__file__).parents[1] / "docs" / "results" / "models.md"
    found = json.loads((coverage_table.RESULTS / coverage_table.SUPPORT).read_text())
    assert coverage_table.support_tables(found, suite("support")) in page.read_text()
    assert coverage_table.each_model(found, suite("support")) == coverage_table.EACH.read_text()


@pytest.mark.slow
def test_coverage_suites__the_scale_of_attention_follows_queries_and_not_values():
    pytest.importorskip("transformers")
    llama = case("transformers:LlamaForCausalLM")
    model = llama.build()
    assert support.prune(llama, model, llama.example(model)) == "zeros"


def test_narrow__a_width_that_is_read_from_another_ones_size_may_not_run():
    class Torn(nn.Module):
        """As in EdgeNeXt: attention returns heads of its own size to a shape that the input has."""

        def __init__(self):
            super().__init__()
            self.embed, self.first, self.second = nn.Linear(5, 100), nn.Linear(34, 34), nn.Linear(34, 34)
            self.qkv, self.proj, self.head = nn.Linear(100, 300), nn.Linear(100, 100), nn.Linear(100, 3)

        def forward(self, x):
            a, b, c = self.embed(x).chunk(3, dim=-1)
            a = self.first(a)
            x = torch.cat([a, self.second(a + b), c], dim=-1)
            batch, length, width = x.shape
            q, k, v = self.qkv(x).reshape(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
            found = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            return self.head(self.proj(found.transpose(1, 2).reshape(batch, length, width)) + x)

    model, x = Torn(), torch.randn(2, 3, 5)
    with pytest.raises(surgery.SurgeryError):  # three parts become 17, 17 and 16, and four heads 13 each
        narrow(model, 0.5, x)
    small, _ = narrow(model, 0.54, x)  # 19, 19 and 18, and 14 each
    assert [small.first.in_features, small.proj.in_features] == [19, 56]
