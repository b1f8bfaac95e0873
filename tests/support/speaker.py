"""A random model whose greedy answers are printable text and differ from prompt to prompt; some end by themselves."""

from __future__ import annotations

from pathlib import Path


def write_speaker(folder: Path, tiny: Path) -> Path:
    """Beside the tiny model: of its architecture, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config.from_pretrained(tiny, initializer_range=0.4, tie_word_embeddings=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
    silent = [token for token in range(config.vocab_size) if token != config.eos_token_id and not 32 <= token < 127]
    head = model.get_output_embeddings().weight.data
    head *= 0.5
    head[silent] = 0.0
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder
