"""The greedy tokens of a recipe's run against transformers, an implementation that shares nothing with ours.

Knows which rows can be compared so, and how to get transformers' logits for tokens that are given: one forward pass
over prompt and output, so that each token is judged after the very tokens that our run had before it.
transformers is not one of specgen's own needs; it comes with the extra `test`.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from specgen.errors import RecipeError
from specgen.job.peer import load_peer_model, require_transformers
from specgen.job.verdict import SideAt
from specgen.job.verify import Answer, Found, VerifyRow
from specgen.recipe import Recipe
from specgen.sampling_params import SamplingParams
from specgen.stats import counted
from specgen.worker.config import resolve_device, resolve_dtype
from specgen.worker.probe import PositionLogits

# What a greedy row may set and still get the largest logit everywhere: filters keep it, the rest only ends the row.
_KEEPS_LARGEST = frozenset(
    (
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "max_tokens", "ignore_eos", "stop_token_ids", "seed"),
        *("stop", "include_stop", "logprobs", "logprobs_mode", "prompt_logprobs", "n"),
    )
)


# Logits `[len(output), V] float32`, on the CPU, before each output token: given prompt and output.
OutputLogits = Callable[[Sequence[int], Sequence[int]], torch.Tensor]


def require_largest_logit(rows: Sequence[VerifyRow]) -> None:
    """Return if every row always takes the largest logit, as `transformers_differences` needs it.

    Raises: RecipeError naming the row and the parameters.
    """
    neutral = SamplingParams(temperature=0.0)
    names = [item.name for item in fields(SamplingParams) if item.name not in _KEEPS_LARGEST]
    for row in rows:
        params = row.request.params
        wrong = [name for name in names if getattr(params, name) != getattr(neutral, name)]
        if params.temperature > 0:
            wrong.insert(0, "temperature")
        if wrong:
            values = ", ".join(f"{name} {getattr(params, name)}" for name in wrong)
            raise RecipeError(
                f"--against transformers compares greedy rows without penalties; row {row.name} has {values}",
                hint="--set sampling.temperature=0, or --against plain",
            )


def transformers_differences(
    rows: Sequence[VerifyRow],
    load: Callable[[], OutputLogits],
    ours: Sequence[Answer],
    *,
    on_progress: Callable[[str], None],
) -> list[Found | None]:
    """Return each row's first token that is not the largest of transformers' logits after the same tokens before.

    load: called once, when the engine's memory is free again. How a row ended is not compared, only its tokens.
    """
    on_progress(f"{counted(len(rows), 'row')} through transformers, a forward pass each")
    output_logits = load()
    found: list[Found | None] = []
    for row, answer in zip(rows, ours, strict=True):
        logits = output_logits(row.request.prompt_token_ids, answer.token_ids)
        largest: list[int] = logits.argmax(dim=1).tolist()
        at = next((i for i, token in enumerate(answer.token_ids) if token != largest[i]), None)
        if at is None:
            found.append(None)
            continue
        side = SideAt("transformers", largest[at], "")
        theirs = PositionLogits(logits[at].clone(), logits[at].clone(), largest[at])
        found.append(Found(at, side, answer.token_ids[at:], theirs))
    return found


def load_transformers(recipe: Recipe, folder: Path) -> Callable[[], OutputLogits]:
    """Return what loads the model in `folder` as transformers runs it, in the recipe's dtype and on its device.

    Raises: RecipeError if transformers is not installed.
    """
    require_transformers("--against transformers")
    device = resolve_device(recipe.model.device)
    dtype = resolve_dtype(recipe.model.dtype, device)

    def load() -> OutputLogits:
        model = load_peer_model(folder, dtype, device)

        def output_logits(prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
            ids = torch.tensor([[*prompt, *output[:-1]]], device=device)
            with torch.inference_mode():
                logits: torch.Tensor = model(ids, use_cache=False, logits_to_keep=len(output)).logits[0]
            return logits.float().cpu()

        return output_logits

    return load
