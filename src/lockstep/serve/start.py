"""A model loaded and served until the process is asked to end."""

from __future__ import annotations

import asyncio
import copy
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.device.base import Device
from lockstep.device.select import explain
from lockstep.errors import Problem, Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.model.load import DTYPES, load_config, load_tokenizer
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.reward.model import load_reward_model, normalized_by_config
from lockstep.rollout.generator import Generator
from lockstep.rollout.native.engine import NativeEngine
from lockstep.rollout.native.online_engine import LiveEngine, longest_that_fits
from lockstep.run.output import write
from lockstep.serve.app import App, LanguageModelApp, server_of
from lockstep.serve.limits import ListenAddress, ServeLimits
from lockstep.serve.orders import Served
from lockstep.serve.rewards import RewardForm, RewardModelApp, RewardWorker
from lockstep.serve.worker import EngineWorker


@dataclass(frozen=True)
class ForeignRewards:
    """What OpenRLHF's `serve_rm` does otherwise: `ended` as in `RewardForm`; scores are `normalized` by the mean and
    deviation in the model's config.json, or not at all."""

    ended: bool
    normalized: bool


@dataclass(frozen=True)
class ServeSettings:
    """What is served and how. `max_length`: tokens of a prompt and its answer together, where less than the model's
    context; of a reward model, those after which a query is cut."""

    model: str
    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_length: int | None = None
    max_sequences: int = 64
    cache_gb: float | None = None
    foreign: ForeignRewards | None = None
    """Of a reward model: as OpenRLHF's `serve_rm` would."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may call the model; the first is told."""
        own = Path(self.model).resolve().name if Path(self.model).exists() else self.model
        return tuple(dict.fromkeys([self.name or own, own, self.model]))


def serve(serving: ServeSettings, address: ListenAddress, limits: ServeLimits) -> None:
    """Load, listen, and answer until SIGINT or SIGTERM."""
    device, sentence = explain(serving.device)
    write(sentence, error=True)
    with joined(device) as world:
        if world.size > 1:
            raise Refusal.at("lockstep serve", "runs on one device", "start it without torchrun")
        app = opened(serving, limits, device, world)
        try:
            asyncio.run(_run(app, address, limits, serving.names[0]))
        finally:
            app.close()


async def _run(app: App, address: ListenAddress, limits: ServeLimits, name: str) -> None:
    server = server_of(app, address, limits)
    try:
        port = await server.listen(address.host, address.port)
    except OSError as error:
        where = f"--host {address.host} --port {address.port}"
        raise Refusal.at(where, f"cannot be listened on: {error.strerror}", "choose another host or port") from error
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    host = f"[{address.host}]" if ":" in address.host else address.host
    write(f"{name} on http://{host}:{port}: {', '.join(sorted({path for _, path in app.routes}))}")
    await over.wait()
    await server.close()


def opened(serving: ServeSettings, limits: ServeLimits, device: Device, world: World) -> App:
    """A language model, or a reward model: its folder says which."""
    if serving.dtype not in ("auto", *DTYPES):
        raise Refusal.at("--dtype", f"{serving.dtype} is not one of auto, {', '.join(DTYPES)}")
    folder = model_folder(serving.model)
    config = load_config(folder)
    kinds = config.architectures or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        return _reward_model(serving, limits, folder, device, world)
    return _language_model(serving, limits, folder, config, device, world)


def _reward_model(serving: ServeSettings, limits: ServeLimits, folder: str, device: Device, world: World) -> App:
    model = load_reward_model(folder, device.torch_device(world.local_rank))
    if serving.dtype != "auto":
        model.model.to(DTYPES[serving.dtype])
    foreign = serving.foreign
    if foreign is not None:
        model = normalized_by_config(model) if foreign.normalized else replace(model, mean=0.0, std=1.0)
    form = RewardForm(model, serving.names, serving.max_length, foreign is not None and foreign.ended)
    return RewardModelApp(form, RewardWorker(model, limits))


def _language_model(
    serving: ServeSettings, limits: ServeLimits, folder: str, config: Any, device: Device, world: World
) -> LanguageModelApp:
    tokenizer = load_tokenizer(folder)
    dtype = stored_dtype(config) if serving.dtype == "auto" else serving.dtype
    settings = RolloutSettings(max_sequences=serving.max_sequences, cache_gb=serving.cache_gb)
    try:
        generator = Generator.load(folder, tokenizer, dtype, device, world, settings)
    except Refusal as refusal:
        raise _in_options(refusal) from refusal
    engine = generator.engine
    assert isinstance(engine, NativeEngine)
    engine.free()
    longest = _longest(serving, config, engine)
    vocabulary = generator.policy.causal_lm.get_input_embeddings().weight.shape[0]
    served = Served(serving.names, tokenizer, vocabulary, generator.stop_ids, longest)
    # The engine's thread has a tokenizer of its own: one may not be asked by two threads at once.
    own = copy.deepcopy(tokenizer)
    worker = EngineWorker(
        LiveEngine(engine, longest), lambda ids: str(own.decode(ids, skip_special_tokens=True)), limits
    )
    return LanguageModelApp(served, worker)


def _in_options(refusal: Refusal) -> Refusal:
    """The same in the words of the command: it has no recipe."""

    def said(text: str) -> str:
        return text.replace("rollout.cache_gb", "--cache-gb").replace("rollout.max_tokens", "--max-length")

    def advised(remedy: str) -> str:
        if "rollout.engine" in remedy:
            return "use `lockstep generate`, which runs whatever transformers generates from"
        return said(remedy)

    return Refusal([Problem(said(p.where), said(p.why), advised(p.remedy)) for p in refusal.problems])


def stored_dtype(config: Any) -> str:
    """The precision of the folder's weights, where generation knows it; else fp32."""
    stored = getattr(config, "dtype", None)
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


def _longest(serving: ServeSettings, config: Any, engine: NativeEngine) -> int:
    text = config.get_text_config()
    known = [length for length in (getattr(text, "max_position_embeddings", None), fixed_length(text)) if length]
    context = min(known, default=None)
    if serving.max_length is not None:
        if context is not None and serving.max_length > context:
            raise Refusal.at("--max-length", f"{serving.max_length} is over the model's context of {context}")
        return serving.max_length
    if context is None:
        raise Refusal.at("--max-length", "the model does not say how long a sequence may be", "set it")
    longest = longest_that_fits(engine, context)
    if longest < context:
        write(
            f"sequences of up to {longest:,} tokens: the cache has no room for the model's context of {context:,}; "
            "raise --cache-gb",
            error=True,
        )
    return longest
