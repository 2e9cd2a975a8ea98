"""The loop: rows in = rows out, bounded, in order, and ending cleanly however it ends."""

import itertools
import json
import random
import threading
import tracemalloc
from typing import Any

import pytest

from specgen.engine.request import EngineRequest
from specgen.errors import EngineError
from specgen.job.job import Progress


def rows_of(count: int, **extra: Any) -> list[dict[str, Any]]:
    return [{"id": f"r{i}", "prompt": f"story number {i}", "i": i, **extra} for i in range(count)]


def test_every_row_has_its_line_in_input_order(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(60))
    engine = fake_engine(seed=3)
    stats = workplace.run(engine)
    records = workplace.records()
    assert [record["index"] for record in records] == list(range(60))
    for record in records:
        assert record["id"] == f"r{record['index']}"
        assert record["text"] == record["input"]["prompt"]
        assert record["input"]["i"] == record["index"]
        assert record["stop"] == "<eos>"
        assert record["usage"]["completion_tokens"] == record["usage"]["prompt_tokens"]
        assert record["usage"]["cached_tokens"] == 2
    assert (stats.rows, stats.samples, stats.ok, stats.failed) == (60, 60, 60, 0)
    assert stats.spec.emitted == stats.completion_tokens == sum(r["usage"]["completion_tokens"] for r in records)
    for name in ("steps", "drafted", "accepted"):
        assert getattr(stats.spec, name) == sum(record["spec"][name] for record in records)
    assert [request.seed for request in engine.requests] == [record["seed"] for record in records]


def test_completion_order_gives_the_same_set(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(60))
    workplace.run(fake_engine(seed=3))
    ordered = workplace.records()
    workplace.run(fake_engine(seed=5), "output.order=completion", "output.token_ids=true")
    records = workplace.records()
    indices = [record["index"] for record in records]
    assert indices != sorted(indices)
    assert sorted(indices) == list(range(60))
    for record in records:
        assert record["text"] == ordered[record["index"]]["text"]
        assert len(record["token_ids"]) == record["usage"]["completion_tokens"]
        assert record["token_ids"][-1] == 1


def test_bad_rows_are_lines_among_the_others(workplace: Any, fake_engine: Any) -> None:
    rows: list[Any] = list(rows_of(10))
    rows[3] = {"id": "long", "prompt": [5] * 64}
    rows[5] = '{"id": "torn", "prom'
    rows[6] = {"id": "", "prompt": "no id"}
    rows[7] = {"id": "slip", "prompt": "x", "temprature": 0.1}
    rows[8] = {"id": "limit", "prompt": [5] * 63}
    rows.insert(2, "")
    workplace.write(rows)
    stats = workplace.run(fake_engine())
    records = workplace.records()
    assert [record["index"] for record in records] == list(range(10))
    codes = {record["index"]: record["error"]["code"] for record in records if record["error"]}
    assert codes == {3: "prompt_too_long", 5: "bad_json", 6: "bad_id", 7: "bad_sampling"}
    assert records[3]["error"]["line"] == 5
    assert records[3]["input"]["id"] == "long"
    assert records[5]["input"] is None
    assert (stats.rows, stats.ok, stats.failed, stats.blank_lines) == (10, 6, 4, 1)


def test_only_bad_rows_end_too(workplace: Any, fake_engine: Any) -> None:
    workplace.write(["x"] * 300)
    engine = fake_engine()
    stats = workplace.run(engine)
    assert (stats.failed, len(workplace.records()), engine.requests) == (300, 300, [])


def test_rows_that_the_engine_fails_are_lines(workplace: Any, fake_engine: Any) -> None:
    def script(request: EngineRequest) -> tuple[list[int], str]:
        return ([5, 6], "error") if request.request_id == 2 else ([5, 6], "length")

    workplace.write(rows_of(5))
    stats = workplace.run(fake_engine(script))
    record = workplace.records()[2]
    assert record["error"] == {"code": "engine", "message": "scripted failure", "line": 3}
    assert record["text"] is None
    assert record["usage"]["completion_tokens"] == 2
    assert stats.finish_reasons == {"length": 4, "error": 1}


def test_the_ending_token_is_counted_but_is_no_text(workplace: Any, fake_engine: Any, tokenizer: Any) -> None:
    hello, stop = tokenizer.encode("Hello")[1:], 417  # an ordinary token as a stop id

    def script(request: EngineRequest) -> tuple[list[int], str]:
        return [*hello, stop], "stop" if request.request_id == 0 else "length"

    workplace.write(rows_of(2))
    workplace.run(fake_engine(script))
    first, second = workplace.records()
    assert first["text"] == "Hello"
    assert second["text"] == tokenizer.decode([*hello, stop]) != "Hello"
    assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"] == len(hello) + 1


