"""Run folders: where they lie, what must stay during a run, how they are read.

start.safetensors has the trained weights of --init, so that resuming does not need their file again; architectures.csv
what each architecture of a fleet costs, and which clients have it.
"""

import csv
import itertools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

import surgery
from fl import models
from fl.algorithms.algorithm import Algorithm, Server
from fl.base import tensors
from fl.base.errors import FLError
from fl.base.files import reading
from fl.base.rng import Rng
from fl.base.settings import write_value
from fl.base.tables import write_csv
from fl.engine.work import flops
from fl.federation import Federation
from fl.models.custom_model import LIBRARIES, Model, as_given
from fl.models.fleet import brief
from fl.models.init import Start, maker
from fl.runs import checkpoint, metrics
from fl.settings import Config, earlier, stored
from fl.settings.config import RESUMABLE, plain
from fl.settings.extensions import EXTENSIONS, model_change
from surgery.files.whole import is_plain
from zoo import Spec

INITIAL, ARCHITECTURES = "start.safetensors", "architectures.csv"
_FORMAT = "start-1"
_log = logging.getLogger("fl")


def restore_server(config: Config, folder: Path, algorithm: Algorithm, spec: Spec) -> tuple[Server, int]:
    """Return the server of a run folder and its number of rounds.

    Before the first checkpoint it is the initial one. Raises FLError for a checkpoint that is damaged, gone, of another
    model or method, or of other settings, and for a table that does not belong to it.
    """
    if not (folder / checkpoint.FILE).exists():
        table = folder / metrics.FILE
        done = len(metrics.read(table)) if table.exists() else 0
        if (folder / "summary.json").exists() or (done and done > Config.read(folder).evaluation.checkpoint_every):
            raise FLError(
                f"{folder / checkpoint.FILE} is gone, though {done} rounds were done: put it back, or start a new run "
                "under another --name",
                code="file",
            )
        return algorithm.init(), 0
    server, done = checkpoint.restore(folder, algorithm.init(), spec)
    check_intact(folder, config)
    if done > config.rounds:
        raise FLError(f"{folder} has done {done} rounds, more than --rounds {config.rounds}")
    return server, done


def check_intact(folder: Path, config: Config, table: bool = True) -> None:
    """Raise FLError for a checkpoint of other settings, or beside another table.

    Settings that only one of two versions of this package has are not compared, nor are rounds of the table after the
    checkpoint.

    Args:
        table: whether to look at that.
    """
    header = checkpoint.read_header(folder)
    try:
        saved = earlier.flags(header["settings"])
        neutral = {setting.flag: plain(setting.value) for setting in Config().settings() if setting.group in EXTENSIONS}
        for flag, value in list_fixed(config).items():
            if (before := saved.get(flag, neutral.get(flag, value))) != value:
                was, now = (write_value(tuple(v) if isinstance(v, list) else v) for v in (before, value))
                why = " (--keep-best and --patience compare the evaluations of all rounds)" * (flag == "eval-every")
                flag = {"seed": "seeds"}.get(flag, flag)
                raise FLError(
                    f"{folder} was trained with --{flag} {was}, and now it is {now}{why}: put {was} back into "
                    f"{folder / 'config.yaml'}, or start a new run",
                    code="folder",
                )
        if table:
            metrics.check_rows(folder / metrics.FILE, header["round"], header["rows"])
    except FLError:
        if checkpoint.read_header(folder) == header:
            raise
        check_intact(folder, config, table)  # the run continues meanwhile, and has written another


def run_name(config: Config) -> str:
    """Return the name of the folder of one method and seed among several."""
    return f"{config.method.name}-seed{config.seed}"


def name_new_folder(out: str, name: str | None, title: str) -> Path:
    """Name the folder for a new run: --name, or the title, numbered where it is taken.

    Args:
        out: the folder that it lies in.
    """
    if name is not None:
        if not name:
            raise FLError("--name is empty: give the run folder a name, or leave the flag out")
        if not is_plain(name):
            raise FLError(f"--name {name} is not a plain name: give the folder that it lies in with --out")
        return Path(out, name)
    path, number = Path(out, title), itertools.count(2)
    while path.exists():
        path = Path(out, f"{title}-{next(number)}")
    return path


