"""Rows with images: five formats give the same example, and bad rows are refused with their file and row."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lockstep.commands.generate import Conversation
from lockstep.commands.show import image_lines, render
from lockstep.data import row_cache
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.prepare.squares import COLOURS, draw_squares, write_squares
from lockstep.model.load import load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_data import Data, Source
from lockstep.recipe.loader import checked_recipe
from lockstep.types import Example
from lockstep.vision import processors
from lockstep.vision.images import png_bytes
from refusals import refuses

PIXELS = draw_squares("blue", (0, 5))
PNG = png_bytes(PIXELS)
OTHER = png_bytes(draw_squares("red", (3,)))
QUESTION, ANSWER = "What colour?", "blue"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=32, layers=1)
    return made


def read(folder: Path, path: Path, limit: int = 200, **keys: Any) -> list[Example]:
    data = Data(train=str(path), **keys)
    tokenizer, reader = load_tokenizer(str(folder)), partial(SupervisedRows, images=str(folder))
    return load_rows(RowRequest(Dataset, reader, [Source(path=str(path))], data, tokenizer, limit)).examples


def written(tmp_path: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (tmp_path / "pictures").mkdir(exist_ok=True)
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    (tmp_path / "pictures" / "b.png").write_bytes(OTHER)
    path = tmp_path / name
    if name.endswith("parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": ANSWER}]


def parts(image: dict[str, Any]) -> list[dict[str, Any]]:
    return chat([image, {"type": "text", "text": QUESTION}])


PATH = "pictures/a.png"
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
# Each row has the same image before the same question.
FORMATS: dict[str, dict[str, Any]] = {
    "verl": {"prompt": chat(f"<image>{QUESTION}")[:1], "response": ANSWER, "images": [PATH]},
    "TRL blocks": {"prompt": parts({"type": "image"})[:1], "completion": chat("")[1:], "image": PATH},
    "TRL text": {"prompt": chat(QUESTION)[:1], "completion": chat("")[1:], "images": [PATH]},
    "OpenRLHF": {"prompt": parts({"type": "image"})[:1], "response": ANSWER, "images": [URI]},
    "LLaMA-Factory": {"messages": chat(f"<image>{QUESTION}"), "images": [PATH]},
    "ShareGPT": {
        "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}, {"from": "gpt", "value": ANSWER}],
        "images": [PATH],
    },
    "OpenAI": {"messages": parts({"type": "image_url", "image_url": {"url": URI}})},
    "inline": {"messages": parts({"type": "image", "image": PATH})},
    "base64": {"messages": parts({"type": "image", "base64": base64.b64encode(PNG).decode()})},
    "plain prompt": {"prompt": QUESTION, "response": ANSWER, "image": PATH},
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_the_same_example(folder: Path, tmp_path: Path, name: str) -> None:
    (found,) = read(folder, written(tmp_path, [FORMATS[name]]))
    tokenizer = load_tokenizer(str(folder))
    text = tokenizer.decode(list(found.ids))
    pads = "<|image_pad|>" * 4  # 56 x 56 pixels are 4 x 4 patches, of which 2 x 2 are one token
    assert text == (
        f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{QUESTION}<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
    )
    (image,) = found.images
    assert tokenizer.decode(list(found.ids[image.start : image.stop])) == pads
    assert (image.grid, image.tokens) == ((1, 4, 4), 4)
    trained = [token for token, flag in zip(found.ids, found.loss_mask, strict=True) if flag]
    assert tokenizer.decode(trained) == f"{ANSWER}<|im_end|>"


def test_the_expanded_tokens_are_those_of_the_processor_of_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    (found,) = read(folder, written(tmp_path, [FORMATS["verl"]]))
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    grid = processor(images=[PIXELS], return_tensors="np")["image_grid_thw"][0]
    tokenizer = load_tokenizer(str(folder))
    blocks = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}, chat("")[1]]
    text = tokenizer.apply_chat_template(blocks, tokenize=False)
    wanted = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * int(grid.prod() // 4)))["input_ids"]
    assert list(found.ids) == wanted


def test_bytes_of_a_hugging_face_column(folder: Path, tmp_path: Path) -> None:
    row = {"messages": chat(f"<image>{QUESTION}"), "images": [{"bytes": PNG, "path": None}]}
    (found,) = read(folder, written(tmp_path, [row], "rows.parquet"))
    (same,) = read(folder, written(tmp_path, [FORMATS["verl"]]))
    assert list(found.ids) == list(same.ids)
    assert found.images[0].ref.digest == same.images[0].ref.digest


@pytest.mark.parametrize("named", ["sub", "./sub", "{here}/sub", "s*b/**/*.jsonl", "sub/rows.jsonl", "."])
def test_paths_are_relative_to_the_data_file(
    folder: Path, tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the source is the file, a folder or a pattern, from the working folder or from the root."""
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub", [FORMATS["verl"]])
    monkeypatch.chdir(tmp_path / "sub" if named == "." else tmp_path)
    (found,) = read(folder, Path(named.format(here=tmp_path)))
    assert found.images[0].ref.digest == hashlib.sha256(PNG).hexdigest()


