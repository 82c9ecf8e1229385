"""Adapters in the files of peft, both ways."""

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from surgery.adapters.layer import LowRank
from surgery.adapters.model import adapted_layers, attach, scales, state
from surgery.adapters.rank import MAGNITUDE, check_unscaled, factors, rank_of
from surgery.errors import SurgeryError
from surgery.files.reading import open_state, read_json
from surgery.files.whole import check_absent, replacing
from surgery.files.writing import write
from surgery.names import join
from surgery.states import State
from surgery.torch_private import BatchNorm

_log = logging.getLogger(__name__)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

REFUSED = {
    "use_qalora": "its inputs are pooled in groups",
    "use_bdlora": "its factors are in blocks",
    "lora_bias": "its second factor has a bias",
    "layer_replication": "its model has layers several times",
    "target_parameters": "it changes parameters of modules that are no layers, such as fused experts",
    "trainable_token_indices": "it trains some tokens of an embedding",
    "megatron_config": "its layers are Megatron's",
    "alora_invocation_tokens": "it acts after some tokens only",
    "arrow_config": "it mixes several adapters by the input",
    "kasa_config": "its products are scaled by singular values",
    "monteclora_config": "its factors are random",
}
"""Settings of a file that make an adapter another function than W x + scale B A x, and how."""
CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the weights of the base, so that the adapter belongs to no base that a user has."""

_MERGE = "merge it into its base with peft (merge_and_unload), and go on with the merged model"

HEADS = {name: ["classifier", "score"] for name in ("SEQ_CLS", "TOKEN_CLS")} | {"QUESTION_ANS": ["qa_outputs"]}
"""What peft trains whole by itself for a task_type."""


def write_peft(model: nn.Module, folder: str | Path, **settings: Any) -> None:
    """Write the adapters of a model into a new folder in peft's format.

    `PeftModel.from_pretrained(base, folder)` reads them.

    Args:
        model: with adapters.
        folder: gets adapter_model.safetensors and adapter_config.json.
        settings: more entries of the configuration, such as base_model_name_or_path and task_type.

    Raises:
        SurgeryError: if the folder is there already, and for a model that peft would compute differently.
    """
    tensors, factor = state(model), scales(model)
    adapters, rest = factors(tensors)
    if not adapters:
        raise SurgeryError("the model has no adapters", code="argument")
    if "" in adapters:
        raise SurgeryError("the model is one layer, without a name for peft: put it into a module", code="unsupported")
    check_tied(model.named_parameters(remove_duplicate=False), rest, "leave it out of train")
    _check_convolutions(model)
    dora = [adapter.magnitude is not None for adapter in adapters.values()]
    if any(dora) and not all(dora):
        raise SurgeryError("some adapters are LoRA's, some DoRA's, and peft's files of one kind", code="unsupported")
    ranks = rank_of(tensors)
    alphas = {name: factor[name] * rank for name, rank in ranks.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    dropout = {getattr(layer.lora_dropout, "p", 0.0) for _, layer in adapted_layers(model)}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": getattr(getattr(model, "config", None), "_name_or_path", None),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{re.escape(name)}": r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(name)}": a for name, a in alphas.items() if a != alpha},
        "target_modules": _targets(model, sorted(ranks)),
        "modules_to_save": _list_saved(model, tensors, rest, settings.get("task_type")) or None,
        "lora_dropout": max(dropout),
        "fan_in_fan_out": any(type(layer.base_layer).__name__ == "Conv1D" for _, layer in adapted_layers(model)),
        "bias": "none",
        "use_rslora": False,
        "use_dora": all(dora),
        **settings,
    }
    norms = [name for name, m in model.named_modules() if isinstance(m, BatchNorm) and m.track_running_stats]
    if left := [name for name in norms if f"{name}.running_mean" not in rest]:
        _log.warning(
            "the statistics of %s, which move in training mode, are not in the file: if they did, name these norms in "
            "train",
            ", ".join(left),
        )
    check_absent(Path(folder), folder=True)
    with replacing(Path(folder), folder=True) as place:
        write(place / WEIGHTS, {PREFIX + name: tensor for name, tensor in tensors.items()}, metadata={"format": "pt"})
        (place / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_tied(
    named: Iterable[tuple[str, Tensor]], changed: Collection[str], way: str, reason: str = "is trained whole"
) -> None:
    """Raise SurgeryError for changed tensors with several names: peft changes one."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:
        place = tensor.data_ptr() if tensor.layout is torch.strided else 0
        names.setdefault(place or id(tensor), []).append(name)
    for both in names.values():
        if len(both) > 1 and (changed_name := next((name for name in both if name in changed), None)):
            other = next(name for name in both if name != changed_name)
            raise SurgeryError(
                f"{changed_name!r} {reason}, and peft leaves its other name {other!r} as it was: {way}, or untie them",
                code="unsupported",
            )


def _check_convolutions(model: nn.Module) -> None:
    """Raise SurgeryError for convolutions with padding or dilation that A cannot have."""
    for name, layer in adapted_layers(model):
        kind, dilation = getattr(layer, "padding_mode", "zeros"), getattr(layer, "dilation", ())
        if kind != "zeros" or any(d != 1 for d in dilation):
            raise SurgeryError(
                f"peft's adapter of {name!r} would lack padding_mode={kind!r} or dilation={dilation}: merge it instead",
                code="unsupported",
            )


