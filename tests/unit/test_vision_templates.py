"""Chats with images are rendered and expanded to the tokens that the processors of transformers compute."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.smolvlm import processing_smolvlm
from transformers.processing_utils import ProcessorMixin

from image_rows import picture
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Example
from lockstep.vision.processors import image_processor
from vision_families import CONFIGS, write_family

# Attributes of published tokenizers, which the processors read.
NAMED = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {"image_seq_length": 16},
    "gemma4": {"feature_extractor": None, "video_processor": None},
    "llava": {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_next": {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "idefics3": {"image_seq_len": 4},
    "smolvlm": {"image_seq_len": 4, "video_processor": None},
    "internvl": {"image_seq_length": 4},
}


def processor_of(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor of transformers. It gets no processor of videos, because those need torchvision."""
    monkeypatch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
    monkeypatch.setattr(processing_smolvlm, "num2words", str)  # only texts of videos have numbers as words
    tokenizer = load_tokenizer(str(folder))
    for name, token in NAMED.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    if family in ("gemma3", "gemma4"):
        tokenizer.image_token = "<image_soft_token>"
        tokenizer.image_token_id = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    kind = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder, trust_remote_code=False))]
    return kind(image_processor=image_processor(str(folder)), tokenizer=tokenizer, **SETTINGS.get(family, {}))


def read(folder: Path, path: Path, **keys: Any) -> list[Example]:
    data = Data(train=str(path), **keys)
    reader = partial(SupervisedRows, images=str(folder))
    request = RowRequest(Dataset, reader, [Source(path=str(path))], data, load_tokenizer(str(folder)), 500)
    return load_rows(request).examples


@pytest.mark.parametrize("family", [one for one in CONFIGS if "moe" not in one and one not in ("qwen3_5", "idefics3")])
def test_tokens_equal_those_of_the_processor(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, parts, images = write_family(family, tmp_path / "model"), [], []
    if family == "gemma3":  # the processor divides no image into crops, even if the image processor would
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 4}
        crops |= {"pan_and_scan_min_ratio_to_activate": 1.2}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings | crops))
    texts = (" Which colour? ", "\nAnd this?", "or that?")
    for number, (text, size) in enumerate(zip(texts, ((32, 64), (80, 32), (32, 32)), strict=True)):
        images.append(picture(number + 1, *size).data)
        (tmp_path / f"{number}.png").write_bytes(images[-1])
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": [{"type": "text", "text": "red"}]}]
    rows = [{"messages": chat, "images": ["0.png", "1.png", "2.png"]}]
    # The placeholders of verl give the same tokens as parts.
    marked = [{"role": "user", "content": "".join(f"<image>{text}" for text in texts)}, chat[1]]
    rows.append({**rows[0], "messages": marked})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = read(folder, tmp_path / "rows.jsonl", require_end=False)

    processor = processor_of(family, folder, monkeypatch)
    text = processor.tokenizer.apply_chat_template(chat, tokenize=False)
    pictures = [Image.open(io.BytesIO(data)) for data in images]
    wanted = processor(images=[pictures] if family != "llava_next" else pictures, text=[text])["input_ids"][0]
    assert list(found[0].ids) == list(wanted)
    assert list(found[1].ids) == list(wanted)
    pad = AutoConfig.from_pretrained(folder, trust_remote_code=False).image_token_id
    places = [place for image in found[0].images for place in image.places()]
    assert places == [at for at, token in enumerate(wanted) if token == pad]
    assert len(found[0].images) == 3
