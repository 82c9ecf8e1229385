"""What other packages can of what `surgery` can; each claim is a command.

    python benchmarks/others.py [--mergekit PYTHON] [--fusionbench PYTHON]    # runs all claims, stores which hold
    python benchmarks/others.py ours_align              # one of them: exit status 0 if it holds
    python benchmarks/others.py --table                 # the stored results as the page shows them

A claim may return numbers. Those of features that have a page become the sentence behind a mark on it.

A claim about mergekit or FusionBench runs in the Python of an environment that has it. Git Re-Basin's and Net2Net's
codes are no packages (JAX scripts, Lua): what is said of them has a link instead.
"""

import argparse
import copy
import importlib.metadata
import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

OUT = Path(__file__).parent / "results"
IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit() -> nn.Module:
    """Return a small Vision Transformer of timm."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=10).eval()


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two models compute the same of an image."""
    with torch.no_grad():
        return torch.allclose(one.double()(IMAGE.double()), other.double()(IMAGE.double()), rtol=0, atol=1e-10)


def ours_narrow() -> None:
    """`narrow` makes a Vision Transformer half as wide; nobody says how many heads it has."""
    import surgery

    small, _ = surgery.narrow(vit(), 0.5, IMAGE)
    assert small(IMAGE).shape == (2, 10)
    assert small.blocks[0].mlp.fc1.out_features == 96


def pruned(heads: bool) -> tuple[nn.Module, list]:
    """A Vision Transformer made half as wide by torch-pruning, told its heads or not, and the history of that."""
    import torch_pruning as tp

    net = vit()
    told = {"num_heads": {block.attn.qkv: 4 for block in net.blocks}} if heads else {}
    importance = tp.importance.MagnitudeImportance()
    pruner = tp.pruner.BasePruner(net, IMAGE, importance, pruning_ratio=0.5, ignored_layers=[net.head], **told)
    pruner.step()
    return net, pruner.pruning_history()


def pruning_narrow() -> None:
    """It does so if it is told the heads, and if the attentions' attributes are set by hand; else nothing runs."""
    for heads in (False, True):
        net, _ = pruned(heads)
        try:
            net(IMAGE)
        except RuntimeError:
            continue
        raise AssertionError("it runs as it is")
    for block in net.blocks:
        block.attn.attn_dim = block.attn.qkv.out_features // 3
        block.attn.head_dim = block.attn.attn_dim // block.attn.num_heads
    assert net(IMAGE).shape == (2, 10)


def ours_plan() -> None:
    """What was cut is a plan: it is saved as text, read back, and cuts the same out of another state."""
    import surgery

    net = vit()
    small, plan = surgery.narrow(net, 0.5, IMAGE)
    state = surgery.Plan.from_json(plan.to_json()).extract(surgery.state(net))
    assert all(torch.equal(tensor, state[name]) for name, tensor in surgery.state(small).items())


def pruning_plan() -> None:
    """The history of what was cut, layers and indices, is saved and does the same to another model of the class."""
    import torch_pruning as tp

    small, history = pruned(heads=True)
    net = vit()
    graph = tp.DependencyGraph().build_dependency(net, example_inputs=IMAGE)
    graph.load_pruning_history(json.loads(json.dumps(history)))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), small.parameters(), strict=True))


def ours_permute() -> None:
    """`permute` puts all widths of a Vision Transformer in another order, heads as well; outputs stay to 1e-10."""
    import surgery

    net = vit().double()
    found = {w.name: w.size for w in surgery.widths(net, IMAGE.double()) if not w.order}
    other, _ = surgery.symmetry.permute(net, {n: torch.randperm(s) for n, s in found.items()}, example=IMAGE.double())
    assert same(net, other)
    assert not torch.equal(net.head.weight, other.head.weight)


