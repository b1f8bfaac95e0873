"""The `hf` engine uses transformers' `generate`, is slow, and serves as the reference for faster engines.

The `hf` engine uses the native engine's sampler and random noise, so both engines give the same samples up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lockstep.device.base import Device
from lockstep.kernels.sampling import sequence_keys
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import SharedWeights, why_ended
from lockstep.rollout.native.sampler import choose
from lockstep.types import Completion, Request, Sampling

# Number of responses per batch.
BATCH = 64


class HfEngine(SharedWeights):
    """The engine on transformers. `opened` is a context manager that yields the model. `decode` converts token ids to
    text for stop strings."""

    instead = "use another model: the trainer cannot compute the log-probs of this model's responses"

    def __init__(
        self, opened: Callable[[], AbstractContextManager[PreTrainedModel]], decode: Callable[[list[int]], str]
    ):
        self.opened, self.decode = opened, decode
        self.on_token: Callable[[int], None] | None = None
        """Called with each new token, if the batch is a single response."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        rows = [
            (number, sample)
            for number, request in enumerate(requests)
            for sample in range(request.first, request.first + request.n)
        ]
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            with self.opened() as model:
                part_requests = [requests[number] for number, _ in part]
                on_token = self.on_token if len(part) == 1 else None
                answers = _generate(model, part_requests, [s for _, s in part], sampling, on_token)
            for (number, sample), (ids, logprobs) in zip(part, answers, strict=True):
                yield self._cut(number, sample, ids, logprobs, requests[number].limits(sampling))

    def _cut(self, number: int, sample: int, ids: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        """Truncates a response at its end token, because `generate` continues until the whole batch has ended."""
        for length in range(1, len(ids) + 1):
            why = why_ended(ids[:length], 0, sampling, self.decode)
            if why:
                return Completion(number, sample, ids[:length], logprobs[:length], why)
        raise AssertionError("generate stopped before the length limit without an end token")


def open_engine(
    policy: Policy, device: Device, settings: RolloutSettings, tokenizer: PreTrainedTokenizerBase
) -> HfEngine:
    return HfEngine(policy.generating, tokenizer.decode)


class _Choose(LogitsProcessor):
    """Samples a token with lockstep's sampler and masks all other tokens, so that transformers' greedy decoding picks
    the sampled token."""

    def __init__(
        self,
        sampling: Sampling,
        keys_B2: torch.Tensor,
        mask_BT: torch.Tensor,
        on_token: Callable[[int], None] | None,
    ):
        self.sampling, self.keys_B2, self.mask_BT, self.on_token = sampling, keys_B2, mask_BT, on_token
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = torch.full((len(scores),), len(self.logprobs), device=scores.device)
        seen = self._seen(input_ids, scores) if self.sampling.repetition_penalty != 1 else None
        tokens, logprobs = choose(scores, self.sampling, self.keys_B2, position, seen)
        self.logprobs.append(logprobs)
        if self.on_token is not None:
            self.on_token(int(tokens[0]))
        return torch.full_like(scores, -float("inf")).scatter_(-1, tokens[:, None], 0.0)

    def _seen(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        width = input_ids.shape[1]
        real = torch.ones_like(input_ids, dtype=torch.bool)
        real[:, : self.mask_BT.shape[1]] = self.mask_BT.bool()[:, :width]
        seen = torch.zeros(scores.shape, dtype=torch.long, device=scores.device)
        return seen.scatter_add_(-1, input_ids, real.long()) > 0


@contextmanager
def _without_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Disables the generation defaults of the model folder (penalties, end tokens), which `generate` would apply."""
    original, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = original


@torch.no_grad()
def _generate(
    model: PreTrainedModel,
    requests: Sequence[Request],
    samples: Sequence[int],
    sampling: Sampling,
    on_token: Callable[[int], None] | None = None,
) -> list[tuple[list[int], list[float]]]:
    width = max(len(request.ids) for request in requests)
    device = model.get_input_embeddings().weight.device
    pad = sampling.stop_ids[0] if sampling.stop_ids else 0
    # Left padding with a mask, so that every prompt ends at the position where generation begins.
    ids = torch.tensor([[pad] * (width - len(r.ids)) + list(r.ids) for r in requests], device=device)
    mask = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in requests], device=device)
    keys = [sequence_keys(sampling.seed, r.key, s) for r, s in zip(requests, samples, strict=True)]
    processor = _Choose(sampling, torch.tensor(keys, dtype=torch.int32, device=device), mask, on_token)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": sampling.max_tokens, "pad_token_id": pad}
    config = GenerationConfig(**settings, eos_token_id=list(sampling.stop_ids) or None)
    chosen = LogitsProcessorList([processor])
    with _without_defaults(model):
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, logits_processor=chosen)
    logprobs = torch.stack(processor.logprobs, 1).tolist()
    return list(zip(out[:, width:].tolist(), logprobs, strict=True))
