"""Converts a GGUF file (often quantised) to a Hugging Face folder that can be trained."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import Refusal, first_line, missing_extra, unwritten
from lockstep.run.files import written_aside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAGIC = b"GGUF"


# If the relative difference of output head and embedding is below this, the head is the embedding with another
# quantisation.
SAME_MATRIX = 0.25


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
    tokenizer = pretrained(AutoTokenizer, str(file.parent), str(file), "its tokenizer", gguf_file=file.name)
    dtype = torch.float32
    packed = whole_model(AutoModelForCausalLM, str(file.parent), str(file), "it", gguf_file=file.name, dtype=dtype)
    _restore_digits(tokenizer, packing)
    model = _unquantised(packed)
    notes = _tied(model, file, tie)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(folder, over=True) as aside:
            save_model(model, aside)
            tokenizer.save_pretrained(aside)
    except (OSError, SafetensorError) as error:  # safetensors has a separate error type for a full disk
        raise unwritten(folder, error) from error
    count = sum(p.numel() for p in model.parameters())
    return [f"wrote {type(model).__name__} with {count:,} parameters to {folder}", *notes]


def _opened(file: Path) -> Any:
    """Returns a GGUFReader for the file. Raises `Refusal` if the file is damaged, or is only one part of a split
    model."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
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
    embedding = model.get_input_embeddings().weight.detach()
    head = model.get_output_embeddings().weight.detach()
    if model.config.tie_word_embeddings:
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


def _restore_digits(tokenizer: PreTrainedTokenizerBase, packing: Any) -> None:
    """Restores the digit splitting of `smollm` pre-tokenizers, which transformers drops when it reads a GGUF file."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    field = packing.get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        splitting = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splitting)
