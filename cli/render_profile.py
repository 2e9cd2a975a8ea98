"""What a profile shows: each decode step by kinds of work and kernels, as a table for a terminal or as Markdown."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from specgen.cli.render_bench import ceilings_line
from specgen.stats import counted

if TYPE_CHECKING:  # they bring torch
    from specgen.job.floor import Ceilings
    from specgen.job.kernels import KernelRow, KernelTable, KindRow

_COLUMNS = ("part", "work, and its kernels", "calls", "µs", "of step", "MB", "GFLOP", "floor µs", "of floor")
_NAME_WIDTH = 60


class _Line(NamedTuple):
    """Cells, one a column; is_kind: of a kind of work, else of one of its kernels."""

    is_kind: bool
    cells: list[str]


def kernel_view(table: "KernelTable", ceilings: "Ceilings", top: int) -> Table:
    """Return the table of one step, for a terminal; `top` kernels of each kind of work."""
    shown = Table(title=f"{_title(table)}\n{_summary(table, ceilings)}")
    for i, name in enumerate(_COLUMNS):
        shown.add_column(name, justify="left" if i < 2 else "right")
    for line in _lines(table, ceilings, top):
        part, name, *rest = line.cells
        if line.is_kind:
            shown.add_row(part, name, *rest, style="bold")
        else:
            short = name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 1] + "…"
            shown.add_row(part, f"  {short}", *rest)
    return shown


def markdown(model: str, tables: "Sequence[KernelTable]", ceilings: "Ceilings", top: int) -> str:
    """Return all tables as a Markdown text."""
    parts = [f"{model}; {ceilings_line(ceilings)}.\n"]
    for table in tables:
        lines = [f"**{_title(table)}**: {_summary(table, ceilings)}.", ""]
        lines += ["| " + " | ".join(_COLUMNS) + " |", "| --- | --- |" + " ---: |" * (len(_COLUMNS) - 2)]
        for line in _lines(table, ceilings, top):
            part, name, *rest = line.cells
            name = f"**{name}**" if line.is_kind else f"`{name[:_NAME_WIDTH].replace('|', '')}`"
            lines.append("| " + " | ".join([part, name, *rest]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _title(table: "KernelTable") -> str:
    return f"{counted(table.rows, 'row')} of {table.context:,.0f} tokens, K = {table.num_tokens}"


def _summary(table: "KernelTable", ceilings: "Ceilings") -> str:
    """The step as a whole: with the profiler and without it."""
    text = (
        f"{1e3 * table.period:.2f} ms a step in the trace, {1e3 * table.seconds:.2f} of them busy"
        f" (idle {table.idle_share:.1%})"
    )
    if table.untraced is not None:
        text += f"; {1e3 * table.untraced:.2f} ms without a profiler"
    floor = table.floor(ceilings)
    if floor:
        text += f"; floor {1e3 * floor:.2f} ms ({floor / (table.untraced or table.period):.0%})"
    return text


def _lines(table: "KernelTable", ceilings: "Ceilings", top: int) -> Iterator[_Line]:
    for kind in table.kinds:
        yield _Line(True, _kind_cells(kind, table, ceilings))
        for kernel in kind.kernels[:top]:
            yield _Line(False, _kernel_cells(kernel, kind, table, ceilings))
        if rest := kind.kernels[top:]:
            seconds, calls = sum(k.seconds for k in rest), sum(k.launches for k in rest)
            share = f"{seconds / table.period:.1%}"
            yield _Line(False, ["", f"{len(rest)} more", f"{calls:,.0f}", f"{1e6 * seconds:,.1f}", share, *[""] * 4])


def _kind_cells(kind: "KindRow", table: "KernelTable", ceilings: "Ceilings") -> list[str]:
    cells = [kind.part, kind.name, f"{kind.launches:,.0f}", f"{1e6 * kind.seconds:,.1f}"]
    cells.append(f"{kind.seconds / table.period:.1%}")
    if kind.cost is None:
        return [*cells, *[""] * 4]
    floor = kind.cost.seconds(ceilings)
    cells += [f"{kind.cost.num_bytes / 1e6:,.1f}", f"{kind.cost.flops / 1e9:,.1f}", f"{1e6 * floor:,.1f}"]
    return [*cells, f"{floor / kind.seconds:.0%}" if kind.seconds else "no kernel"]


def _kernel_cells(kernel: "KernelRow", kind: "KindRow", table: "KernelTable", ceilings: "Ceilings") -> list[str]:
    share = f"{kernel.seconds / table.period:.1%}"
    cells = ["", kernel.name, f"{kernel.launches:,.0f}", f"{1e6 * kernel.seconds:,.1f}", share]
    floor = kind.floor_of(kernel, ceilings)
    if floor is None:
        return [*cells, *[""] * 4]
    of_floor = f"{floor / kernel.seconds:.0%}" if kernel.seconds else ""
    return [*cells, f"{kernel.num_bytes / 1e6:,.1f}", "", f"{1e6 * floor:,.1f}", of_floor]
