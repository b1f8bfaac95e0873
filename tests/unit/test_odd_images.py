"""Odd images of rows: the pixels are those that transformers computes, or the row is refused with its place."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.model.load import load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Example
from lockstep.vision.images import image_ref, read_image
from lockstep.vision.processors import image_processor, pixels_of
from refusals import refuses
from vision_families import write_family

SLOW = pytest.mark.slow
FAMILIES = ("qwen2_5_vl", pytest.param("gemma3", marks=SLOW), pytest.param("smolvlm", marks=SLOW))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "model"
    write_tiny_vlm(folder, hidden=32, layers=1)
    return folder


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, len(mode)), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def stored(image: Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **how)
    return buffer.getvalue()


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    return stored(noise(64, 32), "JPEG", exif=exif, quality=95)


def with_palette() -> bytes:
    """An image with a palette, in which one colour is transparent."""
    return stored(noise(40, 40).quantize(16), "PNG", transparency=3)


def animated() -> bytes:
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("red", "green", "blue")]
    return stored(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50)


READABLE: dict[str, Callable[[], bytes]] = {
    "cmyk": lambda: stored(noise(48, 40, "CMYK"), "JPEG"),
    "palette with a transparent colour": with_palette,
    "alpha": lambda: stored(noise(40, 40, "RGBA")),
    "grey with alpha": lambda: stored(noise(40, 40).convert("LA")),
    "grey": lambda: stored(noise(40, 40).convert("L")),
    "black and white": lambda: stored(noise(40, 40).convert("1")),
    "one pixel": lambda: stored(noise(1, 1)),
    "three rows": lambda: stored(noise(90, 3)),
    "rotated by its EXIF data": rotated,
    "animated": animated,
    "webp": lambda: stored(noise(40, 40), "WEBP", lossless=True),
}


def read(folder: Path, place: Path, *rows: dict[str, Any], limit: int = 4000) -> list[Example]:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = Data(train=str(place / "rows.jsonl"), require_end=False)
    reader = partial(SupervisedRows, images=str(folder))
    source = [Source(path=str(place / "rows.jsonl"))]
    return load_rows(RowRequest(Dataset, reader, source, data, load_tokenizer(str(folder)), limit)).examples


def chat(content: Any, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "red"}]
    return {"messages": turns, **more}


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_are_those_of_transformers(family: str, qwen: Path, tmp_path: Path) -> None:
    folder = qwen if family == "qwen2_5_vl" else write_family(family, tmp_path / "model")
    for name, make in READABLE.items():
        (tmp_path / "image").write_bytes(make())
        (row,) = read(folder, tmp_path, chat("<image>?", images=["image"]))
        theirs = load_image(str(tmp_path / "image"))
        wanted = image_processor(str(folder))(images=[theirs], return_tensors="np")["pixel_values"]
        found = pixels_of(row.images[0], "test")
        np.testing.assert_array_equal(found, np.reshape(wanted, found.shape), err_msg=name)


def test_an_image_is_upright_and_its_first_frame_is_read() -> None:
    ref = image_ref(rotated(), Path(), "test")
    assert read_image(ref, "test").size == (32, 64)
    image = Image.open(io.BytesIO(rotated()))
    assert read_image(image_ref(image, Path(), "test"), "test").size == (32, 64)  # a column of PIL images
    assert read_image(image_ref(animated(), Path(), "test"), "test").getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize("form", ["data:image/png;base64,", "base64,", ""])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP"])
def test_base64_text_with_line_breaks_is_read(form: str, kind: str) -> None:
    """The base64 text of a JPEG begins with a slash, as a path does."""
    data = stored(noise(60, 60), kind)
    found = image_ref(form + base64.encodebytes(data).decode(), Path(), "test")
    assert found.data == data


def test_a_column_of_16_bit_images_is_refused() -> None:
    with refuses("row 3", "unsupported-format", "I;16"):
        image_ref(Image.fromarray(np.full((4, 4), 300, np.uint16)), Path(), "row 3")


def test_a_path_may_leave_the_folder_of_the_rows(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "a.png").write_bytes(stored(noise(40, 40)))
    (row,) = read(qwen, tmp_path / "rows", chat("<image>", images=["../a.png"]))
    assert len(row.images) == 1


@pytest.mark.parametrize("column", [None, [], [None]])
def test_a_row_without_images_is_text(column: Any, qwen: Path, tmp_path: Path) -> None:
    (row,) = read(qwen, tmp_path, chat("how much?", images=column))
    assert row.images == ()
    with refuses("line 2", "wrong-count", "1 image placeholder,", remedy="<image>"):
        read(qwen, tmp_path, chat("a"), chat("<image>?", images=column))


def test_an_image_may_occur_twice_and_forty_times(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(stored(noise(56, 56)))
    row = chat("<image>" * 40, images=["a.png"] * 40)
    (found,) = read(qwen, tmp_path, row)
    assert len({image.ref.digest for image in found.images}) == 1
    assert [image.features for image in found.images] == [4] * 40
    pad = load_tokenizer(str(qwen)).convert_tokens_to_ids("<|image_pad|>")
    assert list(found.ids).count(pad) == 160
    with refuses("line 1", "row-too-long", remedy="data.max_tokens"):
        read(qwen, tmp_path, row, limit=100)


PART = {"type": "image", "image": "good.png"}


@pytest.mark.parametrize(
    "row",
    [
        chat("<image>", images=[], image="good.png"),
        chat("<image>", images=["good.png"], image="good.png"),
        chat([PART], images=["good.png"]),
    ],
)
def test_no_column_is_ignored_and_no_image_counts_twice(row: dict[str, Any], qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(stored(noise(56, 56)))
    (found,) = read(qwen, tmp_path, row)
    assert [image.features for image in found.images] == [4]


def answered_with_an_image() -> dict[str, Any]:
    turns = [{"role": "user", "content": "draw"}, {"role": "assistant", "content": "<image>"}]
    return {"messages": turns, "images": ["good.png"]}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str, str]] = {
    "a truncated JPEG": (lambda: chat("<image>", images=["half.jpg"]), "damaged-file", "truncated"),
    "no bytes": (lambda: chat("<image>", images=["empty.png"]), "damaged-file", "cannot be read"),
    "10,000 x 3 pixels": (lambda: chat("<image>", images=["thin.png"]), "unsupported-format", "aspect ratio"),
    "an image in a trained turn": (answered_with_an_image, "not-text", "trained turn"),
    "two images, one placeholder": (lambda: chat("<image>", images=["good.png"] * 2), "wrong-count", "has 2 images"),
    "no such file": (lambda: chat("<image>", images=["missing.png"]), "no-such-file", "missing.png"),
    "broken base64": (lambda: chat("<image>", images=["data:image/png;base64,@@"]), "damaged-file", "base64"),
    "an address": (lambda: chat("<image>", images=["https://example.org/a.png"]), "unsupported-format", "address"),
    "two columns": (lambda: chat("<image>", images=["good.png"], image="thin.png"), "wrong-count", "different images"),
    "other images in parts": (lambda: chat([PART], images=["thin.png"]), "wrong-count", "besides 1 parts"),
    "a number": (lambda: chat("<image>", images=[7]), "unsupported-format", "of type int"),
    "16 bits per pixel": (lambda: chat("<image>", images=["deep.png"]), "unsupported-format", "more than 8 bits"),
    "floats": (lambda: chat("<image>", images=["floats.tiff"]), "unsupported-format", "more than 8 bits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_images_are_refused_with_row_and_remedy(name: str, qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "half.jpg").write_bytes(stored(noise(200, 200), "JPEG")[:2000])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "thin.png").write_bytes(stored(noise(10_000, 3)))
    (tmp_path / "good.png").write_bytes(stored(noise(40, 40)))
    depth = np.linspace(0, 65535, 1600).reshape(40, 40)
    (tmp_path / "deep.png").write_bytes(stored(Image.fromarray(depth.astype(np.uint16))))
    (tmp_path / "floats.tiff").write_bytes(stored(Image.fromarray(depth.astype(np.float32) / 65535), "TIFF"))
    make, code, why = REFUSED[name]
    with refuses("line 2", code, why) as caught:
        read(qwen, tmp_path, chat("text only"), make())
    assert all(problem.remedy for problem in caught.value.problems)


@SLOW
def test_a_thin_image_of_a_family_with_a_fixed_size_is_read(tmp_path: Path) -> None:
    folder = write_family("gemma3", tmp_path / "model")
    (tmp_path / "thin.png").write_bytes(stored(noise(10_000, 3)))
    (row,) = read(folder, tmp_path, chat("<image>", images=["thin.png"]))
    theirs = np.asarray(Image.open(tmp_path / "thin.png").resize((32, 32), Image.Resampling.BILINEAR), np.float32)
    wanted = (theirs / 255 - 0.5) / 0.5
    np.testing.assert_allclose(pixels_of(row.images[0], "test")[0], wanted.transpose(2, 0, 1), atol=1e-5)
