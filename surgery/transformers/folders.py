"""Folders of transformers: model from config.json, config.json of a model, inputs."""

import json
from collections.abc import Callable, Sequence
from inspect import signature
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from surgery.errors import first_line
from surgery.libraries import example_input
from surgery.states import State, shapes_of, state
from surgery.transformers.settings import first_difference, holder_of, make_from, reread


def config_json(model: nn.Module) -> dict | None:
    """Return config.json's content for a model; None if it has no such configuration."""
    text = getattr(getattr(model, "config", None), "to_json_string", None)
    return json.loads(text()) if callable(text) else None


def why_unreadable(model: nn.Module) -> str:
    """Return why a class cannot read a model's weights from its configuration, or ""."""
    holder = holder_of(model)
    if holder is None:
        return ""
    try:
        twin = make_from(type(model), reread(getattr(model, holder)))
        return first_difference(shapes_of(model), shapes_of(twin))
    except Exception as error:  # whatever the class raises
        return f"its class raises {type(error).__name__} for it: {first_line(error)}"


def model_of(folder: Path, architecture: str) -> nn.Module:
    """Make the model of a folder's config.json; ImportError without transformers."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    return getattr(transformers, architecture)(config)


def convert(model: nn.Module, folder: Path) -> State | None:
    """Return a folder's state as transformers reads it: tensors renamed and joined.

    They are all read. None if some tensor is missing or unknown to it, too.
    """
    try:
        options = {"local_files_only": True, "dtype": "auto", "output_loading_info": True}
        kind: Any = type(model)
        loaded, report = kind.from_pretrained(folder, **options)
    except Exception:  # transformers' own, of all kinds, or a class without it
        return None
    return None if any(report[f"{key}_keys"] for key in ("missing", "unexpected", "mismatched")) else state(loaded)


def output_for(model: nn.Module) -> Callable[[Any], Any] | None:
    """Return what picks the output that counts; None: all of it.

    Of an encoder with a decoder it is the decoder's result: the encoder's is returned beside it, and is a hidden one.
    """
    return itemgetter(0) if getattr(getattr(model, "config", None), "is_encoder_decoder", False) else None


def make_inputs(model: nn.Module, shape: Sequence[int] | None) -> dict[str, torch.Tensor] | None:
    """Make the inputs of a model that reads tokens, by name; None if it is not known.

    Args:
        shape: of one input, without the batch. For an encoder and a decoder it is the encoder's.
    """
    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    tokens = torch.ones(2, *(shape or (8,)), dtype=torch.long)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in signature(model.forward).parameters:
        inputs = tokens
        if main != "input_ids":
            encoder: Any = model
            inputs = torch.zeros(2, *shape) if shape else example_input(encoder.get_encoder())
        elif isinstance(end := getattr(config, "eos_token_id", None), int):
            tokens[..., -1] = end  # after which classifiers look
        return {str(main): inputs, "decoder_input_ids": torch.ones(2, 8, dtype=torch.long)}
    return {"input_ids": tokens} if main == "input_ids" else None
