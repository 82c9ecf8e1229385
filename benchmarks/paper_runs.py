"""Runs of the papers' tables, several at a time for as long as there is time; called again, it goes on with them.

    python benchmarks/paper_runs.py --minutes 8.5 --jobs 6       # run folders in runs/paper, packed into results/
    python benchmarks/paper_runs.py --list                       # which runs, in order of worth
    python benchmarks/paper_runs.py --device cpu --quick         # two tiny ones, to see that it runs

Each run is `python -m fl.run` in a process of its own, in the order below; a GPU waits for the launches of a small
model most of the time, so several take turns on it. When the minutes are over all are stopped as by Ctrl-C, which saves
them. What they have measured is packed into OUT/paper-runs.tar.gz, and what it takes to resume them into at most three
pieces OUT/paper-checkpoints.tar.* of 15 MB, the runs first that are nearest to their end; a later call finds these in
--packed, if the run folders are gone.
"""

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from fl.runs.checkpoint import FILE as CHECKPOINT

ROOT = Path(__file__).resolve().parents[1]
_PIECES = "paper-checkpoints.tar."
_PIECE, _MOST = 15 * 10**6, 3  # bytes of a piece, and how many there are at most
_GRACE = 60  # seconds that a run may take to save itself


def runs(quick: bool) -> dict[str, list[str]]:
    """Name -> flags, the most telling first: FedMR's Table 1, FeMAM's structured CIFAR-100, FedFA's CIFAR-10 grid."""
    if quick:
        small = ["--rounds", "3", "--clients", "4", "--participants", "2", "--local-epochs", "1"]
        return {name: ["digits", "--algorithm", name, *small] for name in ("fedmr", "fedavg")}
    chosen = {}
    for model, more in (("resnet20", []), ("cnn", ["--model", "lenet"])):  # the released CNN is LeNet
        for momentum in ("0.5", "0.9"):
            for spread in ("dir0.5", "dir0.1", "iid"):
                for method in ("fedmr", "fedavg"):
                    flags = [f"fedmr-cifar10-{model}-{spread}", "--algorithm", method, "--momentum", momentum, *more]
                    chosen[f"{method}-cifar10-{model}-{spread}-momentum{momentum}"] = flags
    for method in ("femam", "fedavg_plus", "fesem"):
        chosen[f"{method}-cifar100-levels3-6-11"] = ["femam-cifar100-levels3-6-11", "--algorithm", method]
    for mode, rival in (("both", "nefl"), ("width", "heterofl"), ("depth", "flexifed")):
        for spread in ("iid", "noniid"):
            for method in ("fedfa", rival):
                recipe = f"fedfa-cifar10-preresnet-{mode}-{spread}"
                chosen[f"{method}-cifar10-preresnet-{mode}-{spread}"] = [recipe, "--algorithm", method]
    return {
        name: [*flags, "--seeds", "0", "--eval-every", "10", "--models-every", "0"] for name, flags in chosen.items()
    }


def rounds_done(folder: Path) -> tuple[int, bool, float | None]:
    """(rounds, whether that is all, accuracy) of a run folder, by its summary."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return 0, False, None
    return summary["rounds"], summary["complete"], summary["final"].get("accuracy")


def start(name: str, flags: list[str], args: argparse.Namespace) -> subprocess.Popen:
    """A run's process: from the start, or from where its folder is."""
    folder = args.folder / name
    if folder.exists():
        flags = ["--resume", str(folder)]
    else:
        flags = [*flags, "--out", str(args.folder), "--name", name, "--no-download"]
        flags += ["--precision", args.precision] if args.device != "cpu" else []
    log = (args.folder / f"{name}.log").open("a")
    return subprocess.Popen(
        [sys.executable, "-m", "fl.run", *flags, "--device", args.device],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell has it ignored
    )  # fmt: skip


def play(args: argparse.Namespace) -> list[str]:
    """Run them until the time is over; returns the names of those that failed."""
    end, failed = time.monotonic() + 60 * args.minutes, []
    waiting = [(name, flags) for name, flags in runs(args.quick).items() if not rounds_done(args.folder / name)[1]]
    running: dict[str, subprocess.Popen] = {}
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < args.jobs:
                name, flags = waiting.pop(0)
                running[name] = start(name, flags, args)
            time.sleep(0.5)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    failed += [name] if process.returncode else []
                    del running[name]
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
    return failed


def pack(folder: Path, out: Path) -> None:
    """paper-runs.tar.gz, and in pieces the checkpoints of runs that are not done, as many as there is room for."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{_PIECES}*"):
        old.unlink()
    with tarfile.open(out / "paper-runs.tar.gz", "w:gz") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and file.name != CHECKPOINT:
                archive.add(file, file.relative_to(folder))
    begun = [path.parent for path in folder.glob(f"*/{CHECKPOINT}") if not rounds_done(path.parent)[1]]
    room, memory = _MOST * _PIECE, io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as archive:
        for run in sorted(begun, key=lambda run: -rounds_done(run)[0]):
            size = (run / CHECKPOINT).stat().st_size + 2**14
            if size > room:
                print(f"{run.name} begins anew next time: there is no room for its checkpoint of {size / 1e6:.0f} MB")
                continue
            archive.add(run / CHECKPOINT, f"{run.name}/{CHECKPOINT}")
            room -= size
    if begun:
        whole = memory.getvalue()
        for number, start in enumerate(range(0, len(whole), _PIECE)):
            (out / f"{_PIECES}{number}").write_bytes(whole[start : start + _PIECE])


def unpack(packed: Path, folder: Path) -> None:
    """Put back what earlier calls have packed: runs that are done, and those that can be resumed."""
    archives = [path.read_bytes() for path in packed.glob("paper-runs.tar.gz")]
    if pieces := sorted(packed.glob(f"{_PIECES}*"), key=lambda path: int(path.name.removeprefix(_PIECES))):
        archives.append(b"".join(path.read_bytes() for path in pieces))
    for data in archives:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            new = [member for member in archive.getmembers() if not (folder / member.name).exists()]
            archive.extractall(folder, new, filter="data")
    for run in [path.parent for path in folder.glob("*/config.yaml")]:
        if not (run / CHECKPOINT).exists() and not rounds_done(run)[1]:
            shelf = folder / "without-checkpoint"
            shelf.mkdir(exist_ok=True)
            run.rename(shelf / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            print(f"{run.name} begins anew: it has no checkpoint; what it had measured lies in {shelf}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--precision", default="tf32", help="of runs that begin, on CUDA")
    parser.add_argument("--folder", type=Path, help="where run folders lie: runs/paper, or runs/paper-quick")
    parser.add_argument("--packed", type=Path, default=ROOT / ".gpu", help="where packages of earlier calls lie")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        for name, flags in runs(args.quick).items():
            print(f"{name:44} python -m fl.run {' '.join(flags)}")
        return
    args.folder = args.folder or ROOT / "runs" / ("paper-quick" if args.quick else "paper")
    args.folder.mkdir(parents=True, exist_ok=True)
    unpack(args.packed, args.folder)
    failed = play(args)
    for name in runs(args.quick):
        done, whole, accuracy = rounds_done(args.folder / name)
        if done:
            said = f"{accuracy:.2%}" if accuracy is not None else "not evaluated"
            print(f"{name:44}{done:5} rounds{', all' if whole else '':6}{said:>16}")
    pack(args.folder, args.out)
    if failed:
        raise SystemExit(
            "\n".join(f"{name} failed:\n{(args.folder / f'{name}.log').read_text()[-1500:]}" for name in failed)
        )


if __name__ == "__main__":
    main()
