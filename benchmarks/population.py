"""Time a round of FedAvg with a cohort of 10 among 100, 10,000 and 1,000,000 clients; or ask for its memory.

    python benchmarks/population.py          # prints the table, writes benchmarks/results/population-<device>.json
    python benchmarks/population.py --quick  # fewer rounds, to see that it runs
    python benchmarks/population.py --memory --pfl pfl/bin/python --flower flower/bin/python
                                             # writes benchmarks/results/population-memory-cpu.json

Every client has 20 samples of one resident data set of 8x8 images; clients share samples, so that populations differ
in their indices only. A round is all of it: sampling the cohort, batches, local training and the weighted mean. The
populations take turns in this process, so that what else the machine does hits all alike. Reported are the median
milliseconds of a round with their range, the ratio to the round among 100 clients that ran next to it (median and
range), the time to sample alone, the memory of all index tensors, and the time to pack them, check them and make the
federation.

With `--memory` each client has 20 images of 28x28 pixels of its own, in files that are mapped into memory (1.6 GB for
100,000 clients), and FedAvg trains McMahan's CNN with a quarter of its widths, which does not hide what clients take.
`--pfl PYTHON` and `--flower PYTHON` (see peers.py) add pfl-research, whose data sets are made when they are asked for,
and Flower's simulation, with a node for each client. Each run is a process of its own with one torch thread, of Flower
one actor, since threads that wait for each other hold a side up on a busy machine; runs take turns. Reported are the
largest resident memory (the system's VmHWM, with libraries and the pages of files that were read; of Flower the sum of
the process and its actor, each of which has its libraries), the seconds from the start of the process to the end of the
first round, and those of a later round (median and range). A side that gives no answer for ten minutes is ended, and
its row says so. What favours peers: Ray's own servers are not counted, pfl takes clients in order, while the others
draw them, and the peers do not check their data. The processes run at low priority, on a machine that may do other
things: the times are a hint, the memory is the result.
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from peers import Side, SideError
from report import write
from sides.models import MODELS

import zoo
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.rng import Rng
from fl.data import Dataset
from fl.federation import Federation, LocalTraining
from fl.partition import Parts, hold_out

CLIENTS = (100, 10_000, 1_000_000)
COHORT, EACH, BATCH, EPOCHS = 10, 20, 10, 5
IN_FILES, ROUNDS = (1000, 10_000, 100_000), 6


def resident(device: str) -> Dataset:
    """Random images of ten classes (what is timed does not depend on the pixels)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (60_000, 1, 8, 8), generator=generator).byte().to(device)
    y = torch.randint(10, (60_000,), generator=generator).to(device)
    return Dataset("random", x, y, x[:1000], y[:1000], classes=10)


def federation(clients: int, data: Dataset) -> tuple[Federation, float]:
    """Clients that each have their own choice of samples, and the seconds that it took to make the federation."""
    samples = torch.randint(len(data.y), (clients * EACH,), generator=torch.Generator().manual_seed(0))
    net = zoo.create("cnn", torch.Generator().manual_seed(0), in_channels=1, image_size=8, width=0.25)
    begin = time.perf_counter()
    splits = hold_out(Parts(samples, torch.arange(clients + 1) * EACH), 0, 0, np.random.default_rng(0))
    fed = Federation(net.to(data.x.device), data, splits, COHORT, LocalTraining(EPOCHS, BATCH))
    return fed, time.perf_counter() - begin


def megabytes(fed: Federation) -> float:
    """Of all index tensors."""
    parts = (fed.clients.train, fed.clients.valid, fed.clients.test)
    return sum(tensor.nbytes for part in parts for tensor in (part.samples, part.offsets)) / 1e6


def seconds(fed: Federation, algorithm: Algorithm, number: int) -> tuple[float, float]:
    """Wall-clock seconds of one round, and of the sampling in it."""
    server, rng = algorithm.init(), Rng(0, number)
    begin = time.perf_counter()
    clients = fed.sample(rng)
    sampled = time.perf_counter()
    algorithm.round(server, clients, rng)
    if fed.data.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, sampled - begin


