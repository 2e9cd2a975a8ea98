"""`specgen check`: the resolved recipe, the model's folder and a pass over the rows, without loading weights.

What it prints is a recipe file that can be run; everything else it found stands in comments.
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.text import Text

from specgen.cli import codes
from specgen.cli.live import Display, Shown, duration, failures
from specgen.cli.render import Console, to_stdout
from specgen.cli.run import note_size
from specgen.errors import RecipeError, RowError
from specgen.generation_config import declared_sampling, with_generation_config
from specgen.job.inputs import MAX_SHOWN, Input, duplicates_error
from specgen.job.places import check_output
from specgen.job.plan import RowPlanner
from specgen.job.prompts import PromptBuilder, chat_template_of, check_token_ids
from specgen.job.readers import BadRow, Row, no_rows
from specgen.job.survey import Survey, survey
from specgen.model_path import resolve_head, resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.stats import counted
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:
    from specgen.models.config import ModelConfig

_BAR_WIDTH = 40


def check_recipe(recipe_path: Path, input_path: str | None, *, sets: Sequence[str], progress: str, quiet: bool) -> int:
    """Print what a run would do and return the exit code: 3 if some rows would fail.

    progress: how it is shown meanwhile, see `Display`.

    Raises: SpecgenError for what would stop a run before its first row, ids that are there twice included.
    """
    recipe = load_recipe(recipe_path, sets, {} if input_path is None else {"input.path": input_path})
    if recipe.model.path is not None and recipe.model.generation_config == "use":
        recipe = with_generation_config(recipe, resolve_model(recipe.model.path))
    to_stdout(recipe.to_yaml_with_origins())
    if recipe.model.path is None:
        raise RecipeError("model.path is missing")
    folder = resolve_model(recipe.model.path)
    tokenizer = Tokenizer(folder)
    check_token_ids(recipe, folder)
    from specgen.models.config import read_config, resolve_max_model_len
    from specgen.models.loading import check_model

    config = read_config(folder)
    limit = resolve_max_model_len(recipe.engine.max_model_len, config, recipe.origins["engine.max_model_len"])
    head = recipe.speculation.model
    head_folder = resolve_head(head) if head is not None else None
    check_model(folder, config, recipe.speculation.num_tokens, limit, head_folder)
    to_stdout(
        f"# model: {folder}\n"
        f"# draft layers: {config.num_nextn_predict_layers}, vocabulary: {config.vocab_size}, at most {limit} tokens\n"
        f"# BOS: {tokenizer.prefix_ids or 'none'} before a raw text, a chat template's own before a chat;"
        f" EOS: {list(eos_token_ids(folder, tokenizer))}\n"
        f"# generation_config.json: {_declared(recipe, folder)}\n"
    )
    if not recipe.input.paths or (recipe.input.path == "-" and input_path is None):
        to_stdout("# input: rows were not looked at (stdin, or none given)\n")
        return codes.OK
    source = Input(recipe.input)
    if recipe.output.path is not None:
        check_output(recipe.output.path, inputs=source.files, patterns=source.patterns, recipe_path=recipe_path)
    return _check_rows(recipe, source, folder, tokenizer, config, limit, Console(quiet=quiet), progress)


def _declared(recipe: Recipe, folder: Path) -> str:
    """What the model's folder says about sampling, and whether it is taken."""
    found = declared_sampling(folder)
    if not found:
        return "says nothing about sampling"
    values = ", ".join(f"{name} {value}" for name, value in found.items())
    return values + ("" if recipe.model.generation_config == "use" else " (model.generation_config: use takes them)")


