"""mergekit's files merged by `surgery merge FILE OUT` and by mergekit: do they agree, how long, how much memory?

    python benchmarks/mergekit_files.py --folder merging --mergekit PYTHON [--dtype float32]   # stored in results
    python benchmarks/mergekit_files.py --table                              # the stored results as a page shows them

PYTHON is that of an environment with mergekit. The models are Llamas with random weights, three of one vocabulary and
three of unequal ones; the folder is new, and deleted at the end.

First, all files are merged on small models, and the results compared. Then those of --timed are merged on large models,
each in a process of its own, the two sides in turns; which one begins changes from round to round. Memory is the
largest resident set of a process (VmHWM; pages of mapped files count), and the largest anonymous one beside it.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from merging import ROOT, apart, measured

OUT = Path(__file__).parent / "results"
DTYPES = ("float32", "bfloat16")
TIMED = "linear;ties;passthrough;tokens of union"
WORDS = 8000


def of(name: str, **parameters: Any) -> dict[str, Any]:
    """An entry of models."""
    return {"model": name, "parameters": parameters} if parameters else {"model": name}


def cut(name: str, first: int, end: int, **parameters: Any) -> dict[str, Any]:
    """A slice's source."""
    return {**of(name, **parameters), "layer_range": [first, end]}


def merge(method: str, *models: dict[str, Any], base: str | None = None, **others: Any) -> dict[str, Any]:
    """A configuration; `parameters` and the other keys as they are."""
    sources = {"models": list(models)} if models else {}
    return {"merge_method": method, **sources, **({"base_model": base} if base else {}), **others}


