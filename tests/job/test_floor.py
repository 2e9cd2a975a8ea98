"""The cost model against figures worked out by hand for a 16 B DeepSeek-V3 layout."""

import pytest
import torch
from tiny import CONFIG
from tiny_dense import CONFIGS
from torch import nn

from specgen.job import floor
from specgen.job.floor import Ceilings, Cost, CostModel, DraftCosts, Op, cost_model, expected_experts
from specgen.models import cheap_drafts
from specgen.models.cheap_drafts import CheapDrafts, Float8Linear
from specgen.models.config import parse_config
from specgen.models.dense_config import DenseConfig
from specgen.models.layers import Embedding
from specgen.models.loading import load_model

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
    # in the first pass, too: of its four tokens only one gives an output
    a_pass = ATTENTION + shared + router + 6 * EXPERT + 2 * 2048 * 2048
    assert cost.of("draft").num_bytes == pytest.approx(2 * 3 * (a_pass + HEAD), rel=1e-5)
    assert cost.of("draft").num_bytes == pytest.approx(2.14e9, rel=0.01)
    # all of it is bound by memory: (11.7 + 2.1) GB at 4.28 TB/s
    assert cost.seconds(H200) == pytest.approx(3.24e-3, rel=0.01)
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
    assert now["draft", "head"].num_bytes == 3 * (32768 * 2048 + 4 * 32768), "a byte an element, a scale a row"
    assert now["draft", "head"].flops < was["draft", "head"].flops
    for name in ("experts", "shared experts"):
        assert now["draft", name].num_bytes == pytest.approx(was["draft", name].num_bytes / 2, rel=3e-3)
        assert now["draft", name].flops == was["draft", name].flops
    assert now["draft", "eh_proj"] == was["draft", "eh_proj"], "too small to pay"
    assert now["draft", "attention products"] == was["draft", "attention products"]
    many = cheap.decode(65, 100, 3).kinds["draft", "head"]
    assert many.num_bytes == 3 * 32768 * 2048 * 2, "more rows than its kernel takes: the weights as they were loaded"


def test_a_float8_cache_halves_the_keys_and_values_alone() -> None:
    narrow = cost_model(parse_config(DS16B, "test"), 2, 1)
    assert narrow is not None
    wide_ops, narrow_ops = (m.decode(8, 4096, 3).kinds for m in (model(), narrow))
    for kind, cost in wide_ops.items():
        is_attention = kind[1] == "attention"
        assert narrow_ops[kind].num_bytes == cost.num_bytes * (0.5 if is_attention else 1)
        assert narrow_ops[kind].flops == cost.flops


# A slice of DeepSeek-V3: 4 layers (the first dense) of 7168, 256 experts of 2048, top 8 in 4 of 8 groups, 1 shared.
DSV3 = DS16B | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
}


def test_kept_float8_and_latent_queries_by_hand() -> None:
    """32 rows, K = 1, 1000 tokens each, FP8 kept, FP8 cache. Worked out on paper from the published shapes.

    64 tokens touch 256 x (1 - (248/256)^64) = 222.442 experts, the draft layer's 32 that give an output 163.314. A byte
    an element, 4 bytes a block of 128 x 128:
    q_a and kv_a (1536 + 576) x 7168 (17 x 56 blocks), q_b 24576 x 1536 (192 x 12), o 7168 x 16384 (56 x 128);
    kv_b 128 x 256 x 512 in bfloat16; an expert 3 x 7168 x 2048 (32 x 56 + 56 x 16 blocks).
    """
    found = cost_model(parse_config(DSV3, "test"), 2, 1, keeps_float8=True)
    assert found is not None
    cost = found.decode(32, 1000, 1)
    attention = 15_138_816 + 37_748_736 + 117_440_512 + 4 * (952 + 2304 + 7168) + 2 * 16_777_216
    expert = 44_040_192 + 4 * 2688
    dense = 3 * 7168 * 18432 + 4 * (288 * 56 + 56 * 144)
    moe_layer, draft_moe = (touched * expert + expert + 2 * 256 * 7168 for touched in (222.442488, 163.313846))
    kv = 32 * 1000 * 576
    head = 2 * 129280 * 7168
    target = 4 * (attention + kv) + dense + 3 * moe_layer + head
    draft = 2 * 2 * 7168 * 7168 + attention + kv + draft_moe + head
    assert cost.of("target").num_bytes == pytest.approx(target, rel=1e-6)
    assert cost.of("draft").num_bytes == pytest.approx(draft, rel=1e-6)
    assert target == pytest.approx(32.68e9, rel=1e-3)
    used = 170_328_064 + 16_777_216  # a token's multiply-adds: products of a layer's attention
    pairs = 128 * (576 + 512) * 1000
    flops = 4 * (used + pairs) + 3 * 7168 * 18432 + 3 * (9 * 44_040_192 + 256 * 7168) + 129280 * 7168
    assert cost.of("target").flops == pytest.approx(2 * 64 * flops, rel=1e-6)


