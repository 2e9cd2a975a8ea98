"""One step on the device: target forward, sampling and verification, state update, next drafts. Nothing in it waits.

`execute_model` keeps the hidden states and returns nothing; `sample_tokens` does the rest and starts the copy of the
sampled ids to the host, which is read when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specgen.engine.request import NAN_TOKEN
from specgen.engine.step import ScheduledRow, SchedulerOutput
from specgen.kernels.logprobs import Logprobs
from specgen.kernels.post_update import post_update
from specgen.kernels.rejection import get_num_sampled_and_rejected, rejection_sample
from specgen.kernels.synthetic_rejection import conditional_rates, synthetic_rejection_sample
from specgen.models.context import AttentionContext
from specgen.models.families import TargetModel
from specgen.worker.forward_graphs import ForwardGraphs
from specgen.worker.graphs import DecodeGraphs, GraphMemory, ReadyGraph, StepTokens
from specgen.worker.input_batch import InputBatch, build_batch
from specgen.worker.logprobs import PromptPart, SampledLogprobs, judge_prompts, to_host
from specgen.worker.processor_needs import FewCombinations, ProcessorNeeds, processor_needs
from specgen.worker.sampled_step import SampledStep, pack_tokens
from specgen.worker.sampler import Sampler, SamplingRows
from specgen.worker.speculator import Drafter
from specgen.worker.states import RequestStates, to_device
from specgen.worker.target_sampler import TargetSampler
from specgen.worker.timing import StepTimer


class ForwardStep(NamedTuple):
    """What `execute_model` leaves for `sample_tokens`: the target's hidden states."""

    step: SchedulerOutput
    batch: InputBatch
    hidden: torch.Tensor


class LaunchedStep(NamedTuple):
    """A step that runs to its end as one graph, whose rows have room for `num_drafts` each."""

    step: SchedulerOutput
    graph: ReadyGraph
    num_drafts: int


