"""What `python -m fl` starts of this extension."""

COMMANDS = {"deploy": ("fl.extensions.flower.__main__", "Train with real clients on Flower")}