def _list_saved(model: nn.Module, tensors: State, whole: Iterable[str], task: str | None) -> list[str]:
    """Return the modules that are trained whole.

    Raises SurgeryError where peft, which matches ends of names, takes others.
    """
    owners = {name.rpartition(".")[0] for name in whole}
    saved = sorted(name for name in owners if not any(name.startswith(f"{other}.") for other in owners))
    patterns = saved + HEADS.get(task or "", [])
    for pattern in saved:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SurgeryError(
                f"peft reads {pattern!r} as a regular expression, and it is none ({error}): rename it",
                code="unsupported",
            ) from None
    for (name, module), pattern in product(model.named_modules(remove_duplicate=False), patterns):
        taken = name.endswith(pattern)
        if isinstance(module, LowRank):
            # As in peft, which does not escape the name: a.b is axb as well.
            taken = taken or bool(re.match(rf"(.*\.)?{pattern}(\..*)?$", name))
        elif taken:
            keys = {join(name, key) for key in module.state_dict()}
            taken = bool(keys) and not (name in saved and keys <= tensors.keys())
        if taken:
            raise SurgeryError(
                f"peft takes {name!r}, which is not trained whole, for {pattern!r}, which "
                f"{'is' if pattern in saved else f'task_type={task} trains'}, as their names end alike: train both "
                "whole and adapt neither, or rename one",
                code="ambiguous",
            )
    return saved


def _targets(model: nn.Module, names: list[str]) -> list[str] | str:
    """Return the adapted modules, as a pattern where their names would match others."""
    others = [name.removesuffix(".base_layer") for name, _ in model.named_modules()]
    alike = any(other not in names and other.endswith(tuple(f".{name}" for name in names)) for other in others)
    return "|".join(map(re.escape, names)) if alike else names


def read_peft(model: nn.Module, folder: str | Path) -> nn.Module:
    """Put the adapters of a folder that peft wrote on a model.

    Args:
        model: the base, without adapters; it is not changed. The result shares the memory of its weights.
        folder: with adapter_config.json, and adapter_model.safetensors or adapter_model.bin.

    Raises:
        SurgeryError: for an adapter that is none of low rank, or another function than W x + scale B A x and
            DoRA's; the message names the setting. And for one that does not fit the model.
    """
    config, tensors = read_files(folder)
    without_base(folder, tensors, model.state_dict())
    check_tied(model.named_parameters(remove_duplicate=False), factors(tensors)[1], "merge it in peft")
    dropout = config.get("lora_dropout") or 0.0
    result = attach(model, tensors, scale=scales_of(config, tensors), dropout=dropout)
    _check_convolutions(result)
    return result


def read_files(folder: str | Path) -> tuple[dict[str, Any], State]:
    """Return a folder's configuration, and its tensors by a plain model's names."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise SurgeryError(f"{folder} has no {CONFIG}: give a folder that peft's save_pretrained wrote", code="file")
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise SurgeryError(
            f"{folder}: peft_type {config.get('peft_type')} is not read, only LORA: {_MERGE}", code="unsupported"
        )
    for key, why in REFUSED.items():
        if config.get(key):
            raise SurgeryError(f"{folder}: {key} is not read: {why}; {_MERGE}", code="unsupported")
    if config.get("bias", "none") != "none":
        raise SurgeryError(f"{folder}: bias {config['bias']!r} is not read: it changes the base", code="unsupported")
    if str(config.get("init_lora_weights")).lower().startswith(CHANGED):
        raise SurgeryError(
            f"{folder}: init_lora_weights {config['init_lora_weights']!r} changed the base that the adapter belongs "
            "to: convert it with peft's save_pretrained(path_initial_model_for_weight_conversion=...)",
            code="unsupported",
        )
    path = next((folder / name for name in (WEIGHTS, "adapter_model.bin") if (folder / name).is_file()), None)
    if path is None:
        raise SurgeryError(f"{folder} has neither {WEIGHTS} nor adapter_model.bin", code="file")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in open_state(path).items()}
    if bool(config.get("use_dora")) != any(name.endswith(MAGNITUDE) for name in tensors):
        raise SurgeryError(f"{folder}: use_dora is {config.get('use_dora')}, the tensors are otherwise", code="file")
    return config, tensors


def without_base(folder: str | Path, tensors: State, values: Mapping[str, Tensor] | None) -> None:
    """Remove the base's weights that peft saves beside adapters of embeddings.

    Raises SurgeryError if they differ from the weights of the base.
    """
    adapted = rank_of(tensors)
    for name in [name for name in tensors if name.rpartition(".base_layer.")[0] in adapted]:
        plain, saved = name.replace(".base_layer.", "."), tensors.pop(name)
        if values is not None and plain in values and not torch.equal(values[plain], saved.to(values[plain])):
            raise SurgeryError(
                f"{folder}: {name!r} is not {plain!r} of the model, so that the adapter belongs to another base: give "
                "that one, or save it from peft with save_embedding_layers=False",
                code="mismatch",
            )


def scales_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """lora_alpha / r of each adapter, or with rslora lora_alpha / sqrt(r)."""
    check_unscaled(factors(tensors)[0])
    result = {}
    for module, rank in rank_of(tensors).items():
        alphas = config.get("alpha_pattern") or {}
        key = next((key for key in alphas if re.match(rf"(.*\.)?({key})$", module)), None)
        alpha = config.get("lora_alpha", 8) if key is None else alphas[key]
        result[module] = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return result
