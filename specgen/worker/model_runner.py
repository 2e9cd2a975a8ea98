"""One step on the device: target forward, sampling and verification, state update, next drafts. Nothing in it waits.

`execute_model` keeps the hidden states and returns nothing; `sample_tokens` does the rest and starts the copy of the
sampled ids to the host, which is read when it is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specgen.engine.scheduler import ModelRunnerOutput, SchedulerOutput
from specgen.kernels.post_update import post_update
from specgen.kernels.rejection import get_num_sampled_and_rejected, rejection_sample
from specgen.models.deepseek_v3 import DeepseekV3ForCausalLM
from specgen.worker.input_batch import InputBatch, build_batch
from specgen.worker.sampler import Sampler, SamplingRows
from specgen.worker.speculator import Drafter
from specgen.worker.states import RequestStates
from specgen.worker.timing import StepTimer


class ExecuteState(NamedTuple):
    """What `execute_model` leaves for `sample_tokens`."""

    batch: InputBatch
    hidden: torch.Tensor
    num_spec_tokens: int


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
        """`kv_caches [layers, blocks, block_size, latent]` of the target; see `build_batch` for `rewinds`."""
        self.target = target
        self.kv_caches = kv_caches
        self.states = states
        self.sampler = sampler
        self.drafter = drafter
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.rewinds = rewinds
        self.timer = StepTimer(kv_caches.device)
        self._state: ExecuteState | None = None
        self._last_slots: torch.Tensor | None = None

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        """Target forward over the step's tokens."""
        assert self._state is None, "sample_tokens was not called for the last step"
        for row in step.new_rows:
            self.states.add(row)
        self.states.add_blocks(step.rows)
        self.timer.mark()
        max_seq_len = min(max(row.num_computed_after for row in step.rows), self.max_model_len)
        batch = build_batch(step.rows, self.states, max_seq_len, self.kv_caches.shape[2], self.rewinds)
        hidden = self.target(batch.input_ids, batch.context, self.kv_caches)
        self.timer.mark()
        self._state = ExecuteState(batch, hidden, step.num_spec_tokens)

    @torch.inference_mode()
    def sample_tokens(self) -> SampledStep:
        """Samples every logits row, keeps the drafts that agree, updates the state, proposes the next drafts."""
        assert self._state is not None, "execute_model comes first"
        batch, hidden, num_spec_tokens = self._state
        self._state = None
        sampled, num_sampled, num_rejected = self._sample(batch, hidden)
        result = SampledStep(sampled, num_sampled)
        self._postprocess(batch, sampled, num_sampled, num_rejected)
        self.timer.mark()
        if self.drafter is not None:
            self.drafter.propose(batch, hidden, num_sampled, num_rejected, num_spec_tokens)
        self.timer.mark()
        self._last_slots = batch.idx_mapping
        return result

    def _sample(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`sampled [B, K+1]`, `num_sampled [B]`, `num_rejected [B]`: the target's up to the first disagreement."""
        ids = batch.input_ids[batch.logits_indices]
        rows = SamplingRows(
            row_slots=batch.row_slots,
            positions=batch.positions[batch.logits_indices],
            spec_ids=ids,
            spec_start=batch.spec_start,
            spec_count=batch.spec_count,
            needs_penalties=batch.needs_penalties,
            needs_filter=batch.needs_filter,
            needs_noise=batch.needs_noise,
        )
        logits = self.target.compute_logits(hidden[batch.logits_indices])
        target_sampled = self.sampler.sample(logits, rows)
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
        assert self._last_slots is not None
        return self.states.draft_tokens[self._last_slots.long()].tolist()  # type: ignore[no-any-return]
