"""The families of models: how one `model_type` is read, built and filled. One small file each, and one line here.

A family's file holds `FAMILY`. Its parts know tensor names and keys of `config.json`; the arithmetic is in the models.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from specgen import checks
from specgen.errors import ModelError
from specgen.models.config import ModelConfig
from specgen.models.context import AttentionContext, OutputRows
from specgen.models.weights import Plan

# model_type of config.json -> the module of its family.
_FAMILIES = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite",
    "kimi_k2": "deepseek_v3",
    "llama": "llama",
    "mimo": "mimo",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}


class TargetModel(Protocol):
    """A target: token ids to hidden states, and those to logits where they are wanted."""

    config: Any
    embed_tokens: Any
    lm_head: Any
    layers: Any
    norm: Any
    head_reads_normed: bool

    def __call__(self, input_ids: torch.Tensor, context: AttentionContext, kv_caches: torch.Tensor) -> torch.Tensor:
        """`input_ids [T] int64`, `kv_caches [layers, blocks, block_size, kv_width]` -> hidden `[T, H]`.

        The hidden states are what the draft layers read: after the final norm if `head_reads_normed`, else before.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, H] -> [N, vocab] float32`."""
        ...

    def modules(self) -> Any:
        """All parts, as of `nn.Module`."""
        ...

    def eval(self) -> Any:
        """The model itself, as of `nn.Module`."""
        ...


class DraftModel(Protocol):
    """Draft layers: what `MTPSpeculator` runs."""

    embed_tokens: Any
    layers: Any
    heads: Any

    @property
    def num_layers(self) -> int:
        """Draft layers; draft step s runs layer s mod this."""
        ...

    @property
    def kv_width(self) -> int:
        """Elements that one token occupies in the KV cache of one draft layer."""
        ...

    def __call__(
        self,
        layer: int,
        input_ids: torch.Tensor,
        previous: torch.Tensor,
        context: AttentionContext,
        kv_cache: torch.Tensor,
        outputs: OutputRows | None = None,
    ) -> torch.Tensor:
        """Layer `layer` over `input_ids [T] int64` (the tokens after the positions) -> hidden `[T, H]`.

        `[N, H]` of `outputs`, where it is given; the KV is written for all tokens.
        """
        ...

    def compute_logits(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, H] -> [N, vocab] float32`."""
        ...

    def modules(self) -> Any:
        """All parts, as of `nn.Module`."""
        ...

    def eval(self) -> Any:
        """The model itself, as of `nn.Module`."""
        ...


class DraftLayout(NamedTuple):
    """Where a checkpoint keeps draft layers and how they are built.

    prefix(config, i): what the names of draft layer i's tensors begin with. build(target, num_layers, names, dtype,
    device): that many of the layers, unset, given the names of all stored tensors. plan(draft, config, names): where
    they go. copies(config, i): tensors of layer i that may be stored and are not read.
    """

    prefix: Callable[[Any, int], str]
    build: Callable[[Any, int, frozenset[str], torch.dtype, torch.device], Any]
    plan: Callable[[Any, Any, frozenset[str]], Plan]
    copies: Callable[[Any, int], tuple[str, ...]] = lambda config, i: ()


class Family(NamedTuple):
    """One family of models.

    parse_config(config.json's object, where): the shape. build(config, positions, dtype, device): the target, unset.
    plan(target): where each tensor of a checkpoint goes. draft: None if its checkpoints bring no draft layers. unused:
    prefixes of tensors that a checkpoint may hold and the target does not read.
    """

    parse_config: Callable[[Mapping[str, Any], str], ModelConfig]
    build: Callable[[Any, int, torch.dtype, torch.device], Any]
    plan: Callable[[Any], Plan]
    draft: DraftLayout | None
    unused: Callable[[Any], tuple[str, ...]] = lambda config: ()


def known_families() -> list[str]:
    """All values of `model_type` that are supported, sorted."""
    return sorted(_FAMILIES)


def find_family(model_type: object, where: str | None = None) -> Family:
    """The family that a config.json's `model_type` names.

    Raises:
        ModelError: it is not supported.
    """
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        message = f"model_type {checks.shown(model_type)} is not supported"
        if model_type is None:
            message = "this is no model's configuration: it has no model_type"
        raise ModelError(message, where=where, hint=f"supported: {', '.join(known_families())}")
    module = importlib.import_module(f"specgen.models.families.{_FAMILIES[model_type]}")
    family: Family = module.FAMILY
    return family