def ours_align() -> None:
    """`align` finds a permuted Vision Transformer and a permuted residual network again, bit for bit."""
    import surgery
    import zoo

    for net in (vit(), zoo.create("resnet20", norm="layer")):
        found = {w.name: w.size for w in surgery.widths(net, IMAGE) if not w.order}
        other, _ = surgery.symmetry.permute(net, {n: torch.randperm(s) for n, s in found.items()}, example=IMAGE)
        again = surgery.state(surgery.symmetry.align([net, other], example=IMAGE).models[1])
        assert all(torch.equal(tensor, again[name]) for name, tensor in surgery.state(net).items())


def ours_widen() -> None:
    """`widen` doubles every hidden width of a Vision Transformer, heads as well; outputs stay to 1e-10."""
    import surgery

    wide, _ = surgery.widening.widen(vit().double(), rate=2, example=IMAGE.double(), strict=True)
    assert wide.blocks[0].attn.num_heads == 8
    assert same(vit(), wide)


def ours_deepen() -> None:
    """`graft(mode="identity")` adds a block to a Vision Transformer that changes nothing yet."""
    import surgery

    deep, _ = surgery.graft(vit(), depths=[3], mode="identity", example=IMAGE)
    assert len(deep.blocks) == 3
    assert same(vit(), deep)


def pruning_grows() -> None:
    """It has no function that permutes, aligns, widens, deepens or merges."""
    import torch_pruning as tp

    words = ("permut", "align", "widen", "deepen", "graft", "merge")
    names = [*dir(tp), *dir(tp.DependencyGraph), *dir(tp.pruner), *dir(tp.utils)]
    assert not [name for name in names if any(word in name.lower() for word in words)]


def ours_merge() -> None:
    """Any two states are merged, here those of a convolutional network of timm."""
    import timm

    import surgery

    nets = [timm.create_model("test_resnet") for _ in range(2)]
    merged = surgery.merging.linear(nets)
    for name, tensor in surgery.state(nets[0]).items():
        mean = (tensor + surgery.state(nets[1])[name]) / 2
        assert not tensor.is_floating_point() or torch.allclose(merged[name], mean)


def mergekit_merge() -> None:
    """`mergekit-pytorch` merges any two states, here of timm; `mergekit-yaml`, with slices, refuses such folders."""
    import timm
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge
    from mergekit.scripts.merge_raw_pytorch import main as merge_raw
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        states = [timm.create_model("test_resnet").state_dict() for _ in "ab"]
        for name, state in zip("ab", states):
            Path(folder, name).mkdir()
            save_file(state, Path(folder, name, "model.safetensors"))
            Path(folder, name, "config.json").write_text('{"architecture": "test_resnet"}')
        said = {"merge_method": "linear", "dtype": "float32", "parameters": {"weight": 1}}
        raw = said | {"models": [{"model": f"{folder}/{name}/model.safetensors"} for name in "ab"]}
        Path(folder, "raw.yml").write_text(json.dumps(raw))  # which YAML takes
        merge_raw([f"{folder}/raw.yml", f"{folder}/raw"], standalone_mode=False)
        merged = load_file(next(Path(folder, "raw").glob("*.safetensors")))
        for name in (name for name, tensor in states[0].items() if tensor.is_floating_point()):
            torch.testing.assert_close(merged[name], (states[0][name] + states[1][name]) / 2)
        config = MergeConfiguration.model_validate(said | {"models": [{"model": f"{folder}/{name}"} for name in "ab"]})
        try:
            run_merge(config, f"{folder}/out", MergeOptions(copy_tokenizer=False))
        except ValueError as error:
            refused = "Unrecognized model" in str(error)
        else:
            refused = False
    assert refused


def ours_informed() -> None:
    """`fisher`, `regmean` and `greedy_soup`, whose weights come from data, are there."""
    from surgery import merging

    plain = {"linear", "slerp", "multislerp", "karcher", "nearswap", "task_arithmetic", "ties", "dare", "breadcrumbs"}
    assert plain | {"della", "model_stock", "sce"} <= merging.METHODS.keys()
    assert all(callable(getattr(merging, name)) for name in ("fisher", "regmean", "greedy_soup", "passthrough"))


