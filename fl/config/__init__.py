"""What a run is told: settings, recipes, the command line, YAML. Only this room and `fl.runs` know `Config`."""

from fl.config.config import Config

__all__ = ["Config"]
