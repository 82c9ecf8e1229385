"""The columns that a round and its evaluation fill, in every run."""

import math
from dataclasses import replace

from fl.base.columns import Column
from fl.federation import traffic

FIRST = {
    "round": Column(int),
    "seconds": Column(),
    "train_loss": Column(),
    "dropped": Column(int),
    "accuracy": Column(
        due="global", heading="final acc. %", beside_own="global acc. %", factor=100, label="test accuracy"
    ),
    "loss": Column(
        due="global", heading="final loss", beside_own="global loss", digits=3, label="test loss", limits=(0, math.inf)
    ),
    "f1": Column(due="global", heading="macro-F1 %", beside_own="global F1 %", factor=100),
    "perplexity": Column(
        due="global",
        heading="perplexity",
        beside_own="global perplexity",
        label="test perplexity",
        log=True,
        span=0.1,
        limits=(1, math.inf),
    ),
    "models_accuracy": Column(due="models", factor=100),
    "models_std": Column(due="models", factor=100),
    "models_own_accuracy": Column(due="models", heading="local acc. %", factor=100),
    "models_perplexity": Column(due="models", heading="local perplexity"),
    "models_cosine": Column(label="mean pairwise cosine\nof the models", span=0.01, limits=(-1, 1)),
    **dict.fromkeys(traffic.COLUMNS, Column()),
    "macs": Column(),
}
"""Left of all others. `macs` are the multiply-accumulates of a participant's forward passes in training, on average; a
step costs about three times as many."""

_OWN = {
    "accuracy": Column(
        due="global", heading="own acc. %", factor=100, label="mean test accuracy\non clients' own data"
    ),
    "std": Column(due="global", factor=100),
    "loss": Column(due="global", digits=3),
    "f1": Column(due="global", heading="own F1 %", factor=100),
    "f1_std": Column(due="global", factor=100),
    "perplexity": Column(due="global", heading="own perplexity"),
}

LAST = {f"local_valid_{name}": replace(column, heading="", label="") for name, column in _OWN.items()}
LAST |= {f"local_test_{name}": column for name, column in _OWN.items()}
"""Right of all others: means and spreads over clients of the scores on their own samples."""
