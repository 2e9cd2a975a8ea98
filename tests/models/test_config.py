"""config.json: what is wrong in it is the model's fault, and is named."""

import json
from typing import Any

import pytest

from specgen.errors import ModelError, RecipeError
from specgen.model_path import resolve_model
from specgen.models.config import parse_config, read_config, resolve_max_model_len

FOLDER = resolve_model("stories-7m")
CONFIG = json.loads((FOLDER / "config.json").read_text())
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": "x"}, "hidden_size must be an integer from 1 up, not 'x'"),
        ({"hidden_size": 256.0}, "hidden_size must be"),
        ({"hidden_size": None}, "hidden_size must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer from 0 up"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"rms_norm_eps": [1]}, "rms_norm_eps must be"),
        ({"rope_theta": float("nan")}, "rope_theta must be"),
        ({"q_lora_rank": "96"}, "q_lora_rank must be"),
        ({"quantization_config": [8]}, "quantised weights ([8]) are not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights (gptq) are not supported"),
        ({"rope_parameters": 3}, "rope_parameters must be an object"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": ["yarn"]}}, "unknown type ['yarn']"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "needs the key 'original_max_position_embeddings'"),
        ({"rope_scaling": YARN | {"factor": "4"}}, "rope_scaling: factor must be a number above 0, not '4'"),
        ({"rope_scaling": YARN | {"beta_fast": {}}}, "rope_scaling: beta_fast must be"),
        ({"n_group": 3}, "n_group must divide n_routed_experts"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok exceeds"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim must be even"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_config(CONFIG | change, "the/config.json")
    assert str(caught.value).startswith("the/config.json: ")
    assert part in str(caught.value)


def test_what_is_no_object_or_lacks_a_key() -> None:
    for raw in ([], None, "deepseek_v3"):
        with pytest.raises(ModelError, match="not a JSON object"):
            parse_config(raw, "x")
    with pytest.raises(ModelError, match="lacks kv_lora_rank, vocab_size"):
        parse_config({k: v for k, v in CONFIG.items() if k not in ("vocab_size", "kv_lora_rank")}, "x")


def test_null_is_as_good_as_not_written() -> None:
    config = parse_config(
        CONFIG | dict.fromkeys(("num_nextn_predict_layers", "n_shared_experts", "rope_theta", "attention_bias")), "x"
    )
    assert (config.num_nextn_predict_layers, config.n_shared_experts, config.rope_theta) == (0, 0, 10_000.0)


def test_the_models_limit_is_the_most() -> None:
    config = read_config(FOLDER)
    assert resolve_max_model_len(None, config) == 2048
    assert resolve_max_model_len(17, config) == 17
    with pytest.raises(RecipeError, match=r"^x\.yaml:3: engine\.max_model_len is 2049; the model's limit is 2048"):
        resolve_max_model_len(2049, config, "x.yaml:3")
