"""From settings to a trained model: run the rounds, measure, keep the run folder up to date."""

import logging
from pathlib import Path

from fl import data
from fl.base.files import write_json, write_text
from fl.config import Config
from fl.partition import KINDS
from fl.runs import checkpoint
from fl.runs.artifact import Snapshot
from fl.runs.assembly import build
from fl.runs.client_scores import ClientTable
from fl.runs.folder import begin, create_folder
from fl.runs.metrics import Metrics
from fl.runs.summary import summarise
from fl.simulation.artifacts import leave
from fl.simulation.rounds import due, rounds

_log = logging.getLogger("fl")


def simulate(config: Config, folder: Path, resume: bool = False, dataset: data.Dataset | None = None) -> dict:
    """Run all rounds of one method with one seed and leave a run folder; return its summary.

    The folder holds config.yaml, metrics.csv (a row a round), curves.png, checkpoint.safetensors and summary.json.
    Where clients hold samples out it also holds clients.csv, a row a client with its scores in the evaluated round of
    the smallest mean validation loss (in the last, where they do not validate), and clients.f64, see
    `fl.runs.client_scores`; methods with models on levels leave structure.json and structure.png, those with clients of
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
    if used < known and not KINDS[config.partition].partial:
        _log.warning(f"warning: {config.spread()} leaves {known - used:,} of {known:,} training samples unused")
    metrics = Metrics(folder / "metrics.csv", keep=done, wanted=lambda row: due(config, row["round"]))
    table = ClientTable(folder, fed, metrics.rows)
    leave("start", Snapshot(config, fed, algorithm, server, metrics.rows, folder))
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
        leave("end", Snapshot(config, fed, algorithm, server, metrics.rows, folder))
    return summary
