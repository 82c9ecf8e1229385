"""What a run is told: settings, recipes, the command line, YAML. No room above this one knows `Config`."""

from fl.config.config import Config

__all__ = ["Config"]
