"""How far a run on this machine has got, from the rows of its run folder."""

from pathlib import Path

from tqdm import tqdm

from fl.runs.metrics import FILE, read


class Follow:
    """A progress bar of the rounds, to be called again and again while the run goes on.

    Args:
        folder: of the run, in which another process writes.
        rounds: of the whole run.
    """

    def __init__(self, folder: Path, rounds: int) -> None:
        self._path = folder / FILE
        self._bar = tqdm(total=rounds, unit="round", desc="waiting for the nodes", dynamic_ncols=True)

    def __call__(self) -> None:
        """Look for new rounds."""
        rows = read(self._path) if self._path.exists() else []
        if len(rows) > self._bar.n:
            accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
            self._bar.set_description_str("training", refresh=False)
            self._bar.set_postfix_str(f"accuracy {accuracies[-1]:.2%}" if accuracies else "", refresh=False)
            self._bar.update(len(rows) - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
