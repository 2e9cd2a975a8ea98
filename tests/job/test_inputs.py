"""Files of every format give the same rows, lazily; what is missing or damaged is named."""

import csv
import datetime
import gzip
import io
import json
import os
import tracemalloc
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import InputError, RowError
from specgen.job import tables, unpack
from specgen.job.inputs import MAX_SHOWN, GivenRows, Input, duplicates_error
from specgen.job.prompts import PromptBuilder
from specgen.job.readers import BadRow, Row
from specgen.recipe import recipe_from_settings
from specgen.recipe_sections import InputSection
from specgen.tokenizer import Tokenizer

ROWS = [{"id": f"r{i}", "prompt": f"täxt {i}", "n": i} for i in range(700)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def source_of(*paths: object, **keys: Any) -> Input:
    path = str(paths[0]) if len(paths) == 1 else tuple(map(str, paths))
    return Input(InputSection(path=path, **keys))


def read(*paths: object, **keys: Any) -> list[Row | BadRow]:
    return list(source_of(*paths, **keys).rows(unique_ids=True))


def data_of(rows: list[Row | BadRow]) -> list[Any]:
    return [row.data for row in rows]


def write_table(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path, row_group_size=100)
    else:
        make = pyarrow.ipc.new_stream if path.stem == "stream" else pyarrow.ipc.new_file
        with make(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.parquet", "in.arrow", "stream.arrow"])
def test_all_formats_give_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(JSONL[:5000]) + gzip.compress(JSONL[5000:]))
    elif name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.compress(JSONL[:5000]) + zstandard.compress(JSONL[5000:]))
    elif name.endswith(".jsonl"):
        path.write_bytes(JSONL)
    else:
        write_table(path)
    rows = read(path)
    assert data_of(rows) == ROWS
    assert [(row.index, row.line, row.id) for row in rows] == [(i, i + 1, f"r{i}") for i in range(700)]
    scan = source_of(path).scan()
    assert (scan.rows, scan.duplicates) == (700, [])


def test_csv_has_texts_and_exact_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.csv"
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["id", "prompt", "score"])
    writer.writerow(["007", 'two\nlines, "quoted"', ""])
    writer.writerow(["8", "täxt", "1.5"])
    path.write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode() + b'9,\xff,1\n\n10,"x\n11,y,2,3\n')
    rows = read(path)
    assert data_of(rows)[:2] == [
        {"id": "007", "prompt": 'two\nlines, "quoted"', "score": None},
        {"id": "8", "prompt": "täxt", "score": "1.5"},
    ]
    assert [row.line for row in rows] == [2, 4, 5, 7]
    assert [row.error.code for row in rows if isinstance(row, BadRow)] == ["bad_utf8", "bad_csv"]
    path.write_bytes(b"id,prompt\n1\n2,x,y\n3,z\n")
    rows = read(path)
    assert [getattr(row, "error", None) and str(row.error) for row in rows] == [  # type: ignore[union-attr]
        "the row has 1 cells, the header 2",
        "the row has 3 cells, the header 2",
        None,
    ]
    path.write_bytes(b'id,prompt\n1,a\0b\n2,"open\n3,x\n4,y\n')
    rows = read(path)
    assert [(row.line, str(row.error)) for row in rows if isinstance(row, BadRow)] == [
        (2, "the row holds a NUL"),
        (3, "the row is not CSV: a quote is not closed; lines 3 to 5 are lost to it"),
    ]
    monkeypatch.setattr(tables, "_LONGEST_CELL", 10)
    path.write_bytes(b'prompt\n"open\n' + b"long line\n" * 3 + b"z\n")
    assert data_of(read(path)) == [None, {"prompt": "long line"}, {"prompt": "long line"}, {"prompt": "z"}]
    path.write_bytes(b"id,id\n1,2\n")
    with pytest.raises(InputError, match="names 'id' twice"):
        read(path)


def test_a_datasets_folder_and_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS[:9])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows.select(range(5)), "test": rows.select(range(5, 9))}).save_to_disk(
        tmp_path / "several"
    )
    assert data_of(read(tmp_path / "one")) == ROWS[:9]
    assert data_of(read(tmp_path / "several", split="test")) == ROWS[5:9]
    with pytest.raises(InputError, match=r"no split 'valid' \(it has train, test\)"):
        read(tmp_path / "several", split="valid")
    with pytest.raises(InputError, match=r"no split 'test'"):
        read(tmp_path / "one", split="test")
    for saved in ("one", "several"):
        with pytest.raises(InputError, match=r"input\.subset has no effect"):
            read(tmp_path / saved, subset="en")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot be had"):
        read(tmp_path / "empty")


