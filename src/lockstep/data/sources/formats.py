"""Parses parquet, arrow, jsonl, json, csv, tsv and txt files completely.

Problems are reported by row or line. Parsing continues after a problem where possible.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import shlex
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lockstep.data.parallel import in_processes, processes_here
from lockstep.data.sources.rowset import JsonRows, LineOrigin, Problems, ShapeGroups, a, kind_of
from lockstep.types import Origin, Row

_MAGIC, _ARROW_MAGIC, _ARROW_END = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
_BATCH_ROWS = 8192  # keeps a batch of long answers below Arrow's limit of 2 GiB per string column
_INDEX = "Unnamed: 0"
_TRUNCATED = "the file looks truncated"
_COPY_AGAIN = "copy or download it again"
_IS_JSONL = "a file with one object per line is in the .jsonl format: rename the file"
PART_BYTES = 8 << 20  # bytes of JSON lines per worker task, which takes about 0.1 s
_NO_FIELD_LIMIT = 2**31 - 1  # maximum field size; the csv module's default of 128 KiB is shorter than a long answer


@dataclass
class Parsed:
    """The rows of a file, in file order. `lines` are the line numbers of the rows (None for json). `groups` are the
    rows grouped by columns and value kinds, or None if the parser did not group them."""

    rows: Sequence[Row] = field(default_factory=list)
    lines: Sequence[int] | None = None
    groups: ShapeGroups | None = None


def parse(format: str, name: str, data: bytes, problems: Problems) -> Parsed:
    """Parses a text file. The format of a txt file is `txt.` and the value of `data.sample_by`."""
    return _PARSERS[format](name, data.removeprefix(codecs.BOM_UTF8), problems)


def _parse_jsonl(name: str, data: bytes, problems: Problems) -> Parsed:
    if (value := _over_several_lines(data)) is not None:
        why = f"is one JSON {value} over several lines, but a .jsonl file has one object per line"
        move = f"mv {shlex.quote(name)} {shlex.quote(name.removesuffix('.jsonl') + '.json')}"
        problems.add(LineOrigin(name, 1), why, f"change the suffix here and in the recipe: {move}", code="invalid-json")
        return Parsed()
    last = data.rstrip().count(b"\n") + 1
    parts = _line_parts(data)
    done = dict(in_processes(lambda part: _parse_lines(name, data, last, part), parts, processes_here(len(parts))))
    starts, ends, lines, groups = array("q"), array("q"), array("q"), ShapeGroups()
    for part in parts:
        found = done.pop(part)
        starts, ends, lines = starts + found.starts, ends + found.ends, lines + found.lines
        groups.extend(found.groups)
        problems.extend(found.problems)
    return Parsed(JsonRows(data, starts, ends), lines, groups)


def _over_several_lines(data: bytes) -> str | None:
    """Returns "list" or "object" if the file is one JSON value that continues after the first line."""
    first = data.lstrip().partition(b"\n")[0].strip()
    if not first.startswith(b"[") and first != b"{":
        return None
    try:
        json.loads(first)
    except ValueError:
        return "object" if first == b"{" else "list"
    return None


@dataclass
class _JsonLines:
    """The parsed part of a JSON lines file: byte offsets of its valid rows, and problems of its invalid lines."""

    problems: Problems
    starts: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q"))
    lines: array[int] = field(default_factory=lambda: array("q"))
    groups: ShapeGroups = field(default_factory=ShapeGroups)


def _line_parts(data: bytes) -> list[tuple[int, int, int]]:
    """Splits the data at line ends. Returns (first byte, end, number of the first line) of each part."""
    parts, start, line = [], 0, 1
    while start < len(data):
        end = data.find(b"\n", start + PART_BYTES) + 1 or len(data)
        parts.append((start, end, line))
        line += data.count(b"\n", start, end)
        start = end
    return parts


def _parse_lines(name: str, data: bytes, last: int, part: tuple[int, int, int]) -> _JsonLines:
    end, behind, first = part
    found = _JsonLines(Problems(name))
    problems = found.problems
    stream = io.BytesIO(data)
    stream.seek(end)
    # Split only at \n: str.splitlines would also split at U+2028, which may occur inside a JSON string.
    for line, raw in enumerate(stream, start=first):
        if end == behind:
            break
        start, end = end, end + len(raw)
        raw = raw.strip()
        if not raw:
            continue
        try:
            text = raw.decode()
            value = _load(text)
        except UnicodeDecodeError as error:
            at_end = line == last and error.end == len(raw)
            _report_bytes(LineOrigin(name, line), error, problems, at_end=at_end)
        except json.JSONDecodeError as error:
            cut = line == last and raw[:1] == b"{" and (not data.endswith(b"\n") or _ran_out(error, text))
            why = f"invalid JSON at line {line}, column {error.colno}: {error.msg}"
            why += f"; {_TRUNCATED}" if cut else ""
            problems.add(
                LineOrigin(name, line),
                why,
                _COPY_AGAIN if cut else _one_a_line(raw, line) or _json_remedy(text, error),
                code="damaged-file" if cut else "invalid-json",
            )
        except (ValueError, RecursionError) as error:
            problems.add(LineOrigin(name, line), f"JSON that cannot be read: {error}", code="invalid-json")
        else:
            if isinstance(value, dict):
                found.starts.append(start)
                found.ends.append(end)
                found.lines.append(line)
                found.groups.add(value)
            else:
                remedy = "a file with one JSON list needs the suffix .json" if isinstance(value, list) else ""
                problems.add(
                    LineOrigin(name, line), f"is {a(kind_of(value))}, not an object", remedy, code="invalid-row"
                )
    return found


def json_line(name: str, line: int, raw: bytes) -> Row | None:
    """Returns the row of one line of a JSON lines file, or None for a blank line. Raises `Refusal` for an invalid
    line."""
    raw = raw.strip()
    if not raw:
        return None
    try:
        value = _load(raw.decode())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        _parse_lines(name, raw, 0, (0, len(raw), line)).problems.refuse()
    row: Row = value
    return row


def _one_a_line(raw: bytes, line: int) -> str:
    if line == 1 and raw in (b"[", b"{"):
        return "a .jsonl file has one object per line; for a list or object over several lines, use the suffix .json"
    return ""


def _json_remedy(text: str, error: json.JSONDecodeError) -> str:
    at = text[error.pos : error.pos + 1]
    if at == "'":
        return "JSON has double quotes; Python's json.dumps(row) writes a valid line"
    # Python 3.13 reports a trailing comma at the comma, older versions behind it.
    if "trailing comma" in error.msg or (at in ("}", "]") and text[: error.pos].rstrip().endswith(",")):
        return "remove the comma after the last value"
    return "correct the line; Python's json.dumps(row) writes a valid one"


def _parse_json(name: str, data: bytes, problems: Problems) -> Parsed:
    text = _decode(name, data, problems)
    if text is None or not text.strip():
        return Parsed()
    try:
        value = _load(text)
    except json.JSONDecodeError as error:
        where = LineOrigin(name, error.lineno)
        why = f"invalid JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        if _ran_out(error, text):
            problems.add(where, f"{why}; {_TRUNCATED}", _COPY_AGAIN, code="damaged-file")
        else:
            remedy = _IS_JSONL if error.msg == "Extra data" else _json_remedy(text, error)
            problems.add(where, why, remedy, code="invalid-json")
        return Parsed()
    except (ValueError, RecursionError) as error:
        problems.add(name, f"JSON that cannot be read: {error}", code="invalid-json")
        return Parsed()
    return Parsed(_objects(name, _the_list(name, value, problems), problems))


def _the_list(name: str, value: Any, problems: Problems) -> list[Any]:
    """Returns the rows of a JSON file. The file is a list of rows, an object with one such list ({"data": [...]}), or
    one row."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        problems.add(name, f"holds {a(kind_of(value))}, not a list of objects", code="invalid-row")
        return []
    lists = {key: inner for key, inner in value.items() if isinstance(inner, list) and _has_objects(inner)}
    if len(lists) == 1:
        return next(iter(lists.values()))
    if not any(isinstance(inner, list | dict) for inner in value.values()):
        return [value]  # the file is one row, as in the MATH data set
    content = f"several lists of objects ({', '.join(map(repr, lists))})" if lists else "no list of objects"
    problems.add(
        name,
        f"is an object with {content}",
        'write a list of objects, or an object that contains one list of objects: {"data": [...]}',
        code="invalid-row",
    )
    return []