GRADIENT = [0.2, 0.9, 0.4]
WEIGHED = [of("a", weight=0.7), of("b", weight=GRADIENT)]
DENSE = [
    of("a", weight=0.7, density=0.5),
    of("b", weight=GRADIENT, density=[{"filter": "mlp", "value": [0.3, 0.9]}, {"value": 0.6}]),
]
TRIMMED = [of("a", weight=0.7, density=0.8, gamma=0.05), of("b", weight=[0, 1], density=0.6, gamma=0.1)]
ARC = [{"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]}, {"filter": "mlp", "value": [1, 0.5, 0]}, {"value": 0.4}]
NO_OUT = {"scale": [{"filter": "o_proj", "value": 0.0}, {"value": 1.0}]}
TOKENS = [of("ta", weight=2), of("tb", weight=3)]
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "linear": merge("linear", *WEIGHED),
    "linear, a sum": merge("linear", *WEIGHED, parameters={"normalize": False}, dtype="float32", out_dtype="bfloat16"),
    "slerp": merge("slerp", of("b"), of("a"), base="a", parameters={"t": ARC}),
    "slerp of slices": merge(
        "slerp", base="a", slices=[{"sources": [cut("a", 0, 4), cut("b", 0, 4)]}], parameters={"t": [0, 1]}
    ),
    "nuslerp": merge("nuslerp", *WEIGHED),
    "nuslerp from a base": merge("nuslerp", *WEIGHED, base="o"),
    "multislerp": merge("multislerp", *WEIGHED),
    "multislerp from a base": merge("multislerp", *WEIGHED, base="o"),
    "karcher": merge("karcher", of("a"), of("b"), of("o")),
    "task arithmetic": merge("task_arithmetic", *WEIGHED, base="o", parameters={"lambda": 0.8, "normalize": True}),
    "ties": merge("ties", of("o"), *DENSE, base="o", parameters={"int8_mask": True}),
    "ties, a sum": merge("ties", *DENSE, base="o", parameters={"normalize": False, "lambda": [0.5, 1.5]}),
    "dare, all kept": merge(
        "dare_linear", of("a", weight=0.5), of("b", weight=[0, 1]), base="o", parameters={"density": 1.0}
    ),
    "breadcrumbs": merge("breadcrumbs", *TRIMMED, base="o"),
    "breadcrumbs and ties": merge("breadcrumbs_ties", *TRIMMED, base="o"),
    "model stock": merge("model_stock", of("a"), of("b"), base="o"),
    "nearswap": merge("nearswap", of("a"), base="o", parameters={"t": [0.001, 0.01]}),
    "sce": merge("sce", of("a"), of("b"), base="o", parameters={"select_topk": 0.4}),
    "passthrough": merge(
        "passthrough", slices=[{"sources": [cut("a", 0, 3)]}, {"sources": [cut("b", 1, 4, **NO_OUT)]}], dtype="bfloat16"
    ),
    "ties of slices": merge(
        "ties",
        base="o",
        slices=[
            {"sources": [cut("o", 0, 2), cut("a", 1, 3, weight=0.4)], "parameters": {"density": 0.7}},
            {"sources": [cut("o", 2, 4), cut("b", 2, 4, weight=[1, 0.5])]},
        ],
        parameters={"density": 0.3, "weight": 0.6},
    ),
    **{
        f"tokens of {source}": merge("linear", of("to", weight=1), *TOKENS, base="to", tokenizer_source=source)
        for source in ("union", "base", "tb")
    },
    "tokens padded": merge("ties", *TOKENS, base="to", tokenizer={"source": "union", "pad_to_multiple_of": 16}),
    "tokens without a base": merge("linear", *TOKENS, tokenizer_source="union"),
}
"""What is merged, of the models o, a, b and, with tokenizers, to, ta, tb."""


def make(folder: Path, dtype: torch.dtype, width: int) -> None:
    """The six models, of four layers; those that belong together begin at the same weights."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    def model(name: str, seed: int, words: int) -> None:
        config = transformers.LlamaConfig(
            vocab_size=words, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4,
        )  # fmt: skip
        torch.manual_seed(0)
        net = transformers.LlamaForCausalLM(config)
        torch.manual_seed(seed)
        with torch.no_grad():
            for tensor in net.parameters():
                tensor += 0.02 * (seed > 0) * torch.randn_like(tensor)
        net.to(dtype).save_pretrained(folder / name)

    for seed, name in enumerate("oab"):
        model(name, seed, WORDS)
    base = ["[UNK]", *(f"w{i}" for i in range(WORDS))]
    vocabularies = {"to": base, "ta": [*base[: WORDS // 2], "x", "y"], "tb": ["[UNK]", "y", "z", *base[WORDS // 3 :]]}
    for seed, (name, words) in enumerate(vocabularies.items()):
        model(name, seed, len(words) + 2)
        told = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
        tokenizer = Tokenizer(told)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        pad = {"pad_token": "[PAD]"} if name == "ta" else {}
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", **pad)
        fast.save_pretrained(folder / name)


SIDES = {
    "surgery": """
import sys
from surgery.__main__ import main
for name in sys.argv[1:]:
    if main(["merge", name + ".yml", name + "-surgery"]):
        sys.exit(1)
""",
    "mergekit": """
import sys
from mergekit.scripts.run_yaml import main
flags = ["--no-copy-tokenizer", "--no-write-model-card"]  # the card asks the network whether models are there
for name in sys.argv[1:]:
    main([name + ".yml", name + "-mergekit", *flags], standalone_mode=False)
""",
}
"""How each side merges files, one after another."""


def merged(side: str, python: str, names: Sequence[str], folder: Path) -> dict[str, float]:
    """Files merged in one process of a side: seconds and bytes."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    if side == "surgery":
        python, environment["PYTHONPATH"] = sys.executable, str(ROOT)
    for name in names:
        shutil.rmtree(folder / f"{name}-{side}", ignore_errors=True)
        (folder / f"{name}.yml").write_text(json.dumps(CONFIGURATIONS[name]))  # which YAML takes
    return measured([python, "-c", SIDES[side], *names], environment, folder)


def agreement(folder: Path, name: str) -> dict[str, Any]:
    """How far the two results are apart; rows of tokens are brought into one order."""
    from surgery.files import open_state
    from surgery.lazy import LazyState, Pieces

    one, other = (folder / f"{name}-{side}" for side in SIDES)
    ours, theirs = open_state(one), open_state(other)
    if ours.keys() != theirs.keys():
        raise SystemExit(f"{name}: different tensors: {sorted(ours.keys() ^ theirs.keys())[:5]}")
    if not (one / "tokenizer.json").is_file():
        return apart(ours, theirs)
    words, others = _words(one), _words(other)
    if words.keys() != others.keys():
        raise SystemExit(f"{name}: different tokens: {sorted(words.keys() ^ others.keys())[:5]}")
    order = sorted(words, key=words.__getitem__)

    def ordered(state: LazyState, places: dict[str, int]) -> LazyState:
        rows = torch.tensor([places[word] for word in order])
        tables = ("model.embed_tokens.weight", "lm_head.weight")
        return LazyState({key: Pieces.of(state[key][rows]) if key in tables else state.pieces(key) for key in state})

    return apart(ordered(ours, words), ordered(theirs, others))


def _words(folder: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).get_vocab()


WHAT = ("seconds", "resident", "anonymous")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Those that were timed, ours over mergekit's: median (least, most); and how many elements differ in all files."""
    heads = [f"{run['dtype']}: apart by over 1 %" for run in runs]
    lines = [f"| file | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in CONFIGURATIONS:
        shares = [run["apart"][name]["share"] for run in runs]
        lines.append(f"| {name} | {' | '.join(f'{share:.1e}' if share else '0' for share in shares)} |")
    lines += [
        "",
        "| file | dtype | one model | time | resident memory | anonymous memory |",
        "|---|---|---|---|---|---|",
    ]
    for run, name in itertools.product(runs, runs[0]["timed"]):
        cells = []
        for what in WHAT:
            found = [one["surgery"][what] / one["mergekit"][what] for one in run["timed"][name]]
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f}, {max(found):.2f})")
        lines.append(f"| {name} | {run['dtype']} | {run['bytes'] / 1e6:.0f} MB | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Merge, and store after every pair what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="a new folder, deleted at the end")
    parser.add_argument("--mergekit", metavar="PYTHON", help="a Python that has mergekit")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--timed", default=TIMED, help="names of files, with ; between them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--widths", default="256,1024", help="of the models; 1024 are 267 MB in float32, 2048 are 936")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    if asked.table:
        print(table([json.loads((asked.out / f"mergekit-files-{one}.json").read_text()) for one in DTYPES]))
        return
    if asked.folder is None or asked.mergekit is None:
        parser.error("give --folder and --mergekit")
    sys.path.insert(0, str(ROOT))
    folder = asked.folder.absolute()
    small, large = map(int, asked.widths.split(","))
    ask = "from importlib.metadata import version; print(version('mergekit'))"
    kit = subprocess.run([asked.mergekit, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")} | {"mergekit": kit}
    folder.mkdir(parents=True)
    try:
        make(folder / "small", getattr(torch, asked.dtype), small)
        for side in SIDES:
            merged(side, asked.mergekit, [*CONFIGURATIONS], folder / "small")
        differences = {name: agreement(folder / "small", name) for name in CONFIGURATIONS}
        shutil.rmtree(folder / "small")
        make(folder / "large", getattr(torch, asked.dtype), large)
        size = (folder / "large" / "a" / "model.safetensors").stat().st_size
        timed: dict[str, list[dict[str, Any]]] = {name: [] for name in asked.timed.split(";")}
        about = {"versions": versions, "cores": os.cpu_count(), "dtype": asked.dtype, "bytes": size}
        stored = {**about, "apart": differences, "timed": timed}
        path = asked.out / f"mergekit-files-{asked.dtype}.json"
        path.write_text(json.dumps(stored, indent=1) + "\n")
        for i, (name, rounds) in itertools.product(range(asked.repeats), timed.items()):
            sides = [*SIDES][:: (-1) ** i]
            found = {side: merged(side, asked.mergekit, [name], folder / "large") for side in sides}
            rounds.append({**found, "load": round(os.getloadavg()[0], 1)})
            print(name, json.dumps(rounds[-1]), flush=True)
            path.write_text(json.dumps(stored, indent=1) + "\n")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
