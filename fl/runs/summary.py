"""The results of a run at a glance."""

import math
import shlex
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from fl.algorithms import ALGORITHMS, SOURCES
from fl.base.console import program
from fl.base.errors import FLError
from fl.base.settings import Flag, Setting, marks, write_value
from fl.runs.columns import columns, first_score
from fl.runs.folder import run_name
from fl.runs.metrics import FILE, Row, evaluations_since_best, read
from fl.settings import Config, Experiment

_SECOND = {"f1": "macro-F1", "mean_iou": "mean IoU", "dice": "mean Dice", "perplexity": "perplexity", "r2": "R2"}
_WORDS = {"accuracy": "accuracy", "mae": "mean absolute error"} | _SECOND
_SPREAD = {"accuracy": "local_test_std", "mae": "local_test_mae_std"}
"""Names of a run's scores in sentences; scores in `_SECOND` follow the first."""
_LOSSES = ("train_loss", "loss", "local_valid_loss", "local_test_loss")


def failure(rows: Sequence[Row]) -> str:
    """Explain why training failed though its rounds were done: no finite loss at last.

    "" where it has not.

    >>> failure([{"round": 1, "train_loss": 2.0, "loss": float("nan")}, {"round": 2, "train_loss": 1.0}])
    'the loss is nan in round 1'
    >>> failure([{"round": 1, "loss": float("inf")}, {"round": 2, "loss": 1.0}])
    ''
    """
    for name in _LOSSES:
        measured = [row for row in rows if name in row]
        if measured and not math.isfinite(value := measured[-1][name]):
            return f"the {name.replace('_', ' ')} is {value} in round {measured[-1]['round']}"
    return ""


class Summary(dict):
    """The content of summary.json, printed in a line, with curves in a notebook.

    Attributes:
        folder: the run's.

    >>> summary = Summary({"algorithm": "fedmr", "seed": 0, "final": {"round": 5, "accuracy": 0.5}}, Path("runs/a"))
    >>> summary, summary.final["accuracy"]
    (fedmr, seed 0: accuracy 50.00% in round 5 (runs/a), 0.5)
    """

    def __init__(self, content: dict, folder: Path) -> None:
        super().__init__(content)
        self.folder = folder

    @property
    def final(self) -> Row:
        """The last round that was evaluated, a row of metrics.csv; {} if there is none."""
        return self["final"]

    @property
    def best(self) -> Row:
        """The best round: number, score and what it was chosen by; {} if there is none."""
        return self["best"]

    @property
    def rows(self) -> list[Row]:
        """The rows of metrics.csv, one for each round."""
        return read(self.folder / FILE)

    def __repr__(self) -> str:
        return in_a_line(self["algorithm"], self["seed"], self.final, self.folder)

    def _repr_html_(self) -> str:
        picture = self.folder / "curves.png"
        data = b64encode(picture.read_bytes()).decode() if picture.exists() else ""
        image = f'<br><img alt="curves" style="max-width: 100%" src="data:image/png;base64,{data}">' if data else ""
        return f'<pre style="overflow-x: auto">{escape(repr(self))}</pre>{image}'


def in_a_line(method: str, seed: int, final: Row, folder: Path) -> str:
    """Describe a run by the last round that was evaluated, {} if there is none."""
    if not final:
        return f"{method}, seed {seed}: no round was evaluated ({folder})"
    score = first_score(final)
    value = columns([score])[score].text(final[score])
    return f"{method}, seed {seed}: {_WORDS[score]} {value} in round {final['round']} ({folder})"


