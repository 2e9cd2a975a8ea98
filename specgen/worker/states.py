"""What the device knows of each request slot, from admission until the slot is given to another request.

The device owns the truth about counts and tokens; the host only writes a slot when a request takes it, and its block
table when blocks are added. Row R (one past the last slot) belongs to nobody: padded rows may write there.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from specgen.engine.kv_blocks import NULL_BLOCK
from specgen.engine.step import NewRow, ScheduledRow
from specgen.kernels.penalties import id_mask_of
from specgen.sampling_params import MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of the array on the device, without waiting for it (through pinned memory on CUDA)."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor.clone()
    return tensor.pin_memory().to(device, non_blocking=True)


def _num_logprobs(p: SamplingParams) -> tuple[int, int, int]:
    """How many of the likeliest tokens a row wants, raw, processed and of its prompt; -1 is nothing at all."""
    wanted = -1 if p.logprobs is None else p.logprobs
    prompt = -1 if p.prompt_logprobs is None else p.prompt_logprobs
    return (wanted, -1, prompt) if p.logprobs_mode == "raw" else (-1, wanted, prompt)


class RequestStates:
    """Per-slot tensors, named as the kernels name them; shapes are `[R + 1, ...]`."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        num_speculative_tokens: int,
        block_size: int,
        device: torch.device,
        keeps_draft_logits: bool = False,
    ) -> None:
        """All slots empty.

        `keeps_draft_logits`: whether what drafts are drawn from stays, as ratio verification needs it, which costs
        (slots + 1) x K x vocabulary x 4 bytes.
        """
        self.device = device
        self.vocab_size = vocab_size
        num_slots = max_num_seqs + 1
        # a graph feeds K drafts to every row, at the end of a row's room too: those positions stay without a block
        max_blocks = -(-(max_model_len + num_speculative_tokens) // block_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.token_ids = zeros(num_slots, max_model_len)
        self._counts = zeros(15, num_slots)
        self.total_len, self.prefill_len, self.num_computed_tokens, self.kv_start = self._counts[:4]
        self.top_k, self.num_biases, self.num_allowed, self.num_bad_words, self.first_end = self._counts[4:9]
        self.ngram_size, self.num_raw_logprobs, self.num_processed_logprobs, self.num_prompt_logprobs = self._counts[
            9:13
        ]
        # finished: 1 from the step on in which the row ended, until the slot is given to another
        self.max_total_len, self.finished = self._counts[13:]
        self._factors = zeros(7, num_slots, dtype=torch.float32)
        self.temperature, self.top_p, self.min_p_reach, self.typical_p = self._factors[:4]
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty = self._factors[4:]
        self.seeds = zeros(num_slots, dtype=torch.int64)
        self.last_sampled = zeros(num_slots, dtype=torch.int64)
        self.draft_tokens = zeros(num_slots, num_speculative_tokens, dtype=torch.int64)
        num_kept = num_slots if keeps_draft_logits else 0
        self.draft_logits = zeros(num_kept, num_speculative_tokens, vocab_size, dtype=torch.float32)
        self.output_counts = zeros(num_slots, vocab_size)
        self.prompt_mask = zeros(num_slots, -(-vocab_size // 32))
        self.bias_ids = zeros(num_slots, MAX_LOGIT_BIASES)
        self.bias_values = zeros(num_slots, MAX_LOGIT_BIASES, dtype=torch.float32)
        self.allowed_mask = zeros(num_slots, -(-vocab_size // 32))
        self.end_mask = zeros(num_slots, -(-vocab_size // 32))
        self.bad_word_ids = zeros(num_slots, MAX_BAD_WORD_IDS)
        self.bad_word_ends = zeros(num_slots, MAX_BAD_WORDS)
        self.block_tables = torch.full((num_slots, max_blocks), NULL_BLOCK, dtype=torch.int32, device=device)
        # what the host must know of the slots to leave out work that no row needs
        self.has_penalty = np.zeros(num_slots, dtype=bool)
        self.has_filter = np.zeros(num_slots, dtype=bool)
        self.has_rules = np.zeros(num_slots, dtype=bool)
        self.has_min_p = np.zeros(num_slots, dtype=bool)
        self.has_typical_p = np.zeros(num_slots, dtype=bool)
        self.has_raw_logprobs = np.zeros(num_slots, dtype=bool)
        self.has_processed_logprobs = np.zeros(num_slots, dtype=bool)
        # tokens of a prompt whose log-probabilities are wanted; how many of the likeliest beside a token
        self.prompt_to_judge = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt_wanted = np.zeros(num_slots, dtype=np.int64)
        self.num_wanted = np.full(num_slots, -1, dtype=np.int64)
        self.is_random = np.zeros(num_slots, dtype=bool)

    def add(self, rows: list[NewRow]) -> None:
        """Gives slots to requests: every per-slot value is set, nothing of the last owner remains."""
        if not rows:
            return
        counts = [
            (
                len(r.token_ids),
                len(r.token_ids),
                r.num_computed_tokens,
                r.kv_start,
                min(r.params.top_k, self.vocab_size) if r.params.temperature > 0 else 0,
                len(r.params.logit_bias),
                len(r.params.allowed_token_ids or ()),
                len(r.params.bad_words_ids),
                min(r.num_prompt_tokens + r.params.min_tokens, 2**31 - 1) if r.params.min_tokens else 0,
                r.params.no_repeat_ngram_size,
                *_num_logprobs(r.params),
                r.max_total_len,
                0,
            )
            for r in rows
        ]
        factors = [
            (
                p.temperature,
                # a greedy row has no filters, whatever its company needs: they would show in its log-probabilities
                p.top_p if p.temperature > 0 else 1.0,
                -math.log(p.min_p) if p.min_p > 0 and p.temperature > 0 else math.inf,
                p.typical_p if p.temperature > 0 else 1.0,
                p.repetition_penalty,
                p.frequency_penalty,
                p.presence_penalty,
            )
            for p in (r.params for r in rows)
        ]
        slots = to_device(np.array([r.slot for r in rows], dtype=np.int64), self.device)
        self._counts[:, slots] = to_device(np.array(counts, dtype=np.int32).T.copy(), self.device)
        self._factors[:, slots] = to_device(np.array(factors, dtype=np.float32).T.copy(), self.device)
        self.seeds[slots] = to_device(np.array([r.seed for r in rows], dtype=np.int64), self.device)
        self.last_sampled.index_fill_(0, slots, 0)
        self.draft_tokens.index_fill_(0, slots, -1)
        self.block_tables.index_fill_(0, slots, NULL_BLOCK)
        self._add_ends(rows)
        self._add_token_ids(rows)
        for row in rows:
            self._add_params(row)

    def _add_ends(self, rows: list[NewRow]) -> None:
        """Enters the ids that end a row; most rows end alike."""
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            slots_of.setdefault((*sorted(row.eos_token_ids), *row.params.stop_token_ids), []).append(row.slot)
        for ids, slots in slots_of.items():
            mask = to_device(id_mask_of(ids, self.vocab_size), self.device)
            self.end_mask[to_device(np.array(slots, dtype=np.int64), self.device)] = mask

    def _add_token_ids(self, rows: list[NewRow]) -> None:
        """Enters the rows' tokens; behind them stays what the last owner had."""
        lengths = np.array([len(row.token_ids) for row in rows])
        assert lengths.max() <= self.token_ids.shape[1], "a row's tokens would run into the next slot's"
        starts = np.array([row.slot for row in rows]) * self.token_ids.shape[1] - np.cumsum(lengths) + lengths
        places = np.repeat(starts, lengths) + np.arange(lengths.sum())
        flat = np.fromiter(itertools.chain.from_iterable(row.token_ids for row in rows), np.int64, len(places))
        at, ids = to_device(np.stack([places, flat]), self.device)
        self.token_ids.view(-1).index_copy_(0, at, ids.to(torch.int32))

    def _add_params(self, row: NewRow) -> None:
        slot, p = row.slot, row.params
        self.has_penalty[slot] = p.repetition_penalty != 1 or p.frequency_penalty != 0 or p.presence_penalty != 0
        self.has_filter[slot] = p.temperature > 0 and (0 < p.top_k < self.vocab_size or p.top_p < 1)
        self.has_min_p[slot] = p.temperature > 0 and p.min_p > 0
        self.has_typical_p[slot] = p.temperature > 0 and p.typical_p < 1
        self.is_random[slot] = p.temperature > 0
        self.has_rules[slot] = bool(
            p.allowed_token_ids or p.logit_bias or p.bad_words_ids or p.min_tokens or p.no_repeat_ngram_size
        )
        self.has_raw_logprobs[slot] = p.logprobs is not None and p.logprobs_mode == "raw"
        self.has_processed_logprobs[slot] = p.logprobs is not None and p.logprobs_mode == "processed"
        self.num_wanted[slot] = -1 if p.logprobs is None else p.logprobs
        self.prompt_to_judge[slot] = row.num_prompt_tokens if p.prompt_logprobs is not None else 0
        self.num_prompt_wanted[slot] = p.prompt_logprobs or 0
        if self.has_rules[slot]:
            self._add_rules(slot, p)
        if self.has_penalty[slot]:
            ids = np.asarray(row.token_ids, dtype=np.int32)
            prompt, output = ids[: row.num_prompt_tokens], ids[row.num_prompt_tokens :]
            self.prompt_mask[slot] = to_device(id_mask_of(prompt, self.vocab_size), self.device)
            output_counts = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
            self.output_counts[slot] = to_device(output_counts, self.device)

    def _add_rules(self, slot: int, p: SamplingParams) -> None:
        """Enters the tables of the rules that the request has; behind their counts stays what the last owner had."""
        if p.allowed_token_ids:
            self.allowed_mask[slot] = to_device(id_mask_of(p.allowed_token_ids, self.vocab_size), self.device)
        if p.logit_bias:
            biased, values = zip(*p.logit_bias, strict=True)
            self.bias_ids[slot, : len(biased)] = to_device(np.array(biased, dtype=np.int32), self.device)
            self.bias_values[slot, : len(biased)] = to_device(np.array(values, dtype=np.float32), self.device)
        if p.bad_words_ids:
            flat = np.array([token for word in p.bad_words_ids for token in word], dtype=np.int32)
            ends = np.cumsum([len(word) for word in p.bad_words_ids]).astype(np.int32)
            self.bad_word_ids[slot, : len(flat)] = to_device(flat, self.device)
            self.bad_word_ends[slot, : len(ends)] = to_device(ends, self.device)

    def add_blocks(self, rows: list[ScheduledRow]) -> None:
        """Enters the blocks that the rows gained into their block tables."""
        gained = [row for row in rows if row.new_blocks]
        entries = [(row.slot, row.first_block + i, block) for row in gained for i, block in enumerate(row.new_blocks)]
        if not entries:
            return
        slots, columns, blocks = to_device(np.asarray(entries, dtype=np.int64).T.copy(), self.device)
        self.block_tables.index_put_((slots, columns), blocks.to(torch.int32))
