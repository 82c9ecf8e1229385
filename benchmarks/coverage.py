"""How many models each operation of `surgery` handles, strictly judged, beside torch-pruning alone.

    python benchmarks/coverage.py                       # the smallest model of each of timm's model files
    python benchmarks/coverage.py --suite torchvision   # classification, segmentation, detection, video, optical flow
    python benchmarks/coverage.py --suite huggingface   # transformers' models, from configs of small sizes
    python benchmarks/coverage.py --suite handwritten   # models of a few lines, as people write them
    python benchmarks/coverage.py --suite all           # every timm name, on the meta device: what needs no forward

A model counts for an operation if
- decompose: the layers hold every tensor of the state exactly once, in registration and in execution order;
- shuffle: three random instances recombined layer by layer run, with finite outputs of the same shape;
- graft: one more block in every section that allows it, called once each, finite outputs, and undone bit for bit;
- narrow: at rate 0.5 the output keeps its shape; a training step runs forward and backward with finite numbers;
  extract(embed(x)) is x bit for bit; and the widths are halved. For huggingface and handwritten that means: every
  parameter and buffer that the forward pass uses has the shape that it has in the model that its own constructor makes
  half as wide, and this model, given the same tensors, computes the same ("half"). For the others (and models that
  return hidden features): every hidden width that a layer makes is halved (rounded up; a product of heads and head
  dimension or of groups rounds its one digit), or is an axis of the input or output. All of them are also compared with
  the full model with zeros where the narrow one is not ("zeros"): a difference is a miss, unless the model counts
  positions in a way that the comparison cannot correct (benchmarks/zeros.py);
- torch-pruning: its own pruner, told to keep the first channels and given each attention's number of heads as its
  documentation asks, is judged as narrow is, less extract and zeros.

Each miss is printed with its reason. One thread a process. What takes longer than --seconds (torch-pruning: 60) is a
miss. benchmarks/coverage_table.py makes the tables of docs/results/surgery.md from what all suites have stored.
"""

import argparse
import json
import multiprocessing
import signal
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import surgery
from benchmarks.judges import JUDGES, Miss, NothingToDo
from benchmarks.models import SUITES, case, suite
from benchmarks.models.libraries import SMALLEST, find_smallest

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="smallest")
    parser.add_argument("--names", nargs="*", help="models (timm:NAME, handwritten:NAME, ...) instead of a suite")
    parser.add_argument("--operations", nargs="*", choices=JUDGES, help="default: all that the suite allows")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=600, help="for one operation on one model")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/coverage-SUITE.json")
    parser.add_argument("--again", action="store_true", help="judge the misses of the suite's stored file again")
    parser.add_argument("--list-smallest", action="store_true", help=f"find the models of {SMALLEST.name} anew")
    options = parser.parse_args()
    if options.list_smallest:
        SMALLEST.write_text(json.dumps(find_smallest(), indent=1) + "\n")
        return
    out = options.out or (None if options.names else RESULTS / f"coverage-{options.suite}.json")
    stored = json.loads(out.read_text())["rows"] if options.again else []
    before = {row["name"]: row["result"] for row in stored}
    meta = options.suite == "all" and not options.names
    operations = options.operations or (["decompose", "graft"] if meta else list(JUDGES))
    misses = [row["name"] for row in stored if missed(row).keys() & set(operations)]
    names = misses or options.names or suite(options.suite)
    rows = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(
        options.processes, initializer=torch.set_num_threads, initargs=(1,), maxtasksperchild=200 if meta else 20
    ) as pool:
        work = partial(judge, operations=operations, seconds=options.seconds, meta=meta)
        for row in pool.imap_unordered(work, names):
            row["result"] = {**before.get(row["name"], {}), **row["result"]}  # other operations' results stay
            rows.append(row)
            print(f"{len(rows):4}/{len(names)} {row['name']}: {missed(row) or 'ok'}", flush=True)
    rows += [row for row in stored if row["name"] not in names]
    order = [row["name"] for row in stored] or names
    rows.sort(key=lambda row: order.index(row["name"]))
    table(rows, operations)
    if out:
        out.write_text(json.dumps({"versions": versions(), "suite": options.suite, "rows": rows}, indent=1) + "\n")


def missed(row: dict) -> dict[str, str]:
    """The operations that a model misses, with the reasons."""
    return {o: r for o, r in row["result"].items() if r not in ("ok", "nothing to do")}


def table(rows: list[dict], operations: list[str]) -> None:
    """Print the number of models that count, and the misses."""
    for operation in operations:
        results = {row["name"]: row["result"][operation] for row in rows}
        results = {name: result for name, result in results.items() if result != "nothing to do"}
        print(f"\n{operation}: {list(results.values()).count('ok')} of {len(results)}")
        for name, result in results.items():
            if result != "ok":
                print(f"  {name}: {result}")


def versions() -> dict[str, str]:
    """Those of the libraries."""
    return {name: version(name) for name in ("torch", "timm", "torchvision", "transformers", "torch-pruning")}


def judge(name: str, operations: list[str], seconds: int, meta: bool) -> dict:
    """For one model {operation: "ok" or the reason for a miss}, and what its numbers were compared with."""
    warnings.filterwarnings("ignore")
    result, compared = {}, {}
    for operation in operations:
        torch.manual_seed(0)
        try:
            with time_limit(min(seconds, 60) if operation == "torch_pruning" else seconds):
                chosen = case(name)
                with torch.device("meta" if meta else "cpu"):
                    model = chosen.build()
                found = JUDGES[operation](chosen, model, None if meta else chosen.example(model))
            result[operation] = "ok"
            if found is not None:
                compared[operation] = found
        except NothingToDo:
            result[operation] = "nothing to do"
        except TimeoutError:
            result[operation] = "took too long"
        except (Miss, surgery.SurgeryError) as reason:
            result[operation] = f"{type(reason).__name__}: {reason}"
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            result[operation] = f"{type(error).__name__}: {text[0][:300]}"
    return {"name": name, "result": result, "compared": compared}


@contextmanager
def time_limit(seconds: int):
    """TimeoutError in the body after so many seconds."""

    def stop(signum, frame):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main()
