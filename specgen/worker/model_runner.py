"""One step on the device: target forward, sampling and verification, state update, next drafts. Nothing in it waits.

`execute_model` keeps the hidden states and returns nothing; `sample_tokens` does the rest and starts the copy of the
sampled ids to the host, which is read when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from specgen.engine.scheduler import ModelRunnerOutput, SchedulerOutput
from specgen.kernels.post_update import post_update
from specgen.kernels.rejection import get_num_sampled_and_rejected, rejection_sample
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.worker.graphs import DecodeGraphs
from specgen.worker.input_batch import InputBatch, build_batch, processor_needs
from specgen.worker.sampler import Sampler, SamplingRows
from specgen.worker.speculator import Drafter
from specgen.worker.states import RequestStates, to_device
from specgen.worker.timing import StepTimer


class ForwardStep(NamedTuple):
    """What `execute_model` leaves for `sample_tokens`: the target's hidden states."""

    batch: InputBatch
    hidden: torch.Tensor
    num_spec_tokens: int


class LaunchedStep(NamedTuple):
    """A step that runs to its end as one graph: its tokens, as in `SampledStep`."""

    sampled: torch.Tensor
    num_sampled: torch.Tensor


class LogitsSeen(NamedTuple):
    """A step's logits rows: as the target gave them, as the sampler left them (both `[N, V] float32`), and the tokens.

    `sampled [N] int64`. What the sampler left is processed and divided by the temperature, without the noise.
    """

    logits: torch.Tensor
    processed: torch.Tensor
    sampled: torch.Tensor


class SampledStep:
    """A step's sampled ids on their way to the host."""

    def __init__(self, sampled: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """`sampled [B, K+1] int64`, `num_sampled [B] int32`; starts the copy."""
        packed = torch.cat([num_sampled.to(torch.int64).unsqueeze(1), sampled], dim=1)
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._packed = packed

    def get(self) -> ModelRunnerOutput:
        """Waits for the copy; a list of ids a row."""
        if self._event is not None:
            self._event.synchronize()
        return ModelRunnerOutput([row[1 : 1 + row[0]] for row in self._packed.tolist()])


class ModelRunner:
    """Runs steps over the persistent state; `drafter` is None without speculation."""

    def __init__(
        self,
        target: DeepseekV3ForCausalLM,
        kv_caches: torch.Tensor,
        states: RequestStates,
        sampler: Sampler,
        drafter: Drafter | None,
        max_model_len: int,
        num_speculative_tokens: int,
        rewinds: bool,
    ) -> None:
        """`kv_caches [layers, blocks, block_size, latent]` of the target; see `build_batch` for `rewinds`.

        `on_logits`, if it is set, is given the logits of every step that does not run as a graph.
        """
        self.target = target
        self.kv_caches = kv_caches
        self.states = states
        self.sampler = sampler
        self.drafter = drafter
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.rewinds = rewinds
        self.timer = StepTimer(kv_caches.device)
        self.graphs: DecodeGraphs | None = None
        self.on_logits: Callable[[LogitsSeen], None] | None = None
        self._state: ForwardStep | LaunchedStep | None = None
        self._last_slots = np.zeros(0, dtype=np.int64)

    def use_graphs(self, max_num_seqs: int) -> None:
        """Runs decode steps of up to `max_num_seqs` rows as CUDA graphs from now on."""
        block_size = self.kv_caches.shape[2]
        self.graphs = DecodeGraphs(self._run_step, self.states, max_num_seqs, self.num_speculative_tokens, block_size)

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        """Target forward over the step's tokens; a step that fits a graph runs whole."""
        assert self._state is None, "sample_tokens was not called for the last step"
        self.states.add(step.new_rows)
        self.states.add_blocks(step.rows)
        slots = np.fromiter((row.slot for row in step.rows), np.int64, len(step.rows))
        self._last_slots = slots
        if self.graphs is not None and self.graphs.fits(step.rows):
            self.timer.begin("graph")
            self._state = LaunchedStep(*self.graphs.run(step.rows, processor_needs(slots, self.states)))
            self.timer.end()
            return
        self.timer.begin("target")
        max_seq_len = min(max(row.num_computed_after for row in step.rows), self.max_model_len)
        batch = build_batch(step.rows, self.states, max_seq_len, self.kv_caches.shape[2], self.rewinds)
        hidden = self.target(batch.input_ids, batch.context, self.kv_caches)
        self._state = ForwardStep(batch, hidden, step.num_spec_tokens)

    @torch.inference_mode()
    def sample_tokens(self) -> SampledStep:
        """Samples every logits row, keeps the drafts that agree, updates the state, proposes the next drafts."""
        state, self._state = self._state, None
        assert state is not None, "execute_model comes first"
        if isinstance(state, LaunchedStep):
            return SampledStep(*state)
        self.timer.begin("sampling")
        sampled, num_sampled, num_rejected = self._verify(state.batch, state.hidden)
        result = SampledStep(sampled, num_sampled)
        self.timer.begin("draft")
        if self.drafter is not None:
            self.drafter.propose(state.batch, state.hidden, num_sampled, num_rejected, state.num_spec_tokens)
        self.timer.end()
        return result

    def _run_step(self, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole step, as a graph captures it: `sampled [B, K+1]` and `num_sampled [B]`."""
        hidden = self.target(batch.input_ids, batch.context, self.kv_caches)
        sampled, num_sampled, num_rejected = self._verify(batch, hidden)
        if self.drafter is not None:
            self.drafter.propose(batch, hidden, num_sampled, num_rejected, self.num_speculative_tokens)
        return sampled, num_sampled

    def _verify(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Samples, compares with the drafts, updates the state; `sampled`, `num_sampled`, `num_rejected`."""
        sampled, num_sampled, num_rejected = self._sample(batch, hidden)
        self._postprocess(batch, sampled, num_sampled, num_rejected)
        return sampled, num_sampled, num_rejected

    def _sample(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`sampled [B, K+1]`, `num_sampled [B]`, `num_rejected [B]`: the target's up to the first disagreement."""
        ids = batch.input_ids[batch.logits_indices]
        rows = SamplingRows(
            row_slots=batch.row_slots,
            positions=batch.positions[batch.logits_indices],
            spec_ids=ids,
            spec_start=batch.spec_start,
            spec_count=batch.spec_count,
            needs=batch.needs,
        )
        logits = self.target.compute_logits(hidden[batch.logits_indices])
        given = logits.clone() if self.on_logits is not None else logits  # the sampler works in place
        target_sampled = self.sampler.sample(logits, rows)
        if self.on_logits is not None:
            self.on_logits(LogitsSeen(given, logits, target_sampled))
        sampled, num_sampled = rejection_sample(target_sampled, ids, batch.cu_num_logits, self.num_speculative_tokens)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled, batch.context.seq_lens, batch.cu_num_logits, batch.idx_mapping, self.states.prefill_len
        )
        return sampled, num_sampled, num_rejected

    def _postprocess(
        self, batch: InputBatch, sampled: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        s = self.states
        post_update(
            batch.idx_mapping,
            batch.query_start_loc,
            sampled,
            num_sampled,
            num_rejected,
            last_sampled=s.last_sampled,
            total_len=s.total_len,
            token_ids=s.token_ids,
            output_counts=s.output_counts,
            num_computed_tokens=s.num_computed_tokens,
        )

    def take_draft_token_ids(self) -> list[list[int]]:
        """The drafts of the last step's rows (waits for the device)."""
        slots = to_device(self._last_slots, self.states.device)
        return self.states.draft_tokens[slots].tolist()  # type: ignore[no-any-return]
