"""The embedded default model: a small random Qwen2 that needs no hub and trains on a CPU in a minute."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.run.files import share_model

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
HEAD_SIZE = 32
CONTEXT = 2048

# ChatML. The `generation` tags mark the content and end token of an assistant turn as assistant tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{{- '\n' -}}"
    "{%- else -%}"
    "{{- message['content'] + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def write_tiny(folder: Path, *, seed: int = 0, hidden: int = 128, layers: int = 4) -> None:
    """Writes a random Qwen2 with a byte tokenizer to `folder` as a Hugging Face model.

    The same arguments give the same files. A file with other content is never overwritten. The default model has 1.0 M
    parameters. `hidden` and `layers` are meant for models of 1 to 4 M parameters.
    """
    _refuse_bad_sizes(seed, hidden, layers)
    if folder.exists() and not folder.is_dir():
        raise Refusal.at(folder, "is a file, not a folder", "give another folder", code="not-a-folder")
    with tempfile.TemporaryDirectory() as aside:
        tokens = _save_tokenizer(Path(aside))
        _save_model(Path(aside), tokens, seed, hidden, layers)
        share_model(Path(aside))
        refuse_overwriting(Path(aside), folder)
        shutil.copytree(aside, folder, dirs_exist_ok=True)


def byte_vocabulary() -> dict[str, int]:
    """Returns a vocabulary with one token per byte. The id of a token is the byte, and its text is the character that
    byte-level BPE uses for the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {byte: chr(byte) for byte in printable}
    unprintable = [byte for byte in range(256) if byte not in names]
    names.update({byte: chr(256 + i) for i, byte in enumerate(unprintable)})
    return {names[byte]: byte for byte in range(256)}


def _refuse_bad_sizes(seed: int, hidden: int, layers: int) -> None:
    problems = []
    if seed < 0:
        problems.append(Problem("seed", f"{seed} is negative", "give 0 or more", code="out-of-range"))
    if hidden < HEAD_SIZE or hidden % HEAD_SIZE:
        problems.append(
            Problem(
                "hidden",
                f"{hidden} is not a multiple of the head size {HEAD_SIZE}",
                "give 128 or 256",
                code="out-of-range",
            )
        )
    if layers < 1:
        problems.append(Problem("layers", f"{layers} is less than one layer", "give 1 or more", code="out-of-range"))
    refuse_all(problems)


def refuse_overwriting(written: Path, folder: Path) -> None:
    problems = [
        Problem(
            str(folder / new.name),
            "exists and has other content",
            "remove this file, or give another folder",
            code="already-exists",
        )
        for new in sorted(written.iterdir())
        if (folder / new.name).exists() and (folder / new.name).read_bytes() != new.read_bytes()
    ]
    refuse_all(problems)


def _save_tokenizer(folder: Path) -> dict[str, int]:
    """Writes the tokenizer. Returns the vocabulary size and the special token ids, for the model config."""
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE)
    tokenizer.save_pretrained(folder)
    return {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def tiny_tokenizer(chat_template: str, special: Sequence[str] = ()) -> Any:
    """Returns a byte tokenizer with the tokens of ChatML and additional `special` tokens."""
    from transformers import Qwen2Tokenizer

    # transformers loads the tokenizer of every qwen2 model as `Qwen2Tokenizer`, which sets its own pre-tokenizer. So
    # tokenizer.json must be written by the same class.
    tokenizer = Qwen2Tokenizer(
        vocab=byte_vocabulary(),
        merges=[],
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=PAD,
        unk_token=PAD,
        model_max_length=CONTEXT,
    )
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = chat_template
    return tokenizer


def _save_model(folder: Path, tokens: dict[str, int], seed: int, hidden: int, layers: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    heads = hidden // HEAD_SIZE
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        # With an even number of heads the model has grouped-query attention, as published Qwen2 models do.
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
        **tokens,
    )
    # The random state is forked, because the constructor of transformers draws random weights. `initialise` replaces
    # them.
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(config)
    initialise(model, seed, layers)
    config.save_pretrained(folder)
    special = {name: token for name, token in tokens.items() if name != "vocab_size"}
    GenerationConfig(do_sample=False, **special).save_pretrained(folder)
    # `named_parameters` lists a tied weight once, and a tied model must be stored with one copy of it.
    save_file(dict(model.named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})


def initialise(model: Any, seed: int, layers: int) -> None:
    """Samples the weights in parameter order from one generator, so that they do not depend on the version of
    transformers."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, weight[0].numel() ** -0.5, generator=generator)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # The output projections of residual branches are scaled down, so that the residual stream keeps the
                # size of the embedding.
                weight.mul_((2 * layers) ** -0.5)
