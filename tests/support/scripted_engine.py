"""An engine without a model: every request has a script, and its pieces come out in a scripted order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import EngineError
from specgen.stats import SpecStats

if TYPE_CHECKING:  # it brings torch
    from specgen.worker.startup import StartUp
    from specgen.worker.timing import DecodeTimes

EOS = 1
Script = Callable[[EngineRequest], tuple[list[int], str]]


def story_of(request: EngineRequest) -> tuple[list[int], str]:
    """Repeat the prompt without BOS, then end by EOS; cut by max_tokens."""
    ids = [*request.prompt_token_ids[1:], EOS]
    if request.params.max_tokens is not None and len(ids) > request.params.max_tokens:
        return ids[: request.params.max_tokens], "length"
    return ids, "stop"


class FakeEngine:
    """Runs `max_running` requests at once, 1 to 3 tokens a step each; requests end in an order drawn from `seed`.

    script: what a request gives, with its finish reason ("error" and so on included). die_after: steps until the loop
    dies. most_held: the most requests it ever held at once.
    """

    max_model_len = 64
    vocab_size = 4096
    eos_token_ids = (EOS,)

    def __init__(
        self, script: Script = story_of, *, max_running: int = 4, seed: int = 0, die_after: int | None = None
    ) -> None:
        self.script = script
        self.max_running = max_running
        self.requests: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.most_held = 0
        self.steps = 0
        self.seconds_a_step = 0.0
        self.on_step: Callable[[int], None] = lambda step: None
        self._die_after = die_after
        self._random = random.Random(seed)
        self._left: dict[int, tuple[list[int], str]] = {}
        self._stats: dict[int, SpecStats] = {}
        self._steps: dict[int, random.Random] = {}
        self.description: dict[str, object] = {
            "device": "fake",
            "dtype": "float32",
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 256,
        }
        self.asked = 0
        self.decode_rows = 4
        self.tells_parts = self.always_tells_parts = True
        self.traced: list[tuple[Path, int, int]] = []

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *args: object) -> None:
        self._left.clear()

    @property
    def num_running(self) -> int:
        return min(self.max_running, len(self._left))

    @property
    def num_waiting(self) -> int:
        return max(0, len(self._left) - self.max_running)

    def add_request(self, request: EngineRequest) -> None:
        assert request.request_id not in self._left
        self.requests.append(request)
        ids, reason = self.script(request)
        self._left[request.request_id] = (list(ids), reason)
        self._stats[request.request_id] = SpecStats()
        self._steps[request.request_id] = random.Random(request.seed)
        self.most_held = max(self.most_held, len(self._left))

    def abort(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self._left.pop(request_id, None)

    def get_outputs(self, timeout: float) -> list[EngineOutput]:
        self.steps += 1
        self.on_step(self.steps)
        if self._die_after is not None and self.steps > self._die_after:
            raise EngineError("the engine stopped: scripted")
        outputs = []
        for request_id in list(self._left)[: self.max_running]:
            if self._random.random() < 0.5:
                continue
            outputs.append(self._advance(request_id))
        if self.seconds_a_step:
            time.sleep(self.seconds_a_step)
        return outputs

    def _advance(self, request_id: int) -> EngineOutput:
        ids, reason = self._left[request_id]
        num = min(len(ids), self._steps[request_id].randint(1, 3))  # the row's own, whatever else runs
        new = [ids.pop(0) for _ in range(num)]
        if new:
            self._stats[request_id].observe(num, num - 1, num)
        if ids:
            return EngineOutput(request_id, new)
        del self._left[request_id]
        error = "scripted failure" if reason == "error" else None
        stop = "<eos>" if reason == "stop" else None
        return EngineOutput(request_id, new, reason, stop, self._stats[request_id], 2, error)

    def engine_stats(self) -> dict[str, object]:
        return {"steps": self.steps, "target_seconds": 0.5, "sampling_seconds": 0.25, "draft_seconds": 0.125}

    def decode_times(self) -> dict[int, DecodeTimes]:
        """Ten steps more of `decode_rows` rows each time: 2 ms from start to start, 1.5 ms of work in it."""
        self.asked += 1
        n = 10 * self.asked
        parts = {"target": 0.001 * n, "sampling": 0.0003 * n, "draft": 0.0002 * n}
        from specgen.worker.timing import DecodeTimes

        return {self.decode_rows: DecodeTimes(n, 0.0015 * n, n, 0.002 * n, n if self.tells_parts else 0, parts)}

    def start_up(self) -> StartUp:
        from specgen.worker.startup import StartUp

        return StartUp(weight_bytes=4_000_000, weight_seconds=0.002, ready_seconds=0.5)

    def time_parts(self, wanted: bool) -> None:
        self.tells_parts = wanted or self.always_tells_parts

    def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
        self.traced.append((path, num_rows, num_steps))
