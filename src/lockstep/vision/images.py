"""Reads the images of a data row, and writes each image as a placeholder into the text of its message.

Five row formats are read: verl and LLaMA-Factory (`<image>` in the text, and a column `images`), TRL (a column `image`
or `images`; a chat without placeholders gets them before its first user text), OpenRLHF (parts `{"type": "image"}` and
a column `images`), and OpenAI (parts `image_url` with a data URI). A part may also contain its image.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import Refusal, missing_extra
from lockstep.vision.spans import ImageRef

Row = dict[str, Any]

# Files of a model folder that determine the pixels of images.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
# Columns with the images of a row.
COLUMNS = ("images", "image")
# The placeholder of an image in the text of verl and LLaMA-Factory.
MARK = "<image>"
# Types of content parts that are images, and the keys under which such a part may contain its image.
IMAGE_PARTS = ("image", "image_url", "input_image")
_INLINE = ("image", "image_url", "url", "path", "base64", "bytes")
# The beginning of a dialogue that is one text.
_HUMAN = re.compile(r"\s*Human:\s*")
PREVIEW = 1024
# The first bytes of image files: JPEG, PNG, GIF, WebP, BMP and TIFF.
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*")
_URLS = ("http://", "https://", "s3://", "gs://", "ftp://", "oss://")


def read_image(ref: ImageRef, where: object) -> Any:
    """Returns the image (`PIL.Image.Image`) as RGB, rotated as its EXIF data says, as `load_image` of transformers
    does. Raises `Refusal` if it is not a readable image or if its file has changed since the row was read."""
    image_module, _ = pillow()
    data = image_bytes(ref, where)
    try:
        with image_module.open(io.BytesIO(data)) as opened:
            return _upright_rgb(opened, f"the image {ref}", where)
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        # Pillow names the address of a buffer.
        why = "it is no image" if isinstance(error, image_module.UnidentifiedImageError) else str(error)
        raise Refusal.at(
            where, f"the image {ref} cannot be read: {why}", "fix or remove the row", code="damaged-file"
        ) from error


def _upright_rgb(image: Any, name: str, where: object) -> Any:
    """Returns a PIL image as RGB, rotated as its EXIF data says. Raises `Refusal` for 16-bit grey, integers and floats,
    whose pixels Pillow clips to 0 and 255: such an image would become white or black."""
    if image.mode.startswith("I") or image.mode == "F":
        raise Refusal.at(
            where,
            f"{name} has more than 8 bits per pixel and channel (mode {image.mode} of Pillow)",
            "scale its pixels to 0 to 255, and save it with 8 bits",
            code="unsupported-format",
        )
    return pillow()[1].exif_transpose(image).convert("RGB")


def image_bytes(ref: ImageRef, where: object) -> bytes:
    """Returns the bytes of the image file. Raises `Refusal` if the file has changed since the row was read."""
    data = ref.data if ref.data is not None else _file_bytes(Path(str(ref.path)), where)
    if hashlib.sha256(data).hexdigest() != ref.digest:
        raise Refusal.at(
            where, f"the image {ref} has changed since the rows were read", "start the run again", code="damaged-file"
        )
    return data


def pillow() -> tuple[Any, Any]:
    """Returns the modules `PIL.Image` and `PIL.ImageOps`. Raises `Refusal` if Pillow is not installed."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise missing_extra("pillow", "vision", "images") from error
    return Image, ImageOps


def png_bytes(pixels: np.ndarray) -> bytes:
    """Returns an array of height x width x 3 bytes as a PNG file."""
    image_module, _ = pillow()
    return _png(image_module.fromarray(pixels))


