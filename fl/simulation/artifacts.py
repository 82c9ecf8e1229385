"""What a run leaves in its folder beside its rows: who has which architecture, which model, and pictures of both."""

from pathlib import Path

from fl.algorithms.algorithm import Algorithm, Levels
from fl.analysis.structure import Structure
from fl.config import Config
from fl.federation import Federation
from fl.figures.coverage import draw_coverage
from fl.figures.structure import draw as draw_structures
from fl.models.fleet import ungrafted
from fl.runs.architecture_table import save_roster


def leave_fleet(fed: Federation, algorithm: Algorithm, folder: Path) -> None:
    """architectures.csv (see `fl.runs.architecture_table`), and coverage.png: who covers what of the global model;
    where the method grafts, without and with grafting.
    """
    save_roster(fed, folder)
    if algorithm.plan:
        plans = list(map(algorithm.plan, range(len(fed.fleet))))
        bare = list(map(ungrafted, plans))
        grafted = {"without grafting": bare, "with grafting": plans}
        draw_coverage(grafted if bare != plans else {"clients' models": plans}, folder / "coverage.png")


def leave_structure(config: Config, fed: Federation, levels: Levels, folder: Path) -> None:
    """structure.json and structure.png, of methods that give clients models on levels; see `fl.analysis.structure`."""
    (name,), (seed,) = config.algorithm, config.seeds
    truth = fed.truth.tolist()
    structure = Structure(name, levels.names, truth, levels.models, levels.trained, seed, config.title())
    structure.save(folder)
    draw_structures([structure], folder / "structure.png")