def test_nested_columns(folder: Path, tmp_path: Path) -> None:
    row = {"told": {"question": f"<image>{QUESTION}", "answers": [ANSWER]}, "images": [PATH]}
    keys = {"prompt_key": "told.question", "response_key": "told.answers.0"}
    (found,) = read(folder, written(tmp_path, [row]), **keys)
    (same,) = read(folder, written(tmp_path, [FORMATS["verl"]]))
    assert (list(found.ids), found.loss_mask) == (list(same.ids), same.loss_mask)


def test_images_come_before_the_first_question_of_a_history(folder: Path, tmp_path: Path) -> None:
    row = {"instruction": QUESTION, "output": ANSWER, "history": [["First?", "yes"]], "images": [PATH]}
    (found,) = read(folder, written(tmp_path, [row]))
    text = load_tokenizer(str(folder)).decode(list(found.ids))
    assert text.startswith("<|im_start|>user\n<|vision_start|>")
    assert "<|vision_end|>First?<|im_end|>" in text


def test_csv_has_lists_as_json_and_empty_cells(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path, [], "rows.csv")
    two = json.dumps([PATH, "pictures/b.png"]).replace('"', '""')
    path.write_text(f'prompt,response,images\n<image>a<image>,x,"{two}"\n<image>a,x,{PATH}\na,x,\n')
    found = read(folder, path)
    assert [[Path(str(image.ref.path)).name for image in one.images] for one in found] == [
        ["a.png", "b.png"], ["a.png"], []
    ]  # fmt: skip


def test_images_keep_their_order(folder: Path, tmp_path: Path) -> None:
    row = {"messages": chat("<image> or <image>?"), "images": ["pictures/b.png", PATH]}
    (found,) = read(folder, written(tmp_path, [row]))
    assert [Path(str(image.ref.path)).name for image in found.images] == ["b.png", "a.png"]
    assert found.images[0].stop < found.images[1].start


def test_data_show_lists_images_and_writes_a_placeholder_once(folder: Path, tmp_path: Path) -> None:
    row = {"messages": chat("<image> or <image>?"), "images": ["pictures/b.png", PATH]}
    (found,) = read(folder, written(tmp_path, [row]))
    text = render(found, load_tokenizer(str(folder)), marks=True).plain
    assert text.count("<|image_pad|>") == 2
    assert f"[[{ANSWER}<|im_end|>]]" in text
    lines = image_lines(found)
    start = found.images[1].start
    assert [("b.png" in line, "a.png" in line) for line in lines] == [(True, False), (False, True)]
    assert f"{start} to {start + 3} (4)" in lines[1]
    assert "4 x 4" in lines[1]


