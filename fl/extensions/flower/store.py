"""Keep a client's states on a node's disk, of each round that the server may name.

    FOLDER/RUN/ROUND-VERSION.safetensors
    FOLDER/levels/DIGEST.safetensors      finished levels that the server has sent, and will not send again
    FOLDER/exchange                       its keys and pieces in secure recombination, until it has uploaded them

The last version by name is the newest. A restarted node finds all of it, and a run that the server resumes
from an earlier checkpoint names an earlier version.
"""

import os
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from fl.base import tensors as files
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.extensions.flower.messages import InvalidMessage

_STATE, _LEVEL = "state-1", "level-1"


class Store:
    """The states of one client in all runs.

    Args:
        folder: on the node's disk; made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._levels: dict[str, dict[str, Tensor]] = {}

    def read(self, run: int, version: int) -> dict[str, Tensor]:
        """Return the tensors of a version; InvalidMessage if they are gone or damaged."""
        folder = self._run(run)
        for path in folder.glob(f"*-{version:016x}.safetensors"):
            try:
                return files.read(path, _STATE)[0]
            except FLError as error:
                raise InvalidMessage(f"its client's state cannot be read: {error}") from None
        raise InvalidMessage(
            f"its client's state of this run is gone: put a copy of {folder} back on the node, or start a new run"
        )

    def write(self, run: int, round: int, version: int, tensors: dict[str, Tensor], needed: Collection[int]) -> None:
        """Keep a new version, and of the run's older ones those still needed.

        >>> import tempfile, torch
        >>> store = Store(Path(tempfile.mkdtemp()))
        >>> store.write(7, 1, 11, {"w": torch.zeros(1)}, needed=[])
        >>> store.write(7, 2, 12, {"w": torch.ones(1)}, needed=[11])
        >>> store.read(7, 11), store.read(7, 12)
        ({'w': tensor([0.])}, {'w': tensor([1.])})
        >>> store.write(7, 1, 13, {"w": torch.zeros(1)}, needed=[])  # a request of an earlier round that came late
        >>> store.read(7, 12)
        {'w': tensor([1.])}
        """
        folder = self._run(run)
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / f"{round:06d}-{version:016x}.safetensors", _STATE, tensors, {})
        endings = tuple(f"-{number:016x}" for number in {*needed, version})
        for old in folder.glob("*.safetensors"):
            # a request that comes late, after the next round's, must not delete what the server has accepted since
            if not old.stem.endswith(endings) and old.stem < f"{round:06d}":
                old.unlink(missing_ok=True)

    def level(self, digest: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a finished level: written if it has come, otherwise read.

        Raises InvalidMessage if it is gone or damaged.
        """
        if digest not in self._levels:
            if not (len(digest) == 64 and digest.isalnum()):
                raise InvalidMessage(f"{digest!r} names no level")
            path = self._folder / "levels" / f"{digest}.safetensors"
            if tensors:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(path, _LEVEL, tensors, {})
            else:
                try:
                    tensors, _ = files.read(path, _LEVEL)
                except FLError:
                    raise InvalidMessage(
                        "a finished level that it was sent before is gone from its disk, and is sent again in the next "
                        "round"
                    ) from None
            self._levels[digest] = tensors
        return self._levels[digest]

    def forget(self, digests: Collection[str]) -> None:
        """Delete the finished levels other than these."""
        self._levels = {digest: level for digest, level in self._levels.items() if digest in digests}
        for old in self._folder.glob("levels/*.safetensors"):
            if old.stem not in digests:
                old.unlink(missing_ok=True)

    def keep_exchange(self, content: bytes) -> None:
        """Keep what a secret exchange's next request needs, readable by its owner only.

        >>> import tempfile
        >>> store = Store(Path(tempfile.mkdtemp()))
        >>> store.keep_exchange(b"secret")
        >>> store.exchange()
        b'secret'
        >>> store.drop_exchange()
        >>> store.exchange()
        Traceback (most recent call last):
        fl.extensions.flower.messages.InvalidMessage: it takes no part in this exchange: its keys are gone
        """
        path = self._folder / "exchange"
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, open(temporary, "xb", opener=lambda p, flags: os.open(p, flags, 0o600)) as f:
            f.write(content)

    def exchange(self) -> bytes:
        """Return what `keep_exchange` kept. Raises InvalidMessage if it is gone."""
        try:
            return (self._folder / "exchange").read_bytes()
        except OSError:
            raise InvalidMessage("it takes no part in this exchange: its keys are gone") from None

    def drop_exchange(self) -> None:
        """Delete it, and what a process left that was killed while it wrote."""
        for old in self._folder.glob("*exchange*"):
            old.unlink(missing_ok=True)

    def _run(self, run: int) -> Path:
        return self._folder / f"{run:016x}"
