"""An engine without a model: every request has a script, and its pieces come out in a scripted order."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specgen.engine.request import EngineOutput, EngineRequest
from specgen.errors import EngineError
from specgen.job.job import Job
from specgen.job.readers import ReadAhead, RowReader
from specgen.job.writer import LineWriter
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, recipe_from_settings
from specgen.stats import RunStats, SpecStats
from specgen.tokenizer import Tokenizer

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
        self.on_step: Callable[[int], None] = lambda step: None
        self._die_after = die_after
        self._random = random.Random(seed)
        self._left: dict[int, tuple[list[int], str]] = {}
        self._stats: dict[int, SpecStats] = {}
        self.description: dict[str, object] = {"device": "fake"}

    def __enter__(self) -> "FakeEngine":
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
        return outputs

    def _advance(self, request_id: int) -> EngineOutput:
        ids, reason = self._left[request_id]
        num = min(len(ids), self._random.randint(1, 3))
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


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("stories-7m"))


@pytest.fixture(scope="session")
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


class Workplace:
    """A folder with an input file, and what is needed to run it through a fake engine."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"

    def write(self, rows: Sequence[dict[str, Any] | str | bytes]) -> None:
        """Write the input: objects as JSON, text and bytes as they are."""
        lines = [
            row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
            for row in rows
        ]
        self.input.write_bytes(b"".join(line + b"\n" for line in lines))

    def recipe(self, *sets: str) -> Recipe:
        paths = {"input.path": str(self.input), "output.path": str(self.output), "model.path": "stories-7m"}
        return recipe_from_settings([f"sampling.seed={7}", *sets], paths)

    def run(self, engine: FakeEngine, *sets: str, **options: Any) -> RunStats:
        """Run the input through `engine` into the output."""
        recipe = self.recipe(*sets)
        with open(self.input, "rb") as stream:
            source = ReadAhead(RowReader(stream, where="in", id_column=recipe.input.id, limit=recipe.input.limit))
            with LineWriter.open(str(self.output), ordered=recipe.output.order == "input", overwrite=True) as writer:
                return Job(recipe, engine, self.tokenizer, source, writer, **options).run()

    def records(self) -> list[dict[str, Any]]:
        """Return the output lines, parsed strictly."""

        def refuse(name: str) -> None:
            raise ValueError(name)

        lines = self.output.read_text(encoding="utf-8").split("\n")
        assert lines.pop() == ""
        return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture
def workplace(tmp_path: Path, tokenizer: Tokenizer) -> Workplace:
    return Workplace(tmp_path, tokenizer)
