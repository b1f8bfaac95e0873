"""Rows of .txt and .tsv files, and long texts that are split into pieces."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow.csv
import pytest
import torch

from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.encoding import split_text
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.sources.read import read_rows
from lockstep.data.updates import arrange
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.parallel.world import World
from lockstep.recipe.keys_data import Data
from lockstep.types import Example, Origin
from refusals import refuses

TEXT = "One line.\n  Two,\tthree.\r\n\n \nLast π\u2028 line"


def texts(path: Path, sample_by: str) -> list[tuple[str, str]]:
    rows = read_rows(str(path), sample_by=sample_by)
    assert rows.columns == ("text",)
    return [(str(rows.origin(number)).removeprefix(f"{path} "), rows[number]["text"]) for number in range(len(rows))]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_row_of_a_text_file_is_a_line_a_paragraph_or_the_file(tmp_path: Path, name: str) -> None:
    path, data = tmp_path / name, b"\xef\xbb\xbf" + TEXT.encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    last = ("line 5", "Last π\u2028 line")
    assert texts(path, "line") == [("line 1", "One line."), ("line 2", "  Two,\tthree."), last]
    assert texts(path, "paragraph") == [("line 1", "One line.\n  Two,\tthree."), last]
    assert texts(path, "document") == [("row 0", TEXT)]


def test_text_files_beside_other_formats_are_notes(tmp_path: Path) -> None:
    (tmp_path / "README.txt").write_text("about the rows")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    rows = read_rows(str(tmp_path))
    assert (list(rows), rows.ignored) == ([{"text": "a"}], (str(tmp_path / "README.txt"),))
    (tmp_path / "rows.jsonl").unlink()
    assert list(read_rows(str(tmp_path))) == [{"text": "about the rows"}]


def test_a_blank_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n \n")
    with refuses(code="no-rows"):
        read_rows(str(tmp_path / "a.txt"))


def test_tsv_rows_equal_those_of_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('prompt\tresponse\nWhat, "now"?\t007\n"two\nlines, ""quoted"""\t\n')
    parse = pyarrow.csv.ParseOptions(delimiter="\t", newlines_in_values=True)
    kinds = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(("prompt", "response"), pyarrow.string()))
    expected = pyarrow.csv.read_csv(path, parse_options=parse, convert_options=kinds).to_pylist()
    rows = read_rows(str(path))
    assert list(rows) == expected
    assert expected[0]["response"] == "007"
    assert str(rows.origin(1)).endswith("a.tsv line 3")


def test_a_tsv_file_with_commas_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("prompt,response\na,b\n")
    with refuses(code="invalid-csv") as refused:
        read_rows(str(tmp_path / "a.tsv"))
    assert "separate the columns with tabs" in str(refused.value)


# --- long texts -------------------------------------------------------------------------------------------------------


def test_every_target_of_a_split_text_is_trained_once() -> None:
    # Token 10 is an opening token without loss, as a BOS token.
    whole = Example(list(range(10, 20)), bytes([0] + [1] * 9), Origin("a", 0))
    pieces = split_text(whole, 4)
    assert [list(piece.ids) for piece in pieces] == [[10, 11, 12, 13], [13, 14, 15, 16], [16, 17, 18, 19]]
    assert [list(piece.loss_mask) for piece in pieces] == [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    for length in range(2, 12):
        for limit in range(2, 12):
            text = Example(list(range(length)), bytes([1] * length), Origin("a", 0))
            found = split_text(text, limit)
            assert [token for piece in found for _, token in piece.scored_tokens()] == list(range(1, length))
            assert max(map(len, found)) <= limit


def test_a_piece_without_targets_is_refused() -> None:
    with refuses(code="truncated-away"):
        split_text(Example([1, 2, 3, 4], bytes([0, 0, 1, 1]), Origin("a", 0)), 2)


def rows_of(path: Path, limit: int, model: Path, **keys: object) -> Dataset[Example]:
    data = Data.model_validate({"train": str(path), "cache": "off", **keys})
    return load_rows(RowRequest(Dataset, SupervisedRows, data.train, data, load_tokenizer(str(model)), limit))


def test_long_texts_are_refused_or_split(tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("A short line.\n" + "What is 12 plus 30? It is 42. " * 20 + "\n")
    with refuses(code="row-too-long") as refused:
        rows_of(path, 32, tiny_folder)
    assert "data.long_text to split" in str(refused.value)
    whole = rows_of(path, 10_000, tiny_folder)
    split = rows_of(path, 32, tiny_folder, long_text="split")
    assert len(split.items) > 5
    assert split.counts.trained_tokens == whole.counts.trained_tokens
    assert split.counts.longest == 32
    (note,) = split.notes
    assert f"1 long texts split into {len(split.items) - 1} pieces of up to 32 tokens" in note
    assert split.end_tokens == whole.end_tokens


def test_pieces_give_the_same_targets_packed_and_padded(tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("What is 12 plus 30? It is 42. " * 20)
    items = rows_of(path, 32, tiny_folder, long_text="split").items
    world = World()
    packed = arrange(items, world, tokens=64, rows=None, pad_id=0)
    padded = arrange(items, world, tokens=None, rows=3, pad_id=0)

    def targets(update: object) -> torch.Tensor:
        batches = update.batches  # type: ignore[attr-defined]
        index = torch.cat([batch.index_K for batch in batches])
        return torch.cat([batch.targets_K for batch in batches])[index.argsort()]

    assert torch.equal(targets(packed), targets(padded))
    assert len(targets(packed)) == packed.targets


def test_chats_are_not_split(tmp_path: Path, tiny_folder: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "response": "' + "word " * 100 + '"}\n')
    with pytest.raises(Refusal, match="row-too-long"):
        rows_of(path, 32, tiny_folder, long_text="split")
