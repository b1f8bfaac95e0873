"""The embedded model: a folder that plain transformers loads, the same bytes every time, no text lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny

CHAT = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": " 7 .\n"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "#### 7"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_plain_transformers_loads_every_weight(folder: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    # By hand: the tied embedding; per layer q, k and v with biases, o, three 128 x 512, two norms; a last norm.
    layer = (128 * 128 + 128) + 2 * (128 * 64 + 64) + 128 * 128 + 3 * 128 * 512 + 2 * 128
    assert sum(weight.numel() for weight in model.parameters()) == 259 * 128 + 4 * layer + 128 == 1_018_368
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_special_tokens_agree_everywhere(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|endoftext|>"}
    ids = {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(name) for kind, name in names.items()}
    assert len(set(ids.values())) == 3
    config = json.loads((folder / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(folder)
    for key, token in ids.items():
        assert (getattr(tokenizer, key), config[key], getattr(generation, key)) == (token, token, token)
    # A token that the loader adds beyond the embedding would be an index error in training.
    assert len(tokenizer) == config["vocab_size"] == 259


@pytest.mark.parametrize(
    "text", ["What is 3 + 4?\n#### 7", "  a ,b . \r\n\t\x00\x7f", "\u00e9 \u6f22\u5b57 \U0001f642 \ufeff\ufb01", ""]
)
def test_any_text_survives_byte_by_byte(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids == ids


def test_decomposed_accents_are_composed_not_lost(folder: Path) -> None:
    """The one change: Qwen2's tokenizer class normalises to NFC, whatever the folder says."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("e\u0301")["input_ids"]) == "\u00e9"


def test_the_template_marks_what_the_assistant_says(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, mark in zip(chat["input_ids"], chat["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == " 7 .\n<|im_end|>#### 7<|im_end|>"
    assert tokenizer.decode(chat["input_ids"]) == (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n 7 .\n<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>\n"
    )


def test_the_prompt_is_a_prefix_of_the_whole_chat(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert tokenizer.decode(prompt) == "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert whole[: len(prompt)] == prompt


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    write_tiny(tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert contents(tmp_path / "again") == contents(folder)
    write_tiny(tmp_path / "other", seed=1)
    other = contents(tmp_path / "other")
    assert {name for name, data in contents(folder).items() if data != other[name]} == {"model.safetensors"}


def test_writing_twice_is_harmless_and_nothing_else_is_overwritten(tmp_path: Path) -> None:
    write_tiny(tmp_path, hidden=64, layers=1)
    first = contents(tmp_path)
    write_tiny(tmp_path, hidden=64, layers=1)
    assert contents(tmp_path) == first
    with pytest.raises(Refusal) as caught:
        write_tiny(tmp_path, seed=1, hidden=64, layers=1)
    assert [problem.where for problem in caught.value.problems] == [str(tmp_path / "model.safetensors")]
    assert contents(tmp_path) == first


def test_bad_sizes_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(Refusal) as caught:
        write_tiny(tmp_path / "model", seed=-1, hidden=100, layers=0)
    assert [problem.where for problem in caught.value.problems] == ["seed", "hidden", "layers"]
    assert not (tmp_path / "model").exists()


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(Refusal, match="is a file"):
        write_tiny(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"
