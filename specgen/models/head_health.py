"""Whether a draft head works, found out before the first row: its agreement with the target on a few texts.

The texts are given, so nothing is generated: the target reads them once, and its likeliest token after every position
is compared with the head's, which is shown the same tokens. The same is done under the other convention of each
property that a head's tensors don't tell, by the overlap of the two distributions, sum(min(target, draft)), which is
finer and compared position by position; a head that overlaps more under another one was loaded wrongly, and a head
whose tokens never agree is broken. Later drafts are measured on a chain whose keys and values all come from the same
draft pass, which a run's do only in part, so that their figures are near those of a run and not equal to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specgen.models.config import ModelConfig
from specgen.models.context import AttentionContext
from specgen.models.families import DraftModel, TargetModel
from specgen.tokenizer import Tokenizer

_FEWEST_TOKENS = 8  # of a text, that it tells anything
# Ordinary prose, some 40 tokens each, which every tokenizer can tell.
TEXTS = (
    "The old man walked down to the river every morning. He sat on the same stone, looked at the water, and waited for "
    "the sun to come up over the trees. Then he went home and made himself a cup of tea.",
    "To make bread, you need flour, water, salt and yeast. Mix them in a large bowl, knead the dough for ten minutes, "
    "and let it rest for an hour in a warm place. Then put it into the oven.",
    "Once upon a time there was a little girl named Anna who had a small dog. One day the dog ran away into the "
    "forest. Anna was very sad, and she went to look for him.",
    "The city lies on the coast and is known for its harbour, its museums and its long history. In the summer many "
    "people come to visit, and the streets are full of music.",
    "Water boils at one hundred degrees. When it is heated further, it does not become hotter, but turns into steam. "
    "This is because the energy is used to separate the molecules from one another.",
)
_BLOCK_SIZE = 16
_BROKEN_BELOW = 0.04  # share of positions
_LEAST_GAIN, _SIGMAS = 0.01, 3.0  # of overlap, for another convention to count as better


class Comparison(NamedTuple):
    """The head under another convention: `gain`, its mean and standard error, over the overlap as it is declared."""

    declared: float
    gain: float
    error: float


class HeadHealth(NamedTuple):
    """How near the head is to the target.

    rates: shares of positions where the head's likeliest token is the target's, for each draft, given that the ones
    before it are right. overlap: of the first draft's distribution with the target's, a mean over `num_positions`.
    others: under the other convention of each property, by what it is in words.
    """

    num_positions: int
    rates: tuple[float, ...]
    overlap: float
    others: dict[str, Comparison]

    @property
    def problem(self) -> str | None:
        """What is wrong with the head, in words; None if nothing is."""
        better = {k: c for k, c in self.others.items() if c.gain > max(_LEAST_GAIN, _SIGMAS * c.error)}
        if better:
            name, (declared, gain, _) = max(better.items(), key=lambda item: item[1].gain)
            return (
                f"the draft head agrees better with the model {name}, by {declared + gain:.2f} against "
                f"{declared:.2f}: it was trained under another convention than the one it is run under"
            )
        if self.rates[0] < _BROKEN_BELOW:
            share = f"{self.rates[0]:.1%} of {self.num_positions} positions"
            return f"the draft head agrees with the model at {share}: it is broken, or another model's"
        return None

    def as_json(self) -> dict[str, Any]:
        """All of it, as plain values."""
        others = {name: other._asdict() for name, other in self.others.items()}
        return self._asdict() | {"others": others, "problem": self.problem}


def encoded_texts(
    tokenizer: Tokenizer, config: ModelConfig, max_len: int, num_texts: int | None = None
) -> list[list[int]] | None:
    """The texts as tokens, each cut to `max_len`; None if they are too few, or those of another model's tokenizer."""
    prompts = [tokenizer.encode(text)[:max_len] for text in TEXTS[:num_texts]]
    is_usable = all(len(ids) >= _FEWEST_TOKENS and max(ids) < config.vocab_size for ids in prompts)
    return prompts if is_usable else None


