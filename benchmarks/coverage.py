"""How many models each operation of `surgery` handles, strictly judged, beside torch-pruning alone.

    python benchmarks/coverage.py                       # the smallest model of each of timm's model files
    python benchmarks/coverage.py --suite torchvision   # classification, segmentation, detection
    python benchmarks/coverage.py --suite all           # every timm name, on the meta device: what needs no forward

A model counts for an operation if
- decompose: the layers hold every tensor of the state exactly once, in registration and in execution order;
- shuffle: three random instances recombined layer by layer run, with finite outputs of the same shape;
- graft: one more block in every section that allows it, called once each, finite outputs, and undone bit for bit;
- narrow: at rate 0.5 every hidden width that a layer makes is halved (rounded up; a product of heads and head
  dimension or of groups rounds its one digit), or is an axis of the input or output; the output keeps its shape; a
  training step runs forward and backward with finite numbers; extract(embed(x)) is x bit for bit;
- torch-pruning: its own pruner, told to keep the first channels and given each attention's number of heads as its
  documentation asks, is judged as narrow is, less the last condition.

Each miss is printed with its reason. One thread a process. What takes longer than --seconds (torch-pruning: 60) is a
miss.
"""

import argparse
import json
import math
import multiprocessing
import signal
import sys
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import surgery

RESULTS = Path(__file__).parent / "results"
SMALLEST = Path(__file__).parent / "timm_smallest.json"
# Why a whole axis is no miss: it belongs to the data, to a window or table, or tells heads and groups apart.
RIGHTLY_WHOLE = (
    "input",
    "output",
    "window",
    "looked up",
    "is picked",
    "picked by an index",
    "no layer makes it",
    "pixels",
    "transform",
    "stacked",
    "heads or groups",
    "told apart",
)


class Miss(Exception):
    """The model does not count; the message says why."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=["smallest", "torchvision", "all"], default="smallest")
    parser.add_argument("--names", nargs="*", help="models (timm:NAME, torchvision:NAME) instead of a suite")
    parser.add_argument("--operations", nargs="*", choices=OPERATIONS, help="default: all that the suite allows")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=600, help="for one operation on one model")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/coverage-SUITE.json")
    parser.add_argument("--list-smallest", action="store_true", help=f"find the models of {SMALLEST.name} anew")
    options = parser.parse_args()
    if options.list_smallest:
        SMALLEST.write_text(json.dumps(smallest(), indent=1) + "\n")
        return
    names = options.names or suite(options.suite)
    meta = options.suite == "all" and not options.names
    operations = options.operations or (["decompose", "graft"] if meta else list(OPERATIONS))
    rows = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(
        options.processes, initializer=torch.set_num_threads, initargs=(1,), maxtasksperchild=200 if meta else 6
    ) as pool:
        work = partial(judge, operations=operations, seconds=options.seconds, meta=meta)
        for row in pool.imap_unordered(work, names):
            rows.append(row)
            misses = {o: r for o, r in row["result"].items() if r != "ok"}
            print(f"{len(rows):4}/{len(names)} {row['name']}: {misses or 'ok'}", flush=True)
    rows.sort(key=lambda row: names.index(row["name"]))
    table(rows, operations)
    out = options.out or (None if options.names else RESULTS / f"coverage-{options.suite}.json")
    if out:
        out.write_text(json.dumps({"versions": versions(), "suite": options.suite, "rows": rows}, indent=1) + "\n")


def table(rows: list[dict], operations: list[str]) -> None:
    for operation in operations:
        results = [row["result"][operation] for row in rows]
        print(f"\n{operation}: {results.count('ok')} of {len(results)}")
        for row in rows:
            if row["result"][operation] != "ok":
                print(f"  {row['name']}: {row['result'][operation]}")


def versions() -> dict[str, str]:
    from importlib.metadata import version

    import timm
    import torchvision

    return {
        "torch": torch.__version__, "timm": timm.__version__, "torchvision": torchvision.__version__,
        "torch-pruning": version("torch-pruning"),
    }  # fmt: skip


def smallest() -> dict[str, str]:
    """The model with the fewest parameters of each of timm's model files."""
    import timm
    from timm.models import list_models, list_modules

    found = {}
    for file in sorted(list_modules()):
        sizes = {}
        for name in list_models(module=file):
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name).parameters())
        if sizes:
            found[file] = min(sizes, key=sizes.get)
    return found


