"""A report's figures as one HTML page that needs nothing else: no network, no script.

Knows what is worth showing, and in which order. Does not know how a bar is drawn (`report_charts.py`).
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specgen.job.report_charts import NONE, STYLE, bar, bars, columns, curve, duration, number, percent, table, text
from specgen.job.tally import MIN_DRAFTED
from specgen.stats import counted


def report_page(report: Mapping[str, Any]) -> str:
    """Return the page of a report."""
    parts = [
        f"<h1>{text(report['output'])}</h1>",
        *_heading(report),
        _cards(report),
        _two(
            _section("Drafts accepted, by position", _by_position(report["acceptance_per_pos"])),
            _section("How answers ended", _endings(report)),
        ),
        _over_time(report["over_time"]),
        _two(*(_lengths(f"Tokens of {what}s", report[f"{what}_lengths"]) for what in ("prompt", "answer"))),
        *(_slices(name, rows) for name, rows in report["slices"].items()),
        _failures(report) if report["error_codes"] else "",
        _rows("Slowest answers", "those that took the most steps", report["most_steps"]),
        _rows("Least accepted answers", f"of those with {MIN_DRAFTED} drafts or more", report["least_accepted"]),
        _runs(report["runs"]),
        _manifest(report["manifest"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(report['output'])}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def _section(title: str, content: str, remark: str = "") -> str:
    small = f"<small>{text(remark)}</small>" if remark else ""
    return f"<section><h2>{text(title)}{small}</h2>{content}</section>"


def _two(*sections: str) -> str:
    return f'<div class="two">{"".join(sections)}</div>'


def _heading(report: Mapping[str, Any]) -> list[str]:
    """Whether it is whole, and what made it."""
    manifest, lines = report["manifest"], []
    if manifest is None:
        lines.append('<p class="dim">there is no manifest beside it: what made it is not known</p>')
    else:
        rows = f", {counted(manifest['rows'], 'row')}" if manifest["rows"] is not None else ""
        state = f"complete{rows}" if report["complete"] else '<span class="bad">not complete</span>'
        runs = report["runs"]
        times = [run["seconds"] for run in runs if run["seconds"] is not None]
        took = f", {duration(sum(times))} in {counted(len(runs), 'run')}" if times else ""
        lines.append(f"<p>{state}, begun {text(manifest['created'])}{took}</p>")
        lines.append(f'<p class="dim">{text(_made_by(manifest))}</p>')
    if report["unreadable_lines"]:
        lines.append(f'<p class="bad">{counted(report["unreadable_lines"], "line")} cannot be read</p>')
    return lines


def _made_by(manifest: Mapping[str, Any]) -> str:
    values = {key: one["value"] for key, one in manifest["recipe"].items()}
    device = manifest["sessions"][-1]["device"] if manifest["sessions"] else {}
    drafts = device.get("num_speculative_tokens", values.get("speculation.num_tokens"))
    parts = [
        values.get("model.path"),
        *(device.get(name) for name in ("device", "dtype", "exactness")),
        f"{drafts} drafts a step",
        f"temperature {values.get('sampling.temperature')}",
        f"seed {values.get('sampling.seed')}",
    ]
    return " · ".join(str(part) for part in parts if part is not None)


def _cards(report: Mapping[str, Any]) -> str:
    totals = report["totals"]
    num_ok = totals["answers"] - totals["failed"]
    seconds = sum(run["seconds"] or 0 for run in report["runs"])
    speeds = sum((run["seconds"] or 0) * (run["tokens_per_second"] or 0) for run in report["runs"])
    cards = [
        ("answers", number(totals["answers"]), False),
        ("failed", number(totals["failed"]), totals["failed"] > 0),
        ("output tokens", number(totals["completion_tokens"]), False),
        ("tokens an answer", number(totals["mean_tokens"]), False),
        ("output tokens a second", number(round(speeds / seconds)) if seconds else "–", False),
        ("tokens a step", number(totals["mean_accepted_length"]), False),
        ("drafts accepted", percent(totals["acceptance_rate"]), False),
        ("cut at the token limit", _share(totals["cut"], num_ok), False),
        ("empty answers", number(totals["empty"]), totals["empty"] > 0),
        ("of prompts from cache", _share(totals["cached_tokens"], totals["prompt_tokens"]), False),
    ]
    shown = "".join(
        f'<div class="card{" bad" if is_bad else ""}"><b>{value}</b><span>{name}</span></div>'
        for name, value, is_bad in cards
    )
    return f'<div class="cards">{shown}</div>'


def _share(count: int, of: int) -> str:
    return percent(count / of) if of else "–"


def _by_position(positions: Sequence[Mapping[str, Any]]) -> str:
    return bars(
        [
            (
                f"draft {one['position']}",
                one["rate"],
                f"{one['rate']:.1%} ({one['accepted']:,} of {one['drafted']:,})",
                False,
            )
            for one in positions
        ]
    )


def _endings(report: Mapping[str, Any]) -> str:
    total = report["totals"]["answers"] or 1
    counts = dict(report["finish_reasons"])
    stops = {
        f"stop by {json.dumps(stop, ensure_ascii=False)}" if stop else "stop": count
        for stop, count in report["stops"].items()
    }
    others = counts.pop("stop", 0) - sum(stops.values())
    counts |= stops | ({"stop by others": others} if others else {})
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return bars([(name, count / total, _counted_share(count, total), name == "error") for name, count in ordered])


def _counted_share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})"


def _over_time(points: Sequence[Mapping[str, Any]]) -> str:
    if len(points) < 2:
        return ""
    rates = [(one["seconds"], one["acceptance_rate"]) for one in points if one["acceptance_rate"] is not None]
    speeds = [(one["seconds"], one["tokens_per_second"]) for one in points]
    marks = [before["seconds"] for before, after in pairwise(points) if before["run"] != after["run"]]
    remark = "all runs in a row" if marks else ""
    sections = [
        _section("Tokens a second, over time", curve(speeds, marks, None, lambda value: f"{value:,.0f}"), remark)
    ]
    if len(rates) > 1:
        sections.insert(
            0, _section("Drafts accepted, over time", curve(rates, marks, 1.0, lambda value: f"{value:.0%}"), remark)
        )
    return _two(*sections)


def _lengths(title: str, lengths: Mapping[str, Any] | None) -> str:
    if lengths is None:
        return _section(title, NONE)
    remark = f"median {lengths['median']:,}, 9 of 10 at most {lengths['p90']:,}, longest {lengths['most']:,}"
    ranges = [
        (f"{one['from']:,}" if one["from"] == one["to"] else f"{one['from']:,} to {one['to']:,}", one["count"])
        for one in lengths["bins"]
    ]
    return _section(title, columns(ranges), remark)


def _slices(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    head = [(name, "r"), *((title, "n") for title in ("answers", "failed", "cut", "mean tokens", "tokens/step"))]
    cells = (
        [
            text(row["value"]) if row["value"] is not None else '<span class="dim">all others</span>',
            *(number(row[key]) for key in ("answers", "failed", "cut", "mean_tokens", "mean_accepted_length")),
            percent(row["acceptance_rate"]),
            bar(row["acceptance_rate"] or 0),
        ]
        for row in rows
    )
    return _section(f"By {name}", table([*head, ("accepted", "n"), ("", "b")], cells))


def _rows(title: str, remark: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    numbers = [(name, "n") for name in ("tokens", "steps", "tokens/step", "accepted")]
    cells = (
        [
            _row_name(row),
            *(number(row[key]) for key in ("tokens", "steps", "mean_accepted_length")),
            percent(row["acceptance_rate"]),
            text(row["finish_reason"]),
            text(row["text"]),
        ]
        for row in rows
    )
    return _section(title, table([("row", "r"), *numbers, ("ended by", ""), ("text", "t")], cells), remark)


def _row_name(row: Mapping[str, Any]) -> str:
    sample = f", sample {row['sample']}" if row["sample"] else ""
    return text(row["id"] if row["id"] is not None else f"index {row['index']}") + sample


def _failures(report: Mapping[str, Any]) -> str:
    codes, total = report["error_codes"], report["totals"]["failed"]
    rows = [(code, count / total, _counted_share(count, total), True) for code, count in codes.items()]
    cells = (
        [
            _row_name(row),
            number(row["error"].get("line")),
            text(row["error"].get("code")),
            text(row["error"].get("message")),
        ]
        for row in report["failures"]
    )
    remark = f"the first of each code, {len(report['failures'])} of {total:,}"
    head = [("row", "r"), ("line", "n"), ("code", ""), ("message", "t")]
    return _section("Failures", bars(rows) + table(head, cells), remark)


def _runs(runs: Sequence[Mapping[str, Any]]) -> str:
    if not runs:
        return ""
    head = [
        *((name, "w") for name in ("begun", "ended", "host", "device")),
        *((name, "n") for name in ("answers", "failed", "took", "tokens/s")),
        ("remarks", "t"),
    ]
    cells = (
        [
            text(run["started"]),
            text(run["ended"]) if run["ended"] is not None else '<span class="bad">not told</span>',
            *(text(run[key] or "–") for key in ("host", "device")),
            *(number(run[key]) for key in ("answers", "failed")),
            duration(run["seconds"]),
            number(run["tokens_per_second"]),
            text("; ".join([*([run["error"]] if run["error"] else []), *run["changed"]])),
        ]
        for run in runs
    )
    return _section("Runs that made it", table(head, cells))


def _manifest(manifest: Mapping[str, Any] | None) -> str:
    if manifest is None:
        return ""
    head = [("key", "w"), ("value", "t"), ("from", "t")]

    def keys(*, also_defaults: bool) -> str:
        return table(
            head,
            (
                [text(key), text(json.dumps(one["value"], ensure_ascii=False)), text(one["origin"])]
                for key, one in manifest["recipe"].items()
                if also_defaults or one["origin"] != "default"
            ),
        )

    rest = {name: value for name, value in manifest.items() if name not in ("recipe", "sessions")}
    rest["sessions"] = [{k: v for k, v in session.items() if k != "series"} for session in manifest["sessions"]]
    whole = text(json.dumps(rest, indent=1, ensure_ascii=False))
    return _section(
        "Recipe",
        f"{keys(also_defaults=False)}<details><summary>All keys, defaults too</summary>{keys(also_defaults=True)}"
        f"</details><details><summary>Manifest: fingerprints, versions, counts</summary><pre>{whole}</pre></details>",
        "what was set",
    )
