"""Proposes the next drafts with the MTP layers, and keeps the layers' KV in step with the target's.

A proposal is one pass of each layer over the step's own tokens (ids shifted left by one, hidden states from the
target), whose last row gives the first draft, and then K-1 short passes that feed drafts back; pass s runs
layer s mod n. Of the last layer's first pass only that row is read, if any: it writes the KV of all tokens, and what
lies behind that it computes for these rows alone.

With n > 1 layers, layer j reads layer j-1's output one position back. In the first pass that is a shift by one row,
with the row before the step carried over from the step before; in pass s, layer s mod n has not seen the last min(s, n)
positions yet and runs over all of them, so that its KV has no gap:

    position   base    base+1     base+2     base+3        n = 2, K = 4
    layer 0    first              pass 2: base+1..base+2
    layer 1    first   pass 1                pass 3: base+2..base+3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from specgen.kernels.draft_inputs import DraftPrefill, prepare_draft_decode, prepare_draft_prefill
from specgen.kernels.sample_tokens import expand_logits
from specgen.models.cheap_drafts import CutHead
from specgen.models.context import OutputRows, reads_first_outputs
from specgen.models.families import DraftModel
from specgen.worker.input_batch import InputBatch
from specgen.worker.processor_needs import ProcessorNeeds
from specgen.worker.sampler import Noise, Sampler, SamplingRows
from specgen.worker.states import RequestStates


class Drafter(Protocol):
    """Something that proposes drafts after a step."""

    def propose(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        num_spec_tokens: int,
    ) -> None:
        """Writes up to `num_spec_tokens` drafts a row to `states.draft_tokens`, -1 behind them.

        `hidden [T, H]` is the target's; `num_sampled` and `num_rejected` are `[B] int32`, after `post_update`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """How drafts are drawn.

    noise: with which noise. processors: whether penalties, filters and rules act on them. sharpness: what processed
    logits are multiplied with, with the target's noise; a draft layer knows less than the target, so that its own
    distribution is flatter than the target's as a rule, and a sharper one meets the target's pick more often.
    """

    noise: Noise = Noise.SHARED
    processors: bool = True
    sharpness: float = 1.25


DRAFTING = Drafting()


class MTPSpeculator:
    """The drafter over a model's own MTP layers."""

    def __init__(
        self,
        mtp: DraftModel,
        states: RequestStates,
        sampler: Sampler,
        kv_caches: torch.Tensor,
        max_model_len: int,
        num_speculative_tokens: int,
        drafting: Drafting = DRAFTING,
    ) -> None:
        """`kv_caches [num_layers, blocks, block_size, latent]` are the draft layers' part of the KV pool."""
        self.mtp = mtp
        self.states = states
        self.sampler = sampler
        self.kv_caches = kv_caches
        self.block_size = kv_caches.shape[2]
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.drafting = drafting
        num_slots = states.total_len.shape[0]
        hidden_size = mtp.embed_tokens.weight.shape[1]
        weight = mtp.embed_tokens.weight
        # layer j's output at the last verified position, for layer j+1
        self._carry = weight.new_zeros(max(mtp.num_layers - 1, 0), num_slots, hidden_size)
        # where rows of so many columns begin, and how many drafts stand before the one that is drawn
        arange = torch.arange(num_slots + 1, dtype=torch.int32, device=weight.device)
        self._starts = {width: arange * width for width in {num_speculative_tokens, *range(1, mtp.num_layers + 1)}}
        self._counts = [torch.full_like(arange, step) for step in range(num_speculative_tokens)]
        self._no_slots = torch.full_like(arange, -1, dtype=torch.int64)

    def propose(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        num_spec_tokens: int,
    ) -> None:
        """See `Drafter`. With `num_spec_tokens` 0 only the layers' KV is written."""
        s = self.states
        first = prepare_draft_prefill(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.input_ids,
            batch.positions,
            batch.context.slot_mapping,
            num_sampled,
            num_rejected,
            last_sampled=s.last_sampled,
            token_ids=s.token_ids,
        )
        # a row in the middle of its prompt needs no drafts, and must not write any: a shared block may lie ahead of it
        whole, batch = batch, batch._replace(idx_mapping=torch.where(num_sampled > 0, batch.idx_mapping, -1))
        outputs = self._output_rows(batch, first, num_rejected, num_spec_tokens)
        last = self._first_pass(whole, hidden, first, outputs)
        num_reqs = batch.idx_mapping.shape[0]
        drafts = batch.positions.new_full((num_reqs, self.num_speculative_tokens), -1)
        previous: torch.Tensor | None = None
        for step in range(num_spec_tokens):
            if step > 0:
                previous = self._decode_pass(step, batch, first.base_positions, drafts, last, previous)
            rows = previous[:, -1] if previous is not None else last[0]
            drafts[:, step] = self._sample(rows, batch, first.base_positions, drafts, step)
        s.draft_tokens[batch.idx_mapping.long()] = drafts  # -1 is the row that belongs to nobody

    def _output_rows(
        self, batch: InputBatch, first: DraftPrefill, num_rejected: torch.Tensor, num_spec_tokens: int
    ) -> OutputRows:
        """Whose output of the last layer's first pass is read: the last verified token of each row, or none."""
        num_reqs = batch.idx_mapping.shape[0]
        if not reads_first_outputs(self.mtp.num_layers, num_spec_tokens):
            return OutputRows(first.last_indices[:0], batch.context)
        context = batch.context._replace(
            idx_mapping=batch.idx_mapping,
            positions=first.base_positions,
            slot_mapping=self._no_slots[:num_reqs],
            query_start_loc=self._starts[1][: num_reqs + 1],
            seq_lens=batch.context.seq_lens - num_rejected,
            max_query_len=1,
        )
        return OutputRows(first.last_indices, context)

    def _first_pass(
        self, batch: InputBatch, hidden: torch.Tensor, first: DraftPrefill, outputs: OutputRows
    ) -> list[torch.Tensor]:
        """All layers over the step's tokens; their outputs `[B, H]` at each row's last verified position.

        Of the last layer only those of `outputs`: every other layer's are read, whole, by the layer above.
        """
        context = batch.context._replace(slot_mapping=first.slot_mapping)
        slots = batch.idx_mapping.long()
        last: list[torch.Tensor] = []
        for layer in range(self.mtp.num_layers):
            if layer > 0:
                carried = self._carry[layer - 1, slots]
                hidden = hidden.roll(1, 0)
                hidden[batch.query_start_loc[:-1].long()] = carried
                self._carry[layer - 1, slots] = last[-1]
            if layer == self.mtp.num_layers - 1:
                last.append(self.mtp(layer, first.input_ids, hidden, context, self.kv_caches[layer], outputs))
            else:
                hidden = self.mtp(layer, first.input_ids, hidden, context, self.kv_caches[layer])
                last.append(hidden[first.last_indices])
        return last

    def _decode_pass(
        self,
        step: int,
        batch: InputBatch,
        base_positions: torch.Tensor,
        drafts: torch.Tensor,
        last: list[torch.Tensor],
        previous: torch.Tensor | None,
    ) -> torch.Tensor:
        """Draft pass `step` >= 1 over the positions its layer lacks; returns `[B, width, H]`."""
        num_layers, num_reqs = self.mtp.num_layers, batch.idx_mapping.shape[0]
        layer, width = step % num_layers, min(step, num_layers)
        inputs = prepare_draft_decode(
            step,
            width,
            batch.idx_mapping,
            base_positions,
            drafts,
            self.states.block_tables,
            self.block_size,
            self.max_model_len,
        )
        if step <= num_layers:
            below = last[(layer - 1) % num_layers].unsqueeze(1)
            hidden = below if previous is None else torch.cat([below, previous], dim=1)
        else:
            assert previous is not None
            hidden = previous
        context = batch.context._replace(
            idx_mapping=batch.idx_mapping,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            query_start_loc=self._starts[width][: num_reqs + 1],
            seq_lens=inputs.seq_lens,
            max_query_len=width,
        )
        out = self.mtp(layer, inputs.input_ids, hidden.flatten(0, 1), context, self.kv_caches[layer])
        return out.unflatten(0, (num_reqs, width))

    def _logits(self, layer: int, hidden: torch.Tensor, has_rules: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits that layer `layer` gives rows `[N, H]`, and of a cut vocabulary the ids of the last columns.

        `[N, vocab] float32`; `[N, C]` of a cut one, unless rules act on it, which go by ids alone.
        """
        head = self.mtp.heads[layer]
        if not isinstance(head, CutHead):
            return self.sampler.cap(self.mtp.compute_logits(layer, hidden)), None
        logits = self.sampler.cap(head(hidden, whole=False))
        if has_rules:
            return expand_logits(logits, head.extra_ids, head.vocab_size), None
        return logits, head.extra_ids

    def _sample(
        self, hidden: torch.Tensor, batch: InputBatch, base_positions: torch.Tensor, drafts: torch.Tensor, step: int
    ) -> torch.Tensor:
        """Draft `step` of each row `[B, H]`, as `drafting` says: as a rule with the noise that the target will use."""
        num_reqs, width = drafts.shape
        needs = batch.needs
        if not self.drafting.processors:
            needs = ProcessorNeeds(penalties=False, filters=False, noise=needs.noise)
        logits, extra_ids = self._logits(step % self.mtp.num_layers, hidden, needs.rules)
        rows = SamplingRows(
            row_slots=batch.idx_mapping,
            positions=base_positions + (1 + step),
            spec_ids=drafts.flatten(),
            spec_start=self._starts[width][:num_reqs],
            spec_count=self._counts[step][:num_reqs],
            needs=needs,
        )
        keep = self.states.draft_logits.shape[0] > 0 and needs.noise
        sharpness = self.drafting.sharpness if self.drafting.noise is Noise.SHARED else 1.0
        sampled = self.sampler.sample(
            logits, rows, self.drafting.noise, keep=keep, sharpness=sharpness, extra_ids=extra_ids
        ).token_ids
        if keep:
            kept = self.states.draft_logits
            if extra_ids is not None:
                logits = expand_logits(logits, extra_ids, kept.shape[-1])
            kept[batch.idx_mapping.long(), step] = logits
        return sampled
