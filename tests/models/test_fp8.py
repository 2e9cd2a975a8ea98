"""FP8 checkpoints: every weight is the stored value times its scale, whichever modules are quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from float8_weights import COMPRESSED, FP8, quantise
from harness import Row, reference, run_rows
from tiny import CONFIG, random_weights
from tiny_dense import config_of, write_folder
from tiny_dense import random_weights as dense_weights
from whole_sequence import whole_sequence_logits

from specgen.errors import ModelError
from specgen.kernels.block_float8_linear import dequantize_blocks
from specgen.models.config import parse_config, read_config
from specgen.models.kept_float8 import BlockFloat8Linear
from specgen.models.loading import load_model
from specgen.sampling_params import SamplingParams

# More than one block in both directions, none of them whole.
SIZES = {"hidden_size": 144, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}


def same_logits(folder: Path, plain: Path) -> bool:
    ids = list(range(60))
    logits = [
        whole_sequence_logits(load_model(f, read_config(f), 0, 64, torch.float32, torch.device("cpu")).target, ids)
        for f in (folder, plain)
    ]
    return torch.equal(*logits)


@pytest.mark.parametrize("layout", ["block", "channel", "tensor"])
def test_weights_are_values_times_scales(tmp_path: Path, layout: str) -> None:
    config = config_of("llama", **SIZES)
    stored, meant = quantise(dense_weights(config), layout)
    declared = FP8 if layout == "block" else COMPRESSED
    folder = write_folder(tmp_path / "fp8", config | {"quantization_config": declared}, stored)
    assert same_logits(folder, write_folder(tmp_path / "plain", config, meant))


@pytest.mark.parametrize(
    "skip", ["embed|head|gate.weight", "embed|head|gate.weight|layers.2.", "layers.0.|layers.1.|embed|head"]
)
def test_target_and_draft_layer_quantised_together_or_alone(tmp_path: Path, skip: str) -> None:
    """U05: decided tensor by tensor, with a split latent product and shared experts among them."""
    config = CONFIG | {"hidden_size": 144, "n_shared_experts": 2}
    stored, meant = quantise(random_weights(config), "block", skip)
    folder = write_folder(tmp_path / "fp8", config | {"quantization_config": FP8}, stored)
    plain = write_folder(tmp_path / "plain", config, meant)
    assert same_logits(folder, plain)
    rows = [Row([5, 6, 7, n], SamplingParams(temperature=0.0, max_tokens=12), seed=n) for n in range(4)]
    got, want = run_rows(folder, rows, k=3), run_rows(plain, rows, k=3)
    assert [(r.token_ids, r.stats) for r in got] == [(r.token_ids, r.stats) for r in want]
    assert [r.token_ids for r in got] == [r.token_ids for r in reference(folder, rows)]


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    config = config_of("llama", **SIZES)
    stored, meant = quantise(dense_weights(config), "block")
    folder = write_folder(tmp_path, config | {"quantization_config": FP8}, stored)
    model = load_model(folder, read_config(folder), 0, 64, torch.bfloat16, torch.device("cpu")).target
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(model.layers[1].mlp.down_proj.weight, meant[name].bfloat16())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    config = config_of("llama", **SIZES)
    stored, _ = quantise(dense_weights(config), "block")
    name = "model.layers.0.self_attn.o_proj.weight"

    def load(weights: dict[str, torch.Tensor]) -> None:
        folder = write_folder(tmp_path, config | {"quantization_config": FP8}, weights)
        load_model(folder, read_config(folder), 0, 64, torch.float32, torch.device("cpu"))

    with pytest.raises(ModelError, match=r"o_proj\.weight' is FP8, and neither"):
        load({k: v for k, v in stored.items() if k != name + "_scale_inv"})
    with pytest.raises(ModelError, match=r"o_proj\.weight_scale_inv' has shape \[3, 3\]"):
        load(stored | {name + "_scale_inv": torch.ones(3, 3)})
    with pytest.raises(ModelError, match=r"unexpected tensor .*norm\.weight_scale_inv.*norm\.weight' is stored in F32"):
        load(stored | {"model.norm.weight_scale_inv": torch.ones(1)})
    with pytest.raises(ModelError, match=r"o_proj\.weight_scale_inv' has dtype I32"):
        load(stored | {name + "_scale_inv": torch.ones(2, 2, dtype=torch.int32)})


@pytest.mark.parametrize("keeps", [False, True], ids=["dequantised", "kept"])
@pytest.mark.parametrize("part", ["0.self_attn.o_proj", "1.mlp.experts.2.down_proj", "2.self_attn.kv_b_proj"])
def test_values_and_scales_that_are_not_finite_are_named(tmp_path: Path, part: str, keeps: bool) -> None:
    """e4m3 has two codes of NaN, and no infinity; of the target, its experts, and the draft layer."""
    config = CONFIG | {"hidden_size": 144, "moe_intermediate_size": 128}
    stored, _ = quantise(random_weights(config), "block")
    name = f"model.layers.{part}.weight"

    def load(changed: str, tensor: torch.Tensor) -> None:
        folder = write_folder(tmp_path, config | {"quantization_config": FP8}, stored | {changed: tensor})
        with pytest.raises(ModelError, match=rf"model\.safetensors: '{changed}' holds NaN or infinite"):
            load_model(folder, read_config(folder), 1, 64, torch.bfloat16, torch.device("cpu"), keeps_float8=keeps)

    for code in (0x7F, 0xFF):
        values = stored[name].clone()
        values.view(torch.uint8)[1, 2] = code
        load(name, values)
    for value in (float("nan"), float("inf"), -float("inf")):
        scale = stored[name + "_scale_inv"].clone()
        scale.view(-1)[0] = value
        load(name + "_scale_inv", scale)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"fp8, e4m3, blocks of \[64, 64\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        (COMPRESSED | {"format": "pack-quantized", "config_groups": {}}, "compressed-tensors, 'pack-quantized'"),
        (7, "7"),
    ],
)
def test_other_quantisation_is_refused_by_name(declared: object, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config(CONFIG | {"quantization_config": declared}, "config.json")


@pytest.mark.parametrize("layout", ["block", "channel", "tensor"])
def test_kept_weights_are_the_stored_ones(tmp_path: Path, layout: str) -> None:
    """Fused products too: their parts' blocks do not begin where the whole's would."""
    config = config_of("llama", **SIZES)
    stored, meant = quantise(dense_weights(config), layout)
    declared = FP8 if layout == "block" else COMPRESSED
    folder = write_folder(tmp_path, config | {"quantization_config": declared}, stored)
    arguments = (folder, read_config(folder), 0, 64, torch.float32, torch.device("cpu"))
    model, plain = load_model(*arguments, keeps_float8=True).target, load_model(*arguments).target
    kept = [part for part in model.modules() if isinstance(part, BlockFloat8Linear)]
    assert len(kept) == 4 * 2
    qkv = model.layers[1].self_attn.qkv_proj
    want = torch.cat([meant[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(dequantize_blocks(qkv.values, qkv.scale, torch.float32), want)
    ids = list(range(60))
    assert torch.equal(whole_sequence_logits(model, ids), whole_sequence_logits(plain, ids))


@pytest.mark.parametrize("layout", ["block", "channel"])
def test_kept_experts_are_the_stored_ones(tmp_path: Path, layout: str) -> None:
    """Two shared experts among them, which are stored as a wide one."""
    config = CONFIG | {"hidden_size": 144, "n_shared_experts": 2, "moe_intermediate_size": 128}
    stored, _ = quantise(random_weights(config), layout)
    declared = FP8 if layout == "block" else COMPRESSED
    folder = write_folder(tmp_path, config | {"quantization_config": declared}, stored)
    arguments = (folder, read_config(folder), 1, 64, torch.float32, torch.device("cpu"))
    model, plain = load_model(*arguments, keeps_float8=True), load_model(*arguments)
    for kept, wide in (
        (model.target.layers[1].mlp, plain.target.layers[1].mlp),
        (model.mtp.layers[0].mtp_block.mlp, plain.mtp.layers[0].mtp_block.mlp),
    ):
        for e in range(6):
            for name in ("w13", "w2"):
                found = dequantize_blocks(getattr(kept, name)[e], getattr(kept.scales, name)[e], torch.float32)
                assert torch.equal(found, getattr(wide, name)[e])
    ids = list(range(60))
    assert torch.equal(whole_sequence_logits(model.target, ids), whole_sequence_logits(plain.target, ids))


def test_kept_runs_of_different_k_give_the_same_tokens(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 144, "n_shared_experts": 2, "moe_intermediate_size": 128}
    stored, _ = quantise(random_weights(config), "block")
    folder = write_folder(tmp_path, config | {"quantization_config": FP8}, stored)
    rows = [Row([5, 6, 7, n], SamplingParams(temperature=0.0, max_tokens=12), seed=n) for n in range(4)]
    want = [r.token_ids for r in reference(folder, rows, keeps_float8=True)]
    for k in (1, 3):
        assert [r.token_ids for r in run_rows(folder, rows, k=k, keeps_float8=True)] == want


def test_kept_weights_never_have_memory_in_the_wider_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fits a device in FP8 alone can be built there."""
    config = parse_config(CONFIG | {"moe_intermediate_size": 128, "hidden_size": 256}, "config.json")
    given: list[torch.Tensor] = []
    real = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        given.append(real(*args, **options))
        return given[-1]

    monkeypatch.setattr(torch, "empty", empty)
    loaded = load_model(None, config, 1, 64, torch.bfloat16, torch.device("cpu"), keeps_float8=True)
    experts = loaded.target.layers[1].mlp.w13
    assert experts.dtype == torch.float8_e4m3fn
    wide = [t for t in given if not t.is_meta and t.dtype != experts.dtype and t.shape == experts.shape]
    assert not wide
    assert [t.dtype for t in given if t.is_meta and t.shape == experts.shape] == [torch.bfloat16] * 2
    assert not any(weight.is_meta for model in (loaded.target, loaded.mtp) for weight in model.parameters())


def test_random_weights_may_be_held_in_float8_as_a_checkpoint_holds_them() -> None:
    config = parse_config(CONFIG | {"moe_intermediate_size": 128, "hidden_size": 256}, "config.json")
    loaded = load_model(None, config, 1, 64, torch.float32, torch.device("cpu"), keeps_float8=True)
    moe = loaded.target.layers[1].mlp
    assert moe.w13.dtype == moe.w2.dtype == torch.float8_e4m3fn
    assert isinstance(loaded.mtp.layers[0].mtp_block.self_attn.o_proj, BlockFloat8Linear)
    weight = dequantize_blocks(moe.w13[0], moe.scales.w13[0], torch.float32)
    assert 0.8 < float(weight.std()) * 256**0.5 < 1.2
    assert whole_sequence_logits(loaded.target, list(range(20))).isfinite().all()