def _has_objects(values: list[Any]) -> bool:
    return any(isinstance(value, dict) for value in values)


def _objects(name: str, values: list[Any], problems: Problems) -> list[Row]:
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            problems.add(Origin(name, number), f"is {a(kind_of(value))}, not an object", code="invalid-row")
    # Dropping an invalid row would shift the numbers of the following rows, so the file gives no rows at all.
    return values if all(isinstance(value, dict) for value in values) else []


def _parse_txt(name: str, data: bytes, problems: Problems, *, sample_by: str) -> Parsed:
    """Returns rows with the column `text`. A row is a line, a paragraph (lines between blank lines), or the full file.
    Blank lines give no row."""
    text = _decode(name, data, problems)
    if text is None or not text.strip():
        return Parsed()
    if sample_by == "document":
        return Parsed([{"text": text}])
    pieces = list(text_pieces(io.StringIO(text, newline="\n"), sample_by))
    return Parsed([{"text": piece} for _, piece in pieces], [line for line, _ in pieces])


def text_pieces(lines: Iterable[str], sample_by: str) -> Iterator[tuple[int, str]]:
    """Yields (first line number, text) of each line or paragraph that is not blank."""
    first, paragraph = 0, list[str]()
    for number, raw in enumerate(lines, start=1):
        line = raw.removesuffix("\n").removesuffix("\r")
        if sample_by == "line":
            if line.strip():
                yield number, line
        elif line.strip():
            first = first if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield first, "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield first, "\n".join(paragraph)


