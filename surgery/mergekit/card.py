"""The model card of a merge: the README.md of its folder."""

import json

from surgery.mergekit.config import Config


def card(config: Config) -> str:
    """The text, with what HuggingFace's hub reads at its head, the models, and the configuration as it was given."""
    models = config.models
    fence = "`" * 3
    head = ["---", "base_model:", *(f"- {json.dumps(model)}" for model in models), "library_name: transformers"]
    head += ["tags:", "- merge", "- layer-surgery", "---", "", "# Merged model", ""]
    base = f", from the base `{config.base}`" if config.base else ""
    listed = [f"- `{model}`" for model in models if model != config.base]
    said = f"Made by `{config.method}`{base}, of the models"
    text = [said, "", *listed, "", "as this configuration says:", "", f"{fence}yaml", config.text.rstrip(), fence]
    return "\n".join([*head, *text, ""])
