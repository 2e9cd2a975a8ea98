"""Law 1 on a CUDA device, in bf16, for the families over grouped-query attention: tokens are plain decoding's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Harness, Row, run_rows
from tiny_dense import config_of, random_head, write_folder

from specgen.sampling_params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: the CPU has test_families.py"),
]
FLOAT8 = torch.float8_e4m3fn
OPTIONS: dict[str, Any] = {"device": "cuda:0", "dtype": torch.bfloat16, "block_size": 64, "max_model_len": 640}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 640}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64},
    "qwen2": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 128, "hidden_size": 896},
    "qwen3_moe": {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_attention_heads": 12, "num_key_value_heads": 1, "head_dim": 128},
    "mimo": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
}


@pytest.mark.parametrize(
    ("family", "kv_dtype"), [*((name, None) for name in FAMILIES), ("llama", FLOAT8), ("glm4_moe", FLOAT8)]
)
def test_speculative_equals_plain(tmp_path: Path, family: str, kv_dtype: torch.dtype | None) -> None:
    config = config_of(family, **(SIZES | FAMILIES[family]))
    folder, head = write_folder(tmp_path / "model", config), None
    if not config.get("num_nextn_predict_layers"):
        shape = {key: config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")}
        head_config = config_of("llama", **(SIZES | shape), num_nextn_predict_layers=1)
        head = write_folder(tmp_path / "head", head_config, random_head(head_config), file="mtp")
    g = torch.Generator().manual_seed(4)
    rows = [
        Row(
            torch.randint(0, 1000, (n,), generator=g).tolist(),
            SamplingParams(temperature=t, max_tokens=40, top_p=0.95),
            seed=n,
        )
        for n in (1, 5, 37, 120, 300, 511)
        for t in (0.0, 0.8)
    ]
    options = OPTIONS | {"kv_dtype": kv_dtype}
    alone = Harness(folder, k=0, max_num_seqs=1, prefix_caching=False, **options)
    want = [alone.run([row])[0].token_ids for row in rows]
    for k, budget, seqs, blocks in [(0, 4096, 12, 128), (1, 64, 7, 128), (3, 512, 12, 128), (3, 4096, 12, 24)]:
        got = run_rows(
            folder, rows, k=k, budget=budget, max_num_seqs=seqs, num_blocks=blocks, draft_folder=head, **options
        )
        assert [r.token_ids for r in got] == want, (k, budget, seqs, blocks)