def list_fixed(config: Config) -> dict[str, Any]:
    """Return the settings, by flag, that a resumed run must not change.

    `rounds` is one of them if the learning rate, or who joins and leaves, depends on it. `eval-every` is one of them if
    --keep-best or --patience compare all evaluations.

    >>> settings = list_fixed(Config.of(lr=0.5))
    >>> settings["lr"], "rounds" in settings, "fedmr.segment-fraction" in settings, "fedprox.mu" in settings
    (0.5, False, True, False)
    >>> list_fixed(Config.of(lr_schedule="cosine"))["rounds"]
    40
    """
    free = set(RESUMABLE)
    if config.fixes_rounds:
        free.discard("rounds")
    if config.evaluation.keep_best or config.patience:
        free.discard("eval_every")
    return {
        setting.flag: plain(setting.value)
        for setting in config.settings()
        if not setting.unread and setting.name not in free
    }


def save_initial_weights(folder: Path, start: Start) -> None:
    """Write the weights of --init into a run folder, and tell what was not taken."""
    if (folder / INITIAL).exists():
        return
    metadata = {name: value for name, value in start._asdict().items() if name != "taken"}
    tensors.write(folder / INITIAL, _FORMAT, start.taken, metadata)
    _log.warning(start.describe())


def load_initial_weights(folder: Path, config: Config) -> Start | None:
    """Read the weights of --init that a run folder keeps; None if there are none.

    Args:
        config: the settings of the run.

    Raises:
        FLError: for a file that is damaged, gone since the run has a checkpoint, or of another --init than the
            settings have.
    """
    path = folder / INITIAL
    if not path.exists():
        if config.model.init and (folder / checkpoint.FILE).exists():
            raise FLError(
                f"{path} is gone, which has the weights of --init {config.model.init} that the run began with: put it "
                "back, or start a new run under another --name",
                code="file",
            )
        return None
    taken, metadata = tensors.read(path, _FORMAT)
    start = Start(taken, metadata["source"], metadata["sha256"], tuple(metadata["left"]), tuple(metadata["summed"]))
    init = str(config.model.init) if config.model.init else None
    if (start.source.partition(":")[0] if init in LIBRARIES else start.source) != init:
        now = f"--init {init}" if init else "no --init"
        raise FLError(
            f"{folder} holds a run that began with --init {start.source}, and now the settings say {now}: put "
            f"{start.source} back into {folder / 'config.yaml'}, or start a new run",
            code="folder",
        )
    return start


def architecture_rows(fed: Federation) -> list[dict[str, object]]:
    """Describe each architecture of a federation in a row of architectures.csv.

    Returns:
        width, depth: rates and numbers of blocks of its sections, separated by dashes if they differ. parameters: how
        many it has. macs: multiply-accumulates of the forward pass of one sample. bytes_down, bytes_up: the size of the
        model's state, which a participant receives and sends in a round of FedAvg. count, malicious: numbers of
        clients. clients: which they are, separated by spaces.
    """
    fleet = fed.fleet_or_uniform
    rows = []
    for k, kind in enumerate(fleet.architectures):
        owners = [client for client, index in enumerate(fleet.owned) if index == k]
        model_bytes = sum(tensor.nbytes for tensor in surgery.state(kind.model).values())
        row = {
            "width": brief(kind.spec.width, "-") if kind.spec else "",
            "depth": brief(kind.spec.depth, "-") if kind.spec else "",
            "parameters": sum(p.numel() for p in kind.model.parameters()),
            "macs": flops(kind.model, fed.data) // 2,
            "bytes_down": model_bytes,
            "bytes_up": model_bytes,
            "count": len(owners),
            "malicious": len(fed.malicious.intersection(owners)),
            "clients": " ".join(map(str, owners)),
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (row["parameters"], row["width"], row["depth"]))


