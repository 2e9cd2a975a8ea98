"""Rows made ready: columns, overrides, limits and seeds, with nothing dropped and nothing leaking."""

from collections.abc import Iterator
from typing import Any

import pytest

from specgen import seeds
from specgen.errors import RowError
from specgen.job import prompts
from specgen.job.plan import Plan
from specgen.job.prompts import Prompt, PromptBuilder
from specgen.job.readers import Row
from specgen.recipe import recipe_from_settings
from specgen.tokenizer import Tokenizer

LIMIT = 20


@pytest.fixture
def builder(tokenizer: Tokenizer) -> PromptBuilder:
    return make(tokenizer)


def make(tokenizer: Tokenizer, *sets: str) -> PromptBuilder:
    recipe = recipe_from_settings(["sampling.seed=7", "sampling.max_tokens=9", *sets])
    return PromptBuilder(recipe, tokenizer, max_model_len=LIMIT, vocab_size=4096)


def build(builder: PromptBuilder, data: dict[str, Any]) -> Prompt:
    return builder.build(Row(0, 1, data.get("id"), data))


def test_text_and_ids(builder: PromptBuilder, tokenizer: Tokenizer) -> None:
    text = build(builder, {"prompt": "Hi there"})
    assert text.token_ids == tokenizer.encode("Hi there")
    assert build(builder, {"prompt": [5, 6, 0]}).token_ids == [5, 6, 0]
    assert build(builder, {"prompt": "<|bos|>"}).token_ids == [0]
    assert build(builder, {"prompt": " "}).token_ids[0] == 0


@pytest.mark.parametrize(
    ("data", "code", "part"),
    [
        ({}, "missing_prompt", "columns: none"),
        ({"promt": "x"}, "missing_prompt", "did you mean 'promt'?"),
        ({"prompt": ""}, "empty_prompt", "prompt is empty"),
        ({"prompt": []}, "empty_prompt", "prompt is empty"),
        ({"prompt": None}, "empty_prompt", "prompt is null, or an empty cell"),
        ({"prompt": 3}, "bad_prompt", "not 3"),
        ({"prompt": {"a": 1}}, "bad_prompt", "must be a text or a list of token ids"),
        ({"prompt": [1, "a"]}, "bad_prompt", "not 'a'"),
        ({"prompt": [True]}, "bad_prompt", "not true"),
        ({"prompt": [1.0]}, "bad_prompt", "not 1.0"),
        ({"prompt": [4096]}, "bad_token_id", "0 to 4095"),
        ({"prompt": [-1]}, "bad_token_id", "token id -1"),
        ({"prompt": "a\ud800"}, "bad_text", "surrogate"),
        ({"prompt": [5] * LIMIT}, "prompt_too_long", f"{LIMIT} tokens"),
        ({"prompt": "x", "sampling": 3}, "bad_sampling", "must be an object"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "bad_sampling", "did you mean 'temperature'?"),
        ({"prompt": "x", "sampling": {"top_p": 2}}, "bad_sampling", "top_p must be"),
        ({"prompt": "x", "sampling": {"stop": ["a\ud800"]}}, "bad_sampling", "half of a surrogate pair is no text"),
        ({"prompt": "x", "sampling": {"stop_token_ids": [9999]}}, "bad_token_id", "sampling.stop_token_ids"),
        ({"prompt": "x", "sampling": {"logit_bias": {"9999": 1}}}, "bad_token_id", "sampling.logit_bias"),
        ({"prompt": "x", "sampling": {"allowed_token_ids": [9999]}}, "bad_token_id", "sampling.allowed_token_ids"),
        ({"prompt": "x", "sampling": {"bad_words_ids": [[1, 9999]]}}, "bad_token_id", "sampling.bad_words_ids"),
        ({"prompt": "x", "temprature": 1}, "bad_sampling", "'temperature'"),
        ({"prompt": "x", "temperature": 1}, "bad_sampling", "which goes under 'sampling'"),
        ({"prompt": "x", "maxTokens": 1}, "bad_sampling", "'max_tokens'"),
        ({"prompt": "x", "topk": 1}, "bad_sampling", "'top_k'"),
        ({"prompt": "x", "sampling_params": {}}, "bad_sampling", "'sampling'"),
    ],
)
def test_what_cannot_run_says_why(builder: PromptBuilder, data: dict[str, Any], code: str, part: str) -> None:
    with pytest.raises(RowError) as caught:
        build(builder, data)
    assert caught.value.code == code
    assert part in str(caught.value)


