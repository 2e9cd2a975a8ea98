"""A model folder turned into a target and, where speculation is on, its draft layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from specgen.errors import ModelError
from specgen.models.cheap_drafts import AS_LOADED, CheapDrafts, cheapen
from specgen.models.config import ModelConfig
from specgen.models.deepseek_v3 import MoE
from specgen.models.families import DraftModel, Family, TargetModel, find_family
from specgen.models.head_folder import build_head, read_head
from specgen.models.kept_float8 import as_if_stored, keep_float8
from specgen.models.layers import give_memory, weights_without_memory
from specgen.models.weights import Checkpoint, OnProgress, Plan, check_tensors, fill_random, load_weights
from specgen.stats import counted

logger = logging.getLogger(__name__)


class LoadedModel(NamedTuple):
    """Target and drafter; `num_bytes` were read from the files, or made."""

    target: TargetModel
    mtp: DraftModel | None
    num_bytes: int


# Random weights are the same in every run.
_RANDOM_SEED = 0


def load_model(
    folder: Path | None,
    config: ModelConfig,
    num_speculative_tokens: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress | None = None,
    draft_folder: Path | None = None,
    cheap_drafts: CheapDrafts = AS_LOADED,
    keeps_float8: bool = False,
) -> LoadedModel:
    """Builds the model on `device` and fills it, with random weights if `folder` is None.

    Draft layers beyond K are never run, and not loaded. `on_progress`: see `load_weights`. `draft_folder` holds a draft
    head to take in place of the model's own. `cheap_drafts`: what the draft layers are made of, once they are loaded.
    `keeps_float8`: dense products whose tensors are stored in FP8 stay so.

    Raises:
        ModelError: the checkpoint lacks the draft layer that speculation needs, or does not fit its configuration.
    """
    checkpoint = Checkpoint(folder) if folder is not None else None
    with weights_without_memory() if keeps_float8 else nullcontext():
        built = _build(checkpoint, config, num_speculative_tokens, max_positions, dtype, device, draft_folder)
    target, mtp, plan = built.target, built.mtp, built.plan
    if keeps_float8:
        stored = checkpoint.tensors if checkpoint is not None else as_if_stored(plan)
        weights: dict[int, nn.Parameter] = {}
        for part in (target, mtp):
            if isinstance(part, nn.Module):
                keep_float8(part, plan, stored, device)
                weights |= give_memory(part, device)
        _aim(plan, weights)
        _aim(built.head_plan, weights)
    num_head_bytes = 0
    if built.head_files is not None:
        num_head_bytes = load_weights(built.head_files, built.head_plan, built.head_unused)
    if checkpoint is None:
        num_bytes = fill_random(plan, _RANDOM_SEED, dtype, on_progress)
    else:
        num_bytes = load_weights(checkpoint, plan, built.unused, on_progress)
    if mtp is not None:
        _share_equal_copies(target, mtp)
        cheapen(mtp, target, cheap_drafts)
    for module in (target, mtp):
        for part in module.modules() if module is not None else ():
            if isinstance(part, MoE):
                part.narrow_gate(dtype)
    return LoadedModel(target.eval(), mtp.eval() if mtp is not None else None, num_bytes + num_head_bytes)


def _aim(plan: Plan, weights: Mapping[int, torch.Tensor]) -> None:
    """Lets the plan fill `weights`, known by the storages of those without memory that they stand for."""

    def part_of(weight: torch.Tensor) -> torch.Tensor:
        if not weight.is_meta:
            return weight
        whole = weights[weight.untyped_storage()._cdata]
        return whole.as_strided(weight.shape, weight.stride(), int(weight.storage_offset()))

    for name, target in plan.items():
        plan[name] = target._replace(parts=[(part_of(weight), fill) for weight, fill in target.parts])


def check_model(
    folder: Path,
    config: ModelConfig,
    num_speculative_tokens: int,
    max_positions: int,
    draft_folder: Path | None = None,
) -> None:
    """Returns if `load_model` would find every tensor that it needs; reads the files' headers alone.

    Raises:
        ModelError, RecipeError: as `load_model` does, but for values.
    """
    checkpoint = Checkpoint(folder)
    built = _build(
        checkpoint, config, num_speculative_tokens, max_positions, torch.bfloat16, torch.device("meta"), draft_folder
    )
    check_tensors(checkpoint, built.plan, built.unused)
    if built.head_files is not None:
        check_tensors(built.head_files, built.head_plan, built.head_unused)


class _Built(NamedTuple):
    """Modules to be filled: those of `plan` from the model's files, those of `head_plan` from a head's own."""

    target: TargetModel
    mtp: DraftModel | None
    plan: Plan
    unused: tuple[str, ...]
    head_files: Checkpoint | None = None
    head_plan: Plan = {}  # noqa: RUF012 - never changed
    head_unused: tuple[str, ...] = ()


def _build(
    checkpoint: Checkpoint | None,
    config: ModelConfig,
    num_speculative_tokens: int,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    draft_folder: Path | None,
) -> _Built:
    names = checkpoint.names if checkpoint is not None else frozenset[str]()
    family = find_family(config.model_type)
    target: TargetModel = family.build(config, max_positions, dtype, device)
    plan = family.plan(target)
    if not num_speculative_tokens:
        return _Built(target, None, plan, unused_prefixes(family, config, 0))
    if draft_folder is not None:
        head = read_head(draft_folder, config, max_positions)
        built = build_head(head, target, num_speculative_tokens, max_positions, dtype, device)
        unused = unused_prefixes(family, config, 0)
        return _Built(target, built.head, plan, unused, head.checkpoint, built.plan, built.unused)
    num_layers = min(config.num_nextn_predict_layers, num_speculative_tokens)
    _require_draft_layers(family, config, checkpoint, num_layers)
    assert family.draft is not None
    # a model of random weights brings no copies of the target's embedding and head
    mtp = family.draft.build(target, num_layers, names, dtype, device)
    plan |= family.draft.plan(mtp, config, names)
    if num_layers < num_speculative_tokens:
        logger.info(
            "%d drafts a step from %s: they take turns", num_speculative_tokens, counted(num_layers, "draft layer")
        )
    return _Built(target, mtp, plan, unused_prefixes(family, config, num_layers))


def _share_equal_copies(target: TargetModel, mtp: DraftModel) -> None:
    """Lets the draft layers use the target's embedding and head where the checkpoint's own ones are copies of them."""
    if torch.equal(mtp.embed_tokens.weight, target.embed_tokens.weight):
        mtp.embed_tokens = target.embed_tokens
    for i, head in enumerate(mtp.heads):
        if torch.equal(head.weight, target.lm_head.weight):  # type: ignore[arg-type]
            mtp.heads[i] = target.lm_head


def unused_prefixes(family: Family, config: ModelConfig, num_layers: int) -> tuple[str, ...]:
    """Of tensors that may be left over where `num_layers` draft layers are run: other ones, and copies."""
    unused = list(family.unused(config))
    if family.draft is not None:
        for i in range(config.num_nextn_predict_layers):
            unused += family.draft.copies(config, i) if i < num_layers else [family.draft.prefix(config, i)]
    return tuple(unused)


def _require_draft_layers(family: Family, config: ModelConfig, checkpoint: Checkpoint | None, num_layers: int) -> None:
    hint = "set speculation.num_tokens to 0 for plain decoding, or name a draft head as speculation.model"
    if num_layers == 0 or family.draft is None:
        where = str(checkpoint.folder) if checkpoint is not None else None
        raise ModelError("the model has no draft layer (num_nextn_predict_layers is 0)", where=where, hint=hint)
    if checkpoint is None:
        return
    for i in range(num_layers):
        prefix = family.draft.prefix(config, i)
        if not any(name.startswith(prefix) for name in checkpoint.names):
            message = f"config.json promises a draft layer, and no tensor begins with {prefix!r}"
            raise checkpoint.missing("", message, hint + "; a converter may have dropped it")