class ModelRunner:
    """Runs steps over the persistent state; `drafter` is None without speculation."""

    def __init__(
        self,
        target: TargetModel,
        kv_caches: torch.Tensor,
        states: RequestStates,
        sampler: Sampler,
        drafter: Drafter | None,
        max_model_len: int,
        num_speculative_tokens: int,
        rewinds: bool,
        acceptance: tuple[float, ...] | None = None,
    ) -> None:
        """`kv_caches [layers, blocks, block_size, latent]` of the target; see `build_batch` for `rewinds`.

        `acceptance`: P(the first i drafts accepted) for i from 1 up, by lot; None judges drafts by what they are.

        `on_step`, if it is set, is told before each step, and each repetition of one, of its rows, or 0 if they do more
        than decode.
        """
        self.target = target
        self.kv_caches = kv_caches
        self.states = states
        self.target_sampler = TargetSampler(target, states, sampler)
        self.drafter = drafter
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.rewinds = rewinds
        self._rates: torch.Tensor | None = None
        if acceptance is not None:
            rates = conditional_rates(acceptance[:num_speculative_tokens])
            self._rates = torch.tensor(rates, dtype=torch.float32, device=kv_caches.device)
        self.timer = StepTimer(kv_caches.device)
        # on a CPU nothing is compiled: each step runs just what its rows need
        self.combinations = FewCombinations() if kv_caches.is_cuda else None
        self.graphs: DecodeGraphs | None = None
        self.forward_graphs: ForwardGraphs | None = None
        self.on_step: Callable[[int], None] | None = None
        self._state: ForwardStep | LaunchedStep | None = None
        self._judged: tuple[torch.Tensor, Logprobs] | None = None
        self._bad_rows: torch.Tensor | None = None
        self._last_slots = np.zeros(0, dtype=np.int64)

    def use_graphs(self, max_num_seqs: int, max_num_tokens: int, num_bytes: int, pads: bool = True) -> None:
        """Runs decode steps of up to `max_num_seqs` rows as CUDA graphs from now on, of other steps the target.

        `num_bytes`: what the largest decode step, and the largest target, work in. `pads`: see `DecodeGraphs`.
        """
        memory = GraphMemory(num_bytes)
        self.graphs = self._decode_graphs(max_num_seqs, memory, pads)
        self.forward_graphs = self._prompt_graphs(max_num_seqs, max_num_tokens, memory)

    def _decode_graphs(self, max_num_seqs: int, memory: GraphMemory | None, pads: bool = True) -> DecodeGraphs:
        return DecodeGraphs(self._run_step, self.states, max_num_seqs, self.kv_caches.shape[2], memory, pads)

    def _prompt_graphs(self, max_num_seqs: int, max_num_tokens: int, memory: GraphMemory | None) -> ForwardGraphs:
        longest = self.max_model_len + self.num_speculative_tokens
        return ForwardGraphs(self._forward, max_num_seqs, max_num_tokens, longest, memory)

    @torch.inference_mode()
    def run_largest_decode_step(self, slots: np.ndarray, max_num_seqs: int) -> None:
        """Runs a decode step of the most rows, none of which is anybody's, without a graph: what slots `[B]` need."""
        needs = processor_needs(slots, self.states)
        self._decode_graphs(max_num_seqs, None).run_largest(self.num_speculative_tokens, needs)

    @torch.inference_mode()
    def run_all_kinds(self, max_num_seqs: int, max_num_tokens: int) -> None:
        """Runs steps that launch what all others do, none of whose rows is anybody's, without a graph."""
        prompts = self._prompt_graphs(max_num_seqs, max_num_tokens, None)
        for step in prompts.steps_of_all_kinds(self.states.block_tables):
            step()
        graphs, greedy = self._decode_graphs(max_num_seqs, None), ProcessorNeeds(False, False, noise=False)
        for step in graphs.steps_of_all_kinds(self.num_speculative_tokens, greedy._replace(noise=True)):
            step()
        graphs.run_largest(self.num_speculative_tokens, greedy)

    def _forward(self, input_ids: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        return self.target(input_ids, context, self.kv_caches)

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        """Target forward over the step's tokens; a step that fits a graph runs whole."""
        assert self._state is None, "sample_tokens was not called for the last step"
        self.states.add(step.new_rows)
        self.states.add_blocks(step.rows)
        self._state = self._begin(step)

    def _begin(self, step: SchedulerOutput) -> ForwardStep | LaunchedStep:
        """Starts the step over what the device knows of its rows by then."""
        slots = np.fromiter((row.slot for row in step.rows), np.int64, len(step.rows))
        self._last_slots = slots
        decode_rows = step.num_decode_rows
        self._announce(decode_rows, continues=len(step.new_rows) < len(step.rows))
        needs = processor_needs(slots, self.states)
        if self.combinations is not None:
            needs = self.combinations.settle(needs)
        if self.graphs is not None and decode_rows:
            num_drafts = max(step.draft_limit, *(row.num_draft_tokens for row in step.rows))
            self.timer.begin("graph")
            graph = self.graphs.ready(step, num_drafts, needs)
            launched = LaunchedStep(step, graph, num_drafts)
            graph.run()
            self.timer.end()
            return launched
        self.timer.begin("target")
        max_seq_len = min(step.max_computed_after, self.max_model_len) + self.num_speculative_tokens
        batch = build_batch(step.rows, self.states, max_seq_len, self.kv_caches.shape[2], needs, self.rewinds)
        forward = self._forward if self.forward_graphs is None else self.forward_graphs.run
        hidden = forward(batch.input_ids, batch.context)
        return ForwardStep(step, batch, hidden)

    @torch.inference_mode()
    def sample_tokens(self) -> SampledStep:
        """Samples every logits row, keeps the drafts that agree, updates the state, proposes the next drafts.

        A step that runs more than once goes on from there.
        """
        state, self._state = self._state, None
        assert state is not None, "execute_model comes first"
        packed, judged, prompts = self._end(state)
        if state.step.times == 1:
            return SampledStep(packed.unsqueeze(1), judged, prompts)
        num_rows, width = packed.shape
        all_packed = packed.new_empty(num_rows, state.step.times, width)
        all_packed[:, 0] = packed
        for time in range(1, state.step.times):
            all_packed[:, time] = self._end(self._again(state))[0]
        return SampledStep(all_packed)

    def _again(self, state: ForwardStep | LaunchedStep) -> ForwardStep | LaunchedStep:
        """Starts the step once more: all that it needs of the host is in place already."""
        if isinstance(state, ForwardStep):
            return self._begin(state.step)
        self._announce(len(state.step.rows), continues=True)
        self.timer.begin("graph")
        state.graph.run()
        self.timer.end()
        return state

    def _announce(self, decode_rows: int, continues: bool) -> None:
        if self.on_step is not None:
            self.on_step(decode_rows)
        self.timer.begin_step(decode_rows, continues)

    def _end(
        self, state: ForwardStep | LaunchedStep
    ) -> tuple[torch.Tensor, SampledLogprobs | None, Sequence[PromptPart]]:
        """Does what is left of a step; its tokens as `pack_tokens` has them, and what rows want to know of theirs."""
        if isinstance(state, LaunchedStep):
            rows, tokens = state.step.rows, state.graph.tokens
            judged = self._sampled_logprobs(tokens.judged, rows, [state.num_drafts + 1] * len(rows))
            return tokens.packed, judged, ()
        self.timer.begin("sampling")
        sampled, num_sampled, num_rejected = self._verify(state.batch, state.hidden)
        packed, (judged, prompts) = pack_tokens(sampled, num_sampled), self._logprobs_of(state)
        self.timer.begin("draft")
        if self.drafter is not None:
            self.drafter.propose(state.batch, state.hidden, num_sampled, num_rejected, state.step.num_spec_tokens)
        self.timer.end()
        return packed, judged, prompts

    def _logprobs_of(self, state: ForwardStep) -> tuple[SampledLogprobs | None, list[PromptPart]]:
        """Starts the copies of what the step's rows want to know, of sampled tokens and of prompts."""
        rows = state.step.rows
        sampled = self._sampled_logprobs(self._take_judged(), rows, [row.num_draft_tokens + 1 for row in rows])
        return sampled, judge_prompts(rows, self.states, state.hidden, self.target_sampler.logits)

    def _take_judged(self) -> tuple[torch.Tensor, Logprobs] | None:
        judged, self._judged = self._judged, None
        return judged

    def _sampled_logprobs(
        self, judged: tuple[torch.Tensor, Logprobs] | None, rows: list[ScheduledRow], num_logits: list[int]
    ) -> SampledLogprobs | None:
        """Starts the copy of what the rows, each of so many logits rows, want to know of their tokens."""
        if judged is None:
            return None
        wanted = [int(self.states.num_wanted[row.slot]) for row in rows]
        return SampledLogprobs(to_host(*judged), np.cumsum([0, *num_logits]).tolist(), wanted)

    def _run_step(self, batch: InputBatch, num_drafts: int) -> StepTokens:
        """The whole step, as a graph captures it, up to so many drafts for the next one."""
        self.timer.mark_captured("target")
        hidden = self.target(batch.input_ids, batch.context, self.kv_caches)
        self.timer.mark_captured("sampling")
        sampled, num_sampled, num_rejected = self._verify(batch, hidden)
        self.timer.mark_captured("draft")
        if self.drafter is not None:
            self.drafter.propose(batch, hidden, num_sampled, num_rejected, num_drafts)
        packed = pack_tokens(sampled, num_sampled)
        self.timer.mark_captured("")
        return StepTokens(packed, self._take_judged())

    def _verify(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Samples, compares with the drafts, updates the state; `sampled`, `num_sampled`, `num_rejected`.

        `sampled` is for the host: `NAN_TOKEN` stands for a token whose logits are not numbers.
        """
        sampled, num_sampled, num_rejected = self._sample(batch, hidden)
        self._postprocess(batch, sampled, num_sampled, num_rejected)
        bad, self._bad_rows = self._bad_rows, None
        if bad is not None:
            column = torch.arange(sampled.shape[1], device=sampled.device)
            at = (batch.cu_num_logits[:-1, None] + column).clamp(max=bad.shape[0] - 1)
            sampled = sampled.masked_fill(bad[at] & (column < num_sampled[:, None]), NAN_TOKEN)
        return sampled, num_sampled, num_rejected

    def _sample(self, batch: InputBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`sampled [B, K+1]`, `num_sampled [B]`, `num_rejected [B]`: the target's up to the first disagreement.

        Or up to the row's end, behind which `sampled` goes on.
        """
        ids = batch.at_logits(batch.input_ids)
        rows = SamplingRows(
            row_slots=batch.row_slots,
            positions=batch.at_logits(batch.positions),
            spec_ids=ids,
            spec_start=batch.spec_start,
            spec_count=batch.spec_count,
            needs=batch.needs,
        )
        drawn = self.target_sampler.draw(batch.at_logits(hidden), rows)
        self._bad_rows = drawn.bad_rows
        if drawn.logprobs is not None:
            self._judged = drawn.token_ids, drawn.logprobs
        if self._rates is not None:
            sampled, num_sampled = synthetic_rejection_sample(
                drawn.token_ids,
                ids,
                batch.cu_num_logits,
                batch.row_slots,
                rows.positions,
                self.states.seeds,
                self._rates,
            )
        else:
            sampled, num_sampled = rejection_sample(
                drawn.token_ids, ids, batch.cu_num_logits, self.num_speculative_tokens
            )
        s = self.states
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            sampled,
            num_sampled,
            batch.context.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            prefill_len=s.prefill_len,
            total_len=s.total_len,
            max_total_len=s.max_total_len,
            end_mask=s.end_mask,
            finished=s.finished,
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
