"""Rows with images for tests: examples of a tiny Qwen2.5-VL, and what plain transformers computes for them."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.data.prepare.squares import draw_squares
from lockstep.model.load import load_tokenizer
from lockstep.recipe.schema import Model
from lockstep.types import Completion, Example, MicroBatch, Origin
from lockstep.vision.families import FAMILIES
from lockstep.vision.images import image_ref, png_bytes, read_image
from lockstep.vision.processors import ImageTokens, image_processor

CPU = torch.device("cpu")
# Outputs of image processors that are inputs of models.
INPUTS = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")
LOGPROB, GRADIENT = 2e-5, 2e-5


def settings(folder: Path, **keys: Any) -> Model:
    return Model(path=str(folder), **{"vision": "train", **keys})


def tokens_of(folder: Path) -> ImageTokens:
    return ImageTokens.of(str(folder), load_tokenizer(str(folder)))


def picture(seed: int, height: int = 56, width: int = 56) -> Any:
    """An image of random pixels, or for seed 0 one with squares."""
    if seed == 0:
        return image_ref(png_bytes(draw_squares("red", (1, 6))), Path(), "test")
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return image_ref(png_bytes(pixels), Path(), "test")


def example(folder: Path, text: str, images: list[Any], row: int = 0, trained: int = 6) -> Example:
    """A sequence of the bytes of `text`, in which each `#` is an image. The last `trained` tokens are targets."""
    tokens = tokens_of(folder)
    ids = [tokens.token_id if letter == "#" else ord(letter) for letter in text]
    mask = [0] * (len(ids) - trained) + [1] * trained
    spans = tokens.spans(ids, images, "test")
    expanded, flags = tokens.expanded(ids, mask, spans)
    return Example(array("q", expanded), flags, Origin("rows.jsonl", row), images=tuple(spans))


def plain_model(folder: Path) -> Any:
    """The model of the folder as users of transformers load it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )


def plain_inputs(model: Any, one: Example) -> dict[str, torch.Tensor]:
    """The inputs of transformers' forward pass for one row."""
    ids = torch.tensor([list(one.ids)])
    if not one.images:
        return {"input_ids": ids}
    folder, images = one.images[0].folder, [read_image(image.ref, "test") for image in one.images]
    options = FAMILIES[model.config.model_type].options
    made = image_processor(folder)(images=images, return_tensors="pt", **options)
    given = {name: made[name] for name in INPUTS if name in made}
    types = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    needed = types in inspect.signature(model.forward).parameters
    types_NT = (ids == model.config.image_token_id).int()
    return {"input_ids": ids, **given, **({types: types_NT} if needed else {})}


def plain_logprobs(model: Any, one: Example) -> torch.Tensor:
    """The log-probs of the targets of one row, in plain transformers."""
    model.model.rope_deltas = None
    logits = model(**plain_inputs(model, one), use_cache=False).logits[0].float().log_softmax(-1)
    return torch.stack([logits[at, token] for at, token in one.scored_tokens()])


def weighted(values: torch.Tensor) -> torch.Tensor:
    return (values * torch.cos(torch.arange(len(values)))).sum()


def by_transformers(folder: Path, rows: Sequence[Example]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The log-probs of all rows, each computed alone by transformers, and the gradients of a weighted sum of them."""
    model = plain_model(folder)
    values = torch.cat([plain_logprobs(model, one) for one in rows])
    weighted(values).backward()
    return values.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(policy: Any, batch: MicroBatch, wanted: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    """Compares the log-probs and gradients of a micro-batch with those of transformers."""
    policy.zero_grad(set_to_none=True)
    values = policy(batch).logprobs_K
    weighted(values).backward()
    torch.testing.assert_close(values.detach(), wanted, atol=LOGPROB, rtol=0)
    found = {name: p.grad for name, p in policy.causal_lm.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=GRADIENT * float(gradient.norm() + 1), rtol=0, msg=name)


def generated(folder: Path, rows: Sequence[Example], length: int, end: int) -> list[tuple[list[int], list[float]]]:
    """The greedy tokens of `generate` after each row, and their log-probs."""
    model, found = plain_model(folder).eval(), []
    for one in rows:
        model.model.rope_deltas = None
        made = model.generate(
            **plain_inputs(model, one),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=end,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = made.sequences[0, len(one) :].tolist()
        logprobs = [step[0].float().log_softmax(-1)[token].item() for step, token in zip(made.logits, ids, strict=True)]
        found.append((ids, logprobs))
    return found


def check_generated(done: Sequence[Completion], wanted: Sequence[tuple[list[int], list[float]]]) -> None:
    """Compares the greedy answers of the engine with those of `generate`: a wrong position may change no token, but it
    changes log-probs."""
    assert [one.ids for one in done] == [ids for ids, _ in wanted]
    for one, (_, logprobs) in zip(done, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(logprobs), atol=2e-4, rtol=0)
