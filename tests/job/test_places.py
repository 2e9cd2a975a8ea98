"""Where files may be written: never over what is needed, and asked without leaving a trace."""

import os
from pathlib import Path

import pytest

from specgen.errors import InputError
from specgen.job.places import check_output, check_replaceable, files_beside, move_aside, recipe_beside


def test_the_input_is_never_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    path.write_text("rows")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "hard").hardlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in (str(path), "rows", str(tmp_path / "link"), "hard", f"{tmp_path}/../{tmp_path.name}/rows"):
        with pytest.raises(InputError, match="is the input"):
            check_output(name, inputs=[str(path)])
    check_output("-", inputs=["-"])


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder does not exist"):
        check_output(str(tmp_path / "missing" / "out"), inputs=[])
    with pytest.raises(InputError, match="is a folder"):
        check_output(str(tmp_path), inputs=[])


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.csv", "out.Parquet"])
def test_a_name_that_says_another_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"written as JSONL, which \.\w+ does not say"):
        check_output(str(tmp_path / name), inputs=[])


def test_an_output_that_the_next_run_would_read(tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    with pytest.raises(InputError, match=r"would be read as input by the next run: .*\*\.jsonl takes it in"):
        check_output(output, inputs=[], patterns=[str(tmp_path / "*.jsonl")])
    with pytest.raises(InputError, match="manifest that is written beside the output would be read"):
        check_output(output, inputs=[], patterns=[str(tmp_path / "*.json")])
    check_output(output, inputs=[], patterns=[str(tmp_path / "in*"), str(tmp_path / "*" / "*.jsonl")])


def test_what_is_beside_is_never_an_input(tmp_path: Path) -> None:
    path = tmp_path / "out"
    recipe, manifest, waiting = files_beside(str(path))
    assert recipe_beside(str(path)) == recipe
    assert files_beside(os.devnull) == files_beside("-") == []
    check_output(str(path), inputs=[], recipe_path=tmp_path / "other.yaml")
    with pytest.raises(InputError, match="recipe that is written beside the output is the recipe that is being run"):
        check_output(str(path), inputs=[], recipe_path=Path(recipe))
    for name, what in ((manifest, "manifest"), (waiting, "file of waiting lines")):
        with pytest.raises(InputError, match=f"{what} that is written beside the output is the input file"):
            check_output(str(path), inputs=["-", name])


def test_old_files_are_moved_aside_one_after_the_other(tmp_path: Path) -> None:
    path, beside = tmp_path / "out", tmp_path / "out.manifest.json"
    names = [str(path), str(beside)]
    assert move_aside(names) is None
    for number, content in (("", "a"), ("2", "b"), ("3", "c")):
        path.write_text(content)
        if number != "2":
            beside.write_text(content)
        assert move_aside(names) == f".old{number}"
        assert Path(f"{path}.old{number}").read_text() == content
        assert not path.exists()
    assert Path(f"{beside}.old").read_text() == "a"
    assert Path(f"{beside}.old3").read_text() == "c"  # with the output that it belongs to
    assert len(list(tmp_path.iterdir())) == 5


def test_a_check_leaves_no_trace(tmp_path: Path) -> None:
    old = tmp_path / "stats.json"
    old.write_text('{\n "rows": 3\n}\n')
    check_output(str(tmp_path / "out"), inputs=[])
    check_replaceable(str(tmp_path / "new.json"), "statistics file", [])
    check_replaceable(str(old), "statistics file", [])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("stats.json", '{\n "rows": 3\n}\n')]


@pytest.mark.parametrize("what", ["page", "JSON file", "statistics file"])
def test_what_is_no_such_file_is_not_replaced(tmp_path: Path, what: str) -> None:
    """Rows, answers of another run, a page in the place of figures: a slip in a command line must not cost them."""
    path = tmp_path / "precious"
    for content in ('{"prompt": "a"}\n', "precious", "[]", "id,prompt\n"):
        path.write_text(content)
        with pytest.raises(InputError, match=f"precious: the {what} would overwrite a file that is none"):
            check_replaceable(str(path), what, [])
        assert path.read_text() == content
    for content in ("", "<!doctype html>\n<p>" if what == "page" else '{\n  "rows": 3\n}\n'):
        path.write_text(content)
        check_replaceable(str(path), what, [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be made: Permission denied"):
            check_output(str(tmp_path / "out"), inputs=[])
    finally:
        tmp_path.chmod(0o700)