def measure(repetitions: int, device: str) -> list[dict]:
    """Return a row for each population; they take turns, in an order that turns as well."""
    data = resident(device)
    made = {clients: federation(clients, data) for clients in CLIENTS}
    algorithms = {clients: fedavg(fed) for clients, (fed, _) in made.items()}
    times: dict[int, list[tuple[float, float]]] = {clients: [] for clients in CLIENTS}
    for number in range(repetitions + 3):  # the first three warm up
        turn = number % len(CLIENTS)
        for clients in CLIENTS[turn:] + CLIENTS[:turn]:
            times[clients].append(seconds(made[clients][0], algorithms[clients], number))
    rounds = {clients: [1e3 * whole for whole, _ in pairs[3:]] for clients, pairs in times.items()}
    rows = []
    for clients, (fed, setup) in made.items():
        own = rounds[clients]
        ratios = [a / b for a, b in zip(own, rounds[CLIENTS[0]])]
        rows.append(
            {
                "clients": clients,
                "round_ms": round(statistics.median(own), 2), "low": round(min(own), 2), "high": round(max(own), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_low": round(min(ratios), 3), "ratio_high": round(max(ratios), 3),
                "sample_ms": round(1e3 * statistics.median(part for _, part in times[clients][3:]), 3),
                "index_mb": round(megabytes(fed), 3), "setup_s": round(setup, 4),
            }
        )  # fmt: skip
    return rows


def files(folder: Path, clients: int) -> None:
    """Write random images for so many clients."""
    rng, samples = np.random.default_rng(0), clients * EACH
    folder.mkdir()
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (samples, 1, 28, 28))
    for first in range(0, samples, EACH * 1000):
        x[first : first + EACH * 1000] = rng.integers(0, 256, x[first : first + EACH * 1000].shape, np.uint8)
    np.save(folder / "y.npy", rng.integers(0, 10, samples))
    np.save(folder / "test_x.npy", x[:1000])
    np.save(folder / "test_y.npy", rng.integers(0, 10, 1000))


def peak(root: int) -> tuple[float, float]:
    """Return the most megabytes of a process so far, and the sum of those of Flower's actors below it."""
    status = {}
    for file in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended
            status[int(file.parent.name)] = dict(line.split(":\t", 1) for line in file.read_text().splitlines())

    def below(process: int) -> bool:
        return process == root or (process in status and below(int(status[process]["PPid"])))

    most = {p: int(lines["VmHWM"].split()[0]) * 1024 / 1e6 for p, lines in status.items() if "VmHWM" in lines}
    actors = [p for p in most if status[p]["Name"].startswith("ray::ClientApp") and below(p)]
    return most[root], sum(most[p] for p in actors)


def train(name: str, python: str, job: dict, folder: Path, rounds: int) -> dict:
    """Train so many rounds in a process of its own; what that took, or how it failed."""
    begin, side = time.perf_counter(), None
    try:
        side = Side(name, python, job, folder)
        seconds = [side.ask(round=1)["seconds"]]
        first = time.perf_counter() - begin
        seconds += [side.ask(round=number)["seconds"] for number in range(2, rounds + 1)]
        process, actors = peak(side.process.pid)
        facts = {"versions": side.facts["versions"], "threads": side.facts["threads"]}
        return {**facts, "process_mb": process, "actors_mb": actors, "first_s": first, "seconds": seconds[1:]}
    except SideError as error:
        error.report()
        after = time.perf_counter() - begin
        return {"failed": f"after {after:.0f} s: {str(error).strip().splitlines()[-1]}"}
    finally:
        if side is not None:
            side.close()


