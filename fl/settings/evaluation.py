"""Settings of what a run measures and keeps; they do not change what it learns."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from fl.base.plugins import path_of
from fl.base.settings import AtLeast1, Named, Natural, Rare, several
from fl.settings.topic import Topic

LOGS = ("tensorboard", "wandb")
"""What --log can name: packages, each also an extra of this project."""


@dataclass(frozen=True)
class EvaluationSettings(Topic):
    """The measures of a run, and the files that it keeps."""

    every: Annotated[AtLeast1, Named("eval_every")] = 1
    """rounds between evaluations of the global model (and of clients on the samples that they hold out)"""
    client_models_every: Annotated[Natural, Named("eval_client_models_every"), Rare()] = 0
    """rounds between evaluations of the model of each client of a round on the test set, which take as long as one of
    the global model for each client, and of their similarity as in FedMR's released code; 0 is never (their cosine is
    always measured)"""
    metrics: Annotated[tuple[str, ...], several(str, "NAME,...", empty="none")] = ()
    """further metrics: scikit-learn's scorers, such as roc_auc_ovr or balanced_accuracy; precision_per_class,
    recall_per_class or f1_per_class; your own: module:function from (outputs, targets) to a number"""
    best_by: Annotated[str, Rare(), tyro.conf.arg(metavar="COLUMN")] = "auto"
    """column of metrics.csv by which --patience, --keep-best and the summary find the best round, such as f1, loss or
    test_roc_auc_ovr; auto is the mean validation loss where clients validate, else the test accuracy"""
    keep_best: Annotated[bool, Rare()] = False
    """keep the model of the best evaluated round as well, for `fl.load_model(folder, best=True)`"""
    checkpoint_every: Annotated[AtLeast1, Rare()] = 10
    """rounds between checkpoints; one more is written at the end or on Ctrl-C"""
    log: Annotated[tuple[str, ...], several(str, "NAME,...", empty="none", items=LOGS)] = ()
    """also log to tensorboard (in the run folder) or wandb, extras of the same names"""

    def __post_init__(self) -> None:
        metrics = self.metrics if isinstance(self.metrics, tuple | list) else (self.metrics,)
        paths = (path_of("metrics", metric) if callable(metric) else metric for metric in metrics)
        object.__setattr__(self, "metrics", tuple(paths))
        super().__post_init__()
