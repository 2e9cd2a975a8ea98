"""The test of a draft head before the first row, as `speculation.self_test` says."""

from __future__ import annotations

import logging
from pathlib import Path

from specgen.errors import ModelError
from specgen.models.head_health import HeadHealth, encoded_texts, measure_head
from specgen.tokenizer import Tokenizer, vocabulary_file
from specgen.worker.worker import Worker

logger = logging.getLogger(__name__)

_NUM_TEXTS = 3
_MOST_TOKENS = 128  # of a text: what a few sentences take in any tokenizer, or nearly


def test_head(worker: Worker, folder: Path, mode: str) -> HeadHealth | None:
    """Measures the worker's draft head and warns of one that does not fit; None if there is none to test.

    `mode`: `warn`, `strict` (it is an error) or `skip`. Without a tokenizer there is nothing to test with.

    Raises:
        ModelError: the head is broken, or better under another convention, and the mode is strict.
    """
    draft = worker.model.mtp
    if draft is None or mode == "skip" or not vocabulary_file(folder).is_file():
        return None
    tokenizer = Tokenizer(folder)
    limit = min(_MOST_TOKENS, worker.config.max_model_len)
    prompts = encoded_texts(tokenizer, worker.config.model, limit, _NUM_TEXTS)
    if prompts is None:
        return None
    health = measure_head(worker.model.target, draft, prompts, worker.config.num_speculative_tokens)
    if health.problem is not None:
        if mode == "strict":
            raise ModelError(
                health.problem,
                where=str(worker.config.draft_folder or folder),
                hint="speculation.num_tokens: 0 runs without it, speculation.self_test: warn with it",
            )
        logger.warning("%s; answers are the same, only slower", health.problem)
    return health
