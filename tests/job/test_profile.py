"""What a profile asks of an engine, on a scripted one."""

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.cli.main import main
from specgen.errors import EngineError
from specgen.job.bench_result import Machine
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

    class Tracing(fake_engine):  # type: ignore[misc]
        def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
            log.append((path.name, num_rows))
            path.write_text(json.dumps({"traceEvents": [kernel(i) for i in range(6)]}))

        def label_steps(self, wanted: bool) -> None:
            log.append(wanted)

    def make_engine(recipe: Any) -> Any:
        recipes.append(recipe)
        return Tracing(lambda request: ([5] * request.params.max_tokens, "length"))

    recipe = workplace.recipe("speculation.num_tokens=2", "engine.max_num_batched_tokens=100")
    shapes = [profile_shape(rows, 40) for rows in (1, 3)]
    machine = Machine(Ceilings(1e12, 1e15), _Cost())  # type: ignore[arg-type]
    tables = run_profile(recipe, shapes, make_engine, machine=machine, folder=tmp_path)
    assert recipes[0].speculation.acceptance == (0.0, 0.0), "one token a step, whatever the drafts"
    assert log == [
        *[("replays-1.json", 1), True, ("labelled-1.json", 1), False],
        *[("replays-3.json", 3), True, ("labelled-3.json", 3), False],
    ]
    assert [(table.rows, table.num_tokens, table.steps) for table in tables] == [(1, 2, 4), (3, 2, 4)]
    assert tables[0].seconds == pytest.approx(20e-6)


def test_a_trace_that_was_not_made_is_an_error(workplace: Any, fake_engine: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no 2 rows decoded together"):
        run_profile(
            workplace.recipe(),
            [profile_shape(2, 40)],
            lambda recipe: fake_engine(),
            machine=Machine(None, None),
            folder=tmp_path,
        )


@pytest.mark.parametrize(
    ("args", "part"),
    [(["--rows", "0"], "--rows: '0' are no numbers of rows"), (["--set", "model.device=cpu"], "on cpu")],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], args: list[str], part: str) -> None:
    assert main(["profile", "--model", "stories-7m", *args]) == 2
    assert part in capsys.readouterr().err