MIMO = {
    "model_type": "mimo",
    "attention_bias": True,
    "vocab_size": 151680,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 640000.0,
}


def test_a_dense_model_with_float8_drafts_by_hand() -> None:
    """8 rows of 2000 tokens, K = 2: a layer is 4096 x 6144 + 4096 x 4096 + 3 x 4096 x 11008 = 177.2 M weights.

    The draft layer's products are all of 2^24 weights or more: a byte each and a scale a row, up to 64 tokens a pass
    (24 in its first pass, 8 in its second). Keys and values are made for all 24, the rest for the 8 that are read.
    """
    found = cost_model(parse_config(MIMO, "test"), 2, drafts=DraftCosts(float8=True))
    assert found is not None
    cost = found.decode(8, 2000, 2)
    layer, head = 25_165_824 + 16_777_216 + 135_266_304, 621_281_280
    kv = 2 * 8 * 2000 * 2 * 8 * 128
    assert cost.of("target").num_bytes == 36 * (2 * layer + kv) + 2 * head
    rows = 6144 + 4096 + 22016 + 4096  # of qkv, o, gate and up, down
    a_pass = 33_554_432 + 4 * 4096 + layer + 4 * rows + kv + head + 4 * 151680
    assert cost.of("draft").num_bytes == 2 * a_pass
    kv_product = 4096 * 2 * 8 * 128
    all_tokens, read = 33_554_432 + kv_product, layer - kv_product + 32 * 256 * 2000
    assert cost.of("draft").flops == 2 * ((24 + 8) * all_tokens + (8 + 8) * read + 2 * 8 * head)
    wide = found.decode(64, 2000, 2).kinds["draft", "eh_proj"]
    assert wide.num_bytes == (33_554_432 * 2) + (33_554_432 + 4 * 4096), "192 tokens in bfloat16, then 64 in FP8"


def _bytes_there(model: nn.Module) -> int:
    """Of all weights that a step reads whole, without scales: every matrix but the embedding, each module's once."""
    total = 0
    for module in model.modules():
        if isinstance(module, Float8Linear):
            total += module.rounded.values.nbytes
        elif not isinstance(module, Embedding):
            own = [p for name, p in module.named_parameters(recurse=False) if "scale" not in name]
            total += sum(p.nbytes for p in own if p.dim() > 1)
    return total


