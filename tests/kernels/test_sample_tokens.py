"""All processors and the draw in one: the passes on the device against the processors one by one, and the law."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from specgen.engine.step import NewRow
from specgen.kernels import _draw, _filter_rows
from specgen.kernels.sample_tokens import (
    LogitsRows,
    SamplingTables,
    Wanted,
    expand_logits,
    sample_tokens,
    sample_tokens_torch,
    sample_tokens_triton,
)
from specgen.sampling_params import SamplingParams
from specgen.worker.states import RequestStates

K = 2
ALL = Wanted(*[True] * len(Wanted._fields))


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is NaN, or too large."""
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = real(*args, **kwargs)
        kind = out.dtype
        return out.fill_(torch.nan if kind.is_floating_point else kind == torch.bool or torch.iinfo(kind).max)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.fixture(autouse=True)
def programs_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in calls of many rows."""
    monkeypatch.setattr(_draw, "_PROGRAMS", 1)


def random_params(rng: random.Random, vocab: int, kinds: str) -> SamplingParams:
    """Parameters of the kinds named: r(ules), p(enalties), f(ilters), m(in-p), t(ypical-p); any temperature."""

    def maybe(kind: str, off: Any, on: Any) -> Any:
        return on if kind in kinds and rng.random() < 0.6 else off

    ids = rng.sample(range(vocab), min(vocab, 40))
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=maybe("f", 0, rng.choice([1, 5, 60, vocab // 2])),
        top_p=maybe("f", 1.0, rng.choice([0.1, 0.7, 0.95, 0.999])),
        min_p=maybe("m", 0.0, rng.choice([0.01, 0.2])),
        typical_p=maybe("t", 1.0, 0.6),
        logit_bias=maybe("r", (), tuple((t, rng.uniform(-9, 9)) for t in sorted(ids[:9]))),
        allowed_token_ids=maybe("r", None, tuple(rng.sample(range(vocab), vocab * 2 // 3))),
        bad_words_ids=maybe("r", (), ((ids[0],), *((t, ids[1]) for t in range(9)))),
        no_repeat_ngram_size=maybe("r", 0, rng.randint(1, 2)),
        repetition_penalty=maybe("p", 1.0, rng.uniform(0.6, 1.6)),
        frequency_penalty=maybe("p", 0.0, rng.uniform(-1, 1)),
        presence_penalty=maybe("p", 0.0, rng.uniform(-1, 1)),
        min_tokens=maybe("r", 0, 9),
        stop_token_ids=tuple(ids[2:5]),
    )


def make_inputs(
    seed: int, num_slots: int, vocab: int, kinds: str
) -> tuple[torch.Tensor, LogitsRows, SamplingTables, list[SamplingParams]]:
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    states = RequestStates(num_slots, 32, vocab, K, 4, torch.device("cpu"))
    params = [random_params(rng, vocab, kinds) for _ in range(num_slots)]
    texts = [[rng.randrange(9) for _ in range(rng.randint(1, 9))] for _ in range(num_slots)]
    states.add([NewRow(i, texts[i], 1, params[i], rng.randrange(2**62), 0, 0) for i in range(num_slots)])
    local = torch.arange(K + 1, dtype=torch.int32)
    slots = torch.arange(num_slots, dtype=torch.int32).repeat_interleave(K + 1)
    rows = LogitsRows(
        slots,
        states.total_len[slots.long()].long() - 1 + local.repeat(num_slots),
        torch.randint(0, 9, (num_slots * (K + 1),), generator=g),
        slots * (K + 1) + 1,
        local.repeat(num_slots),
    )
    logits = torch.randn(num_slots * (K + 1), vocab, generator=g) * torch.tensor([1.0, 4.0])[slots.long() % 2, None]
    tables = SamplingTables(*(getattr(states, name) for name in SamplingTables._fields))
    return logits, rows, tables, params


def on(device: str, rows: LogitsRows, tables: SamplingTables) -> tuple[LogitsRows, SamplingTables]:
    return LogitsRows(*(x.to(device) for x in rows)), SamplingTables(*(x.to(device) for x in tables))


@pytest.mark.parametrize(("kinds", "vocab"), [("", 3001), ("r", 300), ("p", 2051), ("fm", 9001), ("rpfmt", 300)])
def test_the_passes_give_what_the_processors_give(kernel_device: str, kinds: str, vocab: int) -> None:
    """Tokens the same; kept logits too, up to the rounding of the device's arithmetic."""
    logits, rows, tables, _ = make_inputs(len(kinds) + vocab, 2 if vocab > 1000 else 4, vocab, kinds)
    logits[1, -3:] = torch.nan  # some may be ruled out before anybody looks
    rows.row_slots[-1] = -1
    wanted = Wanted(
        rules="r" in kinds,
        penalties="p" in kinds,
        noise=True,
        filters="f" in kinds,
        min_p="m" in kinds,
        typical_p="t" in kinds,
        keep=True,
    )
    truth = logits.clone()
    want = sample_tokens_torch(truth, rows, tables, wanted, 1.25)
    args = on(kernel_device, rows, tables)
    for keep in (True, False):
        got_logits = logits.to(kernel_device, copy=True)
        got = sample_tokens_triton(got_logits, *args, wanted._replace(keep=keep), 1.25)
        assert torch.equal(got.token_ids.cpu(), want.token_ids)
        assert got.has_nan.tolist()[:-1] == want.has_nan.tolist()[:-1] == [i == 1 for i in range(len(logits) - 1)]
        if keep:
            kept = got_logits.cpu()[:-1]
            # a filter removes NaN, and rows without one keep it: both never choose it
            torch.testing.assert_close(kept, truth[:-1], rtol=2e-6, atol=2e-6, equal_nan=True)


