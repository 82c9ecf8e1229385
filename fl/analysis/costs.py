"""Costs of runs: traffic, multiply-accumulates and time, to a round or a target."""

import math
from collections.abc import Sequence
from itertools import accumulate

from fl.base.columns import Column
from fl.runs.metrics import Row
from fl.settings import Config

COSTS = {
    "megabytes": Column(heading="MB", label="MB sent and received by a client (mean)"),
    "tmac": Column(heading="TMAC", label="TMAC of all clients, forward passes only"),
    "simulated": Column(heading="simulated s", digits=1, label="simulated seconds"),
    "elapsed": Column(heading="seconds", digits=1, label="seconds"),
}
"""What `totals` adds up, and how tables and figures show it."""
_UNITS = {
    "megabytes": (("TB", 1e-6), ("GB", 1e-3), ("MB", 1), ("kB", 1e3)),
    "tmac": (("TMAC", 1), ("GMAC", 1e3), ("MMAC", 1e6), ("kMAC", 1e9)),
    "simulated": (("simulated s", 1),),
    "elapsed": (("seconds", 1),),
}
"""The units of each cost, largest first, and how many of the unit are one of the column's."""


def unit_for(cost: str, value: float, least: float = 1) -> tuple[str, float]:
    """Choose the largest unit in which a cost is at least `least`, and its factor.

    >>> unit_for("tmac", 3e-4), unit_for("tmac", 2.0), unit_for("megabytes", 8000.0), unit_for("tmac", 0.0)
    (('MMAC', 1000000.0), ('TMAC', 1), ('GB', 0.001), ('kMAC', 1000000000.0))
    """
    return next((unit for unit in _UNITS[cost] if unit[1] * value >= least), _UNITS[cost][-1])


def totals(config: Config, rows: Sequence[Row]) -> dict[str, list[float]]:
    """Add up the costs up to each round.

    A cost that some round did not count is left out.

    Returns:
        megabytes: what a client of the whole population sent and received, on average. That is what a participant
        exchanged with the server and other clients, times the share of clients that take part. tmac: 1e12
        multiply-accumulates of all clients together, in the forward passes of training only, as FedFA counts them
        (section 4); a training step, forward and backward, costs about three times as many. elapsed: seconds of
        training. simulated: seconds of simulated time (--pace).

    >>> rows = [{"seconds": 2.0, "macs": 1e12}, {"seconds": 3.0, "macs": 1e12}]
    >>> totals(Config.of(participants=5), rows)
    {'tmac': [5.0, 10.0], 'elapsed': [2.0, 5.0]}
    """
    steps = {"elapsed": [row["seconds"] for row in rows]}
    if all("simulated_seconds" in row for row in rows):
        steps = {"simulated": [row["simulated_seconds"] for row in rows]} | steps
    if all("macs" in row for row in rows):
        steps = {"tmac": [config.clients.cohort() * row["macs"] / 1e12 for row in rows]} | steps
    if all({"bytes_down", "bytes_up"} <= row.keys() for row in rows):
        share = config.clients.cohort() / config.clients.number
        # what one peer sends, another receives
        exchanged = [row["bytes_down"] + row["bytes_up"] + 2 * row.get("bytes_peers", 0) for row in rows]
        steps = {"megabytes": [share * number / 1e6 for number in exchanged]} | steps
    return {key: list(accumulate(values)) for key, values in steps.items()}


def up_to(target: float, config: Config, rows: Sequence[Row]) -> dict[str, float]:
    """Find the first evaluated round that reached the target, and what it took.

    The score is the global model's, and the costs are up to the end of the round. They are empty if it never did. A
    target above 1 is a perplexity, others are accuracies.

    >>> rows = [{"round": r, "seconds": 2.0, "accuracy": r / 10} for r in (1, 2, 3, 4)]
    >>> up_to(0.3, Config(), rows)
    {'round': 3, 'elapsed': 6.0}
    """
    for k, row in enumerate(rows):
        if row.get("accuracy", -math.inf) >= target if target <= 1 else row.get("perplexity", math.inf) <= target:
            return {"round": row["round"]} | {key: values[k] for key, values in totals(config, rows).items()}
    return {}
