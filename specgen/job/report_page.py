"""A report's figures as one HTML page that needs nothing else: no network, no script.

Knows HTML and SVG; everything that came from a file is escaped.
"""

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --fg: #1c2024; --dim: #60646c; --line: #d9d9e0; --bar: #3e63dd; --bad: #ce2c31;
  --bg: #fcfcfd; --card: #fff; }
@media (prefers-color-scheme: dark) { :root { --fg: #edeef0; --dim: #b0b4ba; --line: #363a3f; --bar: #5472e4;
  --bad: #ff9592; --bg: #111113; --card: #18191b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; max-width: 68rem;
  padding: 1.5rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
p.dim, td.dim, .axis { color: var(--dim); } .axis { font-size: .8rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin-top: 1rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.card b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; } .card span { color: var(--dim); }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 0 2rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; color: var(--dim); }
th, td { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.t { overflow-wrap: anywhere; } td.r { white-space: nowrap; max-width: 16rem; overflow: hidden;
  text-overflow: ellipsis; } .scroll { overflow-x: auto; }
.bar { background: var(--bar); height: .8rem; border-radius: 2px; margin-top: .3rem; }
td.b { width: 45%; } .bad { color: var(--bad); } svg { width: 100%; height: 9rem; display: block; }
polyline { fill: none; stroke: var(--bar); stroke-width: 1.5; vector-effect: non-scaling-stroke; }
details { margin-top: .8rem; } summary { cursor: pointer; } pre { overflow-x: auto; font-size: .8rem; }
"""


def report_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    totals = report["totals"]
    parts = [
        f"<h1>{_text(report['output'])}</h1>",
        f'<p class="dim">{_state(report)}</p>',
        _cards(totals),
        "<h2>Drafts accepted, by position</h2>",
        _bars([(f"draft {one['position']}", one["rate"], _of(one)) for one in report["acceptance_per_pos"]], most=1.0),
        _over_time(report["over_time"]),
        '<div class="two"><section><h2>How answers ended</h2>',
        _counts(report["finish_reasons"], "ending"),
        "</section><section><h2>What stopped them</h2>",
        _counts(report["stops"], "stop"),
        '</section></div><div class="two"><section><h2>Tokens of prompts</h2>',
        _bins(report["prompt_lengths"]),
        "</section><section><h2>Tokens of answers</h2>",
        _bins(report["answer_lengths"]),
        "</section></div>",
        *(_slices(name, rows) for name, rows in report["slices"].items()),
        "<h2>Slowest answers: most steps</h2>",
        _rows(report["most_steps"]),
        "<h2>Answers with the least accepted drafts</h2>",
        _rows(report["least_accepted"]),
        "<h2>Failures</h2>",
        _failures(report),
        "<h2>What made it</h2>",
        _manifest(report["manifest"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(report['output'])}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value)).encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _state(report: Mapping[str, Any]) -> str:
    manifest = report["manifest"]
    if manifest is None:
        state = "there is no manifest beside it"
    else:
        state = f"begun {manifest['created']}, " + ("complete" if report["complete"] else "not complete")
    if report["unreadable_lines"]:
        state += f', <span class="bad">{report["unreadable_lines"]:,} lines cannot be read</span>'
    return state


def _cards(totals: Mapping[str, Any]) -> str:
    cards = [
        ("answers", _number(totals["answers"])),
        ("failed", _number(totals["failed"])),
        ("output tokens", _number(totals["completion_tokens"])),
        ("tokens an answer", _number(totals["mean_tokens"])),
        ("tokens a step", _number(totals["mean_accepted_length"])),
        ("drafts accepted", _percent(totals["acceptance_rate"] if totals["drafted"] else None)),
        ("cut at the limit", _number(totals["cut"])),
        ("empty", _number(totals["empty"])),
        ("prompt tokens from cache", f"{_number(totals['cached_tokens'])} of {_number(totals['prompt_tokens'])}"),
    ]
    shown = "".join(f'<div class="card"><b>{value}</b><span>{name}</span></div>' for name, value in cards)
    return f'<div class="cards">{shown}</div>'


def _of(one: Mapping[str, Any]) -> str:
    return f"{one['rate']:.1%} ({one['accepted']:,} of {one['drafted']:,})"


def _bars(rows: Sequence[tuple[str, float, str]], most: float | None = None) -> str:
    if not rows:
        return '<p class="dim">none</p>'
    most = most or max(value for _, value, _ in rows) or 1.0
    shown = "".join(
        f'<tr><td>{_text(name)}</td><td class="b"><div class="bar" style="width:{100 * value / most:.1f}%"></div></td>'
        f'<td class="n">{_text(label)}</td></tr>'
        for name, value, label in rows
    )
    return f"<table>{shown}</table>"


def _counts(counts: Mapping[str, int], what: str) -> str:
    return _bars([(name or f"(no {what})", float(count), f"{count:,}") for name, count in counts.items()])


def _bins(bins: Sequence[Mapping[str, int]]) -> str:
    def name(one: Mapping[str, int]) -> str:
        return f"{one['from']:,}" if one["from"] == one["to"] else f"{one['from']:,} to {one['to']:,}"

    return _bars([(name(one), float(one["count"]), f"{one['count']:,}") for one in bins])


def _over_time(points: Sequence[Mapping[str, Any]]) -> str:
    if len(points) < 2:
        return ""
    seconds = [one["seconds"] for one in points]
    rates = [(one["seconds"], one["acceptance_rate"]) for one in points if one["acceptance_rate"] is not None]
    speeds = [(one["seconds"], one["tokens_per_second"]) for one in points]
    charts: list[tuple[str, list[tuple[float, float]], float, Callable[[Any], str]]] = [
        ("Tokens a second, over time", speeds, max(value for _, value in speeds), _number)
    ]
    if len(rates) > 1:
        charts.insert(0, ("Drafts accepted, over time", rates, 1.0, _percent))
    shown = ""
    for title, values, most, label in charts:
        path = " ".join(
            f"{100 * (at - seconds[0]) / (seconds[-1] - seconds[0]):.2f},{40 - 38 * value / (most or 1):.2f}"
            for at, value in values
        )
        shown += (
            f'<section><h2>{title}</h2><svg viewBox="0 0 100 40" preserveAspectRatio="none" role="img"'
            f' aria-label="{title}"><polyline points="{path}"/></svg>'
            f'<div class="axis">0 to {label(most)}, {_number(seconds[0])} to {_number(seconds[-1])} s</div></section>'
        )
    return f'<div class="two">{shown}</div>'


def _table(head: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """head: titles and the class of their cells."""
    titles = "".join(f'<th class="{kind}">{title}</th>' for title, kind in head)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for (_, kind), cell in zip(head, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _slices(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    head = [
        (_text(name), "t"),
        *((title, "n") for title in ("answers", "failed", "cut", "tokens", "a step", "accepted")),
    ]
    cells = (
        [
            _text(row["value"]),
            *(_number(row[key]) for key in ("answers", "failed", "cut", "mean_tokens", "mean_accepted_length")),
            _percent(row["acceptance_rate"]),
        ]
        for row in rows
    )
    return f"<h2>By {_text(name)}</h2>{_table(head, cells)}"


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<p class="dim">none</p>'
    head = [
        ("row", "r"),
        ("ended by", ""),
        *((title, "n") for title in ("tokens", "steps", "a step", "accepted")),
        ("text", "t"),
    ]
    cells = (
        [
            _row_name(row),
            _text(row["finish_reason"]),
            *(_number(row[key]) for key in ("tokens", "steps", "mean_accepted_length")),
            _percent(row["acceptance_rate"]),
            _text(row["text"]),
        ]
        for row in rows
    )
    return _table(head, cells)


def _row_name(row: Mapping[str, Any]) -> str:
    sample = f", sample {row['sample']}" if row["sample"] else ""
    return _text(row["id"]) + sample


def _failures(report: Mapping[str, Any]) -> str:
    if not report["error_codes"]:
        return '<p class="dim">none</p>'
    head = [("row", "r"), ("line", "n"), ("code", ""), ("message", "t")]
    cells = (
        [
            _row_name(row),
            _number(row["error"].get("line")),
            _text(row["error"].get("code")),
            _text(row["error"].get("message")),
        ]
        for row in report["failures"]
    )
    return _counts(report["error_codes"], "code") + _table(head, cells)


def _manifest(manifest: Mapping[str, Any] | None) -> str:
    if manifest is None:
        return '<p class="dim">there is no manifest</p>'
    recipe = _table(
        [("key", ""), ("value", "t"), ("from", "t")],
        (
            [_text(key), _text(json.dumps(one["value"], ensure_ascii=False)), _text(one["origin"])]
            for key, one in manifest["recipe"].items()
        ),
    )
    rest = {name: value for name, value in manifest.items() if name not in ("recipe", "sessions")}
    rest["sessions"] = [{k: v for k, v in session.items() if k != "series"} for session in manifest["sessions"]]
    whole = _text(json.dumps(rest, indent=1, ensure_ascii=False))
    return (
        f"<details open><summary>Recipe</summary>{recipe}</details>"
        f"<details><summary>Manifest</summary><pre>{whole}</pre></details>"
    )
