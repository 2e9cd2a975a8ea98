"""A mixed step's flat arrays, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specgen.engine.step import NewRow, ScheduledRow
from specgen.sampling_params import SamplingParams
from specgen.worker.input_batch import build_batch, host_batch
from specgen.worker.processor_needs import FewCombinations, ProcessorNeeds, processor_needs
from specgen.worker.states import RequestStates

BLOCK = 4
GREEDY = ProcessorNeeds(False, False, False)


def row(
    slot: int, num_tokens: int, num_drafts: int, computed_after: int = 0, blocks: list[int] | None = None
) -> ScheduledRow:
    return ScheduledRow(slot, slot, num_tokens, num_drafts, True, blocks or [], 0, 0, computed_after)


# a prompt chunk of 5 in slot 4, a decode with 3 drafts in slot 0, one without in slot 2, a chunk's end with 1 draft
MIXED = [row(4, 5, 0), row(0, 4, 3), row(2, 1, 0), row(7, 3, 1)]


def test_arrays_of_a_mixed_step() -> None:
    host = host_batch(MIXED)
    want = {
        "idx_mapping": [4, 0, 2, 7],
        "query_start_loc": [0, 5, 9, 10, 13],
        "cu_num_logits": [0, 1, 5, 6, 8],
        "logits_indices": [4, 5, 6, 7, 8, 9, 11, 12],
        "row_slots": [4, 0, 0, 0, 0, 2, 7, 7],
        "spec_count": [0, 0, 1, 2, 3, 0, 0, 1],
    }
    for name, values in want.items():
        array = getattr(host, name)
        assert array.tolist() == values, name
        assert array.dtype == np.int32, name
    assert host.max_query_len == 5


def test_each_logits_row_sees_the_drafts_before_it() -> None:
    """`spec_start` and `spec_count` cut those out of the logits rows' own input ids."""
    host = host_batch(MIXED)
    ids = np.array([50, 10, 11, 12, 13, 60, 70, 71])  # of the logits rows: 11, 12, 13 and 71 are drafts
    seen = [ids[s : s + n].tolist() for s, n in zip(host.spec_start, host.spec_count, strict=True)]
    assert seen == [[], [], [11], [11, 12], [11, 12, 13], [], [], [71]]


def test_one_row_alone() -> None:
    host = host_batch([row(3, 1, 0)])
    assert [a.tolist() for a in host[:6]] == [[3], [0, 1], [0, 1], [0], [3], [1]]
    assert host.max_query_len == 1


def states() -> RequestStates:
    return RequestStates(8, 16, 64, 3, BLOCK, torch.device("cpu"))


def test_the_devices_counts_decide_positions_ids_and_slots() -> None:
    s = states()
    params = SamplingParams(temperature=0.0)
    s.add(
        [
            NewRow(4, list(range(20, 29)), 9, params, 1, 0, 0),
            NewRow(0, [30, 31, 32, 33, 34, 35], 6, params, 2, 0, 0),
            NewRow(2, [40, 41], 2, params, 3, 1, 0),
        ]
    )
    s.num_computed_tokens[0] = 5  # as after steps whose drafts were not all accepted
    s.draft_tokens[0] = torch.tensor([7, 8, -1])
    rows = [row(4, 5, 0, 5, [3, 9]), row(0, 4, 3, 9, [5, 2, 6]), row(2, 1, 0, 2, [1])]
    s.add_blocks(rows)
    batch = build_batch(rows, s, max_seq_len=9, block_size=BLOCK, needs=GREEDY, rewinds=False)
    assert batch.input_ids.tolist() == [20, 21, 22, 23, 24, 35, 7, 8, -1, 41]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert batch.context.seq_lens.tolist() == [5, 9, 2]
    assert batch.context.slot_mapping.tolist() == [12, 13, 14, 15, 36, 9, 10, 11, 24, 5]
    assert batch.logits_indices is not None
    assert batch.logits_indices.tolist() == [4, 5, 6, 7, 8, 9] and batch.logits_indices.dtype == torch.int64
    assert batch.at_logits(batch.positions).tolist() == [4, 5, 6, 7, 8, 1]
    assert batch._replace(logits_indices=None).at_logits(batch.positions) is batch.positions


