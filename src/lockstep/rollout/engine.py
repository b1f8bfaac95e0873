"""The `Engine` protocol, which generates completions with log-probs, and sampling parameters and stop conditions."""

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


@dataclass(frozen=True)
class RunPlace:
    """The inputs of a serving engine besides the policy: the ranks, the model folder or hub name, and the log
    folder."""

    world: World
    model: str
    folder: Path


def why_ended(tokens: Sequence[int], prompt: int, sampling: Sampling, decode: Callable[[list[int]], str]) -> str:
    """Returns `token`, `string` or `length` if the last token ends the response, else an empty string.

    The response starts after the first `prompt` tokens.
    """
    if tokens[-1] in sampling.stop_ids:
        return "token"
    if sampling.stop_strings:
        # A stop string may span several tokens. A token has at least one byte and a character at most four bytes, so
        # the last `back` tokens cover the longest stop string.
        back = max(len(text) for text in sampling.stop_strings) * 4
        tail = decode(list(tokens[max(prompt, len(tokens) - back) :]))
        if any(text in tail for text in sampling.stop_strings):
            return "string"
    return "length" if len(tokens) - prompt >= sampling.max_tokens else ""


def refuse_unknown_ids(stop_ids: Sequence[int], vocabulary: int, key: str = "rollout.stop_ids") -> None:
    """Raises `Refusal` if one of the `stop_ids` is not in the model's vocabulary."""
    invalid = [token for token in stop_ids if not 0 <= token < vocabulary]
    if invalid:
        raise Refusal.at(
            key,
            f"{', '.join(map(str, invalid[:8]))}: not in the vocabulary of the model (0 to {vocabulary - 1}), so such "
            "a token would never end a response",
            "use token ids of this model's tokenizer, or remove the unknown ids",
            code="unknown-token",
        )


def end_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the end tokens of the model and of the tokenizer."""
    model_ids = model.generation_config.eos_token_id if model.generation_config else None
    ids = model_ids if isinstance(model_ids, list) else [] if model_ids is None else [model_ids]
    return sorted({*ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})


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
        score_truncated=rollout.truncated_sampling == "mask",
        routes=recipe.algorithm.routing_replay == "rollout",
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
        full_precision=True,
    )


class Engine(Protocol):
    """Generates completions with log-probs. An engine module has `open_engine(policy, device, settings, tokenizer)` and
    an entry with its properties in `recipe/registry.py`."""

    instead: str
    """The remedy in the error message if log-probs of this engine do not match the trainer's."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yields every completion of every request as soon as it is finished.

        The log-probs are those of the sampling distribution, after temperature and truncation.
        """
        ...

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loads the current weights of the policy into the engine. The run calls `sync` before generation."""
        ...

    def release_memory(self) -> None:
        """Releases memory that only generation needs."""
        ...

    def close(self) -> None:
        """Releases the engine's resources at the end of the run."""
        ...


@runtime_checkable
class OtherProgram(Protocol):
    """An engine that runs an external program and reports metadata about it."""

    def metadata(self) -> dict[str, Any]:
        """Returns JSON values for the run record, among them the `version` of the program."""
        ...


class Further(Protocol):
    """A source of more requests for an engine with free rows. The requests from this source get the next free request
    indices."""

    longest_prompt: int
    """The length of the longest prompt in tokens."""

    def take(self, room: int, wait: bool = False) -> Sequence[Request]:
        """Returns requests for at most `room` more responses, or an empty list if there are none now.

        The engine sets `wait` when it has no other work. The source then blocks until it has a request, and returns an
        empty list only if no request will follow; the engine then ends."""
        ...


@runtime_checkable
class Conversations(Further, Protocol):
    """A source whose requests are turns of trajectories (`Request.session`), which run at their own pace."""

    sessions: int
    """The largest number of trajectories that are open at once."""
    longest_sequence: int
    """The largest number of tokens of a prompt and its response together."""
    more: bool
    """Whether requests may follow, after `take` has returned none. An engine that has other things to do can ask this
    instead of waiting in `take`."""


@runtime_checkable
class StreamEngine(Protocol):
    """An engine that takes requests from a source while it generates. Set `further` before the call of `generate` and
    reset it to None afterwards."""

    further: Further | None

    def end_session(self, session: int) -> None:
        """Frees what the engine keeps for the next turn of a trajectory. Called by the thread that runs `generate`, for
        example in `take`."""
        ...

    def prompt_counts(self) -> PrefillCounts:
        """Returns the prompt tokens of the last call of `generate`."""
        ...


@dataclass(frozen=True)
class PrefillCounts:
    """Prompt tokens of a call of `generate`: computed (again after an eviction included), and reused from the cache of
    an earlier turn. `evicted` counts the sessions whose cache was evicted."""

    computed: int = 0
    reused: int = 0
    evicted: int = 0


class SharedWeights:
    """Base class of engines that generate with the trained modules and so need no weight sync."""

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Does nothing, because the engine generates with the trained modules."""

    def release_memory(self) -> None:
        """Does nothing, because the engine keeps no memory between calls."""

    def close(self) -> None:
        self.release_memory()


def engine_of(
    settings: RolloutSettings, policy: Policy, device: Device, tokenizer: PreTrainedTokenizerBase, place: RunPlace
) -> Engine:
    """Opens the engine that the recipe selects."""
    row = ENGINES[settings.engine]
    extra = (place,) if row.served else ()
    engine: Engine = imported(row.opener)(policy, device, settings, tokenizer, *extra)
    return engine
