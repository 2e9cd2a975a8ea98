"""Which groups of processors a step runs, and that few combinations of them are met."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from specgen.worker.states import RequestStates

_MAX_COMBINATIONS = 4


class ProcessorNeeds(NamedTuple):
    """Whether any row of a step needs a group of processors; what no row needs is left out.

    filters: top-k or top-p. rules: allowed ids, biases, least length, bad words or n-grams. Each combination that is
    met has kernels and CUDA graphs of its own, so that few groups are better than many.
    """

    penalties: bool
    filters: bool
    noise: bool
    min_p: bool = False
    rules: bool = False
    typical_p: bool = False
    raw_logprobs: bool = False
    processed_logprobs: bool = False

    @property
    def logprobs(self) -> bool:
        """Whether a row wants log-probabilities."""
        return self.raw_logprobs or self.processed_logprobs


class FewCombinations:
    """Lets the first combinations be what they are, and gives everything that was ever needed for further ones.

    Rows with parameters of their own can make dozens of combinations, and compiling and capturing one takes seconds.
    Groups that no row of a step needs change nothing in its tokens.
    """

    def __init__(self, limit: int = _MAX_COMBINATIONS) -> None:
        """`limit`: how many are let be."""
        self._limit = limit
        self._met: set[ProcessorNeeds] = set()
        self._all = ProcessorNeeds(False, False, False)

    def settle(self, needs: ProcessorNeeds) -> ProcessorNeeds:
        """The combination to run where `needs` is needed; log-probabilities are as they are in it."""
        logprobs = {"raw_logprobs": needs.raw_logprobs, "processed_logprobs": needs.processed_logprobs}
        groups = needs._replace(raw_logprobs=False, processed_logprobs=False)
        if groups not in self._met and len(self._met) < self._limit:
            self._met.add(groups)
            self._all = ProcessorNeeds(*map(max, self._all, groups))
        if groups not in self._met:
            groups = self._all = ProcessorNeeds(*map(max, self._all, groups))
        return groups._replace(**logprobs)


def processor_needs(slots: np.ndarray, states: RequestStates) -> ProcessorNeeds:
    """What the rows in `slots` need between them."""
    return ProcessorNeeds(
        penalties=bool(states.has_penalty[slots].any()),
        filters=bool(states.has_filter[slots].any()),
        noise=bool(states.is_random[slots].any()),
        min_p=bool(states.has_min_p[slots].any()),
        rules=bool(states.has_rules[slots].any()),
        typical_p=bool(states.has_typical_p[slots].any()),
        raw_logprobs=bool(states.has_raw_logprobs[slots].any()),
        processed_logprobs=bool(states.has_processed_logprobs[slots].any()),
    )
