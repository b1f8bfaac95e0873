"""Converts a GGUF file (often quantised) to a Hugging Face folder that can be trained."""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import Refusal, first_line, missing_extra, unwritten
from lockstep.run.files import share_model, written_aside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAGIC = b"GGUF"


# If the relative difference of output head and embedding is below this, the head is the embedding with another
# quantisation.
SAME_MATRIX = 0.25
# Special tokens of a tokenizer, and the names of their ids in a GGUF file.
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def import_gguf(file: Path, folder: Path, *, tie: bool = False) -> list[str]:
    """Dequantises the GGUF `file` to fp32 weights in `folder`. Returns messages for the user. With `tie` the embedding
    replaces a separate output head."""
    if importlib.util.find_spec("gguf") is None:
        raise missing_extra("gguf", "hub", "reading GGUF files")
    if not file.is_file():
        raise Refusal.at(file, "no such file", code="no-such-file")
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise Refusal.at(
                file, "is not a GGUF file: it does not start with the letters GGUF", code="unsupported-format"
            )
    if folder.exists() and not folder.is_dir():
        raise Refusal.at(folder, "is a file, not a folder", "choose a new folder", code="not-a-folder")
    if folder.exists() and any(folder.iterdir()):
        raise Refusal.at(folder, "is not empty", "choose a new folder", code="not-empty")
    # These imports are slow, so they come after the checks of the arguments.
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from lockstep.model.pretrained import pretrained, save_model, whole_model

    packing = _opened(file)
    with _fast_reading(packing):
        tokenizer = pretrained(AutoTokenizer, str(file.parent), str(file), "its tokenizer", gguf_file=file.name)
        dtype = torch.float32
        packed = whole_model(AutoModelForCausalLM, str(file.parent), str(file), "it", gguf_file=file.name, dtype=dtype)
    _restore_tokenizer(tokenizer, packing, file)
    model = _unquantised(packed)
    notes = _tied(model, file, tie)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(folder, over=True) as aside:
            save_model(model, aside)
            tokenizer.save_pretrained(aside)
            share_model(aside)
    except (OSError, SafetensorError) as error:  # safetensors has a separate error type for a full disk
        raise unwritten(folder, error) from error
    count = sum(p.numel() for p in model.parameters())
    return [f"wrote {type(model).__name__} with {count:,} parameters to {folder}", *notes]


def _opened(file: Path) -> Any:
    """Returns a GGUFReader for the file. Raises `Refusal` if the file is damaged, or is only one part of a split
    model."""
    try:
        reader = _fast_reader()(file)
    except Exception as error:  # the parser raises various errors for a truncated file
        why = f"is truncated or damaged: {type(error).__name__}: {first_line(error)}"
        raise Refusal.at(file, why, "copy or download the file again", code="damaged-file") from error
    field = reader.get_field("split.count")
    if field is not None and int(field.contents()) > 1:
        why = f"has only one of the {int(field.contents())} parts of a model"
        raise Refusal.at(
            file, why, "merge the parts first: llama-gguf-split --merge PART OUT.gguf", code="missing-shard"
        )
    return reader


def _tied(model: Any, file: Path, tie: bool) -> list[str]:
    """Decides whether the output head is tied to the embedding, and ties them if `tie` is set. Returns messages for the
    user."""
    from lockstep.model.text_model import text_config

    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    if text_config(model.config).tie_word_embeddings:
        return ["the model's output head is tied to its embedding, as in the file"]
    off = float((head - embedding).norm() / embedding.norm()) if head.shape == embedding.shape else 1.0
    if off >= SAME_MATRIX:
        if tie:
            why = f"its output head differs from its embedding (by {off:.0%})"
            raise Refusal.at(f"--tie {file}", why, "import it without --tie", code="untied-weights")
        return ["the model's output head is a separate matrix (not tied), as in the file"]
    if not tie:
        return [
            f"its output head differs from its embedding by only {off:.1%}: the model was tied before it was "
            "converted to GGUF. The model is imported with a separate head, as in the file; "
            f"`lockstep import-gguf {file} DIR --tie` ties head and embedding again"
        ]
    import torch

    model.config.tie_word_embeddings = True
    model.set_output_embeddings(torch.nn.Linear(embedding.shape[1], embedding.shape[0], bias=False, device="meta"))
    model.tie_weights()
    return [f"its output head is tied to its embedding again; the head in the file differed from it by {off:.1%}"]


