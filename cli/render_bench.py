"""What a benchmark shows: its table, the acceptance of drafts, and whether the tokens were the same."""

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table

from specgen.cli.render import PlainConsole, acceptance_bars, to_stdout
from specgen.stats import counted

if TYPE_CHECKING:  # they bring the engine's modules
    from specgen.job.bench_result import BenchResult, Case, Side
    from specgen.job.floor import Ceilings

# A header, and how wide a table may get where nobody looks at a terminal.
_COLUMNS = (
    "shape",
    "K",
    "tokens/s",
    "× K=0",
    "tokens a step",
    "ms a step",
    "target",
    "sampling",
    "draft",
    "gap",
    "floor",
    "of floor",
    "GB/s",
    "TFLOP/s",
)
_START_COLUMNS = (
    "K",
    "weights",
    "largest step",
    "ready",
    "first passes",
    "graphs",
    "kernels compiled",
    "KV tokens",
    "room for",
    "KV",
    "weights, state",
    "step",
    "graphs",
    "unused",
)
_MEMORY_PARTS = ("kv", "used", "step_peak", "graphs", "left")
_TRACE_COLUMNS = (
    "shape",
    "K",
    "ms a step",
    "busy",
    "idle between",
    "idle within",
    "idle, untraced",
    "attention",
    "its floor",
    "of floor",
)
_WIDTH = 190


def show_bench(result: "BenchResult", *, to_stderr: bool) -> None:
    """Print the benchmark's figures: a line for every workload and K, acceptance, and whether the tokens are the same.

    Raises: InputError, BrokenPipeError if stdout does not take them.
    """
    print_all(_contents(result), to_stderr=to_stderr)


def print_all(contents: Sequence[RenderableType], *, to_stderr: bool) -> None:
    """Print tables and lines as one.

    Raises: InputError, BrokenPipeError if stdout does not take them.
    """
    console = PlainConsole(stderr=to_stderr)
    if not console.is_terminal:
        console.width = _WIDTH
    with console.capture() as captured:
        for content in contents:
            console.print(content)
    if to_stderr:
        with contextlib.suppress(OSError):
            print(captured.get(), end="", file=sys.stderr)
    else:
        to_stdout(captured.get())


def ceilings_line(ceilings: "Ceilings") -> str:
    """Return what the machine was measured to do, as a line."""
    return (
        f"this machine: copies {ceilings.bytes_per_second / 1e9:,.0f} GB/s, "
        f"multiplies {ceilings.flops_per_second / 1e12:,.2f} TFLOP/s"
    )


def _contents(result: "BenchResult") -> list[RenderableType]:
    contents: list[RenderableType] = []
    ceilings = result.machine.ceilings
    if ceilings is not None:
        contents.append(ceilings_line(ceilings))
    if any(case.shape is not None for case in result.cases):
        contents.append(_starts(result))
    contents.append(_table(result))
    if any(side.traced is not None for case in result.cases for side in case.sides):
        contents.append(_traces(result))
    for case in result.cases:
        contents += _verdict(result, case)
    if result.peer is not None:
        contents.append(_peer_line(result))
    return contents


def _starts(result: "BenchResult") -> Table:
    """How each engine came up, and its memory."""
    table = Table(title="before the first round: seconds and counts; GB of memory")
    for name in _START_COLUMNS:
        table.add_column(name, justify="right")
    for start in result.starts:
        up, memory = start.start_up, start.memory or {}
        rate = f" ({up.weight_bytes / up.weight_seconds / 1e9:,.1f} GB/s)" if up.weight_seconds else ""
        cached = f", {up.num_cached} cached" if up.num_cached else ""
        table.add_row(
            _label(start.num_tokens, start.is_headless, start.exactness, result),
            f"{up.weight_bytes / 1e9:,.2f} GB: {up.weight_seconds:.1f} s{rate}",
            f"{up.largest_step_seconds:.1f}",
            f"{up.ready_seconds:.1f}",
            f"{start.first_seconds:.1f}",
            f"{up.num_graphs}: {up.graph_seconds:.1f} s" if up.num_graphs else "",
            f"{up.num_compiled}: {up.compile_seconds:.1f} s{cached}" if up.num_compiled else "",
            f"{start.kv_tokens:,}" if start.kv_tokens is not None else "",
            f"{start.kv_room:,}" if start.kv_room is not None else "",
            *(f"{memory[part] / 1e9:,.2f}" if part in memory else "" for part in _MEMORY_PARTS),
        )
    return table


def _traces(result: "BenchResult") -> Table:
    """What the device did in traced steps."""
    table = Table(title="traced steps, ms; the profiler itself takes some time between kernels")
    for name in _TRACE_COLUMNS:
        table.add_column(name, justify="left" if name == "shape" else "right")
    for case in result.cases:
        for side in case.sides:
            decode, traced = side.decode(case.context(side), result.machine), side.traced
            if decode is None or traced is None:
                continue
            floor = decode.attention_floor(result.machine)
            idle = side.idle
            table.add_row(
                _name(case),
                _label(side.num_tokens, side.is_headless, side.exactness, result),
                f"{1e3 * traced.period:.2f}",
                f"{1e3 * traced.busy:.2f}",
                f"{idle.between:.1%}" if idle is not None else "",
                f"{idle.within:.1%}" if idle is not None else "",
                f"{max(0.0, 1 - traced.busy / decode.period):.1%}",
                f"{1e3 * traced.attention:.3f}",
                f"{1e3 * floor:.3f}" if floor is not None else "",
                f"{floor / traced.attention:.0%}" if floor is not None and traced.attention else "",
            )
    return table