def test_a_dataset_can_be_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_bytes(JSONL)
    source = source_of(tmp_path / "data", streaming=True, limit=5)
    assert not source.can_be_read_twice
    assert data_of(list(source.rows(unique_ids=True))) == ROWS[:5]


def test_a_hub_id_is_no_missing_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Datasets:
        @staticmethod
        def disable_progress_bars() -> None:
            pass

        @staticmethod
        def load_dataset(*args: object, **options: object) -> list[dict[str, Any]]:
            asked.append((args, options))
            return ROWS[:3]

    monkeypatch.setattr(tables, "optional_module", lambda name, extra, where: Datasets)
    assert data_of(read("owner/name", subset="en", split="test")) == ROWS[:3]
    assert asked[-1] == (("owner/name", "en"), {"split": "test", "streaming": False})


def test_a_table_holds_what_json_holds(tmp_path: Path) -> None:
    rows = [
        {"when": datetime.datetime(2026, 1, 2), "x": float("nan"), "raw": b"\x00\xff", "at": {"a": None, "b": [1.5]}}
    ]
    held = {"when": "2026-01-02T00:00:00", "x": None, "raw": "AP8=", "at": {"a": None, "b": [1.5]}}
    assert data_of(list(GivenRows(rows, InputSection()).rows(unique_ids=True))) == [held]
    assert tables.plain(rows[0]["at"]) == {"b": [1.5]}  # in a table, every struct has every field


def test_what_holds_itself_is_its_rows_error() -> None:
    endless: dict[str, Any] = {"prompt": "x"}
    endless["self"] = endless
    first, second = GivenRows([endless, "fine"], InputSection()).rows(unique_ids=True)
    assert isinstance(first, BadRow)
    assert (first.error.code, str(first.error)) == ("bad_value", "a value of the row is nested more than 100 deep")
    assert second.data == {"prompt": "fine"}


def test_a_tables_maps_are_objects_and_its_names_differ(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    kind = pyarrow.map_(pyarrow.string(), pyarrow.float64())
    maps = pyarrow.array([[("top_p", 0.5)], [("top_p", 0.5), ("top_p", 0.6)], None], type=kind)
    write = pytest.importorskip("pyarrow.parquet").write_table
    write(pyarrow.table({"sampling": maps}), tmp_path / "in.parquet")
    rows = read(tmp_path / "in.parquet")
    assert data_of(rows) == [{"sampling": {"top_p": 0.5}}, None, {"sampling": None}]
    twice = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    write(twice, tmp_path / "in.parquet")
    with pyarrow.ipc.new_file(tmp_path / "in.arrow", twice.schema) as writer:
        writer.write_table(twice)
    for name in ("in.parquet", "in.arrow"):
        with pytest.raises(InputError, match=f"{name}: the table names 'prompt' twice"):
            read(tmp_path / name)


def test_bytes_are_kept_but_are_no_prompt(tokenizer: Tokenizer) -> None:
    (row,) = GivenRows([{"prompt": b"Once"}], InputSection()).rows(unique_ids=True)
    assert json.dumps(row.data) == '{"prompt": "T25jZQ=="}'
    builder = PromptBuilder(recipe_from_settings(), tokenizer, max_model_len=99, vocab_size=4096)
    assert isinstance(row, Row)
    with pytest.raises(RowError, match=r"must be a text or a list of token ids, not bytes \(in base64: 'T25jZQ=='\)"):
        builder.build(row)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "dataset"])
def test_what_needs_a_file_is_not_read_from_stdin(kind: str) -> None:
    with pytest.raises(InputError, match=f"input.format={kind} is read from files, not from stdin"):
        source_of("-", format=kind)


def test_a_long_window_of_zstandard_is_unpacked(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    options = zstandard.ZstdCompressionParameters(window_log=30)
    packer = zstandard.ZstdCompressor(compression_params=options).compressobj()
    (tmp_path / "in.jsonl.zst").write_bytes(packer.compress(JSONL) + packer.flush())
    assert data_of(read(tmp_path / "in.jsonl.zst")) == ROWS


def test_a_value_that_cannot_be_read_is_its_rows_error(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    texts = pyarrow.array([b"a", b"\xff", b"c"]).view("string")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"prompt": texts}), tmp_path / "in.parquet")
    rows = read(tmp_path / "in.parquet")
    assert data_of(rows) == [{"prompt": "a"}, None, {"prompt": "c"}]
    assert isinstance(rows[1], BadRow)
    assert (rows[1].line, rows[1].error.code) == (2, "bad_value")