def mergekit_methods() -> set[str]:
    """Return the names of mergekit's methods."""
    from mergekit.merge_methods.registry import registered_methods

    return {method.spec.name for method in registered_methods()}


def mergekit_informed() -> None:
    """mergekit has no method by Fisher information, RegMean or greedy soup."""
    names = [name.lower() for name in mergekit_methods()]
    assert "ties" in names
    assert not [name for name in names if "fisher" in name or "regmean" in name or "soup" in name]


def mergekit_more() -> None:
    """mergekit has methods that `surgery` lacks: Arcee fusion and RAM."""
    from surgery import merging

    assert {"arcee_fusion", "ram"} <= mergekit_methods()
    assert not {"arcee_fusion", "ram"} & set(dir(merging))


def numbered() -> list[nn.Module]:
    """Networks with batch norm, the numbers of each being its own."""
    nets = [nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)) for _ in range(8)]
    for number, net in enumerate(nets):
        for tensor in net.state_dict().values():
            tensor.fill_(number)
    return nets


def whole_layers(states: list) -> bool:
    """Return whether the tensors of each layer come from one model."""
    return all(len({state[n].flatten()[0].item() for n in state if n[0] == k}) == 1 for state in states for k in "012")


def ours_recombine() -> None:
    """Layers of several models are exchanged (FedMR): a weight, its bias and a norm's statistics stay together."""
    import surgery

    nets = numbered()
    parts = surgery.segments(surgery.layers(nets[0]))
    rows = surgery.permutations(len(parts), len(nets), generator=torch.Generator().manual_seed(0))
    mixed = surgery.unstack(surgery.shuffle(surgery.stack(nets), segments=parts, permutations=rows))
    assert whole_layers(mixed)


def fusionbench_recombine() -> None:
    """It exchanges layers of a ModuleList; of any other module each tensor by itself, so that layers are torn."""
    from fusion_bench.method.model_recombination import recombine_modellist, recombine_state_dict

    lists = recombine_modellist([nn.ModuleList(net) for net in numbered()])
    assert whole_layers([net.state_dict() for net in lists])
    assert not whole_layers([net.state_dict() for net in recombine_state_dict(numbered())])


def resnet(classes: int = 10) -> nn.Module:
    """Return a ResNet-18 of timm."""
    import timm

    torch.manual_seed(0)
    return timm.create_model("resnet18", num_classes=classes).eval()


def dropped(net: nn.Module, layer: nn.Module, function: str, positions: list[int]) -> None:
    """Drop given outputs of a layer by torch-pruning."""
    import torch_pruning as tp

    graph = tp.DependencyGraph().build_dependency(net, example_inputs=IMAGE)
    graph.get_pruning_group(layer, getattr(tp, function), idxs=positions).prune()


def pruning_drop() -> dict[str, float]:
    """It drops given channels of a ResNet-18 as `surgery.pruning.drop` does; a Vision Transformer without the first
    head does not run, where ours does."""
    import surgery

    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(7):
        net, other, start = resnet(), resnet(), time.perf_counter()
        net, _ = surgery.pruning.drop(net, {"layer1.0.conv1": [2, 6, 9]}, example=IMAGE)
        middle = time.perf_counter()
        dropped(other, other.layer1[0].conv1, "prune_conv_out_channels", [2, 6, 9])
        seconds["ours"].append(middle - start)
        seconds["theirs"].append(time.perf_counter() - middle)
    assert same(net, other)
    net, name = vit(), "blocks.0.attn.qkv"
    head = [part * 48 + position for part in range(3) for position in range(12)]
    small, _ = surgery.pruning.drop(net, {name: head}, example=IMAGE)
    assert small(IMAGE).shape == (2, 10)
    dropped(net, net.blocks[0].attn.qkv, "prune_linear_out_channels", head)
    try:
        net(IMAGE)
    except RuntimeError:
        return {"ratio": statistics.median(seconds["ours"]) / statistics.median(seconds["theirs"])}
    raise AssertionError("it runs")


