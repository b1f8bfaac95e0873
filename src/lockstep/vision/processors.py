"""The image processor of a model folder: the placeholder tokens of an image, and its pixels.

The image processor is that of transformers which computes with Pillow and numpy, on every machine. It needs no
torchvision, and the pixels do not depend on installed packages.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lockstep.errors import Refusal, first_line
from lockstep.vision.images import pillow, read_image
from lockstep.vision.spans import ImageRef, ImageSpan

# Bytes of pixels that a process keeps, so that a later epoch does not process its images again.
KEPT_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Family:
    """How a model family writes an image into its prompt: one `pad` token per feature, with a text before and after."""

    before: str
    pad: str
    after: str

    @property
    def placeholder(self) -> str:
        return self.before + self.pad + self.after


_QWEN = Family("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
# The families by `model_type`. Their image processors return `image_grid_thw`, and they have positions on three axes.
FAMILIES: dict[str, Family] = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN)


def family_of(model_type: str, where: object) -> Family:
    """Returns how the model's family writes images. Raises `Refusal` for a family that cannot be trained on images."""
    found = FAMILIES.get(model_type)
    if found is None:
        raise Refusal.at(
            where,
            f"images cannot be trained with models of type {model_type}",
            f"remove model.vision to train it on text, or use one of {', '.join(sorted(FAMILIES))}",
            code="unsupported-model",
        )
    return found


@lru_cache(maxsize=4)
def image_processor(folder: str) -> Any:
    """Returns the image processor of a model folder."""
    pillow()
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise Refusal.at(
            f"model.path {folder}",
            f"its image processor cannot be loaded: {first_line(error)}",
            "copy preprocessor_config.json of the published model into the folder",
            code="missing-file",
        ) from error
    return processor


@dataclass(frozen=True)
class ImageTokens:
    """Writes the images of a row into its tokens, for the model of one folder."""

    folder: str
    family: Family
    pad_id: int

    def spans(self, ids: Sequence[int], refs: Sequence[ImageRef], where: object) -> list[ImageSpan]:
        """Returns the images of a sequence, which has one pad token per image. `start` counts the expanded tokens."""
        found, shift = [], 0
        for place, ref in zip([at for at, token in enumerate(ids) if token == self.pad_id], refs, strict=False):
            found.append(self._span(place + shift, ref, where))
            shift += found[-1].tokens - 1
        return found

    def _span(self, start: int, ref: ImageRef, where: object) -> ImageSpan:
        processor = image_processor(self.folder)
        image = read_image(ref, where)
        try:
            patches = processed(processor, image)
        except ValueError as error:  # for example an extreme aspect ratio
            raise Refusal.at(
                where,
                f"the image {ref} cannot be processed: {first_line(error)}",
                "resize the image, or remove the row",
                code="unsupported-format",
            ) from error
        _PIXELS.put(self.folder, ref, patches[0])
        return ImageSpan(start, patches[1], int(processor.merge_size), ref, self.folder)

    def expanded(
        self, ids: Sequence[int], mask: Sequence[int], images: Sequence[ImageSpan]
    ) -> tuple[array[int], bytes]:
        """Returns token ids and loss mask with as many pad tokens for each image as it has features."""
        tokens, trained, sizes = array("q"), bytearray(), iter([image.tokens for image in images])
        for token, flag in zip(ids, mask, strict=True):
            times = next(sizes) if token == self.pad_id else 1
            tokens.extend([token] * times)
            trained.extend([flag] * times)
        return tokens, bytes(trained)


def processed(processor: Any, image: Any) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Returns the pixels of an image, with one row per patch, and its grid."""
    made = processor(images=[image], return_tensors="np")
    time, height, width = (int(size) for size in made["image_grid_thw"][0])
    return np.ascontiguousarray(made["pixel_values"], dtype=np.float32), (time, height, width)


class _Pixels:
    """The pixels of the last images of this process, by model folder and image."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], np.ndarray] = OrderedDict()
        self._bytes = 0

    def get(self, folder: str, ref: ImageRef) -> np.ndarray | None:
        return self._kept.get((folder, ref.digest))

    def put(self, folder: str, ref: ImageRef, pixels: np.ndarray) -> None:
        """Keeps the pixels of an image, and forgets the oldest images over `KEPT_BYTES`."""
        if self.get(folder, ref) is None:
            self._kept[folder, ref.digest] = pixels
            self._bytes += pixels.nbytes
        while len(self._kept) > 1 and self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


_PIXELS = _Pixels()


def pixels_of(image: ImageSpan, where: object) -> np.ndarray:
    """Returns the pixels of an image of a row."""
    found = _PIXELS.get(image.folder, image.ref)
    if found is None:
        found, grid = processed(image_processor(image.folder), read_image(image.ref, where))
        if grid != image.grid:
            raise Refusal.at(
                f"model.path {image.folder}",
                "its image processor has changed since the rows were read",
                "start the run again",
                code="damaged-file",
            )
        _PIXELS.put(image.folder, image.ref, found)
    return found
