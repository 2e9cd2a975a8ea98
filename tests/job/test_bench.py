"""The benchmark's arithmetic and its fairness, on a scripted engine."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specgen.cli.render_bench import show_bench
from specgen.engine.request import EngineRequest
from specgen.errors import EngineError, InputError, RecipeError
from specgen.job import passes
from specgen.job.bench import BenchPlan, Candidate, run_bench
from specgen.job.bench_figures import Machine, Round, Shape
from specgen.job.bench_result import BenchResult, Case, Side
from specgen.job.floor import Ceilings, Cost, Op
from specgen.job.passes import drain, traced
from specgen.job.templates import ChatTemplate
from specgen.job.trace import Traced
from specgen.job.workloads import Workload, parse_shapes, read_bench_rows, rows_workload, shape_workload
from specgen.recipe import Recipe
from specgen.sampling_params import SamplingParams
from specgen.stats import SpecStats
from specgen.worker.timing import DecodeTimes


def rows_of(workplace: Any, count: int, *ks: int) -> BenchPlan:
    workplace.write([{"id": i, "prompt": f"story {i}"} for i in range(count)])
    recipes = [workplace.recipe(f"speculation.num_tokens={k}") for k in ks or (0, 2)]
    candidates = [Candidate(recipe) for recipe in recipes]
    return BenchPlan(candidates, [rows_workload(read_bench_rows(recipes[0], count), workplace.tokenizer)])


def with_rounds(plan: BenchPlan, num_rounds: int) -> BenchPlan:
    return replace(plan, num_rounds=num_rounds)


def test_sides_alternate_on_fresh_engines_and_the_same_rows(workplace: Any, fake_engine: Any) -> None:
    made: list[tuple[int, Any]] = []

    def make_engine(side: Candidate) -> Any:
        engine = fake_engine()
        made.append((side.num_drafts, engine))
        return engine

    told: list[str] = []
    result = run_bench(rows_of(workplace, 5), make_engine, on_note=told.append)
    assert [k for k, _ in made] == [0, 2, 2, 0, 0, 2]
    assert len({id(engine) for _, engine in made}) == 6
    for _, engine in made:
        warm_up, *measured = engine.requests
        assert measured == made[0][1].requests[1:]
        assert warm_up.params.max_tokens == 8
        assert warm_up.prompt_token_ids == measured[0].prompt_token_ids[::-1]
    assert told[0] == "round 1 of 3, 0 drafts a step"
    (case,) = result.cases
    assert case.num_different_rows == 0
    assert case.prompt_tokens == sum(len(r.prompt_token_ids) for r in made[0][1].requests[1:])
    assert [len(side.rounds) for side in case.sides] == [3, 3]


def test_shapes_share_an_engine_of_each_k(workplace: Any, fake_engine: Any) -> None:
    """Every shape: a warm-up like the real thing, then the rounds; prompts of their length, the same for every K."""
    shapes = [Shape(2, 7, 3), Shape(3, 5, 4)]
    recipes = [workplace.recipe(f"speculation.num_tokens={k}", "sampling.max_tokens=50") for k in (0, 1, 3)]
    made: list[Any] = []

    def make_engine(side: Candidate) -> Any:
        made.append(fake_engine())
        made[-1].decode_rows = 2
        return made[-1]

    candidates = [Candidate(recipe) for recipe in recipes]
    plan = BenchPlan(candidates, [shape_workload(s) for s in shapes], num_rounds=2, keep_engine=True, full_warm_up=True)
    result = run_bench(plan, make_engine)
    assert len(made) == 3
    for engine in made:
        # three rows never decoded together in the rounds of the second shape: a pass has nothing else
        assert [(len(r.prompt_token_ids), r.params.max_tokens) for r in engine.requests] == [(7, 3)] * 6 + [(5, 4)] * 12
        assert [r.num_given_tokens for r in engine.requests] == [0] * 15 + [4] * 3
        assert all(r.params.ignore_eos for r in engine.requests)
        warm_up, first, second = engine.requests[:2], engine.requests[2:4], engine.requests[4:6]
        assert first == second
        assert [r.prompt_token_ids[::-1] for r in warm_up] == [r.prompt_token_ids for r in first]
        assert first == made[0].requests[2:4]
        assert len({r.seed for r in first}) == 2
    assert [(case.shape, case.rows, [side.num_tokens for side in case.sides]) for case in result.cases] == [
        (shapes[0], 2, [0, 1, 3]),
        (shapes[1], 3, [0, 1, 3]),
    ]
    written: Any = result.as_dict()
    assert [case["shape"] for case in written["cases"]] == ["2x7x3", "3x5x4"]
    assert [[side["decoded_alone"] for side in case["sides"]] for case in written["cases"]] == [[False] * 3, [True] * 3]
    assert [engine["weight_bytes_per_second"] for engine in written["engines"]] == [2_000_000_000] * 3


def test_shapes_are_read() -> None:
    assert parse_shapes(["1x512x256, 32x16x8", "2x3x4"]) == [Shape(1, 512, 256), Shape(32, 16, 8), Shape(2, 3, 4)]
    assert str(Shape(1, 512, 256)) == "1x512x256"
    for wrong in ("1x2", "1x2x0", "axbxc", "1x2x3,", ""):
        with pytest.raises(RecipeError, match=r"--shape: .* is no shape"):
            parse_shapes([wrong])


def test_parts_of_a_single_launch_are_timed_in_a_pass_of_their_own(workplace: Any, fake_engine: Any) -> None:
    made: list[Any] = []

    def make_engine(side: Candidate) -> Any:
        engine = fake_engine()
        engine.tells_parts = engine.always_tells_parts = False
        made.append(engine)
        return engine

    result = run_bench(with_rounds(rows_of(workplace, 3, 2), 2), make_engine)
    assert [len(engine.requests) for engine in made] == [1 + 3, 1 + 3 + 3], "only the last round is followed by one"
    decode = result.cases[0].sides[0].decode(10.0, Machine(None, None))
    assert decode is not None
    assert decode.parts == pytest.approx({"target": 0.001, "sampling": 0.0003, "draft": 0.0002})
    assert not made[-1].tells_parts, "the timer is left as it was"


class _TracingMixin:
    """Writes an empty trace at once, and says that 3 and 40 rows decoded."""

    def decode_times(self) -> dict[int, DecodeTimes]:
        self.asked = getattr(self, "asked", 0) + 1
        return {n: DecodeTimes(n * self.asked, 0.1, n * self.asked, 0.1 * self.asked * n) for n in (3, 40)}

    def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
        self.traced.append((path, num_rows, num_steps))  # type: ignore[attr-defined]
        path.write_bytes(gzip.compress(b'{"traceEvents": []}') if path.suffix == ".gz" else b'{"traceEvents": []}')


def test_a_trace_is_of_the_steady_rows_and_named_by_what_it_shows(workplace: Any, fake_engine: Any) -> None:
    """All rounds of all sides are timed before any step is traced, on engines of their own that stop in time."""
    made: list[Any] = []

    class Tracing(_TracingMixin, fake_engine):  # type: ignore[misc]
        pass

    def make_engine(side: Candidate) -> Any:
        made.append(Tracing())
        return made[-1]

    folder = workplace.folder
    (folder / "t-k2.json.gz").write_text("of an earlier run")
    plan = replace(rows_of(workplace, 2), num_rounds=1, traces=True, trace_path=folder / "t.json.gz")
    run_bench(plan, make_engine)
    assert [engine.traced for engine in made] == [
        *[[], []],
        [(folder / "t-k0.json.gz", 40, 32)],
        [(folder / "t-k2.json.gz", 40, 32)],
    ]
    assert [len(engine.aborted) for engine in made] == [0, 0, 2, 2]
    assert all(engine.aborted == [r.request_id for r in engine.requests[-2:]] for engine in made[2:])
    assert min(made[2].aborted) > 1_000_000, "ids that nobody else has: steps in flight may still name them"


def test_the_last_side_of_shapes_is_traced_where_it_was_timed(workplace: Any, fake_engine: Any) -> None:
    made: list[tuple[int, Any]] = []

    class Tracing(_TracingMixin, fake_engine):  # type: ignore[misc]
        pass

    def make_engine(side: Candidate) -> Any:
        made.append((side.num_drafts, Tracing(lambda request: ([5] * 3, "length"))))
        return made[-1][1]

    candidates = [Candidate(workplace.recipe(f"speculation.num_tokens={k}")) for k in (0, 1)]
    plan = BenchPlan(candidates, [shape_workload(Shape(40, 5, 3))], num_rounds=1, keep_engine=True, traces=True)
    told: list[str] = []
    seen: list[list[int]] = []
    result = run_bench(
        plan,
        make_engine,
        on_note=told.append,
        on_result=lambda result: seen.append([side.num_tokens for side in result.cases[0].sides]),
    )
    assert [(k, len(engine.traced)) for k, engine in made] == [(0, 0), (1, 1), (0, 1)]
    given = {request.num_given_tokens for request in made[2][1].requests}
    assert given == {4}, "nothing is read again for a trace"
    assert seen == [[0], [0, 1], [0, 1], [0, 1]], "what is known is handed on"
    assert told.index("round 1 of 1, 1 draft a step, 40x5x3") < min(i for i, t in enumerate(told) if "tracing" in t)
    assert result.cases[0].sides[0].idle is None, "the trace shows no device"


def test_skipped_prompts_are_never_read_and_their_tokens_mean_nothing(workplace: Any, fake_engine: Any) -> None:
    made: list[Any] = []

    def make_engine(side: Candidate) -> Any:
        made.append(fake_engine())
        made[-1].description["kv_tokens"] = 20
        return made[-1]

    told: list[str] = []
    plan = BenchPlan(
        [Candidate(workplace.recipe())],
        [shape_workload(Shape(4, 7, 3))],
        keep_engine=True,
        full_warm_up=True,
        skips_prompts=True,
    )
    result = run_bench(plan, make_engine, on_note=told.append)
    assert {request.num_given_tokens for request in made[0].requests} == {6}
    written: Any = result.as_dict()
    assert written["skips_prompts"] is True and written["cases"][0]["equal"] is None
    assert "4x7x3, 4 rows at once, is 40 tokens and the KV pool holds 20: rows will wait" in told


@pytest.mark.parametrize(("at_once", "alone"), [(2, False), (4, True)])
def test_of_more_rows_than_the_engine_takes_the_steps_are_those_of_as_many(
    workplace: Any, fake_engine: Any, at_once: int, alone: bool
) -> None:
    class TwoAtOnce(fake_engine):  # type: ignore[misc]
        def decode_times(self) -> dict[int, DecodeTimes]:
            steps = 100 * len(self.requests)
            return {2: DecodeTimes(steps, 0.01 * steps, steps, 0.01 * steps)}

    def make_engine(side: Candidate) -> Any:
        made = TwoAtOnce()
        made.description |= {"kv_tokens": 30, "max_num_seqs": at_once}
        return made

    told: list[str] = []
    plan = BenchPlan([Candidate(workplace.recipe())], [shape_workload(Shape(4, 7, 3))], num_rounds=1)
    run_bench(plan, make_engine, on_note=told.append)
    assert any("decoding alone" in note for note in told) == alone
    assert any("rows will wait" in note for note in told) == alone


def test_different_tokens_are_found(workplace: Any, fake_engine: Any) -> None:
    def make_engine(side: Candidate) -> Any:
        def script(request: EngineRequest) -> tuple[list[int], str]:
            return [5, 6 if side.num_drafts and request.request_id == 2 else 7], "length"

        return fake_engine(script)

    result = run_bench(with_rounds(rows_of(workplace, 4), 1), make_engine)
    assert result.cases[0].num_different_rows == 1
    assert result.as_dict()["cases"][0]["equal"] is False  # type: ignore[index]


def side(num_tokens: int, speeds: list[float], decode: dict[int, DecodeTimes] | None = None) -> Side:
    engine = {"steps": 10.0, "target_seconds": 0.2, "sampling_seconds": 0.1, "draft_seconds": 0.05}
    rounds = [Round(100 / speed, 100, SpecStats(), engine, {0: [1]}, decode or {}) for speed in speeds]
    return Side(num_tokens, 512, rounds=rounds)


def test_figures_are_medians_over_rounds() -> None:
    case = Case(None, 1, 3, [side(0, [10.0, 50.0, 20.0]), side(3, [60.0, 1.0, 50.0])])
    plain, speculative = case.sides
    assert plain.tokens_per_second == pytest.approx(20.0)
    assert case.ratio(speculative) == pytest.approx(2.5)
    assert plain.ms_per_step("target") == pytest.approx(20.0)
    assert plain.ms_per_step("total") == pytest.approx(500.0)
    assert plain.decode(10, Machine(None, None)) is None
    assert case.plain_of(speculative) is plain
    assert case.context(plain) == 53


class _FlatCost:
    """Every decode step moves 8 GB a row; a prefill 4 GB."""

    def decode(self, rows: float, context: float, num_drafts: int) -> Cost:
        return Cost((Op("target", "x", 8e9 * rows, 1e12),))

    def prefill(self, *args: float) -> Cost:
        return Cost((Op("target", "x", 4e9, 0),))


def test_the_steady_step_and_its_floor() -> None:
    """Four rows: 20 steps of 10 ms, 8 of them work, and of one row a tail; 1 TB/s makes a floor of 32 ms for 4 rows."""
    parts = {"target": 0.1, "sampling": 0.04, "draft": 0.02}
    decode = {4: DecodeTimes(20, 0.16, 20, 0.2, 20, parts), 1: DecodeTimes(5, 0.03, 5, 0.04, 5, parts)}
    machine = Machine(Ceilings(1e12, 1e15), _FlatCost())  # type: ignore[arg-type]
    steady = side(0, [1.0], decode)
    figures = steady.decode(100, machine)
    assert figures is not None
    assert (figures.rows, figures.context) == (4, 100)
    assert (figures.period, figures.device, figures.gap) == pytest.approx((0.010, 0.008, 0.002))
    assert figures.parts == pytest.approx({"target": 0.005, "sampling": 0.002, "draft": 0.001})
    assert figures.floor == pytest.approx(0.032)
    assert figures.floor_share == pytest.approx(3.2)
    written = figures.as_dict()
    assert (written["ms"], written["gap_ms"], written["bytes_per_second"]) == (10.0, 2.0, 3.2e12)
    # prefill 4 ms, 20 steps of 32 ms, 5 of 8 ms, in 100 s
    assert steady.run_floor_share(Shape(4, 10, 10), machine) == pytest.approx((0.004 + 0.64 + 0.04) / 100)
    result = BenchResult([Case(Shape(4, 10, 10), 4, 40, [steady])], machine)
    assert result.as_dict()["cases"][0]["sides"][0]["decode"]["floor_ms"] == 32.0  # type: ignore[index]


def test_a_step_is_the_median_one() -> None:
    """Nine steps of 10 ms and one of 910, in which something was captured: 10 ms, where the mean is 100."""
    times = DecodeTimes(10, 0.98, 10, 1.0, last_seconds=[0.008] * 9 + [0.908], last_periods=[0.01] * 9 + [0.91])
    figures = side(0, [1.0], {4: times}).decode(100, Machine(None, None))
    assert figures is not None
    assert (figures.period, figures.device) == (0.01, 0.008)


def test_sides_of_two_modes_and_without_a_head_are_compared_with_their_like() -> None:
    def of(num_tokens: int, speed: float, exactness: str, token: int, *, is_headless: bool = False) -> Side:
        found = side(num_tokens, [speed])
        found.exactness, found.is_headless = exactness, is_headless
        found.rounds[0].token_ids[0] = [token]
        return found

    headless = of(0, 10.0, "exact", 1, is_headless=True)
    exact = [headless, of(0, 10.1, "exact", 1), of(3, 20.0, "exact", 1)]
    fast = [of(0, 11.0, "fast", 2), of(3, 33.0, "fast", 3)]
    first = BenchResult([Case(Shape(1, 3, 1), 1, 3, exact)])
    result = first.joined(BenchResult([Case(Shape(1, 3, 1), 1, 3, fast)]))
    (case,) = result.cases
    assert [case.ratio(s) for s in case.sides] == pytest.approx([10 / 10.1, 1, 20 / 10.1, 1, 3])
    assert case.other(case.sides[2], "fast") is fast[1]
    assert case.num_different_rows == 0, "fast promises nothing"
    assert len(first.cases[0].sides) == 3, "the parts stay as they are"


def test_a_trace_gives_attentions_share_of_its_floor() -> None:
    """Attention of 4 rows moves 4 GB, 4 ms at 1 TB/s; its kernels took 5 ms of the 8 ms in which a step was busy."""

    class AttentionCost:
        def decode(self, rows: float, context: float, num_drafts: int) -> Cost:
            return Cost(
                (Op("target", "attention", 3e9, 0), Op("draft", "attention", 1e9, 0), Op("target", "mlp", 1, 0))
            )

        def prefill(self, *args: float) -> Cost:
            return Cost(())

    machine = Machine(Ceilings(1e12, 1e15), AttentionCost())  # type: ignore[arg-type]
    steady = side(1, [1.0], {4: DecodeTimes(20, 0.16, 20, 0.2)})
    steady.traced = Traced(num_steps=9, period=0.011, busy=0.008, attention=0.005)
    written: Any = BenchResult([Case(Shape(4, 10, 10), 4, 40, [steady])], machine).as_dict()
    assert written["cases"][0]["sides"][0]["trace"] == {
        "steps": 9,
        "ms": 11.0,
        "busy_ms": 8.0,
        "idle_share": 0.2,
        "attention_ms": 5.0,
        "attention_floor_ms": 4.0,
        "attention_floor_share": 0.8,
    }


def test_what_is_shown_of_starts_and_traces(workplace: Any, fake_engine: Any, capsys: Any) -> None:
    """A trace of 12 graph launches of 100 us, 60 of them in one kernel of attention."""

    class Tracing(fake_engine):  # type: ignore[misc]
        def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
            events = [
                {
                    **{"ph": "X", "cat": "kernel", "name": "mla_split_kernel", "ts": 100.0 * i, "dur": 60.0},
                    "args": {"correlation": i, "graph id": 2},
                }
                for i in range(12)
            ]
            path.write_text(json.dumps({"traceEvents": events}))

    def make_engine(side: Candidate) -> Any:
        engine = Tracing(lambda request: ([5] * 3, "length"))
        engine.description |= {"kv_tokens": 640, "memory": {"kv": 1_000_000, "left": 4_000_000, "used": 3_000_000}}
        return engine

    plan = BenchPlan(
        [Candidate(workplace.recipe(f"speculation.num_tokens={k}")) for k in (0, 2)],
        [shape_workload(Shape(4, 5, 3))],
        keep_engine=True,
        traces=True,
    )
    result = run_bench(plan, make_engine)
    written: Any = result.as_dict()
    assert [engine["kv_room"] for engine in written["engines"]] == [3200, 3200]
    for side in written["cases"][0]["sides"]:
        assert side["idle"] == pytest.approx({"between": 0.4, "within": 0.0})
        # a step without a profiler takes the fake 2 ms
        assert (side["trace"]["ms"], side["trace"]["busy_ms"], side["trace"]["idle_share"]) == (0.1, 0.06, 0.97)
    show_bench(result, to_stderr=False)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert ["0", "0.00 GB: 0.0 s (2.0 GB/s)", "0.0", "0.5"] in [line[:4] for line in cells]
    assert ["640", "3,200", "0.00", "0.00", "", "", "0.00"] in [line[-7:] for line in cells]
    assert ["4x5x3", "2", "0.10", "0.06", "40.0%", "0.0%", "97.0%", "0.060", "", ""] in cells


def test_a_bad_row_is_named(workplace: Any, fake_engine: Any) -> None:
    workplace.write(["broken"])
    with pytest.raises(InputError, match=r"in\.jsonl:1: .*not JSON"):
        read_bench_rows(workplace.recipe(), 3)
    workplace.write([])
    with pytest.raises(InputError, match="no rows"):
        read_bench_rows(workplace.recipe(), 3)
    workplace.write([{"prompt": ""}])
    recipe = workplace.recipe()
    workload = rows_workload(read_bench_rows(recipe, 3), workplace.tokenizer)
    with pytest.raises(InputError, match=r"in\.jsonl:1: prompt is empty"):
        run_bench(BenchPlan([Candidate(recipe)], [workload]), lambda side: fake_engine())


def test_rows_with_stop_strings_bring_their_check_and_shapes_run_to_their_end(workplace: Any, fake_engine: Any) -> None:
    workplace.write([{"id": 1, "prompt": "story"}])
    recipe = workplace.recipe("sampling.stop=[end]")
    (request,) = rows_workload(read_bench_rows(recipe, 1), workplace.tokenizer).requests(recipe, fake_engine())
    assert request.params.stop == ("end",)
    assert request.new_stop_check is not None and request.new_stop_check() is not request.new_stop_check()
    (request,) = shape_workload(Shape(1, 3, 5)).requests(recipe, fake_engine())
    assert request.params.stop == () and request.new_stop_check is None


def test_a_failing_row_ends_the_benchmark(workplace: Any, fake_engine: Any) -> None:
    def script(request: EngineRequest) -> tuple[list[int], str]:
        return [5], "error" if request.request_id == 1 else "length"

    with pytest.raises(EngineError, match="row 1 failed: scripted failure"):
        run_bench(rows_of(workplace, 2), lambda side: fake_engine(script))


def test_workloads_are_asked_for_requests_once_an_engine(workplace: Any, fake_engine: Any) -> None:
    seen: list[int] = []

    def requests(recipe: Recipe, engine: Any) -> list[EngineRequest]:
        seen.append(recipe.speculation.num_tokens)
        return [EngineRequest(0, [1, 2, 3], recipe.sampling, 5)]

    plan = BenchPlan([Candidate(workplace.recipe())], [Workload(None, requests)], num_rounds=3, keep_engine=True)
    result = run_bench(plan, lambda side: fake_engine())
    assert seen == [3]
    assert len(result.cases[0].sides[0].rounds) == 3


def test_the_rows_of_a_batch_file_are_its_requests(workplace: Any, fake_engine: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "story"}], "max_tokens": 3}
    workplace.write([{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}])
    recipe = workplace.recipe()
    template = ChatTemplate("{{ messages[0].content }}", "a test", tokens={}, system=None, args=None)
    first = read_bench_rows(recipe, 2)
    assert first.is_batch
    (request,) = rows_workload(first, workplace.tokenizer, template).requests(recipe, fake_engine())
    assert request.params.max_tokens == 3
    assert request.prompt_token_ids == workplace.tokenizer.encode_batch(["story"])[0]


@pytest.mark.parametrize("run", [drain, lambda engine, requests: traced(engine, requests, Path("missing"), 1, 1)])
def test_an_engine_that_says_nothing_is_given_up(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_SILENCE_SECONDS", 0.0)
    taken = []

    class Silent:
        num_running = 1

        def add_request(self, request: EngineRequest) -> None:
            taken.append(request)

        def get_outputs(self, timeout: float) -> list[Any]:
            return []

        def trace_steps(self, *_: Any) -> None:
            pass

    requests = [EngineRequest(i, [1], SamplingParams(), i) for i in range(2)]
    with pytest.raises(EngineError, match="gave nothing for 0 seconds"):
        run(Silent(), requests)
    assert [request.seed for request in taken] == [0, 1]