@torch.inference_mode()
def measure_head(target: TargetModel, draft: Any, prompts: Sequence[Sequence[int]], num_drafts: int) -> HeadHealth:
    """The head's health on `prompts`, token ids of two and more each; target and head are as before afterwards."""
    device = target.embed_tokens.weight.device
    step = _Step(prompts, target.embed_tokens.weight.dtype, device)
    normed_for_head = target.head_reads_normed
    try:
        target.head_reads_normed = False
        stream = target(step.ids, step.context, step.new_cache(target.config.num_hidden_layers, target.config.kv_width))
        logits = target.compute_logits(stream)
    finally:
        target.head_reads_normed = normed_for_head
    wanted, probs = logits.argmax(-1), logits.softmax(-1)
    by_norm = {False: stream, True: target.norm(stream)}

    def judged(output: torch.Tensor, number: int) -> tuple[float, torch.Tensor]:
        """Of draft `number`: the share that is right, and the overlap of probabilities at each position."""
        rows = step.compared(number)
        logits = draft.compute_logits(number % draft.num_layers, output[rows])
        right = float((logits.argmax(-1) == wanted[rows + 1]).float().mean())
        return right, torch.minimum(logits.softmax(-1), probs[rows + 1]).sum(-1)

    def overlap(hidden: torch.Tensor, number: int = 0) -> torch.Tensor:
        """Of draft `number`, made from `hidden`, at each position."""
        return judged(step.run(draft, number % draft.num_layers, hidden), number)[1]

    source = by_norm[normed_for_head]
    rates, overlaps, outputs = [], [], [source]
    for number in range(num_drafts):
        before = outputs[-1] if number == 0 else outputs[-1].roll(1, 0)
        outputs.append(step.run(draft, number % draft.num_layers, before))
        rate, shared = judged(outputs[-1], number)
        rates.append(rate)
        overlaps.append(shared)
    declared = overlaps[0]
    where = "before" if normed_for_head else "after"
    others = {
        f"with the model's hidden states {where} the final norm": _compare(
            overlap(by_norm[not normed_for_head]), declared
        )
    }
    with _flipped(draft, "hidden_first"):
        others["with the inputs of its projection in the other order"] = _compare(overlap(source), declared)
    with _flipped(draft, "mask_first_embedding") as masks:
        name = f"with the embedding at position 0 {'kept' if masks else 'masked'}"
        others[name] = _compare(overlap(source), declared)
    if num_drafts > 1:
        # what takes it norms it first, whatever its scale: without the norm's weight it is as if it was not normed
        weight = draft.layers[0].final_norm.weight
        plain = outputs[1] / weight.where(weight != 0, 1.0)
        name = "with its own output carried on before its final norm"
        others[name] = _compare(overlap(plain.roll(1, 0), 1), overlaps[1])
    return HeadHealth(len(declared), tuple(rates), float(declared.mean()), others)


def _compare(other: torch.Tensor, declared: torch.Tensor) -> Comparison:
    gain = other - declared
    return Comparison(float(declared.mean()), float(gain.mean()), float(gain.std()) / len(gain) ** 0.5)


class _Step:
    """The prompts as the rows of one step."""

    def __init__(self, prompts: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        blocks = -(-lengths // _BLOCK_SIZE)
        first = blocks.cumsum(0) - blocks
        self.ids = torch.tensor([token for prompt in prompts for token in prompt], device=device)
        self.positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        self.left = torch.cat([torch.arange(n).flip(0) for n in lengths]).to(device)
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(device)
        tables = first[:, None] + torch.arange(int(blocks.max()))
        self.context = AttentionContext(
            positions=self.positions,
            slot_mapping=first.to(device)[row] * _BLOCK_SIZE + self.positions,
            query_start_loc=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().to(device),
            seq_lens=lengths.int().to(device),
            idx_mapping=torch.arange(len(lengths), dtype=torch.int32, device=device),
            block_tables=tables.clamp(max=int(blocks.sum()) - 1).int().to(device),
            max_query_len=int(lengths.max()),
            max_seq_len=int(lengths.max()),
        )
        self._num_blocks = int(blocks.sum())
        self._dtype, self._device = dtype, device

    def new_cache(self, num_layers: int, kv_width: int) -> torch.Tensor:
        """A KV pool for the prompts alone."""
        shape = (num_layers, self._num_blocks, _BLOCK_SIZE, kv_width)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def run(self, draft: DraftModel, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """A draft layer's output over all positions, each shown the token after it."""
        next_ids = torch.where(self.left > 0, self.ids.roll(-1), -1)
        return draft(layer, next_ids, hidden, self.context, self.new_cache(1, draft.kv_width)[0])

    def compared(self, number: int) -> torch.Tensor:
        """Positions whose draft `number` has all its inputs, and a position after it to compare with."""
        return ((self.left > 0) & (self.positions >= number)).nonzero().flatten()


@contextlib.contextmanager
def _flipped(draft: Any, name: str) -> Iterator[bool]:
    """The first layer's property `name` is the other way round; tells which is the rule."""
    layer = draft.layers[0]
    rule: bool = getattr(layer, name)
    try:
        setattr(layer, name, not rule)
        yield rule
    finally:
        setattr(layer, name, rule)
