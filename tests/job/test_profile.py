"""What a profile asks of an engine, on a scripted one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specgen.cli import profile
from specgen.cli.bench_setup import Drafts
from specgen.cli.main import main
from specgen.errors import EngineError
from specgen.job.bench_figures import Machine
from specgen.job.floor import Ceilings, Cost, Op
from specgen.job.profile import profile_shape, run_profile


class _Cost:
    def decode(self, rows: float, context: float, num_drafts: int) -> Cost:
        return Cost((Op("target", "head", context, 0.0),))


def kernel(step: int) -> dict[str, Any]:
    args = {"correlation": step, "graph id": 1}
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": 100.0 * step, "dur": 20.0, "args": args}


def test_rows_stay_together_and_are_traced_as_graphs_and_labelled(
    workplace: Any, fake_engine: Any, tmp_path: Path
) -> None:
    log: list[Any] = []
    recipes: list[Any] = []
    made: list[Any] = []
    seen: list[list[Any]] = []

    class Tracing(fake_engine):  # type: ignore[misc]
        def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
            log.append((path.name, num_rows))
            path.write_text(json.dumps({"traceEvents": [kernel(i) for i in range(6)]}))

        def label_steps(self, wanted: bool) -> None:
            log.append(wanted)

    def make_engine(side: Any) -> Any:
        recipes.append(side.recipe)
        made.append(Tracing(lambda request: ([5] * request.params.max_tokens, "length")))
        made[-1].decode_rows = 3
        return made[-1]

    recipe = workplace.recipe("speculation.num_tokens=2", "engine.max_num_batched_tokens=100")
    shapes = [profile_shape(rows, 40) for rows in (1, 3)]
    machine = Machine(Ceilings(1e12, 1e15), _Cost())  # type: ignore[arg-type]
    tables = run_profile(
        recipe, shapes, make_engine, machine=machine, folder=tmp_path, on_table=lambda tables: seen.append([*tables])
    )
    assert recipes[0].speculation.acceptance == (0.0, 0.0), "one token a step, whatever the drafts"
    assert log == [
        *[("replays-1x40.json", 1), True, ("labelled-1x40.json", 1), False],
        *[("replays-3x40.json", 3), True, ("labelled-3x40.json", 3), False],
    ]
    assert [(t.rows, t.context, t.num_tokens, t.steps) for t in tables] == [(1, 40, 2, 4), (3, 40, 2, 4)]
    assert (tables[0].seconds, tables[0].period) == pytest.approx((20e-6, 100e-6))
    assert tables[0].idle_share == pytest.approx(0.8)
    assert tables[0].untraced is None and tables[1].untraced == pytest.approx(0.002), "the fake decodes three rows"
    given = {(len(r.prompt_token_ids), r.num_given_tokens, r.params.max_tokens) for r in made[0].requests}
    assert given == {(24, 23, 48)}, "no prompt is read"
    assert [len(tables) for tables in seen] == [1, 2]


def test_shapes_that_cannot_be_traced_are_told_and_left_out(workplace: Any, fake_engine: Any, tmp_path: Path) -> None:
    class Tracing(fake_engine):  # type: ignore[misc]
        def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
            if num_rows == 1:
                path.write_text(json.dumps({"traceEvents": [kernel(i) for i in range(6)]}))

        def label_steps(self, wanted: bool) -> None:
            pass

    def make_engine(side: Any) -> Any:
        engine = Tracing(lambda request: ([5] * 3, "length"))
        engine.description["kv_tokens"] = 500
        return engine

    told: list[str] = []
    shapes = [profile_shape(rows, 40) for rows in (2, 1, 30)]
    machine = Machine(None, None)
    tables = run_profile(workplace.recipe(), shapes, make_engine, machine=machine, folder=tmp_path, on_note=told.append)
    assert [table.rows for table in tables] == [1]
    assert any("no 2 rows decoded together" in note for note in told)
    assert "no table: 30 rows take 2,160 tokens of KV, and there is room for 500" in told
    with pytest.raises(EngineError, match="no 2 rows decoded together"):
        run_profile(workplace.recipe(), shapes[:1], make_engine, machine=machine, folder=tmp_path)


def test_the_command_writes_json_markdown_and_traces(
    workplace: Any,
    fake_engine: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All but the machine is the command's own: a scripted engine stands in for a GPU's."""

    class Tracing(fake_engine):  # type: ignore[misc]
        def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
            path.write_text(json.dumps({"traceEvents": [kernel(i) for i in range(6)]}))

        def label_steps(self, wanted: bool) -> None:
            pass

    setup = SimpleNamespace(
        device=torch.device("cuda"),
        exactness=["exact"],
        drafts=[Drafts(2)],
        model_name="a/config.json",
        plain_recipe=lambda: {"model.path": None},
        recipe_of=lambda k: workplace.recipe(f"speculation.num_tokens={k}"),
        machine=lambda console: Machine(Ceilings(1e12, 1e15), _Cost()),  # type: ignore[arg-type]
        engine_maker=lambda console: lambda side: Tracing(lambda request: ([5] * 3, "length")),
    )
    monkeypatch.setattr(profile, "set_up", lambda *_: setup)
    files = {name: tmp_path / name for name in ("p.json", "p.md", "traces")}
    args = ["--json", str(files["p.json"]), "--markdown", str(files["p.md"]), "--traces", str(files["traces"])]
    assert main(["profile", "--model", "x", "--rows", "1,2", "--context", "30,40", *args]) == 0
    written = json.loads(files["p.json"].read_text())
    assert [(table["rows"], table["context"]) for table in written["tables"]] == [(1, 30), (2, 30), (1, 40), (2, 40)]
    assert [table["busy_ms"] for table in written["tables"]] == [0.02] * 4
    assert files["p.md"].read_text().count("**2 rows of 40 tokens, K = 2**: 0.10 ms a step in the trace") == 1
    assert sorted(path.name for path in files["traces"].iterdir()) == sorted(
        f"{kind}-{rows}x{context}.json" for kind in ("labelled", "replays") for rows in (1, 2) for context in (30, 40)
    )
    assert "1 row of 30 tokens, K = 2" in capsys.readouterr().out
    assert main(["profile", "--model", "x", "--rows", "1", "--json", "/dev/full"]) == 2
    told = capsys.readouterr()
    assert "1 row of 512 tokens" in told.out, "what cannot be written is shown"
    assert "/dev/full: the JSON file cannot be written" in told.err
    assert main(["profile", "--model", "x", "--json", "same", "--markdown", "same"]) == 2
    assert main(["profile", "--model", "x", "--traces", str(files["p.md"] / "t")]) == 2
    assert "the folder for traces cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["--rows", "0"], "--rows: '0' are no numbers from 1 up"),
        (["--rows", "1,x"], "--rows: '1,x' are no numbers"),
        (["--context", "1"], "--context: '1' are no numbers from 2 up"),
        (["--set", "model.device=cpu"], "on cpu"),
        (["--context", "4096"], "the model's limit is"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], args: list[str], part: str) -> None:
    assert main(["profile", "--model", "stories-7m", *args]) == 2
    assert part in capsys.readouterr().err
