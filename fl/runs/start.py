"""What a run folder keeps of how its run began: start.safetensors, the trained weights of --init, so that resuming does
not need their file again, and architectures.csv, what each architecture of a fleet costs and which clients have it.
"""

import csv
import logging
from pathlib import Path

from fl.base import tensors
from fl.base.errors import FLError
from fl.base.tables import write_csv
from fl.config import Config
from fl.engine.work import flops
from fl.federation import Federation
from fl.models.custom_model import LIBRARIES
from fl.models.fleet import brief
from fl.models.init import Start
from fl.runs import checkpoint
from surgery import state

FILE = "start.safetensors"
_FORMAT = "start-1"
_log = logging.getLogger("fl")
ARCHITECTURES = "architectures.csv"
COLUMNS = ("width", "depth", "parameters", "macs", "bytes_down", "bytes_up", "count", "malicious", "clients")


def keep(folder: Path, start: Start) -> None:
    """Write it into a run folder, unless it is there, and tell what was not taken."""
    if (folder / FILE).exists():
        return
    said = {name: value for name, value in start._asdict().items() if name != "taken"}
    tensors.write(folder / FILE, _FORMAT, start.taken, said)
    _log.warning(start.told())


def kept(folder: Path, config: Config) -> Start | None:
    """What a run folder keeps; None if its weights are drawn, or if it was stopped before it kept them.

    Args:
        config: the settings of the run.

    Raises:
        FLError: for a file that is damaged, gone since the run has a checkpoint, or of another --init than that of the
            settings.
    """
    path = folder / FILE
    if not path.exists():
        if config.init and (folder / checkpoint.FILE).exists():
            raise FLError(
                f"{path} is gone, which has the weights of --init {config.init} that the run began with: put it back, "
                "or start a new run under another --name"
            )
        return None
    taken, said = tensors.read(path, _FORMAT)
    start = Start(taken, said["source"], said["sha256"], tuple(said["left"]), tuple(said["summed"]))
    init = str(config.init) if config.init else None
    if (start.source.partition(":")[0] if init in LIBRARIES else start.source) != init:
        now = f"--init {init}" if init else "no --init"
        raise FLError(
            f"{folder} holds a run that began with --init {start.source}, and now the settings say {now}: put "
            f"{start.source} back into {folder / 'config.yaml'}, or start a new run"
        )
    return start


def roster(fed: Federation) -> list[dict[str, object]]:
    """A row for each architecture.

    Returns:
        width, depth: rates and numbers of blocks of its sections, separated by dashes if they differ. parameters: how
        many it has. macs: multiply-accumulates of the forward pass of one sample. bytes_down, bytes_up: what a
        participant receives and sends in a round. count, malicious: numbers of clients. clients: which they are,
        separated by spaces.
    """
    fleet, bad = fed.fleet_or_uniform, fed.attack.malicious if fed.attack else frozenset()
    rows = []
    for k, kind in enumerate(fleet.architectures):
        owners = [client for client, own in enumerate(fleet.owned) if own == k]
        weight = sum(tensor.nbytes for tensor in state(kind.model).values())
        rows.append(
            {
                "width": brief(kind.spec.width, "-") if kind.spec else "",
                "depth": brief(kind.spec.depth, "-") if kind.spec else "",
                "parameters": sum(p.numel() for p in kind.model.parameters()),
                "macs": flops(kind.model, fed.data) // 2,
                "bytes_down": weight,
                "bytes_up": weight,
                "count": len(owners),
                "malicious": len(bad.intersection(owners)),
                "clients": " ".join(map(str, owners)),
            }
        )
    return sorted(rows, key=lambda row: (row["parameters"], row["width"], row["depth"]))


def save_roster(fed: Federation, folder: Path) -> None:
    """Write the table into a run folder, or compare it with the one that is there already.

    Raises:
        FLError: if these differ, since a run that is resumed must keep its architectures.
    """
    if (folder / ARCHITECTURES).exists():
        with open(folder / ARCHITECTURES, newline="") as file:
            before = list(csv.DictReader(file))
        if before != [{key: str(value) for key, value in row.items()} for row in roster(fed)]:
            raise FLError(
                f"{folder / ARCHITECTURES} gives the clients other architectures than the settings do now: restore the "
                "content of --architectures.file (or, if malicious clients took the largest model when the run began, "
                "write `architecture: largest` under `attack:` in its config.yaml), or start a new run"
            )
        return
    write_csv(folder / ARCHITECTURES, COLUMNS, ([row[name] for name in COLUMNS] for row in roster(fed)))
