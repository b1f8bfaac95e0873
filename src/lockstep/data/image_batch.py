"""The images of a micro-batch: pixels of its distinct images, places of their features, and positions on three axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from lockstep.device.base import sent
from lockstep.types import Example, MicroBatch
from lockstep.vision.positions import three_axes
from lockstep.vision.processors import pixels_of
from lockstep.vision.spans import ImageInputs


def image_inputs(examples: Sequence[Example], batch: MicroBatch, shares: Sequence[int]) -> ImageInputs:
    """Returns the images of a micro-batch of `examples`. An image that occurs in several examples is stored once.

    `shares` are the numbers of leading tokens of each example that the packed row already contains.
    """
    rows, width = batch.input_ids_NT.shape
    axes = np.zeros((3, rows * width), dtype=np.int64)
    firsts: dict[tuple[str, str], int] = {}
    pixels: list[np.ndarray] = []
    grids: list[tuple[int, int, int]] = []
    places: list[np.ndarray] = []
    features: list[np.ndarray] = []
    count = 0
    for example, where, share in zip(examples, token_places(examples, batch), shares, strict=True):
        axes[:, where] = three_axes(len(example), example.images)
        for image in example.images:
            key = (image.folder, image.ref.digest)
            if key not in firsts:
                firsts[key] = count
                count += image.tokens
                pixels.append(pixels_of(image, example.origin))
                grids.append(image.grid)
            # The features of shared tokens are in the packed row already.
            own = np.arange(max(image.start, share), image.stop)
            places.append(where[own])
            features.append(firsts[key] + own - image.start)
    return ImageInputs(
        pixels_PD=torch.from_numpy(np.concatenate(pixels)),
        grids_I3=torch.tensor(grids),
        places_M=torch.from_numpy(np.concatenate(places)),
        features_M=torch.from_numpy(np.concatenate(features)),
        axes_3NT=torch.from_numpy(axes.reshape(3, rows, width)),
        digests=tuple(digest for _, digest in firsts),
    )


def token_places(examples: Sequence[Example], batch: MicroBatch) -> list[np.ndarray]:
    """Returns for each example the index of each of its tokens among the flattened tokens of the micro-batch."""
    lengths = [len(example) for example in examples]
    if not batch.packed:
        width = batch.input_ids_NT.shape[1]
        return [np.arange(row * width, row * width + length) for row, length in enumerate(lengths)]
    index = np.arange(sum(lengths)) if batch.packed_index_E is None else batch.packed_index_E.numpy()
    return np.split(index, np.cumsum(lengths)[:-1])


def images_to(images: ImageInputs, device: torch.device) -> ImageInputs:
    """Returns the images on the device. The grids stay on the host, where their sizes are read."""
    return replace(
        images,
        pixels_PD=sent(images.pixels_PD, device),
        places_M=sent(images.places_M, device),
        features_M=sent(images.features_M, device),
        axes_3NT=sent(images.axes_3NT, device),
    )
