"""Rows x vocabulary beyond 2^31 elements: every sampling kernel finds the last row (an int32 address would wrap)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specgen.engine.step import NewRow
from specgen.kernels import _filter_rows, logprobs, no_repeat_ngram, ratio, softcap
from specgen.kernels.sample_tokens import LogitsRows, SamplingTables, Wanted, sample_tokens_torch, sample_tokens_triton
from specgen.sampling_params import SamplingParams
from specgen.worker.states import RequestStates

VOCAB, ROWS = 517, 3
Far = Callable[[torch.Tensor], torch.Tensor]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def logits_of() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def in_place(op: str) -> tuple[Any, Any, tuple[Any, ...], dict[str, Any]]:
    """Kernel, twin and arguments behind the logits, of an op that works in place."""
    slots = int32(0, 1, 2)
    if op == "softcap":
        return softcap.softcap_triton, softcap.softcap_torch, (5.0,), {}
    spec = (slots, torch.tensor([4, 5, 4]), int32(0, 0, 0), int32(0, 2, 3))
    state = {"token_ids": torch.full((ROWS, 9), 4, dtype=torch.int32), "total_len": int32(9, 9, 9)}
    return (
        no_repeat_ngram.apply_no_repeat_ngram_triton,
        no_repeat_ngram.apply_no_repeat_ngram_torch,
        spec,
        state | {"ngram_size": int32(2, 1, 1)},
    )


@pytest.mark.parametrize("op", ["softcap", "no_repeat_ngram"])
def test_in_place(kernel_device: str, far_rows: Far, op: str) -> None:
    kernel, twin, args, state = in_place(op)
    want = logits_of()
    far = far_rows(want)
    moved = [arg.to(kernel_device) if isinstance(arg, torch.Tensor) else arg for arg in args]
    kernel(far, *moved, **{name: value.to(kernel_device) for name, value in state.items()})
    twin(want, *args, **state)
    torch.testing.assert_close(far.cpu(), want, rtol=1e-6, atol=1e-6)
    assert not torch.equal(want[-1], logits_of()[-1])


def test_logprobs(kernel_device: str, far_rows: Far) -> None:
    logits = logits_of()
    logits[2, 5] = 40.0
    far = far_rows(logits)
    args = (int32(0, 1, 2), torch.tensor([1, 2, 5]), int32(2, 2, 2))
    got, want = logprobs.Logprobs.empty(ROWS, far.device), logprobs.Logprobs.empty(ROWS, logits.device)
    logprobs.gather_logprobs_triton(far, *(arg.to(kernel_device) for arg in args), got)
    logprobs.gather_logprobs_torch(logits, *args, want)
    assert torch.equal(got.top_ids[:, :2].cpu(), want.top_ids[:, :2]) and want.top_ids[2, 0] == 5
    torch.testing.assert_close(got.token.cpu(), want.token, rtol=0, atol=2e-6)


def test_ratio(kernel_device: str, far_rows: Far) -> None:
    logits = logits_of()
    args = [
        torch.tensor([9, 9, 9]),
        torch.tensor([0, 11, 12]),
        torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(2)),
        int32(0, 0, 0),
        int32(0, 1, 2),
        torch.tensor([5, 6, 7]),
        torch.tensor([77]),
        torch.ones(1),
    ]
    far = far_rows(logits)
    got = ratio.ratio_sample_triton(far, *(arg.to(kernel_device) for arg in args))
    assert got.tolist() == ratio.ratio_sample_torch(logits, *args).tolist()


@pytest.mark.parametrize("room", [_filter_rows._MAX_COLLECTED, 8])
def test_all_in_one(kernel_device: str, far_rows: Far, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all of a row, and for so few that rows are searched."""
    monkeypatch.setattr(_filter_rows, "_MAX_COLLECTED", room)
    monkeypatch.setattr(_filter_rows, "_SAMPLE", 128)
    params = SamplingParams(
        temperature=0.8,
        top_k=30,
        top_p=0.9,
        typical_p=0.8,
        repetition_penalty=1.3,
        logit_bias=((3, 4.0),),
        min_tokens=50,
    )
    states = RequestStates(2, 32, VOCAB, 2, 4, torch.device("cpu"))
    states.add([NewRow(i, [3, 4, 5 + i], 1, params, 70 + i, 0, 0) for i in range(2)])
    tables = SamplingTables(*(getattr(states, name) for name in SamplingTables._fields))
    rows = LogitsRows(int32(0, 0, 1), torch.tensor([2, 3, 2]), torch.tensor([3, 6, 3]), int32(1, 1, 3), int32(0, 1, 0))
    wanted = Wanted(rules=True, penalties=True, noise=True, filters=True, typical_p=True, keep=True)
    logits = logits_of()
    logits[2, 9] = torch.nan
    far = far_rows(logits)
    want = sample_tokens_torch(logits, rows, tables, wanted)
    moved = LogitsRows(*(x.to(kernel_device) for x in rows)), SamplingTables(*(x.to(kernel_device) for x in tables))
    moved = moved[0], moved[1]._replace(output_counts=far_rows(tables.output_counts))
    before = far.clone()
    for keep in (False, True):
        far.copy_(before)
        got = sample_tokens_triton(far, *moved, wanted._replace(keep=keep))
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert got.has_nan.tolist() == [False, False, True]
    torch.testing.assert_close(far.cpu(), logits, rtol=1e-6, atol=1e-6)
