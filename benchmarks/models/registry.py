"""Every class that transformers registers for a task, with a small configuration derived from its config's defaults.

No model is named here. The numbers of a configuration are made smaller by what their names say: widths keep their
ratios to the main width, which becomes 64 (of a list of widths the first becomes 16), heads become 4, layers 3, experts
4, a vocabulary 128, an image 64 x 64. What a class computes from other values it computes anew. Where no model of at
most BUDGET parameters that runs comes of it, `NotBuilt` says why.
"""

import copy
import inspect
import math
import re
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.calls import outputs
from benchmarks.models.case import Case

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "translation": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "texts": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""The registries of transformers by task; a class that is in several belongs to the first of them."""
BUDGET = 8_000_000  # parameters
WIDTH, FIRST, HEADS, LAYERS, EXPERTS, VOCABULARY, POSITIONS, IMAGE = 64, 16, 4, 3, 4, 128, 64, 64
BATCH, LENGTH = 2, 8
MAIN = (
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "model_dim", "emb_dim", "dim_model",
    "text_embed_dim", "hidden_sizes", "embed_dims", "encoder_hidden_size", "embedding_size", "num_features",
    "stem_channels",
)  # fmt: skip
HEAD_COUNT = r"(^|_)(num_.*heads?|n_heads?|heads|.*_attention_heads|n_head_kv|num_heads_.*|nhead|num_kv|.*_n_heads)$"
HEAD_SIZE = r"head_(dim|size|width)s?$|d_kv$|d_head$|(qk|v)(_\w+)?_head_dim$|kv_channels$"
WIDTHS = (
    r"hidden|width|intermediate|_dims?$|^dims?$|channels|d_model|d_ff|ffn|inner|embd|embed|lora|rank|planes|features"
    r"|filters|projection|units|lru|adapter.*size"
)
NOT_WIDTHS = (
    r"num_channels|in_channels|in_chans|num_hidden|hidden_act|num_mel|ratio|mult|factor|prob|drop|std|scale|conv_dim_"
)


class NotBuilt(Exception):
    """No small model of this class that runs comes of the rule; the message says why."""


@cache
def registered() -> dict[str, tuple[str, str]]:
    """(task, class name) by CLASS, in the order of the tasks."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for task, mapping in TASKS.items():
        for names in getattr(modeling_auto, mapping).values():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, (task, name))
    return found


def family(name: str) -> str:
    """Return the task of a class."""
    return registered()[name][0]


def registry_case(name: str) -> Case:
    """Return the case of a registered class."""
    task, _ = registered()[name]
    return Case(lambda: built(name)[0], lambda model: example_for(model, task), output=logits)


