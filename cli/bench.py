"""`specgen bench`: decoding with several numbers of drafts as a table and as JSON.

Turns flags into a recipe for each K, and workloads. The measuring is `specgen.job.bench`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specgen.cli.load_view import LoadView
from specgen.cli.render import Console, to_stdout
from specgen.cli.render_bench import show_bench
from specgen.cli.signals import Interrupts
from specgen.errors import RecipeError
from specgen.job.peer import PeerResult, require_transformers, run_transformers
from specgen.job.places import check_replaceable, write_file
from specgen.model_path import ASSETS, resolve_model
from specgen.recipe import Recipe, load_recipe, recipe_from_settings
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # they bring torch
    import torch

    from specgen.engine.client import EngineClient
    from specgen.job.bench_result import BenchResult, Machine, Shape

# Without a recipe: the bundled model, every row its full length, so that all sides do the same amount of work.
_BUNDLED = {
    "model.path": "stories-7m",
    "input.path": str(ASSETS / "prompts" / "stories.jsonl"),
    "speculation.num_tokens": 3,
    "sampling.temperature": 0.0,
    "sampling.max_tokens": 128,
    "sampling.ignore_eos": True,
    "sampling.seed": 7,
}
# Of shapes: rows are drawn, as the peers' benchmarks do it.
_SHAPE_TEMPERATURE = 1.0
_DEFAULT_SHAPE = "32x512x256"


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """The command line. num_spec_tokens: as it was typed, None for the recipe's."""

    recipe_path: Path | None = None
    model: str | None = None
    config: Path | None = None
    random_weights: bool = False
    shapes: Sequence[str] = ()
    num_spec_tokens: str | None = None
    acceptance: str | None = None
    sets: Sequence[str] = ()
    num_rows: int = 64
    num_rounds: int = 3
    json_path: str | None = None
    trace_path: Path | None = None
    with_peer: bool = False


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """What flags and recipe come to: the recipe of the largest K, the K's, the model's folder, and where it runs.

    is_bare: the model has no tokenizer and no EOS, as with shapes.
    """

    flags: BenchFlags
    recipe: Recipe
    drafts: Sequence[int]
    folder: Path
    device: "torch.device"
    dtype: "torch.dtype"
    is_bare: bool

    @property
    def model_name(self) -> str:
        """What the user called the model."""
        return str(self.flags.config) if self.flags.config is not None else str(self.recipe.model.path)

    def recipe_of(self, num_tokens: int) -> Recipe:
        """Return the recipe with K = `num_tokens`."""
        return replace(self.recipe, speculation=replace(self.recipe.speculation, num_tokens=num_tokens))

    def engine_maker(self, console: Console, tokenizer: Tokenizer | None = None) -> "Callable[[Recipe], EngineClient]":
        """Return what loads an engine."""
        from specgen.engine.client import EngineClient

        eos: Sequence[int] = () if tokenizer is None else eos_token_ids(self.folder, tokenizer)

        def make_engine(side: Recipe) -> EngineClient:
            return EngineClient.create(
                side, self.folder, eos, on_load_progress=LoadView(console), random_weights=self.flags.random_weights
            )

        return make_engine

    def machine(self, console: Console) -> "Machine":
        """Return the measured ceilings and the model's cost, set up as by the engine: libraries decide once."""
        from specgen.job.bench_result import Machine
        from specgen.job.floor import DraftCosts, cost_model
        from specgen.models.config import read_config
        from specgen.worker.ceilings import measure_ceilings
        from specgen.worker.worker import make_products_exact, resolve_kv_dtype

        console.note("measuring what the machine can do")
        if self.device.type == "cuda" and self.recipe.engine.exactness == "exact":
            make_products_exact()
        ceilings = measure_ceilings(self.device, self.dtype)
        kv_bytes = resolve_kv_dtype(self.recipe.model.kv_dtype, self.dtype, self.device).itemsize
        speculation = self.recipe.speculation
        drafts = DraftCosts(speculation.dtype == "float8", speculation.vocab_size)
        return Machine(ceilings, cost_model(read_config(self.folder), self.dtype.itemsize, kv_bytes, drafts))