def test_recomputed_positions_behind_a_hit_are_not_written() -> None:
    s = states()
    s.add([NewRow(1, list(range(10)), 10, SamplingParams(), 0, 7, 8)])
    rows = [row(1, 3, 0, 10, [3, 4, 5])]
    s.add_blocks(rows)
    assert build_batch(rows, s, 10, BLOCK, GREEDY, rewinds=True).context.slot_mapping.tolist() == [-1, 20, 21]
    assert build_batch(rows, s, 10, BLOCK, GREEDY, rewinds=False).context.slot_mapping.tolist() == [19, 20, 21]


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (SamplingParams(temperature=0.0), (False, False, False)),
        (SamplingParams(temperature=0.0, top_k=5, top_p=0.5), (False, False, False)),
        (SamplingParams(temperature=1.0), (False, False, True)),
        (SamplingParams(temperature=1.0, top_k=64), (False, False, True)),
        (SamplingParams(temperature=1.0, top_k=5), (False, True, True)),
        (SamplingParams(temperature=1.0, top_p=0.9), (False, True, True)),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), (True, False, False)),
        (SamplingParams(temperature=0.0, frequency_penalty=-0.1), (True, False, False)),
        (SamplingParams(temperature=0.0, presence_penalty=0.1), (True, False, False)),
        (SamplingParams(temperature=0.5, min_p=0.1), (False, False, True, True)),
        (SamplingParams(temperature=0.0, logit_bias=((1, 1.0),)), (False, False, False, False, True)),
        (SamplingParams(temperature=0.0, no_repeat_ngram_size=2), (False, False, False, False, True)),
        (SamplingParams(temperature=0.0, typical_p=0.5), (False, False, False)),
        (SamplingParams(temperature=0.5, typical_p=0.5), (False, False, True, False, False, True)),
        (SamplingParams(temperature=0.0, logprobs=0), (False, False, False, False, False, False, True)),
        (
            SamplingParams(temperature=0.0, logprobs=3, logprobs_mode="processed"),
            (False, False, False, False, False, False, False, True),
        ),
        (SamplingParams(temperature=0.0, prompt_logprobs=1), (False, False, False)),
    ],
)
def test_processors_that_no_row_needs_are_left_out(params: SamplingParams, needs: tuple[bool, ...]) -> None:
    s = states()
    s.add([NewRow(0, [1], 1, SamplingParams(temperature=0.0), 0, 0, 0), NewRow(3, [1], 1, params, 0, 0, 0)])
    assert processor_needs(np.array([0, 3]), s) == ProcessorNeeds(*needs)
    assert processor_needs(np.array([0]), s) == ProcessorNeeds(False, False, False)


def test_further_combinations_of_processors_become_one() -> None:
    few = FewCombinations(limit=2)
    plain, noisy = ProcessorNeeds(False, False, False), ProcessorNeeds(False, False, True)
    assert [few.settle(needs) for needs in (plain, noisy)] == [plain, noisy]
    both = ProcessorNeeds(penalties=True, filters=False, noise=True)
    assert few.settle(ProcessorNeeds(penalties=True, filters=False, noise=False)) == both
    filtered = ProcessorNeeds(penalties=False, filters=True, noise=True, raw_logprobs=True)
    assert few.settle(filtered) == ProcessorNeeds(True, True, True, raw_logprobs=True)
    assert few.settle(both) == ProcessorNeeds(True, True, True)
    assert [few.settle(needs) for needs in (plain, noisy)] == [plain, noisy]
    assert few.settle(noisy._replace(raw_logprobs=True)) == noisy._replace(raw_logprobs=True)


def test_a_slot_keeps_nothing_of_its_last_owner() -> None:
    s = states()
    old = SamplingParams(temperature=1.0, top_k=3, top_p=0.5, repetition_penalty=1.5, presence_penalty=1.0)
    s.add([NewRow(2, [5] * 12, 4, old, 99, 4, 4)])
    s.add_blocks([row(2, 1, 0, 0, [3, 4, 5])])
    s.draft_tokens[2], s.last_sampled[2], s.total_len[2] = torch.tensor([1, 2, 3]), 9, 14
    fresh = SamplingParams(temperature=0.5, frequency_penalty=0.2)
    s.add([NewRow(2, [6, 7, 7], 1, fresh, -5, 0, 0)])
    other = states()
    other.add([NewRow(2, [6, 7, 7], 1, fresh, -5, 0, 0)])
    for name, tensor in vars(other).items():
        if isinstance(tensor, torch.Tensor) and name != "token_ids":
            assert torch.equal(getattr(s, name), tensor), name
        elif isinstance(tensor, np.ndarray):
            assert (getattr(s, name) == tensor).all(), name
    assert s.token_ids[2, :3].tolist() == [6, 7, 7]
    assert s.output_counts[2].nonzero().flatten().tolist() == [7] and int(s.output_counts[2, 7]) == 2
    assert s.prompt_mask[2].tolist() == [1 << 6, 0]
