"""A recipe's sections, but for `sampling`: frozen records of values that are checked when they are made.

Each knows its keys, their types, ranges and defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from specgen import checks
from specgen.errors import RecipeError


def _key(default: Any, check: checks.Check) -> Any:
    if isinstance(default, dict):  # dataclasses want a factory for it
        return field(default_factory=lambda: dict(default), metadata={"check": check})
    return field(default=default, metadata={"check": check})


def _count(unit: str) -> checks.Check:
    return checks.integer(1, 2**31 - 1, wanted=f"an integer from 1 up ({unit})")


def _check_fields(section: Any, name: str) -> None:
    for item in fields(section):
        try:
            object.__setattr__(section, item.name, item.metadata["check"](getattr(section, item.name)))
        except ValueError as error:
            raise RecipeError(f"{name}.{item.name} {error}") from None


@dataclass(frozen=True, slots=True)
class ModelSection:
    """path: a known model's name, a folder or a hub id. dtype and device: `auto` picks what the machine does well.

    generation_config: whether the sampling defaults of the model's folder are taken (`use`) or not (`ignore`). float8:
    whether dense products that a checkpoint stores in FP8 are kept so. kv_dtype: `auto` caches keys and values in
    dtype; `float8` rounds them to FP8 (e4m3, no scales), so that twice bfloat16's tokens fit. Answers are then other
    ones, and as exact: the same for any batch, chunking and drafts.
    """

    path: str | None = _key(None, checks.optional(checks.text("a bundled model's name, a folder or a hub id"), ""))
    dtype: str = _key("auto", checks.choice("auto", "float32", "bfloat16"))
    device: str = _key("auto", checks.choice("auto", "cpu", "cuda"))
    generation_config: str = _key("ignore", checks.choice("ignore", "use"))
    float8: str = _key("dequantise", checks.choice("dequantise", "keep"))
    kv_dtype: str = _key("auto", checks.choice("auto", "float8"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "model")


@dataclass(frozen=True, slots=True)
class SpeculationSection:
    """num_tokens: drafts a step (K), 0 is plain decoding. adaptive: K is the most, and as many are made as give most
    tokens a second, measured while rows run. method: how drafts are judged.

    model: a draft head in place of the model's own: a bundled head's name, a folder or a hub id. self_test: what to do
    about a draft head that proves broken, or trained otherwise than it is run: `warn`, stop (`strict`), or `skip` the
    test.

    dtype: `float8` holds the draft layers' large weights in FP8, for a GPU's sake. vocab_size: drafts are chosen among
    so many of the lowest token ids, and the special tokens: BPE gives ids out roughly in order of frequency, so that
    few of them make up most of a text. Neither changes a token with `exact`, but how many drafts are accepted, and what
    they cost.

    acceptance: with `synthetic`, which only `specgen bench` takes: P(the first i drafts accepted) for i from 1 up.
    """

    num_tokens: int = _key(3, checks.integer(0, 16, wanted="an integer from 0 (plain decoding) to 16"))
    adaptive: bool = _key(False, checks.boolean())
    method: str = _key("exact", checks.choice("exact", "ratio", "synthetic"))
    model: str | None = _key(
        None, checks.optional(checks.text("a bundled head's name, a folder or a hub id"), "null, the model's own,")
    )
    self_test: str = _key("warn", checks.choice("warn", "strict", "skip"))
    dtype: str = _key("auto", checks.choice("auto", "float8"))
    vocab_size: int | None = _key(None, checks.optional(_count("token ids"), "null, all,"))
    acceptance: tuple[float, ...] | None = _key(None, checks.optional(checks.rates(), "null"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "speculation")


@dataclass(frozen=True, slots=True)
class InputSection:
    """Where rows come from, and what of a row is its prompt.

    path: a file, a list or glob of files, `-` for stdin, a folder or hub id of a dataset. format: `auto` goes by name.
    subset, split, streaming: of a dataset. id, prompt, messages: names of columns; `messages` (a chat) or `template`
    (a Jinja text over columns) take the place of `prompt`. system: put before chats without a system message.
    chat_template: a file in place of the model's own; template_args: what it is given further. max_prompt_tokens and
    truncate: which prompts are too long, and whether they are cut. limit: only the first so many rows. duplicate_ids:
    whether rows may share an id. keep: columns of the user's own whose names are, or nearly are, sampling parameters:
    without it they are taken for misplaced ones.
    """

    path: str | tuple[str, ...] | None = _key(
        None, checks.optional(checks.text_or_texts("a file, a list of files, or - for stdin"), "")
    )
    format: str = _key("auto", checks.choice("auto", "jsonl", "csv", "parquet", "arrow", "dataset", "openai-batch"))
    subset: str | None = _key(None, checks.optional(checks.text("the name of a dataset's subset"), ""))
    split: str = _key("train", checks.text("the name of a dataset's split"))
    streaming: bool = _key(False, checks.boolean())
    id: str = _key("id", checks.text("the name of a column"))
    duplicate_ids: str = _key("refuse", checks.choice("refuse", "keep"))
    prompt: str = _key("prompt", checks.text("the name of a column"))
    messages: str | None = _key(None, checks.optional(checks.text("the name of a column"), ""))
    template: str | None = _key(None, checks.optional(checks.text("a Jinja template over columns"), ""))
    system: str | None = _key(None, checks.optional(checks.text("a system prompt"), ""))
    chat_template: str | None = _key(None, checks.optional(checks.text("a file with a Jinja chat template"), ""))
    template_args: Mapping[str, Any] | None = _key(
        None, checks.optional(checks.mapping("an object of arguments for the chat template"), "")
    )
    max_prompt_tokens: int | None = _key(None, checks.optional(_count("tokens"), "null, what the model leaves,"))
    truncate: str | None = _key(None, checks.optional(checks.choice("left", "middle"), "null, never,"))
    limit: int | None = _key(None, checks.optional(_count("rows"), "null, all rows,"))
    keep: tuple[str, ...] = _key((), checks.names("a list of names of columns"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "input")

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths as they are written."""
        return () if self.path is None else (self.path,) if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """What the input is called in messages."""
        return ", ".join("stdin" if path == "-" else path for path in self.paths[:3]) + " …" * (len(self.paths) > 3)


