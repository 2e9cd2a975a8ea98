"""Runs many rows through an engine that does nothing but answer, and prints what the job layer took, as JSON.

Arguments: the input, the output, and --set values. Nothing of torch is imported: what is measured is the job layer.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.job.inputs import Input
from specgen.job.readers import RowReader
from specgen.job.session import Session
from specgen.job.target import Target
from specgen.job.writer import LineWriter
from specgen.model_path import resolve_model
from specgen.recipe import recipe_from_settings
from specgen.stats import SpecStats
from specgen.tokenizer import Tokenizer

ANSWER = [417, 500, 600, 700, 800, 900, 1000, 1]


class AnsweringEngine:
    """Answers all requests that it has at every call."""

    max_model_len = 2048
    vocab_size = 4096
    eos_token_ids = (1,)
    num_running = num_waiting = 0

    def __init__(self) -> None:
        self.description: dict[str, object] = {"dtype": "float32"}
        self._requests: deque[int] = deque()
        self._stats = SpecStats()
        for _ in range(3):
            self._stats.observe(3, 2, 3)

    def add_request(self, request: EngineRequest) -> None:
        self._requests.append(request.request_id)

    def abort(self, request_ids: Sequence[int]) -> None:
        self._requests.clear()

    def get_outputs(self, timeout: float) -> list[EngineOutput]:
        outputs = [EngineOutput(i, ANSWER, "stop", "<eos>", self._stats, 0) for i in self._requests]
        self._requests.clear()
        return outputs

    def engine_stats(self) -> dict[str, object]:
        return {"steps": 0}


def resident(name: str) -> float:
    """Return a line of this process's status, in MB. (What getrusage says includes the process it was forked from.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    source, output, *sets = sys.argv[1:]
    paths = {"input.path": source, "output.path": output, "model.path": "stories-7m"}
    recipe = recipe_from_settings(["sampling.seed=7", *sets], paths)
    folder = resolve_model("stories-7m")
    tokenizer = Tokenizer(folder)
    tokenizer.encode("warm")
    readers: list[RowReader] = []
    rows = Input.rows

    def watched(self: Input, **options: bool) -> RowReader:
        readers.append(rows(self, **options))
        return readers[-1]

    Input.rows = watched  # type: ignore[method-assign, assignment]
    read_at_first_write: list[int] = []

    def begin(writer: LineWriter) -> None:
        write = writer._sink.write

        def first_write(lines: bytes) -> None:
            if not read_at_first_write:
                read_at_first_write.append(readers[-1].rows)
            write(lines)

        writer._sink.write = first_write  # type: ignore[method-assign]

    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident set so far
    before = resident("VmRSS")
    started, cpu_started = time.perf_counter(), time.process_time()
    session = Session(recipe, folder, tokenizer, Input(recipe.input), Target(output, fresh=False))
    prepared, cpu_prepared = time.perf_counter(), time.process_time()
    stats = session.run(AnsweringEngine(), on_begin=begin)
    ended, cpu_ended = time.perf_counter(), time.process_time()
    print(
        json.dumps(
            {
                "rows": stats.rows,
                "prepare_seconds": round(prepared - started, 2),
                "run_seconds": round(ended - prepared, 2),
                "rows_per_second": round(stats.rows / (ended - prepared)),
                "rows_per_cpu_second": round(stats.rows / (cpu_ended - cpu_prepared)),
                "prepare_cpu_seconds": round(cpu_prepared - cpu_started, 2),
                "peak_over_start_mb": round(resident("VmHWM") - before, 1),
                "rows_read_at_first_output": read_at_first_write[0],
            }
        )
    )


main()
