"""The model families that take images: how each writes an image into its prompt, and what its tower gets.

The image processor of transformers computes the pixels of an image and its grid. The grid and the config determine the
text that the processor of transformers writes for the image, so tests compare this text with that of the processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lockstep.errors import Refusal

ImageGrid = tuple[int, int, int]
ProcessorOutput = Mapping[str, Any]


def _pixels_only(pixels: Any, grids_I3: Any) -> dict[str, Any]:
    return {"pixel_values": pixels}


@dataclass(frozen=True)
class Family:
    """How a model family takes images. `config` is the model's config, and `grid` describes the size of an image."""

    pad: str
    """The token whose embedding is replaced by a feature of the image."""
    text: Callable[[ImageGrid, Any], str]
    """Returns the text that replaces `token`, with one pad token per feature. It begins and ends with special
    tokens."""
    grid: Callable[[ProcessorOutput], ImageGrid]
    """Returns the grid of an image from the outputs of the image processor."""
    token: str = ""
    """The token that the chat template writes for an image: the pad token, unless it is given."""
    before: str = ""
    after: str = ""
    """The text that the chat template writes before and after the token."""
    around: str = ""
    """The text that the processor writes before and after the tokens of an image."""
    tower: Callable[[Any, Any], dict[str, Any]] = _pixels_only
    """Returns the arguments of `get_image_features` for the pixels and grids of all images."""
    three_axes: bool = False
    """Whether tokens have positions on three axes. The grid is then the number of patches in time, height, width."""
    both_ways: Callable[[Any], str] = lambda config: ""
    """Returns in which layers the placeholder tokens of an image attend to each other in both directions: `all`,
    `windows` (layers with a sliding window), or none. The placeholder tokens are then contiguous."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the image processor, which the processor of transformers sets by default."""
    served: bool = False
    """Whether vLLM was tested with images of this family: it writes the same tokens for the placeholder of an image."""

    @property
    def placeholder(self) -> str:
        """The text of an image in a message."""
        return self.before + (self.token or self.pad) + self.after

    def spelled(self, config: Any, tokenizer: Any) -> Family:
        """Returns the family with the tokens of config.json, if it has none of its own."""
        if self.pad:
            return self
        ids = (config.boi_token_id, config.image_token_id, config.eoi_token_id)
        first, pad, last = tokenizer.convert_ids_to_tokens(ids)

        def text(grid: ImageGrid, config: Any) -> str:
            return first + self.text(grid, config).format(pad=pad) + last

        return replace(self, pad=pad, text=text)

    def with_surroundings(self, text: str) -> str:
        """Returns a rendered text with `around` at the token of each image, as the processor writes it."""
        token = self.token or self.pad
        return text.replace(token, self.around + token + self.around) if self.around else text


