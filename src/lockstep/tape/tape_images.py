"""The images of a tape: each image file once, named by its hash, and the places of images in recorded sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.run.files import written_aside
from lockstep.vision.images import image_bytes
from lockstep.vision.spans import ImageRef, ImageSpan

FOLDER = "images"
StoredSpan = Mapping[str, Any]


def stored_spans(images: Iterable[ImageSpan]) -> list[dict[str, Any]]:
    """Returns the images of a sequence as JSON values. `TapeImages` has their files."""
    return [
        {
            "image": one.ref.digest,
            "start": one.start,
            "grid": one.grid,
            "merge": one.merge,
            "model": one.folder,
            "runs": one.runs,
            "both_ways": one.both_ways,
        }
        for one in images
    ]


@dataclass(frozen=True)
class TapeImages:
    """The image files of the tape in the folder `tape`. The image processor of the model folder `model` computes the
    pixels. None: that of the recorded run."""

    tape: Path
    model: str | None = None

    def write(self, images: Iterable[ImageSpan]) -> None:
        """Writes the files of images that the tape does not have yet."""
        for image in images:
            file = self._file(image.ref.digest)
            if not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                with written_aside(file, durable=False) as aside:
                    aside.write_bytes(image_bytes(image.ref, "the tape"))

    def read(self, stored: Sequence[StoredSpan]) -> tuple[ImageSpan, ...]:
        """Returns the images of a sequence."""
        return tuple(self._span(one) for one in stored)

    def _span(self, one: StoredSpan) -> ImageSpan:
        time, height, width = one["grid"]
        return ImageSpan(
            one["start"],
            (time, height, width),
            one["merge"],
            ImageRef(one["image"], path=str(self._file(one["image"]))),
            self.model or one["model"],
            tuple(one["runs"]),
            one["both_ways"],
        )

    def _file(self, digest: str) -> Path:
        return self.tape / FOLDER / digest
