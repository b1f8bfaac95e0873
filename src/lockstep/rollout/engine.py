"""The engine protocol: prompts in, completions with log-probs out; sampling and stop conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES, imported
from lockstep.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Who and where the run is that an engine generates for: what a serving engine must know besides the model.


@dataclass(frozen=True)
class RunPlace:
    """The ranks, the model's folder (or hub name), and a folder that logs may be written to."""

    world: World
    model: str
    folder: Path


# When a response ends.


def why_ended(tokens: Sequence[int], prompt: int, sampling: Sampling, decode: Callable[[list[int]], str]) -> str:
    """`token`, `string` or `length` when the last token ends the response, else nothing.

    The response is what follows the first `prompt` tokens.
    """
    if tokens[-1] in sampling.stop_ids:
        return "token"
    if sampling.stop_strings:
        # The last token may complete a text that began some tokens before it. A token is at least a byte and a
        # character at most four, so this reaches far enough back.
        back = max(len(text) for text in sampling.stop_strings) * 4
        tail = decode(list(tokens[max(prompt, len(tokens) - back) :]))
        if any(text in tail for text in sampling.stop_strings):
            return "string"
    return "length" if len(tokens) - prompt >= sampling.max_tokens else ""


def refuse_unknown_ids(stop_ids: Sequence[int], vocabulary: int, key: str = "rollout.stop_ids") -> None:
    """Tokens that the model cannot produce would never end a response."""
    unknown = [token for token in stop_ids if not 0 <= token < vocabulary]
    if unknown:
        raise Refusal.at(
            key,
            f"{', '.join(map(str, unknown[:8]))}: not among the model's tokens, which are 0 to {vocabulary - 1}, so it "
            "would never end a response",
            "take ids from this model's tokenizer, or remove them",
        )


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a generation: the model's own and the tokenizer's."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    ids = own if isinstance(own, list) else [] if own is None else [own]
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


# How a recipe samples: for training, and for validation.


def training_sampling(recipe: Recipe, stop_ids: Sequence[int]) -> Sampling:
    rollout = recipe.rollout
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_ids=tuple(sorted({*stop_ids, *rollout.stop_ids})),
        stop_strings=tuple(rollout.stop),
        seed=recipe.run.seed,
        score_truncated=rollout.truncated == "mask",
    )


def validation_sampling(recipe: Recipe, stop_ids: Sequence[int]) -> Sampling:
    return Sampling(
        max_tokens=recipe.val.max_new_tokens,
        temperature=recipe.val.temperature,
        top_p=recipe.val.top_p,
        top_k=recipe.val.top_k,
        stop_ids=tuple(sorted({*stop_ids, *recipe.rollout.stop_ids})),
        stop_strings=tuple(recipe.rollout.stop),
        seed=recipe.run.seed,
    )


# What an engine must do: continue prompts, and say how likely each token was.


class Engine(Protocol):
    """A file with `open_engine(policy, device, settings, tokenizer)`, and an entry of `recipe/registry.py` that
    names it and states its properties before it is opened."""

    instead: str
    """What to do about a model that this engine does not generate from as the trainer scores it."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Every completion of every request, each as soon as it is finished.

        Its log-probs are those of the distribution that was sampled from: temperature applied, left-out tokens left
        out.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the policy's weights as they are now. Called before prompts are generated from."""
        ...

    def release_memory(self) -> None:
        """Give back the memory that only generation needs."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


@runtime_checkable
class OtherProgram(Protocol):
    """An engine that is another program, and says which."""

    def metadata(self) -> dict[str, Any]:
        """Plain values for the run's record: `version` of the program, and what else tells it apart."""
        ...


class Further(Protocol):
    """Requests that an engine may go on with once it has room for them."""

    longest_prompt: int
    """In tokens."""

    def take(self, room: int) -> Sequence[Request]:
        """Some for at most `room` more responses; none where there is none left."""
        ...


class SharedWeights:
    """For engines that run the trained modules themselves: there is no second copy to bring up to date."""

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Nothing to do: what was trained is what generates."""

    def release_memory(self) -> None:
        """Nothing is held between two calls."""

    def close(self) -> None:
        self.release_memory()


# The engine that a recipe names. The rows are in `recipe/registry.py`: where each engine's `open_engine` is.


def engine_of(
    settings: RolloutSettings, policy: Policy, device: Device, tokenizer: PreTrainedTokenizerBase, place: RunPlace
) -> Engine:
    row = ENGINES[settings.engine]
    metadata = (place,) if row.served else ()
    engine: Engine = imported(row.opener)(policy, device, settings, tokenizer, *metadata)
    return engine
