"""Law 3 for every family: logits equal transformers', drafts equal a plain draft layer's; and law 1.

All in float32 on the CPU, where sums run in other orders: measured differences are at most 6e-6 of the largest logit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_chains import assert_chains_equal, record
from harness import Row, reference, run_rows
from plain_deepseek import PlainDeepseek
from plain_dense import PlainDense
from safetensors.torch import load_file, save_file
from tiny import CONFIG
from tiny import random_weights as deepseek_weights
from tiny_dense import CONFIGS, config_of, random_head, random_weights, write_folder
from transformers import AutoModelForCausalLM
from whole_sequence import whole_sequence_logits

from specgen.errors import ModelError, RecipeError
from specgen.models.config import parse_config, read_config
from specgen.models.families import known_families
from specgen.models.loading import check_model, load_model
from specgen.sampling_params import SamplingParams

TOLERANCE = 2e-5  # of the largest logit
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama, heads of their own size": ("llama", {"head_dim": 12}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "transformers 5 rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn, tied": ("qwen2", {"rope_scaling": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, plain heads": ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "norm_topk_prob": False}),
}
_V3_ONLY = ("topk_method", "scoring_func", "moe_layer_freq")
_LITE = {k: v for k, v in CONFIG.items() if k not in _V3_ONLY} | {
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "rms_norm_eps": 1e-5,
    "mlp_layer_types": ["dense", "sparse"],
}
_V2 = CONFIG | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "num_nextn_predict_layers": 0,
}
_GROUPS = {"topk_method": "group_limited_greedy", "n_routed_experts": 16, "n_group": 4, "topk_group": 2}
LATENT: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": _LITE,
    "glm4_moe_lite, heads of other sizes": _LITE | {"qk_nope_head_dim": 20, "v_head_dim": 28},
    "deepseek_v2": _V2 | {"q_lora_rank": None},
    "deepseek_v2 groups": _V2 | _GROUPS | {"num_experts_per_tok": 4},
    "deepseek_v2 yarn": _V2 | {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
}


def latent_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    softmax = config["model_type"] == "deepseek_v2"
    return {k: v for k, v in deepseek_weights(config).items() if not (softmax and "correction_bias" in k)}


def assert_equals_transformers(folder: Path) -> None:
    ids = torch.randint(0, 64, (97,), generator=torch.Generator().manual_seed(3)).tolist()
    target = load_model(folder, read_config(folder), 0, len(ids), torch.float32, torch.device("cpu")).target
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = oracle(torch.tensor([ids])).logits[0]
    assert (whole_sequence_logits(target, ids) - want).abs().max() < TOLERANCE * want.abs().max()


@pytest.mark.parametrize("variant", DENSE)
def test_dense_targets_equal_transformers(tmp_path: Path, variant: str) -> None:
    family, changes = DENSE[variant]
    assert_equals_transformers(write_folder(tmp_path, config_of(family, **changes)))


@pytest.mark.parametrize("variant", LATENT)
def test_latent_targets_equal_transformers(tmp_path: Path, variant: str) -> None:
    config = LATENT[variant]
    assert_equals_transformers(write_folder(tmp_path, config, latent_weights(config)))


def test_mimo_equals_the_plain_model(tmp_path: Path) -> None:
    """transformers has no MiMo."""
    folder = write_folder(tmp_path, config_of("mimo"))
    ids = torch.randint(0, 64, (97,), generator=torch.Generator().manual_seed(3)).tolist()
    target = load_model(folder, read_config(folder), 0, len(ids), torch.float32, torch.device("cpu")).target
    want = PlainDense(random_weights(config_of("mimo")), config_of("mimo"), torch.float64).target_logits(
        torch.tensor(ids)
    )
    assert (whole_sequence_logits(target, ids) - want).abs().max() < TOLERANCE * want.abs().max()


def test_every_family_is_tested() -> None:
    tested = {family for family, _ in DENSE.values()} | {c["model_type"] for c in LATENT.values()}
    assert set(known_families()) == tested | {"mimo"} | {"deepseek_v3", "kimi_k2"}  # these in test_deepseek_v3.py
    assert set(CONFIGS) <= set(known_families())


def rows(num: int) -> list[Row]:
    g = torch.Generator().manual_seed(8)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return [Row(torch.randint(0, 64, (n,), generator=g).tolist(), params, seed=n) for n in [1, 2, 3, 9, 26][:num]]


def plain(folder: Path) -> PlainDense:
    config = json.loads((folder / "config.json").read_text())
    return PlainDense(load_file(folder / "model.safetensors"), config, torch.float64)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mimo", {}),
        ("mimo", {"num_nextn_predict_layers": 2, "tie_word_embeddings": True}),
        ("glm4_moe", {}),
        ("glm4_moe", {"num_nextn_predict_layers": 2}),
    ],
)
def test_chained_drafts_equal_a_plain_head(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = write_folder(tmp_path, config_of(family, **changes))
    records = record(folder, rows(5), k=3, budget=7)
    assert assert_chains_equal(plain(folder), records, every=3) > 20


def test_drafts_of_glm4_moe_lite_equal_the_plain_mtp(tmp_path: Path) -> None:
    config = _LITE | {"rms_norm_eps": 1e-6}  # the plain model has one epsilon for all norms
    folder = write_folder(tmp_path, config, deepseek_weights(config))
    records = record(folder, rows(5), k=3, budget=7)
    oracle = PlainDeepseek(deepseek_weights(config), config, torch.float64)
    assert assert_chains_equal(oracle, records, every=3) > 20


HEAD = config_of("llama", num_nextn_predict_layers=1, mtp={"layout": "mimo"})


def write_head(folder: Path, **changes: Any) -> Path:
    config = HEAD | changes
    return write_folder(folder, config, random_head(config), file="mtp")


@pytest.mark.parametrize(
    ("target", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_nextn_predict_layers": 2}),
        ("qwen3_moe", {"head_dim": 16, "rope_theta": 500.0}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12}),
        (
            "llama",
            {
                "mtp": {
                    "input_proj_order": ["token_layernorm(embedding)", "hidden_layernorm(hidden)"],
                    "zero_embedding_at_position_0": False,
                    "hidden_from_target": "hidden states after the final norm",
                }
            },
        ),
    ],
)
def test_drafts_of_a_head_from_a_second_folder(tmp_path: Path, target: str, changes: dict[str, Any]) -> None:
    folder = write_folder(tmp_path / "model", config_of(target))
    head = write_head(tmp_path / "head", **changes)
    records = record(folder, rows(5), k=3, budget=7, draft_folder=head)
    config = HEAD | changes
    oracle = PlainDense(
        random_weights(config_of(target)), config_of(target), torch.float64, (random_head(config), config)
    )
    assert assert_chains_equal(oracle, records, every=3) > 20


def test_drafts_of_a_head_over_latent_attention(tmp_path: Path) -> None:
    config = _V2 | {"first_k_dense_replace": 2}  # the plain model has no softmax routing
    weights = latent_weights(config)
    head_config = HEAD | {"num_attention_heads": 4, "num_key_value_heads": 2}
    oracle = PlainDense(weights, config, torch.float64, (random_head(head_config), head_config))
    oracle.stream = PlainDeepseek(weights, config, torch.float64).stream  # type: ignore[method-assign]
    folder = write_folder(tmp_path / "model", config, weights)
    head = write_head(tmp_path / "head", **head_config)
    assert assert_chains_equal(oracle, record(folder, rows(5), k=3, budget=7, draft_folder=head), every=3) > 20


@pytest.mark.parametrize("target", ["llama", "glm4_moe", "deepseek_v2"])
def test_a_head_over_any_target_leaves_its_tokens(tmp_path: Path, target: str) -> None:
    """Also over a model with draft layers of its own, whose hidden states are normed for them, and over latent KV."""
    if target == "deepseek_v2":
        folder = write_folder(tmp_path / "model", _V2, latent_weights(_V2))
    else:
        folder = write_folder(tmp_path / "model", config_of(target, head_dim=16))
    some = rows(5)
    want = [r.token_ids for r in run_rows(folder, some, k=0)]
    got = run_rows(folder, some, k=3, draft_folder=write_head(tmp_path / "head"))
    assert [r.token_ids for r in got] == want


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mtp": {"layout": "eagle"}}, r"mtp\.layout = 'eagle'"),
        ({"mtp": {"input_proj_order": ["x"]}}, r"mtp\.input_proj_order"),
        ({"mtp": {"hidden_from_target": "layer 3"}}, r"mtp\.hidden_from_target = 'layer 3'"),
        ({"mtp": {"hidden_carried": "before final_layernorm"}}, r"mtp\.hidden_carried"),
        ({"mtp": {"zero_embedding_at_position_0": 1}}, r"mtp\.zero_embedding_at_position_0"),
        ({"hidden_size": 36}, "hidden_size is 36, the model's 48"),
        ({"num_nextn_predict_layers": 0}, "no draft head"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    folder = write_folder(tmp_path / "model", config_of("llama"))
    with pytest.raises(ModelError, match=named):
        run_rows(folder, rows(1), k=2, draft_folder=write_head(tmp_path / "head", **changes))


def test_a_head_with_fewer_positions_than_a_row_is_refused(tmp_path: Path) -> None:
    """U30"""
    folder = write_folder(tmp_path / "model", config_of("llama"))
    head = write_head(tmp_path / "head", max_position_embeddings=32)
    with pytest.raises(RecipeError, match="knows 32 positions, a row may have 64"):
        run_rows(folder, rows(1), k=2, max_model_len=64, draft_folder=head)
    assert run_rows(folder, rows(1), k=2, max_model_len=32, draft_folder=head)


@pytest.mark.parametrize("family", ["mimo", "llama", "glm4_moe"])
def test_speculative_equals_plain(tmp_path: Path, family: str) -> None:
    """Law 1: alone without drafts, in company with them, in chunks, after preemption."""
    if family == "llama":
        folder, head = write_folder(tmp_path / "m", config_of(family)), write_head(tmp_path / "h")
    else:
        folder, head = write_folder(tmp_path, config_of(family)), None
    g = torch.Generator().manual_seed(5)
    some = [
        Row(
            torch.randint(0, 64, (n,), generator=g).tolist(),
            SamplingParams(temperature=t, max_tokens=18, top_p=0.95),
            seed=n,
        )
        for n, t in [(1, 0.0), (4, 1.0), (11, 0.0), (30, 0.7), (57, 1.0), (8, 0.0), (21, 1.0)]
    ]
    want = [r.token_ids for r in reference(folder, some)]
    for k, budget, blocks in [(1, 5, 512), (3, 64, 512), (4, 512, 30)]:
        got = run_rows(folder, some, k=k, budget=budget, num_blocks=blocks, draft_folder=head)
        assert [r.token_ids for r in got] == want, (k, budget, blocks)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads 4 does not divide"),
        ("llama", {"head_dim": 7}, "must be even, not 7"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("glm4_moe", {"n_group": 3}, "n_group must divide"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok exceeds the 8 experts"),
    ],
)
def test_what_is_not_built_is_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config(config_of(family, **changes), "config.json")


def test_refusals_of_latent_relatives() -> None:
    for config, named in [
        (_V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (_V2 | {"topk_method": "noaux_tc"}, "topk_method"),
        (_LITE | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        (_LITE | {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        (_LITE | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
    ]:
        with pytest.raises(ModelError, match=named):
            parse_config(config, "config.json")


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    weights = random_weights(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    folder = write_folder(tmp_path, config, weights)
    model = load_model(folder, read_config(folder), 0, 64, torch.float32, torch.device("cpu")).target
    assert model.lm_head.weight is model.embed_tokens.weight


def test_draft_layers_are_asked_for_and_not_there(tmp_path: Path) -> None:
    """U06"""
    folder = write_folder(tmp_path, config_of("llama"))
    with pytest.raises(ModelError, match="no draft layer"):
        run_rows(folder, rows(1), k=2)
    weights = {k: v for k, v in random_weights(config_of("mimo")).items() if "mtp_layers" not in k}
    folder = write_folder(tmp_path / "mimo", config_of("mimo"), weights)
    with pytest.raises(ModelError, match=r"model\.mtp_layers\.0\."):
        run_rows(folder, rows(1), k=2)
    assert run_rows(folder, rows(1), k=0)


class TestBrokenFolders:
    """Five shards and an index, broken in one place: the message names file and tensor."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = write_folder(tmp_path, config_of("mimo"))
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names, index = sorted(weights), {}
        for i in range(5):
            file = f"model-{i + 1:05}-of-00005.safetensors"
            save_file({name: weights[name] for name in names[i::5]}, folder / file)
            index |= dict.fromkeys(names[i::5], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder

    def load(self, folder: Path, k: int = 1) -> None:
        load_model(folder, read_config(folder), k, 64, torch.float32, torch.device("cpu"))

    def replace(self, folder: Path, name: str, tensor: torch.Tensor | None) -> str:
        """Another tensor, or none, under a name; returns its file's name."""
        file = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
        weights = load_file(folder / file)
        weights.pop(name, None)
        save_file(weights | ({} if tensor is None else {name: tensor}), folder / file)
        return file

    def test_whole(self, folder: Path) -> None:
        self.load(folder)

    def test_a_shard_that_is_not_there(self, folder: Path) -> None:
        (folder / "model-00003-of-00005.safetensors").unlink()
        with pytest.raises(ModelError, match=r"model-00003-of-00005\.safetensors', which is not there"):
            self.load(folder)

    def test_an_index_that_leaves_a_file_out(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        file_of = json.loads(index.read_text())["weight_map"]
        file = "model-00003-of-00005.safetensors"
        index.write_text(json.dumps({"weight_map": {k: v for k, v in file_of.items() if v != file}}))
        with pytest.raises(ModelError, match=rf"missing.*{file} is in the folder, and the index does not name it"):
            self.load(folder)
        kept = {k: v for k, v in file_of.items() if "mtp_layers" not in k}
        index.write_text(json.dumps({"weight_map": kept}))
        self.load(folder)  # what is in a file that the index names is found there

    def test_draft_layers_in_a_file_that_the_index_leaves_out(self, folder: Path) -> None:
        weights = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
        for path in folder.glob("model*"):
            path.unlink()
        target = {k: v for k, v in weights.items() if "mtp_layers" not in k}
        save_file(target, folder / "model-1.safetensors")
        save_file({k: v for k, v in weights.items() if k not in target}, folder / "mtp.safetensors")
        index = {"weight_map": dict.fromkeys(target, "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"promises a draft layer.*mtp\.safetensors is in the folder"):
            self.load(folder)

    @pytest.mark.parametrize("index", ["[]", '{"weight_map": 5}', '{"weight_map": {"lm_head.weight": 1}}', "{}"])
    def test_an_index_that_is_none(self, folder: Path, index: str) -> None:
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
            self.load(folder)

    def test_a_pointer_in_place_of_a_file(self, folder: Path) -> None:
        for name in ("model-00002-of-00005.safetensors", "model.safetensors.index.json"):
            (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
            with pytest.raises(ModelError, match=rf"{name}.*Git LFS's pointer.*git lfs pull"):
                self.load(folder)

    def test_a_tensor_in_two_files(self, folder: Path) -> None:
        """The one that the index means is taken; without an index, nobody knows which."""
        index = folder / "model.safetensors.index.json"
        file_of = json.loads(index.read_text())["weight_map"]
        for place, other in ((1, 5), (5, 1)):  # before and behind the file that the index means
            name = next(name for name, file in file_of.items() if file.startswith(f"model-0000{place}"))
            path = folder / f"model-0000{other}-of-00005.safetensors"
            kept = path.read_bytes()
            meant = load_file(folder / file_of[name])[name]
            save_file(load_file(path) | {name: torch.full_like(meant, float("nan"))}, path)
            self.load(folder)  # a NaN would be refused
            index.rename(folder / "index")
            with pytest.raises(ModelError, match=rf"'{name}' is in model-0000.*move aside"):
                self.load(folder)
            (folder / "index").rename(index)
            path.write_bytes(kept)

    def test_what_a_load_would_find_is_found_in_the_headers(self, folder: Path) -> None:
        check_model(folder, read_config(folder), 1, 64)
        name = "model.mtp_layers.0.input_proj.weight"
        for tensor, part in ((torch.ones(48, 40), "has shape"), (None, "1 tensor missing")):
            self.replace(folder, name, tensor)
            with pytest.raises(ModelError, match=part):
                check_model(folder, read_config(folder), 1, 64)
            check_model(folder, read_config(folder), 0, 64)
            self.replace(folder, name, torch.ones(48, 96))

    def test_a_truncated_shard(self, folder: Path) -> None:
        path = folder / "model-00002-of-00005.safetensors"
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ModelError, match=r"model-00002-of-00005.*damaged or truncated"):
            self.load(folder)

    def test_a_tensor_that_a_shard_lacks(self, folder: Path) -> None:
        file = self.replace(folder, "model.mtp_layers.0.input_proj.weight", None)
        with pytest.raises(ModelError, match=rf"{file}: .*mtp_layers\.0\.input_proj\.weight', and the index says"):
            self.load(folder)
        self.load(folder, k=0)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_tensor_that_is_not_finite(self, folder: Path, value: float) -> None:
        bad = torch.ones(48)
        bad[17] = value
        file = self.replace(folder, "model.mtp_layers.0.hidden_layernorm.weight", bad)
        with pytest.raises(ModelError, match=rf"{file}.*hidden_layernorm\.weight' holds NaN or infinite"):
            self.load(folder)

    def test_a_tensor_of_integers(self, folder: Path) -> None:
        self.replace(folder, "model.norm.weight", torch.ones(48, dtype=torch.int8))
        with pytest.raises(ModelError, match=r"model\.norm\.weight' has dtype I8, .*BF16"):
            self.load(folder)