def describe(summary: dict) -> str:
    """Describe the results of a run in three lines.

    There is a fourth one if clients have test data of their own, and one if it failed.
    """
    known = columns({**summary["final"], **summary["best"], **summary["selected"]})
    final, best, chosen = (
        {name: known[name].text(value) for name, value in summary[part].items() if name in known}
        for part in ("final", "best", "selected")
    )
    head = f"\n{summary['algorithm']}, seed {summary['seed']}:"
    if not final:
        return f"{head} no round was evaluated"
    score = first_score(final)
    label, other = _WORDS[score], ", ".join(f"{_WORDS[name]} {final[name]}" for name in _SECOND if name in final)
    extra = {name.removeprefix("test_"): value for name, value in final.items() if name.startswith("test_")}
    other += "".join(f", {name} {value}" for name, value in extra.items())
    more = ""
    judged = [name for name in summary["best"] if name not in ("round", score)]
    top = (
        f"best {best[score]} in round {best['round']}{f' (by {judged[0]})' if judged else ''}"
        if best
        else "none is best"
    )
    if f"local_test_{score}" in chosen:
        which = f", the best by {judged[0]}" if judged else ""
        which = ", of the smallest validation loss" if judged == ["local_valid_loss"] else which
        scores = f"{label} {chosen[f'local_test_{score}']} ± {chosen[_SPREAD[score]]}"
        for name in (name for name in _SECOND if f"local_test_{name}" in chosen):
            spread = f" ± {chosen['local_test_f1_std']}" if name == "f1" else ""
            scores += f", {_WORDS[name]} {chosen[f'local_test_{name}']}{spread}"
        more = f"\nclients' own test data in round {chosen['round']}{which}: {scores} (± over clients)"
    if "failed" in summary:
        more += (
            f"\ntraining has failed: {summary['failed']}; start a new run with a smaller --lr, or a --clip such as 1"
        )
    if stopped := summary.get("stopped"):
        times = "evaluation" if stopped["patience"] == 1 else f"{stopped['patience']} evaluations"
        better = "no number to judge by" if stopped["best"] is None else f"nothing better than round {stopped['best']}"
        more += f"\nstopped early: the last {times} brought {better}"
    return (
        f"{head} test {label} {final[score]} in round {final['round']}, {top}\n"
        f"loss {final['loss']}, {other}{more}\n{summary['seconds']:.0f} s of training"
    )


def advice(experiment: Experiment, folder: Path, recipe: str = "", start: Experiment = Experiment()) -> str:
    """Write where the results lie and what to try next.

    Args:
        recipe: its name, "" without one. start: its settings, or the defaults.
    """
    where, runs = shlex.quote(str(folder)), experiment.runs()
    again = f"{program('run')} {recipe}".rstrip()
    config = runs[0]
    several = len(runs) > 1
    lines = {"results": f"{where}/", "figure": f"{where}/{'comparison.png' if several else 'curves.png'}"}
    if not config.fixes_rounds:  # more rounds would change these
        tables = [folder / run_name(run) / FILE for run in runs] if several else [folder / FILE]
        waited = [evaluations_since_best(read(path), config.evaluation.best_by) for path in tables if path.exists()]
        left = [number < config.patience for number in waited]
        patient = " --patience 0" if config.patience and not all(left) else ""
        lines["resume"] = f"{program('run')} --resume {where} --rounds {2 * config.rounds}{patient}"
    if (
        not several
        and ALGORITHMS[config.method.name].clients != "heterogeneous"
        and (others := _comparison(config, start))
    ):
        lines["compare"] = f"{again} {others}"
    lines["settings"] = f"{again} --help"
    return "\n" + "\n".join(f"{label:10}{text}" for label, text in lines.items())


def _comparison(config: Config, start: Experiment) -> str:
    """Write the flags that compare other methods, with more seeds; "" if none can."""
    method, rivals = config.method.name, ("fedavg", "fedprox")
    methods = (*rivals, *(Experiment().algorithms if method in rivals else (method,)))
    others = replace(Experiment.alone(config), algorithms=methods, seeds=(0, 1, 2))
    try:
        others.check()
    except FLError:
        return ""
    usual = start.replace(algorithms=(method,)).runs()[0]
    changed = [
        setting
        for setting in config.list_changed(usual)
        if not setting.unread and setting.name not in ("algorithm", "seed")
    ]
    paths = (SOURCES.get(name, name) for name in methods)
    return " ".join(["--algorithm", ",".join(paths), "--seeds", "0,1,2", *words(changed)])


def words(settings: Iterable[Setting]) -> list[str]:
    """Write settings as the words of a command line."""
    parts = []
    for setting in settings:
        if isinstance(setting.value, bool):
            group, dot, name = setting.flag.rpartition(".")
            parts.append(f"--{group}{dot}{'' if setting.value else 'no-'}{name}")
        else:
            texts = [mark.str_from_instance(setting.value)[0] for mark in marks(setting.field, Flag)]
            parts += [f"--{setting.flag}", shlex.quote(texts[0] if texts else write_value(setting.value))]
    return parts
