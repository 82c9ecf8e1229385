"""Whether a change of the code changed what surgery makes of models: every operation on many models, bit for bit.

    python benchmarks/golden_surgery.py write FILE [NAME ...]    # at the version before
    python benchmarks/golden_surgery.py check FILE [NAME ...]    # after, on the same machine and packages

NAME is a suite (handwritten, huggingface, torchvision, smallest, merges) or a model of one (timm:test_resnet); without
any all suites are run, or what FILE holds. Compared are plans (entries and edits), the tensors of the models that are
made, their outputs, scores and names of widths, and whether an operation refuses. Where only the words of a message
differ, it is printed and not counted.
"""

import argparse
import copy
import hashlib
import inspect
import json
import logging
import multiprocessing
import sys
import time
import warnings
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import surgery
from benchmarks.calls import outputs
from benchmarks.coverage import time_limit
from benchmarks.judges import randomize
from benchmarks.models import case, suite

SUITES = ("handwritten", "huggingface", "torchvision", "smallest", "merges")
SECONDS = 240  # for one operation on one model


def digest(*trees) -> str:
    """Return a hash of nested tensors and JSON values."""
    sha = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().reshape(-1)
            sha.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(value, dict):
            for key in value:
                sha.update(f"{key}:".encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            sha.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    for tree in trees:
        add(tree)
    return sha.hexdigest()[:16]


def plan_digest(plan) -> str:
    """Return a hash of what a plan says: shapes, entries, edits."""
    text = json.loads(plan.to_json())
    return digest([text["full"], sorted(text["entries"].items()), text["edits"]])


def made(model: nn.Module, plan, example) -> list[str]:
    """Hashes of a plan, of the model's tensors, and of its outputs."""
    model.eval()
    torch.manual_seed(1)
    return [plan_digest(plan), digest(dict(surgery.state(model))), digest(outputs(model, example))]


def operations(model: nn.Module, example):
    """Every operation by name, as a function of nothing that returns what is to be the same."""

    def named_widths() -> list:
        found = surgery.widths(model, example, 0.5)
        return [(w.size, w.kept, w.members, w.name, w.grouping) for w in found]

    def permuted() -> list[str]:
        generator = torch.Generator().manual_seed(0)
        free = [w for w in surgery.widths(model, example) if w.name and not w.order and not w.reason]
        orders = {w.name: torch.randperm(w.size, generator=generator) for w in free}
        return made(*surgery.symmetry.permute(model, orders, example=example), example)

    def scores(by: str = "l1"):
        return surgery.pruning.importance(model, example=example, by=by)

    def deeper():
        depths = {
            s.name: len(s.blocks) + 1
            for s in surgery.sections(model)
            if sys.modules["surgery.depth.sections"].repeatable(model, s)
        }
        return surgery.graft(model, depths=depths, example=example)

    def shallower() -> list[str]:
        keep = {s.name: 1 for s in surgery.sections(model)}
        return made(*surgery.ungraft(model, keep=keep, example=example), example)

    def rolled() -> list[str]:
        small, _ = surgery.narrow(model, 0.5, example)
        plan = surgery.width.corner.rolling(model, small, example=example)(1)
        return [plan_digest(plan), digest(dict(plan.extract(model)))]

    def aligned() -> list[str]:
        other = copy.deepcopy(model)
        with torch.no_grad():
            torch.manual_seed(3)
            for parameter in other.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
        found = surgery.symmetry.align([model, other], example=example)
        return [digest(dict(surgery.state(m))) for m in found.models]

    def pruned() -> list[str]:
        target = surgery.pruning.Target(parameters=0.5)
        return made(*surgery.pruning.prune(model, target=target, importance=None, example=example)[:2], example)

    def narrowed(width: float, **how) -> list[str]:
        return made(*surgery.narrow(model, width, example, **how), example)

    return {
        "layers": lambda: [digest([(x.name, x.kind, list(x.tensors)) for x in surgery.layers(model, example=example)])],
        "sections": lambda: [digest([(s.name, list(s.blocks)) for s in surgery.sections(model)])],
        "widths": lambda: [digest(named_widths())],
        "narrow 0.5": lambda: narrowed(0.5),
        "narrow 0.7, strict": lambda: narrowed(0.7, strict=True),
        "narrow 0.5, heads drop": lambda: narrowed(0.5, heads="drop"),
        "narrow by l1": lambda: narrowed(0.5, scores=scores()),
        "narrow to parameters": pruned,
        "importance": lambda: [digest(dict(sorted(scores("l2").items())))],
        "permute": permuted,
        "sort_by": lambda: made(*surgery.symmetry.permute(model, by=scores(), example=example), example),
        "widen": lambda: made(*surgery.widening.widen(model, rate=1.5, example=example), example),
        "rolling": rolled,
        "align": aligned,
        "graft": lambda: made(*deeper(), example),
        "ungraft": shallower,
    }


def of_model(name: str) -> dict[str, list[str]]:
    """{operation: what it gives, or its refusal} for one model."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = case(name)
    model = chosen.build()
    model.eval()
    example = chosen.example(model)
    randomize(model)
    found = {}
    for operation, run in operations(model, example).items():
        torch.manual_seed(0)
        try:
            with time_limit(SECONDS):
                found[f"{name} {operation}"] = run()
        except TimeoutError:
            found[f"{name} {operation}"] = ["too slow"]
        except Exception as error:
            found[f"{name} {operation}"] = [f"{type(error).__name__}", "text " + str(error)[:1000]]
    return found


def merges() -> dict[str, list[str]]:
    """Return what every method of merging makes of five states."""
    from surgery import merging

    def state(seed: int) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
        return {
            "a.weight": draw(37, 19), "a.bias": draw(37), "b.weight": draw(3, 5, 3, 3).to(torch.bfloat16),
            "c.scale": draw(11).double(), "c.count": torch.tensor(seed), "d": draw(64, 64).half(), "e": draw().abs(),
        }  # fmt: skip

    models, base = [state(s) for s in range(1, 6)], state(0)
    settings = {
        "linear": [{}, {"weights": [1, 2, 0, 1, 1]}, {"weights": [1.0] * 5, "normalize": False}],
        "slerp": [{"t": 0.3}], "nearswap": [{"t": 0.5}], "multislerp": [{}, {"weights": [1, 2, 3, 1, 1]}],
        "karcher": [{}], "task_arithmetic": [{}, {"scale": 0.4}], "ties": [{}, {"density": 0.3}],
        "dare": [{}, {"density": 0.5, "elect": True}], "breadcrumbs": [{}], "della": [{}], "sce": [{}, {"select": 0.3}],
        "model_stock": [{}], "fisher": [{}], "regmean": [{}], "passthrough": [], "union": [],
    }  # fmt: skip
    found = {}
    for name, rows in settings.items():
        method = getattr(merging, name)
        takes = inspect.signature(method).parameters
        for row in rows:
            given = dict(row)
            if "base" in takes:
                given["base"] = base
            if name == "fisher":
                given["fishers"] = [{k: v.abs() for k, v in m.items()} for m in models]
            if name == "regmean":
                given["grams"] = [{"a.weight": m["a.weight"].T @ m["a.weight"] + torch.eye(19)} for m in models]
            stacks = models[:2] if name in ("slerp", "nearswap") else models
            if name == "nearswap":
                stacks = models[:1]
            for kind, few in ((" ", stacks), (" of two ", stacks[:2])):
                try:
                    if "weights" in given and len(few) != 5:
                        given["weights"] = given["weights"][: len(few)]
                    if "fishers" in given:
                        given["fishers"] = given["fishers"][: len(few)]
                    if "grams" in given:
                        given["grams"] = given["grams"][: len(few)]
                    found[f"merges {name}{kind}{row}"] = [digest(dict(method(few, **given)))]
                except Exception as error:
                    found[f"merges {name}{kind}{row}"] = [type(error).__name__, "text " + str(error)[:500]]
    return found


def results_of(name: str) -> dict[str, list[str]]:
    """Those of one model, or of the merges."""
    try:
        return merges() if name == "merges" else of_model(name)
    except Exception as error:
        return {name: [type(error).__name__, f"text {error}"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="suites or models")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    stored = json.loads(options.file.read_text()) if options.file.exists() else {}
    held = list(dict.fromkeys(key.split(" ")[0] for key in stored))
    wanted = options.names or list(SUITES)
    names = [n for w in wanted for n in ([w] if w == "merges" else suite(w) if w in SUITES else [w])]
    if options.action == "check":
        names = [n for n in names if n in held]
    differ = texts = count = 0
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=20) as pool:
        for name, found in zip(names, pool.imap(results_of, names)):
            if options.action == "write":
                stored.update(found)
                options.file.write_text(json.dumps(stored, indent=0))
                print(time.strftime("%H:%M:%S"), name, len(found), flush=True)
                continue
            before = {k: v for k, v in stored.items() if k.split(" ")[0] == name}
            for key in {**before, **found}:
                count += 1
                old, new = before.get(key), found.get(key)
                if "too slow" in (old or []) + (new or []):
                    continue
                if old and new and old[:1] == new[:1] and len(old) == 2 and str(old[1]).startswith("text"):
                    if old != new:
                        texts += 1
                        print(f"  other words: {key}\n    {old[1]}\n    {new[1]}", flush=True)
                elif old != new:
                    differ += 1
                    print(f"DIFFERS {key}\n    {old}\n    {new}", flush=True)
    if options.action == "check":
        print(f"{count} cases of {len(names)} models: {differ} differ; {texts} refusals in other words")
        sys.exit(bool(differ))


if __name__ == "__main__":
    main()
