"""architectures.csv: what each architecture of a fleet costs, and which clients have it."""

import csv
from pathlib import Path

from fl.base.errors import FLError
from fl.base.tables import write_csv
from fl.engine.work import flops
from fl.federation import Federation
from fl.models.fleet import brief
from fl.runs.artifact import Artifact
from fl.runs.simulation import Simulation
from surgery import state

FILE = "architectures.csv"
COLUMNS = ("width", "depth", "parameters", "macs", "bytes_down", "bytes_up", "count", "malicious", "clients")


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
    if (folder / FILE).exists():
        with open(folder / FILE, newline="") as file:
            before = list(csv.DictReader(file))
        if before != [{key: str(value) for key, value in row.items()} for row in roster(fed)]:
            raise FLError(
                f"{folder / FILE} gives the clients other architectures than the settings do now: restore the content "
                "of --architectures.file (or, if malicious clients took the largest model when the run began, write "
                "`architecture: largest` under `attack:` in its config.yaml), or start a new run"
            )
        return
    write_csv(folder / FILE, COLUMNS, ([row[name] for name in COLUMNS] for row in roster(fed)))


def _leave(run: Simulation) -> None:
    if run.fed.fleet:
        save_roster(run.fed, run.folder)


ARTIFACT = Artifact(_leave, when="start")
