"""The same rows through transformers' batched `generate`, for comparison: greedy, every row its full length.

Knows nothing of the engine. transformers is not one of specgen's own needs; it comes with the extra `test`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specgen.errors import RecipeError

if TYPE_CHECKING:
    import torch

BATCH_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Output tokens a second by batch size, and the token ids of each row (in order, of the last batch size)."""

    tokens_per_second: dict[int, float]
    token_ids: list[list[int]] = field(repr=False)

    @property
    def best_batch_size(self) -> int:
        """The batch size with the most tokens a second."""
        return max(self.tokens_per_second, key=self.tokens_per_second.__getitem__)

    def as_dict(self) -> dict[str, object]:
        """Plain JSON values."""
        return {
            "peer": "transformers",
            "tokens_per_second": {str(size): round(rate, 2) for size, rate in self.tokens_per_second.items()},
            "best_batch_size": self.best_batch_size,
        }


def require_transformers(flag: str) -> None:
    """Raises RecipeError, naming the flag that needs it, if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise RecipeError(f"{flag}: the package transformers is not installed", hint="pip install transformers")


def load_peer_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns the model in `folder` as transformers runs it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would list the draft layers, which it does not know
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval()


def run_transformers(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    on_round: Callable[[str], None] | None = None,
    most_rows: int | None = None,
) -> PeerResult:
    """Generates `num_tokens` greedy tokens a prompt at each batch size up to the number of prompts, left-padded.

    `most_rows`: at once, as the engine's; None leaves the batch size free. Loading and one short warm-up are not timed.
    """
    model = load_peer_model(folder, dtype, device)
    model.generation_config.eos_token_id = None  # every row runs to its full length
    rates: dict[int, float] = {}
    ids: list[list[int]] = []
    limit = most_rows or max(BATCH_SIZES)
    sizes = [size for size in BATCH_SIZES if size < 2 * len(prompts) and size <= limit]
    for size in sizes or [min(len(prompts), limit)]:
        if on_round is not None:
            on_round(f"transformers, {size} rows at once")
        _generate(model, prompts[:2], 4)
        started = time.perf_counter()
        ids = [row for i in range(0, len(prompts), size) for row in _generate(model, prompts[i : i + size], num_tokens)]
        rates[size] = sum(map(len, ids)) / (time.perf_counter() - started)
    return PeerResult(rates, ids)


def _generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, pad_token_id=0)
    return out[:, width:].tolist()  # type: ignore[no-any-return]
