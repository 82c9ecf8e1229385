"""Federations and methods within extensions, in the order in which runs wrap them."""

from dataclasses import replace

from fl.extensions.attack import with_attack
from fl.extensions.compression import with_compression
from fl.extensions.defence import with_clipped_updates, with_defence
from fl.extensions.presence import with_presence
from fl.extensions.privacy import with_privacy


def wrapped(fed, *, attack=None, defence=None, pace=None):
    """The federation with malicious clients, a server that defends itself, or clients that take their time."""
    fed = with_attack(fed, attack) if attack else fed
    fed = replace(fed, training=(*fed.training, pace)) if pace else fed
    return with_defence(fed, defence) if defence else fed


def within(algorithm, *, compression=None, defence=None, privacy=None, presence=None):
    """The algorithm within these."""
    algorithm = with_compression(algorithm, compression) if compression else algorithm
    algorithm = with_clipped_updates(algorithm, defence) if defence and defence.clip else algorithm
    algorithm = with_presence(algorithm, presence) if presence else algorithm
    return with_privacy(algorithm, privacy) if privacy else algorithm