def memory(sides: dict[str, str], populations: tuple[int, ...], repetitions: int, rounds: int) -> list[dict]:
    """Return a row for each side and population, whose processes take turns."""
    torch.manual_seed(0)
    found: dict[tuple[str, int], list[dict]] = {(name, clients): [] for clients in populations for name in sides}
    with tempfile.TemporaryDirectory() as every:
        torch.save(MODELS["quarter_cnn"](True).state_dict(), Path(every, "initial.pt"))
        for clients in populations:
            files(Path(every, str(clients)), clients)
        for _ in range(repetitions):
            for (name, clients), runs in found.items():
                if runs and "failed" in runs[-1]:
                    continue
                job = {
                    "check": False, "model": "quarter_cnn", "dropout": True, "clients": clients, "sizes": EACH,
                    "batch": BATCH, "epochs": EPOCHS, "participants": COHORT, "lr": 0.1, "momentum": 0.0,
                    "initial": str(Path(every, "initial.pt")), "data": str(Path(every, str(clients))),
                    "device": "cpu", "threads": 1, "actors": 1, "backend": "auto",
                }  # fmt: skip
                runs.append(train(name, sides[name], job, Path(every), rounds))
    rows = []
    for (name, clients), runs in found.items():
        row: dict = {"side": name, "clients": clients, "files_mb": round(clients * EACH * 784 / 1e6, 1)}
        if "failed" in runs[-1]:
            rows.append(row | runs[-1])
            continue
        peaks = sorted(run["process_mb"] + run["actors_mb"] for run in runs)
        seconds = [second for run in runs for second in run["seconds"]]
        numbers = {
            "peak_mb": statistics.median(peaks), "low": peaks[0], "high": peaks[-1],
            "actors_mb": statistics.median(run["actors_mb"] for run in runs),
            "first_s": statistics.median(run["first_s"] for run in runs),
        }  # fmt: skip
        times = {"round_s": statistics.median(seconds), "round_low": min(seconds), "round_high": max(seconds)}
        row |= {key: round(number, 1) for key, number in numbers.items()}
        row |= {key: round(number, 3) for key, number in times.items()}
        rows.append(row | {key: runs[-1][key] for key in ("threads", "versions")})
    return rows


def main_memory(args: argparse.Namespace) -> None:
    repetitions, rounds, populations = (1, 2, IN_FILES[:1]) if args.quick else (2, ROUNDS, IN_FILES)
    sides = {"ours": sys.executable, "pfl": args.pfl, "flower": args.flower}
    sides = {name: str(Path(python).absolute()) for name, python in sides.items() if python}
    rows = memory(sides, populations, repetitions, rounds)
    print(f"{'side':8}{'clients':>10}{'files MB':>10}{'peak MB':>10}   {'range':16}{'first s':>10}{'round s':>10}")
    for row in rows:
        start = f"{row['side']:8}{row['clients']:>10,}{row['files_mb']:10.1f}"
        if "failed" in row:
            print(start, row["failed"])
            continue
        ends, times = f"{row['low']:.0f} to {row['high']:.0f}", f"{row['round_low']:.2f} to {row['round_high']:.2f}"
        print(f"{start}{row['peak_mb']:10.0f}   {ends:16}{row['first_s']:10.1f}{row['round_s']:10.3f}   {times}")
    result = {
        "device": "cpu", "machine": platform.machine(), "repetitions": repetitions, "rounds": rounds, "cohort": COHORT,
        "samples": EACH, "batch": BATCH, "epochs": EPOCHS, "load": round(os.getloadavg()[0], 1), "rows": rows,
    }  # fmt: skip
    write(result, args.out, f"population-memory-cpu{'-quick' if args.quick else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=61)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--memory", action="store_true", help="of runs on memory-mapped files, in place of times")
    parser.add_argument("--pfl", metavar="PYTHON", help="with --memory: interpreter that has pfl, see peers.py")
    parser.add_argument("--flower", metavar="PYTHON", help="with --memory: interpreter that has flwr, see peers.py")
    args = parser.parse_args()
    if args.memory:
        os.nice(10)
        return main_memory(args)
    if args.quick:
        args.repetitions = 5
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{name}, torch {torch.__version__}; one round of FedAvg, {COHORT} clients of {EACH} samples each")
    print(
        f"{'clients':>10}{'round ms':>10}   {'range':18}{'ratio':>6}   {'range':16}{'sample ms':>9}"
        f"{'MB':>10}{'set up s':>10}"
    )
    rows = measure(args.repetitions, args.device)
    for row in rows:
        times, ratios = f"{row['low']:.1f} to {row['high']:.1f}", f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
        print(
            f"{row['clients']:>10,}{row['round_ms']:10.1f}   {times:18}{row['ratio']:6.2f}   {ratios:16}"
            f"{row['sample_ms']:9.3f}{row['index_mb']:10.2f}{row['setup_s']:10.3f}"
        )
    result = {
        "device": args.device, "name": name, "machine": platform.machine(), "torch": torch.__version__,
        "repetitions": args.repetitions, "cohort": COHORT, "samples": EACH, "batch": BATCH, "epochs": EPOCHS,
        "rows": rows,
    }  # fmt: skip
    write(result, args.out, f"population-{args.device}{'-quick' if args.quick else ''}")


if __name__ == "__main__":
    main()