def test_a_text_whose_tokens_the_model_has_not_is_its_rows_error(tokenizer: Tokenizer) -> None:
    """Another model's tokenizer, or one with tokens that were added to it alone."""
    recipe = recipe_from_settings()
    builder = PromptBuilder(recipe, tokenizer, max_model_len=LIMIT, vocab_size=max(tokenizer.encode("Hi there")))
    assert build(builder, {"prompt": "a"}).token_ids
    with pytest.raises(RowError, match="by the model's tokenizer: token id") as caught:
        build(builder, {"prompt": "Hi there"})
    assert caught.value.code == "bad_token_id"


def test_a_row_that_may_only_end_and_must_not_is_an_error(tokenizer: Tokenizer) -> None:
    recipe = recipe_from_settings()
    builder = PromptBuilder(recipe, tokenizer, max_model_len=LIMIT, vocab_size=4096, eos_token_ids=(1,))
    assert build(builder, {"prompt": "a", "sampling": {"allowed_token_ids": [1]}}).token_ids
    with pytest.raises(RowError, match=r"sampling: allowed_token_ids must name .* that EOS leave to it") as caught:
        build(builder, {"prompt": "a", "sampling": {"allowed_token_ids": [1], "min_tokens": 2}})
    assert caught.value.code == "bad_sampling"


def test_the_limit_is_prompt_and_answer_together(builder: PromptBuilder) -> None:
    assert len(build(builder, {"prompt": [5] * (LIMIT - 1)}).token_ids) == LIMIT - 1
    with pytest.raises(RowError, match=f"{LIMIT} tokens.*max_model_len = {LIMIT}.*input.truncate"):
        build(builder, {"prompt": [5] * LIMIT})


def test_users_columns_are_left_alone(builder: PromptBuilder) -> None:
    data = {"prompt": "x", "speed": 1, "topic": 2, "tokens": 3, "model": 4, "top": 5, "sample": 6, "sampling": None}
    assert build(builder, data).params.max_tokens == 9


def test_own_column_names_may_be_a_parameters(tokenizer: Tokenizer) -> None:
    builder = make(tokenizer, "input.prompt=seed", "input.id=temperature")
    assert build(builder, {"seed": "x", "temperature": "row 1"}).token_ids == tokenizer.encode("x")


def test_columns_that_are_kept_are_the_users(tokenizer: Tokenizer) -> None:
    builder = make(tokenizer, "input.keep=[seed, sampling_params]")
    data = {"prompt": "x", "seed": 5, "sampling_params": {}, "sampling": {"max_tokens": 3}}
    built = build(builder, data)
    assert built.params.max_tokens == 3
    assert built.seed == build(make(tokenizer), {"prompt": "x"}).seed
    with pytest.raises(RowError, match=r"'topk' looks like .*name it under input\.keep"):
        build(builder, data | {"topk": 1})
    assert (
        build(make(tokenizer, "input.keep=[sampling]"), {"prompt": "x", "sampling": "poisson"}).params.max_tokens == 9
    )


def test_overrides_do_not_leak_into_other_rows(builder: PromptBuilder) -> None:
    rows: list[dict[str, Any]] = [{"max_tokens": 2}, {}, {"temperature": 0}, {"max_tokens": None}, {}]
    built = [build(builder, {"prompt": "x", "id": i, "sampling": row}).params for i, row in enumerate(rows)]
    assert [params.max_tokens for params in built] == [2, 9, 9, None, 9]
    assert [params.temperature for params in built] == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_seed_follows_the_id_and_not_the_place(tokenizer: Tokenizer) -> None:
    one, two = make(tokenizer), make(tokenizer)
    rows = [{"prompt": "x", "id": name} for name in "abc"]
    forwards = [build(one, row).seed for row in rows]
    backwards = [build(two, row).seed for row in reversed(rows)]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == 3
    assert forwards[0] == seeds.row_seed(7, seeds.row_key_of_id("a"))


def test_rows_without_id_are_keyed_by_content_and_occurrence(tokenizer: Tokenizer) -> None:
    builder = make(tokenizer)
    prompts = ["x", "y", "x", "x"]
    built = [build(builder, {"prompt": prompt}).seed for prompt in prompts]
    assert len(set(built)) == 4
    other = make(tokenizer)
    build(other, {"prompt": "new first row"})
    assert [build(other, {"prompt": prompt}).seed for prompt in prompts] == built


def test_a_rows_own_seed_repeats_the_prompt_anywhere(tokenizer: Tokenizer) -> None:
    def seed(prompt: str, own: int | None, row_id: str, run_seed: int) -> int:
        builder = make(tokenizer, f"sampling.seed={run_seed}")
        return build(builder, {"prompt": prompt, "id": row_id, "sampling": {"seed": own}}).seed

    assert seed("x", 5, "a", 1) == seed("x", 5, "b", 2)
    assert seed("x", 5, "a", 1) != seed("y", 5, "a", 1)
    assert seed("x", 5, "a", 1) != seed("x", 6, "a", 1)
    assert seed("x", None, "a", 1) == seeds.row_seed(1, seeds.row_key_of_id("a"))


