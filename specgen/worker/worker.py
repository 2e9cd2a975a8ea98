"""One device: the model on it, the KV pool sized by a measured step, and the runner over both."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from specgen.engine.step import NewRow, ScheduledRow, SchedulerOutput
from specgen.errors import ModelError
from specgen.models.loading import load_model
from specgen.models.packing import pack_products
from specgen.sampling_params import SamplingParams
from specgen.worker.compile_ahead import compile_ahead
from specgen.worker.config import WorkerConfig, make_products_exact
from specgen.worker.cpu_threads import CpuThreads
from specgen.worker.input_batch import build_batch
from specgen.worker.memory import LargestSteps, MemoryBudget, plan_memory
from specgen.worker.model_runner import ModelRunner
from specgen.worker.processor_needs import processor_needs
from specgen.worker.sampled_step import SampledStep
from specgen.worker.sampler import Noise, Sampler
from specgen.worker.speculator import Drafter, MTPSpeculator
from specgen.worker.startup import Progress, StartUp, compile_clock
from specgen.worker.states import RequestStates
from specgen.worker.trace import StepTrace

logger = logging.getLogger(__name__)

_ROOM = 2  # unused memory, in largest steps, from which on steps may be twice as large


DrafterFactory = Callable[[RequestStates, int], Drafter]


def _no_memory(error: BaseException) -> ModelError:
    return ModelError(
        f"the machine lacks the memory for this model and recipe: {' '.join(str(error).split())[:200]}",
        hint="lower engine.max_num_seqs, engine.max_num_batched_tokens or engine.max_model_len",
    )


class Worker:
    """Loads the model, sizes the KV pool and runs steps.

    config: as it was given, but for `max_num_batched_tokens`, see `WorkerConfig.widens_steps`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        drafter_factory: DrafterFactory | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`drafter_factory(states, K)` replaces the model's own draft layers (tests and experiments).

        `progress` is told how far the start is.

        Raises:
            ModelError, RecipeError: see `load_model` and `plan_memory`, or the machine lacks the memory.
        """
        self.config = config
        if config.device.type == "cuda":
            if config.exact:
                make_products_exact()
            torch.cuda.set_device(config.device)
        self._drafter_factory = drafter_factory
        self._progress = progress
        self.trace: StepTrace | None = None
        try:
            self._build()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _no_memory(error) from error
        except RuntimeError as error:  # the CPU's allocator has no exception of its own
            if "allocate memory" in str(error):
                raise _no_memory(error) from error
            raise

    def _build(self) -> None:
        c = self.config
        num_own = 0 if self._drafter_factory is not None else c.num_speculative_tokens
        clock = compile_clock()
        self._compiled_before = replace(clock)
        started = time.perf_counter()
        self.model = load_model(
            c.folder,
            c.model,
            num_own,
            c.max_model_len,
            c.dtype,
            c.device,
            self._progress.weights if self._progress is not None else None,
            c.draft_folder,
            c.cheap_drafts,
            c.keeps_float8,
        )
        if c.device.type == "cpu":
            pack_products(self.model.target, self.model.mtp)
        if c.device.type == "cuda":
            torch.cuda.synchronize(c.device)  # random weights are still being made
        self.weight_seconds = time.perf_counter() - started
        self.num_draft_layers = self.model.mtp.num_layers if self.model.mtp is not None else 0
        self.states = RequestStates(
            c.max_num_seqs,
            c.max_model_len,
            c.model.vocab_size,
            c.num_speculative_tokens,
            c.block_size,
            c.device,
            keeps_draft_logits=c.by_ratio and c.num_speculative_tokens > 0,
        )
        started = time.perf_counter()
        self.budget = self._plan_memory(smaller_too=True)
        if c.widens_steps and self._has_room_for_wider_steps():
            self.config = c = replace(c, max_num_batched_tokens=2 * c.max_num_batched_tokens)
            self.budget = self._plan_memory(smaller_too=False)
        self.largest_step_seconds = time.perf_counter() - started
        self.kv_caches = self._new_kv_caches(self.budget.num_blocks)
        self.runner = self._new_runner(self.kv_caches)
        if self._uses_graphs:
            self.runner.use_graphs(c.max_num_seqs, c.max_num_batched_tokens, self.budget.graphs, c.pads_decode_steps)
        self._threads = self._tuned_threads()
        self._started: float | None = None  # of a decode step, if it is timed for the threads

    def start_up(self) -> StartUp:
        """Where the time went so far; `ready_seconds` is for whoever waited to add."""
        graphs = [g for g in (self.runner.graphs, self.runner.forward_graphs) if g is not None]
        clock, before = compile_clock(), self._compiled_before
        return StartUp(
            weight_bytes=self.model.num_bytes,
            weight_seconds=self.weight_seconds,
            largest_step_seconds=self.largest_step_seconds,
            num_graphs=sum(g.num_captured for g in graphs),
            graph_seconds=sum(g.capture_seconds for g in graphs),
            num_compiled=clock.num_compiled - before.num_compiled,
            num_cached=clock.num_cached - before.num_cached,
            compile_seconds=clock.seconds - before.seconds,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, the draft layers' included."""
        own = 0 if self._shares_pool else self.num_draft_layers * self.config.block_size * self._draft_width
        return (math.prod(self._kv_shape(1)) + own) * self.config.pool_dtype.itemsize

    @property
    def _draft_width(self) -> int:
        return self.model.mtp.kv_width if self.model.mtp is not None else self.config.model.kv_width

    @property
    def _shares_pool(self) -> bool:
        """Whether target and draft layers have KV of one width, and so one pool."""
        return self._draft_width == self.config.model.kv_width

    def _kv_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        c = self.config
        num_layers = c.model.num_hidden_layers + (self.num_draft_layers if self._shares_pool else 0)
        return (num_layers, num_blocks, c.block_size, c.model.kv_width)

    def _new_kv_caches(self, num_blocks: int) -> torch.Tensor:
        return self._new_pool(self._kv_shape(num_blocks))

    def _new_pool(self, shape: tuple[int, int, int, int]) -> torch.Tensor:
        dtype = self.config.pool_dtype
        if self.config.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.config.device)
        # numpy's zeros are the system's: no page is touched before it is used, and most of a large pool never is
        return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)

    def _draft_kv_caches(self, kv_caches: torch.Tensor) -> torch.Tensor:
        """The draft layers' part of the pool, or a pool of their own with as many blocks."""
        if self._shares_pool:
            return kv_caches[self.config.model.num_hidden_layers :]
        _, num_blocks, block_size, _ = kv_caches.shape
        return self._new_pool((self.num_draft_layers, num_blocks, block_size, self._draft_width))

    def _new_runner(self, kv_caches: torch.Tensor) -> ModelRunner:
        c = self.config
        num_target_layers = c.model.num_hidden_layers
        sampler = Sampler(self.states, c.model.final_logit_softcapping)
        drafter: Drafter | None = None
        if self._drafter_factory is not None:
            drafter = self._drafter_factory(self.states, c.num_speculative_tokens)
        elif self.model.mtp is not None:
            drafter = MTPSpeculator(
                self.model.mtp,
                self.states,
                sampler,
                self._draft_kv_caches(kv_caches),
                c.max_model_len,
                c.num_speculative_tokens,
                replace(c.drafting, noise=Noise.DRAFT) if c.by_ratio else c.drafting,
            )
        return ModelRunner(
            self.model.target,
            kv_caches[:num_target_layers],
            self.states,
            sampler,
            drafter,
            c.max_model_len,
            c.num_speculative_tokens,
            rewinds=self.num_draft_layers > 1,
            acceptance=c.acceptance,
        )

    def _has_room_for_wider_steps(self) -> bool:
        """Whether steps of twice the tokens fit into memory that nobody uses, and rows could ever fill one."""
        c, budget = self.config, self.budget
        is_filled = c.max_num_seqs * c.max_model_len > c.max_num_batched_tokens
        return is_filled and budget.left > _ROOM * (budget.step_peak + budget.graphs)

    def _plan_memory(self, smaller_too: bool) -> MemoryBudget:
        """Measures the largest steps, their kernels being compiled before; with `smaller_too`, those of all steps."""
        c = self.config
        max_blocks = -(-c.max_model_len // c.block_size)
        steps, runner = self._largest_steps()
        if self._uses_graphs:
            smaller = partial(runner.run_all_kinds, c.max_num_seqs, c.max_num_batched_tokens)
            kinds = [steps.forward, steps.rest, *((steps.decode, smaller) if smaller_too else ())]
            compile_ahead(self.model.target, kinds, self._progress.kernels if self._progress is not None else None)
        return plan_memory(
            c.device,
            steps,
            self.block_bytes,
            c.memory_fraction,
            c.max_num_seqs * max_blocks + 1,
            c.num_blocks,
            self._uses_graphs,
        )

    @property
    def _uses_graphs(self) -> bool:
        """Whether decode steps are captured; a scripted drafter may look at values, and cannot be."""
        return self.config.cuda_graphs and self.config.device.type == "cuda" and self._drafter_factory is None

    def _largest_steps(self) -> tuple[LargestSteps, ModelRunner]:
        """Steps of the most tokens and logits rows, over a throw-away pool, with every processor on; their runner."""
        c = self.config
        num_rows = min(c.max_num_seqs, c.max_num_batched_tokens)
        lengths = [c.max_num_batched_tokens // num_rows] * num_rows
        lengths[0] += c.max_num_batched_tokens - sum(lengths)
        lengths = [min(n, c.max_model_len - 1) for n in lengths]
        num_blocks = 1 + -(-max(lengths) // c.block_size)
        params = SamplingParams(
            temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias=((0, 1.0),), logprobs=1
        )
        step = SchedulerOutput(num_spec_tokens=c.num_speculative_tokens)
        for slot, length in enumerate(lengths):
            num_drafts = min(c.num_speculative_tokens, length - 1)
            step.new_rows.append(NewRow(slot, [0] * length, length, params, 0, 0, 0))
            blocks = list(range(1, num_blocks))
            # computed "up to the limit": the work space for the longest context is part of the peak
            step.rows.append(ScheduledRow(slot, slot, length, num_drafts, True, blocks, 0, 0, c.max_model_len))
        kv_caches = self._new_kv_caches(num_blocks)
        runner = self._new_runner(kv_caches)
        steps = LargestSteps(
            forward=lambda: runner.execute_model(step),
            rest=lambda: runner.sample_tokens().get(),
            decode=lambda: runner.run_largest_decode_step(np.arange(num_rows), c.max_num_seqs),
            pool_bytes=kv_caches.nbytes,
        )
        return steps, runner

    def _tuned_threads(self) -> CpuThreads | None:
        """Threads that follow the machine's load, if that is wanted, possible, and changes no bit of the model."""
        most = torch.get_num_threads()
        if not self.config.tune_cpu_threads or self.config.device.type != "cpu" or most == 1:
            return None
        hidden = []
        for count in (most, 1, most):
            torch.set_num_threads(count)
            hidden.append(self._hidden_of_a_small_step())
        if torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0], hidden[2]):
            return CpuThreads(most)
        logger.info("results differ between 1 and %d threads on this processor: the count stays", most)
        return None

    @torch.inference_mode()
    def _hidden_of_a_small_step(self) -> torch.Tensor:
        """The target's hidden states of 20 tokens of one row, over a throw-away pool."""
        c = self.config
        length = min(20, c.max_model_len - 1)
        blocks = list(range(1, 2 + length // c.block_size))
        ids = [i % c.model.vocab_size for i in range(length)]
        kv_caches = self._new_kv_caches(len(blocks) + 1)
        self.states.add([NewRow(0, ids, length, SamplingParams(), 0, 0, 0)])
        row = ScheduledRow(0, 0, length, 0, True, blocks, 0, 0, length)
        self.states.add_blocks([row])
        needs = processor_needs(np.zeros(1, dtype=np.int64), self.states)
        batch = build_batch([row], self.states, length, c.block_size, needs, rewinds=False)
        return self.model.target(batch.input_ids, batch.context, kv_caches)

    def execute_model(self, step: SchedulerOutput) -> None:
        """See `ModelRunner.execute_model`."""
        self.runner.on_step = self.trace.before_step if self.trace is not None else None
        if self._threads is not None and step.num_decode_rows:
            self._started = time.perf_counter()
        self.runner.execute_model(step)

    def sample_tokens(self) -> SampledStep:
        """See `ModelRunner.sample_tokens`."""
        result = self.runner.sample_tokens()
        if self._threads is not None and self._started is not None:
            self._threads.observe(time.perf_counter() - self._started)
            self._started = None
        return result

    def take_draft_token_ids(self) -> list[list[int]]:
        """See `ModelRunner.take_draft_token_ids`."""
        return self.runner.take_draft_token_ids()

    def shutdown(self) -> None:
        """Drops model and pool, and leaves torch's threads as they were."""
        if self.trace is not None:
            self.trace.stop()
        if self._threads is not None:
            self._threads.restore()
        del self.runner, self.kv_caches, self.model, self.states
        if self.config.device.type == "cuda":
            torch.cuda.empty_cache()
