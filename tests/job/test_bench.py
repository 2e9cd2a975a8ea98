"""The benchmark's arithmetic and its fairness, on a scripted engine."""

from typing import Any

import pytest

from specgen.engine.request import EngineRequest
from specgen.errors import EngineError, InputError
from specgen.job.bench import BenchResult, Round, Side, read_bench_rows, run_bench
from specgen.recipe import Recipe
from specgen.stats import SpecStats


def rows_of(workplace: Any, count: int) -> tuple[Recipe, Any]:
    workplace.write([{"id": i, "prompt": f"story {i}"} for i in range(count)])
    recipe = workplace.recipe("speculation.num_tokens=2")
    return recipe, read_bench_rows(recipe, count)


def test_sides_alternate_on_fresh_engines_and_the_same_rows(workplace: Any, fake_engine: Any) -> None:
    recipe, rows = rows_of(workplace, 5)
    made: list[tuple[int, Any]] = []

    def make_engine(side: Recipe) -> Any:
        engine = fake_engine()
        made.append((side.speculation.num_tokens, engine))
        return engine

    told: list[str] = []
    result = run_bench(recipe, rows, workplace.tokenizer, make_engine, num_rounds=3, on_round=told.append)
    assert [k for k, _ in made] == [0, 2, 2, 0, 0, 2]
    assert len({id(engine) for _, engine in made}) == 6
    for _, engine in made:
        warm_up, *measured = engine.requests
        assert measured == made[0][1].requests[1:]
        assert warm_up.params.max_tokens == 8
        assert warm_up.prompt_token_ids == measured[0].prompt_token_ids[::-1]
    assert told[0] == "round 1 of 3, 0 drafts a step"
    assert result.num_different_rows == 0
    assert result.prompt_tokens == sum(len(r.prompt_token_ids) for r in made[0][1].requests[1:])
    assert len(result.plain.rounds) == len(result.speculative.rounds) == 3


def test_different_tokens_are_found(workplace: Any, fake_engine: Any) -> None:
    recipe, rows = rows_of(workplace, 4)

    def make_engine(side: Recipe) -> Any:
        def script(request: EngineRequest) -> tuple[list[int], str]:
            return [5, 6 if side.speculation.num_tokens and request.request_id == 2 else 7], "length"

        return fake_engine(script)

    result = run_bench(recipe, rows, workplace.tokenizer, make_engine, num_rounds=1)
    assert result.num_different_rows == 1
    assert result.as_dict()["equal"] is False


def test_figures_are_medians_over_rounds() -> None:
    def side(num_tokens: int, speeds: list[float]) -> Side:
        engine = {"steps": 10.0, "target_seconds": 0.2, "sampling_seconds": 0.1, "draft_seconds": 0.05}
        return Side(num_tokens, [Round(100 / speed, 100, SpecStats(), engine, {0: [1]}) for speed in speeds])

    result = BenchResult(1, 3, side(0, [10.0, 50.0, 20.0]), side(3, [60.0, 1.0, 50.0]))
    assert result.plain.tokens_per_second == pytest.approx(20.0)
    assert result.speedup == pytest.approx(2.5)
    assert result.plain.ms_per_step("target") == pytest.approx(20.0)
    assert result.plain.ms_per_step("total") == pytest.approx(500.0)


def test_a_bad_row_is_named(workplace: Any, fake_engine: Any) -> None:
    workplace.write(["broken"])
    with pytest.raises(InputError, match=r"in\.jsonl:1: .*not JSON"):
        read_bench_rows(workplace.recipe(), 3)
    workplace.write([])
    with pytest.raises(InputError, match="no rows"):
        read_bench_rows(workplace.recipe(), 3)
    workplace.write([{"prompt": ""}])
    recipe = workplace.recipe()
    rows = read_bench_rows(recipe, 3)
    with pytest.raises(InputError, match=r"in\.jsonl:1: prompt is empty"):
        run_bench(recipe, rows, workplace.tokenizer, lambda side: fake_engine())


def test_a_failing_row_ends_the_benchmark(workplace: Any, fake_engine: Any) -> None:
    recipe, rows = rows_of(workplace, 2)

    def script(request: EngineRequest) -> tuple[list[int], str]:
        return [5], "error" if request.request_id == 1 else "length"

    with pytest.raises(EngineError, match="row 1 failed: scripted failure"):
        run_bench(recipe, rows, workplace.tokenizer, lambda side: fake_engine(script))
