"""The model card of a merge: the README.md of its folder."""

import json

from surgery.mergekit.config import Config, parts_of


def card(config: Config) -> str:
    """The text, with what HuggingFace's hub reads at its head, the models, and the configuration as it was given."""
    models = config.models
    paths = dict.fromkeys(path for model in models for path in parts_of(model) if path)
    fence = "`" * 3
    head = ["---", "base_model:", *(f"- {json.dumps(path)}" for path in paths), "library_name: transformers"]
    head += ["tags:", "- merge", "- layer-surgery", "---", "", "# Merged model", ""]
    base = f", from the base `{config.base}`" if config.base else ""
    listed = [f"- `{model}`" for model in models if model != config.base]
    said = f"Made by `{config.method}`{base}, of the models"
    text = [said, "", *listed, "", "as this configuration says:", "", f"{fence}yaml", config.text.rstrip(), fence]
    return "\n".join([*head, *text, ""])
