"""How often a trigger works."""

from functools import partial

from fl.base.columns import Column
from fl.federation.attack import triggered
from fl.runs import evaluate
from fl.runs.columns.moment import Moment


def attack_success(moment: Moment) -> float | None:
    """The share of test images of other classes that the global model takes for the target once they bear the trigger;
    None without such an attack.
    """
    options, fed = moment.config.attack, moment.fed
    if not fed.attack or options.kind != "trigger":
        return None
    predict = partial(moment.algorithm.predict, moment.server, client=None)
    return evaluate.attack_success(fed, predict, triggered(options, fed.data), options.target)["attack_success"]


COLUMN = Column(
    due="global",
    heading="attack %",
    factor=100,
    label="images with the trigger\ntaken for its class",
    measure=attack_success,
)
