"""The towers of a model for images: loads the full class, and puts image features into the embeddings of a micro-batch.

Without `model.vision`, the towers are never loaded (`text_model.py`). With it, the language model still runs as without
images: only the embeddings of the placeholder tokens and the positions differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lockstep.device.base import sent
from lockstep.errors import Refusal
from lockstep.model.text_model import LanguageModel, for_text, language_parts, text_config
from lockstep.model.towers.feature_cache import FeatureCache
from lockstep.vision.families import ImageGrid, family_of, next_tiles
from lockstep.vision.processors import pixels_of
from lockstep.vision.spans import ImageInputs, ImageSpan

if TYPE_CHECKING:
    from lockstep.recipe.schema import Model


class VisionModel(LanguageModel):
    """Builds the full class with its towers, for training on images."""

    @staticmethod
    def _built(kind: Any) -> Any:
        return with_towers(kind)


@cache
def with_towers(kind: Any) -> Any:
    """Returns a subclass of the multimodal class `kind` that lists its towers, and whose towers keep their own
    attention."""

    class WithTowers(kind):
        def __init__(self, config: Any, *more: Any, **named: Any):
            super().__init__(config, *more, **named)
            self.tower_names = tuple(_tower_names(self, language_parts(self)))

        def set_attn_implementation(self, attn_implementation: Any, **how: Any) -> None:
            """Sets the attention of the language model. The attention of the towers is unchanged."""
            chosen = for_text(self.config, {"attn_implementation": attn_implementation})
            super().set_attn_implementation(**chosen, **how)

    # transformers writes the class name to `architectures` and looks up the names of stored tensors by it.
    WithTowers.__name__, WithTowers.__qualname__, WithTowers.__module__ = (
        kind.__name__,
        kind.__qualname__,
        kind.__module__,
    )
    return WithTowers


def _tower_names(module: nn.Module, kept: list[nn.Module], prefix: str = "") -> list[str]:
    """Returns the names of the modules that are neither part of `kept` nor contain a part of `kept`."""
    names = []
    for name, child in module.named_children():
        if any(child is one for one in kept):
            continue
        inside = any(part is one for part in child.modules() for one in kept)
        names += _tower_names(child, kept, f"{prefix}{name}.") if inside else [prefix + name]
    return names


def towers_of(model: Any) -> list[nn.Module]:
    """Returns the towers of a model that was loaded with them: encoder and projector. A model without towers has
    none."""
    return [model.get_submodule(name) for name in getattr(model, "tower_names", ())]


def tower_parts(model: Any) -> set[nn.Module]:
    """Returns all modules inside the towers."""
    return {part for tower in towers_of(model) for part in tower.modules()}


def loaded_kind(settings: Model) -> type[LanguageModel]:
    """Returns which parts of the model folder are loaded: the language model, or with `model.vision` also the
    towers."""
    return LanguageModel if settings.vision is None else VisionModel


def exported_kind(settings: Model) -> type[LanguageModel]:
    """Returns which parts a checkpoint contains. The export copies towers that are not trained from the model
    folder."""
    return VisionModel if settings.vision == "train" else LanguageModel


def refuse_no_towers(model: Any, settings: Model, where: str) -> None:
    """Raises `Refusal` if `model.vision` is set and a model of the run has no towers, because it would ignore the
    images."""
    if settings.vision is not None and not towers_of(model):
        why = f"{type(model).__name__} has no vision tower, and model.vision is set"
        raise Refusal.at(where, why, "use a model that reads images, or remove model.vision", code="wrong-model-kind")


def freeze_towers(model: Any, settings: Model) -> None:
    """Excludes all weights outside of the language model from training unless `model.vision` is `train`. Towers for
    audio are never trained."""
    if not towers_of(model):
        return
    kept = {weight for part in language_parts(model) for weight in part.parameters()}
    for name, weight in model.named_parameters():
        if weight not in kept and (settings.vision != "train" or "audio" in name):
            weight.requires_grad_(False)


class ImageEmbeddings:
    """Computes the input embeddings of a micro-batch with images. Trained towers run once per micro-batch, on its
    distinct images. Frozen towers run on each image alone, and their features are kept for later passes."""

    def __init__(self, model: Any):
        self.model = model
        self.family = family_of(model.config.model_type, type(model).__name__)
        self.cache_bytes = 0.0
        """The bytes of features that are kept (`model.vision_cache_gb`)."""
        # Sizes are read before the model is sharded.
        self._dummy_pixels, self._dummy_grid = _dummy(model)

    @property
    def trained(self) -> bool:
        return any(parameter.requires_grad for tower in towers_of(self.model) for parameter in tower.parameters())

    @property
    def on_every_rank(self) -> bool:
        """Whether the towers must also run for a micro-batch without images. All ranks must gather sharded towers
        together, and a trained tower needs a gradient in each update."""
        return self._sharded or (self.trained and torch.is_grad_enabled())

    @property
    def _sharded(self) -> bool:
        from torch.distributed.fsdp import FSDPModule

        return any(isinstance(part, FSDPModule) for part in tower_parts(self.model))

    def inputs(self, ids_NT: torch.Tensor, images: ImageInputs | None, *, alone: bool = False) -> dict[str, Any]:
        """Returns the inputs of the decoder: the embeddings of all tokens, with those of placeholders replaced by image
        features, and the features that are added after the first layers (Qwen3-VL). Other ranks do not call this method
        at the same time if `alone` is true."""
        embedded_NTH: torch.Tensor = self.model.get_input_embeddings()(ids_NT)
        per_layer = self._per_layer(ids_NT, images)
        device, distinct = embedded_NTH.device, () if images is None else images.distinct
        if self.trained:
            # Without images, the features of a dummy image change nothing.
            features = self.features(distinct, device)
            embedded_NTH = embedded_NTH if distinct else embedded_NTH + features.sum() * 0
        else:
            features = self._of_frozen(distinct, device, together=self._sharded and not alone)
        if images is None or not len(images.places_M):
            return {"inputs_embeds": embedded_NTH, **per_layer}
        features_MF = features.index_select(0, images.features_M).to(embedded_NTH.dtype)
        first_MH, *deeper = features_MF.split(embedded_NTH.shape[-1], dim=-1)
        embedded_NTH = embedded_NTH.flatten(0, 1).index_copy(0, images.places_M, first_MH).view_as(embedded_NTH)
        if not deeper:
            return {"inputs_embeds": embedded_NTH, **per_layer}
        mask_NT = torch.zeros_like(ids_NT, dtype=torch.bool)
        mask_NT.view(-1)[images.places_M] = True
        return {"inputs_embeds": embedded_NTH, "visual_pos_masks": mask_NT, "deepstack_visual_embeds": deeper}

    def _per_layer(self, ids_NT: torch.Tensor, images: ImageInputs | None) -> dict[str, torch.Tensor]:
        """Returns the embeddings of the tokens in each layer (Gemma 4), which see padding in place of an image."""
        text = text_config(self.model.config)
        if not getattr(text, "hidden_size_per_layer_input", 0):
            return {}
        if images is not None:
            ids_NT = ids_NT.flatten().index_fill(0, images.places_M, text.pad_token_id).view_as(ids_NT)
        return {"per_layer_inputs": self.model.get_decoder().get_per_layer_inputs(ids_NT)}

    @cached_property
    def cache(self) -> FeatureCache:
        """The kept features of a frozen tower. The tower must have its final weights."""
        return FeatureCache.of(towers_of(self.model), self.cache_bytes)

    @torch.no_grad()
    def _of_frozen(self, images: Sequence[ImageSpan], device: torch.device, *, together: bool) -> torch.Tensor:
        """Returns the features of all images, one after the other. The tower runs on each image alone (see
        `feature_cache.py`). If it is sharded, it runs equally often on each rank (`together`)."""
        keys = [(image.folder, image.ref.digest) for image in images]
        kept = [self.cache.get(key) for key in keys]
        missing = [number for number, one in enumerate(kept) if one is None]
        for turn in range(_most(len(missing), device) if together else len(missing)):
            number = missing[turn] if turn < len(missing) else None
            found = self.features([] if number is None else [images[number]], device)
            if number is not None:
                kept[number] = found
                self.cache.put(keys[number], found)
        return torch.cat([one.to(device) for one in kept if one is not None]) if kept else torch.empty(0)

    def features(self, images: Sequence[ImageSpan], device: torch.device) -> torch.Tensor:
        """Runs the towers on images, or on a dummy image if there are none. Returns the features of all images, one
        after the other. The features that are added after the first layers follow the features of the embeddings, in
        the last dimension."""
        if images:
            pixels = torch.from_numpy(np.concatenate([pixels_of(image, image.ref) for image in images]))
        else:
            pixels = torch.ones(self._dummy_pixels)
        grids = torch.tensor([image.grid for image in images] or [self._dummy_grid], device=device)
        dtype = next(towers_of(self.model)[0].parameters()).dtype
        given = self.family.tower(sent(pixels, device).to(dtype), grids)
        found = self.model.get_image_features(**given, return_dict=True)
        levels = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        features = torch.cat([torch.cat(list(level)) for level in levels], dim=-1)
        count = sum(image.features for image in images)
        if images and len(features) != count:
            raise Refusal.at(
                "model.path",
                f"the tower computes {len(features)} features for {count} placeholder tokens of images",
                "use the config.json and preprocessor_config.json of the published model",
                code="unsupported-model",
            )
        return features


def _most(count: int, device: torch.device) -> int:
    """Returns the largest count of all ranks."""
    counts = torch.tensor(count, device=device)
    torch.distributed.all_reduce(counts, torch.distributed.ReduceOp.MAX)
    return int(counts)


def _dummy(model: Any) -> tuple[tuple[int, ...], ImageGrid]:
    """Returns the shape of the pixels of a small image, and its grid."""
    vision = model.config.vision_config
    if family_of(model.config.model_type, type(model).__name__).three_axes:
        conv = next(part for tower in towers_of(model) for part in tower.modules() if isinstance(part, nn.Conv3d))
        merge = int(vision.spatial_merge_size)
        return (merge**2, conv.weight[0].numel()), (1, merge, merge)
    if model.config.model_type == "gemma4":
        side = vision.pooling_kernel_size
        return (1, side**2, 3 * vision.patch_size**2), (1, side, side)
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    tiles = next_tiles((1, size, size), model.config) if model.config.model_type == "llava_next" else 1
    return (tiles, 3, size, size), (1, size, size)
