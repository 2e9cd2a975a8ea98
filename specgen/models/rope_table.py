"""Tables of rotary cosines and sines from a model's rope settings. It knows frequencies, not tensors to rotate."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from specgen.models.config import check_rope_scaling


def rope_table(
    head_dim: int, max_positions: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[torch.Tensor, float]:
    """Return the table of every position's cosines and sines, and the factor for the softmax scale.

    head_dim: rotated width P; scaling: the config's `rope_scaling` (types default, linear, llama3, yarn) or None. The
    table is [max_positions, P] float32, cosines in [:P/2], sines in [P/2:], times YaRN's mscale ratio; the factor is
    1.0 but for YaRN with mscale_all_dim. Raises: ValueError for what `check_rope_scaling` refuses.
    Source: arXiv 2104.09864 (default); arXiv 2309.00071, eq. 17-25, with DeepSeek-V3's mscale and mscale_all_dim
    (yarn).
    """
    kind = check_rope_scaling(scaling)
    settings = dict(scaling or {})
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    amplitude, softmax_factor = 1.0, 1.0
    if kind == "linear":
        frequencies = frequencies / float(settings["factor"])
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, settings)
    elif kind == "yarn":
        frequencies = _yarn_frequencies(frequencies, head_dim, theta, settings)
        amplitude, softmax_factor = _yarn_factors(settings)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos() * amplitude, angles.sin() * amplitude], dim=-1), softmax_factor


def _llama3_frequencies(frequencies: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Long waves are divided by the factor, short ones kept, those between mixed."""
    factor = float(settings["factor"])
    low = float(settings["low_freq_factor"])
    high = float(settings["high_freq_factor"])
    length = float(settings["original_max_position_embeddings"])
    turns = length * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / factor)


def _yarn_frequencies(
    frequencies: torch.Tensor, head_dim: int, theta: float, settings: Mapping[str, Any]
) -> torch.Tensor:
    """Frequencies that turn often within the original length are kept, slow ones divided, with a ramp between."""
    factor = float(settings["factor"])
    length = float(settings["original_max_position_embeddings"])

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(_or_default(settings, "beta_fast", 32.0))), 0)
    high = min(math.ceil(dimension_of(_or_default(settings, "beta_slow", 1.0))), head_dim - 1)
    width = high - low if high != low else 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / factor * divided + frequencies * (1 - divided)


def _or_default(settings: Mapping[str, Any], key: str, default: float) -> float:
    return default if settings.get(key) is None else float(settings[key])


def _yarn_factors(settings: Mapping[str, Any]) -> tuple[float, float]:
    """Return (amplitude of cosines and sines, factor of the softmax scale)."""
    factor = float(settings["factor"])
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")

    def attention_scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("attention_factor") is not None:
        amplitude = float(settings["attention_factor"])
    elif mscale and all_dim:
        amplitude = attention_scale(mscale) / attention_scale(all_dim)
    else:
        amplitude = attention_scale(1.0)
    return amplitude, attention_scale(all_dim) ** 2 if all_dim else 1.0
