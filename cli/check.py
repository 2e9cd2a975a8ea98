"""`specgen check`: the resolved recipe, the model's folder and a pass over the rows, without loading weights.

What it prints is a recipe file that can be run; everything else it found stands in comments.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from specgen.cli import codes
from specgen.cli.render import Console, to_stdout
from specgen.errors import RecipeError, RowError
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row, RowReader, no_rows, open_input
from specgen.model_path import resolve_model
from specgen.recipe import Recipe, load_recipe
from specgen.stats import counted
from specgen.tokenizer import Tokenizer, eos_token_ids

_MAX_SHOWN = 10


def check_recipe(recipe_path: Path, input_path: str | None, *, sets: Sequence[str]) -> int:
    """Print what a run would do and return the exit code: 3 if some rows would fail.

    Raises: SpecgenError for what would stop a run before its first row.
    """
    recipe = load_recipe(recipe_path, sets, {} if input_path is None else {"input.path": input_path})
    to_stdout(recipe.to_yaml_with_origins())
    if recipe.model.path is None:
        raise RecipeError("model.path is missing")
    folder = resolve_model(recipe.model.path)
    tokenizer = Tokenizer(folder)
    from specgen.models.config import read_config, resolve_max_model_len

    config = read_config(folder)
    limit = resolve_max_model_len(recipe.engine.max_model_len, config, recipe.origins["engine.max_model_len"])
    to_stdout(
        f"# model: {folder}\n"
        f"# draft layers: {config.num_nextn_predict_layers}, vocabulary: {config.vocab_size}, at most {limit} tokens\n"
        f"# BOS: {tokenizer.prefix_ids or 'none'}, EOS: {list(eos_token_ids(folder, tokenizer))}\n"
    )
    if recipe.input.path is None or recipe.input.path == "-":
        to_stdout("# input: rows were not looked at (stdin, or none given)\n")
        return codes.OK
    builder = PromptBuilder(recipe, tokenizer, max_model_len=limit, vocab_size=config.vocab_size)
    return _check_rows(recipe, builder)


def _check_rows(recipe: Recipe, builder: PromptBuilder) -> int:
    path = str(recipe.input.path)
    console = Console()
    lengths: list[int] = []
    bad: Counter[str] = Counter()
    with open_input(path) as stream:
        reader = RowReader(stream, where=path, id_column=recipe.input.id, limit=recipe.input.limit)
        for row, problem in _checked(reader, builder, lengths):
            bad[problem.code] += 1
            if bad.total() <= _MAX_SHOWN:
                console.warn(f"{path}:{row.line}: {problem}")
    if not lengths and not bad:
        raise no_rows(path)
    lines = [
        f"# input: {path}: {counted(len(lengths), 'row')} can run, {bad.total():,} cannot,"
        f" {counted(reader.blank_lines, 'blank line')}"
    ]
    lines += [f"#   {code}: {count:,}" for code, count in sorted(bad.items())]
    if lengths:
        mean = sum(lengths) / len(lengths)
        lines.append(
            f"# prompt tokens: {sum(lengths):,} in all, {min(lengths)} to {max(lengths)} a row, mean {mean:.1f}"
        )
    to_stdout("\n".join(lines) + "\n")
    return codes.FAILED_ROWS if bad else codes.OK


def _checked(reader: RowReader, builder: PromptBuilder, lengths: list[int]) -> Iterator[tuple[Row | BadRow, RowError]]:
    """Yield the rows that cannot run; the prompt lengths of the others go into `lengths`."""
    for row in reader:
        if isinstance(row, BadRow):
            yield row, row.error
            continue
        try:
            lengths.append(len(builder.build(row).token_ids))
        except RowError as error:
            yield row, error