@dataclass(frozen=True, slots=True)
class OutputSection:
    """path: a JSONL file or `-` for stdout. order: of lines. on_error: of a bad row. token_ids: whether to add ids.

    on_interrupt: what a signal does to rows in flight. fsync_seconds, fsync_rows: how often lines are forced to disk.
    """

    path: str | None = _key(None, checks.optional(checks.text("a file, or - for stdout"), ""))
    order: str = _key("input", checks.choice("input", "completion"))
    on_error: str = _key("record", checks.choice("record", "stop"))
    on_interrupt: str = _key("drop", checks.choice("drop", "finish"))
    token_ids: bool = _key(False, checks.boolean())
    fsync_seconds: float | None = _key(
        10.0,
        checks.optional(checks.number(1e-3, 1e9, wanted="a number of seconds, 0 is always", zero=True), "null, off,"),
    )
    fsync_rows: int | None = _key(None, checks.optional(_count("rows"), "null, off,"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "output")


@dataclass(frozen=True, slots=True)
class EngineSection:
    """The engine's size and manner.

    max_num_seqs: rows at once. max_num_batched_tokens: tokens a step, None is 4096 on a CPU, and on a GPU 8192, or
    twice that if the KV of all rows leaves memory for it. max_model_len: prompt and answer together, None is the
    model's own limit. block_size: tokens of a KV block, None is 64 on a GPU and 16 elsewhere. num_blocks: None measures
    what fits into memory_fraction of the memory. async_scheduling: schedule a step while the last one runs, and decode
    steps several at once (up to 8) where the device would wait for the host (not with adaptive drafts, nor by ratio);
    None is on with a GPU, where host and device overlap. cuda_graphs: decode steps as one launch each, on a GPU.
    group_prefixes: rows that begin alike run one after the other, so that more of their prompts is found in the prefix
    cache. watchdog_seconds: without a step for so long, the run ends. exactness: `fast` lets a GPU's libraries choose
    their products by the number of rows, so that a row's tokens may depend on the rows beside it and on its drafts.
    """

    max_num_seqs: int = _key(64, _count("rows at once"))
    max_num_batched_tokens: int | None = _key(
        None, checks.optional(_count("tokens a step"), "null, as the device wants,")
    )
    max_model_len: int | None = _key(
        None,
        checks.optional(checks.integer(2, 2**31 - 1, wanted="an integer from 2 up (tokens)"), "null, the model's own,"),
    )
    block_size: int | None = _key(
        None,
        checks.optional(
            checks.integer(1, 1024, wanted="an integer from 1 to 1024 (tokens)"), "null, as the device wants,"
        ),
    )
    num_blocks: int | None = _key(None, checks.optional(_count("blocks"), "null, measured,"))
    memory_fraction: float = _key(0.85, checks.number(1e-6, 1.0, wanted="a number above 0 and up to 1"))
    enable_prefix_caching: bool = _key(True, checks.boolean())
    async_scheduling: bool | None = _key(None, checks.optional(checks.boolean(), "null, on with a GPU,"))
    cuda_graphs: bool = _key(True, checks.boolean())
    group_prefixes: bool = _key(False, checks.boolean())
    watchdog_seconds: float | None = _key(
        600.0, checks.optional(checks.number(1e-3, 1e9, wanted="a number of seconds above 0"), "null, off,")
    )
    exactness: str = _key("exact", checks.choice("exact", "fast"))

    def __post_init__(self) -> None:
        """Check every value."""
        _check_fields(self, "engine")
