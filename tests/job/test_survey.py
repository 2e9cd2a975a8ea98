"""What a pass over the rows finds: counts, lengths, and how much the KV pool should hold, by hand-made numbers."""

from typing import Any

import pytest

from specgen.errors import RowError
from specgen.job.plan import RowPlanner
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row
from specgen.job.survey import Survey, survey
from specgen.recipe import recipe_from_settings
from specgen.tokenizer import Tokenizer

LIMIT = 100


def look(tokenizer: Tokenizer, rows: list[Any], *sets: str, num_at_once: int = 2) -> tuple[Survey, list[str]]:
    recipe = recipe_from_settings(["sampling.seed=7", *sets])
    planner = RowPlanner(recipe)
    prompts = PromptBuilder(recipe, tokenizer, max_model_len=LIMIT, vocab_size=4096, planner=planner)
    told: list[str] = []

    def on_bad(row: Row | BadRow, error: RowError) -> None:
        told.append(f"{row.line}: {error.code}")

    given = [Row(i, i + 1, None, data) if isinstance(data, dict) else data for i, data in enumerate(rows)]
    plans = planner.plans(given)
    return survey(plans, prompts, max_model_len=LIMIT, num_at_once=num_at_once, on_bad=on_bad), told


def prompt(length: int, **sampling: Any) -> dict[str, Any]:
    return {"prompt": [5] * length, "sampling": sampling}


def test_counts_lengths_and_reasons(tokenizer: Tokenizer) -> None:
    broken = BadRow(3, 4, RowError("cut", code="bad_json"))
    rows = [prompt(1), prompt(2), {"prompt": ""}, broken, prompt(3), prompt(4), prompt(5, n=3), prompt(LIMIT)]
    found, told = look(tokenizer, rows)
    assert told == ["3: empty_prompt", "4: bad_json", "8: prompt_too_long"]
    assert (found.rows, found.ok, found.bad, found.samples) == (8, 5, 3, 7)
    assert dict(found.error_codes) == {"empty_prompt": 1, "bad_json": 1, "prompt_too_long": 1}
    assert found.prompt_tokens == 1 + 2 + 3 + 4 + 5
    assert found.histogram() == [(1, 1, 1), (2, 2, 1), (3, 4, 2), (5, 8, 1)]
    assert found.truncated == 0


def test_a_range_without_rows_is_shown_between_others(tokenizer: Tokenizer) -> None:
    found, _ = look(tokenizer, [prompt(1), prompt(9)])
    assert found.histogram() == [(1, 1, 1), (2, 2, 0), (3, 4, 0), (5, 8, 0), (9, 16, 1)]
    assert look(tokenizer, [{"prompt": ""}])[0].histogram() == []


@pytest.mark.parametrize(
    ("rows", "longest"),
    [
        ([prompt(10, max_tokens=5), prompt(20, max_tokens=1), prompt(4, max_tokens=9)], 15 + 21),
        ([prompt(10, max_tokens=5, n=3), prompt(4, max_tokens=9)], 15 + 15),
        ([prompt(10, max_tokens=5)], 15),
        ([prompt(10), prompt(10, max_tokens=500), prompt(10, max_tokens=1)], LIMIT + LIMIT),
    ],
)
def test_the_longest_answers_that_are_there_at_once(tokenizer: Tokenizer, rows: list[Any], longest: int) -> None:
    assert look(tokenizer, rows)[0].longest == longest


def test_prompts_that_are_cut_are_counted_as_they_are_run(tokenizer: Tokenizer) -> None:
    sets = ("input.truncate=left", "input.max_prompt_tokens=6")
    found, told = look(tokenizer, [prompt(500), prompt(6), prompt(7)], *sets)
    assert (found.truncated, found.prompt_tokens, told) == (2, 18, [])