def _parse_csv(name: str, data: bytes, problems: Problems, *, delimiter: str = ",") -> Parsed:
    text = _decode(name, data, problems)
    rows: list[Row] = []
    lines: list[int] = []
    parsed = Parsed(rows, lines)
    if text is None:
        return parsed
    records = csv_records(name, io.StringIO(text, newline=""), problems, delimiter)
    header = csv_header(name, next(records, None), problems, delimiter)
    if header is None:
        return parsed
    last = text.rstrip("\r\n").count("\n") + 1
    for line, fields in records:
        if len(fields) == len(header):
            rows.append(dict(zip(header, fields, strict=True)))
            lines.append(line)
            continue
        cut = len(fields) < len(header) and line == last and not text.endswith(("\n", "\r"))
        why = f"has {len(fields)} fields, but the header has {len(header)}"
        problems.add(
            LineOrigin(name, line),
            why + (f"; {_TRUNCATED}" if cut else ""),
            _COPY_AGAIN if cut else "",
            code="damaged-file" if cut else "invalid-csv",
        )
    return parsed


def csv_header(name: str, first: tuple[int, list[str]] | None, problems: Problems, delimiter: str) -> list[str] | None:
    """Returns the column names, or None if the header is missing or invalid."""
    if first is None:
        return None
    line, header = first
    if header[0] == "" and header.count("") == 1 and len(header) > 1:
        header[0] = _INDEX  # pandas writes its index column without a name
    if len(header) == 1 and any(mark in header[0] for mark in {*",;\t|"} - {delimiter}):
        why = f"the header has only one column, {header[0]!r}"
        separator = "commas" if delimiter == "," else "tabs"
        problems.add(LineOrigin(name, line), why, f"separate the columns with {separator}", code="invalid-csv")
        return None
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice or "" in header:
        what = f"names {', '.join(map(repr, twice))} twice" if twice else "has a column without a name"
        problems.add(
            LineOrigin(name, line),
            f"the header {what}",
            "give every column a unique name",
            code="duplicate-name" if twice else "invalid-csv",
        )
        return None
    return header


