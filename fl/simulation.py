"""From settings to a trained model: run the rounds, measure, keep the run folder up to date."""

import logging
import platform
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fl import checkpoint, data, evaluate, models, plot
from fl.algorithm import Algorithm, Server
from fl.analysis.coverage import draw_coverage
from fl.assembly import build, pick_device
from fl.attack import triggered
from fl.clients import ClientTable
from fl.config import Config
from fl.errors import FLError
from fl.federation import Federation
from fl.files import write_json, write_text
from fl.fleet import alone
from fl.metrics import Metrics, selected
from fl.rng import Rng
from fl.roster import save_roster
from zoo import Spec

_log = logging.getLogger("fl")


def simulate(config: Config, folder: Path, resume: bool = False, dataset: data.Dataset | None = None) -> dict:
    """Run all rounds of one method with one seed and leave a run folder; return its summary.

    The folder holds config.yaml, metrics.csv (a row a round), curves.png, checkpoint.safetensors and
    summary.json. Where clients hold samples out it also holds clients.csv, a row a client with its scores in the
    evaluated round of the smallest mean validation loss (in the last, where they do not validate), and clients.f64,
    see `fl.clients`; methods with models on levels leave structure.json and structure.png, those with clients of
    different architectures architectures.csv and (where these keep their places) coverage.png. Interrupted at any
    moment, by Ctrl-C or for good, it can be continued with `resume`, and ends as the uninterrupted run would have: bit
    for bit on a CPU with the same backend and as many threads, on a GPU as far as its kernels are deterministic.

    Raises:
        FLError: if the folder exists already (or, resuming, is no run folder of this model and method), or
            training diverges.
        KeyboardInterrupt: on Ctrl-C, after what is done was saved.
    """
    dataset = dataset or config.load()
    fed, algorithm = build(config, dataset)
    spec = fed.spec
    server, done = begin(config, folder, algorithm, spec) if resume else (algorithm.init(), 0)
    if not resume:
        create_folder(folder)
    used, known = fed.clients.total, len(dataset.y)
    if used < known and config.partition != "natural":  # there --clients says how many of the owners take part
        _log.warning(f"warning: {config.spread()} leaves {known - used:,} of {known:,} training samples unused")
    metrics = Metrics(folder / "metrics.csv", keep=done, wanted=lambda row: due(config, row["round"]))
    table = ClientTable(folder, fed, metrics.rows)
    if fed.fleet:
        leave_fleet(fed, algorithm, folder)
    write_text(folder / "config.yaml", config.to_yaml())
    finished, saved = done, None
    try:
        for finished, after in rounds(config, fed, algorithm, server, done, metrics, table):
            server = after
            if finished % config.checkpoint_every == 0:
                checkpoint.save(folder, server, finished, spec, fed.statistics(server["global"]))
                saved = finished
    finally:
        if saved != finished:
            checkpoint.save(folder, server, finished, spec, {})  # first what cannot be made again
            if statistics := fed.statistics(server["global"]):
                checkpoint.save(folder, server, finished, spec, statistics)
        summary = summarise(config, metrics, finished)
        write_json(folder / "summary.json", summary)
        if metrics.rows:
            plot.run_figure(metrics.rows, config.title(), folder / "curves.png")
        if "structure" in server:
            leave_structure(config, dataset, server, folder)
    return summary


def leave_fleet(fed: Federation, algorithm: Algorithm, folder: Path) -> None:
    """architectures.csv (see `fl.roster`), and coverage.png: who covers what of the global model; where the method
    grafts, without and with grafting.
    """
    save_roster(fed, folder)
    if algorithm.plan:
        plans = list(map(algorithm.plan, range(len(fed.fleet))))
        bare = list(map(alone, plans))
        grafted = {"without grafting": bare, "with grafting": plans}
        draw_coverage(grafted if bare != plans else {"clients' models": plans}, folder / "coverage.png")


def leave_structure(config: Config, dataset: data.Dataset, server: Server, folder: Path) -> None:
    """structure.json and structure.png, of methods that give clients models on levels; see `fl.structure`."""
    from fl.structure import Structure  # here, since python -m fl.structure imports this module first
    from fl.structure_figure import draw

    (name,), (seed,) = config.algorithm, config.seeds
    options, progress = getattr(config, name), server.get("progress")
    structure = Structure(
        name,
        levels=list(options.levels) if name == "femam" else [str(options.clusters)],
        truth=config.deal(dataset, Rng(seed).numpy("partition")).structure.tolist(),
        found=server["structure"]["pathways"].tolist(),
        trained=int(progress["level"]) + bool(progress["rounds"]) if progress else 1,
        seed=seed,
        title=config.title(),
    )
    structure.save(folder)
    draw([structure], folder / "structure.png")


def begin(config: Config, folder: Path, algorithm: Algorithm, spec: Spec) -> tuple[Server, int]:
    """(server, rounds done) of a run folder; from the start if it was stopped before its first checkpoint."""
    if not (folder / checkpoint.FILE).exists():
        return algorithm.init(), 0
    server, done = checkpoint.restore(folder, algorithm.init(), spec)
    if done > config.rounds:
        raise FLError(f"{folder} has done {done} rounds, more than --rounds {config.rounds}")
    return server, done


