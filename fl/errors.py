"""The one exception of this package."""


class FLError(ValueError):
    """Something that cannot be run; the message is one line that names the setting and the way out."""
