"""The engine as the job layer sees it: requests in, outputs out, the busy loop in a thread of its own."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from specgen.engine.core import Abort, Add, EngineCore, Stop
from specgen.engine.draft_length import DraftLength
from specgen.engine.executor import UniProcExecutor
from specgen.engine.head_test import test_head
from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.repetition import RepeatLimit
from specgen.engine.request import EngineOutput, EngineRequest
from specgen.engine.scheduler import Scheduler, SchedulerConfig
from specgen.errors import EngineError, EngineStuckError
from specgen.kernels.linear import cpu_linear_mode
from specgen.model_path import resolve_head
from specgen.models.cheap_drafts import CheapDrafts
from specgen.models.config import read_config, resolve_max_model_len
from specgen.recipe import Recipe
from specgen.tokenizer import added_token_ids
from specgen.worker.config import (
    WorkerConfig,
    check_float8,
    is_exact,
    resolve_block_size,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_num_batched_tokens,
)
from specgen.worker.labels import StepLabels
from specgen.worker.speculator import DRAFTING, Drafting
from specgen.worker.startup import Progress, StartUp
from specgen.worker.timing import DecodeTimes
from specgen.worker.trace import StepTrace
from specgen.worker.worker import DrafterFactory, Worker

logger = logging.getLogger(__name__)


class EngineClient:
    """A loaded model under a running loop. Every method may be called from any thread.

    The model is loaded in the loop's own thread: the CPU's OpenMP runtime keeps worker threads for every thread that
    computes, and throttles all of them once there are more than cores.

    `description` names what was resolved (device, dtype, sizes, memory), for logs and the record beside the output.
    """

    def __init__(
        self, build: Callable[[], tuple[Worker, Scheduler]], check: bool = False, adaptive: bool = False
    ) -> None:
        """Runs `build` and then the loop in a new thread; returns, or raises, when `build` does.

        `adaptive`: steps make as many drafts as pay, up to the scheduler's number.
        """
        self._outputs: queue.SimpleQueue[list[EngineOutput] | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._labels: StepLabels | None = None
        self._draft_length: DraftLength | None = None
        self._repeat_limit: RepeatLimit | None = None
        self._ready = threading.Event()
        start = time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=(build, check, adaptive), name="engine", daemon=True)
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # an interrupt: the interpreter must not go down under a thread that computes
            self._ready.wait()
            self.shutdown()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        config = self._scheduler.config
        self._ready_seconds = time.perf_counter() - start
        self.description = _describe(self._worker, self._scheduler, self._ready_seconds)
        self.max_model_len = config.max_model_len
        self.vocab_size = self._worker.config.model.vocab_size
        self.eos_token_ids = tuple(sorted(config.eos_token_ids))

    @classmethod
    def create(
        cls,
        recipe: Recipe,
        folder: Path,
        eos_token_ids: Iterable[int],
        drafter_factory: DrafterFactory | None = None,
        check: bool = False,
        progress: Progress | None = None,
        random_weights: bool = False,
        drafting: Drafting = DRAFTING,
        is_headless: bool = False,
        pads_decode_steps: bool = True,
    ) -> EngineClient:
        """Loads the model in `folder` as the recipe says and starts the loop.

        `drafter_factory` replaces the model's draft layers; `check` asserts the conservation laws after every step.
        `progress` is told how far the start is. With `random_weights`, `folder` needs to hold nothing but the model's
        configuration. `drafting`: how drafts are drawn. `is_headless`: the model is taken as if it had no draft layers.
        `pads_decode_steps`: a few decode steps of a size may run with more rows, before a graph is captured for it.

        Raises:
            ModelError, EngineError, RecipeError: model, machine and recipe do not fit together.
        """

        eos_token_ids = tuple(eos_token_ids)

        def build() -> tuple[Worker, Scheduler]:
            """Loads the model and measures what fits, in the engine's own thread."""
            config = replace(
                _worker_config(recipe, folder),
                drafting=drafting,
                cheap_drafts=_cheap_drafts(recipe, folder, eos_token_ids),
                pads_decode_steps=pads_decode_steps,
            )
            if random_weights:
                config = replace(config, folder=None)
            if is_headless:
                config = replace(config, model=replace(config.model, num_nextn_predict_layers=0))  # type: ignore[type-var]
            worker = Worker(config, drafter_factory, progress)
            if not random_weights and recipe.speculation.method != "synthetic":
                test_head(worker, folder, recipe.speculation.self_test)
            caching = recipe.engine.enable_prefix_caching
            kv = KVBlockManager(worker.budget.num_blocks, config.block_size, config.max_model_len, caching)
            return worker, Scheduler(_scheduler_config(recipe, worker, eos_token_ids), kv)

        return cls(build, check, recipe.speculation.adaptive)

    def _run(self, build: Callable[[], tuple[Worker, Scheduler]], check: bool, adaptive: bool) -> None:
        try:
            self._worker, self._scheduler = build()
            executor = UniProcExecutor(self._worker)
            if adaptive and self._scheduler.draft_limit:
                self._draft_length = DraftLength(self._scheduler.draft_limit)
            elif may_repeat(self._worker.config, self._scheduler.config):
                self._repeat_limit = RepeatLimit()
            self._core = EngineCore(
                self._scheduler,
                executor,
                self._outputs.put,
                check_every_step=check,
                draft_length=self._draft_length,
                repeat_limit=self._repeat_limit,
            )
            with _settled_heap():
                self._ready.set()
                self._core.run_busy_loop()
            executor.shutdown()
        except BaseException as error:  # whatever ends the thread is handed to the caller
            self._failure = error
            self._outputs.put(error)
        finally:
            self._ready.set()

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the engine without a slot."""
        return len(self._scheduler.waiting)

    def add_request(self, request: EngineRequest) -> None:
        """Hands a request over; never blocks. What cannot run comes back as an error output."""
        self._core.input_queue.put(Add(request))

    def abort(self, request_ids: Iterable[int]) -> None:
        """Ends requests; each that was alive gets an output with finish_reason "abort"."""
        self._core.input_queue.put(Abort(tuple(request_ids)))

    def get_outputs(self, timeout: float) -> list[EngineOutput]:
        """All outputs there are, waiting up to `timeout` seconds for the first.

        Raises:
            EngineError: the loop ended by an error, which is the cause.
        """
        outputs: list[EngineOutput] = []
        block = self._failure is None  # after it nothing more comes
        while True:
            try:
                item = self._outputs.get(block=block, timeout=timeout if block else None)
            except queue.Empty:
                if not outputs and self._failure is not None:
                    raise EngineError(f"the engine stopped: {self._failure!r}") from self._failure
                return outputs
            if isinstance(item, BaseException):
                if outputs:
                    return outputs  # the failure is raised by the next call
                raise EngineError(f"the engine stopped: {item!r}") from item
            outputs.extend(item)
            block = False

    def engine_stats(self) -> dict[str, object]:
        """Steps, seconds by part (`specgen.worker.timing.PARTS`), and preemptions so far.

        With adaptive drafts also `draft_lengths`: drafts a step that pay most, by the largest number of rows.
        """
        timer, pool = self._worker.runner.timer, self._scheduler.kv.pool
        adaptive = {"draft_lengths": self._draft_length.best} if self._draft_length is not None else {}
        return {
            "steps": self._core.num_steps,
            **{f"{part}_seconds": value for part, value in timer.seconds.items()},
            "preemptions": self._scheduler.num_preemptions,
            "kv_usage": 1 - pool.num_free_blocks / (pool.num_blocks - 1),
            **adaptive,
        }

    def start_up(self) -> StartUp:
        """Where the time went since the engine was begun: graphs and kernels are made when they are first used."""
        return self._worker.start_up()._replace(ready_seconds=self._ready_seconds)

    def decode_times(self) -> dict[int, DecodeTimes]:
        """Seconds of the decode-only steps so far, by their number of rows."""
        return self._worker.runner.timer.decode_times

    def trace_steps(self, path: Path, num_rows: int, num_steps: int) -> None:
        """Writes a trace of `num_steps` of the next steady decode steps of `num_rows` rows to `path`."""
        self._worker.trace = StepTrace(path, num_rows, num_steps)

    def label_steps(self, wanted: bool) -> None:
        """From now on steps run one operation at a time, inside ranges that a trace shows (or as before)."""
        if self._labels is not None:
            self._labels.remove()
        model = self._worker.model
        self._labels = StepLabels(self._worker.runner, (model.target, model.mtp)) if wanted else None

    def time_parts(self, wanted: bool) -> None:
        """From now on the parts of steps that run as one CUDA graph are (not) told; telling them stalls the device."""
        self._worker.runner.timer.detailed = wanted
        if self._repeat_limit is not None:
            self._repeat_limit.is_held = wanted

    def shutdown(self) -> None:
        """Aborts what is left, ends the loop and drops the model. May be called twice.

        Waits for the step that runs; a loop that stands still (`EngineStuckError`) is left to itself.
        """
        if self._thread.is_alive():
            self._core.input_queue.put(Stop(drain=False))
            self._thread.join()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, EngineStuckError):
            self.shutdown()


def may_repeat(worker: WorkerConfig, scheduler: SchedulerConfig) -> bool:
    """Whether decode steps may run several times: where a device has a time of its own, and no answer depends on it.

    Verified by ratio, an answer depends on how many drafts a row has at its end.
    """
    return worker.device.type == "cuda" and scheduler.async_scheduling and not worker.by_ratio


@contextmanager
def _settled_heap() -> Iterator[None]:
    """The garbage collector leaves alone what is there before: going through it was a fifth of the host's work."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _worker_config(recipe: Recipe, folder: Path) -> WorkerConfig:
    model = read_config(folder)
    device = resolve_device(recipe.model.device)
    origin = recipe.origins.get("engine.max_model_len")
    max_model_len = resolve_max_model_len(recipe.engine.max_model_len, model, origin)
    dtype = resolve_dtype(recipe.model.dtype, device)
    return WorkerConfig(
        folder=folder,
        model=model,
        device=device,
        dtype=dtype,
        max_num_seqs=recipe.engine.max_num_seqs,
        max_num_batched_tokens=resolve_max_num_batched_tokens(recipe.engine.max_num_batched_tokens, device),
        max_model_len=max_model_len,
        block_size=resolve_block_size(recipe.engine.block_size, device),
        num_blocks=recipe.engine.num_blocks,
        memory_fraction=recipe.engine.memory_fraction,
        num_speculative_tokens=recipe.speculation.num_tokens,
        by_ratio=recipe.speculation.method == "ratio",
        acceptance=recipe.speculation.acceptance,
        cuda_graphs=recipe.engine.cuda_graphs,
        tune_cpu_threads=True,
        keeps_float8=recipe.model.float8 == "keep",
        draft_folder=resolve_head(head) if (head := recipe.speculation.model) is not None else None,
        exact=is_exact(recipe.engine.exactness, device),
        kv_dtype=resolve_kv_dtype(recipe.model.kv_dtype, dtype, device),
        widens_steps=recipe.engine.max_num_batched_tokens is None and device.type == "cuda",
    )


