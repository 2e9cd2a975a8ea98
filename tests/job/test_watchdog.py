"""An engine that stands still ends the run with what it was doing, in the set time."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import EngineStuckError
from specgen.job.watchdog import Watchdog


def test_a_silent_engine_is_given_up_and_what_finished_is_written(workplace: Any, fake_engine: Any) -> None:
    class Sticking(fake_engine):  # type: ignore[misc]
        def get_outputs(self, timeout: float) -> list[Any]:
            if self.steps < 30:
                return list(super().get_outputs(timeout))
            time.sleep(timeout)
            return []

    workplace.write([{"prompt": f"row {i}"} for i in range(50)])
    started = time.monotonic()
    with pytest.raises(EngineStuckError, match=r"made no step for \d+ s with \d+ requests") as caught:
        workplace.run(Sticking(), "engine.watchdog_seconds=0.5")
    assert 0.4 < time.monotonic() - started < 5
    assert "steps 30" in caught.value.dump
    assert "running 4" in caught.value.dump
    assert "thread MainThread:" in caught.value.dump
    num_done = len(workplace.records())
    assert 0 < num_done < 50
    manifest = json.loads(Path(f"{workplace.output}.manifest.json").read_text())
    assert (manifest["complete"], manifest["lines"]) == (False, num_done)
    assert "made no step" in manifest["sessions"][0]["error"]
    workplace.run(fake_engine(), fresh=False)
    assert len(workplace.records()) == 50


class Counting:
    """An engine whose steps are counted up by hand."""

    num_running = 1
    num_waiting = 0
    steps = 0

    def engine_stats(self) -> dict[str, object]:
        return {"steps": self.steps}


def test_steps_without_tokens_are_progress_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("specgen.job.watchdog.time.monotonic", lambda: now)
    watchdog, engine = Watchdog(10.0), Counting()
    for _ in range(12):
        now += 8
        engine.steps += 1
        watchdog.look(engine, False, 1)
    now += 8
    engine.steps += 1
    with pytest.raises(EngineStuckError, match="gave no token for 104 s"):
        watchdog.look(engine, False, 1)
    watchdog.rest()
    now += 9
    watchdog.look(engine, False, 1)
    watchdog.look(engine, True, 1)
    never = Watchdog(None)
    now += 1e6
    never.look(engine, False, 1)


def test_the_command_does_not_wait_for_an_engine_that_stands_still(tmp_path: Path) -> None:
    code = """
import sys, threading
from specgen.engine.core import EngineCore
from specgen.cli.main import main
step, count = EngineCore.step, 0
def sticking(self):
    global count
    count += 1
    if count > 40:
        threading.Event().wait()
    return step(self)
EngineCore.step = sticking
sys.exit(main(sys.argv[1:]))
"""
    recipe = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
    sets = ["engine.watchdog_seconds=1.5", "sampling.max_tokens=20", "engine.max_num_seqs=4", "input.limit=40"]
    command = [sys.executable, "-P", "-c", code, "run", str(recipe), *(f"--set={one}" for one in sets)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    told = done.stderr.decode()
    assert done.returncode == 1, told
    assert "in sticking" in told  # where the engine's thread stands
    assert "error: the engine made no step for" in told
    lines = (tmp_path / "quickstart.jsonl").read_bytes().splitlines()
    assert 0 < len(lines) < 40
    assert all(json.loads(line)["text"] is not None for line in lines)
