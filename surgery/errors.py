"""The one exception of this package."""


class SurgeryError(ValueError):
    """An operation that cannot be done; the message names the tensor or layer, the shapes and the way out."""
