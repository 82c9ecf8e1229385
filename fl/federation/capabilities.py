"""Capabilities that a setting or a wrapper needs, and that a method may lack."""

from collections.abc import Container, Mapping

from fl.base.errors import FLError

CAPABILITIES: Mapping[str, str] = {
    "mean_only": "looks at single updates, or keeps more than their mean",
    "changed_updates": "sends no updates of a model that may be changed on their way",
    "open_updates": "hides the models of single clients from the server",
    "plain_average": "combines updates by a rule of its own",
    "whole_average": "averages parts of models, or the models of some clients only",
    "same_model": "gives a client another model, or another part of it, from round to round",
    "uniform_sampling": "counts on its own draw of a round's clients from all of them",
    "one_training": "has models that stay with clients, whose training is not timed",
    "masked_logits": "has an objective of more than one model's logits, which it does not mask",
    "several_classifiers": "works with the one classifier of a model",
    "any_loss": "learns from the cross entropy of classes",
    "dense": "learns from one class a sample, and masks have one for each pixel",
    "low_rank": "cuts models by width or depth, and factors of low rank have ranks",
    "architectures": "gives all clients one architecture",
    "own_architectures": "combines clients' weights, which takes one model of which all clients' models are parts",
}
"""From each capability to what a method does that lacks it: the sentence with which it refuses."""

LACKING = {
    "global": frozenset({"architectures"}),
    "personalized": frozenset({"architectures", "one_training"}),
    "heterogeneous": frozenset({"mean_only", "whole_average", "same_model"}),
}
"""From which models clients have (`fl.algorithms.method.Method.clients`) to what all such methods lack."""


def check(name: str, lacks: Container[str], needs: Mapping[str, str]) -> None:
    """Raise FLError if a method lacks what a setting, or what is to wrap it, needs.

    Args:
        name: of the method.
        needs: from names of `CAPABILITIES` to the flags that ask for them.
    """
    for capability, flags in needs.items():
        if capability in lacks:
            raise FLError(
                f"{name} {CAPABILITIES[capability]}: leave {flags} out, or take another --algorithm", code="unsupported"
            )
