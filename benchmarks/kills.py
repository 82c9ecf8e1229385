"""Kill runs at random moments (kill -9), resume them, and compare what they leave with an uninterrupted run.

    python benchmarks/kills.py           # 200 trials; prints what was lost, writes benchmarks/results/kills-cpu.json
    python benchmarks/kills.py --trials 4 --seed 7

A trial starts a tiny run, kills its process one to three times, resumes it after each, and lets it end. The cases of
`kill_cases.py` take turns: every method, a comparison of two, and runs with --init, with --keep-best, and on data and a
model of one's own. Half of the kills come at a moment drawn from the length of the run, half right before a file of the
run is opened to be written, renamed, deleted or its folder made. In every third trial a second process tries to resume
the folder while the first works in it: it has to be refused, or, where the first has ended already, to change nothing.
A run is lost if it can neither be resumed nor its folder be used again, or if in the end any file differs in any byte
from those of the uninterrupted run, apart from the seconds that rounds took.

Processes are forked from this one, which imports what the uninterrupted runs have imported, so that a trial takes about
two seconds.
"""

import argparse
import csv
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch
from kill_cases import CASES, arguments, keep_weights, needs, write_own
from report import write

from fl.algorithms import ALGORITHMS
from fl.run import main as run

KINDS = list(CASES)
RUN = Path("runs", "a")


