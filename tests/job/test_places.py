"""Where files may be written: never over what is needed, and asked without leaving a trace."""

import os
from pathlib import Path

import pytest

from specgen.errors import InputError
from specgen.job.places import check_output, check_replaceable, files_beside, move_aside, recipe_beside


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("rows")
    (tmp_path / "link").symlink_to(path)
    for name in (str(path), str(tmp_path / "link"), f"{tmp_path}/../{tmp_path.name}/rows"):
        with pytest.raises(InputError, match="is the input"):
            check_output(name, inputs=[str(path)])
    check_output("-", inputs=["-"])


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder does not exist"):
        check_output(str(tmp_path / "missing" / "out"), inputs=[])
    with pytest.raises(InputError, match="is a folder"):
        check_output(str(tmp_path), inputs=[])


def test_what_is_beside_is_never_an_input(tmp_path: Path) -> None:
    path = tmp_path / "out"
    recipe, manifest = files_beside(str(path))
    assert recipe_beside(str(path)) == recipe
    assert files_beside(os.devnull) == files_beside("-") == []
    check_output(str(path), inputs=[], recipe_path=tmp_path / "other.yaml")
    with pytest.raises(InputError, match="recipe that is written beside the output is the recipe that is being run"):
        check_output(str(path), inputs=[], recipe_path=Path(recipe))
    with pytest.raises(InputError, match="manifest that is written beside the output is the input file"):
        check_output(str(path), inputs=["-", manifest])


def test_old_files_are_moved_aside_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert move_aside(str(path)) is None
    for number, content in (("", "a"), ("2", "b"), ("3", "c")):
        path.write_text(content)
        assert move_aside(str(path)) == f"{path}.old{number}"
        assert Path(f"{path}.old{number}").read_text() == content
        assert not path.exists()


def test_a_check_leaves_no_trace(tmp_path: Path) -> None:
    old = tmp_path / "stats.json"
    old.write_text("old")
    check_output(str(tmp_path / "out"), inputs=[])
    check_replaceable(str(tmp_path / "new.json"), "statistics file", [])
    check_replaceable(str(old), "statistics file", [])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("stats.json", "old")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be made: Permission denied"):
            check_output(str(tmp_path / "out"), inputs=[])
    finally:
        tmp_path.chmod(0o700)