def pruning_zeros() -> dict[str, float]:
    """It has no call for zero channels; those that a norm makes nonzero change the outputs, and ours keeps them."""
    import surgery

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    net[1].bias.data.uniform_(0.1, 1)
    zero = [1, 5, 6, 11]
    net[0].weight.data[zero] = net[0].bias.data[zero] = 0
    quiet = zero[:2]
    net[1].bias.data[quiet] = 0
    full = net(IMAGE)
    small, _ = surgery.pruning.drop_zeros(net, example=IMAGE)
    assert small[0].out_channels == 16 - len(quiet)
    assert torch.allclose(small(IMAGE), full, atol=1e-6)
    dropped(net, net[0], "prune_conv_out_channels", zero)
    lost = ((net(IMAGE) - full).norm() / full.norm()).item()
    assert lost > 0.01
    return {"lost": lost}


def pruning_optimizer() -> dict[str, float]:
    """An optimizer made before holds few of the parameters afterwards; after `surgery.optimizers.follow` all."""
    import torch_pruning as tp

    import surgery

    net = resnet()
    optimizer = torch.optim.AdamW(net.parameters())
    net(IMAGE).sum().backward()
    optimizer.step()

    def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        tensors = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        return sum(id(tensor) in tensors for tensor in model.parameters())

    small, plan = surgery.narrow(net, 0.5, IMAGE)
    count = len([*small.parameters()])
    moved = surgery.optimizers.follow(optimizer, net, small, plan)
    assert held(small, moved) == count
    assert all(moved.state[tensor]["exp_avg"].shape == tensor.shape for tensor in small.parameters())
    importance = tp.importance.MagnitudeImportance()
    tp.pruner.BasePruner(net, IMAGE, importance, pruning_ratio=0.5, ignored_layers=[net.fc]).step()
    assert held(net, optimizer) < count
    return {"held": held(net, optimizer), "all": count}


def torch_load() -> dict[str, float]:
    """Of a checkpoint with a prefix torch takes nothing, without an error; with other shapes torch and timm raise."""
    import timm

    import surgery

    state = surgery.state(resnet(10))
    parallel = {f"module.{name}": tensor for name, tensor in state.items()}
    _, fit = surgery.load(resnet(3), parallel, fit="corner")
    unused = resnet(3).load_state_dict(parallel, strict=False).unexpected_keys
    with tempfile.TemporaryDirectory() as folder:
        torch.save(parallel, f"{folder}/model.pth")
        for attempt in (
            lambda: resnet(3).load_state_dict(state, strict=False),
            lambda: timm.models.load_checkpoint(resnet(3), f"{folder}/model.pth", strict=False),
        ):
            try:
                attempt()
            except RuntimeError:  # size mismatch
                continue
            raise AssertionError("it takes other shapes")
    return {"taken": len(fit.taken), "cut": len(fit.cut), "all": len(state), "torch": len(parallel) - len(unused)}


