"""A draft head of MiMo's layout that lies in a folder of its own, beside the model that it was trained for.

Its config.json gives the shape, as a dense model's does, and under `mtp` what its tensors don't tell. Biases and norms
of heads are there if their tensors are. Embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specgen import checks
from specgen.errors import ModelError, RecipeError
from specgen.models.config import ModelConfig, load_config_json, refuse
from specgen.models.dense_config import DenseConfig, parse_dense
from specgen.models.draft_head import DraftHead, HeadConvention
from specgen.models.families import TargetModel
from specgen.models.families.mimo import CONVENTION, draft_prefix, plan_draft
from specgen.models.weights import Checkpoint, Plan

_ORDERS = {
    ("hidden_layernorm(hidden)", "token_layernorm(embedding)"): True,
    ("token_layernorm(embedding)", "hidden_layernorm(hidden)"): False,
}
_HIDDEN = {"residual stream before the final norm": False, "hidden states after the final norm": True}
# What is built of the other properties that a head declares.
_REQUIRED = {
    "layout": "mimo",
    "hidden_carried": "own output after final_layernorm",
    "logits": "lm_head(own output after final_layernorm)",
}
# Tensors of a whole model, whose folder may serve for its head alone.
_WHOLE_MODEL = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


class HeadFolder(NamedTuple):
    """A head's files, shape and convention; `reads_normed`: the target's hidden states after its final norm."""

    checkpoint: Checkpoint
    config: DenseConfig
    convention: HeadConvention
    reads_normed: bool


class BuiltHead(NamedTuple):
    """The head's module, unset, and where its tensors go."""

    head: DraftHead
    plan: Plan
    unused: tuple[str, ...]


def read_head(folder: Path, target: ModelConfig, max_positions: int) -> HeadFolder:
    """Reads the head's configuration and the names of its tensors, and compares them with the target.

    Raises:
        ModelError: no head of this layout, or one that does not fit the target.
        RecipeError: it knows fewer positions than a row may have.
    """
    path = str(folder / "config.json")
    raw = load_config_json(folder)
    checkpoint = Checkpoint(folder)
    declared = raw.get("mtp") or {}
    if not isinstance(declared, Mapping):
        raise ModelError(f"mtp must be an object, not {checks.shown(declared)}", where=path)
    convention, reads_normed = _read_convention(declared, path)
    fields, _ = parse_dense(raw, path)
    prefix = draft_prefix(DenseConfig(**fields), 0) + "self_attn."
    config = DenseConfig(
        **fields,
        qkv_bias=prefix + "q_proj.bias" in checkpoint.names,
        o_bias=prefix + "o_proj.bias" in checkpoint.names,
        qk_norm=prefix + "q_norm.weight" in checkpoint.names,
    )
    _check_fit(config, target, checkpoint, path)
    if config.max_position_embeddings < max_positions:
        raise RecipeError(
            f"the draft head knows {config.max_position_embeddings} positions, a row may have {max_positions} tokens",
            where=path,
            hint=f"set engine.max_model_len to {config.max_position_embeddings} or less",
        )
    return HeadFolder(checkpoint, config, convention, reads_normed)


def _read_convention(declared: Mapping[str, Any], where: str) -> tuple[HeadConvention, bool]:
    """What the head declares about its inputs; MiMo's own convention where it says nothing."""
    for key, wanted in _REQUIRED.items():
        if declared.get(key, wanted) != wanted:
            refuse(f"mtp.{key}", declared[key], repr(wanted), where)
    hidden_first, mask_first = CONVENTION
    order = declared.get("input_proj_order")
    if order is not None:
        known = {str(list(names)): first for names, first in _ORDERS.items()}
        if str(order) not in known:
            refuse("mtp.input_proj_order", order, " or ".join(known), where)
        hidden_first = known[str(order)]
    mask_first = declared.get("zero_embedding_at_position_0", mask_first)
    if not isinstance(mask_first, bool):
        refuse("mtp.zero_embedding_at_position_0", mask_first, "true or false", where)
    source = declared.get("hidden_from_target", next(iter(_HIDDEN)))
    if source not in _HIDDEN:
        refuse("mtp.hidden_from_target", source, " or ".join(map(repr, _HIDDEN)), where)
    return HeadConvention(hidden_first, mask_first), _HIDDEN[source]


def _check_fit(config: DenseConfig, target: ModelConfig, checkpoint: Checkpoint, where: str) -> None:
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise ModelError(
                f"the draft head does not fit the model: its {name} is {ours}, the model's {theirs}", where=where
            )
    if config.num_nextn_predict_layers == 0:
        raise ModelError("num_nextn_predict_layers is 0: this is no draft head", where=where)
    for i in range(config.num_nextn_predict_layers):
        prefix = draft_prefix(config, i)
        if not any(name.startswith(prefix) for name in checkpoint.names):
            raise ModelError(
                f"config.json promises a draft layer, and no tensor begins with {prefix!r}",
                where=str(checkpoint.folder),
            )


def build_head(
    folder: HeadFolder,
    target: TargetModel,
    num_speculative_tokens: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
) -> BuiltHead:
    """The head over the target, unset; the target gives out the hidden states that the head reads from now on."""
    num_layers = min(folder.config.num_nextn_predict_layers, num_speculative_tokens)
    config = folder.config
    head = DraftHead(target, config, folder.convention, num_layers, max_positions, False, frozenset(), dtype, device)
    target.head_reads_normed = folder.reads_normed
    unused = tuple(draft_prefix(config, i) for i in range(num_layers, config.num_nextn_predict_layers))
    return BuiltHead(head, plan_draft(head, config, folder.checkpoint.names), (*unused, *_WHOLE_MODEL))
