"""What a step sampled, on its way from the device to the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
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
        """`packed [B, times, K+2] int64`: rows of `pack_tokens`, of each time that the step ran; starts the copy."""
        self._logprobs = logprobs
        self._prompt_parts = prompt_parts
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._packed = packed.clone()

    def wait(self) -> float:
        """Waits for the copy; seconds, 0 if it was there."""
        if self._event is None or self._event.query():
            return 0.0
        start = time.perf_counter()
        self._event.synchronize()
        return time.perf_counter() - start

    def get(self) -> ModelRunnerOutput:
        """Waits for the copy; a list of ids a row."""
        self.wait()
        packed = self._packed.numpy()
        num_sampled, ids, most = packed[..., 0], packed[..., 1:], packed.shape[-1] - 1
        kept = np.arange(most) < num_sampled[..., None]
        ends = np.cumsum(num_sampled.sum(axis=1)).tolist()
        flat = ids[kept].tolist()
        token_ids = [flat[start:end] for start, end in itertools.pairwise([0, *ends])]
        # the last one is a draft too if the row ended with it and was sampled beyond
        behind = np.take_along_axis(ids, np.minimum(num_sampled, most - 1)[..., None], axis=-1)[..., 0]
        is_cut = (num_sampled > 0) & (num_sampled < most) & (behind != -1)
        num_accepted = np.maximum(num_sampled - ~is_cut, 0)
        output = ModelRunnerOutput(token_ids, num_sampled.ravel().tolist(), num_accepted.ravel().tolist())
        if self._logprobs is None and not self._prompt_parts:
            return output
        logprobs = None
        if self._logprobs is not None:
            logprobs = [self._logprobs.of(b, len(row_ids)) for b, row_ids in enumerate(token_ids)]
        prompt_logprobs = {part.row: part.get() for part in self._prompt_parts}
        return output._replace(logprobs=logprobs, prompt_logprobs=prompt_logprobs)
