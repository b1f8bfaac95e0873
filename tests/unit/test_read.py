"""Rows from files: what is read, what each row says of its origin, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sources.formats import parse
from lockstep.data.sources.read import FileInfo, HubName, LineOrigin, parse_hub_name, read_rows
from lockstep.data.sources.rowset import Problems
from lockstep.errors import Problem, Refusal
from lockstep.types import Origin
from refusals import refuses

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+1", "answer": "2", "score": 1, "tags": ["a"], "extra": {"index": 0}},
    {"prompt": "π?\u2028", "answer": None, "score": 0.5, "tags": [], "extra": {"index": 1}},
    {"prompt": 'a "quoted",\ntext', "answer": "x", "score": 2, "tags": ["b", "c"], "extra": {"index": 2}},
]


def jsonl(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, content: bytes | str | Sequence[dict[str, Any]]) -> Path:
    if isinstance(content, str):
        content = content.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(pa.Table.from_pylist(list(content)), path)
    return path


def refusal(path: str, base: Path) -> list[Problem]:
    with pytest.raises(Refusal) as refused:
        read_rows(path, base=base)
    return refused.value.problems


def the_problem(path: str, base: Path) -> Problem:
    (problem,) = refusal(path, base)
    return problem


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", jsonl(ROWS)),
        ("d.ndjson", jsonl(ROWS)),
        ("D.JSONL", jsonl(ROWS)),
        ("d.json", json.dumps(ROWS)),
        ("d.json", json.dumps({"version": "1", "data": ROWS, "notes": []})),
        ("d.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS)),
        ("d.json", b"\xef\xbb\xbf" + json.dumps(ROWS, indent=2).encode()),
        ("d.jsonl", jsonl(ROWS).rstrip()),
        ("d.jsonl", jsonl(ROWS).replace(b"\n", b"\r\n")),
        ("d.jsonl.gz", gzip.compress(jsonl(ROWS), mtime=0)),
        ("d.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("d.parquet", ROWS),
    ],
)
def test_formats_give_the_same_rows(tmp_path: Path, name: str, content: Any) -> None:
    path = write(tmp_path / name, content)
    rows = read_rows(str(path))
    assert list(rows) == [rows[number] for number in range(len(rows))] == ROWS
    assert rows.columns == ("prompt", "answer", "score", "tags", "extra")
    assert rows.ignored == ()
    assert rows.files == (FileInfo(str(path), 3, path.stat().st_size, rows.files[0].sha256),)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_csv(tmp_path: Path, pack: Callable[[bytes], bytes], mark: bytes, end: bytes) -> None:
    name = "d.csv" if pack is bytes else "d.csv.gz"
    write(tmp_path / name, pack(mark + b'q,a\n"one, ""1""\nmore",2\n\n,4\n'.replace(b"\n", end)))
    rows = read_rows(name, base=tmp_path)
    newline = end.decode()
    assert list(rows) == [{"q": f'one, "1"{newline}more', "a": "2"}, {"q": "", "a": "4"}]
    # The first row starts on line 2 and ends on 3; line 4 is blank.
    assert [rows.origin(0), rows.origin(1)] == [LineOrigin(name, 2), LineOrigin(name, 5)]


def test_csv_field_longer_than_the_csv_module_allows(tmp_path: Path) -> None:
    write(tmp_path / "d.csv", "q\n" + "x" * 200_000 + "\n")
    assert len(read_rows("d.csv", base=tmp_path)[0]["q"]) == 200_000


def test_origins_count_lines_from_one_and_rows_from_zero(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'\n{"x": 1}\n\n\n{"x": 2}\n')
    write(tmp_path / "b.json", '[{"x": 1}, {"x": 2}]')
    write(tmp_path / "c.parquet", [{"x": 1}, {"x": 2}])
    said = [str(read_rows(name, base=tmp_path).origin(1)) for name in ("a.jsonl", "b.json", "c.parquet")]
    assert said == ["a.jsonl line 5", "b.json row 1", "c.parquet row 1"]


def test_lines_looked_at_in_parts_are_the_lines_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, their lines and shapes, and all that is wrong, in several processes and in one."""
    odd = [b"", b"7", b'{"x": "\xc3"}', b'{"x": 1, "x": 2}', b'{"y": [1]}', "\ufeff{}".encode(), b'{"x": nul}', b" \r"]
    good = [json.dumps({"x": "a" * n, **({"y": n} if n % 3 else {})}).encode() for n in range(30)]
    for lines in (good, [*good[:9], *odd, *good[9:], *odd], [*odd * 3, b'{"x": "cut'], [b""], [b'{"x": "\xc3']):
        for data in (b"\n".join(lines), b"\n".join(lines) + b"\n"):
            whole, parts = Problems("a"), Problems("a")
            monkeypatch.setattr("lockstep.data.sources.formats.PART_BYTES", 1 << 20)
            expected = parse("jsonl", "a.jsonl", data, whole)
            monkeypatch.setattr("lockstep.data.sources.formats.PART_BYTES", 40)
            found = parse("jsonl", "a.jsonl", data, parts)
            assert (list(found.rows), found.lines) == (list(expected.rows), expected.lines)
            assert found.groups is not None
            assert expected.groups is not None
            assert found.groups.all() == expected.groups.all()
            assert (parts.first, parts.count) == (whole.first, whole.count)