def logits(found: Any) -> Any:
    """Return the logits of what a model returns."""
    return found.logits


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a small model of a class, in evaluation mode, and an input on which it runs.

    Raises:
        NotBuilt: with the reason of the first of the attempts.
    """
    import transformers

    task, _ = registered()[name]
    kind = getattr(transformers, name, None)
    if kind is None or getattr(kind, "config_class", None) is None:
        raise NotBuilt("transformers has no such class")
    reasons: list[str] = []
    attempts: list[dict[str, Any]] = [{}, {"layers": 2 * LAYERS}, {"fill": True}, {"images": True}]
    for options in attempts:
        try:
            config = small_config(kind.config_class, **options)
            with torch.device("meta"):
                size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if size > BUDGET:
                raise NotBuilt(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = kind(config).eval()
            given = example_for(model, task)
            found = outputs(model, given, logits)
            if not all(t.isfinite().all() for t in found):
                raise NotBuilt("its output is not finite")
            return model, given
        except Exception as error:  # whatever a class raises for values that do not go together
            text = (str(error).strip().splitlines() or [""])[0][:200]
            reasons.append(text if isinstance(error, NotBuilt) else f"{type(error).__name__}: {text}")
    raise NotBuilt(reasons[0])


def example_for(model: nn.Module, task: str) -> dict[str, Any]:
    """Tokens, or pixels, and tokens for the decoder of a translation."""
    config: Any = model.config
    if task == "images":
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", None) or IMAGE
        height, width = (side, side) if isinstance(side, int) else side
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        return {"pixel_values": torch.randn(BATCH, channels, height, width)}
    vocabulary = getattr(config, "vocab_size", None)
    most = min(vocabulary, VOCABULARY) if isinstance(vocabulary, int) else VOCABULARY
    words = {"input_ids": torch.randint(4, most - 8, (BATCH, LENGTH))}
    if task == "texts" and isinstance(end := getattr(config, "eos_token_id", None), int):
        words["input_ids"][:, -1] = end  # some read the class there
    if task == "translation":
        words["decoder_input_ids"] = torch.randint(4, VOCABULARY - 8, (BATCH, LENGTH - 2))
    if getattr(model, "main_input_name", "input_ids") == "pixel_values" or "pixel_values" in needed(model):
        words["pixel_values"] = torch.randn(BATCH, 3, IMAGE, IMAGE)
    return words


def needed(model: nn.Module) -> list[str]:
    """Return the arguments of the forward pass without a default."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def small_config(kind: type, layers: int = LAYERS, fill: bool = False, images: bool = False) -> Any:
    """Return a configuration of this class with its own defaults, made small.

    Args:
        kind: its class.
        layers: how many layers it is to have at most.
        fill: whether numbers that its defaults leave open are given, by their names.
        images: whether these keep their size, to which windows may have been fitted.
    """
    found = changes(kind(), layers)
    found = {name: new for name, new in found.items() if not (images and name in IMAGES)}
    if fill:
        found |= {n: new for n, v in vars(kind()).items() if v is None and (new := FILLED.get(n)) is not None}
    return kind(**found)


def changes(config: Any, layers: int, nested: bool = False) -> dict[str, Any]:
    """Return the fields of a configuration that are to become smaller, with those nested in it."""
    fields = {n: v for n, v in vars(config).items() if not n.startswith("_")}
    before = next((v for n, v in fields.items() if re.search(LAYER_COUNT, n) and isinstance(v, int)), None)
    main = next((fields[n] for n in MAIN if fields.get(n)), None)
    base, target = (main[0], FIRST) if isinstance(main, list | tuple) else (main, WIDTH)
    if isinstance(main, int) and any(
        isinstance(v, list | tuple) and re.search(HEAD_COUNT, n) for n, v in fields.items()
    ):
        target = FIRST  # of stages, each wider than the one before
    ratio = target / base if isinstance(base, int) and base > target else 1.0
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            inner = changes(value, layers, nested=name != "text_config")
            found[name] = {**{k: v for k, v in value.to_dict().items() if k in PLAIN}, **inner}
            continue
        new = shrunk(name, value, fields, ratio, base, target, before, layers)
        if new is not None and new != value:
            found[name] = new
    if "use_cache" in fields:
        found["use_cache"] = False
    if not nested and fields.get("pad_token_id", 0) is None:
        found["pad_token_id"] = 0
    return found


FILLED = {
    "head_dim": WIDTH // HEADS, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_routed_experts": EXPERTS, "num_experts": EXPERTS, "moe_topk": 2, "vocab_size": VOCABULARY,
}  # fmt: skip
IMAGES = ("image_size", "img_size", "input_size")
PLAIN = ("model_type", "hidden_act", "is_decoder", "is_encoder_decoder")
LAYER_COUNT = (
    r"(^|_)(n_layers?|num_layers|num_hidden_layers|num_(\w+_)?layers|(en|de)coder_layers|layers|depth|num_blocks)$"
)


