"""The target's logits at one position of one row, in the two shapes in which a run may have computed them.

Knows how to drive `ModelRunner` by hand over a row whose tokens are given. Does not know why somebody asks
(`specgen.job.verify`), nor anything of scheduling or drafting.

The two shapes, for the token that follows `token_ids`:

    alone       one input token, the last of `token_ids`, one logits row: a step of plain decoding
    verifying   K + 1 input tokens, the last ones drafts; the wanted row is any of them, as in a run
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgen.engine.request import EngineRequest
from specgen.engine.step import NewRow, ScheduledRow, SchedulerOutput
from specgen.kernels.gumbel import gumbel_noise
from specgen.worker.config import WorkerConfig
from specgen.worker.input_batch import InputBatch
from specgen.worker.states import RequestStates
from specgen.worker.target_sampler import LogitsSeen
from specgen.worker.worker import Worker


class PositionLogits(NamedTuple):
    """One position: `logits [V]` as the target gave them; `scores [V]`, whose argmax is sampled; the sampled token.

    Both float32, on the CPU. A score is the processed logit, divided by the temperature, plus the row's noise; at
    temperature 0 it is the processed logit.
    """

    logits: torch.Tensor
    scores: torch.Tensor
    token_id: int


class _NoDrafts:
    """A drafter that proposes nothing: the drafts are put into the state by hand."""

    def __init__(self, states: RequestStates, num_speculative_tokens: int) -> None:
        pass

    def propose(
        self,
        batch: InputBatch,
        hidden: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        num_spec_tokens: int,
    ) -> None:
        """Leaves the drafts as they are."""


class Probe:
    """A model with room for one row. Needs the memory of a worker of its own."""

    def __init__(self, config: WorkerConfig) -> None:
        """`config` is for one row (`max_num_seqs` 1); its draft layers are not loaded.

        Raises: ModelError, RecipeError, as `Worker`.
        """
        assert config.max_num_seqs == 1
        self._config = config
        self._worker = Worker(config, _NoDrafts)
        self._seen: LogitsSeen | None = None
        self._worker.runner.target_sampler.on_logits = self._see

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's arithmetic."""
        return self._config.dtype

    def close(self) -> None:
        """Drops the model."""
        self._worker.shutdown()

    def alone(self, request: EngineRequest, token_ids: Sequence[int]) -> PositionLogits:
        """Return what follows `token_ids` (the prompt and some output), by one step of one token."""
        self._prefill(request, token_ids[:-1])
        return self._last_step(request, token_ids, [], row=0)

    def verifying(
        self, request: EngineRequest, token_ids: Sequence[int], following: Sequence[int], wanted: int | None
    ) -> PositionLogits:
        """Return what follows `token_ids`, by a step that verifies K drafts, of which `following` come after.

        The wanted logits row may be the first of the step or one behind accepted drafts: the first place in which
        `wanted` is sampled is taken, or else the first there is.
        """
        num_output = len(token_ids) - len(request.prompt_token_ids)
        most = min(self._config.num_speculative_tokens, self._config.max_num_batched_tokens - 1)
        self._prefill(request, token_ids[:-1])
        first: PositionLogits | None = None
        for row in range(min(most, num_output) + 1):
            committed = token_ids[: len(token_ids) - row]
            num_drafts = min(most, self._config.max_model_len - 1 - len(committed))
            drafts = [*token_ids[len(committed) :], *following][:num_drafts]
            drafts += [-1] * (num_drafts - len(drafts))
            found = self._last_step(request, committed, drafts, row)
            if found.token_id == wanted:
                return found
            first = first or found
        assert first is not None
        return first

    def _see(self, seen: LogitsSeen) -> None:
        self._seen = seen

    def _prefill(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """Computes the KV of `token_ids` in chunks."""
        budget = self._config.max_num_batched_tokens
        for start in range(0, len(token_ids), budget):
            # committed are all tokens and one more, so that no chunk samples
            self._step(request, [*token_ids, 0], start, min(budget, len(token_ids) - start), [])

    def _last_step(
        self, request: EngineRequest, committed: Sequence[int], drafts: Sequence[int], row: int
    ) -> PositionLogits:
        position = len(committed) - 1
        self._step(request, committed, position, 1 + len(drafts), drafts)
        seen, self._seen = self._seen, None
        assert seen is not None and seen.logits.shape[0] == len(drafts) + 1
        scores = seen.processed[row].cpu()
        if request.params.temperature > 0:
            seeds, positions = torch.tensor([request.seed]), torch.tensor([position + row])
            scores = scores + gumbel_noise(seeds, positions, len(scores))[0]
        return PositionLogits(seen.logits[row].cpu(), scores, int(seen.sampled[row]))

    def _step(
        self, request: EngineRequest, committed: Sequence[int], start: int, num_tokens: int, drafts: Sequence[int]
    ) -> None:
        """Runs `num_tokens` from position `start` on, the last ones `drafts`, over the KV that is there."""
        after = start + num_tokens
        num_prompt = min(len(request.prompt_token_ids), len(committed))
        new = NewRow(0, list(committed), num_prompt, request.params, request.seed, start, 0)
        blocks = list(range(1, 1 + -(-after // self._config.block_size)))
        samples = after >= len(committed)
        row = ScheduledRow(request.request_id, 0, num_tokens, len(drafts), samples, blocks, 0, 0, after)
        self._worker.states.add([new])
        if drafts:
            drafts_of_slot = self._worker.states.draft_tokens[0]
            drafts_of_slot[: len(drafts)] = torch.tensor(drafts, device=drafts_of_slot.device)
        self._worker.execute_model(SchedulerOutput(rows=[row]))
        self._worker.sample_tokens().get()
