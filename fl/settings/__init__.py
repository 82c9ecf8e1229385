"""The settings of a run: nested by topic, as flat flags, as YAML, as recipes.

No package that this one imports knows `Config`, except in commands (`__main__.py`).
"""

from fl.settings.config import Config
from fl.settings.experiment import Experiment

__all__ = ["Config", "Experiment"]
