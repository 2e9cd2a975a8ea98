"""From logits to a token: penalties, temperature, top-k and top-p, then the arg max with the row's own noise.

The same for target and draft rows. A row's token is a function of its logits, parameters, committed tokens and drafts
before it, its seed and its position; see `specgen.kernels.gumbel` for the noise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specgen.kernels.gumbel import gumbel_sample
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
        if rows.needs.noise:
            apply_temperature(logits, rows.row_slots, s.temperature)
        if rows.needs.filters:
            apply_top_k_top_p(logits, rows.row_slots, s.top_k, s.top_p)
        return gumbel_sample(logits, rows.row_slots, rows.positions, s.seeds, s.temperature)