def test_a_drawn_run_seed_gives_every_row_its_own(tokenizer: Tokenizer) -> None:
    builder = PromptBuilder(recipe_from_settings(), tokenizer, max_model_len=LIMIT, vocab_size=4096)
    assert len({build(builder, {"prompt": "x"}).seed for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("sets", "kept"),
    [
        (["input.truncate=left"], [0, *range(25, 35)]),  # 20 - 9 tokens of an answer
        (["input.truncate=middle"], [0, *range(1, 6), *range(30, 35)]),
        (["input.truncate=left", "sampling.max_tokens=null"], [0, *range(17, 35)]),
        (["input.truncate=left", "sampling.max_tokens=15"], [0, *range(26, 35)]),  # at least half
        (["input.truncate=left", "input.max_prompt_tokens=4"], [0, 32, 33, 34]),
        (["input.truncate=middle", "input.max_prompt_tokens=4"], [0, 1, 33, 34]),
        (["input.truncate=middle", "input.max_prompt_tokens=1"], [0]),
    ],
)
def test_a_prompt_is_cut_to_an_exact_length(tokenizer: Tokenizer, sets: list[str], kept: list[int]) -> None:
    builder = make(tokenizer, *sets)
    built = build(builder, {"prompt": list(range(35))})
    assert built.token_ids == kept
    assert built.truncated_from == 35
    assert build(builder, {"prompt": [5]}).truncated_from is None


def test_a_prompt_without_bos_keeps_its_last_tokens(tokenizer: Tokenizer) -> None:
    builder = make(tokenizer, "input.truncate=left", "input.max_prompt_tokens=3")
    assert build(builder, {"prompt": [5, 6, 7, 8]}).token_ids == [6, 7, 8]


def test_a_limit_of_the_recipes_is_an_error_without_truncation(tokenizer: Tokenizer) -> None:
    builder = make(tokenizer, "input.max_prompt_tokens=3")
    assert len(build(builder, {"prompt": [5] * 3}).token_ids) == 3
    with pytest.raises(RowError, match=r"4 tokens; the limit is input\.max_prompt_tokens = 3"):
        build(builder, {"prompt": [5] * 4})


def test_ids_that_may_repeat_are_rows_of_their_own(tokenizer: Tokenizer) -> None:
    builder = make(tokenizer, "input.duplicate_ids=keep")
    built = [build(builder, {"prompt": "x", "id": name}).seed for name in ("a", "a", "b", "a", "a:1", "again:1:a")]
    assert len(set(built)) == 6
    assert built[0] == seeds.row_seed(7, seeds.row_key_of_id("a"))


def test_a_tables_cell_may_hold_the_overrides_as_json(builder: PromptBuilder) -> None:
    assert build(builder, {"prompt": "x", "sampling": '{"max_tokens": 3}'}).params.max_tokens == 3
    for cell, part in (
        ("{broken", "sampling is not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"top_k": 1, "top_k": 2}', "sampling is not usable JSON: key 'top_k' is given twice"),
        ('{"top_p": NaN}', "NaN is not JSON"),
        ('{"a":' * 100_000, "nested more than 100 deep"),
        ("[1]", "sampling must be an object"),
    ):
        with pytest.raises(RowError, match=part) as caught:
            build(builder, {"prompt": "x", "sampling": cell})
        assert caught.value.code == "bad_sampling"


def test_prompts_made_together_are_those_made_alone_in_their_order(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_BATCH_ROWS", 7)
    monkeypatch.setattr(prompts, "_BATCH_SIZE", 300)
    contents: list[Any] = ["<|bos|>once", "a story " * 60, "", [5, 6], [9999], "x\ud800", "word " * 9, " ", "ü"]
    rows = [Row(i, i + 1, None, {"prompt": contents[i % len(contents)]}) for i in range(100)]
    builder = make(tokenizer)
    taken = 0

    def plans() -> Iterator[Plan]:
        nonlocal taken
        for row in rows:
            taken += 1
            yield plan_of(row)

    plan_of = builder._planner.plan
    found = []
    for plan, prompt in builder.build_all(plans()):
        assert taken <= len(found) + 7
        found.append((plan.row.line, prompt if isinstance(prompt, Prompt) else str(prompt)))
    alone = make(tokenizer)
    wanted = []
    for row in rows:
        try:
            wanted.append((row.line, alone.build(row)))
        except RowError as error:
            wanted.append((row.line, str(error)))
    assert found == wanted
    assert {type(prompt) for _, prompt in found} == {Prompt, str}
