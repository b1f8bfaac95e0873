"""Prints the figure of docs/vision.md as SVG: the tokens of a row with an image. `make docs` writes it.

The row is encoded as in training: tokens, loss mask and positions come from the code that trains on rows.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from environment_figures import COLOURS, WIDTH, box, document, text
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.prepare.squares import COLOUR_QUESTION, draw_squares
from lockstep.model.load import load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_data import Data
from lockstep.types import Example
from lockstep.vision.images import MARK, png_bytes, read_image
from lockstep.vision.positions import position_offset, three_axes

COLOURS |= {"image": "#d5cdf0"}
TITLE = "The tokens of a row with an image: placeholders, loss mask and positions"
ANSWER = "blue"
# The picture, the columns of numbers, and the height of a line.
SIDE, INDEX, AXES, MASK, LINE = 112, 640, (724, 772, 820), WIDTH - 48, 27
KINDS = {"prompt": "prompt", "image": "image", "answer": "model"}


def encoded() -> tuple[Example, Any, Any]:
    """A row as SFT encodes it, its tokenizer, and its image."""
    with tempfile.TemporaryDirectory() as folder:
        place, model = Path(folder), f"{folder}/model"
        write_tiny_vlm(Path(model), hidden=32, layers=1)
        (place / "image.png").write_bytes(png_bytes(draw_squares(ANSWER, (1, 6, 12))))
        asked = {"role": "user", "content": MARK + COLOUR_QUESTION}
        row = {"messages": [asked, {"role": "assistant", "content": ANSWER}], "images": ["image.png"]}
        (place / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
        data, tokenizer = Data(train=str(place / "rows.jsonl")), load_tokenizer(model)
        reader = partial(SupervisedRows, images=model)
        (example,) = load_rows(RowRequest(Dataset, reader, data.train, data, tokenizer, 200)).examples
        pixels = read_image(example.images[0].ref, "the figure")
    return example, tokenizer, pixels


def lines(example: Example, tokenizer: Any) -> list[tuple[str, str, int, int]]:
    """The row in lines: part, text, first and last token. Each token of the image is a line, and each message is."""
    (image,) = example.images
    opening, places, found = tokenizer.convert_tokens_to_ids("<|im_start|>"), set(image.places()), []
    for at, flag in enumerate(example.loss_mask):
        part = "image" if at in places else "answer" if flag else "prompt"
        if not found or part == "image" or found[-1][0] != part or example.ids[at] == opening:
            found.append((part, at))
    stops = [start for _, start in found[1:]] + [len(example)]
    texts = [tokenizer.decode(list(example.ids[start:stop])) for (_, start), stop in zip(found, stops, strict=True)]
    shown = zip(found, texts, stops, strict=True)
    return [(part, words.replace("\n", "↵"), start, stop - 1) for (part, start), words, stop in shown]


def picture(pixels: Any, x: float, y: float, cells: tuple[int, int]) -> list[str]:
    """The image, with a grid of the pixels that one token stands for."""
    width, height = pixels.size
    scale, top = SIDE / width, 0
    parts = [f"<rect x='{x:g}' y='{y:g}' width='{SIDE}' height='{height * scale:g}' fill='#fff' stroke='#888'/>"]
    rows = [[pixels.getpixel((at, line)) for at in range(width)] for line in range(height)]
    for row, same in groupby(rows):
        left, tall = 0, len(list(same))
        for colour, group in groupby(row):
            wide = len(list(group))
            if colour != (255, 255, 255):
                place = f"x='{x + left * scale:g}' y='{y + top * scale:g}'"
                size = f"width='{wide * scale:g}' height='{tall * scale:g}'"
                parts.append(f"<rect {place} {size} fill='rgb{colour}'/>")
            left += wide
        top += tall
    for line in range(1, cells[1]):
        place = f"M{x + SIDE * line / cells[1]:g} {y:g}v{height * scale:g}"
        parts.append(f"<path d='{place}' stroke='#7a68c0' stroke-dasharray='4 3'/>")
    for line in range(1, cells[0]):
        place = f"M{x:g} {y + height * scale * line / cells[0]:g}h{SIDE}"
        parts.append(f"<path d='{place}' stroke='#7a68c0' stroke-dasharray='4 3'/>")
    return parts


def figure() -> str:
    example, tokenizer, pixels = encoded()
    (image,) = example.images
    axes = three_axes(len(example), example.images)
    merged = (image.grid[1] // image.merge, image.grid[2] // image.merge)
    parts = [text(16, 24, "part", weight="bold"), text(88, 24, "tokens of the row", weight="bold")]
    parts.append(text(INDEX, 24, "index", anchor="middle", weight="bold"))
    parts += [
        text(x, 24, name, anchor="middle", weight="bold") for x, name in zip(AXES, ("time", "row", "col"), strict=True)
    ]
    parts.append(text(MASK, 24, "loss mask", anchor="middle", weight="bold"))
    y, first = 36, 0
    for part, words, start, stop in lines(example, tokenizer):
        if part == "image":
            first = first or y
            row, column = divmod(start - image.start, merged[1])
            words += f"   row {row + 1}, column {column + 1} of the image"
        parts += [text(16, y + 15, part), box(80, y, 500, 22, KINDS[part]), text(88, y + 15, words)]
        shown = [(INDEX, start, stop), *((x, one[start], one[stop]) for x, one in zip(AXES, axes, strict=True))]
        parts += [text(x, y + 15, f"{a}" if a == b else f"{a}–{b}", anchor="middle") for x, a, b in shown]
        parts.append(text(MASK, y + 15, f"{example.loss_mask[start]}", anchor="middle"))
        y += LINE
    parts += picture(pixels, 440, first - 4, merged)
    offset = position_offset(example.images)
    size, patches, tile = (" x ".join(map(str, pair)) for pair in (pixels.size, image.grid[1:], [image.merge] * 2))
    notes = (
        f"The image of {size} pixels has {patches} patches, and the tower merges {tile} patches into one feature: "
        f"{image.tokens} tokens.",
        "Text after the image continues after its largest position. So the positions of this text are "
        f"{-offset} less than its indices,",
        "and the engine decodes with the same offset. Only the tokens of the answer are trained.",
    )
    parts += [text(16, y + 14 + 16 * line, note, colour="#555") for line, note in enumerate(notes)]
    return document(y + 60, parts, TITLE)


if __name__ == "__main__":
    print(figure())