def test_rows_are_fresh_objects(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"x": ["kept"]}\n')
    rows = read_rows("a.jsonl", base=tmp_path)
    rows[0]["x"].append("changed")
    next(iter(rows))["x"].append("changed")
    assert rows[0] == {"x": ["kept"]}


def test_index_beyond_the_end(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"x": 1}\n{"x": 2}\n')
    rows = read_rows("a.jsonl", base=tmp_path)
    assert rows[-1] == {"x": 2}
    for index in (2, -3):
        with pytest.raises(IndexError):
            rows[index]


def test_folder_is_read_by_name_and_names_what_it_ignores(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "sub").mkdir(parents=True)
    write(folder / "c.parquet", [{"x": 3, "y": "c"}])
    write(folder / "a.jsonl", b'{"x": 1, "y": "a"}\n{"y": "a", "x": 1.5}\n')
    write(folder / "b.json.gz", gzip.compress(b'[{"y": null, "x": 2}]', mtime=0))
    for name in ("README.md", "LICENSE", ".hidden.jsonl", "d.parquet.tmp", "e.parquet.gz"):
        write(folder / name, b"not data")
    rows = read_rows("set", base=tmp_path)
    assert [row["x"] for row in rows] == [1, 1.5, 2, 3]
    assert [file.name for file in rows.files] == [f"set/{name}" for name in ("a.jsonl", "b.json.gz", "c.parquet")]
    assert [file.rows for file in rows.files] == [2, 1, 1]
    assert [rows.origin(number) for number in range(4)] == [
        LineOrigin("set/a.jsonl", 1),
        LineOrigin("set/a.jsonl", 2),
        Origin("set/b.json.gz", 0),
        Origin("set/c.parquet", 0),
    ]
    assert rows.ignored == (
        "set/.hidden.jsonl",
        "set/LICENSE",
        "set/README.md",
        "set/d.parquet.tmp",
        "set/e.parquet.gz",
        "set/sub/",
    )


