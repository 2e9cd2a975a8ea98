"""Rows that begin alike, brought together: a cache that holds one beginning finds it, and the answers stay."""

import json
import random
from pathlib import Path
from typing import Any

from specgen.engine.client import EngineClient
from specgen.job.inputs import Input
from specgen.job.session import Session
from specgen.job.target import Target
from specgen.model_path import resolve_model
from specgen.recipe import recipe_from_settings
from specgen.tokenizer import Tokenizer


def run(folder: Path, tokenizer: Tokenizer, *, group: bool) -> tuple[int, bytes]:
    """Return the cached tokens of all answers, and the answers without what tells of the cache."""
    output = folder / f"{group}.jsonl"
    settings: dict[str, Any] = {
        "model.path": "stories-7m",
        "model.device": "cpu",
        "sampling.max_tokens": 2,
        "sampling.seed": 7,
        "input.path": str(folder / "in.jsonl"),
        "output.path": str(output),
        "engine.max_num_seqs": 2,
        "engine.max_model_len": 80,
        "engine.block_size": 8,
        "engine.num_blocks": 14,  # one beginning, and two rows behind it
        "engine.group_prefixes": group,
    }
    recipe = recipe_from_settings(overrides=settings)
    model = resolve_model("stories-7m")
    session = Session(recipe, model, tokenizer, Input(recipe.input), Target(str(output), fresh=True))
    with EngineClient.create(recipe, model, [1]) as engine:
        session.run(engine)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    cached = sum(record["usage"].pop("cached_tokens") for record in records)
    return cached, json.dumps(records).encode()


def test_a_small_cache_finds_three_times_as_much(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    prefixes = [[rng.randrange(10, 4000) for _ in range(64)] for _ in range(3)]
    rows = [{"id": i, "prompt": [*prefixes[i % 3], 100 + i, 5, 6]} for i in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    unsorted, plain = run(tmp_path, tokenizer, group=False)
    grouped, same = run(tmp_path, tokenizer, group=True)
    assert same == plain
    assert grouped >= 54 * 56
    assert grouped >= 3 * unsorted
