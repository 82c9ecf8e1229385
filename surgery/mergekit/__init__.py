"""mergekit's YAML, which tells how folders of HuggingFace's transformers are merged, read and carried out here."""

from surgery.mergekit.config import Config, read_config
from surgery.mergekit.folder import merge_folders

__all__ = ["Config", "merge_folders", "read_config"]
