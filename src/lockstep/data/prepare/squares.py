"""Generated images: squares of one colour, with questions about their colour and number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.prepare.generated import assistant_message, too_few, user_message, write_files
from lockstep.errors import refuse_all
from lockstep.types import Row
from lockstep.vision.images import MARK, png_bytes

SQUARES_SOURCE = "squares"
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 30),
    "blue": (40, 60, 220),
    "yellow": (235, 220, 40),
    "black": (20, 20, 20),
    "purple": (150, 40, 170),
}
COUNTS = (1, 2, 3, 4)
# An image has this many cells per side, each with at most one square.
CELLS, CELL = 4, 14
COLOUR_QUESTION, COUNT_QUESTION = "What colour are the squares?", "How many squares are there?"


Picture = tuple[str, tuple[int, ...]]
"""The colour of the squares, and their cells."""


def draw_squares(colour: str, cells: Sequence[int]) -> np.ndarray:
    """Returns an image of height x width x 3 with squares of one colour in the given cells on a white background."""
    image = np.full((CELLS * CELL, CELLS * CELL, 3), 255, dtype=np.uint8)
    for cell in cells:
        top, left = (CELL * index + 2 for index in divmod(cell, CELLS))
        image[top : top + CELL - 4, left : left + CELL - 4] = COLOURS[colour]
    return image


def write_squares(folder: Path, *, train_rows: int = 2000, val_rows: int = 200, seed: int = 0) -> dict[str, int]:
    """Writes training and validation rows in verl's RL schema, and the same rows for SFT (`sft_*`). The images are in
    the column `images`. A validation image never occurs in the training rows. Returns the number of rows by file."""
    refuse_all(too_few(train_rows=train_rows, val_rows=val_rows))
    draw, seen = random.Random(f"squares/{seed}"), set[Picture]()
    files: dict[str, list[Row]] = {}
    for split, count in (("val", val_rows), ("train", train_rows)):
        drawn: list[tuple[Picture, str]] = []
        while len(drawn) < count:
            picture = (draw.choice(list(COLOURS)), tuple(sorted(draw.sample(range(CELLS**2), draw.choice(COUNTS)))))
            if split == "val":
                seen.add(picture)
            elif picture in seen:
                continue
            drawn.append((picture, draw.choice((COLOUR_QUESTION, COUNT_QUESTION))))
        files[split] = [_rl_row(*one) for one in drawn]
        files[f"sft_{split}"] = [_sft_row(*one) for one in drawn]
    return write_files(folder, files)


def _rl_row(picture: Picture, question: str) -> Row:
    return {
        "data_source": SQUARES_SOURCE,
        "prompt": user_message(f"{MARK}{question}"),
        "images": [_image(picture)],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": _answer(picture, question)},
        "extra_info": {"colour": picture[0], "count": len(picture[1])},
    }


def _sft_row(picture: Picture, question: str) -> Row:
    messages = [*user_message(f"{MARK}{question}"), *assistant_message(_answer(picture, question))]
    return {"messages": messages, "images": [_image(picture)]}


def _answer(picture: Picture, question: str) -> str:
    return picture[0] if question == COLOUR_QUESTION else str(len(picture[1]))


def _image(picture: Picture) -> dict[str, Any]:
    """Returns the image as the struct of a Hugging Face `Image` column."""
    return {"bytes": png_bytes(draw_squares(*picture)), "path": None}
