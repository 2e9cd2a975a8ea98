"""What a step sampled, on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgen.engine.step import ModelRunnerOutput
from specgen.worker.logprobs import PromptPart, SampledLogprobs


def pack_tokens(sampled: torch.Tensor, num_sampled: torch.Tensor) -> torch.Tensor:
    """Rows of how many ids and the ids, `[B, K+2] int64`, from `sampled [B, K+1] int64` and `num_sampled [B] int32`."""
    return torch.cat([num_sampled.to(torch.int64).unsqueeze(1), sampled], dim=1)


class SampledStep:
    """A step's sampled ids on their way to the host, with log-probabilities where rows want them."""

    def __init__(
        self,
        packed: torch.Tensor,
        logprobs: SampledLogprobs | None = None,
        prompt_parts: Sequence[PromptPart] = (),
    ) -> None:
        """`packed [entries, K+2] int64`: rows of `pack_tokens`, in the order of the step's output; starts the copy."""
        self._logprobs = logprobs
        self._prompt_parts = prompt_parts
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
        token_ids, num_accepted, most = [], [], self._packed.shape[1] - 1
        for row in self._packed.tolist():
            num_sampled = row[0]
            token_ids.append(row[1 : num_sampled + 1])
            # the last one is a draft too if the row ended with it and was sampled beyond
            is_cut = 0 < num_sampled < most and row[num_sampled + 1] != -1
            num_accepted.append(num_sampled if is_cut else max(0, num_sampled - 1))
        if self._logprobs is None and not self._prompt_parts:
            return ModelRunnerOutput(token_ids, num_accepted)
        logprobs = None
        if self._logprobs is not None:
            logprobs = [self._logprobs.of(b, len(row_ids)) for b, row_ids in enumerate(token_ids)]
        prompt_logprobs = {part.row: part.get() for part in self._prompt_parts}
        return ModelRunnerOutput(token_ids, num_accepted, logprobs, prompt_logprobs)
