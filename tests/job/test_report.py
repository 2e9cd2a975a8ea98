"""The report: figures that add up, and a page that shows them, needs nothing else and runs nothing."""

import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specgen.cli.main import main
from specgen.errors import InputError
from specgen.job.report import make_report
from specgen.job.report_page import report_page

EVIL = "<script>document.title='run'</script><img src=x onerror=alert(1)>"


@pytest.fixture
def output(workplace: Any, fake_engine: Any) -> Path:
    """The answers to 60 rows: of three genres, some failed, some cut."""
    rows: list[Any] = [
        {
            "id": f"r{i}",
            "prompt": f"a story of number {i} " + "and more " * (i % 5),
            "genre": ["a", "b", {"c": 1}][i % 3],
        }
        for i in range(60)
    ]
    rows[7] = "broken"
    rows[8] = {"id": EVIL, "prompt": EVIL, "genre": EVIL}
    workplace.write(rows)
    workplace.run(fake_engine(), "sampling.max_tokens=9")
    return Path(workplace.output)


def test_the_figures_are_those_of_the_lines(workplace: Any, output: Path) -> None:
    records = workplace.records()
    report = make_report(str(output), by=["genre"])
    done = [record for record in records if record["error"] is None]
    assert report["totals"]["answers"] == 60
    assert report["totals"]["failed"] == sum(report["error_codes"].values()) == 60 - len(done)
    assert report["totals"]["completion_tokens"] == sum(r["usage"]["completion_tokens"] for r in records)
    assert report["totals"]["steps"] == sum(record["spec"]["steps"] for record in done)
    for one in report["acceptance_per_pos"]:
        position = one["position"] - 1
        accepted = sum(
            r["spec"]["accepted_per_pos"][position] for r in done if position < len(r["spec"]["accepted_per_pos"])
        )
        assert one["accepted"] == accepted
        assert one["rate"] == round(accepted / one["drafted"], 4)
    assert sum(report["finish_reasons"].values()) == 60
    ok_tokens = [record["usage"]["completion_tokens"] for record in done]
    assert report["totals"]["mean_tokens"] == round(sum(ok_tokens) / len(done), 2)  # those that failed have none
    for name, kind in (("prompt_lengths", "prompt_tokens"), ("answer_lengths", "completion_tokens")):
        lengths = sorted(record["usage"][kind] for record in done)
        found = report[name]
        assert [one["count"] for one in found["bins"]] == [
            sum(one["from"] <= length <= one["to"] for length in lengths) for one in found["bins"]
        ]
        assert (found["bins"][0]["from"], found["bins"][-1]["to"], found["most"]) == (
            lengths[0],
            lengths[-1],
            lengths[-1],
        )
        assert (found["median"], found["p90"]) == tuple(lengths[-(-len(lengths) * n // 10) - 1] for n in (5, 9))
    slices = {one["value"]: one for one in report["slices"]["genre"]}
    assert set(slices) == {"a", "b", '{"c": 1}', EVIL}
    assert sum(one["answers"] for one in slices.values()) == 59  # the broken row has no columns
    steps = [one["steps"] for one in report["most_steps"]]
    assert steps == sorted((record["spec"]["steps"] for record in done), reverse=True)[:10]
    failures = {record["index"]: record["error"] for record in records if record["error"] is not None}
    assert {one["index"]: one["error"] for one in report["failures"]} == failures
    assert report["manifest"]["lines"] == 60
    with pytest.raises(InputError, match="no row has a column 'nothing'"):
        make_report(str(output), by=["nothing"])


def test_time_is_that_of_all_runs(workplace: Any, output: Path) -> None:
    path = Path(f"{output}.manifest.json")
    manifest = json.loads(path.read_text())
    session = manifest["sessions"][0]
    session["series"] = [[0.0, 0, 0, 0, 0], [10.0, 5, 100, 50, 25], [20.0, 9, 400, 50, 25]]
    path.write_text(json.dumps(manifest | {"sessions": [session, session]}))
    points = make_report(str(output))["over_time"]
    assert [one["seconds"] for one in points] == [10.0, 20.0, 30.0, 40.0]
    assert [one["tokens_per_second"] for one in points] == [10.0, 30.0] * 2
    assert [one["acceptance_rate"] for one in points] == [0.5, None] * 2
    assert [one["run"] for one in points] == [1, 1, 2, 2]
    assert "Tokens a second, over time" in report_page(make_report(str(output)))


def test_torn_and_foreign_lines_are_counted(output: Path) -> None:
    with open(output, "a") as stream:
        stream.write('{"foreign": 1}\n[]\n{"torn')
    assert make_report(str(output))["unreadable_lines"] == 3
    output.write_text("\n")
    Path(f"{output}.manifest.json").unlink()
    with pytest.raises(InputError, match="no answers in it"):
        make_report(str(output))


def test_failures_of_every_code_are_shown(workplace: Any, fake_engine: Any) -> None:
    workplace.write([*["broken"] * 200, {"prompt": ""}])
    workplace.run(fake_engine())
    report = make_report(str(workplace.output))
    assert report["error_codes"] == {"bad_json": 200, "empty_prompt": 1}
    assert [one["error"]["code"] for one in report["failures"]] == ["bad_json"] * 5 + ["empty_prompt"]
    assert (report["totals"]["mean_tokens"], report["answer_lengths"], report["most_steps"]) == (None, None, [])
    page = report_page(report)
    for part in ("the first of each code, 6 of 201", "200 (99.5%)", "index 200", ">–<"):
        assert part in page


def test_an_output_without_answers_still_says_what_made_it(workplace: Any, fake_engine: Any) -> None:
    workplace.write([{"prompt": "a story"}])
    session = workplace.session()
    session.target.open().close()
    session.target.begin(session.recipe, {}, {"device": "fake"})
    session.close()
    assert main(["report", str(workplace.output), "--by", "genre"]) == 0
    page = Path(f"{workplace.output}.html").read_text()
    for part in ("not complete", "sampling.seed", "Runs that made it", "not told"):
        assert part in page


def test_the_commonest_values_of_a_column_are_shown_and_the_others_together(
    workplace: Any, fake_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [*range(30), *["often"] * 3, *["more often"] * 4, *range(30, 60)]
    workplace.write([{"prompt": "a story", "x": value} for value in values])
    workplace.run(fake_engine())
    for most in (10_000, 40):
        monkeypatch.setattr("specgen.job.tally._MOST_VALUES", most)
        rows = make_report(str(workplace.output), by=["x"])["slices"]["x"]
        assert [(one["value"], one["answers"]) for one in rows[:2]] == [("more often", 4), ("often", 3)]
        assert (len(rows), rows[-1]["value"]) == (41, None)
        assert sum(one["answers"] for one in rows) == len(values)
        assert sum(one["mean_tokens"] * one["answers"] for one in rows) == pytest.approx(
            sum(record["usage"]["completion_tokens"] for record in workplace.records())
        )


def test_a_batchs_answers_have_a_report_too(workplace: Any, fake_engine: Any) -> None:
    body = {"model": "m", "prompt": "a story", "n": 2}
    rows: list[Any] = [
        {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body | ({"x": 1} if i == 3 else {})}
        for i in range(5)
    ]
    workplace.write(rows)
    workplace.run(fake_engine())
    report = make_report(str(workplace.output))
    assert report["totals"]["answers"] == 9
    bodies = [response["body"] for line in workplace.records() if (response := line["response"])["status_code"] == 200]
    assert report["totals"]["completion_tokens"] == sum(body["usage"]["completion_tokens"] for body in bodies)
    assert report["totals"]["cached_tokens"] == 2 * 8
    spec = report["manifest"]["sessions"][0]["statistics"]["spec"]  # the lines have none
    assert [one["accepted"] for one in report["acceptance_per_pos"]] == spec["accepted_per_pos"]
    assert report["error_codes"] == {"bad_sampling": 1}
    assert "c3" in report_page(report)


class Page(html.parser.HTMLParser):
    """The page's elements and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(page: str, report: dict[str, Any]) -> None:
    """Check that the page shows the figures, asks for nothing and runs nothing."""
    parsed = Page(page)
    assert parsed.open == []
    assert not {"script", "img", "link", "iframe", "object"} & set(parsed.tags)
    assert not {"src", "href", "onerror", "onload"} & {name for name, _ in parsed.attributes}
    style = page[page.index("<style>") : page.index("</style>")]
    assert not re.search(r"url\(|@import", style)
    for one in report["acceptance_per_pos"]:
        assert f"{one['rate']:.1%} ({one['accepted']:,} of {one['drafted']:,})" in parsed.text
    for shown in (
        "length",
        'stop by "<eos>"',
        *report["error_codes"],
        report["most_steps"][0]["id"],
        EVIL,
        "sampling.seed",
    ):
        assert shown in parsed.text


def test_the_page_shows_it_all_and_nothing_runs(output: Path) -> None:
    report = make_report(str(output), by=["genre"])
    check_page(report_page(report), report)


BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium")
# Puts the page into a frame of a width and writes down what does not fit.
LOOK = """<!doctype html><iframe id="frame" style="width: %dpx; height: 2000px; border: 0" src="%s"></iframe><pre></pre>
<script>
frame.onload = () => {
  const page = frame.contentDocument, all = (what) => [...page.querySelectorAll(what)];
  const is_cut = (one) => one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1;
  document.querySelector("pre").textContent = JSON.stringify({
    beyond: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    tallest: Math.max(...all("tr").map((one) => one.offsetHeight)),
    cut: all(".card, h1, h2, .bars, .chart, p").filter(is_cut).map((one) => one.textContent),
    empty: all("section, .plot, svg, .track").filter((one) => !one.clientWidth || !one.clientHeight).length,
  });
};
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
def test_chromium_shows_the_page(output: Path, tmp_path: Path) -> None:
    assert main(["report", str(output), "--by", "genre"]) == 0
    page = Path(f"{output}.html")

    def browse(address: Path, *more: str) -> str:
        options = ["--no-sandbox", "--disable-gpu", "--headless", "--host-resolver-rules=MAP * ~NOTFOUND"]
        options += [f"--user-data-dir={tmp_path}/b", "--allow-file-access-from-files", *more]
        command = [str(BROWSER), *options, address.as_uri()]
        return subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()

    dom = browse(page, "--dump-dom")
    check_page(dom, make_report(str(output), by=["genre"]))
    assert f"<title>{output}</title>" in dom
    for width in (360, 1280):
        look = tmp_path / f"look{width}.html"
        look.write_text(LOOK % (width, page.as_uri()))
        found = re.search("<pre>(.*)</pre>", browse(look, "--dump-dom"))
        assert found is not None
        seen = json.loads(html.unescape(found[1]))
        assert (seen["beyond"], seen["cut"], seen["empty"]) == (0, [], 0), width
        assert 10 < seen["tallest"] < 300  # a text squeezed to a letter a line is taller
    picture = tmp_path / "page.png"
    browse(page, "--window-size=1000,1500", f"--screenshot={picture}")
    assert picture.stat().st_size > 30_000  # an empty page is some kilobytes


def test_the_command_writes_page_and_json(
    output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", str(output)]) == 0
    assert Path(f"{output}.html").read_text().startswith("<!doctype html>")
    Path(f"{output}.html").unlink()
    assert main(["report", str(output), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["answers"] == 60
    assert not Path(f"{output}.html").exists()
    assert main(["report", str(output), "-o", str(output)]) == 2
    assert main(["report", str(output) + "nothing"]) == 2
    assert "cannot be read" in capsys.readouterr().err
