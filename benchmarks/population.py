"""Time a round of FedAvg with a cohort of 10 among 100, 10,000 and 1,000,000 clients; or ask for the memory of runs.

    python benchmarks/population.py          # prints the table, writes benchmarks/results/population-<device>.json
    python benchmarks/population.py --quick  # fewer rounds, to see that it runs
    python benchmarks/population.py --memory # writes benchmarks/results/population-memory-cpu.json

Every client has 20 samples of one resident data set of 8x8 images; clients share samples, so that populations differ
in their indices only. A round is all of it: sampling the cohort, batches, local training and the weighted mean. The
populations take turns in this process, so that what else the machine does hits all alike. Reported are the median
milliseconds of a round with their range, the ratio to the round among 100 clients that ran next to it (median and
range), the time to sample alone, the memory of all index tensors, and the time to pack them, check them and make the
federation.

With `--memory` each client has 20 images of 28x28 pixels of its own, in files that are mapped into memory (1.6 GB for
100,000 clients). Whole runs of FedAvg and FedMR, from settings to a run folder, take place in processes of their own,
with the populations in turn; the model is McMahan's CNN with a quarter of its widths, so that it does not hide what
clients take. Reported are the largest resident memory of the process (the system's VmHWM, with the pages of files in it
and some 0.8 GB of libraries; the median and range of the repetitions), the seconds until the first round begins, and
those of a round. The processes run at low priority, on a machine that may do other things: the times are a hint, the
memory is the result.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from report import write

import fl
import zoo
from fl.algorithms import fedavg
from fl.algorithms.algorithm import Algorithm
from fl.base.rng import Rng
from fl.data import Dataset
from fl.federation import Federation, LocalTraining
from fl.partition import Parts, hold_out

CLIENTS = (100, 10_000, 1_000_000)
COHORT, EACH, BATCH, EPOCHS = 10, 20, 10, 5
IN_FILES, METHODS, ROUNDS, WIDTH = (1000, 10_000, 100_000), ("fedavg", "fedmr"), 10, 0.25


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
    """A row for each population; they take turns, in an order that turns as well."""
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


def files(folder: Path, clients: int) -> float:
    """Write random images for so many clients, and return how many bytes they take."""
    rng, samples = np.random.default_rng(0), clients * EACH
    folder.mkdir()
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (samples, 1, 28, 28))
    for first in range(0, samples, EACH * 1000):
        x[first : first + EACH * 1000] = rng.integers(0, 256, x[first : first + EACH * 1000].shape, np.uint8)
    np.save(folder / "y.npy", rng.integers(0, 10, samples))
    np.save(folder / "test_x.npy", x[:1000])
    np.save(folder / "test_y.npy", rng.integers(0, 10, 1000))
    return x.nbytes


def one_run(folder: str, clients: str, method: str) -> None:
    """Run one method on such a folder in this process, and print what it took as JSON."""
    config = fl.Config(
        algorithm=(method,), dataset=f"folder:{folder}", partition="iid", clients=int(clients), participants=COHORT,
        rounds=ROUNDS, batch_size=BATCH, local_epochs=EPOCHS, width=WIDTH, device="cpu",
    )  # fmt: skip
    begin, rounds, ends = time.perf_counter(), [], []

    def note(row: dict) -> None:
        ends.append(time.perf_counter() - begin)
        rounds.append(row["seconds"])

    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stderr(io.StringIO()):
        fl.simulate(config, Path(out, "run"), on_round=note)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024 / 1e6
    print(json.dumps({"peak_mb": peak, "setup_s": ends[0] - rounds[0], "round_s": statistics.median(rounds[1:])}))


def memory(repetitions: int, populations: tuple[int, ...]) -> list[dict]:
    """A row for each method and population, whose runs take turns."""
    with tempfile.TemporaryDirectory() as every:
        sizes = {clients: files(Path(every, str(clients)), clients) for clients in populations}
        taken: dict[tuple[str, int], list[dict]] = {(method, c): [] for method in METHODS for c in populations}
        for _ in range(repetitions):
            for (method, clients), found in taken.items():
                words = [sys.executable, __file__, "--run", str(Path(every, str(clients))), str(clients), method]
                found.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    rows = []
    for (method, clients), found in taken.items():
        peaks = [one["peak_mb"] for one in found]
        times = {name: round(statistics.median(one[name] for one in found), 3) for name in ("setup_s", "round_s")}
        ends = {"peak_mb": statistics.median(peaks), "low": min(peaks), "high": max(peaks)}
        ends = {name: round(value, 1) for name, value in ends.items()}
        rows.append({"method": method, "clients": clients, "files_mb": round(sizes[clients] / 1e6, 1), **ends, **times})
    return rows


def main_memory(args: argparse.Namespace) -> None:
    repetitions, populations = (1, IN_FILES[:1]) if args.quick else (3, IN_FILES)
    rows = memory(repetitions, populations)
    print(f"{'method':8}{'clients':>10}{'files MB':>10}{'peak MB':>10}   {'range':16}{'set up s':>10}{'round s':>10}")
    for row in rows:
        ends = f"{row['low']:.0f} to {row['high']:.0f}"
        print(
            f"{row['method']:8}{row['clients']:>10,}{row['files_mb']:10.1f}{row['peak_mb']:10.0f}   {ends:16}"
            f"{row['setup_s']:10.2f}{row['round_s']:10.3f}"
        )
    result = {
        "device": "cpu", "machine": platform.machine(), "torch": torch.__version__, "repetitions": repetitions,
        "rounds": ROUNDS, "cohort": COHORT, "samples": EACH, "batch": BATCH, "epochs": EPOCHS, "width": WIDTH,
        "load": round(os.getloadavg()[0], 1), "rows": rows,
    }  # fmt: skip
    write(result, args.out, f"population-memory-cpu{'-quick' if args.quick else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repetitions", type=int, default=61)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--memory", action="store_true", help="of runs on memory-mapped files, in place of times")
    parser.add_argument("--run", nargs=3, metavar=("FOLDER", "CLIENTS", "METHOD"), help="one of these runs")
    args = parser.parse_args()
    if args.run:
        return one_run(*args.run)
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
