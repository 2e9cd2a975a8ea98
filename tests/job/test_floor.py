"""The cost model against figures worked out by hand for a 16 B DeepSeek-V3 layout."""

import pytest

from specgen.job.floor import Ceilings, Cost, CostModel, DraftCosts, Op, cost_model, expected_experts
from specgen.models.config import parse_config

# 27 layers (the first dense), hidden 2048, 64 experts of 1408, top 6, 2 shared; MLA with 16 heads and no query latent.
DS16B = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 1,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
}
H200 = Ceilings(4.28e12, 792e12)
# Products of one layer's attention: 2048 x (16 * 192 + 576), 16 x 512 x 256, 2048 x 2048.
ATTENTION = 7_471_104 + 2_097_152 + 4_194_304
EXPERT = 3 * 2048 * 1408
HEAD = 129280 * 2048


def model() -> CostModel:
    found = cost_model(parse_config(DS16B, "test"), 2)
    assert found is not None
    return found


def test_experts_touched() -> None:
    assert expected_experts(64, 6, 1) == pytest.approx(6)
    assert expected_experts(64, 6, 4) == pytest.approx(20.83, abs=0.01)
    assert expected_experts(64, 6, 1024) == pytest.approx(64)


def test_one_row_of_three_drafts_reads_what_was_worked_out_by_hand() -> None:
    cost = model().decode(1, 0, 3)
    shared, router = 2 * EXPERT, 64 * 2048
    moe_layer = ATTENTION + shared + router + 20.830978 * EXPERT
    dense_layer = ATTENTION + 3 * 2048 * 11264
    assert cost.of("target").num_bytes == pytest.approx(2 * (26 * moe_layer + dense_layer + HEAD), rel=1e-5)
    assert cost.of("target").num_bytes == pytest.approx(11.7e9, rel=0.005)
    short_pass = ATTENTION + shared + router + 6 * EXPERT + 2 * 2048 * 2048
    long_pass = short_pass + (20.830978 - 6) * EXPERT
    assert cost.of("draft").num_bytes == pytest.approx(2 * (long_pass + 2 * short_pass + 3 * HEAD), rel=1e-5)
    assert cost.of("draft").num_bytes == pytest.approx(2.4e9, rel=0.01)
    # all of it is bound by memory: (11.7 + 2.4) GB at 4.28 TB/s
    assert cost.seconds(H200) == pytest.approx(3.3e-3, rel=0.01)
    assert cost.seconds(H200) == pytest.approx(cost.num_bytes / 4.28e12)


def test_plain_decoding_has_no_drafts_and_counts_multiply_adds_twice() -> None:
    cost = model().decode(1, 100, 0)
    assert cost.of("draft").ops == ()
    used = 27 * ATTENTION + 3 * 2048 * 11264 + 26 * (8 * EXPERT + 64 * 2048) + HEAD
    scores = 27 * 16 * (576 + 512) * 100
    assert cost.flops == pytest.approx(2 * (used + scores))
    assert cost.num_bytes == pytest.approx(2 * (used + 27 * 576 * 100))


def test_many_rows_are_bound_by_kv_weights_and_the_head_by_arithmetic() -> None:
    cost = model().decode(256, 640, 3)
    ops = cost.kinds
    assert ops["target", "attention"].num_bytes == pytest.approx(27 * 256 * 640 * 1152)
    assert ops["draft", "attention"].num_bytes == pytest.approx(3 * 256 * 640 * 1152)
    assert ops["target", "experts"].num_bytes == pytest.approx(26 * 64 * EXPERT * 2)
    head = ops["target", "head"]
    assert head.seconds(H200) == pytest.approx(2 * 1024 * HEAD / 792e12)
    assert ops["draft", "experts"].seconds(H200) > 0
    assert head.seconds(H200) > head.num_bytes / H200.bytes_per_second
    assert ops["draft", "head"].num_bytes == 3 * HEAD * 2


def test_prefill_reads_the_weights_once_a_step() -> None:
    cost = model().prefill(256, 512, 8192, 0)
    ops = {name: kind for (_, name), kind in cost.kinds.items()}
    assert ops["experts"].num_bytes == pytest.approx(16 * 26 * 64 * EXPERT * 2)
    assert ops["experts"].flops == pytest.approx(2 * 26 * 6 * EXPERT * 256 * 512)
    assert ops["attention"].flops == pytest.approx(2 * 27 * 16 * (192 + 128) * 256 * 512 * 513 / 2)
    assert ops["head"].flops == pytest.approx(2 * HEAD * 256)


def test_the_floor_is_the_sum_over_operations() -> None:
    cost = Cost((Op("target", "a", 100, 1), Op("target", "b", 1, 100)))
    assert cost.seconds(Ceilings(10, 10)) == pytest.approx(20)


def test_a_dense_model_with_grouped_queries() -> None:
    """8 B: 32 layers of 4096 x (32 + 8 + 8) heads of 128, 4096 x 4096 and 3 x 4096 x 14336, head 128256 x 4096."""
    raw = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
    }
    dense = cost_model(parse_config(raw, "test"), 2)
    assert dense is not None
    cost = dense.decode(4, 1000, 0)
    weights = 32 * (4096 * (48 * 128) + 4096 * 4096 + 3 * 4096 * 14336) + 128256 * 4096
    kv = 4 * 1000 * 32 * 2 * 8 * 128
    assert cost.num_bytes == pytest.approx(2 * (weights + kv))
    assert cost.flops == pytest.approx(2 * 4 * (weights + 32 * 32 * 2 * 128 * 1000))


def test_cheap_drafts_lower_the_drafts_part_alone() -> None:
    config = parse_config(DS16B, "test")
    plain, cheap = cost_model(config, 2), cost_model(config, 2, drafts=DraftCosts(float8=True, vocab_size=32768))
    assert plain is not None and cheap is not None
    before, after = plain.decode(1, 100, 3), cheap.decode(1, 100, 3)
    assert before.of("target") == after.of("target")
    was, now = before.kinds, after.kinds
    assert now["draft", "head"].num_bytes == 3 * 32768 * 2048
    assert now["draft", "head"].flops < was["draft", "head"].flops
    for name in ("experts", "shared experts"):
        assert now["draft", name].num_bytes * 2 == was["draft", name].num_bytes
        assert now["draft", name].flops == was["draft", name].flops
    assert now["draft", "eh_proj"] == was["draft", "eh_proj"]
    assert now["draft", "attention products"] == was["draft", "attention products"]


def test_a_float8_cache_halves_the_keys_and_values_alone() -> None:
    narrow = cost_model(parse_config(DS16B, "test"), 2, 1)
    assert narrow is not None
    wide_ops, narrow_ops = (m.decode(8, 4096, 3).kinds for m in (model(), narrow))
    for kind, cost in wide_ops.items():
        is_attention = kind[1] == "attention"
        assert narrow_ops[kind].num_bytes == cost.num_bytes * (0.5 if is_attention else 1)
        assert narrow_ops[kind].flops == cost.flops