def shrunk(
    name: str, value: Any, fields: dict[str, Any], ratio: float, base: Any, target: int, before: Any, layers: int
) -> Any:
    """Return the new value of one field; None if it stays."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, list | tuple) and value:
        stages = any("depths" in other for other in fields)
        if before is not None and len(value) == before and layers < before and not stages:  # one item for each layer
            chosen = by_layer(list(value), layers)
            return (
                [scaled(v, ratio) for v in chosen] if re.search(WIDTHS, name) and isinstance(chosen[0], int) else chosen
            )
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            if re.search(r"depths|layers|repeats|num_blocks", name):
                return [min(item, layers) for item in value]
            if re.search(HEAD_COUNT, name):
                return [math.gcd(item, HEADS) for item in value]
            if name in IMAGES:
                return [min(item, IMAGE) for item in value]
            if re.search(WIDTHS, name) and not re.search(NOT_WIDTHS, name):
                return [scaled(item, ratio) for item in value]
        return None
    if not whole or value <= 0:
        return None
    if re.search(r"vocab(ulary)?_size", name):
        return min(value, VOCABULARY)
    if re.search(r"token_(id|index)$", name):
        return (
            value
            if value < VOCABULARY
            else {"pad": 0, "bos": 1, "eos": 2}.get(name[:3], VOCABULARY - 1 - len(name) % 8)
        )
    if re.search(r"experts_per_tok|top_?k|num_selected|moe_k$|experts_topk|topk", name):
        return 1 if "group" in name else min(value, 2)
    if re.search(r"n_group$|num_expert_group|n_expert_groups", name):
        return 1
    if re.search(r"experts?$|num_.*experts", name) and "shared" not in name:
        return min(value, EXPERTS)
    if re.search(r"shared_layers|first_k_dense|num_dense_layers|nextn", name):
        return min(value, 1) if "first" in name or "dense" in name else 0
    if re.search(r"(period|interval|every|_step|freq)(_\w+)?$", name) and "time" not in name:
        return min(value, 2)
    if re.search(r"layer_offset$", name):
        return min(value, 1)
    if re.search(LAYER_COUNT, name):
        return min(value, layers)
    if re.search(HEAD_SIZE, name):
        return head_size(name, value, fields, target, base)
    if re.search(HEAD_COUNT, name):
        return fewer_heads(name, value, fields)
    if re.search(r"max_.*position|n_positions|n_ctx|max_seq|seq_length|context_length|sliding_window|chunk_size", name):
        return min(value, POSITIONS)
    if name in IMAGES:
        return min(value, IMAGE)
    if re.search(r"state_size|d_state|ssm_state", name):
        return min(value, 8)
    if re.search(r"n_groups$|num_groups$", name):
        return min(value, 2)
    if re.search(r"num_buckets|hash", name):
        return min(value, 32)
    if re.search(WIDTHS, name) and not re.search(NOT_WIDTHS, name):
        return scaled(value, ratio)
    return None


def by_layer(values: list, layers: int) -> list:
    """For fewer layers: one of each kind first, in the old order."""
    new = [i for i, value in enumerate(values) if value not in values[:i]][:layers]
    others = [i for i in range(len(values)) if i not in new]
    return [values[i] for i in sorted([*new, *others[: layers - len(new)]])]


def head_size(name: str, value: int, fields: dict[str, Any], target: int, base: Any) -> int:
    """Return the size of a head with the same share of the width as before."""
    prefix = re.split(HEAD_SIZE, name)[0]
    counts = {n: v for n, v in fields.items() if re.search(HEAD_COUNT, n) and isinstance(v, int) and v > 0}
    heads = next((n for n in counts if prefix and n.startswith(prefix)), None) or next(
        (n for n in counts if not re.search("key_value|kv", n)), None
    )
    if heads is None or not isinstance(base, int) or base <= target:
        return min(value, FIRST)
    new = value * counts[heads] / base * target / fewer_heads(heads, counts[heads], fields)
    return int(min(value, max(8, min(32, 8 * round(new / 8)))))


def fewer_heads(name: str, value: int, fields: dict[str, Any]) -> int:
    """At most 4 heads; of keys and values that several queries share, 2, or 1."""
    others = [v for n, v in fields.items() if re.search(HEAD_COUNT, n) and isinstance(v, int)]
    if re.search("key_value|kv", name) and others and value < max(others):
        return min(value, 2)
    return min(value, HEADS)


def scaled(value: int, ratio: float) -> int:
    """Return a width at this ratio, a multiple of 8, at least 8; small ones stay."""
    return value if value <= 8 else int(min(value, max(8, 8 * round(value * ratio / 8))))


def names() -> list[str]:
    """Return the names of all cases."""
    return [f"transformers:{name}" for name in registered()]