def suite(name: str) -> list[str]:
    if name == "smallest":
        return [f"timm:{model}" for model in json.loads(SMALLEST.read_text()).values()]
    if name == "all":
        import timm

        return [f"timm:{model}" for model in timm.list_models()]
    from torchvision.models import list_models

    return [f"torchvision:{model}" for model in list_models() if not model.startswith(("raft", "quantized"))]


def judge(name: str, operations: list[str], seconds: int, meta: bool) -> dict:
    """{operation: "ok" or the reason for a miss} for one model."""
    warnings.filterwarnings("ignore")
    result = {}
    for operation in operations:
        torch.manual_seed(0)
        try:
            with time_limit(min(seconds, 60) if operation == "torch_pruning" else seconds):
                if meta:
                    with torch.device("meta"):
                        model = surgery.named(name)
                    OPERATIONS[operation](model, None, name)
                else:
                    model = surgery.named(name)
                    OPERATIONS[operation](model, surgery.example_input(model), name)
            result[operation] = "ok"
        except TimeoutError:
            result[operation] = "took too long"
        except (Miss, surgery.SurgeryError) as reason:
            result[operation] = f"{type(reason).__name__}: {reason}"
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            result[operation] = f"{type(error).__name__}: {text[0][:300]}"
    return {"name": name, "result": result}


