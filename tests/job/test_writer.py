"""The output file: whole lines in order, and nothing lost that was there."""

import os
import random
from pathlib import Path

import pytest

from specgen.errors import InputError
from specgen.job.writer import LineWriter, check_output, check_replaceable, recipe_beside, write_new


def test_lines_come_in_index_order_or_as_given(tmp_path: Path) -> None:
    order = list(range(50))
    random.Random(1).shuffle(order)
    for ordered in (True, False):
        path = tmp_path / f"{ordered}.jsonl"
        with LineWriter.open(str(path), ordered=ordered) as writer:
            for index in order:
                writer.put(index, b"%d\n" % index)
        written = [int(line) for line in path.read_text().split()]
        assert written == (sorted(order) if ordered else order)


def test_held_lines_are_counted_and_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with LineWriter.open(str(path), ordered=True) as writer:
        for index in (4, 0, 2):
            writer.put(index, b"%d\n" % index)
        writer.flush()
        assert writer.num_held == 2
        assert path.read_bytes() == b"0\n"
    assert path.read_bytes() == b"0\n2\n4\n"


def test_an_old_output_is_never_lost(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("old")
    with pytest.raises(InputError, match=r"there already.*--overwrite"):
        check_output(str(path), input_path=None, overwrite=False)
    with pytest.raises(InputError, match="cannot be made"):
        LineWriter.open(str(path), ordered=True)
    assert path.read_text() == "old"
    for number in ("", "2", "3"):
        check_output(str(path), input_path=None, overwrite=True)
        with LineWriter.open(str(path), ordered=True, overwrite=True) as writer:
            writer.put(0, b"new\n")
        assert (tmp_path / f"out.old{number}").is_file()
    assert (tmp_path / "out.old").read_text() == "old"


def test_the_input_is_never_the_output(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text("rows")
    (tmp_path / "link").symlink_to(path)
    for name in (str(path), str(tmp_path / "link"), f"{tmp_path}/../{tmp_path.name}/rows"):
        with pytest.raises(InputError, match="is the input"):
            check_output(name, input_path=str(path), overwrite=True)
    check_output("-", input_path="-", overwrite=False)


def test_places_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="folder does not exist"):
        check_output(str(tmp_path / "missing" / "out"), input_path=None, overwrite=False)
    with pytest.raises(InputError, match="is a folder"):
        check_output(str(tmp_path), input_path=None, overwrite=True)


def test_the_recipe_beside_is_never_lost_either(tmp_path: Path) -> None:
    path = tmp_path / "out"
    beside = tmp_path / "out.recipe.yaml"
    assert recipe_beside(str(path)) == str(beside)
    assert recipe_beside(os.devnull) is recipe_beside("-") is None
    beside.write_text("old")
    with pytest.raises(InputError, match="beside the output is there already"):
        check_output(str(path), input_path=None, overwrite=False)
    with pytest.raises(InputError, match="cannot be made: File exists"):
        write_new(str(beside), "new", overwrite=False)
    check_output(str(path), input_path=None, overwrite=True, recipe_path=tmp_path / "other.yaml")
    with pytest.raises(InputError, match="beside the output is the recipe that is being run"):
        check_output(str(path), input_path=None, overwrite=True, recipe_path=beside)
    with pytest.raises(InputError, match="beside the output is the input file"):
        check_output(str(path), input_path=str(beside), overwrite=True)
    write_new(str(beside), "new", overwrite=True)
    assert (beside.read_text(), Path(f"{beside}.old").read_text()) == ("new", "old")


def test_a_check_leaves_no_trace(tmp_path: Path) -> None:
    old = tmp_path / "stats.json"
    old.write_text("old")
    check_output(str(tmp_path / "out"), input_path=None, overwrite=False)
    check_replaceable(str(tmp_path / "new.json"), "statistics file", [])
    check_replaceable(str(old), "statistics file", [])
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("stats.json", "old")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="cannot be made: Permission denied"):
            check_output(str(tmp_path / "out"), input_path=None, overwrite=False)
    finally:
        tmp_path.chmod(0o700)


def test_devices_are_written_to_as_they_are() -> None:
    check_output(os.devnull, input_path=None, overwrite=False)
    with LineWriter.open(os.devnull, ordered=True, overwrite=True) as writer:
        writer.put(0, b"x\n")
    assert not Path(os.devnull).is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_the_users_to_mend() -> None:
    def write() -> None:
        with LineWriter.open("/dev/full", ordered=True) as writer:
            writer.put(0, b"x\n")

    with pytest.raises(InputError, match="writing the output failed: No space left"):
        write()