def save_architectures(fed: Federation, folder: Path) -> None:
    """Write architectures.csv into a run folder.

    FLError if there is another already, since a run that is resumed must keep its architectures.
    """
    path, rows = folder / ARCHITECTURES, architecture_rows(fed)
    if not path.exists():
        write_csv(path, list(rows[0]), (list(row.values()) for row in rows))
        return
    with reading(path), open(path, newline="") as file:
        before = list(csv.DictReader(file))
    if before != [{key: str(value) for key, value in row.items()} for row in rows]:
        raise FLError(
            f"{path} gives the clients other architectures than the settings do now: restore the content of "
            "--architectures.file (or, if malicious clients took the largest model when the run began, write "
            "`architecture: largest` under `attack:` in its config.yaml), or start a new run",
            code="folder",
        )


def load_model(folder: str | Path, model: Model | None = None, *, best: bool = False) -> nn.Module:
    """Load the trained global model of a run folder, on the CPU, in evaluation mode.

    It takes images in [-1, 1], or tokens, or floats as they were given. Of masks it gives [N, classes, H, W].

    Args:
        model: the model of your own that the run was given, if it was: a module (which stays as it is), or a function
            that makes it.
        best: the model of the best evaluated round (see `fl.runs.metrics.best`), for a run with --keep-best, instead of
            the last round's.

    What an extension trained beside the model's parameters, such as adapters, is folded into these.

    Raises FLError if the folder holds no run, or several, or one of another model, or not the model of its best round.
    """
    return fold_model(Config.read(Path(folder)), load_as_trained(Path(folder), model, best=best)).eval()


def fold_model(config: Config, model: nn.Module) -> nn.Module:
    """Return a run's model with extensions' parts folded into its own parameters."""
    change = model_change(config.extensions)
    return change[1].plain(model) if change else model


def load_as_trained(folder: Path, model: Model | None = None, *, best: bool = False) -> nn.Module:
    """Load the global model of a run as `load_model` does, with extensions' parts."""
    config = Config.read(folder)
    if (folder / checkpoint.FILE).exists():
        check_intact(folder, config, table=best)
        if not checkpoint.read_header(folder)["round"]:
            _log.warning(f"warning: no round of {folder} was trained: these are its initial weights")
    spec, state = checkpoint.read_model(folder, model, best=best and not is_last_best(folder))
    if change := model_change(config.extensions):
        base = maker(spec, load_initial_weights(folder, config))(Rng(config.seed).torch("weights"))
        net = change[1].load(base, config, state)
        checkpoint.check_base(folder, net)
    else:
        net = models.create(torch.Generator(), spec)
    named = net.state_dict(keep_vars=True)
    there = {id(tensor): state[name] for name, tensor in named.items() if name in state}
    tied = {name: there[id(tensor)] for name, tensor in named.items() if name not in state and id(tensor) in there}
    try:
        net.load_state_dict(state | tied)
    except RuntimeError as error:
        with stored.in_folder(folder, resume=False) as text:
            names = ", ".join(stored.missing(text))
        why = f"it was made with {names}, which is not installed here; " if names else ""
        raise FLError(f"{folder} holds another model: {why}{' '.join(str(error).split())}", code="folder") from None
    return as_given(net)


def is_last_best(folder: Path) -> bool:
    """Return whether the best evaluated round of a run is its checkpoint's round.

    Raises FLError if no round is best, or if the model of the best round was not kept.
    """
    header = checkpoint.read_header(folder)
    rows = [row for row in metrics.read(folder / metrics.FILE) if row["round"] <= header["round"]]
    best = metrics.best(rows, Config.read(folder).evaluation.best_by)
    if not best:
        why = "none was evaluated before its checkpoint"
        if metrics.select_evaluated(rows):
            column = metrics.choose_judging_column(rows, Config.read(folder).evaluation.best_by)
            why = f"{column} was nan in every evaluation"
        raise FLError(f"{folder} has no best round: {why}; best=False gives the model of the last one", code="folder")
    if best["round"] not in (header["round"], header["best"]):
        raise FLError(
            f"{folder} has not kept the model of its best round, {best['round']}: train with --keep-best", code="folder"
        )
    return best["round"] == header["round"]
