"""What a run asks of a serving engine, in small: the same against a real server and against what one has answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy, Scoring
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Lora, Model
from lockstep.rollout.engine import RunPlace
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.vllm import Vllm
from lockstep.types import Completion, Example, Origin, Request, Sampling

CPU = torch.device("cpu")
# Letters that the embedded model's byte tokenizer knows by their own numbers.
PROMPTS = [list(text.encode()) for text in ("What is 3 + 4?", "Say it", "a")]
END = 257
SAMPLED = Sampling(max_tokens=12, temperature=0.8, seed=3, stop_ids=(END, 10, 11, 12, 13, 14, 15))
GREEDY = Sampling(max_tokens=10, temperature=0.0, stop_ids=(END,))


def load(folder: Path, *, lora: int | None = None, dtype: str = "fp32") -> Policy:
    settings = Model(path=str(folder), dtype=dtype, lora=Lora(rank=lora, alpha=2.0 * lora) if lora else None)  # type: ignore[arg-type]
    return load_policy(settings, CPU, Cpu().attention, seed=0)


@contextmanager
def opened(
    url: str | list[str] | None,
    policy: Policy,
    model: Path,
    logs: Path,
    world: World = World(),  # noqa: B008 - it is frozen
    **values: Any,
) -> Iterator[ServerEngine]:
    settings = RolloutSettings(engine="vllm", url=url, **values)
    engine = ServerEngine(
        Vllm(), policy, Cpu(), settings, load_tokenizer(str(model)), RunPlace(world, str(model), logs)
    )
    try:
        yield engine
    finally:
        engine.close()


def sync(engine: ServerEngine, updates: int = 0) -> None:
    engine.updates = updates
    engine.sync(engine.policy.stored.named_parameters())


def requests(n: int = 2) -> list[Request]:
    return [Request(ids, 100 + key, n) for key, ids in enumerate(PROMPTS)]


def run(engine: Any, asked: list[Request], sampling: Sampling) -> list[Completion]:
    return sorted(engine.generate(asked, sampling), key=lambda one: (one.request, one.sample))


@torch.no_grad()
def move(policy: Policy, by: float = 0.02, seed: int = 1) -> None:
    """As an update does, only further."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in policy.trainable():
        parameter += by * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def scored(policy: Policy, made: list[Completion], temperature: float) -> list[torch.Tensor]:
    """The trainer's log-probs of each completion of `requests()`."""
    rows = [
        Example([*PROMPTS[one.request], *one.ids], [0] * len(PROMPTS[one.request]) + [1] * len(one.ids), Origin("", 0))
        for one in made
    ]
    before, policy.scoring = policy.scoring, Scoring(temperature=temperature)
    policy.eval()
    try:
        every = policy(micro_batch(rows, packed=True, pad_id=0)).logprobs_K
    finally:
        policy.scoring = before
    return list(every.split([len(one.ids) for one in made]))


def adapted(engine: ServerEngine) -> list[Completion]:
    """Samples of a fresh adapter, and of one that has moved."""
    sync(engine)
    first = run(engine, requests(1), SAMPLED)
    move(engine.policy, by=0.1)
    sync(engine, 1)
    return first + run(engine, requests(1), SAMPLED)


def slept(engine: ServerEngine) -> list[Completion]:
    """The same samples before and after the engine gave its memory back."""
    sync(engine)
    first = run(engine, requests(1), SAMPLED)
    engine.release_memory()
    sync(engine)
    return first + run(engine, requests(1), SAMPLED)


@dataclass
class Session:
    """What came of it."""

    sampled: list[Completion]
    greedy: list[Completion]
    stopped: list[Completion]
    after: list[Completion]


def session(engine: ServerEngine) -> Session:
    """Samples, greedy responses and a stop text of the first weights; samples of weights that have moved."""
    sync(engine)
    sampled = run(engine, requests(), SAMPLED)
    greedy = run(engine, requests(1), GREEDY)
    text = engine.decode(greedy[0].ids[2:4])
    stopped = run(engine, requests(1), replace(GREEDY, stop_strings=(text,)))
    move(engine.policy)
    sync(engine, 1)
    return Session(sampled, greedy, stopped, run(engine, requests(), SAMPLED))
