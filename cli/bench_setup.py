"""What the flags of `specgen bench` and `specgen profile` come to: recipe, K's, model and machine, checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specgen.cli.load_view import LoadView
from specgen.cli.render import Console
from specgen.cli.signals import Interrupts
from specgen.errors import RecipeError
from specgen.job.peer import require_transformers
from specgen.model_path import ASSETS, resolve_head, resolve_model
from specgen.recipe import Recipe, load_recipe, recipe_from_settings
from specgen.tokenizer import Tokenizer, eos_token_ids

if TYPE_CHECKING:  # they bring torch
    import torch

    from specgen.job.bench import Candidate, MakeEngine
    from specgen.job.bench_figures import Machine, Shape
    from specgen.models.config import ModelConfig
    from specgen.models.dense_config import DenseConfig

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
# Where the most tokens of a row come from, if no recipe says them.
_LONGEST = "--shape"
# Of shapes: rows are drawn, as the peers' benchmarks do it.
_SHAPE_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class BenchFlags:
    """The command line. num_spec_tokens, exactness: as they were typed, None for the recipe's."""

    recipe_path: Path | None = None
    model: str | None = None
    config: Path | None = None
    random_weights: bool = False
    shapes: Sequence[str] = ()
    skips_prompts: bool = False
    num_spec_tokens: str | None = None
    acceptance: str | None = None
    exactness: str | None = None
    sets: Sequence[str] = ()
    num_rows: int = 64
    num_rounds: int = 3
    json_path: str | None = None
    with_traces: bool = False
    trace_path: Path | None = None
    with_peer: bool = False


class Drafts(NamedTuple):
    """One of the K's; is_headless: on the model as if it had no draft layers."""

    num: int
    is_headless: bool = False


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """What flags and recipe come to: the recipe of the largest K, the K's, the model's folder, and where it runs.

    exactness: the modes to measure, each in a process of its own if there are several. is_bare: the model has no
    tokenizer and no EOS, as with shapes.
    """

    flags: BenchFlags
    recipe: Recipe
    drafts: Sequence[Drafts]
    exactness: Sequence[str]
    folder: Path
    config: "ModelConfig"
    device: "torch.device"
    dtype: "torch.dtype"
    is_bare: bool

    @property
    def model_name(self) -> str:
        """What the user called the model."""
        return str(self.flags.config) if self.flags.config is not None else str(self.recipe.model.path)

    def of(self, exactness: str) -> "BenchSetup":
        """Return the same for one mode alone."""
        engine = replace(self.recipe.engine, exactness=exactness)
        flags, path = self.flags, self.flags.trace_path
        if path is not None and len(self.exactness) > 1:
            stem, dot, suffixes = path.name.partition(".")
            flags = replace(flags, trace_path=path.with_name(f"{stem}-{exactness}{dot}{suffixes}"))
        return replace(self, flags=flags, recipe=replace(self.recipe, engine=engine), exactness=[exactness])

    def recipe_of(self, num_tokens: int) -> Recipe:
        """Return the recipe with K = `num_tokens`."""
        return replace(self.recipe, speculation=replace(self.recipe.speculation, num_tokens=num_tokens))

    def plain_recipe(self) -> dict[str, object]:
        """Return the recipe's keys with plain JSON values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.recipe.values().items()}

    def engine_maker(self, console: Console, tokenizer: Tokenizer | None = None) -> "MakeEngine":
        """Return what loads an engine."""
        from specgen.engine.client import EngineClient

        eos: Sequence[int] = () if tokenizer is None else eos_token_ids(self.folder, tokenizer)

        def make_engine(side: "Candidate") -> EngineClient:
            return EngineClient.create(
                side.recipe,
                self.folder,
                eos,
                progress=LoadView(console),
                random_weights=self.flags.random_weights,
                is_headless=side.is_headless,
                pads_decode_steps=False,  # what is measured are steps of a long run
            )

        return make_engine

    def machine(self, console: Console) -> "Machine":
        """Return the measured ceilings and the model's cost, set up as by the engine: libraries decide once."""
        from specgen.job.bench_figures import Machine
        from specgen.job.floor import DraftCosts, cost_model
        from specgen.worker.ceilings import measure_ceilings
        from specgen.worker.config import make_products_exact, resolve_kv_dtype

        console.note("measuring what the machine can do")
        if self.device.type == "cuda" and self.recipe.engine.exactness == "exact":
            make_products_exact()
        ceilings = measure_ceilings(self.device, self.dtype)
        kv_bytes = resolve_kv_dtype(self.recipe.model.kv_dtype, self.dtype, self.device).itemsize
        speculation = self.recipe.speculation
        drafts = DraftCosts(speculation.dtype == "float8", speculation.vocab_size, self._head_config())
        return Machine(
            ceilings, cost_model(self.config, self.dtype.itemsize, kv_bytes, drafts, keeps_float8=self._keeps_float8())
        )

    def _keeps_float8(self) -> bool:
        """Whether products stay in FP8: those of random weights do if they are asked to."""
        from specgen.models.config import load_config_json

        stored = self.flags.random_weights or "quantization_config" in load_config_json(self.folder)
        return self.recipe.model.float8 == "keep" and stored

    def _head_config(self) -> "DenseConfig | None":
        """The shape of a draft head that comes in a folder of its own."""
        from specgen.models.head_folder import read_head

        head = self.recipe.speculation.model
        return read_head(resolve_head(head), self.config, 1).config if head is not None else None


