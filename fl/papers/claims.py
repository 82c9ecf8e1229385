"""What the three abstracts claim, and what the runs say of it."""

from collections.abc import Callable
from dataclasses import dataclass

from fl.papers import earlier
from fl.papers.cells import cells
from fl.papers.earlier import Said
from fl.papers.results import Result
from fl.papers.verdict import NOT_RUN, UNKNOWN, VERDICTS


@dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        paper: whose.
        text: in short.
        cells: how the ids of the cells begin that bear on it; those comparisons of them whose index is in `at`.
        earlier: what earlier runs say, in other settings than the paper's.
    """

    paper: str
    text: str
    cells: tuple[str, ...]
    earlier: Callable[[], Said]
    spread: str = ""
    at: int | None = None


def _ratio(
    text: str, where: str, spread: str, at: int, band: tuple[float, float], column: str, attack: str = ""
) -> Claim:
    partition = "iid" if spread == "iid" else "shards"
    return Claim(
        "fedfa", f"{text} {band[0]:.2f} to {band[1]:.2f} times", (f"fedfa.{where}.",),
        earlier.fedfa(partition, column, band, attack), f".{spread}.", at,
    )  # fmt: skip


_LOCAL = "models_own_accuracy"
CLAIMS = (
    Claim(
        "fedmr", "FedMR significantly improves the accuracy over the state of the art", ("fedmr.table1.",),
        earlier.fedmr_accuracy,
    ),
    Claim(
        "fedmr", "in a flat area, recombined models are optimized towards the same direction", ("fedmr.figure6.",),
        earlier.fedmr_direction,
    ),
    Claim(
        "fedmr", "recombined models are guided towards a flat area", (),
        lambda: (NOT_RUN, "no stored run measures it: `python -m fl.landscape` draws the loss around two models"),
    ),
    Claim(
        "fedmr", "no client's privacy is exposed", (),
        lambda: (UNKNOWN, "no measurement: tests hold who can read what in secure recombination (`tests/fl/secure`)"),
    ),
    Claim(
        "femam", "FeMAM surpasses clustered and personalized methods in various non-IID settings",
        ("femam.table1.", "femam.tablec2.", "femam.tablec4.", "femam.tablec3."), earlier.femam_accuracy,
    ),
    Claim("femam", "it finds how clients should share knowledge", (), earlier.femam_structure),
    _ratio("IID, global accuracy against earlier methods:", "table1", "iid", 0, (1.00, 1.16), "accuracy"),
    _ratio("non-IID, local accuracy:", "table1", "noniid", 1, (0.98, 1.13), _LOCAL),
    _ratio("non-IID, global accuracy:", "table1", "noniid", 0, (0.95, 1.20), "accuracy"),
    _ratio("attacked, IID, earlier methods lose globally", "figure3", "iid", 0, (1.01, 2.11), "accuracy", "20.0"),
    _ratio("attacked, non-IID, they lose locally", "figure3", "noniid", 1, (0.89, 3.31), _LOCAL, "20.0"),
    _ratio("attacked, non-IID, they lose globally", "figure3", "noniid", 0, (1.11, 1.74), "accuracy", "20.0"),
)  # fmt: skip
"""All of them, paper by paper."""


def verdict(claim: Claim, results: dict[str, Result]) -> Said:
    """The verdict on a claim and its reason: of the paper's own cells if any has been run whole, each of them judged in
    the settings that come nearest; else of the earlier runs.
    """
    rows: dict[str, list[str]] = {}
    for name, cell in cells().items():
        if name.startswith(claim.cells) and claim.spread in name and claim.cells:
            one = results[name]
            said = one.verdict if claim.at is None or one.short else one.verdicts[claim.at]
            rows.setdefault(cell.row or name, [])
            if said not in (NOT_RUN, UNKNOWN):
                rows[cell.row or name].append(said)
    known = {row: min(said, key=VERDICTS.index) for row, said in rows.items() if said}
    if not known:
        word, reason = claim.earlier()
        return (word if word in (NOT_RUN, UNKNOWN) else f"{word} (other settings)"), reason
    counts = ", ".join(f"{[*known.values()].count(word)} {word}" for word in VERDICTS if word in known.values())
    return max(known.values(), key=VERDICTS.index), f"{len(known)} of the paper's {len(rows)} cells were run: {counts}"