def transformers_vocabulary() -> dict[str, float]:
    """`resize_token_embeddings` keeps the first tokens alone, and then names a padding token that is gone; the rows of
    new tokens are random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import surgery

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(vocab_size=40, pad_token_id=30, tie_word_embeddings=False, **sizes)).eval()
    kept, ids = [1, 2, 5, 7, 30], torch.tensor([[2, 7, 5]])
    small = surgery.vocabulary.keep(net, kept).model
    error = (small(torch.tensor([[1, 3, 2]])).logits - net(ids).logits[..., kept]).abs().max().item()
    assert small.config.pad_token_id == 4
    assert error < 1e-6
    cut = copy.deepcopy(net)
    cut.resize_token_embeddings(20)
    assert torch.equal(cut.model.embed_tokens.weight, net.model.embed_tokens.weight[:20])
    assert cut.config.pad_token_id == 30
    grown = [copy.deepcopy(net) for _ in range(2)]
    for one in grown:
        one.resize_token_embeddings(42)
    assert not torch.equal(*(one.model.embed_tokens.weight for one in grown))
    return {"rows": 20, "pad": cut.config.pad_token_id}


BASIN = "https://github.com/samuela/git-re-basin/blob/main/src/weight_matching.py"
NET2NET = "https://github.com/soumith/net2net.torch"
ROWS: dict[str, dict[str, Callable[[], dict[str, float] | None] | str]] = {
    "narrow any model": {"surgery": ours_narrow, "torch-pruning": pruning_narrow},
    "save what was cut": {"surgery": ours_plan, "torch-pruning": pruning_plan},
    "permute widths, heads as well": {"surgery": ours_permute, "torch-pruning": pruning_grows},
    "align models trained apart": {
        "surgery": ours_align,
        "git-re-basin": f"by [a table written by hand]({BASIN}) for an MLP, VGG-16, ResNet-20 and ResNet-50; attention "
        "and groups are [asked for](https://github.com/samuela/git-re-basin/issues/6)",
    },
    "widen, outputs equal": {
        "surgery": ours_widen,
        "Net2Net": f"[two layers in sequence]({NET2NET}), named by their positions",
    },
    "deepen, outputs equal": {
        "surgery": ours_deepen,
        "Net2Net": f"[a layer]({NET2NET}) after a named one",
    },
    "merge any two states": {"surgery": ours_merge, "mergekit": mergekit_merge},
    "recombine layers of models": {"surgery": ours_recombine, "FusionBench": fusionbench_recombine},
    "merge by data": {"surgery": ours_informed, "mergekit": mergekit_informed},
    "merge by Arcee fusion, RAM": {"mergekit": mergekit_more},
    "drop given channels": {"torch-pruning": pruning_drop},
    "drop zero channels": {"torch-pruning": pruning_zeros},
    "go on with the optimizer": {"torch-pruning": pruning_optimizer},
    "load what fits": {"torch, timm": torch_load},
    "other vocabularies": {"transformers": transformers_vocabulary},
}  # fmt: skip
CLAIMS = {claim.__name__: claim for row in ROWS.values() for claim in row.values() if callable(claim)}


MIDTRAINING, VOCABULARY = "docs/guides/midtraining.md", "docs/guides/vocabulary.md"
SENTENCES = {
    "pruning_drop": (
        MIDTRAINING,
        "torch-pruning {torch-pruning} drops given channels of a ResNet-18 with the same result; `drop`, which "
        "also checks the outputs, takes {ratio:.1f} times as long. If torch-pruning drops the first head of a "
        "Vision Transformer, the model does not run; `drop` also changes the attention's number of heads.",
    ),
    "pruning_zeros": (
        MIDTRAINING,
        "torch-pruning has no call for zero channels. If you drop zero channels by hand, the outputs can change: by "
        "{lost:.0%} in a network where a batch norm makes some of them nonzero.",
    ),
    "pruning_optimizer": (
        MIDTRAINING,
        "After a cut by torch-pruning {torch-pruning}, an AdamW from before the cut holds {held} of a ResNet-18's "
        "{all} parameters and trains no others. After `follow` it holds all.",
    ),
    "torch_load": (
        MIDTRAINING,
        "A ResNet-18 with 3 classes loads a state with 10 classes and names with `module.`: `load` with "
        "`fit='corner'` takes {taken} of {all} tensors whole and cuts {cut}. torch's `load_state_dict(strict=False)` "
        "takes {torch}, without an error. Without the prefix it raises an error for the shapes, as does timm {timm}'s "
        "`load_checkpoint`, which removes the prefix itself.",
    ),
    "transformers_vocabulary": (
        VOCABULARY,
        "`resize_token_embeddings` of transformers {transformers} keeps the first tokens only: after a cut "
        "to {rows} tokens, a Llama still has `pad_token_id={pad}`. Rows that it adds are random.",
    ),
}
"""Numbers of a claim in a sentence, and the page that has it behind a mark."""


def sentences(stored: dict) -> dict[str, tuple[str, str]]:
    """By claim the page, and the sentence with the stored numbers and versions."""
    numbers = {name: stored["versions"] | found.get("numbers", {}) for name, found in stored["claims"].items()}
    return {name: (page, text.format(**numbers[name])) for name, (page, text) in SENTENCES.items()}


def marked(name: str, program: str = "others.py") -> str:
    """Return the mark above a sentence on its page."""
    return f"<!-- made by benchmarks/{program} {name} -->"


def write_sentences(made: dict[str, tuple[str, str]], program: str = "others.py") -> None:
    """Put the sentences into their pages."""
    for name, (page, text) in made.items():
        path, mark = Path(__file__).parents[1] / page, f"{marked(name, program)}\n"
        before, _, after = path.read_text().partition(mark)
        lines = "\n".join(textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False))
        path.write_text(before + mark + lines + after[re.search(r"\n\n|\n?\Z", after).start() :])


def holds(name: str, python: str) -> dict:
    """Runs a claim in a process of its own: whether it holds, and otherwise the last line that it printed."""
    try:
        run = subprocess.run([python, __file__, name], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"holds": False, "why": "it took more than 300 seconds"}
    if run.returncode == 0:
        last = run.stdout.strip().splitlines()[-1:]
        return {"holds": True, **({"numbers": json.loads(last[0])} if last and last[0].startswith("{") else {})}
    return {"holds": False, "why": (run.stderr.strip().splitlines() or [""])[-1]}


def table(found: dict[str, dict]) -> str:
    """Return the claims as Markdown."""
    lines = ["| | who | what | claim | holds |", "|---|---|---|---|---|"]
    for what, row in ROWS.items():
        for who, claim in row.items():
            name = claim.__name__ if callable(claim) else ""
            said = " ".join((claim.__doc__ or "").split()) if callable(claim) else claim
            verdict = {True: "yes", False: "no"}.get(found.get(name, {}).get("holds"), "not run") if name else "by link"
            lines.append(f"| {what} | {who} | {said} | {f'`{name}`' if name else '-'} | {verdict} |")
            what = ""
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", nargs="?", choices=[*CLAIMS])
    parser.add_argument("--mergekit", default=sys.executable, help="a Python that has mergekit")
    parser.add_argument("--fusionbench", default=sys.executable, help="a Python that has FusionBench")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    path = args.out / "others.json"
    if args.claim:
        if numbers := CLAIMS[args.claim]():
            print(json.dumps(numbers))
        return
    if args.table:
        print(table(json.loads(path.read_text())["claims"]))
        return
    found = {}
    pythons = {"mergekit": args.mergekit, "fusionbench": args.fusionbench}
    for name in CLAIMS:
        found[name] = holds(name, pythons.get(name.partition("_")[0], sys.executable))
        print(f"{name:20} {'holds' if found[name]['holds'] else 'DOES NOT HOLD: ' + found[name]['why']}", flush=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "timm", "torch-pruning", "transformers")}
    for name, python in {"mergekit": args.mergekit, "fusion-bench": args.fusionbench}.items():
        ask = f"from importlib.metadata import version; print(version({name!r}))"
        versions[name] = subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {"versions": versions, "claims": found}
    path.write_text(json.dumps(stored, indent=1) + "\n")
    write_sentences(sentences(stored))
    print(f"wrote {path}")
    sys.exit(not all(one["holds"] for one in found.values()))


if __name__ == "__main__":
    main()