def rounds(
    config: Config,
    fed: Federation,
    algorithm: Algorithm,
    server: Server,
    done: int,
    metrics: Metrics,
    table: ClientTable,
) -> Iterator[tuple[int, Server]]:
    """Run the rounds after `done`, adding a row of metrics for each; yields (round, server)."""
    bar = tqdm(
        total=config.rounds,
        initial=done,
        desc=f"{config.algorithm[0]} seed {config.seeds[0]}",
        unit="round",
        mininterval=0.1 if sys.stderr.isatty() else 30,
        dynamic_ncols=True,
    )
    with bar, logging_redirect_tqdm():
        for number in range(done + 1, config.rounds + 1):
            fed.meter.read()  # what evaluation trained (fine-tuned models) is no part of a round
            started = time.perf_counter()
            rng = Rng(config.seeds[0], number)
            clients = algorithm.choose(fed, server, rng)
            server, trained = algorithm.round(server, clients, rng)
            kept = torch.tensor([size > 0 for size in trained.sizes or [1] * len(clients)])
            if (dropped := int((~kept).sum())) == len(kept):
                kept = ~kept  # nobody's model arrived: what is measured is what they started from
            loss = trained.loss.cpu()[kept].mean().item()  # waits for the device, so that the time below is the round's
            took = time.perf_counter() - started
            row = {"round": number, "seconds": took, "train_loss": loss, **trained.metrics}
            row["macs"] = fed.meter.read() / 2 / len(clients)
            if dropped:
                row["dropped"] = dropped
            alive = evaluate.Cohort.of(fed, trained.states, clients, kept.tolist())
            measured, scores = evaluate_round(config, fed, algorithm, server, alive, number)
            row |= measured
            metrics.add(row)
            table.add(metrics.rows, scores)
            if "accuracy" in row:
                bar.set_postfix_str(f"accuracy {row['accuracy']:.2%}", refresh=False)
            bar.update()
            yield number, server


def evaluate_round(
    config: Config, fed: Federation, algorithm: Algorithm, server: Server, cohort: evaluate.Cohort, number: int
) -> tuple[dict[str, float], evaluate.Scores]:
    """The metrics that are due in this round, all of them in the last, and the scores of each client, if they are."""
    scores: evaluate.Scores = {}
    row = evaluate.mean_cosine(fed, cohort)
    wanted = due(config, number)
    participants = evaluate.evaluate_models(fed, cohort) if "models" in wanted else {}
    if "global" in wanted and fed.attack and config.attack.kind == "trigger":
        predict = partial(algorithm.predict, server, client=None)
        row |= evaluate.attack_success(fed, predict, triggered(config.attack, fed.data), config.attack.target)
    if "global" in wanted:
        own = partial(algorithm.own, server) if algorithm.own else None
        scores = evaluate.score_clients(fed, lambda images, client: algorithm.predict(server, images, client), own)
        row |= evaluate.summarise_clients(scores, fed.attack.malicious if fed.attack else ())
        # last, so that a checkpoint finds the global model's statistics as they were just collected
        row |= evaluate.evaluate_global(fed, lambda images: algorithm.predict(server, images, None))
    return row | participants, scores


def due(config: Config, number: int) -> set[str]:
    """What is evaluated after a round: the global model, the participants' models; both in the last."""
    last, wanted = number == config.rounds, set()
    if last or number % config.eval_every == 0:
        wanted.add("global")
    if config.models_every and (last or number % config.models_every == 0):
        wanted.add("models")
    return wanted


def summarise(config: Config, metrics: Metrics, rounds: int) -> dict:
    """What to know of a run at one glance."""
    evaluated = [row for row in metrics.rows if "accuracy" in row]
    chosen = selected(metrics.rows)
    local = [key for key in chosen if key.startswith("local_")] if "local_test_accuracy" in chosen else []
    best = max(evaluated, key=lambda row: row["accuracy"], default={})
    return {
        "algorithm": config.algorithm[0],
        "seed": config.seeds[0],
        "rounds": rounds,
        "complete": rounds == config.rounds,
        "final": evaluated[-1] if evaluated else {},
        "best": {key: best[key] for key in ("round", "accuracy") if key in best},
        "selected": {key: chosen[key] for key in ("round", *local)} if local else {},
        "seconds": sum(row["seconds"] for row in metrics.rows),
        "device": str(pick_device(config.device)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def create_folder(folder: Path) -> None:
    """Make a run folder, which must be new."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise FLError(f"{folder} exists already: choose another --name, or go on with --resume {folder}") from None
    except (OSError, ValueError) as error:
        raise FLError(f"{folder} cannot be made: {getattr(error, 'strerror', error)}") from None


def load_model(folder: str | Path) -> nn.Module:
    """The trained global model of a run folder, on the CPU, in evaluation mode. It takes images in [-1, 1], or tokens.

    Raises FLError if the folder holds no run, or several.
    """
    folder = Path(folder)
    if len(Config.read(folder).runs()) > 1:
        raise FLError(f"{folder} holds several runs: give one of the folders in it")
    spec, state = checkpoint.read_model(folder)
    model = models.create(torch.Generator(), spec)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise FLError(f"{folder} holds another model: {' '.join(str(error).split())}") from None
    return model.eval()
