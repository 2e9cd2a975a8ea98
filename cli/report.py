"""`specgen report`: what an output says about its run, as a page or as JSON."""

import json
from collections.abc import Sequence

from specgen.cli import codes
from specgen.cli.render import Console, to_stdout
from specgen.job.places import check_replaceable, files_beside, write_file
from specgen.job.report import make_report
from specgen.job.report_page import report_page


def report_output(output: str, *, page: str | None, json_path: str | None, by: Sequence[str]) -> int:
    """Write the page, or the JSON if that is all that is asked for, and return the exit code.

    Raises: SpecgenError if the output cannot be read or a file cannot be written.
    """
    if page is None and json_path is None:
        page = f"{output}.html"
    others = [output, *files_beside(output)]
    for path, what in ((page, "page"), (json_path, "JSON file")):
        if path is not None:
            check_replaceable(path, what, others)
            others.append(path)
    report = make_report(output, by)
    if json_path is not None:
        _write(json_path, json.dumps(report, indent=1, ensure_ascii=False) + "\n", "JSON file")
    if page is not None:
        _write(page, report_page(report), "page")
        if page != "-":
            Console().note(page)
    return codes.OK


def _write(path: str, text: str, what: str) -> None:
    if path == "-":
        to_stdout(text)
    else:
        write_file(path, text, what)
