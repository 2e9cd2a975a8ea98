"""A device without a model: exact about state, positions, KV contents and drafts, scripted about tokens.

A row's next token is a hash of all tokens before it. A KV entry is the tuple of the tokens that it depends on, so a
read of a wrong, stale or foreign entry is seen at once. The draft layer's entry at p depends on token p + 1 as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from specgen.engine.kv_blocks import NULL_BLOCK, KVBlockManager, hash_block
from specgen.engine.step import ModelRunnerOutput, NewRow, ScheduledRow, SchedulerOutput

VOCAB = 50


def next_token(token_ids: list[int]) -> int:
    """The target's token after these."""
    return hash(tuple(token_ids)) % VOCAB


@dataclass
class Slot:
    row: NewRow
    tokens: list[int]
    computed: int
    table: list[int]
    drafts: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def ends_here(self) -> bool:
        """Whether the row's last token is its end, by the rules that a device is told."""
        is_end = self.tokens[-1] in self.row.eos_token_ids or self.tokens[-1] in self.row.params.stop_token_ids
        return is_end or len(self.tokens) >= self.row.max_total_len


@dataclass
class Sampled:
    tokens: list[list[int]]
    num_accepted: list[int]

    def wait(self) -> float:
        return 0.0

    def get(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.tokens, [len(ids) for ids in self.tokens], self.num_accepted)


class FakeDevice:
    """Runs steps as the worker does; `acceptance` is the chance that a draft is the target's token."""

    def __init__(self, kv: KVBlockManager, num_speculative_tokens: int, acceptance: float, seed: int) -> None:
        self.kv, self.k, self.acceptance = kv, num_speculative_tokens, acceptance
        self.random = random.Random(seed)
        self.slots: dict[int, Slot] = {}
        self.target_kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.draft_kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.before_step: Callable[[], None] = lambda: None
        self.steps: list[SchedulerOutput] = []

    def execute_model(self, step: SchedulerOutput) -> None:
        self.before_step()
        self.steps.append(step)
        for new in step.new_rows:
            table = [NULL_BLOCK] * -(-self.kv.max_model_len // self.kv.block_size)
            self.slots[new.slot] = Slot(new, list(new.token_ids), new.num_computed_tokens, table)
        for row in step.rows:
            self.slots[row.slot].table[row.first_block : row.first_block + len(row.new_blocks)] = row.new_blocks
            self._forward(self.slots[row.slot], row)

    def _at(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.table[position // self.kv.block_size], position % self.kv.block_size

    def _forward(self, slot: Slot, row: ScheduledRow) -> None:
        if slot.finished:
            return  # scheduled before the host knew: nothing is read or written
        end = slot.computed + row.num_tokens
        samples = end >= len(slot.row.token_ids)
        assert row.samples == samples
        assert row.num_draft_tokens == (max(0, end - len(slot.tokens)) if samples else 0)
        assert row.num_draft_tokens <= self.k and end < self.kv.max_model_len
        ids = slot.tokens + (slot.drafts + [-1] * self.k)[: row.num_draft_tokens]
        for p in range(slot.computed):
            assert self.target_kv[self._at(slot, p)] == tuple(slot.tokens[: p + 1]), "foreign or stale KV is read"
            assert self.draft_kv[self._at(slot, p)] == tuple(slot.tokens[: p + 2]), "foreign or stale draft KV is read"
        for p in range(slot.computed, end):
            assert self._at(slot, p)[0] != NULL_BLOCK, "a token has no slot"
            if p >= slot.row.kv_start:
                self.target_kv[self._at(slot, p)] = tuple(ids[: p + 1])

    def sample_tokens(self) -> Sampled:
        step = self.steps[-1]
        results = [self._sample(self.slots[row.slot], row, step.num_spec_tokens) for row in step.rows]
        return Sampled([tokens for tokens, _ in results], [num_accepted for _, num_accepted in results])

    def _sample(self, slot: Slot, row: ScheduledRow, num_spec_tokens: int) -> tuple[list[int], int]:
        """The row's tokens, and how many of them were drafts."""
        if slot.finished:
            return [], 0
        start, sampled, num_accepted = slot.computed, [], 0
        slot.computed += row.num_tokens
        if row.samples:
            drafts = slot.drafts[: row.num_draft_tokens]
            for draft in [*drafts, None]:
                sampled.append(next_token(slot.tokens))
                slot.tokens.append(sampled[-1])
                num_accepted += sampled[-1] == draft
                slot.finished = slot.ends_here
                if sampled[-1] != draft or slot.finished:
                    break
            slot.computed -= row.num_draft_tokens + 1 - len(sampled)
        for p in range(max(start, slot.row.kv_start), slot.computed):
            self.draft_kv[self._at(slot, p)] = tuple(slot.tokens[: p + 2])
        if row.samples:
            self._propose(slot, num_spec_tokens)
        return sampled, num_accepted

    def _propose(self, slot: Slot, num: int) -> None:
        slot.drafts, ids = [], list(slot.tokens)
        for i in range(num):
            right = self.random.random() < self.acceptance
            slot.drafts.append(next_token(ids) if right else self.random.randrange(-1, VOCAB))
            ids.append(slot.drafts[-1])
            position = slot.computed + i
            if i and position < self.kv.max_model_len and self._at(slot, position)[0] != NULL_BLOCK:
                self.draft_kv[self._at(slot, position)] = tuple(ids[: position + 2])

    def take_draft_token_ids(self) -> list[list[int]]:
        drafts = [self.slots[row.slot].drafts for row in self.steps[-1].rows]
        return [(d + [-1] * self.k)[: self.k] for d in drafts]

    def shutdown(self) -> None:
        pass

    def check_cache(self) -> None:
        """Every block that can be found by hash holds the KV of exactly the tokens that were hashed."""
        size = self.kv.block_size
        for block_hash, block in self.kv.pool.cached.items():
            tokens = list(self.draft_kv[block, size - 1])
            parent = b""
            for start in range(0, len(tokens) - 1, size):
                parent = hash_block(parent, tokens, start, size)
            assert parent == block_hash
            for i in range(size):
                length = len(tokens) - size + i
                assert self.target_kv[block, i] == tuple(tokens[:length])
                assert self.draft_kv[block, i] == tuple(tokens[: length + 1])
