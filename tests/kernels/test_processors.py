"""All processors in the Sampler's order, against transformers' in theirs, at draft and bonus rows."""

import random

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specgen.engine.scheduler import NewRow
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


@pytest.mark.parametrize("seed", range(8))
def test_the_order_is_transformers(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_slots = 12
    states = RequestStates(num_slots, 32, VOCAB, K, 4, torch.device("cpu"))
    texts = [[rng.randrange(9) for _ in range(rng.randint(1, 9))] for _ in range(num_slots)]
    params = [random_params(rng) for _ in range(num_slots)]
    for owners in (range(num_slots)[::-1], range(num_slots)):  # nothing of a slot's first owner may remain
        states.add([NewRow(slot, texts[i], 1, params[i], i, 0, 0) for slot, i in enumerate(owners)])

    drafts = torch.randint(0, 9, (num_slots, K + 1), generator=generator)  # the first is the row's last token
    logits = torch.randn(num_slots * (K + 1), VOCAB, generator=generator) * 3
    before, local = logits.clone(), torch.arange(K + 1, dtype=torch.int32)
    slots = torch.arange(num_slots, dtype=torch.int32).repeat_interleave(K + 1)
    sampled = Sampler(states).sample(
        logits,
        SamplingRows(
            row_slots=slots,
            positions=states.total_len[slots].long() - 1 + local.repeat(num_slots),
            spec_ids=drafts.flatten(),
            spec_start=slots * (K + 1) + 1,
            spec_count=local.repeat(num_slots),
            needs=ProcessorNeeds(*[True] * len(ProcessorNeeds._fields)),
        ),
    ).token_ids
    for row, slot in enumerate(slots.tolist()):
        text = texts[slot] + drafts[slot, 1 : 1 + int(local[row % (K + 1)])].tolist()
        wanted = expected(params[slot], text, before[row])
        torch.testing.assert_close(logits[row], wanted, rtol=1e-5, atol=1e-5)
        assert wanted[sampled[row]] > -torch.inf
