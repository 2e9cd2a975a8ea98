"""All processors and the draw in one: the passes on the device against the processors one by one, and the law."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from specgen.engine.scheduler import NewRow
from specgen.kernels.sample_tokens import LogitsRows, SamplingTables, Wanted, sample_tokens_torch, sample_tokens_triton
from specgen.sampling_params import SamplingParams
from specgen.worker.states import RequestStates

K = 2
ALL = Wanted(*[True] * len(Wanted._fields))


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


@pytest.mark.parametrize(
    ("kinds", "vocab"), [("", 9001), ("r", 300), ("p", 9001), ("f", 300), ("m", 300), ("fm", 9001), ("rpfmt", 300)]
)
def test_the_passes_give_what_the_processors_give(kernel_device: str, kinds: str, vocab: int) -> None:
    """Tokens the same; kept logits too, up to the rounding of the device's arithmetic."""
    logits, rows, tables, _ = make_inputs(len(kinds) + vocab, 2 if vocab > 1000 else 5, vocab, kinds)
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
        logits, rows, tables, params = make_inputs(7, 3, 500, kinds)
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
