"""Commands of this extension that `python -m fl` starts."""

COMMANDS = {"deploy": ("fl.extensions.flower.__main__", "Train with real clients on Flower")}
