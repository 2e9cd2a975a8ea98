"""Decides in each step which requests get how many tokens, and takes the step's results back.

Knows requests, counts and blocks; nothing of tensors or text. There is no prefill or decode phase: a step gives a
request the tokens that its computed count lacks, `num_tokens + drafts + placeholders - num_computed_tokens`, within
the budget.

Order is first come, first served: running before waiting; the youngest running request is preempted when blocks run
out, and recomputed later. Drafts shrink before anybody is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specgen.engine.gains import take_tokens
from specgen.engine.kv_blocks import KVBlockManager
from specgen.engine.repetition import repeat_step
from specgen.engine.request import (
    EngineOutput,
    EngineRequest,
    Request,
    Status,
    TokenLogprob,
)
from specgen.engine.step import ModelRunnerOutput, NewRow, ScheduledRow, SchedulerOutput


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step. `num_speculative_tokens` is K; `num_draft_layers` counts layers with KV of their own."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_speculative_tokens: int
    num_draft_layers: int
    async_scheduling: bool
    eos_token_ids: frozenset[int]


class Scheduler:
    """Owns the requests, their order, and their blocks."""

    def __init__(self, config: SchedulerConfig, kv: KVBlockManager) -> None:
        """An empty schedule over the blocks of `kv`."""
        self.config = config
        self.kv = kv
        self.requests: dict[int, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        # of the steps scheduled next, both may change at any time: drafts of a row, and how often a step may run
        self.draft_limit = config.num_speculative_tokens
        self.repeat_limit = 1
        self._just_admitted = False
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.requests)

    def has_schedulable(self) -> bool:
        """Whether a schedule made now could hold a row: a row waits, or lacks tokens that no step in flight brings."""
        return bool(self.waiting) or any(self._num_new_tokens(r, 1) for r in self.running)

    def add_request(self, new: EngineRequest) -> EngineOutput | None:
        """Queues the request; a request that can never fit gets its error output at once."""
        limit = self.config.max_model_len
        num_prompt = len(new.prompt_token_ids)
        if num_prompt == 0:
            return EngineOutput(new.request_id, [], "error", error="the prompt has no tokens")
        if num_prompt >= limit:
            message = f"the prompt has {num_prompt} tokens; the limit is {limit} for prompt and answer together"
            return EngineOutput(new.request_id, [], "error", error=message)
        if num_prompt > self.kv.max_request_tokens():
            return EngineOutput(new.request_id, [], "error", error=self._too_long_for_the_pool(num_prompt))
        if new.params.stop and new.new_stop_check is None:
            return EngineOutput(new.request_id, [], "error", error="stop strings need a tokenizer, and there is none")
        assert new.request_id not in self.requests, "request ids are unique"
        eos_ids = frozenset() if new.params.ignore_eos else self.config.eos_token_ids
        request = Request(
            request_id=new.request_id,
            prompt_token_ids=new.prompt_token_ids,
            params=new.params,
            seed=new.seed,
            max_tokens=min(new.params.max_tokens or limit, limit - num_prompt),
            end_ids=eos_ids.union(new.params.stop_token_ids),
            eos_ids=eos_ids,
            token_ids=list(new.prompt_token_ids),
            stop_check=new.new_stop_check() if new.params.stop and new.new_stop_check is not None else None,
            prompt_logprobs=[None] * num_prompt if new.params.prompt_logprobs is not None else None,
            num_given_tokens=min(new.num_given_tokens, num_prompt - 1),
        )
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return None

    def _too_long_for_the_pool(self, num_tokens: int) -> str:
        return (
            f"the row needs KV slots for {num_tokens} tokens and the whole pool has {self.kv.max_request_tokens()}; "
            "lower max_tokens, or give the pool more blocks (engine.memory_fraction, engine.num_blocks)"
        )

    def abort(self, request_id: int) -> EngineOutput | None:
        """Ends a request; None when it is not (or no longer) known."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        self._finish(request, "abort", None)
        return self._output(request, [])

    # schedule

    def schedule(self) -> SchedulerOutput:
        """The next step. Counts advance as if all its drafts were accepted; `update_from_output` corrects them.

        Behind a step that admitted rows none are admitted if the step can run several times instead.
        """
        out = SchedulerOutput(draft_limit=self.draft_limit)
        budget, any_preempted = self._schedule_running(out, self.config.max_num_batched_tokens)
        if any_preempted or (self._just_admitted and self._repeat(out)):
            self._just_admitted = False
            return out
        self._schedule_waiting(out, budget)
        self._just_admitted = bool(out.new_rows)
        if not self._just_admitted:
            self._repeat(out)
        return out

    def _repeat(self, out: SchedulerOutput) -> bool:
        if self.repeat_limit == 1:
            return False  # without a look at the rows
        requests = [self.requests[row.request_id] for row in out.rows]
        return repeat_step(out, requests, self.kv, self.repeat_limit)

    def _schedule_running(self, out: SchedulerOutput, budget: int) -> tuple[int, bool]:
        any_preempted = False
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            num_new = self._num_new_tokens(request, budget)
            if num_new == 0:
                i += 1
                continue
            while (row := self._try_allocate(request, num_new)) is None:
                if len(self.running) == 1:
                    # nobody else holds a block: wait for the real counts, or this is the end of it
                    if request.num_steps_in_flight == 0:
                        out.ended.append(self._fail(request, self._too_long_for_the_pool(request.num_tokens)))
                    return budget, True
                victim = self.running[-1]
                self._preempt(victim)
                any_preempted = True
                if victim is request:
                    return budget, True
            budget -= row.num_tokens
            self._take(request, row, out)
            i += 1
        return budget, any_preempted

    def _schedule_waiting(self, out: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget > 0 and self._free_slots:
            request = self.waiting[0]
            if request.num_steps_in_flight:
                return  # a step scheduled before its preemption still owes it tokens
            num_cached = self.kv.match_prefix(request, use_cache=not request.lacks_prompt_logprobs)
            # a draft layer j > 0 reads the layer below one position back: behind a hit, recompute those without writing
            num_known = max(0, num_cached - max(0, self.config.num_draft_layers - 1))
            request.num_computed_tokens = max(num_known, request.num_given_tokens)
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            row = self._try_allocate(request, num_new) if self._fits(request) else None
            if row is None:
                self.kv.free(request)
                request.num_computed_tokens = 0
                return
            self.waiting.popleft()
            self.running.append(request)
            request.status = Status.RUNNING
            request.slot = self._free_slots.pop()
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached
            out.new_rows.append(
                NewRow(
                    request.slot,
                    list(request.token_ids),
                    request.num_prompt_tokens,
                    request.params,
                    request.seed,
                    request.num_computed_tokens,
                    num_cached,
                    request.eos_ids,
                    request.num_prompt_tokens + request.max_tokens,
                )
            )
            row = row._replace(slot=request.slot, new_blocks=list(self.kv.block_ids(request)), first_block=0)
            budget -= row.num_tokens
            self._take(request, row, out)

    def _fits(self, request: Request) -> bool:
        """Whether all committed tokens would fit now, so that an admission does not at once cost a preemption."""
        num_slots = request.num_tokens + 1
        num_needed = -(-num_slots // self.kv.block_size) - len(self.kv.block_ids(request))
        return num_needed <= self.kv.pool.num_free_blocks or not self.running

    def _num_new_tokens(self, request: Request, budget: int) -> int:
        num_left = request.num_tokens_left
        if num_left <= 0:
            return 0  # the steps in flight end it for certain
        num_drafts, num_computed = len(request.spec_token_ids), request.num_computed_tokens
        num_useful = num_drafts if num_drafts < num_left else num_left - 1
        num_new = len(request.token_ids) + num_useful + request.num_output_placeholders - num_computed
        return max(0, min(num_new, budget, self.config.max_model_len - 1 - num_computed))

    def _try_allocate(self, request: Request, num_new: int) -> ScheduledRow | None:
        """The request's row, with the drafts and lookahead slots that there are blocks for; None if no token fits."""
        num_behind = request.num_computed_tokens + num_new - len(request.token_ids) - request.num_output_placeholders
        samples, num_drafts = num_behind >= 0, max(0, num_behind)
        num_lookahead = request.num_usable_drafts(self.draft_limit, num_more=1) if samples else 0
        first_block = len(self.kv.block_ids(request))
        for tokens, lookahead in ((num_new, num_lookahead), (num_new, 0), (num_new - num_drafts, 0)):
            blocks = self.kv.allocate_slots(request, tokens, lookahead)
            if blocks is not None:
                num_drafts -= num_new - tokens
                request.num_lookahead_slots = lookahead
                return ScheduledRow(
                    request.request_id,
                    request.slot,
                    tokens,
                    num_drafts,
                    samples,
                    blocks,
                    first_block,
                    request.num_preemptions,
                    request.num_computed_tokens + tokens,
                )
        return None

    def _take(self, request: Request, row: ScheduledRow, out: SchedulerOutput) -> None:
        """Advances the request's counts over a row that was allocated."""
        request.num_computed_tokens += row.num_tokens
        request.num_steps_in_flight += 1
        request.spec_token_ids = []
        if row.samples:
            request.num_sampling_steps_in_flight += 1
            request.num_output_placeholders += 1 + row.num_draft_tokens
            num_next = request.num_lookahead_slots
            out.num_spec_tokens = max(out.num_spec_tokens, num_next)
            if self.config.async_scheduling:
                request.spec_token_ids = [-1] * num_next
        out.rows.append(row)

    # results

    def update_from_output(self, out: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """Appends the sampled tokens up to each row's end; publishes blocks that became final."""
        outputs = []
        times, sampled, accepted = out.times, result.num_sampled, result.num_accepted
        for b, row in enumerate(out.rows):
            request = self.requests.get(row.request_id)
            if request is None:
                continue  # ended while the step was in flight
            if (part := result.prompt_logprobs.get(b)) is not None:
                assert request.prompt_logprobs is not None
                request.prompt_logprobs[part.first : part.first + len(part.values)] = part.values
            logprobs = result.logprobs[b] if result.logprobs is not None else []
            token_ids, at = result.sampled_token_ids[b], slice(b * times, (b + 1) * times)
            num_repeated = out.num_repeated(row)
            output = self._update_row(request, row, num_repeated, token_ids, sampled[at], accepted[at], logprobs)
            if output is not None:
                outputs.append(output)
        return outputs

    def _update_row(
        self,
        request: Request,
        row: ScheduledRow,
        num_repeated: int,
        sampled: list[int],
        num_sampled: list[int],
        num_accepted: list[int],
        logprobs: Sequence[TokenLogprob],
    ) -> EngineOutput | None:
        """`num_sampled`, `num_accepted`: of each time that the step ran."""
        assert bool(sampled) == row.samples, "a row samples exactly when its inputs reach the last committed token"
        request.num_steps_in_flight -= 1
        stale = row.epoch != request.num_preemptions
        if row.samples:
            request.num_sampling_steps_in_flight -= len(num_sampled)
            if not stale:
                num_promised = 1 + row.num_draft_tokens + num_repeated
                request.num_computed_tokens -= num_promised - len(sampled)
                request.num_output_placeholders -= num_promised
        kept = take_tokens(request, row.num_draft_tokens, sampled, num_sampled, num_accepted)
        if request.finish_reason == "error":
            message = f"the model's logits are not numbers (NaN) at output token {request.num_output_tokens}"
            return self._fail(request, message)._replace(new_token_ids=kept, error_code="nan_logits")
        if not stale:
            self.kv.publish(request, len(request.token_ids) - 1 if row.samples else row.num_computed_after)
        if request.finish_reason is not None:
            self._finish(request, request.finish_reason, request.stop)
        if not kept:
            return None
        if request.params.logprobs is None:
            return self._output(request, kept)
        return self._output(request, kept)._replace(logprobs=list(logprobs[: len(kept)]))

    def update_draft_token_ids(self, out: SchedulerOutput, drafts: list[list[int]]) -> None:
        """Takes the drafts proposed after step `out` (synchronous mode): a list a row, cut at the first -1."""
        for row, row_drafts in zip(out.rows, drafts, strict=True):
            request = self.requests.get(row.request_id)
            if request is None or request.status is not Status.RUNNING or not row.samples:
                continue
            usable = row_drafts[: request.num_lookahead_slots]
            request.spec_token_ids = usable[: usable.index(-1)] if -1 in usable else usable

    # ends

    def _fail(self, request: Request, error: str) -> EngineOutput:
        self._finish(request, "error", None)
        return self._output(request, [])._replace(error=error)

    def _preempt(self, request: Request) -> None:
        assert self.running[-1] is request
        self.running.pop()
        self._release(request)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_output_placeholders = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1

    def _finish(self, request: Request, reason: str, stop: str | int | None) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._release(request)
        self.kv.forget(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop = reason, stop
        del self.requests[request.request_id]

    def _output(self, request: Request, new_token_ids: list[int]) -> EngineOutput:
        if not request.is_finished:
            return EngineOutput(request.request_id, new_token_ids)
        return EngineOutput(
            request.request_id,
            new_token_ids,
            request.finish_reason,
            request.stop,
            request.stats,
            request.num_cached_tokens,
            stop_at=request.stop_at,
            prompt_logprobs=request.prompt_logprobs,
        )

    def check(self) -> None:
        """Raises AssertionError unless blocks, slots and counts are conserved."""
        self.kv.check()
        slots = sorted(self._free_slots + [r.slot for r in self.running])
        assert slots == list(range(self.config.max_num_seqs)), "a slot is lost or taken twice"
        assert len(self.requests) == len(self.running) + len(self.waiting), "a request is in no queue, or in two"
        for request in self.running:
            num_slots = self.kv.num_slots(request)
            assert min(request.num_computed_tokens, self.config.max_model_len) <= num_slots, "tokens without slots"
