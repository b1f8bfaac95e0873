"""Activation sizes of a vision tower, and the images of the rows on which they depend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from torch import nn

from lockstep.model.decoder import sharded_layers
from lockstep.model.load_folder import DTYPES
from lockstep.model.text_model import text_sizes
from lockstep.model.towers.vision_model import tower_parts
from lockstep.recipe.schema import Model
from lockstep.types import Prompt


class ImageLoad(NamedTuple):
    """The images of rows: the largest share of a row's tokens that are features of images, and the number of features
    of the largest image. Without rows, all tokens of a micro-batch may be features of one image."""

    share: float = 1.0
    largest: int | None = None


ANY_IMAGES = ImageLoad()


def image_load(items: Iterable[Any], settings: Model) -> ImageLoad:
    """Returns the images of training items or prompts."""
    if settings.vision is None:
        return ANY_IMAGES
    share, largest = 0.0, 0
    for item in items:
        for one in (item,) if isinstance(item, Prompt) else item.examples:
            sizes = [image.features for image in one.images]
            share = max(share, sum(sizes) / len(one.ids))
            largest = max([largest, *sizes])
    return ImageLoad(share, largest)


class TowerBytes(NamedTuple):
    """The bytes of a tower for a micro-batch, in a training step and in a forward pass without gradients."""

    training: int = 0
    forward: int = 0


@dataclass(frozen=True)
class TowerSizes:
    """The sizes of a vision tower. It computes `patches` patches for each feature, and adds features to the inputs of
    `levels` layers of the language model."""

    layers: int
    hidden: int
    wide: int
    """The sum of the inputs and outputs of all linear layers in its layers, per patch."""
    outside: int
    """The same of the projector, per feature."""
    pixels: int
    """The number of values of a patch."""
    patches: float
    levels: int

    @classmethod
    def of(cls, model: Any) -> TowerSizes | None:
        """Returns the sizes of a model on the meta device, or None if it was built without its towers."""
        parts = tower_parts(model)
        if not parts:
            return None
        layers = [part for part in sharded_layers(model) if part in parts]
        inside = {part for layer in layers for part in layer.modules()} or parts
        linear = [part for part in parts if isinstance(part, nn.Linear)]
        vision = model.config.vision_config
        convolution = next((part for part in parts if isinstance(part, nn.Conv2d | nn.Conv3d)), None)
        return cls(
            layers=max(1, len(layers)),
            hidden=int(convolution.out_channels if convolution is not None else vision.hidden_size),
            wide=sum(one.in_features + one.out_features for one in linear if one in inside),
            outside=sum(one.in_features + one.out_features for one in linear if one not in inside),
            # Gemma 4 embeds patches with a linear layer.
            pixels=convolution.weight[0].numel() if convolution is not None else 3 * vision.patch_size**2,
            patches=_patches_of_feature(model.config),
            levels=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        )

    def bytes(self, settings: Model, config: Any, tokens: int, images: ImageLoad) -> TowerBytes:
        """Returns the bytes for a micro-batch of `tokens` tokens.

        A layer keeps for each patch the inputs and outputs of its linear layers, and copies of the normed and rotated
        values, some of them in fp32. A trained tower runs on all images of the micro-batch, and a frozen one on each
        image alone. The features of all images are kept twice: joined, and in the order of the placeholders.
        """
        size, trained = DTYPES[settings.dtype].itemsize, settings.vision == "train"
        features = ceil(tokens * images.share)
        together = features if trained or images.largest is None else min(features, images.largest)
        layer = size * self.wide / self.layers + self.hidden * (4 * size + 12)
        kept = self.layers * layer
        if settings.gradient_checkpointing:
            kept = self.layers * self.hidden * size + layer
        buffers = 2 * features * self.levels * text_sizes(config).hidden * size + together * size * self.outside
        pixels = self.pixels * (4 + size)
        forward = int(together * self.patches * (layer + pixels)) + buffers
        return TowerBytes(int(together * self.patches * (kept + pixels)) + buffers if trained else forward, forward)


def _patches_of_feature(config: Any) -> float:
    """Returns how many patches the tower computes for each feature."""
    vision = config.vision_config
    if merge := getattr(vision, "spatial_merge_size", None):
        return float(merge**2)
    if factor := getattr(config, "scale_factor", None):
        return float(factor**2)
    if ratio := getattr(config, "downsample_ratio", None):
        return float(ratio**-2)
    if pooled := getattr(vision, "pooling_kernel_size", None):
        return float(pooled**2)
    if tokens := getattr(config, "mm_tokens_per_image", None):
        return float((vision.image_size // vision.patch_size) ** 2 / tokens)
    return 1.0