def _check_rows(
    recipe: Recipe,
    source: Input,
    folder: Path,
    tokenizer: Tokenizer,
    config: "ModelConfig",
    limit: int,
    console: Console,
    progress: str,
) -> int:
    template = chat_template_of(recipe, folder, needed=source.is_batch or recipe.input.messages is not None)
    planner = RowPlanner(recipe, is_batch=source.is_batch)
    prompts = PromptBuilder(
        recipe,
        tokenizer,
        max_model_len=limit,
        vocab_size=config.vocab_size,
        template=template,
        planner=planner,
        eos_token_ids=eos_token_ids(folder, tokenizer),
    )
    if template is not None:
        to_stdout(f"# chat template: {template.origin}\n")
    note_size(console, source.files, "rows")
    total = source.scan().rows if source.can_be_read_twice else None
    duplicates: list[str] = []  # the first of them
    num_told: Counter[str] = Counter()

    def on_bad(row: Row | BadRow, error: RowError) -> None:
        num_told[error.code] += 1
        if num_told[error.code] > MAX_SHOWN:
            return
        console.warn(f"{row.file or source.name}:{row.line}: {error}")
        if error.code == "duplicate_id":
            duplicates.append(str(error))

    rows = source.rows(unique_ids=recipe.input.duplicate_ids == "refuse")
    started = time.perf_counter()
    with Display(console, progress) as display:
        found = survey(
            planner.plans(rows),
            prompts,
            max_model_len=limit,
            num_at_once=recipe.engine.max_num_seqs,
            on_bad=on_bad,
            on_row=lambda found: display.update(lambda: _shown(found, total, time.perf_counter() - started)),
        )
    if not found.rows:
        raise no_rows(source.name)
    to_stdout("".join(f"# {line}\n" for line in _lines(found, source, rows.blank_lines, config, recipe.model.kv_dtype)))
    if duplicates and source.can_be_read_twice:
        raise duplicates_error(num_told["duplicate_id"], duplicates, source.name)
    return codes.FAILED_ROWS if found.bad else codes.OK


def _shown(found: Survey, total: int | None, seconds: float) -> Shown:
    """Return how far the rows were looked at after so many seconds. total: how many there are, None if not known."""
    rate = found.rows / seconds
    left = None if total is None else round((total - found.rows) / rate, 1)
    figures: dict[str, object] = {
        "seconds": round(seconds, 3),
        "rows": found.rows,
        "rows_total": total,
        "rows_per_second": round(rate, 1),
        "eta_seconds": left,
        "prompt_tokens": found.prompt_tokens,
        "failed": found.bad,
        "error_codes": dict(sorted(found.error_codes.items())),
    }
    place = f"{found.rows:,}" + (f" of {total:,}" if total is not None else "")
    parts = [f"rows looked at: {place}", f"{rate:,.0f} rows/s", f"{found.prompt_tokens:,} tokens"]
    if left is not None:
        parts.append(f"{duration(left)} left")
    if found.bad:
        parts.append(failures(found.error_codes))
    bar = ProgressBar(total=total, completed=found.rows, width=_BAR_WIDTH) if total is not None else Text("")
    line = ", ".join(parts)
    return Shown(figures, line, Group(bar, Text(line)))


def _lines(found: Survey, source: Input, blank_lines: int, config: "ModelConfig", kv_dtype: str) -> list[str]:
    kind = " (an OpenAI batch file)" if source.is_batch else ""
    lines = [
        f"input: {source.name}{kind}: {counted(found.ok, 'row')} can run, {found.bad:,} cannot,"
        f" {counted(blank_lines, 'blank line')}"
    ]
    for code, count in sorted(found.error_codes.items()):
        lines.append(f"  {code}: {count:,}" + (f", the first {MAX_SHOWN} of them named" if count > MAX_SHOWN else ""))
    if not found.ok:
        return lines
    if found.samples != found.ok:
        lines.append(f"answers: {found.samples:,}")
    if found.truncated:
        lines.append(f"prompts that are cut: {found.truncated:,}")
    low, high, mean = min(found.lengths), max(found.lengths), found.prompt_tokens / found.ok
    lines.append(f"prompt tokens: {found.prompt_tokens:,} in all, {low} to {high} a row, mean {mean:.1f}")
    bins = found.histogram()
    most = max(count for _, _, count in bins)
    for start, end, count in bins:
        bar = "█" * round(_BAR_WIDTH * count / most) if count else ""
        lines.append(f"  {f'{start}-{end}':>13} {count:>9,} {bar}".rstrip())
    elements = found.longest * config.kv_width * (config.num_hidden_layers + config.num_nextn_predict_layers)
    sizes = {"float8": 1} if kv_dtype == "float8" else {"bfloat16": 2, "float32": 4}
    lines.append(
        f"KV: at most {found.longest:,} tokens at once ({min(found.samples, found.num_at_once)} longest answers), "
        + ", ".join(f"{size * elements / 2**20:,.1f} MiB in {name}" for name, size in sizes.items())
    )
    return lines
