"""All processors in the Sampler's order, against transformers' in theirs, at draft and bonus rows."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specgen.engine.step import NewRow
from specgen.sampling_params import SamplingParams
from specgen.worker.input_batch import ProcessorNeeds
from specgen.worker.sampler import Sampler, SamplingRows
from specgen.worker.states import RequestStates

VOCAB, K = 40, 3


def random_params(rng: random.Random) -> SamplingParams:
    """Two in three of the parameters on."""

    def maybe(off: object, on: object) -> object:
        return on if rng.random() < 0.67 else off

    return SamplingParams(
        temperature=rng.choice([0.5, 1.0, 1.7]),
        top_k=maybe(0, rng.randint(3, 20)),  # type: ignore[arg-type]
        top_p=maybe(1.0, rng.uniform(0.6, 0.99)),  # type: ignore[arg-type]
        min_p=maybe(0.0, rng.uniform(0.01, 0.3)),  # type: ignore[arg-type]
        typical_p=maybe(1.0, rng.uniform(0.3, 0.95)),  # type: ignore[arg-type]
        no_repeat_ngram_size=maybe(0, rng.randint(1, 3)),  # type: ignore[arg-type]
        repetition_penalty=maybe(1.0, rng.uniform(0.7, 1.5)),  # type: ignore[arg-type]
        logit_bias=maybe((), tuple((t, rng.uniform(-5, 5)) for t in range(0, VOCAB, 3))),  # type: ignore[arg-type]
        allowed_token_ids=maybe(None, rng.sample(range(VOCAB), 25)),  # type: ignore[arg-type]
        bad_words_ids=maybe((), [[0], *([rng.randrange(9), t] for t in range(VOCAB))]),  # type: ignore[arg-type]
    )


def expected(params: SamplingParams, text: list[int], logits: torch.Tensor) -> torch.Tensor:
    """What transformers makes of one row in float64, in the order of its `_get_logits_processor`."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.no_repeat_ngram_size:
        processors.append(hf.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        processors.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids]))
    if params.allowed_token_ids:
        processors.append(hf.PrefixConstrainedLogitsProcessor(lambda *_: list(params.allowed_token_ids or ()), 1))
    processors.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(hf.TopPLogitsWarper(params.top_p))
    processors.append(hf.MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        processors.append(hf.TypicalLogitsWarper(params.typical_p))
    return processors(torch.tensor([text]), logits[None].double())[0].float()


NUM_SLOTS = 12


class Rows(NamedTuple):
    """Logits rows of NUM_SLOTS requests at K draft positions and the bonus position each."""

    before: torch.Tensor
    after: torch.Tensor
    sampled: torch.Tensor
    texts: list[list[int]]  # before each row, drafts included
    params: list[SamplingParams]  # of each row


def sampled_rows(params: list[SamplingParams], seed: int) -> Rows:
    """Through the Sampler, in slots that had other owners before."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    states = RequestStates(NUM_SLOTS, 32, VOCAB, K, 4, torch.device("cpu"))
    texts = [[rng.randrange(9) for _ in range(rng.randint(1, 9))] for _ in range(NUM_SLOTS)]
    for owners in (range(NUM_SLOTS)[::-1], range(NUM_SLOTS)):  # nothing of a slot's first owner may remain
        states.add([NewRow(slot, texts[i], 1, params[i], i, 0, 0) for slot, i in enumerate(owners)])

    drafts = torch.randint(0, 9, (NUM_SLOTS, K + 1), generator=generator)  # the first is the row's last token
    logits = torch.randn(NUM_SLOTS * (K + 1), VOCAB, generator=generator) * 3
    before, local = logits.clone(), torch.arange(K + 1, dtype=torch.int32)
    slots = torch.arange(NUM_SLOTS, dtype=torch.int32).repeat_interleave(K + 1)
    rows = SamplingRows(
        row_slots=slots,
        positions=states.total_len[slots].long() - 1 + local.repeat(NUM_SLOTS),
        spec_ids=drafts.flatten(),
        spec_start=slots * (K + 1) + 1,
        spec_count=local.repeat(NUM_SLOTS),
        needs=ProcessorNeeds(*[True] * len(ProcessorNeeds._fields)),
    )
    sampled = Sampler(states).sample(logits, rows).token_ids
    at = [(slot, row % (K + 1)) for row, slot in enumerate(slots.tolist())]
    row_texts = [texts[slot] + drafts[slot, 1 : 1 + count].tolist() for slot, count in at]
    return Rows(before, logits, sampled, row_texts, [params[slot] for slot, _ in at])


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_transformers(seed: int) -> None:
    rng = random.Random(seed)
    rows = sampled_rows([random_params(rng) for _ in range(NUM_SLOTS)], seed)
    for before, after, token, text, params in zip(*rows, strict=True):
        wanted = expected(params, text, before)
        torch.testing.assert_close(after, wanted, rtol=1e-5, atol=1e-5, msg=lambda message, p=params: f"{message}\n{p}")
        assert wanted[token] > -torch.inf


def counted(text: list[int]) -> torch.Tensor:
    """How often each token is in the output; the prompt is one token."""
    return torch.bincount(torch.tensor(text[1:], dtype=torch.int64), minlength=VOCAB).float()


Oracle = Callable[[list[int], torch.Tensor], torch.Tensor]
# One parameter and an independent computation of what it makes of a row's logits at temperature 1.
ALONE: dict[str, tuple[Any, Oracle]] = {
    "top_k": (5, lambda text, logits: hf.TopKLogitsWarper(5)(None, logits[None])[0]),
    "top_p": (0.7, lambda text, logits: hf.TopPLogitsWarper(0.7)(None, logits[None])[0]),
    "min_p": (0.1, lambda text, logits: hf.MinPLogitsWarper(0.1)(None, logits[None])[0]),
    "typical_p": (0.6, lambda text, logits: hf.TypicalLogitsWarper(0.6)(None, logits[None])[0]),
    "temperature": (0.3, lambda text, logits: logits / 0.3),
    "logit_bias": (((4, -2.5), (30, 7.0)), lambda text, logits: logits.index_add(0, torch.tensor([4, 30]), BIAS)),
    "allowed_token_ids": (
        (3, 8, 20),
        lambda text, logits: torch.where(torch.isin(torch.arange(VOCAB), torch.tensor([3, 8, 20])), logits, -torch.inf),
    ),
    "bad_words_ids": (
        ((1,), (2, 3), (4, 5, 6)),
        lambda text, logits: hf.NoBadWordsLogitsProcessor([[1], [2, 3], [4, 5, 6]])(torch.tensor([text]), logits[None])[
            0
        ],
    ),
    "no_repeat_ngram_size": (
        2,
        lambda text, logits: hf.NoRepeatNGramLogitsProcessor(2)(torch.tensor([text]), logits[None])[0],
    ),
    "repetition_penalty": (
        1.4,
        lambda text, logits: hf.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([text]), logits[None])[0],
    ),
    "frequency_penalty": (0.6, lambda text, logits: logits - 0.6 * counted(text)),
    "presence_penalty": (-0.8, lambda text, logits: logits + 0.8 * (counted(text) > 0)),
    "min_tokens": (
        6,
        lambda text, logits: hf.MinNewTokensLengthLogitsProcessor(1, 6, [2, 9])(torch.tensor([text]), logits[None])[0],
    ),
}
BIAS = torch.tensor([-2.5, 7.0])


@pytest.mark.parametrize("name", ALONE)
def test_each_alone_at_draft_and_bonus_positions(name: str) -> None:
    value, oracle = ALONE[name]
    params = SamplingParams(**({"temperature": 1.0, "stop_token_ids": (2, 9), name: value}))
    rows = sampled_rows([params] * NUM_SLOTS, seed=len(name))
    changed = [False] * (K + 1)
    for i, (before, after, token, text, _) in enumerate(zip(*rows, strict=True)):
        wanted = oracle(text, before.clone())
        torch.testing.assert_close(after, wanted, rtol=1e-6, atol=1e-6)
        assert wanted[token] > -torch.inf
        changed[i % (K + 1)] |= not torch.equal(wanted, before)
    assert all(changed), "it matters at every position"