def test_a_dataset_that_breaks_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"prompt": "a"}
        raise RuntimeError("the shard is gone")

    library = types.SimpleNamespace(load_dataset=lambda *_, **__: broken(), disable_progress_bars=lambda: None)
    monkeypatch.setattr(tables, "optional_module", lambda *_: library)
    with pytest.raises(InputError, match="cannot be had: the shard is gone"):
        read(tmp_path, format="dataset", streaming=True)


def test_several_files_are_one_input(tmp_path: Path) -> None:
    for name, part in (("b.jsonl", ROWS[2:4]), ("a.jsonl", ROWS[:2])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part) + "\nbroken\n")
    rows = read(tmp_path / "*.jsonl")
    assert data_of(rows) == [*ROWS[:2], None, *ROWS[2:4], None]
    assert [row.index for row in rows] == list(range(6))
    assert [(Path(str(row.file)).name, row.line) for row in rows][2::3] == [("a.jsonl", 4), ("b.jsonl", 4)]
    assert data_of(read(tmp_path / "b.jsonl", tmp_path / "a.jsonl", limit=4)) == [*ROWS[2:4], None, ROWS[0]]
    assert len(read(tmp_path / "b.jsonl", tmp_path / "*.jsonl")) == 6
    (tmp_path / "c.jsonl").write_text(json.dumps(ROWS[2]))
    (duplicate,) = source_of(tmp_path / "*.jsonl").scan().duplicates
    assert "of line 1 of" in duplicate and "c.jsonl was given before, in line 1 of" in duplicate


def test_ids_that_are_all_the_same_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": 0}\n' * 1000)
    scan = source_of(tmp_path / "in.jsonl").scan()
    assert (scan.rows, scan.num_duplicates, len(scan.duplicates)) == (1000, 999, MAX_SHOWN)
    told = str(duplicates_error(scan.num_duplicates, scan.duplicates, "in"))
    assert told.startswith("in: id 0 of line 2 was given before, in line 1; ")
    assert "line 6 was given before, in line 1; and 994 more (" in told


