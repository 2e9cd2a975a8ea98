"""Rope tables against transformers' and by hand; what is refused."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specgen.models.rope_table import rope_table

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def _assert_is(table: torch.Tensor, rotary: torch.nn.Module) -> None:
    cos, sin = rotary(torch.zeros(1), torch.arange(len(table))[None])
    half = table.shape[1] // 2
    # Angles reach 4000 in float32, whose last bit there is 2.4e-4; frequencies may differ by a rounding.
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-3)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-3)


@pytest.mark.parametrize("changes", [{}, {"mscale": 0.707, "mscale_all_dim": 1.2}, {"beta_fast": 20, "factor": 4}])
def test_yarn_is_deepseek_v3(changes: dict[str, Any]) -> None:
    scaling = {**YARN, **changes}
    config = DeepseekV3Config(
        qk_rope_head_dim=64,
        max_position_embeddings=163_840,
        rope_parameters={**scaling, "rope_type": "yarn", "rope_theta": 10_000.0},
    )
    table, _ = rope_table(64, 4000, 10_000.0, scaling)
    _assert_is(table, DeepseekV3RotaryEmbedding(config))


def test_yarn_softmax_factor() -> None:
    _, factor = rope_table(64, 4, 10_000.0, YARN)
    assert factor == pytest.approx(1.3688879454**2)  # (0.1 ln 40 + 1)^2
    _, factor = rope_table(64, 4, 10_000.0, {**YARN, "mscale_all_dim": 0})
    assert factor == 1.0


def test_default_by_hand_and_as_transformers() -> None:
    table, factor = rope_table(4, 3, 100.0, None)
    angles = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]])
    torch.testing.assert_close(table, torch.cat([angles.cos(), angles.sin()], dim=-1))
    assert table.dtype == torch.float32
    assert factor == 1.0
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    _assert_is(rope_table(64, 4000, 5e5, {"rope_type": "default"})[0], LlamaRotaryEmbedding(config))


def test_linear_stretches_positions() -> None:
    plain, _ = rope_table(16, 10, 10_000.0, None)
    stretched, _ = rope_table(16, 37, 10_000.0, {"type": "linear", "factor": 4.0})
    torch.testing.assert_close(stretched[::4], plain)


def test_llama3_is_transformers() -> None:
    parameters = {**LLAMA3, "rope_theta": 5e5}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=parameters)
    _assert_is(rope_table(64, 4000, 5e5, LLAMA3)[0], LlamaRotaryEmbedding(config))


def test_what_is_unknown_or_missing_is_named() -> None:
    with pytest.raises(ValueError, match="longrope"):
        rope_table(16, 4, 1e4, {"rope_type": "longrope"})
    with pytest.raises(ValueError, match="original_max_position_embeddings"):
        rope_table(16, 4, 1e4, {"type": "yarn", "factor": 4})