@pytest.mark.parametrize("float8", ["none", "kept", "drafts"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo", "qwen3"])
def test_the_floor_reads_the_weights_that_are_there(family: str, float8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all experts touched: the bytes of the cost model, scales apart, are those of the loaded model's weights."""
    shapes = {"hidden_size": 128, "vocab_size": 96, "moe_intermediate_size": 128, "q_lora_rank": 128}
    experts = {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "n_routed_experts": 4}
    raw = (CONFIG if family == "deepseek_v3" else CONFIGS[family]) | shapes | experts | {"model_type": family}
    config = parse_config(raw, "test")
    num_drafts = min(1, config.num_nextn_predict_layers)
    cheap = CheapDrafts(float8 == "drafts")
    monkeypatch.setattr(cheap_drafts, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(floor, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(floor, "_SCALE_BYTES", 0)
    device, kept = torch.device("cpu"), float8 == "kept"
    model = load_model(None, config, num_drafts, 64, torch.bfloat16, device, cheap_drafts=cheap, keeps_float8=kept)
    found = cost_model(config, 2, drafts=DraftCosts(cheap.float8), keeps_float8=kept)
    assert found is not None
    cost = found.decode(1, 0, num_drafts)
    assert isinstance(model.target, nn.Module)
    assert cost.of("target").num_bytes == _bytes_there(model.target)
    if num_drafts:
        assert isinstance(model.mtp, nn.Module)
        # the target's head, where FP8 drafts share it, is there beside its copy
        assert cost.of("draft").num_bytes == _bytes_there(model.mtp) - _wide_bytes(model.mtp)


def _wide_bytes(model: nn.Module) -> int:
    """Of weights that are kept beside their copy in FP8, for steps of many rows."""
    wide = [module.wide for module in model.modules() if isinstance(module, Float8Linear)]
    return sum(part.weight.nbytes for part in wide if part is not None)


def test_a_head_of_its_own_folder_has_its_own_shape() -> None:
    """A target without draft layers, and a head of half its inner size: one pass a draft."""
    target = parse_config(MIMO | {"num_nextn_predict_layers": 0}, "test")
    head = parse_config(MIMO | {"intermediate_size": 5504}, "test")
    assert isinstance(head, DenseConfig)
    found = cost_model(target, 2, drafts=DraftCosts(config=head))
    assert found is not None
    kinds = found.decode(4, 0, 2).kinds
    assert kinds["draft", "mlp"].num_bytes == 2 * (2 * 3 * 4096 * 5504)
    assert kinds["draft", "head"].num_bytes == 2 * (2 * 151680 * 4096)


def test_a_first_pass_computes_no_more_than_is_read_of_it() -> None:
    """Two layers of MiMo's: the lower one whole, of the upper one KV alone until a third draft begins with its output.

    4 rows of 1000 tokens. A layer is 4096 x 6144 + 4096 x 4096 + 3 x 4096 x 11008 weights, KV 4096 x 2048 of them.
    """
    found = cost_model(parse_config(MIMO | {"num_nextn_predict_layers": 2}, "test"), 2)
    assert found is not None
    projection, layer, kv_product, head = 33_554_432, 177_209_344, 8_388_608, 621_281_280
    kv, pairs = 4 * 1000 * 2 * 8 * 128, 32 * 256 * 1000
    two, three = (found.decode(4, 1000, num_drafts).of("draft") for num_drafts in (2, 3))
    whole = projection + layer
    assert two.num_bytes == 2 * (2 * whole + projection + kv_product + 2 * kv + 2 * head)
    assert two.flops == 2 * (12 * (whole + pairs + projection + kv_product) + 4 * (whole + pairs + 2 * head))
    assert three.num_bytes == 2 * (4 * whole + 4 * kv + 3 * head)
    first = 16 * (whole + pairs + projection + kv_product) + 4 * (layer - kv_product + pairs)
    assert three.flops == 2 * (first + (4 + 8) * (whole + pairs) + 3 * 4 * head)


def test_a_prompts_draft_pass_writes_kv_and_attends_from_its_last_token() -> None:
    """32 prompts of 256 tokens, 8192 a step: one step, 32 of whose tokens give a draft."""
    ops = model().prefill(32, 256, 8192, 1).of("draft").kinds
    assert ops["draft", "attention"].flops == 2 * 16 * (576 + 512) * 32 * 256
    touched = expected_experts(64, 6, 32)
    assert ops["draft", "experts"].num_bytes == pytest.approx(touched * EXPERT * 2)
    assert ops["draft", "experts"].flops == 2 * 6 * EXPERT * 32
    behind_kv = ATTENTION - 2048 * 576
    assert ops["draft", "attention products"].flops == 2 * (2048 * 576 * 32 * 256 + behind_kv * 32)
    assert ops["draft", "eh_proj"].flops == 2 * 2 * 2048 * 2048 * 32 * 256