def test_a_row_does_not_depend_on_what_its_company_needs(kernel_device: str) -> None:
    """Bitwise: each row in the pass with everything on, and with what it alone needs."""
    for kinds in ("", "r", "p", "f", "m"):
        logits, rows, tables, params = make_inputs(7, 2, 500, kinds)
        args = on(kernel_device, rows, tables)
        whole = logits.to(kernel_device, copy=True)
        everything = sample_tokens_triton(whole, *args, ALL._replace(typical_p=False))
        wanted = Wanted(
            rules="r" in kinds, penalties="p" in kinds, noise=True, filters="f" in kinds, min_p="m" in kinds, keep=True
        )
        for slot in range(len(params)):
            part = slice(slot * (K + 1), (slot + 1) * (K + 1))
            alone = logits[part].to(kernel_device, copy=True)
            some = LogitsRows(
                args[0].row_slots[part],
                args[0].positions[part],
                args[0].spec_ids,
                args[0].spec_start[part],
                args[0].spec_count[part],
            )
            got = sample_tokens_triton(alone, some, args[1], wanted)
            assert torch.equal(got.token_ids, everything.token_ids[part])
            assert torch.equal(alone, whole[part])


def test_rows_without_a_token_and_odd_values(kernel_device: str) -> None:
    logits, rows, tables, _ = make_inputs(3, 2, 40, "")
    tables.temperature[:] = torch.tensor([0.0, 1.0, 0.0])
    logits[0] = logits[3] = -math.inf
    logits[1, 5] = logits[4, 6] = math.inf
    logits[2, 7] = logits[5, 8] = math.nan
    truth = logits.clone()
    want = sample_tokens_torch(truth, rows, tables, Wanted(noise=True))
    args = on(kernel_device, rows, tables)
    got = sample_tokens_triton(logits.to(kernel_device, copy=True), *args, Wanted(noise=True))
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert want.token_ids.tolist()[:2] == [0, 5] and want.token_ids.tolist()[3:5] == [0, 6]
    assert got.has_nan.tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize(("kinds", "vocab"), [("", 2_200), ("p", 300), ("fm", 700), ("pfmt", 300)])
def test_a_cut_vocabulary_is_the_whole_one_without_the_other_tokens(
    kernel_device: str, kinds: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are the lowest ids and a few others, which penalties, drafts and noise know by their ids."""
    monkeypatch.setattr(_filter_rows, "_MAX_COLLECTED", 128 if kinds == "fm" else 16)  # with 16, rows are searched, too
    monkeypatch.setattr(_filter_rows, "_SAMPLE", 128)
    whole, rows, tables, _ = make_inputs(len(kinds) + vocab, 3, vocab, kinds)
    num_lowest = vocab * 15 // 16
    extra_ids = torch.tensor([num_lowest + 1, num_lowest + 7, vocab - 1], dtype=torch.int32)
    tables.output_counts[:, vocab - 1] = 3
    rows.spec_ids[::2] = num_lowest + 7
    whole[:, extra_ids.long()] += torch.tensor([4.0, 0.0, 6.0, 0.0, 5.0, 3.0, 0.0, 4.0, 7.0])[:, None]
    logits = torch.cat([whole[:, :num_lowest], whole[:, extra_ids.long()]], dim=1)
    wanted = Wanted(
        penalties="p" in kinds, noise=True, filters="f" in kinds, min_p="m" in kinds, typical_p="t" in kinds, keep=True
    )
    others = torch.ones(vocab, dtype=torch.bool).index_fill_(0, extra_ids.long(), False)
    others[:num_lowest] = False
    whole[:, others] = -torch.inf
    want = sample_tokens_torch(whole, rows, tables, wanted, 1.25).token_ids
    assert bool((want >= num_lowest).any()) and bool((want < num_lowest).any())
    args = on(kernel_device, rows, tables)
    for op, device in ((sample_tokens, "cpu"), (sample_tokens_triton, kernel_device)):
        for keep in (True, False):
            got = logits.to(device, copy=True)
            inputs = (rows, tables) if device == "cpu" and op is sample_tokens else args
            tokens = op(got, *inputs, wanted._replace(keep=keep), 1.25, extra_ids.to(device)).token_ids
            assert torch.equal(tokens.cpu(), want)
            if keep:
                kept = expand_logits(got, extra_ids.to(device), vocab).cpu()
                torch.testing.assert_close(kept, whole, rtol=2e-6, atol=2e-6)


def test_rules_want_a_whole_vocabulary() -> None:
    logits, rows, tables, _ = make_inputs(5, 2, 40, "r")
    with pytest.raises(ValueError, match="rules"):
        sample_tokens(logits[:, :20].contiguous(), rows, tables, Wanted(rules=True))
