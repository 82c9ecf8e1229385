"""The weights of --init that a run folder keeps, so that its run goes on with those that it began with."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise

from fl.base.errors import FLError
from fl.base.files import regular, replacing
from fl.config import Config
from fl.models.init import Start
from fl.models.weights import LIBRARIES
from fl.runs import checkpoint
from fl.runs.checksums import damage, ordered, record
from surgery.errors import first_line

FILE = "start.safetensors"


def keep(folder: Path, start: Start) -> None:
    """Write it into a run folder as one safetensors file, atomically, with a checksum of every tensor."""
    said = json.dumps({name: value for name, value in start._asdict().items() if name != "taken"})
    header = {"start": said, "checksums": record(start.taken, said)}
    with replacing(folder / FILE) as temporary:
        temporary.write_bytes(b"".join(ordered(serialise(start.taken, metadata=header))))


def kept(folder: Path, config: Config) -> Start | None:
    """What a run folder keeps; None if its weights are drawn, or if it was stopped before it kept them.

    Args:
        config: the settings of the run.

    Raises:
        FLError: for a file that is damaged, gone since the run has a checkpoint, or of another --init than that of the
            settings.
    """
    path = folder / FILE
    try:
        start = _read(path)
    except FileNotFoundError:
        if config.init and (folder / checkpoint.FILE).exists():
            raise FLError(
                f"{path} is gone, which has the weights of --init {config.init} that the run began with: put it back, "
                "or start a new run under another --name"
            ) from None
        return None
    init = str(config.init) if config.init else None
    if (start.source.partition(":")[0] if init in LIBRARIES else start.source) != init:
        now = f"--init {init}" if init else "no --init"
        raise FLError(
            f"{folder} holds a run that began with --init {start.source}, and now the settings say {now}: put "
            f"{start.source} back into {folder / 'config.yaml'}, or start a new run"
        )
    return start


def _read(path: Path) -> Start:
    try:
        with safe_open(regular(path, most=None), framework="pt") as file:
            header = file.metadata() or {}
            taken = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        said = json.loads(header["start"])
        start = Start(taken, said["source"], said["sha256"], tuple(said["left"]), tuple(said["summed"]))
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise FLError(f"{path} cannot be read: {first_line(error)}; put the file back") from None
    # earlier versions wrote no checksums
    if "checksums" in header and (wrong := damage(taken, header["start"], header["checksums"])):
        raise FLError(f"{path} is damaged ({wrong}): put the file back")
    return start