def test_overrides_reach_the_engine_row_by_row(workplace: Any, fake_engine: Any) -> None:
    wanted = [{"max_tokens": 2}, {"max_tokens": 5, "temperature": 0}, {}, {"seed": 5}, {"stop_token_ids": [9]}]
    rows = [{"id": i, "prompt": "a long story about a dog", "sampling": row} for i, row in enumerate(wanted)]
    random.Random(0).shuffle(rows)
    workplace.write(rows)
    engine = fake_engine()
    workplace.run(engine, "sampling.max_tokens=4", "sampling.temperature=0.5")
    by_id = {row["id"]: request.params for row, request in zip(rows, engine.requests, strict=True)}
    assert [by_id[i].max_tokens for i in range(5)] == [2, 5, 4, 4, 4]
    assert [by_id[i].temperature for i in range(5)] == [0.5, 0.0, 0.5, 0.5, 0.5]
    assert by_id[4].stop_token_ids == (9,)
    assert by_id[0].stop_token_ids == ()
    lengths = {record["id"]: record["usage"]["completion_tokens"] for record in workplace.records()}
    assert (lengths[0], lengths[1], lengths[2]) == (2, 5, 4)


def test_the_engine_is_given_rows_only_as_it_takes_them(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(200))
    engine = fake_engine(max_running=4)
    workplace.run(engine, "engine.max_num_seqs=4")
    assert engine.most_held == 8
    assert len(engine.requests) == 200


