"""The error of this package."""


class ZooError(ValueError):
    """A model that cannot be built; the message names the argument and the valid values."""
