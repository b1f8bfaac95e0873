"""Environments and a tool that return images. The host processes load this file by its path."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from lockstep.environments import Reply, Start, TextTurn, Turn


def drawn(seed: int, height: int, width: int) -> Image.Image:
    """An image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def data_uri(image: Image.Image) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class Gallery:
    """Shows the images of the row, then images of its own: as PIL image, as data URI and as bytes. Which images it
    shows depends on the seed, so the samples of a prompt see different ones."""

    def __init__(self, turns: int = 4, sizes: Sequence[Sequence[int]] = ((32, 64), (64, 32), (48, 48))):
        self.turns, self.sizes, self.seen = turns, sizes, 0
        self.info: dict[str, Any] = {}

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        self.seed = seed
        self.info = {"sizes": [image.size for image in row.get("images", [])]}
        more = {"role": "user", "content": [{"type": "image", "image": drawn(1, 32, 32)}, "and this?"]}
        return Start([*row["prompt"], {"role": "assistant", "content": "yes"}, more])

    def step(self, reply: Reply) -> Turn:
        self.seen += 1
        if self.seen == self.turns:
            return Turn([{"role": "user", "content": [drawn(0, 32, 32), "the end"]}], done=True)
        height, width = self.sizes[(self.seen + self.seed) % len(self.sizes)]
        image = drawn(self.seed + self.seen, height, width)
        forms: list[list[Any]] = [
            ["what is ", image, "?"],
            ["two: ", data_uri(image), {"type": "text", "text": " and "}, image.rotate(90, expand=True), "."],
            [{"type": "image", "bytes": png(image)}, " only"],
        ]
        return Turn([{"role": "user", "content": forms[(self.seen - 1) % 3]}])


class Wrong(Gallery):
    """Returns a message that cannot be used, as the ground truth of the row says."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Start:
        self.kind = row["ground_truth"]
        return super().reset(row, seed)

    def step(self, reply: Reply) -> Turn:
        contents: dict[str, Any] = {
            "placeholder": "here: <|image_pad|>",
            "damaged": [{"type": "image", "bytes": b"no image"}],
            "address": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
            "path": [{"type": "image", "path": "/etc/hostname"}],
            "thin": [drawn(0, 2, 900)],
        }
        return Turn([{"role": "user", "content": contents[self.kind]}])


class Raw:
    """Writes raw text: the rendered prompt, then text without images, or with a placeholder."""

    def __init__(self, answer: str = "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"):
        self.answer, self.seen = answer, 0

    def reset_text(self, row: Mapping[str, Any], seed: int) -> TextTurn:
        return TextTurn(row["prompt_text"])

    def step_text(self, reply: Reply) -> TextTurn:
        self.seen += 1
        return TextTurn(self.answer, done=self.seen == 2)


def look(place: str) -> Any:
    """Takes a photo.

    Args:
        place: Where.
    """
    return [f"A photo of {place}:", drawn(len(place), 32, 64)]


def picture_of(place: str) -> Any:
    """Takes a picture.

    Args:
        place: Where.
    """
    return drawn(len(place), 64, 32)