def start(folder: Path, arguments: list[str], die_at: int = 0) -> int:
    """Start a command in a folder, in a process of its own; returns the process.

    Args:
        die_at: the process kills itself before it touches its files for the time of this number; 0 is never.
    """
    sys.stdout.flush()
    if process := os.fork():
        return process
    try:
        os.chdir(folder)
        with open("log.txt", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if die_at:
            sys.addaudithook(Death(die_at))
        code = run(arguments)
        Path("modules.txt").write_text("\n".join(list(sys.modules)))
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(99)


def import_all(names: list[str]) -> None:
    """Import modules, so that forked processes find them there. Only what is imported starts no threads."""
    for name in names:
        if name not in sys.modules and name != "kill_own":  # a module of one's own is found by each run itself
            with suppress(Exception):
                import_module(name)


class Death:
    """An audit hook that kills this process before something is done to the files of its run for the n-th time."""

    def __init__(self, number: int) -> None:
        self.left, self.folder = number, str(RUN)

    def __call__(self, event: str, arguments: tuple) -> None:
        """Count what changes files of the run."""
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            path = arguments[0]
        else:
            return
        if isinstance(path, str | bytes | Path) and self.folder in os.fsdecode(path):
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


def end(process: int) -> int:
    """Return the exit code of a process when it has ended; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def command(folder: Path, kind: str) -> list[str]:
    """Return the command that resumes a run, or begins it where its settings were not written yet.

    Args:
        folder: of this trial, in that of all trials.
    """
    if (folder / RUN / "config.yaml").exists():
        return ["--resume", str(RUN)]
    return arguments(kind, folder.parent)


def contents(folder: Path) -> dict[str, object]:
    """Return what a run has left, by file, without times."""
    return {
        str(path.relative_to(folder)): timeless(path) for path in sorted((folder / RUN).rglob("*")) if path.is_file()
    }


def timeless(path: Path) -> object:
    """Return the content of a file without the seconds that something took."""
    if path.name == "metrics.csv":
        lines = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))
        return [[cell for name, cell in zip(lines[0], line) if not name.endswith("seconds")] for line in lines]
    if path.name == "summary.json":
        summary = json.loads(path.read_text(), object_pairs_hook=lambda pairs: [p for p in pairs if p[0] != "seconds"])
        return json.dumps(summary)
    if path.name == "comparison.txt":  # its last column is the seconds
        return [line.split()[:-1] for line in path.read_text().splitlines()]
    return path.read_bytes()


class Trials:
    """Trials and what came of them.

    Attributes:
        whole: what the uninterrupted run of each kind left.
        took: its seconds.
        counts: kills, resumes, refusals and the like.
        lost: what was lost, a line each.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.draw = root, random.Random(seed)
        self.whole: dict[str, dict[str, object]] = {}
        self.took: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.lost: list[str] = []

    def import_first(self, kind: str) -> None:
        """Import what a run of a kind imports, so that the time of the next is that of a run."""
        (folder := self.root / "imports").mkdir()
        end(start(folder, command(folder, kind)))
        import_all((folder / "modules.txt").read_text().splitlines())

    def reference(self, kind: str) -> None:
        """Do the uninterrupted run of a kind, after those whose weights it begins with."""
        if kind in self.whole:
            return
        for other in needs(kind):
            self.reference(other)
        (folder := self.root / f"whole-{KINDS.index(kind)}").mkdir()
        began = time.perf_counter()
        if code := end(start(folder, command(folder, kind))):
            raise SystemExit(f"{kind} ended with {code}: {(folder / 'log.txt').read_text()}")
        self.took[kind] = time.perf_counter() - began
        import_all((folder / "modules.txt").read_text().splitlines())
        self.whole[kind] = contents(folder)
        keep_weights(kind, folder / RUN, self.root)

    def trial(self, number: int) -> None:
        """Kill, resume, compare."""
        kind = KINDS[number % len(KINDS)]
        self.reference(kind)
        (folder := self.root / f"{number}").mkdir()
        for _ in range(self.draw.randint(1, 3)):
            self.killed(folder, kind)
        wrong = self.finished(folder, kind, second=(number + number // len(KINDS)) % 3 == 0)
        if not wrong:
            found = contents(folder)
            wrong = ", ".join(n for n in {*found, *self.whole[kind]} if found.get(n) != self.whole[kind].get(n))
            wrong = wrong and f"other files: {wrong}"
        if wrong:
            self.lost.append(f"trial {number}, {kind}: {wrong}")
            print(self.lost[-1], (folder / "log.txt").read_text()[-2000:], sep="\n", flush=True)

    def killed(self, folder: Path, kind: str) -> None:
        """Start or resume the run and kill it, unless it ends before."""
        if self.draw.random() < 0.5:
            process = start(folder, command(folder, kind), die_at=self.draw.randint(1, 50))
        else:
            process = start(folder, command(folder, kind))
            time.sleep(self.draw.random() * self.took[kind])
            os.kill(process, signal.SIGKILL)  # not reaped yet, so the number is still its own
        code = end(process)
        self.counts["killed" if code == -signal.SIGKILL else "ended before its kill"] += 1
        if code > 0:
            raise SystemExit(f"{kind} ended with {code}: {(folder / 'log.txt').read_text()}")
        if code < 0:
            self.counts["before the settings"] += not (folder / RUN / "config.yaml").exists()
            self.counts["before a checkpoint"] += not any((folder / RUN).rglob("checkpoint.safetensors"))

    def finished(self, folder: Path, kind: str, second: bool) -> str:
        """Resume the run and let it end; returns what went wrong."""
        process = start(folder, command(folder, kind))
        if second:
            time.sleep(self.draw.random() * self.took[kind])
            (other := folder / "other").mkdir()
            (other / "runs").symlink_to(folder / "runs")
            code = end(start(other, ["--resume", str(RUN)]))
            log = (other / "log.txt").read_text()
            self.counts["second process"] += 1
            self.counts["second process refused"] += (refused := code == 2 and "is in use by" in log)
            if not refused and not (code == 2 and "no config.yaml" in log) and code:
                end(process)
                return f"the second process ended with {code}: {log}"
        code = end(process)
        if code == 2 and "is in use by" in (folder / "log.txt").read_text() and second:
            self.counts["second process was first"] += 1  # it began later and took the folder earlier
            code = 0
        return f"resuming ended with {code}" if code else ""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)  # before a fork: the threads of a pool would not be there after it
    with tempfile.TemporaryDirectory() as root:
        write_own(Path(root))
        sys.path.append(root)  # a forked process finds the module there
        trials = Trials(Path(root), args.seed)
        trials.import_first(KINDS[0])
        for number in range(args.trials):
            trials.trial(number)
            done = number + 1 == args.trials
            if done or number % 20 == 19:
                result = {"trials": number + 1, "lost": len(trials.lost), "seed": args.seed, **trials.counts}
                print(result, flush=True)
                write(
                    result | {"methods": len(ALGORITHMS), "cases": len(KINDS), "what": trials.lost},
                    args.out,
                    "kills-cpu",
                    done,
                )
    print(f"{len(trials.lost)} of {args.trials} runs were lost")
    return int(bool(trials.lost))


if __name__ == "__main__":
    sys.exit(main())