def bench_recipe(flags: BenchFlags, overrides: Mapping[str, object]) -> None:
    """Measure, print the table (to stderr if the JSON goes to stdout) and write JSON and trace.

    Over the recipe (or the bundled model and prompts) lie `flags.sets`, and over these the flags (`overrides`: those
    that set one key of the recipe).

    Raises: SpecgenError for whatever is wrong with recipe, model or rows, KeyboardInterrupt after a signal.
    """
    with Interrupts() as interrupts:
        interrupts.hold()  # an import that is broken off may take the process with it
        from specgen.job.bench import parse_shapes

        interrupts.release()
        texts = flags.shapes or ([_DEFAULT_SHAPE] if flags.random_weights else [])
        shapes = parse_shapes(texts) if texts else []
        setup = set_up(flags, overrides, shapes, interrupts)
        _check_files(setup, shapes)
        result = _measure(setup, shapes)
    show_bench(result, to_stderr=flags.json_path == "-")
    if flags.json_path is not None:
        figures = {"model": setup.model_name, "recipe": _plain(setup.recipe), **result.as_dict()}
        text = json.dumps(figures, indent=2) + "\n"
        if flags.json_path == "-":
            to_stdout(text)
        else:
            write_file(flags.json_path, text, "JSON file")


def set_up(
    flags: BenchFlags, overrides: Mapping[str, object], shapes: "Sequence[Shape]", interrupts: Interrupts
) -> BenchSetup:
    """Return what the flags say, checked.

    Raises: SpecgenError for whatever is wrong with flags, recipe, model or machine.
    """
    drafts = _drafts(flags, shapes)
    recipe = _recipe(flags, overrides, shapes, drafts)
    if not shapes and recipe.speculation.num_tokens == 0:
        raise RecipeError(
            "bench compares plain with speculative decoding: speculation.num_tokens must be at least 1",
            where=recipe.origins["speculation.num_tokens"],
        )
    _check(flags, recipe, shapes)
    folder = flags.config.parent if flags.config is not None else resolve_model(str(recipe.model.path))
    interrupts.hold()
    from specgen.worker.worker import resolve_device, resolve_dtype

    interrupts.release()
    device = resolve_device(recipe.model.device)
    dtype = resolve_dtype(recipe.model.dtype, device)
    drafts = drafts or sorted({0, recipe.speculation.num_tokens})
    return BenchSetup(flags, recipe, drafts, folder, device, dtype, is_bare=bool(shapes))


def _drafts(flags: BenchFlags, shapes: "Sequence[Shape]") -> list[int]:
    """Return the K's to measure, [] if the recipe says it. Rows of a file are always compared with plain decoding."""
    if flags.num_spec_tokens is None:
        return []
    try:
        found = [int(text) for text in flags.num_spec_tokens.split(",")]
    except ValueError:
        raise RecipeError(
            f"{flags.num_spec_tokens!r} is no number of drafts", where="--num-spec-tokens", hint="like 3, or 0,1,3"
        ) from None
    return found if shapes or found == [0] else sorted({0, *found})


def _recipe(
    flags: BenchFlags, overrides: Mapping[str, object], shapes: "Sequence[Shape]", drafts: Sequence[int]
) -> Recipe:
    """Return the recipe of the largest K."""
    over = dict(overrides)
    if drafts:
        over["speculation.num_tokens"] = max(drafts)
    if flags.model is not None:
        over["model.path"] = flags.model
    if flags.acceptance is not None:
        over["speculation.method"] = "synthetic"
        over["speculation.acceptance"] = _rates(flags.acceptance)
    defaults = dict[str, object](_BUNDLED)
    if flags.random_weights:
        del defaults["model.path"]
    if shapes:
        del defaults["input.path"]
        defaults["sampling.temperature"] = _SHAPE_TEMPERATURE
        defaults["engine.max_num_seqs"] = max(shape.rows for shape in shapes)
        defaults["engine.max_model_len"] = max(shape.prompt_tokens + shape.output_tokens for shape in shapes)
        over["engine.enable_prefix_caching"] = False
    if flags.recipe_path is not None:
        return load_recipe(flags.recipe_path, flags.sets, over, for_bench=True)
    return recipe_from_settings(flags.sets, defaults, over, for_bench=True)


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise RecipeError(
            f"{text!r} are no rates", where="--synthetic-acceptance", hint="like .85,.7,.55, one a draft"
        ) from None


