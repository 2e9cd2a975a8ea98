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
_WIDTH = 150


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
    contents.append(_table(result))
    for case in result.cases:
        contents += _verdict(result, case)
    if result.peer is not None:
        contents.append(_peer_line(result))
    return contents


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
        str(case.shape) if case.shape is not None else counted(case.rows, "row"),
        str(side.num_tokens),
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
        if side.idle is not None:
            contents.append(
                f"{name}K = {side.num_tokens}: the device is idle {side.idle.share:.1%} of a traced decode:"
                f" {side.idle.between:.1%} between steps, {side.idle.within:.1%} within them"
            )
        share = side.run_floor_share(case.shape, result.machine) if case.shape is not None else None
        if share is not None:
            contents.append(
                f"{name}K = {side.num_tokens}: the whole run, prompts included, is at {share:.0%} of its floor"
            )
    last = case.sides[-1]
    if case.shape is None:
        bars = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for label, bar in acceptance_bars(last.spec):
            bars.add_row(label, bar)
        contents.append(bars)
        ratio = case.ratio(last)
        if ratio is not None:
            contents.append(f"speed-up: {ratio:.2f}×")
    if result.is_synthetic:
        contents.append(f"{name}drafts were accepted by lot: the tokens mean nothing")
    elif len(case.sides) * len(last.rounds) > 1:
        different = case.num_different_rows
        same = "the same" if not different else f"DIFFER in {different} of {counted(case.rows, 'row')}"
        contents.append(f"{name}token ids: {same}")
    return contents


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
