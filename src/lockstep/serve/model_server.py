"""Loads a model and serves it over HTTP (`lockstep serve`)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.device.base import Device
from lockstep.device.select import explain
from lockstep.errors import Problem, Refusal
from lockstep.http_server.http_api import ListenAddress, ServeLimits
from lockstep.kernels.rotary import fixed_length
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.load_folder import DTYPES
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import text_config
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.reward.model import load_reward_model, normalized_by_config
from lockstep.rollout.generator import Generator
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.online_engine import LiveEngine, longest_that_fits
from lockstep.run.output import write
from lockstep.serve.api_request import ServedModel
from lockstep.serve.engine_worker import EngineWorker
from lockstep.serve.openai_api import LanguageModelApp, ModelApp, model_site
from lockstep.serve.reward_api import RewardEncoder, RewardModelApp, RewardWorker


@dataclass(frozen=True)
class ServeRmOptions:
    """The options of OpenRLHF's `serve_rm`. `append_eos` has the same meaning as in `RewardEncoder`. With `normalize`,
    scores are normalized with the mean and the standard deviation in the model's config.json."""

    append_eos: bool
    normalize: bool


@dataclass(frozen=True)
class ServeSettings:
    """The settings of `lockstep serve`. `max_length` is the maximum number of tokens of prompt and answer together. A
    reward model truncates queries to `max_length` tokens."""

    model: str
    name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_length: int | None = None
    max_sequences: int = 64
    cache_gb: float | None = None
    serve_rm: ServeRmOptions | None = None
    """Set only if a reward model is served in place of OpenRLHF's `serve_rm`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a request may use for the model. Replies contain the first of these names."""
        default = Path(self.model).resolve().name if Path(self.model).exists() else self.model
        return tuple(dict.fromkeys([self.name or default, default, self.model]))


def serve(serving: ServeSettings, address: ListenAddress, limits: ServeLimits) -> None:
    """Loads the model and serves it until SIGINT or SIGTERM."""
    from lockstep.http_server import asgi  # imported here, because it needs the extra `serve`

    device, explanation = explain(serving.device)
    write(explanation, error=True)
    with joined(device) as world:
        if world.size > 1:
            raise Refusal.at(
                "lockstep serve", "runs on one device", "start it without torchrun", code="one-process-only"
            )
        # The port is bound before the model is loaded, so that the command fails immediately if the port is in use.
        sockets = asgi.bind(address.host, address.port, f"--host {address.host} --port {address.port}")
        app = load_app(serving, limits, device, world)
        host = f"[{address.host}]" if ":" in address.host else address.host
        paths = ", ".join(sorted({path for _, path in app.routes}))
        write(f"{serving.names[0]} on http://{host}:{asgi.listen(sockets)}: {paths}")
        try:
            asgi.run_site(model_site(app, address.api_key), limits, sockets)
        finally:
            app.close()


def load_app(serving: ServeSettings, limits: ServeLimits, device: Device, world: World) -> ModelApp:
    """Returns the application for the language model or reward model in the folder."""
    if serving.dtype not in ("auto", *DTYPES):
        raise Refusal.at("--dtype", f"{serving.dtype} is not one of auto, {', '.join(DTYPES)}", code="unknown-name")
    folder = model_folder(serving.model)
    config = load_config(folder)
    kinds = config.architectures or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        return _reward_model(serving, limits, folder, device, world)
    return _language_model(serving, limits, folder, config, device, world)


def _reward_model(serving: ServeSettings, limits: ServeLimits, folder: str, device: Device, world: World) -> ModelApp:
    model = load_reward_model(folder, device.torch_device(world.local_rank))
    if serving.dtype != "auto":
        model.model.to(DTYPES[serving.dtype])
    options = serving.serve_rm
    if options is not None:
        model = normalized_by_config(model) if options.normalize else replace(model, mean=0.0, std=1.0)
    encoder = RewardEncoder(model, serving.names, serving.max_length, options is not None and options.append_eos)
    return RewardModelApp(encoder, RewardWorker(model, limits))


def _language_model(
    serving: ServeSettings, limits: ServeLimits, folder: str, config: Any, device: Device, world: World
) -> LanguageModelApp:
    tokenizer = load_tokenizer(folder)
    dtype = stored_dtype(config) if serving.dtype == "auto" else serving.dtype
    settings = RolloutSettings(max_sequences=serving.max_sequences, cache_gb=serving.cache_gb)
    try:
        generator = Generator.load(folder, tokenizer, dtype, device, world, settings)
    except Refusal as refusal:
        raise _as_options(refusal) from refusal
    engine = generator.engine
    assert isinstance(engine, NativeEngine)
    engine.release_memory()
    max_model_len = _max_model_len(serving, config, engine)
    vocabulary = generator.policy.causal_lm.get_input_embeddings().weight.shape[0]
    served = ServedModel(serving.names, tokenizer, vocabulary, generator.stop_ids, max_model_len)
    # The engine's thread needs a second tokenizer, because tokenizers are not thread-safe.
    decoder = copy.deepcopy(tokenizer)
    worker = EngineWorker(
        LiveEngine(engine, max_model_len), lambda ids: str(decoder.decode(ids, skip_special_tokens=True)), limits
    )
    return LanguageModelApp(served, worker)


def _as_options(refusal: Refusal) -> Refusal:
    """Returns the error with command line options in place of recipe keys, because `lockstep serve` has no recipe."""

    def renamed(text: str) -> str:
        return text.replace("rollout.cache_gb", "--cache-gb").replace("rollout.max_tokens", "--max-length")

    def advised(remedy: str) -> str:
        if "rollout.engine" in remedy:
            return "use `lockstep generate`, which supports every model that transformers can generate with"
        return renamed(remedy)

    return Refusal(
        [Problem(renamed(p.where), renamed(p.why), advised(p.remedy), code=p.code) for p in refusal.problems]
    )


def stored_dtype(config: Any) -> str:
    """Returns the precision of the stored weights if generation supports it, otherwise fp32."""
    stored = getattr(config, "dtype", None)
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "fp32")


def _max_model_len(serving: ServeSettings, config: Any, engine: NativeEngine) -> int:
    text = text_config(config)
    lengths = [length for length in (getattr(text, "max_position_embeddings", None), fixed_length(text)) if length]
    context = min(lengths, default=None)
    if serving.max_length is not None:
        if context is not None and serving.max_length > context:
            raise Refusal.at(
                "--max-length", f"{serving.max_length} is over the model's context of {context}", code="over-context"
            )
        return serving.max_length
    if context is None:
        raise Refusal.at(
            "--max-length", "the model's config.json has no context length", "set --max-length", code="not-set"
        )
    max_model_len = longest_that_fits(engine, context)
    if max_model_len < context:
        write(
            f"sequences are limited to {max_model_len:,} tokens: the cache has no room for the model's context "
            f"of {context:,}; raise --cache-gb",
            error=True,
        )
    return max_model_len