def _cheap_drafts(recipe: Recipe, folder: Path, eos_token_ids: Iterable[int]) -> CheapDrafts:
    speculation = recipe.speculation
    if speculation.dtype == "float8":
        check_float8(resolve_device(recipe.model.device), "speculation.dtype")
    if speculation.vocab_size is None:
        return CheapDrafts(speculation.dtype == "float8")
    extra_ids = {*eos_token_ids, *recipe.sampling.stop_token_ids, *added_token_ids(folder)}
    return CheapDrafts(speculation.dtype == "float8", speculation.vocab_size, tuple(sorted(extra_ids)))


def _scheduler_config(recipe: Recipe, worker: Worker, eos_token_ids: Iterable[int]) -> SchedulerConfig:
    config, asynchronous = worker.config, recipe.engine.async_scheduling
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        num_draft_layers=worker.num_draft_layers,
        async_scheduling=config.device.type == "cuda" if asynchronous is None else asynchronous,
        eos_token_ids=frozenset(eos_token_ids),
    )


def _describe(worker: Worker, scheduler: Scheduler, load_seconds: float) -> dict[str, object]:
    config = worker.config
    is_cpu = config.device.type == "cpu"
    return {
        "device": str(config.device) if is_cpu else torch.cuda.get_device_name(config.device),
        "dtype": str(config.dtype).removeprefix("torch."),
        "kv_dtype": str(config.pool_dtype).removeprefix("torch."),
        "exactness": "exact" if config.exact else "fast",
        "cpu_linear_mode": cpu_linear_mode() if is_cpu else None,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "num_speculative_tokens": config.num_speculative_tokens,
        "num_draft_layers": worker.num_draft_layers,
        "async_scheduling": scheduler.config.async_scheduling,
        "weight_bytes": worker.model.num_bytes,
        "num_blocks": worker.budget.num_blocks,
        "block_size": config.block_size,
        "kv_tokens": scheduler.kv.max_request_tokens(),
        "memory": worker.budget.as_dict(),
        "load_seconds": round(load_seconds, 3),
    }