def _qwen_text(grid: ImageGrid, config: Any) -> str:
    return "<|image_pad|>" * (grid[0] * grid[1] * grid[2] // config.vision_config.spatial_merge_size**2)


def _qwen_grid(made: ProcessorOutput) -> ImageGrid:
    time, height, width = (int(size) for size in made["image_grid_thw"][0])
    return time, height, width


_QWEN = Family(
    pad="<|image_pad|>",
    before="<|vision_start|>",
    after="<|vision_end|>",
    text=_qwen_text,
    grid=_qwen_grid,
    tower=lambda pixels, grids_I3: {"pixel_values": pixels, "image_grid_thw": grids_I3},
    three_axes=True,
)


def _patches(grid: ImageGrid, config: Any) -> int:
    """Returns the number of features of an image of `grid` pixels that is not divided into tiles."""
    vision = config.vision_config
    if vision.model_type not in ("clip_vision_model", "siglip_vision_model"):
        raise ValueError(f"its vision tower is a {vision.model_type}")
    class_token = vision.model_type == "clip_vision_model"
    whole = (grid[1] // vision.patch_size) * (grid[2] // vision.patch_size) + class_token
    return int(whole - (config.vision_feature_select_strategy == "default"))


def _pixel_grid(made: ProcessorOutput) -> ImageGrid:
    height, width = np.shape(made["pixel_values"])[-2:]
    return 1, int(height), int(width)


_LLAVA = Family(pad="<image>", text=lambda grid, config: "<image>" * _patches(grid, config), grid=_pixel_grid)


def _next_text(grid: ImageGrid, config: Any) -> str:
    """The tiles of the image without padding, with one feature at the end of each row, after the features of the whole
    image. `grid` has the size of the image in pixels."""
    from transformers.image_processing_utils import select_best_resolution

    side = config.vision_config.image_size
    patches = side // config.vision_config.patch_size
    best = select_best_resolution(list(grid[1:]), config.image_grid_pinpoints)
    height, width = (patches * (size // side) for size in best)
    if grid[2] / grid[1] > width / height:
        height -= (height - int(round(grid[1] * (width / grid[2]), 7))) // 2 * 2
    else:
        width -= (width - int(round(grid[2] * (height / grid[1]), 7))) // 2 * 2
    return "<image>" * (height * width + height + _patches((1, side, side), config))


def next_tiles(grid: ImageGrid, config: Any) -> int:
    """Returns the number of tiles of an image of LLaVA-NeXT, with the tile of the whole image."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    return int(image_size_to_num_patches(list(grid[1:]), config.image_grid_pinpoints, config.vision_config.image_size))


_NEXT = Family(
    pad="<image>",
    text=_next_text,
    grid=lambda made: (1, int(made["image_sizes"][0][0]), int(made["image_sizes"][0][1])),
    tower=lambda pixels, grids_I3: {"pixel_values": pixels, "image_sizes": grids_I3[:, 1:]},
)


def _idefics_text(grid: ImageGrid, config: Any) -> str:
    """Rows and columns of tiles, and then the whole image. An image that is not divided has a grid of 0 x 0 tiles."""
    vision, around = config.vision_config, "<fake_token_around_image>"
    pads = "<image>" * int((vision.image_size // vision.patch_size) ** 2 / config.scale_factor**2)
    rows = [
        "".join(f"{around}<row_{row + 1}_col_{column + 1}>{pads}" for column in range(grid[2])) + "\n"
        for row in range(grid[1])
    ]
    return "".join(rows) + ("\n" if rows else "") + f"{around}<global-img>{pads}{around}"


def _idefics_grid(made: ProcessorOutput) -> ImageGrid:
    if not np.all(made["pixel_attention_mask"]):
        raise ValueError("its tiles have different sizes")
    return 1, int(made["rows"][0][0]), int(made["cols"][0][0])


_IDEFICS = Family(
    pad="<image>",
    text=_idefics_text,
    grid=_idefics_grid,
    tower=lambda pixels, grids_I3: {"pixel_values": pixels[None]},
    options={"return_row_col_info": True},
)


_GEMMA = Family(
    pad="<image_soft_token>",
    token="<start_of_image>",
    text=lambda _, config: f"<start_of_image>{'<image_soft_token>' * config.mm_tokens_per_image}<end_of_image>",
    grid=lambda _: (1, 1, 1),
    around="\n\n",
    both_ways=lambda config: "all",
    options={"do_pan_and_scan": False},
)


def _gemma4_tower(pixels_IPD: Any, grids_I3: Any) -> dict[str, Any]:
    """The column and row of each patch. Patches after the last one of an image are at -1."""
    import torch

    at_IP2 = torch.full((*pixels_IPD.shape[:2], 2), -1, device=pixels_IPD.device)
    for number, (_, height, width) in enumerate(grids_I3.tolist()):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        at_IP2[number, : height * width] = torch.stack([columns, rows], -1).flatten(0, 1).to(at_IP2)
    return {"pixel_values": pixels_IPD, "image_position_ids": at_IP2}


def _gemma4_grid(made: ProcessorOutput) -> ImageGrid:
    width, height = np.max(made["image_position_ids"][0], axis=0) + 1
    return 1, int(height), int(width)


# The tokens are those of config.json (`Family.spelled`).
_GEMMA4 = Family(
    pad="",
    text=lambda grid, config: "{pad}" * (grid[1] * grid[2] // config.vision_config.pooling_kernel_size**2),
    grid=_gemma4_grid,
    tower=_gemma4_tower,
    both_ways=lambda config: "windows" if config.text_config.use_bidirectional_attention == "vision" else "",
)

_INTERN = Family(
    pad="<IMG_CONTEXT>",
    after="\n",
    text=lambda grid, config: f"<img>{'<IMG_CONTEXT>' * config.image_seq_length * grid[2]}</img>",
    grid=lambda made: (1, 1, int(made["num_patches"][0])),
    options={"crop_to_patches": True},
)

# The families by `model_type`.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "qwen2_5_vl": replace(_QWEN, served=True),
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "llava": _LLAVA,
    "llava_next": _NEXT,
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": _INTERN,
}


def family_of(model_type: str, where: object) -> Family:
    """Returns how the model's family takes images. Raises `Refusal` for a family that cannot be trained on images."""
    found = FAMILIES.get(model_type)
    if found is None:
        raise Refusal.at(
            where,
            f"images cannot be trained with models of type {model_type}",
            f"remove model.vision to train it on text, or use one of {', '.join(sorted(FAMILIES))}",
            code="unsupported-model",
        )
    return found