BAD: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "too few images": ({"messages": chat("<image> <image>?"), "images": [PATH]}, "wrong-count", ("2", "1")),
    "too many images": ({"messages": chat("<image>?"), "images": [PATH, PATH]}, "wrong-count", ("1", "2")),
    "no images": ({"messages": chat("<image>?"), "images": None}, "wrong-count", ("1", "0")),
    "address": ({"messages": chat("<image>?"), "images": ["https://x.org/a.png"]}, "unsupported-format", ("x.org",)),
    "no file": ({"messages": chat("<image>?"), "images": ["none.png"]}, "no-such-file", ("none.png",)),
    "not an image": ({"messages": chat("<image>?"), "images": ["rows.jsonl"]}, "damaged-file", ("rows.jsonl",)),
    "literal token": ({"messages": chat("<|image_pad|><image>?"), "images": [PATH]}, "not-text", ("<|image_pad|>",)),
    "trained image": (
        {"messages": [*chat("hi")[:1], {"role": "assistant", "content": "<image>"}], "images": [PATH]},
        "not-text",
        (),
    ),
    "video": ({"messages": parts({"type": "video", "video": "a.mp4"})}, "not-text", ("video",)),
    "NUL": ({"messages": chat("<image>?"), "images": ["a\0.png"]}, "no-such-file", ("null",)),
    "empty path": ({"messages": chat("<image>?"), "images": [""]}, "empty-field", ("path",)),
    "system column": ({"system": "<image>", **FORMATS["LLaMA-Factory"]}, "wrong-count", ("the column system",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    row, code, values = BAD[name]
    path = written(tmp_path, [FORMATS["LLaMA-Factory"], row])
    with refuses("rows.jsonl line 2", code, *values):
        read(folder, path)


def test_expanded_lengths_count_and_images_are_never_cut(folder: Path, tmp_path: Path) -> None:
    path = written(tmp_path, [FORMATS["verl"], {"prompt": chat("short?")[:1], "response": "yes", "images": []}])
    full = read(folder, path)
    assert len(full[0]) > len(full[1])
    limit = len(full[0]) - 1
    assert len(read(folder, path, limit, overlong="drop")) == 1
    for overlong, most in (("error", limit), ("truncate_left", limit - 20)):
        with refuses("rows.jsonl line 1", "row-too-long", len(full[0])):
            read(folder, path, most, overlong=overlong)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the images that are processed. Encoded rows are cached, however few they are."""
    seen: list[int] = []
    real = processors.processed
    monkeypatch.setattr(processors, "processed", lambda *given: seen.append(1) or real(*given))
    monkeypatch.setattr(row_cache, "IMAGE_ROWS", 1)
    return seen


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_encoded_rows_are_found_again(folder: Path, tmp_path: Path, kept: list[int], name: str) -> None:
    """Images in files and in bytes, and a row without images."""
    files, data = [PATH, "pictures/b.png"], [{"bytes": one, "path": None} for one in (PNG, OTHER)]
    images = files if name == "rows.jsonl" else data
    rows = [{"messages": chat("<image> or <image>?"), "images": images}, {"messages": chat("none"), "images": []}]
    path, cache = written(tmp_path, rows, name), str(tmp_path / "cache")
    first = read(folder, path, cache=cache)
    assert len(kept) == 2
    assert read(folder, path, cache=cache) == first
    assert len(kept) == 2
    assert read(folder, path, cache="off") == first


def test_a_changed_image_or_processor_gives_no_stale_row(folder: Path, tmp_path: Path, kept: list[int]) -> None:
    """The file of an image changes, but neither its path, its size nor its time."""
    path, cache = written(tmp_path, [FORMATS["verl"]]), str(tmp_path / "cache")
    (before,) = read(folder, path, cache=cache)
    image = tmp_path / PATH
    facts, other = image.stat(), png_bytes(draw_squares("green", (0, 5)))
    size = len(PNG) + len(other)
    for content in (PNG, other):  # the bytes after the end of a PNG mean nothing
        image.write_bytes(content.ljust(size, b"\0"))
        os.utime(image, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        (after,) = read(folder, path, cache=cache)
        assert after.images[0].ref.digest == hashlib.sha256(image.read_bytes()).hexdigest()
        assert after.images[0].ref.digest != before.images[0].ref.digest
        before = after
    changed = tmp_path / "model"
    shutil.copytree(folder, changed)
    (same,) = read(changed, path, cache=cache)
    settings = json.loads((changed / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] = 28 * 28
    (changed / "preprocessor_config.json").write_text(json.dumps(settings))
    processors.image_processor.cache_clear()
    (smaller,) = read(changed, path, cache=cache)
    assert (same.images[0].tokens, smaller.images[0].tokens) == (4, 1)


def test_generate_refuses_a_placeholder_without_its_image(folder: Path) -> None:
    model = Conversation(str(folder), "cpu", max_new_tokens=2, temperature=0.0, seed=0, system=None)
    assert isinstance(model.answer("What <image>?"), str)
    with refuses("the prompt", "not-text", "<|image_pad|>", remedy="--image"):
        model.answer("What <|image_pad|>?")


def test_images_need_a_recent_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processors.image_processor.cache_clear()
    monkeypatch.setattr(processors, "version", lambda package: "5.17.0")
    with refuses("model.vision", "missing-package", "5.17.0", remedy="transformers>=5.20"):
        processors.image_processor(str(folder))


def test_images_need_model_vision(folder: Path, tmp_path: Path) -> None:
    data = Data(train=str(written(tmp_path, [FORMATS["verl"]])))
    request = RowRequest(Dataset, SupervisedRows, data.train, data, load_tokenizer(str(folder)), 200)
    with refuses("rows.jsonl line 1", "not-text", "images", remedy="model.vision"):
        load_rows(request)


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"method": "grpo", "rollout": {"engine": "hf"}}, "rollout.engine"),
        ({"method": "grpo", "rollout": {"engine": "sglang"}}, "rollout.engine"),
        ({"val": {"questions": "q.jsonl"}, "rollout": {"engine": "hf"}}, "rollout.engine"),
        ({"method": "grpo", "rollout": {"precision": "int8"}}, "rollout.precision"),
        ({"model": {"lora": {"rank": 4}}}, "model.vision"),
        ({"parallel": {"context_parallel": 2}}, "parallel.context_parallel"),
        ({"parallel": {"tensor_parallel": 2}}, "parallel.tensor_parallel"),
        ({"data": {"streaming": True}}, "data.streaming"),
    ],
)
def test_combinations_that_do_not_work_yet(keys: dict[str, Any], where: str) -> None:
    model = {"path": "m", "vision": "train", **keys.get("model", {})}
    data = {"train": "rows.jsonl", **keys.get("data", {})}
    with refuses(where, "unsupported-combination"):
        checked_recipe({"method": "sft", **keys, "model": model, "data": data})


def test_squares_differ_between_training_and_validation(tmp_path: Path) -> None:
    counts = write_squares(tmp_path, train_rows=40, val_rows=10)
    assert counts == {"val.parquet": 10, "sft_val.parquet": 10, "train.parquet": 40, "sft_train.parquet": 40}
    rows = {name: pyarrow.parquet.read_table(tmp_path / name).to_pylist() for name in counts}
    images = {name: {row["images"][0]["bytes"] for row in found} for name, found in rows.items()}
    assert not images["train.parquet"] & images["val.parquet"]
    first = rows["train.parquet"][0]
    pixels = draw_squares(first["extra_info"]["colour"], range(first["extra_info"]["count"]))
    assert (pixels == COLOURS[first["extra_info"]["colour"]]).all(-1).sum() == 100 * first["extra_info"]["count"]