def csv_records(name: str, lines: Iterable[str], problems: Problems, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (start line, fields) of each csv or tsv record. Skips blank lines."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    start = 1
    with _no_field_limit():
        try:
            for fields in reader:
                if fields:
                    yield start, fields
                start = reader.line_num + 1
        except csv.Error as error:
            cut = "unexpected end of data" in str(error)
            why = f"a quoted field never ends; {_TRUNCATED}" if cut else f"invalid csv: {error}"
            problems.add(
                LineOrigin(name, start), why, _COPY_AGAIN if cut else "", code="damaged-file" if cut else "invalid-csv"
            )


_PARSERS: dict[str, Callable[[str, bytes, Problems], Parsed]] = {
    "jsonl": _parse_jsonl,
    "json": _parse_json,
    "csv": _parse_csv,
    "tsv": partial(_parse_csv, delimiter="\t"),
    **{f"txt.{unit}": partial(_parse_txt, sample_by=unit) for unit in ("line", "paragraph", "document")},
}


@contextmanager
def _no_field_limit() -> Iterator[None]:
    before = csv.field_size_limit(_NO_FIELD_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _load(text: str) -> Any:
    """Parses JSON like json.loads, but raises an error for duplicate keys and unpaired surrogates."""
    # `json.loads` would create a new decoder for each text. `json.loads` is used only for its error message about a
    # byte order mark.
    value = json.loads(text) if text.startswith("\ufeff") else _DECODER.decode(text)
    if "\\u" in text and ("\\ud" in text or "\\uD" in text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("it contains half of a surrogate pair, which is not valid text") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one object")
    return row


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _ran_out(error: json.JSONDecodeError, text: str) -> bool:
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())


def _decode(name: str, data: bytes, problems: Problems) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        for line, raw in enumerate(io.BytesIO(data), start=1):
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                last = data.count(b"\n") + 1 == line
                _report_bytes(LineOrigin(name, line), error, problems, at_end=last and error.end == len(raw))
        return None


def _report_bytes(where: Origin, error: UnicodeDecodeError, problems: Problems, at_end: bool) -> None:
    bad = error.object[error.start]
    why = f"is not UTF-8: byte 0x{bad:02x} at byte {error.start + 1} of the line"
    if at_end and error.reason == "unexpected end of data":
        problems.add(where, f"{why}; {_TRUNCATED}", _COPY_AGAIN, code="damaged-file")
    else:
        source = shlex.quote(where.file)
        remedy = f"save the file as UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8 {source} >utf8-rows"
        problems.add(where, why, remedy, code="not-utf8")


def read_parquet(name: str, path: Path, problems: Problems) -> list[pa.RecordBatch]:
    """Returns the record batches of a parquet file, or an empty list if the file has a problem."""
    if not is_complete(name, path, problems):
        return []
    try:
        # Uses ParquetFile, because pq.read_table adds columns for folders named "key=value".
        with pq.ParquetFile(path) as file:
            if repeats(name, file.schema_arrow.names, problems):
                return []
            batches = [batch for batch in file.iter_batches(_BATCH_ROWS) if batch.num_rows]
    except (pa.ArrowException, OSError) as error:
        problems.add(name, f"damaged parquet: {error}", _COPY_AGAIN, code="damaged-file")
        return []
    check_values(name, batches, problems)
    return batches


def read_arrow(name: str, path: Path, problems: Problems) -> list[pa.RecordBatch]:
    """Returns the record batches of an Arrow file or stream (written by the package datasets), or an empty list if the
    file has a problem."""
    try:
        source = pa.memory_map(str(path))
        is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        source.seek(0)
        if is_file:
            file = pa.ipc.open_file(source)
            schema, batches = file.schema, [file.get_batch(i) for i in range(file.num_record_batches)]
        else:
            stream = pa.ipc.open_stream(source)
            schema, batches = stream.schema, list(stream)
            source.seek(max(0, source.size() - len(_ARROW_END)))
            if source.read() != _ARROW_END:  # a stream cut between two batches reads without an error
                problems.add(
                    name, "is truncated: the end of the arrow stream is missing", _COPY_AGAIN, code="damaged-file"
                )
                return []
    except (pa.ArrowException, OSError) as error:
        problems.add(name, f"damaged arrow: {error}", _COPY_AGAIN, code="damaged-file")
        return []
    if repeats(name, schema.names, problems):
        return []
    batches = [batch for batch in batches if batch.num_rows]
    check_values(name, batches, problems)
    return batches


def repeats(name: str, columns: Sequence[str], problems: Problems) -> bool:
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        problems.add(
            name,
            f"has the column {', '.join(map(repr, twice))} twice",
            "give every column a unique name",
            code="duplicate-name",
        )
    return bool(twice)


def is_complete(name: str, path: Path, problems: Problems) -> bool:
    """Checks the magic bytes at both ends of a parquet file. A truncated file lacks the magic bytes at its end."""
    with path.open("rb") as file:
        head = file.read(len(_MAGIC))
        file.seek(-min(len(_MAGIC), path.stat().st_size), 2)
        tail = file.read()
    if head != _MAGIC:
        problems.add(name, "is not a parquet file: it does not begin with PAR1", code="unsupported-format")
    elif tail != _MAGIC or path.stat().st_size < 3 * len(_MAGIC):
        problems.add(name, "is truncated: the footer of the parquet file is missing", _COPY_AGAIN, code="damaged-file")
    else:
        return True
    return False


def check_values(name: str, batches: Sequence[pa.RecordBatch], problems: Problems, start: int = 0) -> None:
    """Validates the bytes of strings. Arrow does not validate strings when it reads a file, so invalid UTF-8 would fail
    during training. `start` is the number of the first row."""
    for batch in batches:
        if _fault(batch):
            for number in range(batch.num_rows):
                fault = _fault(batch.slice(number, 1))
                if fault:
                    problems.add(Origin(name, start + number), f"invalid value: {fault}", code="invalid-row")
        start += batch.num_rows


def _fault(batch: pa.RecordBatch) -> str:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error)
    return ""
