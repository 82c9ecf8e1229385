"""What a node keeps on its disk: its own state after each of the rounds that the server may still name.

    FOLDER/RUN/ROUND-VERSION.safetensors

The last file by name is the newest. A node that is started anew finds them, and a run that the server resumes from an
earlier checkpoint names an earlier version.
"""

from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fl.base.files import replacing
from fl.deploy.letters import Refused


class Store:
    """The states of one client in all runs.

    Args:
        folder: on the node's disk; made when it is needed. None: the node can keep nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, run: int, version: int) -> dict[str, Tensor]:
        """What was written under this version. Raises Refused if it is gone or damaged."""
        folder = self._run(run)
        for path in folder.glob(f"*-{version:016x}.safetensors"):
            try:
                return load_file(path)
            except (SafetensorError, OSError) as error:
                raise Refused(f"its own state cannot be read: {path} ({' '.join(str(error).split())})") from None
        raise Refused(f"its own state of this run is gone: put a copy of {folder} back on the node, or start a new run")

    def write(self, run: int, round: int, version: int, tensors: dict[str, Tensor], needed: Collection[int]) -> None:
        """Keep a new version, and of the older ones of the run those that are still needed.

        >>> import tempfile, torch
        >>> store = Store(Path(tempfile.mkdtemp()))
        >>> store.write(7, 1, 11, {"w": torch.zeros(1)}, needed=[])
        >>> store.write(7, 2, 12, {"w": torch.ones(1)}, needed=[11])
        >>> store.read(7, 11), store.read(7, 12)
        ({'w': tensor([0.])}, {'w': tensor([1.])})
        """
        folder = self._run(run)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{round:06d}-{version:016x}.safetensors") as temporary:
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, temporary)
        endings = tuple(f"-{one:016x}" for one in {*needed, version})
        for old in folder.glob("*.safetensors"):
            if not old.stem.endswith(endings):
                old.unlink(missing_ok=True)

    def _run(self, run: int) -> Path:
        if self._folder is None:
            raise Refused("this node has no folder in which it could keep a state of its own: give it one")
        return self._folder / f"{run:016x}"
