"""Rows through the real engine in the calling thread, and drafters that a test scripts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specgen.engine.core import Abort, Add, EngineCore, Stop
from specgen.engine.draft_length import DraftLength
from specgen.engine.executor import UniProcExecutor
from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.repetition import RepeatLimit
from specgen.engine.request import EngineOutput, EngineRequest, StopCheck, TokenLogprob
from specgen.engine.scheduler import Scheduler, SchedulerConfig
from specgen.engine.step import ModelRunnerOutput, SchedulerOutput
from specgen.models.cheap_drafts import AS_LOADED, CheapDrafts
from specgen.models.config import read_config
from specgen.sampling_params import SamplingParams
from specgen.stats import SpecStats
from specgen.worker.config import WorkerConfig
from specgen.worker.input_batch import InputBatch
from specgen.worker.speculator import DRAFTING, Drafting
from specgen.worker.states import RequestStates
from specgen.worker.worker import DrafterFactory, Worker


@dataclass
class Row:
    """A prompt with its parameters; `seed` also tells scripted drafters whose slot they look at."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    new_stop_check: Callable[[], StopCheck] | None = None


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None
    stats: SpecStats | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    stop_at: int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None


Propose = Callable[[int, list[int]], Sequence[int]]


def scripted(propose: Propose) -> DrafterFactory:
    """A drafter whose drafts are `propose(seed, committed ids)`, at most K of them, any may be -1."""

    class Scripted:
        def __init__(self, states: RequestStates, num_speculative_tokens: int) -> None:
            self.states, self.width = states, num_speculative_tokens

        def propose(self, batch: InputBatch, hidden: Any, num_sampled: Any, num_rejected: Any, num_spec: int) -> None:
            s = self.states
            for slot in batch.idx_mapping.tolist():
                committed = s.token_ids[slot, : int(s.total_len[slot])].tolist()
                drafts = list(propose(int(s.seeds[slot]), committed))[: min(self.width, num_spec)]
                drafts += [-1] * (self.width - len(drafts))
                s.draft_tokens[slot] = torch.tensor(drafts, dtype=torch.int64)

    return Scripted


def oracle(
    rows: Sequence[Row], results: Sequence[Result], change: Callable[[int], int] = lambda t: t
) -> DrafterFactory:
    """Proposes the row's own continuation, each token passed through `change` (ANTI: another token)."""
    texts = {row.seed: row.prompt + result.token_ids for row, result in zip(rows, results, strict=True)}
    return scripted(lambda seed, committed: [change(t) for t in texts.get(seed, [])[len(committed) :]])


class Restless(DraftLength):
    """Another number of drafts after every step, whatever the steps took."""

    def __init__(self, most: int, rng: random.Random) -> None:
        super().__init__(most)
        self._rng = rng

    def step_done(self, step: SchedulerOutput, num_accepted: Sequence[int]) -> None:
        self.limit = self._rng.randint(0, self.most)


class Repeating(RepeatLimit):
    """Steps run 1 to `most` times, another limit after every round, whatever the host waited."""

    def __init__(self, most: int, rng: random.Random) -> None:
        super().__init__()
        self._most, self._rng = most, rng
        self.limit = most

    def round_done(self, step: SchedulerOutput, output: ModelRunnerOutput, waited: float | None, now: float) -> None:
        self.limit = self._rng.randint(1, self._most)


class Harness:
    """An engine over a model folder whose loop runs when a test says so."""

    def __init__(
        self,
        folder: Path,
        *,
        k: int = 0,
        max_num_seqs: int = 16,
        budget: int = 512,
        num_blocks: int = 512,
        block_size: int = 4,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
        async_scheduling: bool = False,
        drafter: DrafterFactory | None = None,
        eos: Iterable[int] = (),
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        drafting: Drafting = DRAFTING,
        by_ratio: bool = False,
        draft_folder: Path | None = None,
        keeps_float8: bool = False,
        cheap_drafts: CheapDrafts = AS_LOADED,
        kv_dtype: torch.dtype | None = None,
        draft_length: DraftLength | None = None,
        repeat_limit: RepeatLimit | None = None,
    ) -> None:
        model = read_config(folder)
        self.config = WorkerConfig(
            folder=folder,
            model=model,
            device=torch.device(device),
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len or model.max_position_embeddings,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_fraction=0.9,
            num_speculative_tokens=k,
            drafting=drafting,
            by_ratio=by_ratio,
            draft_folder=draft_folder,
            keeps_float8=keeps_float8,
            cheap_drafts=cheap_drafts,
            kv_dtype=kv_dtype,
        )
        self.worker = Worker(self.config, drafter)
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.config.max_model_len,
            num_speculative_tokens=k,
            num_draft_layers=self.worker.num_draft_layers,
            async_scheduling=async_scheduling,
            eos_token_ids=frozenset(eos),
        )
        kv = KVBlockManager(num_blocks, block_size, self.config.max_model_len, prefix_caching)
        self.scheduler = Scheduler(scheduler_config, kv)
        self.outputs: list[EngineOutput] = []
        self.core = EngineCore(
            self.scheduler,
            UniProcExecutor(self.worker),
            self.outputs.extend,
            check_every_step=True,
            draft_length=draft_length,
            repeat_limit=repeat_limit,
        )
        self._next_id = 0

    def seen_steps(self) -> list[SchedulerOutput]:
        """The steps that it runs from now on."""
        steps: list[SchedulerOutput] = []
        execute = self.worker.execute_model
        self.worker.execute_model = lambda step: (steps.append(step), execute(step))[1]  # type: ignore[method-assign]
        return steps

    def run(self, rows: Sequence[Row], abort: Iterable[int] = ()) -> list[Result]:
        """All rows to their end, in one batch; `abort` names rows that are aborted right after being added."""
        first = self._next_id
        for row in rows:
            request = EngineRequest(self._next_id, row.prompt, row.params, row.seed, row.new_stop_check)
            self.core.input_queue.put(Add(request))
            self._next_id += 1
        self.core.input_queue.put(Abort(tuple(first + i for i in abort)))
        self.core.input_queue.put(Stop(drain=True))
        self.outputs.clear()
        self.core.run_busy_loop()
        results = [Result() for _ in rows]
        for output in self.outputs:
            result = results[output.request_id - first]
            result.token_ids += output.new_token_ids
            result.logprobs += output.logprobs or []
            if output.finish_reason is not None:
                assert result.finish_reason is None, "a row ended twice"
                result.finish_reason, result.stop, result.stats = output.finish_reason, output.stop, output.stats
                result.num_cached_tokens, result.error = output.num_cached_tokens, output.error
                result.error_code, result.stop_at = output.error_code, output.stop_at
                result.prompt_logprobs = output.prompt_logprobs
        assert all(result.finish_reason is not None for result in results), "a row has no end"
        assert not self.scheduler.requests
        return results


def run_rows(folder: Path, rows: Sequence[Row], **options: Any) -> list[Result]:
    """The rows through a fresh engine; see `Harness`."""
    return Harness(folder, **options).run(rows)


def reference(folder: Path, rows: Sequence[Row], eos: Iterable[int] = (), **options: Any) -> list[Result]:
    """REF: the same rows without drafts, one at a time in an engine that holds one row, nothing shared."""
    harness = Harness(folder, k=0, max_num_seqs=1, prefix_caching=False, eos=eos, **options)
    return [harness.run([row])[0] for row in rows]
