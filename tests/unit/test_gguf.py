"""Reading GGUF files: the values of the package gguf, read and dequantised in threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import decoders
from transformers import AutoTokenizer

gguf = pytest.importorskip("gguf")

from gguf_files import write_gguf  # noqa: E402
from lockstep.errors import Refusal  # noqa: E402
from lockstep.model import gguf as importing  # noqa: E402
from lockstep.model.gguf import dequantize_rows, import_gguf  # noqa: E402

KINDS = [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 37])
def test_threads_dequantise_to_the_same_bits(kind: object, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of block, from random bytes: also infinities and NaN must be the same bits."""
    monkeypatch.setattr(importing, "ROWS_BYTES", 2048)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (2, rows, 3 * size), dtype=np.uint8)
    with ThreadPoolExecutor(3) as threads, np.errstate(all="ignore"):
        found, wanted = dequantize_rows(data, kind, threads), gguf.dequantize(data, kind)
    assert found.dtype == wanted.dtype == np.float32
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def test_plain_numbers_are_not_changed() -> None:
    with ThreadPoolExecutor(1) as threads:
        for kind, dtype in ((gguf.GGMLQuantizationType.F32, np.float32), (gguf.GGMLQuantizationType.F16, np.float16)):
            data = np.arange(6, dtype=dtype).reshape(2, 3)
            assert dequantize_rows(data, kind, threads).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_the_reader_finds_the_same_fields(tiny_folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny_folder, tmp_path / "tiny.gguf")
    found, wanted = importing._fast_reader()(file), gguf.GGUFReader(file)
    assert found.fields.keys() == wanted.fields.keys()
    for name, field in wanted.fields.items():
        assert found.fields[name].types == field.types, name
        assert found.fields[name].contents() == field.contents(), name
    assert [(one.name, one.data.tobytes()) for one in found.tensors] == [
        (one.name, one.data.tobytes()) for one in wanted.tensors
    ]


def test_every_truncation_of_the_header_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    content = write_gguf(tiny_folder, tmp_path / "tiny.gguf").read_bytes()
    for size in (8, 30, 200, 700, 5000, len(content) // 2):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(Refusal) as refused:
            importing._opened(tmp_path / "cut.gguf")
        assert refused.value.problems[0].code == "damaged-file"


def test_an_imported_model_has_the_values_of_the_file(tiny_folder: Path, tmp_path: Path) -> None:
    reader, function, table = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    with patch.object(gguf.tensor_mapping, "TensorNameMap", side_effect=gguf.TensorNameMap) as tables:
        import_gguf(write_gguf(tiny_folder, tmp_path / "tiny.gguf"), tmp_path / "out")
    assert len(tables.call_args_list) == 1  # transformers alone makes one for each module, which takes seconds
    found, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tiny_folder))
    assert all(bool((found[name] == tensor).all()) for name, tensor in wanted.items())
    assert (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map) == (reader, function, table)
    assert (
        len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1
    )  # weights are as readable as config.json


def test_an_imported_tokenizer_is_that_of_the_file(tiny_folder: Path, tmp_path: Path) -> None:
    """Some versions of transformers take a Llama's byte-level tokens for SentencePiece: other special tokens, a decoder
    that replaces characters, and one that removes spaces."""
    file = write_gguf(tiny_folder, tmp_path / "tiny.gguf")
    import_gguf(file, tmp_path / "out")
    wanted, found = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_folder, tmp_path / "out"))
    text = "a \N{LOWER ONE EIGHTH BLOCK} b , c ."
    for broken in (False, True):
        if broken:
            found.eos_token, found.pad_token, found.clean_up_tokenization_spaces = found.bos_token, None, True
            found.backend_tokenizer.decoder = decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
            importing._restore_tokenizer(found, gguf.GGUFReader(file), file)
        assert found.eos_token_id == wanted.eos_token_id != wanted.bos_token_id == found.bos_token_id
        assert found.pad_token_id == wanted.pad_token_id
        assert not found.clean_up_tokenization_spaces
        ids = wanted(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == wanted.decode(ids) == text


def test_a_special_token_outside_the_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers 5.17 reads such a file and gives the tokenizer no end token; later versions refuse the file."""
    file = write_gguf(tiny_folder, tmp_path / "tiny.gguf")
    reader = gguf.GGUFReader(file, "r+")
    reader.get_field("tokenizer.ggml.eos_token_id").parts[-1][0] = 70_000
    reader.data.flush()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    with pytest.raises(Refusal, match=r"its eos_token has id 70000, but its vocabulary has \d+ tokens"):
        importing._restore_tokenizer(tokenizer, reader, file)
    with pytest.raises(Refusal):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