def _check(flags: BenchFlags, recipe: Recipe, shapes: "Sequence[Shape]") -> None:
    if flags.random_weights != (flags.config is not None):
        raise RecipeError("--random-weights and --config go together: the one says how, the other what to fill")
    if flags.config is not None and (flags.model is not None or flags.config.name != "config.json"):
        raise RecipeError("--config names a config.json, and takes the place of --model", where=str(flags.config))
    if flags.config is not None and not flags.config.is_file():
        raise RecipeError("there is no such file", where=str(flags.config))
    if not shapes and (recipe.model.path is None or not recipe.input.paths or "-" in recipe.input.paths):
        raise RecipeError("bench needs model.path, and input.path as a file")
    if flags.with_peer:
        _check_peer(recipe, shapes)


def _check_files(setup: BenchSetup, shapes: "Sequence[Shape]") -> None:
    flags = setup.flags
    others = [str(flags.recipe_path or "-"), *(() if shapes else setup.recipe.input.paths)]
    if flags.json_path is not None:
        check_replaceable(flags.json_path, "JSON file", others)
    if flags.trace_path is not None:
        check_replaceable(str(flags.trace_path), "trace", [*others, flags.json_path or "-"])


def _check_peer(recipe: Recipe, shapes: "Sequence[Shape]") -> None:
    sampling = recipe.sampling
    if shapes or sampling.temperature != 0 or not sampling.ignore_eos or sampling.max_tokens is None:
        raise RecipeError(
            "--peer compares greedy rows of one length: temperature 0, ignore_eos and max_tokens are needed, no --shape"
        )
    require_transformers("--peer")


def _measure(setup: BenchSetup, shapes: "Sequence[Shape]") -> "BenchResult":
    from specgen.job.bench import BenchPlan, read_bench_rows, rows_workload, run_bench, shape_workload
    from specgen.job.prompts import chat_template_of
    from specgen.worker.trace import prepare_profiler

    flags, recipe, console = setup.flags, setup.recipe, Console()
    tokenizer = None if setup.is_bare else Tokenizer(setup.folder)

    def run_peer(prompts: list[list[int]]) -> PeerResult:
        assert recipe.sampling.max_tokens is not None
        return run_transformers(
            setup.folder, prompts, recipe.sampling.max_tokens, setup.dtype, setup.device, console.note
        )

    if tokenizer is None:
        workloads = [shape_workload(shape) for shape in shapes]
    else:
        template = chat_template_of(recipe, setup.folder, needed=recipe.input.messages is not None)
        workloads = [rows_workload(read_bench_rows(recipe, flags.num_rows), tokenizer, template)]
    if flags.trace_path is not None:
        prepare_profiler()
    plan = BenchPlan(
        recipes=[setup.recipe_of(k) for k in setup.drafts],
        workloads=workloads,
        num_rounds=flags.num_rounds,
        keep_engine=setup.is_bare,
        full_warm_up=setup.is_bare or setup.device.type == "cuda",
        trace_path=flags.trace_path,
    )
    return run_bench(
        plan,
        setup.engine_maker(console, tokenizer),
        machine=setup.machine(console),
        on_note=console.note,
        run_peer=run_peer if flags.with_peer else None,
    )


def _plain(recipe: Recipe) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.values().items()}
