"""`Generator`: generates scored rollouts with a policy and its rollout engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.base import Device
from lockstep.environments.agents.agent_setup import open_agents
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import TrajectoryEngineSetup, open_environments
from lockstep.kernels.sampling import turn_key
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy
from lockstep.model.resolve import model_folder
from lockstep.parallel.expert import full_parameters
from lockstep.parallel.sharding import gathered
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.recipe.schema import Model
from lockstep.rollout.collect import AskedAhead, Collected, ExpectedLengths, Judge, collect, everyone
from lockstep.rollout.engine import Engine, OtherProgram, RunPlace, end_ids, engine_of
from lockstep.rollout.engine_check import check_engine
from lockstep.rollout.rollout_function import FunctionEngine, message_encoder
from lockstep.run.metrics import PhaseTimer
from lockstep.trajectory import TurnRecord
from lockstep.types import Completion, Prompt, Request, Rollout, Sampling
from lockstep.vision.processors import ImageTokens
from lockstep.vision.spans import cut_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generator:
    """Generates and scores responses. `end_tokens` are additional end tokens besides those of the model and the
    tokenizer. `path` is the model path for error messages and for a server. The logs of servers and of environments are
    written to the folder `logs`. `prompt_limit` is the longest prompt that an environment may write.
    `val_environment` and `val_agent` are the environment and the agent of validation, if they differ from those of
    training."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        settings: RolloutSettings,
        device: Device,
        world: World,
        path: str,
        end_tokens: Sequence[int] = (),
        logs: Path | None = None,
        prompt_limit: int | None = None,
        val_environment: str | None = None,
        val_agent: str | None = None,
    ):
        self.policy, self.tokenizer, self.world = policy, tokenizer, world
        self.device = device.torch_device(world.local_rank)
        self.lengths = ExpectedLengths()
        self._ahead: AskedAhead | None = None
        self._environments: list[EnvironmentEngine] = []
        self.engine_name, self.served = settings.engine, ENGINES[settings.engine].served
        self._fp8_cache = settings.kv_cache is not None
        self.engine = engine_of(settings, policy, device, tokenizer, RunPlace(world, path, logs or Path(gettempdir())))
        self.stop_ids = tuple(sorted({*end_ids(policy.causal_lm, tokenizer), *end_tokens}))
        paged_on = device if ENGINES[settings.engine].paged else None
        with self._closed_on_refusal(), self.whole_weights():
            self.engine.sync(self._weights())
            check_engine(self.engine, policy, self.device, path, paged_on=paged_on)
        self._logs, self._prompt_limit, self._path = logs, prompt_limit, path
        with self._closed_on_refusal():
            self.responder: Engine = self._responder(settings)
            """The engine, or an engine that has conversations: with the user's rollout function or an environment."""
            self._val_responder: Engine = self.responder
            validation = settings.for_validation(val_environment, val_agent)
            if validation is not None:
                self._val_responder = self._responder(validation)

    def _responder(self, settings: RolloutSettings) -> Engine:
        if settings.function is not None:
            return self._function_engine(settings)
        if not settings.interactive:
            return self.engine
        open_engine = open_environments if settings.agent is None else open_agents
        setup = TrajectoryEngineSetup(
            self.engine,
            settings,
            self.tokenizer,
            frozenset(self.stop_ids),
            self._vocabulary,
            self._prompt_limit,
            None if self._logs is None else self._logs / f"environment-{self.world.rank}",
            self._images,
        )
        environments = open_engine(setup)
        environments.progress = self.world.progress
        self._environments.append(environments)
        return environments

    @property
    def _images(self) -> ImageTokens | None:
        """Writes the images of messages into tokens; None if the model reads no images."""
        if self.policy.decoder.images is None:
            return None
        return ImageTokens.of(model_folder(self._path), self.tokenizer)

    @property
    def _vocabulary(self) -> int:
        return int(self.policy.causal_lm.get_input_embeddings().weight.shape[0])

    def spent(self, seconds: float, taken: int) -> tuple[float, int, int, int]:
        """Returns the generation time of this rank and the prompts taken from other ranks, with the number of prompt
        tokens of conversations that its engine has computed and reused since the last call."""
        counts = self.responder.take_prefill() if isinstance(self.responder, EnvironmentEngine) else (0, 0)
        return seconds, taken, *counts

    def for_validation(self) -> Generator:
        """Returns a generator with the environment of validation."""
        other = copy(self)
        other.responder = self._val_responder
        return other

    def _function_engine(self, settings: RolloutSettings) -> FunctionEngine:
        assert settings.function is not None

        def encode(text: str) -> list[int]:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        return FunctionEngine(
            self.engine,
            settings.function,
            encode,
            self.decode,
            self._vocabulary,
            settings.function_timeout,
            encode_messages=message_encoder(self.tokenizer),
        )

    @classmethod
    def load(
        cls,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str,
        device: Device,
        world: World,
        settings: RolloutSettings | None = None,
        *,
        images: bool = False,
    ) -> Generator:
        """Loads an unsharded model on this rank's device, for commands that only generate."""
        model = Model(path=folder, dtype=dtype, vision="freeze" if images else None)  # type: ignore[arg-type]
        policy = load_policy(model, device.torch_device(world.local_rank), device.attention, seed=0)
        return cls(policy, tokenizer, settings or RolloutSettings(), device, world, folder)

    def answered_by(self, engine: Engine, ahead: AskedAhead) -> Generator:
        """Returns a copy of the generator that uses another engine, which syncs its weights itself. `ahead` has the
        requests that were sent to this engine before their training step."""
        other = copy(self)
        other.engine = other.responder = engine
        other._ahead = ahead
        return other

    def generate(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[int],
        n: int,
        sampling: Sampling,
        judge: Judge,
        phases: PhaseTimer = lambda phase: nullcontext(),
        advance: Callable[[int], None] = lambda done: None,
    ) -> list[Rollout]:
        """Returns `n` scored responses per prompt, in the order of the prompts; all ranks get the same list. `keys` are
        the random keys of the prompts."""
        local = self.generate_here(prompts, keys, n, sampling, judge, phases, advance)
        self.spent(0.0, 0)  # the metrics of the next training step do not count these prompt tokens
        return everyone(local.rollouts, self.world)

    def generate_here(
        self,
        prompts: Sequence[Prompt],
        keys: Sequence[int],
        n: int,
        sampling: Sampling,
        judge: Judge,
        phases: PhaseTimer = lambda phase: nullcontext(),
        advance: Callable[[int], None] = lambda done: None,
    ) -> Collected:
        """Returns the responses that this rank generated. A rank generates all `n` responses to a prompt, or none of
        them."""
        expected = self.lengths.of(prompts)
        arguments = (
            self.responder,
            judge,
            prompts,
            keys,
            n,
            sampling,
            self.world,
            self.decode,
            phases,
            advance,
            expected,
        )
        if self._ahead is not None:
            return collect(*arguments, self._ahead.take(keys, n, sampling))
        with self.whole_weights():
            with phases("sync") if self.served else nullcontext():
                self.engine.sync(self._weights())
            return collect(*arguments)

    def repeat_turns(self, rollouts: Sequence[Rollout], sampling: Sampling) -> list[Rollout]:
        """Generates the turns of recorded trajectories again, each after its recorded context. The environment is not
        called. A response that differs from the recorded one ends after its first different turn. All ranks get the
        same list."""
        own = [one for one in rollouts if one.prompt_index % self.world.engines == self.world.engine]
        turns = [(number, turn) for number, one in enumerate(own) for turn in range(len(_turns(one)))]
        requests = [_turn_request(own[number], turn) for number, turn in turns]
        found: dict[tuple[int, int], Completion] = {}
        with self.whole_weights():
            self.engine.sync(self._weights())
            for completion in self.engine.generate(requests, sampling) if requests else ():
                found[turns[completion.request]] = completion
        made = [
            _repeated(one, [found[number, turn] for turn in range(len(_turns(one)))]) for number, one in enumerate(own)
        ]
        return everyone(made if self.world.is_tp_rank0 else [], self.world)

    def after(self, updates: int) -> None:
        """Tells a serving engine how many updates the current weights have had."""
        if self.served:
            self.engine.updates = updates  # type: ignore[attr-defined]

    def metadata(self) -> dict[str, Any]:
        """Returns the name and the metadata of the engine for the run record."""
        details = self.engine.metadata() if isinstance(self.engine, OtherProgram) else {}
        view = getattr(self.engine, "view", None)
        if view is not None:
            details = {"precision": view.format, "quantised_parameters": view.parameters}
        if self._fp8_cache:
            details = {**details, "kv_cache": "fp8"}
        return {"name": self.engine_name, **details}

    def proof(self) -> str:
        """Returns the result of the last weight check as a suffix for a message; empty for engines that are not
        servers."""
        check = self.metadata().get("probe")
        return "" if check is None else f"; weight check: {check}"

    def sleep(self) -> None:
        """Makes a serving engine release its memory while the run trains."""
        if self.served:
            self.engine.release_memory()

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Gathers the full weights on every rank, so that every rank can generate. A serving engine that gathers the
        weights itself, bucket by bucket, needs only the shards."""
        if self._streams_weights:
            yield
            return
        # A sharded model must be called through its root once before the engines can call its submodules.
        self._enter()
        with gathered(self.policy):
            yield
            # The backward pass prefetches shards in the order of the last forward pass. This prefetch order must be the
            # same on every rank, also on a rank without prompts.
            self._enter()

    @property
    def _streams_weights(self) -> bool:
        return self.served and self.engine.streams_weights  # type: ignore[attr-defined]

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the weights for `Engine.sync`: shards if the engine gathers them, else full tensors."""
        if self.served and not self._streams_weights:
            return full_parameters(self.policy.stored)
        return self.policy.stored.named_parameters()

    def take_sync_metrics(self) -> dict[str, float]:
        """Returns the bytes and seconds of weight pushes to a serving engine since the last call."""
        return self.engine.take_sync_metrics() if self.served else {}  # type: ignore[attr-defined]

    def _enter(self) -> None:
        if self.world.size > 1:
            with torch.no_grad():
                self.policy(to_device(micro_batch([], packed=True, pad_id=0), self.device))

    @contextmanager
    def _closed_on_refusal(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for environments in self._environments:
            environments.close()
        self.engine.close()


def _turns(rollout: Rollout) -> Sequence[TurnRecord]:
    assert rollout.trajectory is not None
    return rollout.trajectory.turns


def _turn_request(rollout: Rollout, turn: int) -> Request:
    """Returns the request for a recorded turn: its context is the tokens before it in its row."""
    record = _turns(rollout)[turn]
    lengths = [len(row.ids) for row in rollout.rows] or [len(rollout.ids)]
    starts = list(accumulate([0, *lengths[:-1]]))
    row_start = max(start for start in starts if start <= record.start)
    context = [*rollout.prompt.ids, *rollout.ids[row_start : record.start]]
    assert rollout.key is not None
    key = turn_key(rollout.key, turn if record.noise is None else record.noise)
    of_rows = rollout.trajectory.images if rollout.trajectory is not None else ()
    images = of_rows[starts.index(row_start)] if of_rows else rollout.prompt.images
    before = cut_images(images, slice(0, len(context)))
    return Request(context, key, first=rollout.sample, max_tokens=record.stop - record.start, images=before)


def _repeated(rollout: Rollout, completions: Sequence[Completion]) -> Rollout:
    """Returns the rollout with the tokens of these turns."""
    ids, logprobs, mask = list(rollout.ids), list(rollout.logprobs), list(rollout.loss_mask)
    for record, completion in zip(_turns(rollout), completions, strict=True):
        stop = record.start + len(completion.ids)
        ids[record.start : stop], logprobs[record.start : stop] = completion.ids, completion.logprobs
        if completion.ids != rollout.ids[record.start : record.stop]:
            return replace(rollout, ids=ids[:stop], logprobs=logprobs[:stop], loss_mask=mask[:stop], rows=())
    return replace(rollout, ids=ids, logprobs=logprobs, rows=())
