"""The image processor of a model folder: the placeholder tokens of an image, and its pixels.

The image processor is that of transformers which computes with Pillow and numpy, on every machine. It needs no
torchvision, and the pixels do not depend on installed packages.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np

from lockstep.errors import Refusal, first_line
from lockstep.vision.families import Family, ImageGrid, family_of
from lockstep.vision.images import pillow, read_image
from lockstep.vision.spans import ImageRef, ImageSpan

# Older versions of transformers load image processors only with torchvision, and their VLMs compute positions in a way
# that the built-in engine does not support.
OLDEST_TRANSFORMERS = (5, 20)
# Bytes of pixels that a process keeps, so that a later epoch does not process its images again.
KEPT_BYTES = 2 * 2**30


@lru_cache(maxsize=4)
def image_processor(folder: str) -> Any:
    """Returns the image processor of a model folder."""
    pillow()
    from transformers import AutoImageProcessor

    installed = version("transformers")
    if tuple(int(part) for part in installed.split(".")[:2]) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise Refusal.at(
            "model.vision",
            f"transformers {installed} is installed, and images need at least {oldest}",
            f'run pip install "transformers>={oldest},<6"',
            code="missing-package",
        )
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


@lru_cache(maxsize=4)
def config_with_images(folder: str) -> Any:
    """Returns the config of a model folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


@dataclass(frozen=True)
class ImageTokens:
    """Writes the images of a row into its tokens, for the model of one folder."""

    folder: str
    family: Family
    token_id: int
    """The token that stands for an image before it is expanded."""
    pad_id: int
    tokenizer: Any

    @classmethod
    def of(cls, folder: str, tokenizer: Any) -> ImageTokens:
        """Raises `Refusal` if the family of the model takes no images, or if the tokenizer is not that of the model."""
        config, where = config_with_images(folder), f"model.path {folder}"
        family = family_of(config.model_type, where).spelled(config, tokenizer)
        pad_id = tokenizer.convert_tokens_to_ids(family.pad)
        if pad_id != config.image_token_id:
            raise Refusal.at(
                where,
                f"{family.pad} is token {pad_id} of the tokenizer, but the placeholder of an image in config.json is "
                f"{config.image_token_id}",
                "use the tokenizer of the published model",
                code="other-vocabulary",
            )
        image_processor(folder)  # refuses a folder without one before the first row is read
        token_id = tokenizer.convert_tokens_to_ids(family.token or family.pad)
        return cls(folder, family, token_id, pad_id, tokenizer)

    def spans(
        self, ids: Sequence[int], refs: Sequence[ImageRef], where: object, known: dict[str, ImageSpan] | None = None
    ) -> list[ImageSpan]:
        """Returns the images of a sequence, which has one token per image. `start` counts the expanded tokens. `known`
        has the images of the row's other sequences by their hash, which are not processed again."""
        found, shift, known = [], 0, {} if known is None else known
        for place, ref in zip([at for at, token in enumerate(ids) if token == self.token_id], refs, strict=False):
            if ref.digest not in known:
                known[ref.digest] = self._span(0, ref, where)
            found.append(replace(known[ref.digest], start=place + shift))
            shift += found[-1].tokens - 1
        return found

    def _span(self, start: int, ref: ImageRef, where: object) -> ImageSpan:
        image = read_image(ref, where)
        try:
            pixels, grid = processed(self.folder, image)
            ids = self._ids(grid)
        except (ValueError, TypeError, KeyError) as error:  # for example an extreme aspect ratio
            raise Refusal.at(
                where,
                f"the image {ref} cannot be processed: {first_line(error)}",
                "resize the image, or remove the row",
                code="unsupported-format",
            ) from error
        _PIXELS.put(self.folder, ref, pixels)
        config = config_with_images(self.folder)
        merge = int(config.vision_config.spatial_merge_size) if self.family.three_axes else 0
        return ImageSpan(start, grid, merge, ref, self.folder, _runs(ids, self.pad_id), self.family.both_ways(config))

    def _ids(self, grid: ImageGrid) -> list[int]:
        """Returns the tokens of an image."""
        text = self.family.text(grid, config_with_images(self.folder))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def expanded(
        self, ids: Sequence[int], mask: Sequence[int], images: Sequence[ImageSpan]
    ) -> tuple[array[int], bytes]:
        """Returns token ids and loss mask with the tokens of each image."""
        tokens, trained, each = array("q"), bytearray(), iter(images)
        for token, flag in zip(ids, mask, strict=True):
            own = self._ids(next(each).grid) if token == self.token_id else [token]
            tokens.extend(own)
            trained.extend([flag] * len(own))
        return tokens, bytes(trained)


def _runs(ids: Sequence[int], pad_id: int) -> tuple[int, ...]:
    """Returns the lengths of the runs of other tokens and of pad tokens, in turn. Other tokens come first."""
    flags = np.asarray(ids) == pad_id
    borders = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0)) if len(flags) else flags
    return tuple(int(size) for size in np.diff([0, *borders, len(flags)]))


def processed(folder: str, image: Any) -> tuple[np.ndarray, ImageGrid]:
    """Returns the pixels of an image, with one row per patch or tile, and its grid."""
    family = family_of(config_with_images(folder).model_type, f"model.path {folder}")
    made = image_processor(folder)(images=[image], return_tensors="np", **family.options)
    pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
    return pixels if pixels.ndim < 4 else pixels.reshape(-1, *pixels.shape[-3:]), family.grid(made)


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
        found, grid = processed(image.folder, read_image(image.ref, where))
        if grid != image.grid:
            raise Refusal.at(
                f"model.path {image.folder}",
                "its image processor has changed since the rows were read",
                "start the run again",
                code="damaged-file",
            )
        _PIXELS.put(image.folder, image.ref, found)
    return found
