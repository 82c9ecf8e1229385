"""How many models each operation of `surgery` handles, strictly judged, beside torch-pruning alone.

    python benchmarks/coverage.py --suite support       # the registries: docs/results/models.md
    python benchmarks/coverage.py                       # the smallest model of each of timm's model files
    python benchmarks/coverage.py --suite torchvision   # all of its names
    python benchmarks/coverage.py --suite transformers  # all classes registered for five tasks, configs made small
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

The suite "support" has other judges (benchmarks/support.py): narrow, prune, graft, permute, align, widen and save, each
of which handles a model, refuses it with a reason, or is wrong.

Each miss is printed with its reason. One thread a process, one process a model. What takes longer than --seconds
(torch-pruning: 60) is a miss. What is stored stays: the same command goes on where it was stopped, unless the libraries
have other versions. benchmarks/coverage_table.py makes the tables of docs/results/ from what all suites have stored.
"""

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import surgery
from benchmarks import support
from benchmarks.judges import JUDGES, Miss, NothingToDo
from benchmarks.models import SUITES, case, suite
from benchmarks.models.libraries import SMALLEST, find_smallest

RESULTS = Path(__file__).parent / "results"
MEMORY = 10 * 2**30  # bytes that the process of a model may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="smallest")
    parser.add_argument("--names", nargs="*", help="models (timm:NAME, transformers:CLASS, ...) instead of a suite's")
    parser.add_argument("--operations", nargs="*", help="default: all that the suite allows")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seconds", type=int, help="of the processor for one operation on one model; 600, of the suite support 60"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for coverage-SUITE.json")
    parser.add_argument("--again", action="store_true", help="judge the misses of the suite's stored file again")
    parser.add_argument("--list-smallest", action="store_true", help=f"find the models of {SMALLEST.name} anew")
    options = parser.parse_args()
    if options.list_smallest:
        SMALLEST.write_text(json.dumps(find_smallest(), indent=1) + "\n")
        return
    judges = support.JUDGES if options.suite == "support" else JUDGES
    meta = options.suite == "all" and not options.names
    operations = options.operations or (["decompose", "graft"] if meta else list(judges))
    if odd := [operation for operation in operations if operation not in judges]:
        parser.error(f"{odd[0]}: the operations of this suite are {', '.join(judges)}")
    out = None if options.names else options.results / f"coverage-{options.suite}.json"
    rows = stored(out)
    names = options.names or suite(options.suite)
    wanted = {name: left(rows.get(name), operations, options.again) for name in names}
    # Each model of the registries is first made narrower, and then judged by the other operations.
    parts = [["narrow"], [o for o in operations if o != "narrow"]] if options.suite == "support" else [operations]
    work_left = [(name, found) for part in parts for name in names if (found := [o for o in wanted[name] if o in part])]
    work = Work(options.suite, options.seconds or (60 if options.suite == "support" else 600), meta)
    with ThreadPool(options.processes) as pool:
        for done, row in enumerate(pool.imap_unordered(lambda item: apart(work, *item), work_left), 1):
            before = rows.get(row["name"], {})
            rows[row["name"]] = {k: {**before.get(k, {}), **v} if isinstance(v, dict) else v for k, v in row.items()}
            print(f"{done:4}/{len(work_left)} {row['name']}: {missed(row) or 'ok'}", flush=True)
            if out:
                kept = [rows[name] for name in names if name in rows]
                kept = {"versions": versions(), "suite": options.suite, "rows": kept}
                write(out, json.dumps(kept, indent=1) + "\n")
    table([rows[name] for name in names], operations)


def stored(file: Path | None) -> dict[str, dict]:
    """Return the rows of a file by model; none if it is missing or was made with other versions of the libraries."""
    if file is None or not file.is_file():
        return {}
    found = json.loads(file.read_text())
    return {row["name"]: row for row in found["rows"]} if found["versions"] == versions() else {}


def left(row: dict | None, operations: list[str], again: bool) -> list[str]:
    """Return the operations by which a model is still to be judged."""
    if row is None:
        return operations
    bad = missed(row) if again else {}
    return [operation for operation in operations if operation in bad or operation not in row["result"]]


def write(file: Path, text: str) -> None:
    """Write a file as a whole, so that one who stops the program finds the old or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".new")
    beside.write_text(text)
    beside.replace(file)


def missed(row: dict) -> dict[str, str]:
    """Return the operations that a model misses, with the reasons."""
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


class Work(NamedTuple):
    """What every model's process has to know."""

    suite: str
    seconds: int
    meta: bool


def apart(work: Work, name: str, operations: list[str]) -> dict:
    """Return the row of a model, judged in a process of its own; in another one after an operation that ended it."""
    row: dict[str, Any] = {"name": name, "result": {}, "compared": {}, "notes": {}}
    while rest := [operation for operation in operations if operation not in row["result"]]:
        receive, send = PROCESSES.Pipe(duplex=False)
        process = PROCESSES.Process(target=answer, args=(send, work, name, rest))
        process.start()
        send.close()
        for operation in rest:
            try:
                found = receive.recv() if receive.poll(10 * work.seconds) else ("took too long", None, [])
            except EOFError:
                found = ("Ended: its process was killed", None, [])
            for key, value in zip(("result", "compared", "notes"), found):
                if value:
                    row[key][operation] = value
            if found[0].startswith(("took too long", "Ended")):
                break  # the process may hang, or is gone
        process.kill()
        process.join()
    return row


PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "timm", "torchvision", "transformers", "surgery", "benchmarks.support"])


def answer(send: Connection, work: Work, name: str, operations: list[str]) -> None:
    """Judge a model by operations, and send what comes of each: the result, what was compared, and the warnings."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ["TQDM_DISABLE"] = "1"
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for operation in operations:
        with support.noted() as said:
            found = judge(work, name, operation)
        send.send((*found, said))


def judge(work: Work, name: str, operation: str) -> tuple[str, Any]:
    """For one model and operation "ok" or the reason for a miss, and what its numbers were compared with."""
    torch.manual_seed(0)
    judges = support.JUDGES if work.suite == "support" else JUDGES
    try:
        with time_limit(min(work.seconds, 60) if operation == "torch_pruning" else work.seconds):
            chosen = case(name)
            with torch.device("meta" if work.meta else "cpu"):
                model = chosen.build()
            return "ok", judges[operation](chosen, model, None if work.meta else chosen.example(model))
    except NothingToDo:
        return "nothing to do", None
    except TimeoutError:
        return "took too long", None
    except (Miss, surgery.SurgeryError) as reason:
        if "TimeoutError" in str(reason):  # which it took for the model's own
            return "took too long", None
        return f"{type(reason).__name__}: {reason}", None
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {text[0][:300]}", None


@contextmanager
def time_limit(seconds: int):
    """TimeoutError in the body after so many seconds of the processor, which do not depend on what else runs."""

    def stop(signum, frame):
        raise TimeoutError

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