def test_a_name_with_a_star_in_it_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "a*.jsonl").write_bytes(JSONL)
    assert len(read(tmp_path / "a*.jsonl")) == 700


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("in.jsonl.gz", gzip.compress(JSONL)[:2000], "compressed input is damaged"),
        ("in.jsonl.gz", b"plain", "reading the input failed: Not a gzipped file"),
        ("in.jsonl.zst", b"plain", "compressed input is damaged"),
        ("in.parquet", b"PAR1plain", "not a whole Parquet file"),
        ("in.arrow", b"plain", "not a whole Arrow file"),
        ("in.jsonl", gzip.compress(JSONL), r"this is a gzip file.*gzip -dc unpacks it"),
        ("in.jsonl", b"PAR1plain", r"this is a Parquet file.*input\.format=parquet"),
        ("in.json", b'[{"prompt": "a"}, {"prompt": "b"}]', "array of objects.*jq -c"),
        ("in.json", b'\xef\xbb\xbf[\r\n  {"prompt": "a"}\r\n]\r\n', "JSON over several lines"),
        ("in.json", b'{\n  "prompt": "a"\n}\n', "JSON over several lines"),
        ("in.tsv", b"id\tprompt\n1\ta\n", r"\.tsv files are not read.*input\.format"),
        ("in.jsonl.xz", b"packed", r"\.xz files are not read"),
        ("in.csv", b"PAR1plain\n", r"this is a Parquet file and is read as CSV"),
        ("in.csv", "id,prompt\n1,a\n".encode("utf-16"), "this is a UTF-16 file and is read as CSV"),
        ("in.csv", b"id;prompt\n1;a\n", "header is one cell, 'id;prompt'.*separated by commas"),
        ("in.csv", b'"id"x,prompt\n1,a\n', "header cannot be read"),
        ("in.csv", "id,frage\xe4\n1,a\n".encode("latin-1"), "header is not UTF-8"),
    ],
)
def test_a_file_that_is_not_what_it_says(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    if name.endswith("zst"):
        pytest.importorskip("zstandard")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=part) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_packed_file_that_is_cut_off_is_damaged(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    for name, packed in (("in.jsonl.gz", gzip.compress(JSONL)), ("in.jsonl.zst", zstandard.compress(JSONL))):
        path = tmp_path / name
        for cut in (1, len(packed) // 2):
            path.write_bytes(packed[:-cut])
            with pytest.raises(InputError, match=f"{name}: the compressed input is damaged"):
                read(path)


def test_missing_files_folders_and_libraries(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such input file"):
        source_of(tmp_path / "missing")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "missing")
    for name in ("link.jsonl", "li*"):
        with pytest.raises(InputError, match=r"link.jsonl: there is no such input file: this is a link to nothing"):
            source_of(tmp_path / name)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="a folder among files"):
        source_of(tmp_path / "fold*")
    with pytest.raises(InputError, match=r"needs the package nowhere \(pip install 'specgen\[parquet\]'\)"):
        unpack.optional_module("nowhere.parquet", "parquet", "in")
    if os.geteuid():
        (tmp_path / "secret").touch(mode=0)
        with pytest.raises(InputError, match="Permission denied"):
            source_of(tmp_path / "secret")


def test_a_batch_file_is_known_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
    path.write_text("\n" + json.dumps(request) + "\n")
    source = source_of(path)
    assert source.is_batch
    assert [row.id for row in source.rows(unique_ids=True)] == ["a"]
    assert not source_of(path, format="jsonl").is_batch
    path.write_bytes(JSONL)
    assert not source_of(path).is_batch
    assert source_of(path, format="openai-batch").is_batch


def test_rows_that_are_given(tmp_path: Path) -> None:
    rows = list(GivenRows(["text", {"id": 3}, 5, {"id": 3}], InputSection(prompt="q")).rows(unique_ids=True))  # type: ignore[list-item]
    assert data_of(rows) == [{"q": "text"}, {"id": 3}, None, {"id": 3}]
    assert [row.error.code for row in rows if isinstance(row, BadRow)] == ["not_an_object", "duplicate_id"]
    given = [{"meta": {"a": None, "b": [{"c": None}]}}]
    assert data_of(list(GivenRows(given, InputSection()).rows(unique_ids=True))) == given  # as a line of JSONL has it
    for one in ("text", {"prompt": "text"}):
        with pytest.raises(InputError, match=r"must be several.*\[row\] is one"):
            GivenRows(one, InputSection())  # type: ignore[arg-type]
    for nothing in (None, Path("in.jsonl")):
        with pytest.raises(InputError, match="must be several"):
            GivenRows(nothing, InputSection())  # type: ignore[arg-type]


def test_a_table_of_columns_is_not_taken_for_rows() -> None:
    """Iterating over it gives the names of its columns, which are texts."""
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"id": [1, 2], "prompt": ["a", "b"]})
    with pytest.raises(InputError, match=r"not the columns of a DataFrame \(pandas has \.to_dict\('records'\)"):
        GivenRows(table, InputSection())
    rows = GivenRows(table.to_dict("records"), InputSection()).rows(unique_ids=True)
    assert data_of(list(rows)) == [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}]


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.csv", "in.parquet"])
def test_reading_takes_no_memory_for_rows(tmp_path: Path, name: str) -> None:
    path, pad = tmp_path / name, "x" * 2000
    if name == "in.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist([{"prompt": f"{i}{pad}"} for i in range(5000)])
        write = pytest.importorskip("pyarrow.parquet").write_table
        write(table, path, compression="none", use_dictionary=False)  # one row group of 10 MB
        del table
    elif name == "in.csv":
        path.write_text("prompt\n" + "".join(f"{i}{pad}\n" for i in range(5000)))
    else:
        lines = "".join(json.dumps({"prompt": f"{i}{pad}"}) + "\n" for i in range(5000)).encode()
        path.write_bytes(gzip.compress(lines, 1) if name.endswith("gz") else lines)
    rows = iter(source_of(path).rows(unique_ids=False))
    next(rows)  # imports are not rows
    allocated = pyarrow.total_allocated_bytes if name == "in.parquet" else int  # tracemalloc does not see these
    tracemalloc.start()
    try:
        of_arrow = [allocated() for _ in rows]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(of_arrow) == 4999
    assert peak < 4e6
    assert max(of_arrow) < 6e6
