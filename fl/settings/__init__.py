"""The settings of a run: recipes, the command line, YAML. No room above this one knows `Config`."""

from fl.settings.config import Config

__all__ = ["Config"]
