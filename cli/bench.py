"""`specgen bench`: decoding with several numbers of drafts as a table and as JSON.

Turns what was asked for (`bench_setup`) into candidates and workloads. The measuring is `specgen.job.bench`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from specgen.cli.bench_setup import BenchFlags, BenchSetup, set_up
from specgen.cli.own_process import in_own_process
from specgen.cli.render import Console, to_stdout
from specgen.cli.render_bench import show_bench
from specgen.cli.signals import Interrupts
from specgen.errors import InputError
from specgen.job.peer import PeerResult, run_transformers
from specgen.job.places import check_replaceable, write_file
from specgen.tokenizer import Tokenizer

if TYPE_CHECKING:  # they bring torch
    from specgen.job.bench_figures import Shape
    from specgen.job.bench_result import BenchResult

_DEFAULT_SHAPE = "32x512x256"


def bench_recipe(flags: BenchFlags, overrides: Mapping[str, object]) -> None:
    """Measure, print the table (to stderr if the JSON goes to stdout) and write JSON and traces.

    Over the recipe (or the bundled model and prompts) lie `flags.sets`, and over these the flags (`overrides`: those
    that set one key of the recipe). A JSON file has what is known so far all the time.

    Raises: SpecgenError for whatever is wrong with recipe, model or rows, KeyboardInterrupt after a signal.
    """
    with Interrupts() as interrupts:
        interrupts.hold()  # an import that is broken off may take the process with it
        from specgen.job.workloads import parse_shapes

        interrupts.release()
        texts = flags.shapes or ([_DEFAULT_SHAPE] if flags.random_weights else [])
        shapes = parse_shapes(texts) if texts else []
        setup = set_up(flags, overrides, shapes, interrupts)
        _check_files(setup, shapes)
        result = _measure_all(setup, shapes)
    show_bench(result, to_stderr=flags.json_path == "-")
    if flags.json_path == "-":
        to_stdout(_json(setup, result))
    elif flags.json_path is not None:
        write_file(flags.json_path, _json(setup, result), "JSON file")


def _check_files(setup: BenchSetup, shapes: "Sequence[Shape]") -> None:
    flags = setup.flags
    others = [str(flags.recipe_path or "-"), *(() if shapes else setup.recipe.input.paths)]
    if flags.json_path is not None:
        check_replaceable(flags.json_path, "JSON file", others)
    if flags.trace_path is not None:
        check_replaceable(str(flags.trace_path), "trace", [*others, flags.json_path or "-"])


def _measure_all(setup: BenchSetup, shapes: "Sequence[Shape]") -> "BenchResult":
    """Return the figures of all modes; the JSON file has what is known so far."""
    path = setup.flags.json_path

    def keep(result: "BenchResult") -> None:
        if path is not None and path != "-":
            with suppress(InputError):  # figures that were not written are still measured, shown, and told of then
                write_file(path, _json(setup, result), "JSON file")

    first, *others = setup.exactness
    if not others:
        result = _measure(setup, shapes, keep)
    else:
        note = Console().note
        note(f"exactness {first}, in a process of its own")
        result = in_own_process(_measure, setup.of(first), shapes)
        for mode in others:
            keep(result)
            note(f"exactness {mode}, in a process of its own")
            result = result.joined(in_own_process(_measure, setup.of(mode), shapes))
    return result


def _measure(
    setup: BenchSetup, shapes: "Sequence[Shape]", on_result: "Callable[[BenchResult], None]" = lambda result: None
) -> "BenchResult":
    from specgen.job.bench import BenchPlan, Candidate, run_bench
    from specgen.job.prompts import chat_template_of
    from specgen.job.workloads import read_bench_rows, rows_workload, shape_workload
    from specgen.worker.trace import prepare_profiler

    flags, recipe, console = setup.flags, setup.recipe, Console()
    tokenizer = None if setup.is_bare else Tokenizer(setup.folder)

    def run_peer(prompts: list[list[int]]) -> PeerResult:
        assert recipe.sampling.max_tokens is not None
        return run_transformers(
            setup.folder,
            prompts,
            recipe.sampling.max_tokens,
            setup.dtype,
            setup.device,
            console.note,
            most_rows=recipe.engine.max_num_seqs,
        )

    if tokenizer is None:
        workloads = [shape_workload(shape) for shape in shapes]
    else:
        first = read_bench_rows(recipe, flags.num_rows)
        is_chat = first.is_batch or recipe.input.messages is not None
        workloads = [rows_workload(first, tokenizer, chat_template_of(recipe, setup.folder, needed=is_chat))]
    traces = flags.trace_path is not None or (flags.with_traces and setup.device.type == "cuda")
    if traces:
        prepare_profiler()
    plan = BenchPlan(
        candidates=[Candidate(setup.recipe_of(k.num), k.is_headless) for k in setup.drafts],
        workloads=workloads,
        num_rounds=flags.num_rounds,
        keep_engine=setup.is_bare,
        full_warm_up=setup.is_bare or setup.device.type == "cuda",
        skips_prompts=flags.skips_prompts,
        traces=traces,
        trace_path=flags.trace_path,
    )
    return run_bench(
        plan,
        setup.engine_maker(console, tokenizer),
        machine=setup.machine(console),
        on_note=console.note,
        on_result=on_result,
        run_peer=run_peer if flags.with_peer else None,
    )


def _json(setup: BenchSetup, result: "BenchResult") -> str:
    figures = {"model": setup.model_name, "recipe": setup.plain_recipe(), **result.as_dict()}
    return json.dumps(figures, indent=2) + "\n"