def test_pattern(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    write(tmp_path / "deep" / "train-1.jsonl", b'{"x": 1}\n')
    write(tmp_path / "deep" / "er" / "train-2.jsonl", b'{"x": 2}\n')
    write(tmp_path / "deep" / "tail-0.jsonl", b'{"x": 0}\n')
    assert [row["x"] for row in read_rows("deep/train-*.jsonl", base=tmp_path)] == [1]
    assert [row["x"] for row in read_rows("**/train-*.jsonl", base=tmp_path)] == [2, 1]
    assert [row["x"] for row in read_rows(str(tmp_path / "deep/t*.jsonl"))] == [0, 1]
    assert "matches no file" in the_problem("deep/val-*.jsonl", tmp_path).why


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    write(tmp_path / "d[1].jsonl", b'{"x": 1}\n')
    assert read_rows("d[1].jsonl", base=tmp_path)[0] == {"x": 1}


def test_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl", b'{"x": 1}\n')
    monkeypatch.chdir(tmp_path)
    assert str(read_rows("a.jsonl").origin(0)) == "a.jsonl line 1"


def test_partition_folders_add_no_columns(tmp_path: Path) -> None:
    (tmp_path / "lang=en").mkdir()
    write(tmp_path / "lang=en" / "a.parquet", [{"x": 1}])
    assert read_rows("lang=en/a.parquet", base=tmp_path)[0] == {"x": 1}


def test_parquet_random_access_over_row_groups(tmp_path: Path) -> None:
    table = pa.table({"x": list(range(20_000)), "s": [str(number) for number in range(20_000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    rows = read_rows("a.parquet", base=tmp_path)
    for index in (0, 699, 700, 8191, 8192, 19_999, 12_345):
        assert rows[index] == {"x": index, "s": str(index)}
    assert [row["x"] for row in rows] == list(range(20_000))


def test_a_million_parquet_rows_stay_in_arrow(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(range(1_000_000)), "s": pa.array(["some text"] * 1_000_000)})
    pq.write_table(table, tmp_path / "a.parquet")
    tracemalloc.start()
    rows = read_rows("a.parquet", base=tmp_path)
    for index in range(0, 1_000_000, 1000):
        assert rows[index]["x"] == index
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 1_000_000
    # Arrow's memory is not counted here; a million dicts would be more than 180 MB of Python objects.
    assert peak < 20_000_000


def test_pandas_style_categories_are_strings(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(["a", "b", "a"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    write(tmp_path / "b.jsonl", b'{"x": "c"}\n')
    assert [row["x"] for row in read_rows("*", base=tmp_path)] == ["a", "b", "a", "c"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc.", max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(st.lists(JSON, min_size=1, max_size=5), st.booleans())
def test_jsonl_gives_back_what_json_wrote(tmp_path: Path, values: list[Any], ascii_only: bool) -> None:
    # Wrapped in a list, so that every row has the same kind.
    rows = [{"value": [value]} for value in values]
    text = "\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    write(tmp_path / "a.jsonl", text)
    assert list(read_rows("a.jsonl", base=tmp_path)) == rows


# --- fingerprint ------------------------------------------------------------------------------------------------------


def test_fingerprint_is_of_the_contents_in_order(tmp_path: Path) -> None:
    def fingerprint(**files: bytes) -> str:
        folder = tmp_path / "-".join(files)
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            write(folder / f"{name}.jsonl", content)
        return read_rows(str(folder)).fingerprint

    one, two = b'{"x": 1}\n', b'{"x": 2}\n'
    assert fingerprint(a=one, b=two) == fingerprint(c=one, d=two)
    assert fingerprint(a=one, b=two) != fingerprint(a=two, b=one)
    assert fingerprint(a=one, b=two) != fingerprint(e=one + two)
    assert len({fingerprint(a=one, b=two), fingerprint(f=one), fingerprint(g=one + b"\n")}) == 3


def test_file_info_by_hand(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"x": 1}\n')
    # printf '{"x": 1}\n' | sha256sum, and the same over that line without a newline
    assert read_rows("a.jsonl", base=tmp_path).files == (FileInfo("a.jsonl", 1, 9, SHA_OF_FILE),)
    assert read_rows("a.jsonl", base=tmp_path).fingerprint == SHA_OF_SHA


SHA_OF_FILE = "936353965b4ba9180e3acb781d81aa634390ac95fd2874a9cbc4c4846b49fbd4"
SHA_OF_SHA = "67699ebc615c3178bab855b5f94a2b5e601c8634db0329e950b5bd6a22102c9e"


# --- what is refused: the files ---------------------------------------------------------------------------------------


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", b'{"x": 1}\n')
    problem = the_problem("trian.jsonl", tmp_path)
    assert (problem.where, problem.code) == ("trian.jsonl", "no-such-file")
    assert problem.remedy.endswith(": train.jsonl")


def test_missing_folder_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    problem = the_problem("gsm8/deep/train.jsonl", tmp_path)
    assert problem.code == "no-such-file"
    assert "'gsm8'" in problem.why
    assert problem.remedy.endswith(": gsm8k")


def test_a_hub_name_without_prefix(tmp_path: Path) -> None:
    assert "write hub:openai/gsm8k" in the_problem("openai/gsm8k", tmp_path).remedy


@pytest.mark.parametrize("name", ["data.xml", "data.parquet.gz", "data", "data.gz"])
def test_unsupported_suffix(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, b"x")
    problem = the_problem(name, tmp_path)
    assert problem.where == name
    assert ".parquet, .arrow, .jsonl, .ndjson, .json, .csv" in problem.remedy


def test_folder_without_data(tmp_path: Path) -> None:
    (tmp_path / "set" / "sub").mkdir(parents=True)
    write(tmp_path / "set" / "README.md", b"x")
    problem = the_problem("set", tmp_path)
    assert problem.why == "holds no data file; ignored: set/README.md, set/sub/"
    assert "set/**/*.parquet" in problem.remedy


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> Path:
    """As `Dataset.save_to_disk` writes its rows."""
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        for batch in table.to_batches(max_chunksize=2):
            stream.write_batch(batch)
    return path


def test_a_data_set_saved_to_disk(tmp_path: Path) -> None:
    rows = [{"x": number, "y": [str(number)]} for number in range(5)]
    saved = arrow_stream(tmp_path / "set" / "data-00000-of-00001.arrow", rows)
    for name in ("state.json", "dataset_info.json", "cache-0f.arrow"):
        write(tmp_path / "set" / name, b"{}")
    found = read_rows("set", base=tmp_path)
    assert list(found) == rows
    assert found.ignored == ("set/cache-0f.arrow", "set/dataset_info.json", "set/state.json")
    assert str(found.origin(3)) == "set/data-00000-of-00001.arrow row 3"
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    assert list(read_rows("file.arrow", base=tmp_path)) == rows
    whole = saved.read_bytes()
    for cut in (8, 40, 300):
        write(saved, whole[:-cut])
        assert the_problem("set", tmp_path).remedy == "copy or download it again"


def test_the_splits_of_a_data_set_are_not_read_together(tmp_path: Path) -> None:
    """The folder of one holds its test rows too."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        write(tmp_path / "set" / "data" / f"{name}.parquet", ROWS)
    for path in ("set/data", "set/**/*.parquet"):
        problem = the_problem(path, tmp_path)
        assert problem.code == "several-candidates"
        assert "test (set/data/test-00000-of-00001.parquet), tr" in problem.why
        assert "set/data/train-00000-of-00002.parquet" in problem.remedy
    assert len(read_rows("set/data/train*", base=tmp_path)) == 2 * len(ROWS)
    remedy = the_problem("set", tmp_path).remedy
    assert "set/data/" in remedy
    assert "set/**/*.parquet" in remedy
    arrow_stream(tmp_path / "dict" / "train" / "data.arrow", ROWS)
    arrow_stream(tmp_path / "dict" / "validation" / "data.arrow", ROWS)
    assert "train (dict/train/data.arrow), validation (" in the_problem("dict/*/*", tmp_path).why
    # A folder that is called so itself says nothing of its files.
    write(tmp_path / "test" / "train.jsonl", b'{"x": 1}')
    write(tmp_path / "test" / "more.jsonl", b'{"x": 1}')
    assert len(read_rows("test", base=tmp_path)) == 2


def test_a_file_for_each_row(tmp_path: Path) -> None:
    for number in (1, 2):
        row = {"problem": f"{number}?", "level": "Level 1", "solution": "4"}
        write(tmp_path / "MATH" / "train" / "algebra" / f"{number}.json", json.dumps(row).encode())
    assert [row["problem"] for row in read_rows("MATH/train/*/*.json", base=tmp_path)] == ["1?", "2?"]


def test_the_index_column_of_a_table(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", b",prompt,response\n0,a,b\n")
    assert list(read_rows("t.csv", base=tmp_path)) == [{"Unnamed: 0": "0", "prompt": "a", "response": "b"}]


def test_a_list_in_a_file_of_lines_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", b'[\n{"x": 1},\n{"x": 2}\n]\n')
    problem = the_problem("t.jsonl", tmp_path)
    assert (problem.where, problem.code) == ("t.jsonl line 1", "invalid-json")
    assert "is one JSON list over several lines" in problem.why
    assert problem.remedy.endswith("mv t.jsonl t.json")
    write(tmp_path / "t.jsonl", b'{\n "x": 1\n}\n')
    assert "is one JSON object over several lines" in the_problem("t.jsonl", tmp_path).why


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (b'{"x": 1,}', "remove the comma after the last value"),
        (b'{"x": [1, 2,]}', "remove the comma after the last value"),
        (b"{'x': 1}", "JSON has double quotes; Python's json.dumps(row) writes a valid line"),
        (b'{"x": 1} {"x": 2}', "correct the line; Python's json.dumps(row) writes a valid one"),
    ],
)
def test_invalid_json_has_a_remedy(tmp_path: Path, line: bytes, remedy: str) -> None:
    write(tmp_path / "t.jsonl", b'{"x": 1}\n' + line + b'\n{"x": 1}\n')
    problem = the_problem("t.jsonl", tmp_path)
    assert (problem.where, problem.code, problem.remedy) == ("t.jsonl line 2", "invalid-json", remedy)
    if b"} {" not in line:
        write(tmp_path / "t.json", b"[" + line + b"]")
        assert the_problem("t.json", tmp_path).remedy == remedy


def test_empty_path(tmp_path: Path) -> None:
    assert the_problem("", tmp_path).code == "empty-value"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.parquet", b""),
        ("a.jsonl", b"\n\n"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.json", b"[]"),
        ("a.json", b" \n"),
        ("a.csv", b"q,a\n"),
        ("a.csv", b"\n"),
        ("a.jsonl", b"{}\n{}\n"),
    ],
)
def test_no_rows(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path / name, content)
    problem = the_problem(name, tmp_path)
    assert (problem.where, problem.code) == (name, "no-rows")


def test_parquet_without_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert the_problem("a.parquet", tmp_path).code == "no-rows"


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_git_lfs_pointer(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    problem = the_problem(name, tmp_path)
    assert problem.code == "damaged-file"
    assert "git lfs pull" in problem.remedy


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    problem = the_problem("set", tmp_path)
    assert (problem.where, problem.code) == ("set/a.jsonl", "unreadable")
    assert "No such file" in problem.why


# --- what is refused: damaged contents --------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.floats(0, 1, exclude_max=True))
def test_parquet_cut_anywhere_is_refused(tmp_path: Path, fraction: float) -> None:
    whole = write(tmp_path / "whole.parquet", ROWS).read_bytes()
    write(tmp_path / "a.parquet", whole[: int(len(whole) * fraction)])
    assert the_problem("a.parquet", tmp_path).where == "a.parquet"


def test_truncated_parquet(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", ROWS).read_bytes()
    write(tmp_path / "a.parquet", whole[:-100])
    problem = the_problem("a.parquet", tmp_path)
    assert problem.code == "damaged-file"
    assert "footer" in problem.why
    write(tmp_path / "a.parquet", b"PAR1")
    assert the_problem("a.parquet", tmp_path).code == "damaged-file"
    write(tmp_path / "a.parquet", b'{"x": 1}\n')
    assert the_problem("a.parquet", tmp_path).code == "unsupported-format"


def test_damaged_parquet_page(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": ["text"] * 5000}), tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[20:60] = b"\xff" * 40
    write(tmp_path / "a.parquet", bytes(whole))
    assert the_problem("a.parquet", tmp_path).why.startswith("damaged parquet: ")


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    values = pa.array([b"good", b"good", b"\xff\xfe"] + [b"good"] * 9000).cast(pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(values), values.buffers())
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    problem = the_problem("a.parquet", tmp_path)
    assert problem.where == "a.parquet row 2"
    assert "UTF8" in problem.why


def test_parquet_column_twice(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    problem = the_problem("a.parquet", tmp_path)
    assert problem.code == "duplicate-name"
    assert "'x'" in problem.why


def test_truncated_jsonl(tmp_path: Path) -> None:
    whole = jsonl(ROWS)
    start_of_last = whole.rstrip().rindex(b"\n") + 1
    for end in range(start_of_last + 1, len(whole) - 1):
        write(tmp_path / "a.jsonl", whole[:end])
        problem = the_problem("a.jsonl", tmp_path)
        assert (problem.where, problem.code) == ("a.jsonl line 3", "damaged-file")


def test_truncated_jsonl_inside_a_character(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"x": "a"}\n{"x": "π'.encode()[:-1])
    problem = the_problem("a.jsonl", tmp_path)
    assert (problem.where, problem.code) == ("a.jsonl line 2", "damaged-file")
    assert "0xcf at byte 8" in problem.why


def test_invalid_json_in_the_middle(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"x": 1}\n{"x" 2}\n{"x": 3}\n{"x": 4,}\n{"x": 5}\n')
    first, second = refusal("a.jsonl", tmp_path)
    assert (first.where, first.code) == ("a.jsonl line 2", "invalid-json")
    assert "line 2, column 6" in first.why
    assert (second.where, second.code) == ("a.jsonl line 4", "invalid-json")


def test_a_broken_line_before_the_last_is_not_called_truncation(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"x": "text\n{"x": "text"}')
    problem = the_problem("a.jsonl", tmp_path)
    assert (problem.where, problem.code) == ("a.jsonl line 1", "invalid-json")


@pytest.mark.parametrize(
    ("line", "kind"), [(b"[1]", "a list"), (b"3", "a number"), (b'"t"', "a string"), (b"null", "null")]
)
def test_jsonl_line_that_is_not_an_object(tmp_path: Path, line: bytes, kind: str) -> None:
    write(tmp_path / "a.jsonl", b'{"x": 1}\n' + line + b"\n")
    problem = the_problem("a.jsonl", tmp_path)
    assert (problem.where, problem.code) == ("a.jsonl line 2", "invalid-row")
    assert kind in problem.why


@pytest.mark.parametrize(
    ("content", "where", "code", "value"),
    [
        ('[{"x": 1},\n {"x": 2', "a.json line 2", "damaged-file", ""),
        ('[{"x": 1},\n {"x": "te', "a.json line 2", "damaged-file", ""),
        ('[{"x": 1},\n {"x" 2}]', "a.json line 2", "invalid-json", "line 2, column 7"),
        ('{"x": 1}\n{"x": 2}\n', "a.json line 2", "invalid-json", "Extra data"),
        ('[{"x": 1}, 5]', "a.json row 1", "invalid-row", "a number"),
        ('{"a": [{"x": 1}], "b": [{"x": 1}]}', "a.json", "invalid-row", "('a', 'b')"),
        ('{"features": ["x"]}', "a.json", "invalid-row", ""),
        ("3", "a.json", "invalid-row", "a number"),
        ('[{"x": 1, "x": 2}]', "a.json", "invalid-json", "'x'"),
        ("[" * 100_000, "a.json", "invalid-json", ""),
    ],
)
def test_json_refusals(tmp_path: Path, content: str, where: str, code: str, value: str) -> None:
    write(tmp_path / "a.json", content)
    problem = the_problem("a.json", tmp_path)
    assert (problem.where, problem.code) == (where, code)
    assert value in problem.why


def test_json_lines_under_the_wrong_name(tmp_path: Path) -> None:
    write(tmp_path / "a.json", jsonl(ROWS))
    assert ".jsonl format" in the_problem("a.json", tmp_path).remedy


def test_key_twice_and_half_a_character(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"x": "\\ud83d\\ude00"}\n{"x": "a", "x": "b"}\n{"x": "\\ud83d"}\n')
    twice, half = refusal("a.jsonl", tmp_path)
    assert (twice.where, half.where) == ("a.jsonl line 2", "a.jsonl line 3")
    assert (twice.code, half.code) == ("invalid-json", "invalid-json")
    assert "'x'" in twice.why
    assert "surrogate" in half.why


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_bytes_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, b'{"x": 1}\n{"x": "\xe9"}\n')
    problem = the_problem(name, tmp_path)
    assert (problem.where, problem.code) == (f"{name} line 2", "not-utf8")
    assert f"iconv -f WINDOWS-1252 -t UTF-8 {name} >" in problem.remedy
    assert "0xe9 at byte 8" in problem.why


def test_gzip_damage(tmp_path: Path) -> None:
    packed = gzip.compress(jsonl(ROWS))
    write(tmp_path / "a.jsonl.gz", packed[:-10])
    problem = the_problem("a.jsonl.gz", tmp_path)
    assert problem.code == "damaged-file"
    assert "truncated" in problem.why
    write(tmp_path / "a.jsonl.gz", jsonl(ROWS))
    assert the_problem("a.jsonl.gz", tmp_path).code == "damaged-file"
    write(tmp_path / "a.jsonl.gz", packed[:10] + b"\x07" + packed[11:])  # no such block type
    assert the_problem("a.jsonl.gz", tmp_path).code == "damaged-file"


@pytest.mark.parametrize(
    ("content", "line", "code", "value"),
    [
        (b"q,a\n1,2\n3\n5,6\n", 3, "invalid-csv", "1 fields"),
        (b'q,a\n"1\n1",2\n3,4,5\n5,6\n', 4, "invalid-csv", "3 fields"),
        (b"q,a\n1,2\n3", 3, "damaged-file", "1 fields"),
        (b'q,a\n1,2\n3,"unfin', 3, "damaged-file", "quoted"),
        (b'q,a\n1,2\n"3"x,4\n', 3, "invalid-csv", "',' expected after '\"'"),
        (b"q,q\n1,2\n", 1, "duplicate-name", "'q'"),
        (b"p,,q\n0,1,2\n", 1, "invalid-csv", "without a name"),
        (b"p;q\n0;1\n", 1, "invalid-csv", "'p;q'"),
    ],
)
def test_csv_refusals(tmp_path: Path, content: bytes, line: int, code: str, value: str) -> None:
    write(tmp_path / "a.csv", content)
    problem = the_problem("a.csv", tmp_path)
    assert (problem.where, problem.code) == (f"a.csv line {line}", code)
    assert value in problem.why


# --- what is refused: mixed schemas -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "unit"), [("a.jsonl", "line"), ("a.json", "row")])
@pytest.mark.parametrize("odd", [0, 2, 4])
def test_odd_row_is_named_wherever_it_stands(tmp_path: Path, name: str, unit: str, odd: int) -> None:
    rows: list[dict[str, Any]] = [{"question": "a", "answer": "b"} for _ in range(5)]
    rows[odd] = {"question": ["a"], "label": 1}
    write(tmp_path / name, jsonl(rows) if unit == "line" else json.dumps(rows))
    first = 1 if unit == "line" else 0
    norm = first + (1 if odd == 0 else 0)
    problem = the_problem(name, tmp_path)
    assert (problem.where, problem.code) == (f"{name} {unit} {odd + first}", "mixed-rows")
    extra, lacking, other = problem.why.split("; ")
    assert "'label'" in extra
    assert "'answer'" in lacking
    assert f"{unit} {norm}" in lacking
    assert re.search(f"'question' .*list.* string .*{unit} {norm}", other)


@pytest.mark.parametrize(
    ("values", "agrees"),
    [
        (["a", None, "b"], True),
        ([1, 2.5, None], True),
        ([None, None, None], True),
        ([[1], [], ["a"]], True),
        (["a", "b", 1], False),
        ([1, 2, True], False),
        ([[1], [1], {"a": 1}], False),
        (["a", "b", ["a"]], False),
    ],
)
def test_kinds(tmp_path: Path, values: list[Any], agrees: bool) -> None:
    write(tmp_path / "a.jsonl", jsonl([{"prompt": value} for value in values]))
    if agrees:
        assert [row["prompt"] for row in read_rows("a.jsonl", base=tmp_path)] == values
    else:
        assert the_problem("a.jsonl", tmp_path).where == "a.jsonl line 3"


def test_first_ten_problems_and_a_count(tmp_path: Path) -> None:
    lines = [b'{"x": 1}'] * 30 + [b"broken"] * 25 + [b'{"x": 2}']
    write(tmp_path / "a.jsonl", b"\n".join(lines))
    problems = refusal("a.jsonl", tmp_path)
    assert [problem.where for problem in problems] == [f"a.jsonl line {n}" for n in range(31, 41)] + ["a.jsonl"]
    assert problems[-1].why == "has 15 more problems like these"


def test_every_file_of_a_set_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", b'{"prompt": 1}\nbroken\n')
    write(tmp_path / "b.parquet", b"PAR1 cut off here")
    write(tmp_path / "c.csv", b"")
    write(tmp_path / "d.jsonl", b'{"prompt": 1}\n')
    write(tmp_path / "e.jsonl", b'{"response": 1}\n')
    where = [problem.where for problem in refusal("*", tmp_path)]
    assert where == ["a.jsonl line 2", "b.parquet", "c.csv", "e.jsonl"]


@pytest.mark.parametrize(
    ("files", "odd", "parts"),
    [
        (
            {"a.parquet": [{"prompt": "1", "response": 1}], "b.parquet": [{"prompt": "1", "answer": 1}]},
            "b.parquet",
            ["'answer'", "'response'", "a.parquet"],
        ),
        (
            {"a.parquet": [{"prompt": "1"}], "b.jsonl": jsonl([{"prompt": ["1"]}])},
            "b.jsonl",
            ["'prompt'", "list", "string", "a.parquet"],
        ),
        (
            {
                "a.jsonl": jsonl([{"prompt": {"response": 1}}]),
                "b.jsonl": jsonl([{"prompt": "1"}]),
                "c.csv": b"prompt\n1\n",
            },
            "a.jsonl",
            ["'prompt'", "object", "string", "b.jsonl"],
        ),
        (
            {"a.jsonl": jsonl([{"prompt": None}, {"prompt": 1}]), "b.csv": b"prompt\n1\n"},
            "b.csv",
            ["'prompt'", "string", "number", "a.jsonl"],
        ),
    ],
)
def test_files_that_disagree(tmp_path: Path, files: dict[str, Any], odd: str, parts: list[str]) -> None:
    for name, content in files.items():
        write(tmp_path / name, content)
    problem = the_problem("*", tmp_path)
    assert (problem.where, problem.code) == (odd, "mixed-rows")
    assert re.search(".*".join(parts), problem.why)
    assert "separate sources" in problem.remedy


def test_files_that_agree_but_for_null_and_width(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([1], pa.int32()), "y": pa.array([None])}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"y": pa.array(["t"]), "x": pa.array([0.5])}), tmp_path / "b.parquet")
    write(tmp_path / "c.jsonl", b'{"x": null, "y": "u"}\n')
    assert list(read_rows("*", base=tmp_path)) == [{"x": 1, "y": None}, {"x": 0.5, "y": "t"}, {"x": None, "y": "u"}]


def test_columns_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    """An id that is a number in one row and a text in the next, a remark that one file has and the other has not."""
    write(tmp_path / "a.jsonl", jsonl([{"text": "t", "id": 1}, {"text": "u", "id": "x"}, {"text": "v", "id": [2]}]))
    write(tmp_path / "b.csv", b"text,remark\nw,good\n")
    rows = read_rows("*", base=tmp_path)
    assert [row["text"] for row in rows] == ["t", "u", "v", "w"]
    assert rows.columns == ("text", "id", "remark")
    assert rows.partly == {"id": 3, "remark": 1}


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    assert the_problem("pipe.jsonl", tmp_path).code == "not-a-file"
    assert the_problem("loop.jsonl", tmp_path).code == "no-such-file"
    write(tmp_path / "rows.jsonl", jsonl([{"text": "t"}]))
    assert the_problem("*.jsonl", tmp_path).where == "pipe.jsonl"
    (tmp_path / "pipe.jsonl").unlink()
    problem = the_problem("*.jsonl", tmp_path)
    assert (problem.where, problem.code) == ("loop.jsonl", "unreadable")


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hub:openai/gsm8k", HubName("openai/gsm8k", None, None)),
        ("hub:openai/gsm8k:main", HubName("openai/gsm8k", "main", None)),
        ("hub:openai/gsm8k:main:train", HubName("openai/gsm8k", "main", "train")),
        ("hub:openai/gsm8k::train", HubName("openai/gsm8k", None, "train")),
        ("hub:openai/gsm8k:main:train[:10%]", HubName("openai/gsm8k", "main", "train[:10%]")),
    ],
)
def test_hub_names(given: str, expected: HubName) -> None:
    assert parse_hub_name(given) == expected


def test_hub_name_of_nothing() -> None:
    with refuses("hub:", "invalid-name"):
        parse_hub_name("hub:")


@pytest.mark.skipif(find_spec("datasets") is not None, reason="datasets is installed")
def test_hub_without_the_package() -> None:
    with refuses("package datasets", "missing-package", "hub:openai/gsm8k", remedy="[hub]"):
        read_rows("hub:openai/gsm8k:main:train")


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package reads its settings when imported, so they are set on it, not in the environment."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_hub_package_on_a_local_folder(datasets_cache: Path) -> None:
    folder = datasets_cache / "set"
    folder.mkdir()
    write(folder / "train.parquet", ROWS)
    write(folder / "test.parquet", ROWS[:1])
    rows = read_rows(f"hub:{folder}::train")
    assert list(rows) == [rows[number] for number in range(3)] == ROWS
    assert rows.origin(2) == Origin(f"hub:{folder}::train", 2)
    assert rows.columns == ("prompt", "answer", "score", "tags", "extra")
    assert read_rows(f"hub:{folder}::train").fingerprint == rows.fingerprint
    assert read_rows(f"hub:{folder}::train[:2]").fingerprint != rows.fingerprint
    with refuses(f"hub:{folder}", "several-candidates", "train, test"):
        read_rows(f"hub:{folder}")


def test_hub_failure_says_why(datasets_cache: Path) -> None:
    with refuses("hub:nobody/nothing-here", "hub-failed"):
        read_rows("hub:nobody/nothing-here")


def test_a_hub_that_cannot_be_reached_is_asked_once(datasets_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself would try again for a minute, and the refusal would speak of the form of the name."""
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    problem = the_problem("hub:nobody/unreached", datasets_cache)
    assert problem.code == "hub-failed"
    assert "(http://127.0.0.1:9)" in problem.why
    assert "copy the files" in problem.remedy