def preview_png(ref: ImageRef, where: object) -> bytes:
    """Returns an image as a PNG file of at most `PREVIEW` x `PREVIEW` pixels, for pages."""
    image = read_image(ref, where)
    image.thumbnail((PREVIEW, PREVIEW))
    return _png(image)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def image_ref(value: Any, folder: Path, where: object) -> ImageRef:
    """Returns the reference of an image: a path (relative to the data file), a data URI, base64 text, bytes, the struct
    of a Hugging Face `Image` column, an OpenAI `image_url`, a PIL image, or a reference."""
    value = _inner(value)
    if isinstance(value, ImageRef):
        return value
    if isinstance(value, str):
        if not value.strip():
            raise Refusal.at(where, "the path of an image is empty", "write the path, or remove it", code="empty-field")
        if value.startswith("data:") or value.startswith("base64,"):
            return _of_bytes(_decoded(value.partition(",")[2], where))
        if value.startswith(_URLS):
            raise Refusal.at(
                where,
                f"the image {value[:80]} is an address, and runs do not download images",
                "download the images, and write their paths into the rows",
                code="unsupported-format",
            )
        path = folder / value.removeprefix("file://")
        if not _is_file(path) and (data := _bare_base64(value)) is not None:
            return _of_bytes(data)
        return ImageRef(hashlib.sha256(_file_bytes(path, where)).hexdigest(), path=str(path))
    if isinstance(value, bytes | bytearray | memoryview):
        return _of_bytes(bytes(value))
    if hasattr(value, "save") and hasattr(value, "convert"):
        return _of_bytes(_png(_upright_rgb(value, "an image", where)))
    raise Refusal.at(
        where,
        f"an image is of type {type(value).__name__}",
        "give a path, a data URI, bytes, or the struct of a Hugging Face Image column",
        code="unsupported-format",
    )


def _inner(value: Any) -> Any:
    """Returns the path, text or bytes inside a struct."""
    while isinstance(value, Mapping):
        filled = {key: inner for key, inner in value.items() if inner is not None}
        key = next((key for key in ("bytes", "base64", "url", "path", "image", "image_url") if key in filled), None)
        if key is None:
            return value
        value = f"base64,{filled[key]}" if key == "base64" and isinstance(filled[key], str) else filled[key]
    return value


def _of_bytes(data: bytes) -> ImageRef:
    return ImageRef(hashlib.sha256(data).hexdigest(), data=data)


def _decoded(text: str, where: object) -> bytes:
    """Returns the bytes of base64 text, which may have line breaks."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal.at(
            where, f"the base64 text of an image is invalid: {error}", "fix or remove the row", code="damaged-file"
        ) from error


def _bare_base64(text: str) -> bytes | None:
    """Returns the bytes of base64 text without `base64,` before it, or None if it is not the text of an image file."""
    try:
        data = base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    return data if data.startswith(_SIGNATURES) else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # for example a name that is too long
        return False


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def file_digest(path: Path) -> str | None:
    """Returns the SHA-256 of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _file_bytes(path: Path, where: object) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        raise Refusal.at(
            where,
            f"the image {_shortened(str(path))} cannot be read: {getattr(error, 'strerror', None) or error}",
            "write paths relative to the folder of the data file, or absolute paths",
            code="no-such-file",
        ) from error


@dataclass
class _Images:
    """The images of a row while its messages are read."""

    listed: Iterator[Any]
    placeholder: str
    folder: Path
    where: object
    refs: list[ImageRef] = field(default_factory=list)
    missing: int = 0
    """The number of placeholders for which the column has no image."""
    from_column: int = 0

    def next(self) -> str:
        """Takes the next image of the column. Returns its placeholder."""
        value = next(self.listed, None)
        if value is None:
            self.missing += 1
        else:
            self.from_column += 1
            self.refs.append(image_ref(value, self.folder, self.where))
        return self.placeholder

    def take(self, value: Any) -> str:
        self.refs.append(image_ref(value, self.folder, self.where))
        return self.placeholder


def has_images(row: Row) -> bool:
    """Returns whether a row has a column with images, or a chat with a content part that is an image."""
    if any(row.get(name) for name in COLUMNS):
        return True
    turns = [turn for value in row.values() if isinstance(value, list) for turn in value if isinstance(turn, Mapping)]
    parts = [part for turn in turns if isinstance(turn.get("content"), list) for part in turn["content"]]
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts)


def with_placeholders(
    row: Row, keys: tuple[str, ...], placeholder: str, pad: str, folder: Path, where: object
) -> tuple[Row, list[ImageRef]]:
    """Returns the row with `placeholder` at the place of each image in the columns `keys`, and the images in order.

    Raises `Refusal` if the number of placeholders differs from the number of images, or if a text contains the
    placeholder token `pad` of the model.
    """
    column, listed = image_column(row, where)
    images = _Images(iter(listed), placeholder, folder, where)
    new: Row = {key: value for key, value in row.items() if key not in COLUMNS}
    for key in keys:
        if key in new:
            new[key] = _in_value(new[key], images, pad)
    if listed and not images.from_column:
        if not images.refs:
            _before_first_user_text(new, keys, images, len(listed))
        elif [image_ref(one, folder, where).digest for one in listed] == [ref.digest for ref in images.refs]:
            listed = []  # the column repeats the images of the parts
    unused = len(listed) - images.from_column
    if images.missing or unused:
        marks, inline = images.from_column + images.missing, len(images.refs) - images.from_column
        more = f", besides {inline} parts that contain their image" if inline else ""
        raise Refusal.at(
            where,
            f"the text has {_counted(marks, 'image placeholder')}{more}, and {column} has "
            f"{_counted(len(listed), 'image')}",
            f"write one {MARK} or one part of type image for each image of the row",
            code="wrong-count",
        )
    return new, images.refs


