"""From logits to a token: a row's processors in a fixed order, then the arg max with the row's own noise.

The same for target and draft rows. A row's token is a function of its logits, parameters, committed tokens and drafts
before it, its seed and its position; see `specgen.kernels.gumbel` for the noise. The order, which is transformers':

    allowed_token_ids    others become -inf
    logit_bias           added
    min_tokens           EOS and stop ids become -inf while the row is shorter
    repetition, frequency and presence penalty
    bad_words_ids        the token that would complete a word becomes -inf
    temperature          from here on at temperature > 0 only: at 0 none of it would change the arg max
    top_k, top_p, min_p  what they remove becomes -inf; equal logits stay or go together
    noise, arg max       ties go to the lowest id

-inf stays -inf through all of it. NaN is never chosen: filters remove it, the arg max takes it for -inf. A row in which
every token is -inf or NaN takes token 0; `SamplingParams` refuses the parameters of which that can be told beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specgen.kernels.allowed_ids import apply_allowed_ids
from specgen.kernels.bad_words import apply_bad_words
from specgen.kernels.gumbel import gumbel_sample
from specgen.kernels.logit_bias import apply_logit_bias
from specgen.kernels.min_p import apply_min_p
from specgen.kernels.min_tokens import apply_min_tokens
from specgen.kernels.penalties import apply_penalties
from specgen.kernels.temperature import apply_temperature
from specgen.kernels.top_k_top_p import apply_top_k_top_p
from specgen.worker.input_batch import ProcessorNeeds
from specgen.worker.states import RequestStates


class SamplingRows(NamedTuple):
    """Which request each logits row belongs to, where it stands, and which drafts precede it.

    row_slots, spec_start, spec_count `[N] int32`; positions `[N] int64`, of the input token of the row; spec_ids
    `[M] int64`, row n's drafts being `spec_ids[spec_start[n] : spec_start[n] + spec_count[n]]`. `needs`: the
    processors that some row uses.
    """

    row_slots: torch.Tensor
    positions: torch.Tensor
    spec_ids: torch.Tensor
    spec_start: torch.Tensor
    spec_count: torch.Tensor
    needs: ProcessorNeeds


class Sampler:
    """Processors and sampling over the parameters in `states`."""

    def __init__(self, states: RequestStates) -> None:
        self.states = states

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """`logits [N, V] float32` (overwritten) -> token ids `[N] int64`."""
        s = self.states
        if rows.needs.rules:
            apply_allowed_ids(logits, rows.row_slots, s.allowed_mask, s.num_allowed)
            apply_logit_bias(logits, rows.row_slots, s.bias_ids, s.bias_values, s.num_biases)
            apply_min_tokens(logits, rows.row_slots, rows.positions, s.end_mask, s.first_end)
        if rows.needs.penalties:
            apply_penalties(
                logits,
                rows.row_slots,
                rows.spec_ids,
                rows.spec_start,
                rows.spec_count,
                prompt_mask=s.prompt_mask,
                output_counts=s.output_counts,
                repetition_penalty=s.repetition_penalty,
                frequency_penalty=s.frequency_penalty,
                presence_penalty=s.presence_penalty,
            )
        if rows.needs.rules:
            apply_bad_words(
                logits,
                rows.row_slots,
                rows.spec_ids,
                rows.spec_start,
                rows.spec_count,
                token_ids=s.token_ids,
                total_len=s.total_len,
                bad_word_ids=s.bad_word_ids,
                bad_word_ends=s.bad_word_ends,
                num_bad_words=s.num_bad_words,
            )
        if rows.needs.noise:
            apply_temperature(logits, rows.row_slots, s.temperature)
        if rows.needs.filters:
            apply_top_k_top_p(logits, rows.row_slots, s.top_k, s.top_p)
        if rows.needs.min_p:
            apply_min_p(logits, rows.row_slots, s.min_p_reach)
        return gumbel_sample(logits, rows.row_slots, rows.positions, s.seeds, s.temperature)