def set_up(
    flags: BenchFlags, overrides: Mapping[str, object], shapes: "Sequence[Shape]", interrupts: Interrupts
) -> BenchSetup:
    """Return what the flags say, checked.

    Raises: SpecgenError for whatever is wrong with flags, recipe, model or machine.
    """
    drafts = _drafts(flags, shapes)
    modes = [mode.strip() for mode in flags.exactness.split(",")] if flags.exactness is not None else []
    recipe = _recipe(flags, overrides, shapes, drafts, modes[0] if modes else None)
    for mode in modes[1:]:
        _recipe(flags, overrides, shapes, drafts, mode)  # refuses what is none
    if not shapes and recipe.speculation.num_tokens == 0:
        raise RecipeError(
            "bench compares plain with speculative decoding: speculation.num_tokens must be at least 1",
            where=recipe.origins["speculation.num_tokens"],
        )
    _check(flags, recipe, shapes, drafts)
    folder = flags.config.parent if flags.config is not None else resolve_model(str(recipe.model.path))
    interrupts.hold()
    from specgen.models.config import read_config, resolve_max_model_len
    from specgen.worker.config import is_exact, resolve_device, resolve_dtype

    interrupts.release()
    device = resolve_device(recipe.model.device)
    dtype = resolve_dtype(recipe.model.dtype, device)
    modes = list(dict.fromkeys(modes)) or [recipe.engine.exactness]
    for mode in modes:
        is_exact(mode, device)
    config = read_config(folder)
    origin = recipe.origins["engine.max_model_len"]
    resolve_max_model_len(recipe.engine.max_model_len, config, _LONGEST if shapes and origin == "default" else origin)
    drafts = drafts or [Drafts(k) for k in sorted({0, recipe.speculation.num_tokens})]
    if max(drafts).num and not config.num_nextn_predict_layers and recipe.speculation.model is None:
        raise RecipeError(
            f"{max(drafts).num} drafts a step are asked for, and the model has no draft layers",
            where=str(folder / "config.json"),
            hint="-k 0 measures plain decoding; speculation.model names a draft head",
        )
    return BenchSetup(flags, recipe, drafts, modes, folder, config, device, dtype, is_bare=bool(shapes))


def _drafts(flags: BenchFlags, shapes: "Sequence[Shape]") -> list[Drafts]:
    """Return the K's to measure, [] if the recipe says it. Rows of a file are always compared with plain decoding."""
    if flags.num_spec_tokens is None:
        return []
    texts = [text.strip() for text in flags.num_spec_tokens.split(",")]
    try:
        found = [Drafts(0, True) if text == "none" else Drafts(int(text)) for text in texts]
    except ValueError:
        raise RecipeError(
            f"{flags.num_spec_tokens!r} is no number of drafts", where="--num-spec-tokens", hint="like 3, or 0,1,3"
        ) from None
    if not shapes and max(found).num:
        found = sorted({Drafts(0), *found})
    return list(dict.fromkeys(found))


def _recipe(
    flags: BenchFlags,
    overrides: Mapping[str, object],
    shapes: "Sequence[Shape]",
    drafts: Sequence[Drafts],
    exactness: str | None,
) -> Recipe:
    """Return the recipe of the largest K (of the smallest, if one is below 0: for the recipe to refuse)."""
    over = dict(overrides)
    if exactness is not None:
        over["engine.exactness"] = exactness
    if drafts:
        over["speculation.num_tokens"] = max(drafts).num if min(drafts).num >= 0 else min(drafts).num
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


def _check(flags: BenchFlags, recipe: Recipe, shapes: "Sequence[Shape]", drafts: Sequence[Drafts]) -> None:
    if flags.random_weights != (flags.config is not None):
        raise RecipeError("--random-weights and --config go together: the one says how, the other what to fill")
    if flags.config is not None and (flags.model is not None or flags.config.name != "config.json"):
        raise RecipeError("--config names a config.json, and takes the place of --model", where=str(flags.config))
    if flags.config is not None and not flags.config.is_file():
        raise RecipeError("there is no such file", where=str(flags.config))
    if not shapes and (recipe.model.path is None or not recipe.input.paths or "-" in recipe.input.paths):
        raise RecipeError("bench needs model.path, and input.path as a file")
    if flags.skips_prompts and not shapes:
        raise RecipeError("--skip-prompts is for shapes: name one", hint="like --shape 32x8192x64")
    if any(k.is_headless for k in drafts) and not flags.random_weights:
        raise RecipeError(
            "-k none builds the model without its draft layers, which a checkpoint's tensors would not fit",
            where="--num-spec-tokens",
            hint="it goes with --config and --random-weights",
        )
    if flags.with_peer:
        _check_peer(recipe, shapes)


def _check_peer(recipe: Recipe, shapes: "Sequence[Shape]") -> None:
    sampling = recipe.sampling
    if shapes or sampling.temperature != 0 or not sampling.ignore_eos or sampling.max_tokens is None:
        raise RecipeError(
            "--peer compares greedy rows of one length: temperature 0, ignore_eos and max_tokens are needed, no --shape"
        )
    require_transformers("--peer")