@contextmanager
def time_limit(seconds: int):
    def stop(signum, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def decompose(model: nn.Module, example, name: str) -> None:
    names = sorted(surgery.state(model))
    check(sorted(model.state_dict()) == names or len(names) < len(model.state_dict()), "state and state_dict differ")
    for layers in (surgery.layers(model), *([] if example is None else [surgery.layers(model, example=example)])):
        check(sorted(t for layer in layers for t in layer.tensors) == names, "tensors are missing or held twice")


def shuffle(model: nn.Module, example, name: str) -> None:
    model.eval()
    shapes = [t.shape for t in outputs(model, example)]
    models = surgery.stack([surgery.state(net) for net in (model, surgery.named(name), surgery.named(name))])
    parts = surgery.segments(surgery.layers(model))
    swaps = surgery.permutations(len(parts), 3, generator=torch.Generator().manual_seed(0))
    for mixed in surgery.unstack(surgery.shuffle(models, segments=parts, permutations=swaps, inplace=True)):
        found = outputs(surgery.load(model, mixed), example)
        check([t.shape for t in found] == shapes, "another shape of the output")
        check(all(finite(t) for t in found), "the output is not finite")


def graft(model: nn.Module, example, name: str) -> None:
    found = surgery.sections(model)
    depths = {s.name: len(s.blocks) + 1 for s in found if surgery.repeatable(model, s)}
    check(bool(depths), f"no section with a block that may be repeated, of {len(found)} sections")
    deeper, plan = surgery.graft(model, depths=depths)
    again = {s.name: s for s in surgery.sections(deeper)}
    check(all(len(again[n].blocks) == depth for n, depth in depths.items()), "the depth is not what was asked for")
    if example is not None:
        deeper.eval()
        modules, calls = dict(deeper.named_modules()), Counter()
        for section, depth in depths.items():
            for block in again[section].blocks[depth - 2 :]:
                modules[block].register_forward_hook(lambda *_, block=block: calls.update([block]))
        check(all(finite(t) for t in outputs(deeper, example)), "the output is not finite")
        for section, depth in depths.items():
            last, new = again[section].blocks[depth - 2 :]
            check(calls[new] == calls[last] >= 1, f"the new block {new} ran {calls[new]} times, {last} {calls[last]}")
    depths = {s.name: len(s.blocks) for s in found}
    before = surgery.state(model)
    for back in (plan.build(deeper), surgery.ungraft(deeper, keep=depths)[0]):
        after = surgery.state(back)
        check(list(before) == list(after), "undone, the tensors have other names")
        equal = (
            a.shape == b.shape and (a.is_meta or torch.equal(a, b)) for a, b in zip(before.values(), after.values())
        )
        check(all(equal), "undone, the tensors differ")


def narrow(model: nn.Module, example, name: str) -> None:
    small, plan = surgery.narrow(model, rate=0.5, example=example)
    check_halved(model, small, example)
    check_trains(model, small, example)
    values = surgery.state(small)
    full, _ = plan.embed(values)
    back = plan.extract(full)
    check(all(same_bits(back[n], values[n]) for n in values), "extract(embed(x)) is not x")


def torch_pruning(model: nn.Module, example, name: str) -> None:
    import torch_pruning as tp

    full = surgery.named(name)
    heads = {m.qkv: m.num_heads for m in model.modules() if hasattr(m, "qkv") and hasattr(m, "num_heads")}
    last = model.get_classifier() if hasattr(model, "get_classifier") else None
    ignored = [m for m in (last if isinstance(last, list | tuple) else [last]) if isinstance(m, nn.Module)]
    if not ignored:
        ignored = [[m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]]
    pruner = tp.pruner.BasePruner(
        model.eval(), example, importance=KeepFirst(), pruning_ratio=0.5, ignored_layers=ignored, num_heads=heads,
        prune_num_heads=False, prune_head_dims=True,
    )  # fmt: skip
    pruner.step()
    for module in model.modules():
        if getattr(module, "qkv", None) in heads:  # the repair that its examples make by hand
            module.num_heads = pruner.num_heads[module.qkv]
            module.head_dim = module.qkv.out_features // (3 * module.num_heads)
            if hasattr(module, "attn_dim"):  # newer timm keeps the product, too
                module.attn_dim = module.qkv.out_features // 3
    check_halved(full, model, example)
    check_trains(full, model, example)


class KeepFirst:
    """An importance for torch-pruning that falls with the channel's number."""

    def __call__(self, group, **_):
        return torch.arange(len(group[0].idxs), 0, -1).float()


def check_halved(full: nn.Module, small: nn.Module, example) -> None:
    """Every linear and convolution layer is half as wide at both ends, as far as its ends are hidden widths."""
    try:
        found = surgery.widths(full, example=example, rate=0.5)
    except surgery.SurgeryError:
        found = []
    whole: dict[tuple[str, int], list[str]] = {}
    for width in found:
        for member in width.members:
            whole.setdefault(member, []).append(width.reason)
    after = dict(small.named_modules())
    classes = {getattr(full, "num_classes", 1000), 1000}
    for name, module in full.named_modules():
        if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or name not in after:
            continue
        transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        groups = (getattr(module, "groups", 1), getattr(after[name], "groups", 1))
        for axis in (0, 1):
            side = groups if axis == (0 if transposed else 1) else (1, 1)
            old, new = module.weight.shape[axis] * side[0], after[name].weight.shape[axis] * side[1]
            reasons = whole.get((f"{name}.weight", axis))
            if reasons is None and found:
                rightly = True  # single positions, which cannot shrink
            elif reasons is None:
                rightly = old in ({3} if axis else classes)
            else:
                rightly = all(any(word in reason for word in RIGHTLY_WHOLE) for reason in reasons if reason)
            if not (halved(old, new) or (new == old and rightly)):
                raise Miss(f"axis {axis} of {name}.weight went from {old} to {new}")


def halved(old: int, new: int) -> bool:
    """Half, rounded up; or a product one digit of which is, or a sum of at most 8 terms that are."""
    digit = any(old % d == 0 and old // d * math.ceil(d / 2) == new for d in range(2, old + 1))
    return old == new == 1 or digit or (new < old and 0 <= new - math.ceil(old / 2) < 8)


def check_trains(full: nn.Module, small: nn.Module, example) -> None:
    full.eval(), small.eval()
    check(
        [t.shape for t in outputs(full, example)] == [t.shape for t in outputs(small, example)], "another output shape"
    )
    small.train()
    loss = sum(t.float().square().mean() for t in tensors(call(small, example)) if t.is_floating_point())
    loss.backward()
    check(math.isfinite(loss.item()), "the loss is not finite")
    gradients = [p.grad for p in small.parameters() if p.grad is not None]
    check(bool(gradients) and all(finite(g) for g in gradients), "a gradient is not finite")


def check(condition: bool, reason: str) -> None:
    if not condition:
        raise Miss(reason)


def outputs(model: nn.Module, example) -> list[Tensor]:
    with torch.no_grad():
        return tensors(call(model, example))


def call(model: nn.Module, example):
    return model(*example) if isinstance(example, tuple) else model(example)


def tensors(tree) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


OPERATIONS = {
    "decompose": decompose, "shuffle": shuffle, "graft": graft, "narrow": narrow, "torch_pruning": torch_pruning
}  # fmt: skip

if __name__ == "__main__":
    main()