def test_a_straggler_holds_back_lines_only_up_to_the_window(
    workplace: Any, fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.job.job.MAX_HELD_LINES", 16)
    held = []

    def script(request: EngineRequest) -> tuple[list[int], str]:
        return ([5] * 400, "length") if request.request_id == 0 else ([5], "length")

    workplace.write(rows_of(300))
    engine = fake_engine(script, max_running=2)
    engine.on_step = lambda step: held.append(len(engine.requests))
    workplace.run(engine, "engine.max_num_seqs=1")
    assert [record["index"] for record in workplace.records()] == list(range(300))
    while_waiting = held[200]
    assert while_waiting < 40


def test_the_first_line_is_written_before_the_last_row_is_read(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(1000))
    engine = fake_engine()
    sizes = []
    engine.on_step = lambda step: sizes.append((workplace.output.stat().st_size, len(engine.requests)))
    workplace.run(engine, "engine.max_num_seqs=4")
    assert any(size > 0 and asked < 500 for size, asked in sizes)


def test_on_error_stop_keeps_what_had_finished(workplace: Any, fake_engine: Any) -> None:
    rows: list[Any] = list(rows_of(100))
    rows[30] = "broken"
    workplace.write(rows)
    engine = fake_engine()
    stats = workplace.run(engine, "output.on_error=stop", "engine.max_num_seqs=4")
    records = workplace.records()
    indices = [record["index"] for record in records]
    assert indices == sorted(indices)
    assert records[-1]["error"]["code"] == "bad_json"
    assert stats.failed == 1
    assert stats.rows == len(records) == 31 - len(engine.aborted)
    assert not stats.interrupted


def test_a_stop_writes_what_had_finished_and_drops_the_rest(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(100))
    stop = threading.Event()
    engine = fake_engine()
    engine.on_step = lambda step: stop.set() if step == 60 else None
    stats = workplace.run(engine, "engine.max_num_seqs=4", stop=stop)
    records = workplace.records()
    assert stats.interrupted
    assert 0 < len(records) < 100
    assert stats.rows == len(records)
    assert {record["index"] for record in records}.isdisjoint(engine.aborted)
    assert len(records) + len(engine.aborted) == len(engine.requests)


def test_a_dead_engine_leaves_the_finished_rows(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(100))
    with pytest.raises(EngineError, match="scripted"):
        workplace.run(fake_engine(die_after=50))
    assert 0 < len(workplace.records()) < 100


def test_progress_is_told_from_real_events(workplace: Any, fake_engine: Any) -> None:
    seen: list[Progress] = []
    workplace.write([*rows_of(30), "broken"])
    stats = workplace.run(fake_engine(), on_progress=seen.append)
    assert [p.rows_done for p in seen] == sorted(p.rows_done for p in seen)
    assert (seen[-1].rows_done, seen[-1].failed) == (31, 1)
    assert seen[-1].completion_tokens == stats.completion_tokens
    assert (seen[-1].running, seen[-1].waiting) == (0, 0)


def test_memory_does_not_grow_with_the_rows(workplace: Any, fake_engine: Any) -> None:
    count = 3_000
    with open(workplace.input, "w") as stream:
        for i in range(count):
            stream.write(json.dumps({"id": i, "prompt": [5, 6], "pad": "x" * 20_000}) + "\n")

    def script(request: EngineRequest) -> tuple[list[int], str]:
        return [7], "length"

    class Forgetful(fake_engine):  # type: ignore[misc]
        def add_request(self, request: EngineRequest) -> None:
            super().add_request(request)
            self.requests.clear()

    tracemalloc.start()
    try:
        stats = workplace.run(Forgetful(script, max_running=64), "engine.max_num_seqs=16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stats.ok == count
    assert workplace.input.stat().st_size > 60e6
    assert peak < 20e6


def test_n_samples_are_n_lines_with_seeds_of_their_own(workplace: Any, fake_engine: Any) -> None:
    rows = rows_of(10)
    rows[4]["sampling"] = {"n": 1}
    rows[6] = {"id": "bad", "prompt": ""}
    workplace.write(rows)
    seen: list[Progress] = []
    engine = fake_engine(seed=3)
    stats = workplace.run(engine, "sampling.n=3", on_progress=seen.append)
    records = workplace.records()
    expected = [(i, s) for i in range(10) for s in ((None,) if i == 6 else (0,) if i == 4 else (0, 1, 2))]
    assert [(record["index"], record["sample"]) for record in records] == expected
    seeds = [record["seed"] for record in records if record["seed"] is not None]
    assert len(set(seeds)) == len(seeds) == 25
    assert sorted(request.seed for request in engine.requests) == sorted(seeds)
    assert (stats.rows, stats.samples, stats.ok, stats.failed) == (10, 26, 25, 1)
    assert (seen[-1].rows_done, seen[-1].samples_done) == (10, 26)
    workplace.run(fake_engine(), "sampling.n=1")
    firsts = {record["id"]: record["seed"] for record in workplace.records()}
    assert firsts == {record["id"]: record["seed"] for record in records if record["sample"] in (0, None)}


def test_only_missing_samples_are_run_again(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(6))
    workplace.run(fake_engine(), "sampling.n=3")
    whole = workplace.output.read_bytes()
    lines = whole.splitlines(keepends=True)
    workplace.output.write_bytes(b"".join(line for number, line in enumerate(lines) if number not in (1, 4, 9, 10, 15)))
    engine = fake_engine()
    workplace.run(engine, "sampling.n=3", fresh=False)
    assert len(engine.requests) == 5
    assert workplace.output.read_bytes() == whole
    workplace.run(engine, "sampling.n=4", fresh=False)  # more samples of the same rows
    assert len(engine.requests) == 5 + 6
    assert [record["sample"] for record in workplace.records()] == [0, 1, 2, 3] * 6


def test_rows_that_begin_alike_are_brought_together(workplace: Any, fake_engine: Any) -> None:
    prefixes = ("the brave little fox", "a kind old owl", "my friend the bear")
    rows = [{"id": i, "prompt": f"{prefixes[i % 3]} number {i}"} for i in range(60)]
    workplace.write(rows)
    workplace.run(fake_engine())
    unsorted = workplace.output.read_bytes()
    engine = fake_engine()
    workplace.run(engine, "engine.group_prefixes=true")
    assert workplace.output.read_bytes() == unsorted
    groups = [tuple(request.prompt_token_ids[:4]) for request in engine.requests]
    assert sum(one != other for one, other in itertools.pairwise(groups)) == 2


def test_a_row_that_others_were_put_before_is_begun_although_many_lines_wait_for_it(
    workplace: Any, fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.job.job.MAX_HELD_LINES", 10)
    workplace.write([{"id": i, "prompt": [1, 100 - i]} for i in range(60)])  # the first one is the last by its tokens
    looks = itertools.count()

    def look(progress: Progress) -> None:
        assert next(looks) < 5000, "it does not end"

    workplace.run(fake_engine(), "engine.group_prefixes=true", "engine.max_num_seqs=4", on_progress=look)
    assert [record["id"] for record in workplace.records()] == list(range(60))


def test_what_runs_may_be_finished_after_a_stop(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(100))
    stop = threading.Event()
    engine = fake_engine()
    at_stop: list[int] = []

    def stop_it(step: int) -> None:
        if step == 60:
            stop.set()
            at_stop.extend((engine.num_running, engine.num_waiting))

    engine.on_step = stop_it
    stats = workplace.run(engine, "engine.max_num_seqs=4", "output.on_interrupt=finish", stop=stop)
    assert stats.interrupted
    num_running, num_waiting = at_stop  # whoever waits in the engine is not begun
    assert num_waiting <= len(engine.aborted) <= num_waiting + num_running
    assert stats.rows == len(workplace.records()) == len(engine.requests) - len(engine.aborted) < 100
    assert max(engine.aborted) == len(engine.requests) - 1


def test_a_row_with_one_line_for_all_samples_is_finished_whole(workplace: Any, fake_engine: Any) -> None:
    body = {"model": "m", "prompt": "a long story about a dog", "n": 5}
    requests = [{"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(20)]
    workplace.write(requests)
    stop = threading.Event()
    engine = fake_engine(max_running=3)
    engine.on_step = lambda step: stop.set() if step == 5 else None
    workplace.run(engine, "engine.max_num_seqs=3", "output.on_interrupt=finish", stop=stop)
    assert engine.aborted
    records = workplace.records()
    assert records
    assert all(len(record["response"]["body"]["choices"]) == 5 for record in records)
    assert len(engine.requests) - len(engine.aborted) == 5 * len(records)
