"""The trial of a model with a vision tower: its log-probs of rows with images must equal those of transformers."""

from __future__ import annotations

import inspect
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Problem, first_line
from lockstep.model.check import CHECK_TOLERANCE, RUN_ERRORS, plain_logprobs, unsupported
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy, evaluating
from lockstep.model.resolve import model_folder
from lockstep.model.trials import LOADED_IMAGES, run_trial
from lockstep.parallel.sharding import unit_gathered
from lockstep.types import Example, Origin
from lockstep.vision.families import family_of
from lockstep.vision.images import image_ref, png_bytes, read_image
from lockstep.vision.processors import ImageTokens, image_processor

# The texts of the rows, in which each # is an image, and the sizes of the images.
ROWS = (("Look at # and say what it shows.", ((84, 140),)), ("Is # like #, or not?", ((112, 84), (56, 56))))
WHERE = "the test image"
# Outputs of image processors that are inputs of models.
INPUTS = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")


@torch.no_grad()
def check_images(policy: Policy, path: str, device: torch.device) -> None:
    """Raises `Refusal` if the log-probs of a loaded model on rows with images differ from those of transformers. Does
    nothing for a model without its towers."""
    images = policy.decoder.images
    if images is not None:
        run_trial(LOADED_IMAGES, lambda: _wrong_logprobs(policy, path, device))
        if "cache" in vars(images):  # the run needs no features of the test images
            images.cache.clear()


def _wrong_logprobs(policy: Policy, path: str, device: torch.device) -> Problem | None:
    model, folder = policy.causal_lm, model_folder(path)
    rows = _rows(ImageTokens.of(folder, load_tokenizer(path)))
    name, dtype = type(model).__name__, next(model.parameters()).dtype
    try:
        with evaluating(policy):
            ours = plain_logprobs(policy, to_device(micro_batch(rows, packed=True, pad_id=0), device))
        with unit_gathered(policy), policy.generating():
            wanted = torch.cat([_reference_logprobs(model, folder, row, device) for row in rows])
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise unsupported(path, name, f"cannot be run with images: {first_line(error)}") from error
    difference = (ours - wanted).abs()
    # In half precision, single unlikely tokens have large rounding errors.
    worst = float(difference.max() if dtype == torch.float32 else difference.mean())
    if worst <= CHECK_TOLERANCE[dtype]:
        return None
    why = f"packed log-probs of rows with images differ from those of transformers by {worst:.3g}"
    return unsupported(path, name, why).problems[0]


def _rows(tokens: ImageTokens) -> list[Example]:
    """Returns rows with noise as images, in which all text after the first image is trained."""
    draw, rows = np.random.default_rng(0), []
    for number, (text, sizes) in enumerate(ROWS):
        drawn = [draw.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]
        refs = [image_ref(png_bytes(pixels), Path(), WHERE) for pixels in drawn]
        ids: list[int] = []
        for place, piece in enumerate(text.split("#")):
            ids += [tokens.token_id] * (place > 0) + tokens.tokenizer(piece, add_special_tokens=False)["input_ids"]
        first = ids.index(tokens.token_id)
        mask = [int(at > first and token != tokens.token_id) for at, token in enumerate(ids)]
        spans = tokens.spans(ids, refs, WHERE)
        expanded, flags = tokens.expanded(ids, mask, spans)
        rows.append(Example(array("q", expanded), flags, Origin(WHERE, number), images=tuple(spans)))
    return rows


def _reference_logprobs(model: Any, folder: str, row: Example, device: torch.device) -> torch.Tensor:
    """Returns the log-probs of a row that the forward pass of transformers computes, from the outputs of the image
    processor."""
    for part in model.modules():
        if hasattr(part, "rope_deltas"):
            part.rope_deltas = None  # the forward pass keeps the offset of the row before
    images = [read_image(image.ref, WHERE) for image in row.images]
    options = family_of(model.config.model_type, WHERE).options
    made = image_processor(folder)(images=images, return_tensors="pt", **options)
    given = {name: made[name].to(device) for name in INPUTS if name in made}
    given["pixel_values"] = given["pixel_values"].to(next(model.parameters()).dtype)
    ids_1T = torch.tensor([list(row.ids)], device=device)
    known = inspect.signature(model.forward).parameters
    types = next((name for name in ("mm_token_type_ids", "token_type_ids") if name in known), None)
    if types is not None:
        given[types] = (ids_1T == model.config.image_token_id).int()
    logprobs_TV = model(input_ids=ids_1T, use_cache=False, **given).logits[0].float().log_softmax(-1)
    places, targets = zip(*row.scored_tokens(), strict=True)
    found: torch.Tensor = logprobs_TV[list(places), list(targets)]
    return found
