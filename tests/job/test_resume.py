"""Going on: which rows are done, which settings may change, what is mended and what is refused; shards and merging."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import EngineError, InputError
from specgen.job.journal import replace_file
from specgen.job.manifest import Manifest
from specgen.job.merge import merge, parts_of, shard_path
from specgen.job.writer import FileSink


def rows_of(count: int) -> list[dict[str, Any] | str | bytes]:
    return [{"id": f"r{i}", "prompt": f"story number {i}"} for i in range(count)]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_done_is_what_has_a_complete_record_wherever_the_rows_stand_now(workplace: Any, fake_engine: Any) -> None:
    rows = rows_of(20)
    workplace.write(rows[:10])
    workplace.run(fake_engine())
    old = workplace.records()
    write_lines(workplace.output, [record for record in old if record["id"] != "r4"])
    workplace.write([{"id": "new", "prompt": "a new row"}, *rows])
    engine = fake_engine()
    stats = workplace.run(engine, fresh=False)
    assert (stats.rows, len(engine.requests)) == (12, 12)
    records = {record["id"]: record for record in workplace.records()}
    assert len(records) == len(workplace.records()) == 21
    assert all(records[record["id"]] == record for record in old if record["id"] != "r4")
    assert records["r4"]["text"] == old[4]["text"]
    assert records["r4"]["seed"] == old[4]["seed"]


def test_rows_that_have_changed_since_are_told_and_keep_their_answers(workplace: Any, fake_engine: Any) -> None:
    rows: list[Any] = [{**row, "label": 1} for row in rows_of(6)]
    workplace.write(rows)
    workplace.run(fake_engine())
    old = workplace.records()

    def changed() -> tuple[bool, int, int, str]:
        workplace.write(rows)
        session = workplace.session(fresh=False)
        work, counts = session.has_work, session.counts
        session.finish()
        return work, counts.skipped, counts.changed, counts.first_changed

    assert changed() == (False, 6, 0, "")
    rows.reverse()
    assert changed() == (False, 6, 0, "")
    rows[1]["prompt"] = "another story"
    rows[4]["label"] = 2  # a column that asks for nothing is in the answer too
    assert changed() == (False, 6, 2, "line 2")
    assert sorted(workplace.records(), key=lambda record: record["id"]) == old
    write_lines(workplace.output, [record | {"input": None} for record in old])
    assert changed()[2] == 6
    for record in old:
        del record["input"]
    write_lines(workplace.output, old)
    assert changed()[2] == 0  # nobody knows


def test_repeated_prompts_without_ids_are_rows_of_their_own(workplace: Any, fake_engine: Any) -> None:
    workplace.write([{"prompt": "the same"}] * 6)
    workplace.run(fake_engine())
    whole = workplace.records()
    assert len({record["seed"] for record in whole}) == len({record["key"] for record in whole}) == 6
    write_lines(workplace.output, [whole[1], whole[4]])
    engine = fake_engine()
    workplace.run(engine, fresh=False)
    assert len(engine.requests) == 4
    assert workplace.records() == whole


def test_failed_rows_wait_for_retry_failed(workplace: Any, fake_engine: Any) -> None:
    def script(request: Any) -> tuple[list[int], str]:
        return [5], "error" if request.request_id % 3 == 0 else "length"

    workplace.write(rows_of(9))
    workplace.run(fake_engine(script))
    engine = fake_engine()
    session = workplace.session(fresh=False)
    assert not session.has_work
    session.close()
    stats = workplace.run(engine, fresh=False, retry_failed=True)
    assert (stats.rows, len(engine.requests)) == (3, 3)
    records = workplace.records()
    assert [record["index"] for record in records] == list(range(9))  # in order again
    assert [record["error"] for record in records] == [None] * 9


def test_a_run_broken_off_in_retrying_loses_no_row(workplace: Any, fake_engine: Any) -> None:
    workplace.write([*rows_of(5), "broken"])
    workplace.run(fake_engine())
    session = workplace.session(fresh=False, retry_failed=True)  # the failed line is gone now
    session.close()
    assert len(workplace.records()) == 5
    workplace.run(fake_engine(), fresh=False)
    assert [record["index"] for record in workplace.records()] == list(range(6))


def test_an_engine_that_dies_costs_only_what_was_in_it(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(60))
    workplace.run(fake_engine())
    whole = workplace.output.read_bytes()
    Path(workplace.output).unlink()
    for steps in (30, 50):
        with pytest.raises(EngineError, match="scripted"):
            workplace.run(fake_engine(die_after=steps), fresh=False)
    assert 0 < len(workplace.records()) < 60
    manifest = Manifest.read(str(workplace.output))
    assert manifest is not None
    assert [session["error"] for session in manifest.content["sessions"]] == ["the engine stopped: scripted"] * 2
    workplace.run(fake_engine(), fresh=False)
    assert workplace.output.read_bytes() == whole


def test_a_torn_last_line_is_cut_and_its_row_is_run_again(
    workplace: Any, fake_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    workplace.write(rows_of(5))
    workplace.run(fake_engine())
    whole = workplace.output.read_bytes()
    for cut in (1, 30):
        workplace.output.write_bytes(whole[:-cut])
        engine = fake_engine()
        workplace.run(engine, fresh=False)
        assert len(engine.requests) == 1
        assert "torn" in caplog.text
        assert workplace.output.read_bytes() == whole


@pytest.mark.parametrize(
    "line", [b"", b"\0\0\0\0", b'{"id": "r1", "ind', b'{"unknown": 1}', b"[]", b'{"key": 1, "sample": 0, "index": 2}']
)
def test_damage_in_the_middle_is_an_error_with_its_line(workplace: Any, fake_engine: Any, line: bytes) -> None:
    workplace.write(rows_of(5))
    workplace.run(fake_engine())
    lines = workplace.output.read_bytes().split(b"\n")
    lines[2] = line
    workplace.output.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=r"out\.jsonl:3: the line is no complete record"):
        workplace.session(fresh=False)
    assert workplace.output.read_bytes() == b"\n".join(lines)


def test_an_answer_that_is_there_twice_is_an_error(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    lines = workplace.output.read_bytes().splitlines(keepends=True)
    workplace.output.write_bytes(b"".join([*lines, lines[1]]))
    with pytest.raises(InputError, match=r"out\.jsonl:4: the line answers the row that line 2 answers"):
        workplace.session(fresh=False)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("model.kv_dtype=float8", 'model.kv_dtype was "auto" and is "float8"'),
        ("sampling.temperature=0.5", "sampling.temperature was 1.0 and is 0.5"),
        ("sampling.seed=8", "sampling.seed was 7 and is 8"),
        ("sampling.max_tokens=3", "sampling.max_tokens was null and is 3"),
        ("output.token_ids=true", "output.token_ids was false and is true"),
        ("input.prompt=text", 'input.prompt was "prompt" and is "text"'),
        ("input.truncate=left", 'input.truncate was null and is "left"'),
    ],
)
def test_a_change_of_content_is_refused_by_name(workplace: Any, fake_engine: Any, change: str, part: str) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    before = workplace.output.read_bytes()
    with pytest.raises(InputError) as caught:
        workplace.session(change, fresh=False)
    assert part in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert workplace.output.read_bytes() == before


def test_a_change_of_weights_or_precision_is_refused(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    workplace.write(rows_of(4))
    path = Path(f"{workplace.output}.manifest.json")
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"fingerprints": manifest["fingerprints"] | {"weights": "other"}}))
    with pytest.raises(InputError, match='weights was "other"'):
        workplace.session(fresh=False)
    path.write_text(json.dumps(manifest))
    engine = fake_engine()
    engine.description["dtype"] = "bfloat16"
    with pytest.raises(InputError, match='dtype was "float32" and is "bfloat16"'):
        workplace.run(engine, fresh=False)
    assert len(workplace.records()) == 3
    workplace.run(fake_engine(), fresh=False)
    assert len(workplace.records()) == 4


def test_a_key_that_an_older_version_did_not_have_is_no_change_while_it_is_the_default(
    workplace: Any, fake_engine: Any
) -> None:
    workplace.write(rows_of(2))
    workplace.run(fake_engine())
    path = Path(f"{workplace.output}.manifest.json")
    content = json.loads(path.read_text())
    del content["recipe"]["sampling.top_k"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"sampling\.top_k was null and is 5"):
        workplace.session("sampling.top_k=5", fresh=False)
    assert not workplace.session(fresh=False).has_work


def test_a_change_of_speed_goes_on_and_is_told(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    workplace.write(rows_of(5))
    sets = ["speculation.num_tokens=1", "engine.max_num_seqs=2", "output.order=completion"]
    session = workplace.session(*sets, fresh=False)
    assert session.notes[0].endswith("speculation.num_tokens was 3 and is 1")
    assert len(session.notes) == 3
    path = Path(f"{workplace.output}.manifest.json")
    before = path.read_text()
    session.run(fake_engine())
    assert len(workplace.records()) == 5
    content = json.loads(path.read_text())
    assert content["recipe"]["speculation.num_tokens"]["value"] == 1
    assert [len(one["changed"]) for one in content["sessions"]] == [0, 3]
    assert content["sessions"][0] == json.loads(before)["sessions"][0]


def test_a_command_that_finds_nothing_to_do_leaves_the_manifest_as_it_is(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    path = Path(f"{workplace.output}.manifest.json")
    content = json.loads(path.read_text())
    content["sessions"][0]["ended"] = "2001-02-03T04:05:06Z"
    path.write_text(json.dumps(content))
    workplace.session("speculation.num_tokens=1", fresh=False).finish()
    assert json.loads(path.read_text()) == content
    path.write_text(json.dumps(content | {"complete": False, "lines": 0}))  # killed before its last words
    workplace.session(fresh=False).finish()
    assert json.loads(path.read_text()) == content


def test_the_manifest_is_told_on_the_way_how_far_a_run_is(
    workplace: Any, fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specgen.job.session._NOTE_SECONDS", 0.0)
    workplace.write(rows_of(40))
    path = Path(f"{workplace.output}.manifest.json")
    seen: list[tuple[dict[str, Any], int]] = []
    engine = fake_engine()
    engine.on_step = lambda step: seen.append(
        (json.loads(path.read_text()), workplace.output.read_bytes().count(b"\n"))
    )
    workplace.run(engine)
    content, num_lines = seen[-1]
    assert 0 < content["lines"] == num_lines < 40
    assert (content["complete"], content["rows"]) == (False, None)
    session = content["sessions"][0]
    assert "ended" not in session
    assert session["statistics"]["samples"] == session["series"][-1][1] >= num_lines  # some wait for earlier ones
    assert session["statistics"]["wall_seconds"] > 0


def test_a_drawn_seed_is_kept(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine(), "sampling.seed=null")
    workplace.write(rows_of(6))
    workplace.run(fake_engine(), "sampling.seed=null", fresh=False)
    resumed = workplace.records()
    seed = Manifest.read(str(workplace.output))
    assert seed is not None
    workplace.run(fake_engine(), f"sampling.seed={seed.value('sampling.seed')}")
    assert workplace.records() == resumed


def test_the_manifest_says_what_made_the_output(workplace: Any, fake_engine: Any) -> None:
    workplace.write([*rows_of(4), "broken"])
    workplace.run(fake_engine())
    manifest = Manifest.read(str(workplace.output))
    assert manifest is not None
    content = manifest.content
    assert (content["complete"], content["lines"], content["failed"], content["rows"]) == (True, 5, 1, 5)
    assert content["recipe"]["sampling.seed"] == {"value": 7, "origin": "--set"}
    assert content["recipe"]["sampling.top_k"] == {"value": 0, "origin": "default"}
    assert content["resolved"] == {"dtype": "float32", "max_model_len": 64, "eos_token_ids": [1]}
    assert set(content["fingerprints"]) >= {"weights", "tokenizer", "chat_template", "generation_config"}
    (session,) = content["sessions"]
    assert session["statistics"]["samples"] == 5
    assert session["versions"]["specgen"]
    assert session["ended"] >= session["started"]


def test_fresh_moves_everything_aside(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    for number in ("", "2"):
        workplace.run(fake_engine())
        old = workplace.output.read_bytes()
        workplace.run(fake_engine(), "input.limit=1")
        for name in ("", ".manifest.json", ".recipe.yaml"):
            assert Path(f"{workplace.output}{name}.old{number}").is_file()
        assert Path(f"{workplace.output}.old{number}").read_bytes() == old
        for path in (workplace.output, *workplace.folder.glob("out.jsonl.*")):
            if not path.name.endswith(("old", "old2")):
                path.unlink()


def test_a_foreign_file_is_not_touched(workplace: Any) -> None:
    workplace.write(rows_of(3))
    workplace.output.write_text("precious")
    with pytest.raises(InputError, match="already, and no manifest"):
        workplace.session(fresh=False)
    assert workplace.output.read_text() == "precious"


def test_two_runs_do_not_write_to_one_output(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    workplace.write(rows_of(5))
    sink = FileSink(str(workplace.output))
    with pytest.raises(InputError, match="another run is writing"):
        workplace.session(fresh=False)
    with pytest.raises(InputError, match="another run is writing"):
        workplace.run(fake_engine(), fresh=True)
    assert len(workplace.records()) == 3
    sink.close()
    workplace.run(fake_engine(), fresh=False)


def test_of_two_runs_begun_together_the_later_one_adds_nothing(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(3))
    one, other = workplace.session(fresh=False), workplace.session(fresh=False)  # neither finds an output
    one.run(fake_engine())
    whole = workplace.output.read_bytes()
    with pytest.raises(InputError, match="another run has written this output meanwhile"):
        other.run(fake_engine())
    assert workplace.output.read_bytes() == whole
    assert not list(workplace.folder.glob("*.old"))


def test_a_run_that_comes_between_reading_and_writing_is_noticed(
    workplace: Any, fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workplace.write(rows_of(3))
    workplace.run(fake_engine())
    close = FileSink.close

    def close_and_let_another_write(sink: FileSink) -> None:
        close(sink)
        with open(workplace.output, "ab") as stream:
            stream.write(b"another's\n")

    monkeypatch.setattr(FileSink, "close", close_and_let_another_write)
    with pytest.raises(InputError, match="another run has written this output meanwhile"):
        workplace.session(fresh=False)


def test_a_file_that_was_replaced_is_not_written_to(workplace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    output = str(workplace.output)
    lock = fcntl.flock

    def sort_meanwhile(descriptor: int, operation: int) -> None:
        replace_file(output, lambda stream: stream.write(b"sorted"))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sort_meanwhile)
    with pytest.raises(InputError, match="another run is writing"):
        FileSink(output)


def test_a_replaced_file_keeps_its_link_and_mode_and_its_neighbours(tmp_path: Path) -> None:
    link, file, neighbour = tmp_path / "out.jsonl", tmp_path / "far.jsonl", tmp_path / "out.jsonl.new"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    neighbour.write_text("precious")
    replace_file(str(link), lambda stream: stream.write(b"new"))
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert file.stat().st_mode & 0o777 == 0o640
    assert neighbour.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ZeroDivisionError):
        replace_file(str(link), lambda stream: stream.write(b"half") / 0)
    assert file.read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 3


def test_rows_dropped_by_an_error_are_no_complete_output(workplace: Any, fake_engine: Any) -> None:
    def script(request: Any) -> tuple[list[int], str]:
        return [5] * (1 if request.request_id == 2 else 50), "error" if request.request_id == 2 else "length"

    workplace.write(rows_of(5))  # all of them are read, and in the engine, when the third one fails
    stats = workplace.run(fake_engine(script), "output.on_error=stop")
    assert stats.rows < 5
    assert Manifest.read(str(workplace.output)).content["complete"] is False  # type: ignore[union-attr]
    workplace.run(fake_engine(), fresh=False)
    assert len(workplace.records()) == 5
    assert Manifest.read(str(workplace.output)).content["complete"] is True  # type: ignore[union-attr]


# shards


def run_shards(workplace: Any, fake_engine: Any, count: int, *sets: str) -> list[str]:
    parts = [shard_path(str(workplace.output), (i, count)) for i in range(1, count + 1)]
    for i, part in enumerate(parts, start=1):
        workplace.run(fake_engine(seed=i), f"output.path={part}", *sets, shard=(i, count))
    return parts


@pytest.mark.parametrize("order", ["input", "completion"])
def test_merged_shards_are_the_whole_run(workplace: Any, fake_engine: Any, order: str) -> None:
    rows = rows_of(40)
    for i in range(0, 40, 4):
        rows[i] = {"prompt": f"no id {i % 8}"}
    rows[7] = "broken"
    workplace.write(rows)
    workplace.run(fake_engine())
    whole = workplace.output.read_bytes()
    output = str(workplace.folder / "merged.jsonl")
    parts = run_shards(workplace, fake_engine, 3, f"output.order={order}")
    assert parts_of(str(workplace.output)) == parts
    sizes = [len(workplace.records(Path(part))) for part in parts]
    assert sum(sizes) == 40
    assert min(sizes) > 4
    manifest = merge(output, parts)
    assert Path(output).read_bytes() == whole
    assert (manifest.content["lines"], manifest.content["failed"], manifest.content["shard"]) == (40, 1, None)
    with pytest.raises(InputError, match="there already"):
        merge(output, parts)


def test_a_gap_a_double_or_a_stranger_among_the_parts_is_named(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(30))
    parts = run_shards(workplace, fake_engine, 3)
    output = str(workplace.folder / "merged.jsonl")
    with pytest.raises(InputError, match="these are missing: 2"):
        merge(output, [parts[0], parts[2]])
    with pytest.raises(InputError, match="this is shard 1, as"):
        merge(output, [parts[0], parts[1], parts[0]])
    before = Path(parts[1]).read_bytes()
    lines = before.splitlines(keepends=True)
    Path(parts[1]).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(InputError, match="29 lines and their manifests say 30"):
        merge(output, parts)
    Path(parts[1]).write_bytes(b"".join([*lines[:-1], Path(parts[0]).read_bytes().splitlines(keepends=True)[0]]))
    with pytest.raises(InputError, match=r"answers the row that .*1-of-3.jsonl:1 answers"):
        merge(output, parts)
    Path(parts[1]).write_bytes(before)
    run = Path(f"{parts[2]}.manifest.json")
    old = run.read_text()
    run.write_text(old.replace('"complete": true', '"complete": false'))
    with pytest.raises(InputError, match="not complete"):
        merge(output, parts)
    content = json.loads(old)
    content["recipe"]["sampling.temperature"]["value"] = 0.25
    run.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not of the same run"):
        merge(output, parts)
    assert not Path(output).exists()
    run.write_text(old)
    merge(output, parts)


def test_a_shard_may_have_no_rows(workplace: Any, fake_engine: Any) -> None:
    workplace.write(rows_of(2))
    workplace.run(fake_engine())
    whole = workplace.output.read_bytes()
    parts = [shard_path(str(workplace.output), (i, 5)) for i in range(1, 6)]
    empty = 0
    for i, part in enumerate(parts, start=1):
        session = workplace.session(f"output.path={part}", shard=(i, 5))
        if session.has_work:
            session.run(fake_engine())
        else:
            session.finish()
            again = workplace.session(f"output.path={part}", fresh=False, shard=(i, 5))
            again.finish()
            assert len(list(workplace.folder.glob(f"{Path(part).name}*"))) == 2  # nothing is moved aside
            empty += 1
    assert empty >= 3
    output = str(workplace.folder / "merged.jsonl")
    assert merge(output, parts).content["resolved"]["dtype"] == "float32"
    assert Path(output).read_bytes() == whole
