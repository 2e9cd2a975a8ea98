"""Pieces of a page: text, numbers, bars, columns, lines and tables, as HTML and SVG with their style.

Knows HTML and SVG; everything is escaped here. Does not know what is shown.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence

STYLE = """
:root { color-scheme: light dark; --fg: #1c2024; --dim: #60646c; --line: #e4e4e9; --bar: #3e63dd; --track: #edf2fe;
  --bad: #ce2c31; --bg: #fcfcfd; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --fg: #edeef0; --dim: #b0b4ba; --line: #2b2e33; --bar: #7b97f5;
  --track: #1d2745; --bad: #ff9592; --bg: #111113; --card: #18191b; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; max-width: 70rem;
  padding: 1.5rem clamp(.8rem, 3vw, 1.5rem); }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
h2 small { font-weight: 400; color: var(--dim); margin-left: .5em; } p { margin: .2rem 0; overflow-wrap: anywhere; }
.dim, th, .card span { color: var(--dim); } .bad, .card.bad b { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .7rem; margin-top: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.card span { font-size: .87rem; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 0 2.5rem; }
section { min-width: 0; }
.bars { display: grid; grid-template-columns: fit-content(45%) minmax(4rem, 1fr) auto; gap: .35rem .8rem;
  align-items: center; } .bars span { overflow-wrap: anywhere; } .bars .n { white-space: nowrap; text-align: right; }
.track { background: var(--track); border-radius: 3px; height: .9rem; }
.bar { background: var(--bar); border-radius: 3px; height: 100%; min-width: 2px; } .bar.bad { background: var(--bad); }
.n { font-variant-numeric: tabular-nums; }
.chart { display: grid; grid-template-columns: auto minmax(0, 1fr); gap: 0 .6rem; font-size: .8rem; color: var(--dim); }
.plot { height: 10rem; } .y, .x { display: flex; justify-content: space-between; font-variant-numeric: tabular-nums; }
.y { flex-direction: column; text-align: right; margin: -.6rem 0; } .x { grid-column: 2; padding-top: .2rem; }
.x.each { justify-content: space-around; } .x.each span { flex: 1 1 0; text-align: center; }
.chart svg { width: 100%; height: 100%; display: block; overflow: visible; } .grid { stroke: var(--line); }
.run { stroke: var(--dim); stroke-dasharray: 3 3; } .area { fill: var(--track); stroke: none; }
.grid, .run, .curve { vector-effect: non-scaling-stroke; fill: none; } .curve { stroke: var(--bar); stroke-width: 1.7; }
rect { fill: var(--bar); } rect:hover { fill: var(--fg); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; font-size: .87rem; vertical-align: bottom; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); }
.bars + .scroll { margin-top: 1rem; } td.b { width: 30%; min-width: 5rem; } td.b .track { margin-top: .3rem; }
td { vertical-align: top; } td.n, th.n { text-align: right; white-space: nowrap; } td.w { white-space: nowrap; }
td.r { max-width: 14rem; overflow-wrap: anywhere; min-width: 6rem; }
td.t { min-width: 16rem; overflow-wrap: anywhere; }
details { margin-top: .8rem; } summary { cursor: pointer; } pre { overflow-x: auto; font-size: .8rem; }
"""
_WIDEST_COLUMN = 12.0  # of 100
_MOST_NAMES = 6
NONE = '<p class="dim">none</p>'


def text(value: object) -> str:
    """Return a value as text of a page."""
    return html.escape(str(value)).encode("utf-8", "backslashreplace").decode("utf-8")


def number(value: float | None) -> str:
    """Return a number with separators, two digits if it is no whole one, a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def percent(value: float | None) -> str:
    """Return a share of 1 in per cent, a dash for None."""
    return "–" if value is None else f"{value:.1%}"


def duration(seconds: float | None) -> str:
    """Return seconds as `h:mm:ss`, or with a digit below a minute."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"


def bars(rows: Sequence[tuple[str, float, str, bool]]) -> str:
    """Return a bar a row: name, a share of 1, what is said of it, and whether it is bad."""
    if not rows:
        return NONE
    shown = "".join(
        f'<span>{text(name)}</span>{bar(share, is_bad=is_bad)}<span class="n">{text(label)}</span>'
        for name, share, label, is_bad in rows
    )
    return f'<div class="bars">{shown}</div>'


def bar(share: float, *, is_bad: bool = False) -> str:
    """Return a bar over a share of 1 of its track."""
    kind = "bar bad" if is_bad else "bar"
    return f'<div class="track"><div class="{kind}" style="width:{100 * share:.2f}%"></div></div>'


def columns(values: Sequence[tuple[str, int]]) -> str:
    """Return columns side by side, of names and counts; of many, only the first and the last name are put below."""
    most = _rounded_up(max(count for _, count in values))
    place = 100 / len(values)
    width = min(0.84 * place, _WIDEST_COLUMN)
    shown = "".join(
        f'<rect x="{(i + 0.5) * place - width / 2:.3f}" y="{100 - 100 * count / most:.3f}" width="{width:.3f}"'
        f' height="{100 * count / most:.3f}"><title>{text(name)}: {count:,}</title></rect>'
        for i, (name, count) in enumerate(values)
    )
    names = [name for name, _ in values]
    is_few = len(names) <= _MOST_NAMES
    below = names if is_few else [names[0], names[-1]]
    return _chart(shown, most, lambda value: f"{value:,.0f}" if value == int(value) else "", below, is_each=is_few)


def curve(
    points: Sequence[tuple[float, float]], marks: Sequence[float], most: float | None, label: Callable[[float], str]
) -> str:
    """Return a curve over seconds, from 0 to `most` or what is needed; vertical lines at `marks`."""
    end = points[-1][0] or 1.0
    most = most or _rounded_up(max(value for _, value in points))
    path = " ".join(f"{100 * at / end:.2f},{100 - 100 * value / most:.2f}" for at, value in points)
    first = 100 * points[0][0] / end
    shown = f'<polygon class="area" points="{first:.2f},100 {path} 100,100"/>'
    shown += "".join(f'<path class="run" d="M{100 * at / end:.2f} 0V100"/>' for at in marks)
    shown += f'<polyline class="curve" points="{path}"/>'
    return _chart(shown, most, label, ["0", duration(end / 2), duration(end)])


def _chart(
    inner: str, most: float, label: Callable[[float], str], names: Sequence[str], *, is_each: bool = False
) -> str:
    """names: what stands below, at the ends, or (is_each) under a column each."""
    grid = '<path class="grid" d="M0 0H100M0 50H100M0 100H100"/>'
    y = "".join(f"<span>{label(value)}</span>" for value in (most, most / 2, 0.0))
    x = "".join(f"<span>{text(name)}</span>" for name in names)
    svg = f'<svg viewBox="0 0 100 100" preserveAspectRatio="none">{grid}{inner}</svg>'
    below = f'<div class="x{" each" if is_each else ""}">{x}</div>'
    return f'<div class="chart"><div class="y">{y}</div><div class="plot">{svg}</div>{below}</div>'


def _rounded_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 10, 20, …: a scale whose half is a round number too."""
    if value <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 5, 6, 8, 10) if power * step >= value)


def table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already; head: titles, and the class of the cells below them."""
    titles = "".join(f'<th class="{kind}">{text(title)}</th>' for title, kind in head)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for (_, kind), cell in zip(head, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