def _label(num_tokens: int, is_headless: bool, exactness: str, result: "BenchResult") -> str:
    """K, and what else a side differs in."""
    modes = {side.exactness for case in result.cases for side in case.sides}
    return f"{num_tokens}{', no head' if is_headless else ''}{f', {exactness}' if len(modes) > 1 else ''}"


def _name(case: "Case") -> str:
    return str(case.shape) if case.shape is not None else counted(case.rows, "row")


def _table(result: "BenchResult") -> Table:
    rounds = len(result.cases[0].sides[0].rounds)
    table = Table(title=f"{counted(rounds, 'round')}; ms of a decode step with all rows")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "shape" else "right")
    for case in result.cases:
        for side in case.sides:
            table.add_row(*_line(result, case, side))
    return table


def _line(result: "BenchResult", case: "Case", side: "Side") -> list[str]:
    ratio = case.ratio(side)
    cells = [
        _name(case),
        _label(side.num_tokens, side.is_headless, side.exactness, result),
        f"{side.tokens_per_second:,.0f}",
        f"{ratio:.2f}" if ratio is not None else "",
        f"{side.spec.mean_accepted_length:.2f}",
    ]
    decode = side.decode(case.context(side), result.machine)
    if decode is None:
        return [*cells, *[""] * (len(_COLUMNS) - len(cells))]
    parts = decode.parts or {}
    cells.append(f"{1e3 * decode.period:.2f}")
    cells += [f"{1e3 * parts[part]:.2f}" if part in parts else "" for part in ("target", "sampling", "draft")]
    cells.append(f"{1e3 * decode.gap:.2f}")
    if decode.cost is None or decode.floor is None or decode.floor_share is None:
        return [*cells, "", "", "", ""]
    return [
        *cells,
        f"{1e3 * decode.floor:.2f}",
        f"{decode.floor_share:.0%}",
        f"{decode.cost.num_bytes / decode.period / 1e9:,.1f}",
        f"{decode.cost.flops / decode.period / 1e12:,.2f}",
    ]


def _verdict(result: "BenchResult", case: "Case") -> list[RenderableType]:
    name = f"{case.shape}: " if case.shape is not None else ""
    contents: list[RenderableType] = []
    for side in case.sides:
        label = f"{name}K = {_label(side.num_tokens, side.is_headless, side.exactness, result)}: "
        if side.idle is not None and side.traced is None:
            contents.append(
                f"{label}the device is idle {side.idle.share:.1%} of a traced decode:"
                f" {side.idle.between:.1%} between steps, {side.idle.within:.1%} within them"
            )
        share = result.run_floor_share(case, side)
        if share is not None:
            prompts = "prompts not computed" if result.skips_prompts else "prompts included"
            contents.append(f"{label}the whole run, {prompts}, is at {share:.0%} of its floor")
        contents += [label + text for text in _against(case, side)]
    last = case.sides[-1]
    if case.shape is None:
        bars = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for label, bar in acceptance_bars(last.spec):
            bars.add_row(label, bar)
        contents.append(bars)
        ratio = case.ratio(last)
        if ratio is not None:
            contents.append(f"speed-up: {ratio:.2f}×")
    if result.skips_prompts:
        contents.append(f"{name}prompts counted as computed: the tokens mean nothing")
    elif result.is_synthetic:
        contents.append(f"{name}drafts were accepted by lot: the tokens mean nothing")
    elif len(case.sides) * len(last.rounds) > 1:
        different = case.num_different_rows
        same = "the same" if not different else f"DIFFER in {different} of {counted(case.rows, 'row')}"
        contents.append(f"{name}token ids: {same}")
    return contents


def _against(case: "Case", side: "Side") -> list[str]:
    """A side beside those that differ from it in one other thing than K."""
    found = []
    if side.exactness == "exact" and (fast := case.other(side, "fast")) is not None:
        found.append(f"exact is {side.tokens_per_second / fast.tokens_per_second:.3f}× as fast as fast")
    headless = next((s for s in case.sides if s.is_headless and s.exactness == side.exactness), None)
    if headless is not None and side.num_tokens == 0 and not side.is_headless:
        ratio = side.tokens_per_second / headless.tokens_per_second
        found.append(f"{ratio:.3f}× as fast as the model without a draft head")
    return found


def _peer_line(result: "BenchResult") -> str:
    assert result.peer is not None
    case = result.cases[-1]
    best = result.peer.tokens_per_second[result.peer.best_batch_size]
    ratios = " and ".join(f"{side.tokens_per_second / best:.2f}×" for side in case.sides)
    drafts = " and ".join(f"K = {side.num_tokens}" for side in case.sides)
    return (
        f"transformers generate: {best:,.0f} tokens/s at its best batch size, {result.peer.best_batch_size}; "
        f"{drafts} are {ratios} that; {result.num_rows_like_peer} of {case.rows} rows have its ids"
    )