def image_column(row: Row, where: object) -> tuple[str, list[Any]]:
    """Returns the column with the images of a row, and its images. Raises `Refusal` if both columns have images, and
    these differ."""
    columns = {name: _listed(row[name]) for name in COLUMNS if row.get(name) is not None}
    filled = {name: images for name, images in columns.items() if images}
    if len(filled) > 1 and filled[COLUMNS[0]] != filled[COLUMNS[1]]:
        raise Refusal.at(
            where,
            f"the columns {' and '.join(COLUMNS)} have different images",
            "give all images in one of these columns, and remove or rename the other column",
            code="wrong-count",
        )
    return next(iter((filled or columns).items()), ("the row", []))


def _listed(value: Any) -> list[Any]:
    """Returns the images of a column. csv files have a list as JSON text, and empty text for no image."""
    if isinstance(value, str) and value.startswith("["):
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list | tuple):
        return [one for one in value if one is not None]
    return [] if isinstance(value, str) and not value.strip() else [value]


def _in_value(value: Any, images: _Images, pad: str) -> Any:
    """Writes placeholders into a text, a message or a list of messages."""
    if isinstance(value, str):
        return _in_text(value, images, pad)
    if isinstance(value, Mapping):
        key = "content" if "content" in value else "value"
        return {**value, key: _in_content(value.get(key), images, pad)}
    if isinstance(value, list):
        return [_in_value(turn, images, pad) for turn in value]
    return value


def _in_content(content: Any, images: _Images, pad: str) -> Any:
    if isinstance(content, str):
        return _in_text(content, images, pad)
    if isinstance(content, Mapping):  # one part without its list
        return _in_part(content, images, pad)
    if not isinstance(content, list):
        return content
    parts = [_in_part(part, images, pad) for part in content]
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return parts  # parts of other types are refused with the row's other messages


def _in_part(part: Any, images: _Images, pad: str) -> Any:
    if isinstance(part, str):
        return _in_text(part, images, pad)
    if not isinstance(part, Mapping):
        return part
    filled = {key: value for key, value in part.items() if value is not None}
    kind = filled.get("type")
    if kind in IMAGE_PARTS:
        inline = next((filled[key] for key in _INLINE if key in filled), None)
        return images.next() if inline is None else images.take(filled)
    if kind in ("text", "input_text", "output_text") and isinstance(filled.get("text"), str):
        return _in_text(filled["text"], images, pad)
    return part


def _in_text(text: str, images: _Images, pad: str) -> str:
    if pad in text.replace(MARK, ""):
        raise Refusal.at(
            images.where,
            f"a text contains {pad}, which is the model's placeholder of an image",
            f"write {MARK} and give the image in the column images",
            code="not-text",
        )
    first, *rest = text.split(MARK)
    return first + "".join(images.next() + part for part in rest)


def _before_first_user_text(row: Row, keys: tuple[str, ...], images: _Images, count: int) -> None:
    """Writes all placeholders before the first user text, as TRL does for chats without placeholders."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value:
            marks, human = "".join(images.next() for _ in range(count)), _HUMAN.match(value)
            start = human.end() if human else 0
            row[key] = value[:start] + marks + value[start:]
            return
        for turn in value if isinstance(value, list) else ():
            if isinstance(turn, list):  # a question with its answer (`history` of Alpaca)
                if turn and isinstance(turn[0], str):
                    turn[0] = "".join(images.next() for _ in range(count)) + turn[0]
                    return
                continue
            content = "content" if "content" in turn else "value"
            role = turn.get("role") or turn.get("from")
            if role in ("user", "human") and isinstance(turn.get(content), str):
                turn[content] = "".join(images.next() for _ in range(count)) + turn[content]
                return