def _unquantised(packed: Any) -> Any:
    """Returns a model with the same weights but without a quantisation config, because transformers cannot save a
    quantised model."""
    import torch
    from transformers import AutoModelForCausalLM

    config = packed.config.__class__(**{k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.bos_token_id = config.bos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    return model


def _restore_tokenizer(tokenizer: PreTrainedTokenizerBase, packing: Any, file: Path) -> None:
    """Sets what transformers drops or reads wrongly from a GGUF file. Some versions give a Llama with byte-level tokens
    the special tokens and the decoder of SentencePiece, so generation would not stop at the end token of the file. No
    version keeps the digit splitting of `smollm`."""
    from tokenizers import decoders, pre_tokenizers

    def read(key: str) -> Any:
        field = packing.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    for name, key in SPECIAL_TOKENS.items():
        if (number := read(f"{key}_token_id")) is None:
            continue
        if number >= len(tokenizer):
            why = f"its {name} has id {number}, but its vocabulary has {len(tokenizer):,} tokens"
            raise Refusal.at(file, why, "copy or download the file again", code="damaged-file")
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(number)))
    tokenizer.clean_up_tokenization_spaces = False
    if read("model") == "gpt2":  # byte-level tokens
        backend = tokenizer.backend_tokenizer
        backend.model.byte_fallback, backend.model.fuse_unk = False, False
        if not isinstance(backend.decoder, decoders.ByteLevel):
            backend.decoder = decoders.ByteLevel()
    if read("pre") == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])


# Transformers reads the whole file several times with the package gguf, which creates several numpy arrays for each of
# the hundreds of thousands of vocabulary entries, and dequantises 16 rows at a time on one core. That takes over a
# minute for a small model. The functions below give the same values faster.

# Size of the quantised rows that a thread dequantises at once, in bytes.
ROWS_BYTES = 2**18


@contextmanager
def _fast_reading(reader: Any) -> Iterator[None]:
    """Inside the `with` block, transformers uses the opened `reader`, parses its metadata once, and dequantises in
    threads."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    package: Any = gguf
    loading: Any = modeling_gguf_pytorch_utils
    parse, parsed = loading.load_gguf_checkpoint, dict[str, Any]()

    def load(path: str, return_tensors: bool = False, **options: Any) -> dict[str, Any]:
        if return_tensors:
            found: dict[str, Any] = parse(path, return_tensors=True, **options)
            return found
        if not parsed:
            parsed.update(parse(path, return_tensors=False, **options))
        return {name: dict(values) for name, values in parsed.items()}

    originals = package.GGUFReader, package.dequantize, package.get_tensor_name_map, parse
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        package.GGUFReader, loading.load_gguf_checkpoint = (lambda *_: reader), load
        # Transformers makes the same table of names for every module of the model.
        package.get_tensor_name_map = cache(package.get_tensor_name_map)
        package.dequantize = lambda data, kind: dequantize_rows(data, kind, threads)
        try:
            yield
        finally:
            (
                package.GGUFReader,
                package.dequantize,
                package.get_tensor_name_map,
                loading.load_gguf_checkpoint,
            ) = originals


def dequantize_rows(data: NDArray[Any], kind: Any, threads: ThreadPoolExecutor) -> NDArray[Any]:
    """Returns the same values as `gguf.dequantize`. Threads dequantise blocks of rows at the same time."""
    from gguf import quants

    traits: Any = quants._type_traits.get(kind)
    if traits is None or data.ndim < 2:
        plain: NDArray[Any] = quants.dequantize(data, kind)
        return plain
    traits.init_grid()
    rows = data.reshape(-1, data.shape[-1])
    found = np.empty(quants.quant_shape_from_byte_shape(data.shape, kind), dtype=np.float32)
    flat = found.reshape(len(rows), -1)
    count = max(1, ROWS_BYTES // rows.shape[-1])

    def fill(first: int) -> None:
        flat[first : first + count] = traits.dequantize_rows(rows[first : first + count])

    list(threads.map(fill, range(0, len(rows), count)))
    return found


def _fast_reader() -> Callable[[Path], Any]:
    """Returns a GGUFReader class that reads arrays without a numpy array for each part of each element."""
    from gguf import GGUFReader, GGUFValueType

    class ArrayReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            view, place = memoryview(self.data), orig_offs + 12
            number, count = struct.unpack_from("<IQ", view, orig_offs)
            kind, parts = GGUFValueType(number), list[Any]()
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    (length,) = struct.unpack_from("<Q", view, place)
                    parts.append(view[place + 8 : place + 8 + length])
                    place += 8 + length
            elif kind in self.gguf_scalar_to_np:
                values = np.asarray(self._get(place, self.gguf_scalar_to_np[kind], count))
                if len(values) != count:
                    raise ValueError("an array goes beyond the end of the file")
                parts = [values[index : index + 1] for index in range(count)]
                place += values.nbytes
            else:  # an array of arrays
                return super()._get_field_parts(orig_offs, raw_type)
            return place - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, kind][: 2 if count else 1]

    return ArrayReader
