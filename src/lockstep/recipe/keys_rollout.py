"""Recipe keys of generation: the engine, sampling, and the server of a serving engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.recipe.registry import ENGINES
from lockstep.recipe.section import CACHE, GROUPS, SAMPLING, Effect, Field, Named, Section

# Keys of a serving engine (`rollout.server`): the process that lockstep starts, and how long it is waited for.

_WHERE = Effect("harmless", "where the engine runs")
_HOW = Effect("matters", "the engine is started otherwise: rounding, or more; the log-probs tell")
_LIMIT = Effect("harmless", "only when the run is stopped")


class ServerSettings(Section):
    devices: list[int] | None = Field(
        None,
        min_length=1,
        description="Devices of this machine that the engine sees, by their numbers. Default: those of the run.",
        effect=_WHERE,
        resumable=True,
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Devices that divide the engine's weights among them.", effect=_HOW, resumable=True
    )
    args: list[str] = Field(
        default_factory=list,
        description="Further arguments of the engine's command line, such as `[--gpu-memory-utilization, '0.5']`.",
        effect=_HOW,
        resumable=True,
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the engine.", effect=_HOW, resumable=True
    )
    python: str | None = Field(
        None,
        description="The Python that has the engine installed, such as `.venv-vllm/bin/python`: engines pin a torch of "
        "their own. Default: the one that runs lockstep.",
        effect=_HOW,
        resumable=True,
    )
    folder: str | None = Field(
        None,
        description="Folder through which weights reach the engine: run and engine must both see it under this name. "
        "Default: shared memory (`/dev/shm`), or the system's folder for temporary files.",
        effect=_WHERE,
        resumable=True,
    )
    start_limit: float = Field(
        1800.0,
        gt=0,
        description="Seconds in which an engine must answer after its start, or again after it was lost.",
        effect=_LIMIT,
        resumable=True,
    )
    answer_limit: float = Field(
        1800.0,
        gt=0,
        description="Seconds that the engine may take for one response, or to load weights.",
        effect=_LIMIT,
        resumable=True,
    )


# Keys of generation: the engine, how it samples, and the server behind it where it has one.


def _stop_text(text: str) -> str:
    if not text:
        raise PydanticCustomError(
            "stop", "an empty text is in every response and would end it after one token; remove it"
        )
    return text


def _stop_id(token: int) -> int:
    # The upper end is the model's vocabulary, which is known when the model is.
    if token < 0:
        raise PydanticCustomError("stop_id", "no token has a negative id, so it would never end a response; remove it")
    return token


class RolloutSettings(Section):
    engine: Annotated[str, Named(ENGINES)] = Field(
        "native",
        description="`native` is the built-in engine, `hf` plain `generate`: slow, for comparison; `vllm` and "
        "`sglang` are servers with weights of their own (docs/engines.md).",
        effect=Effect(
            "matters", "the same distribution by other kernels: rounding moves some tokens; a server's noise is its own"
        ),
    )
    url: str | list[str] | None = Field(
        None,
        description="Address of a serving engine that runs already; or several, that share the requests. Default: "
        "lockstep starts one, as `rollout.server` says.",
        effect=Effect("harmless", "where the engine runs"),
        resumable=True,
    )
    server: ServerSettings = Field(default_factory=ServerSettings)
    sleep: bool = Field(
        False,
        description="A serving engine gives its memory back while the run trains.",
        effect=Effect("harmless", "the engine's memory is given back, and its weights come again"),
        resumable=True,
    )
    function: str | None = Field(
        None,
        description="Your own function that writes a whole response, turn by turn: `path/to/file.py:name`. It asks the "
        "engine for each turn of the policy.",
        effect=Effect("matters", "another function, or the same one elsewhere: the samples tell"),
    )
    function_limit: float = Field(
        600.0,
        gt=0,
        description="Seconds that `function` may take between two turns of the policy; then its response fails.",
        effect=Effect("harmless", "only where a response is given up; reward/failed tells"),
        resumable=True,
    )
    n: int = Field(8, ge=1, description="Responses sampled for each prompt.", effect=GROUPS)
    max_tokens: int = Field(
        256,
        ge=1,
        description="Longest response in tokens.",
        effect=Effect("blocks", "responses end at another length, and unfinished ones earn less"),
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Divides the logits, in the engine and in the trainer's log-probabilities alike.",
        effect=SAMPLING,
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the most likely tokens that hold this probability.", effect=SAMPLING
    )
    top_k: int = Field(0, ge=0, description="Sample from the so many most likely tokens; 0 is all.", effect=SAMPLING)
    min_p: float = Field(
        0.0, ge=0, lt=1, description="Leave out tokens below this share of the likeliest one's.", effect=SAMPLING
    )
    truncated: Literal["refuse", "mask", "ignore"] = Field(
        "refuse",
        description="With `top_p`, `top_k` or `min_p`: the trainer scores with the same truncation (`mask`) or under "
        "the whole distribution (`ignore`: ratios are then off); `refuse` asks to choose.",
        effect=Effect("blocks", "log-probabilities are of another distribution"),
    )
    stop: list[Annotated[str, AfterValidator(_stop_text)]] = Field(
        default_factory=list,
        description="Texts that end a response.",
        effect=Effect("blocks", "responses end elsewhere"),
    )
    stop_ids: list[Annotated[int, AfterValidator(_stop_id)]] = Field(
        default_factory=list,
        description="Tokens that end a response, besides the model's.",
        effect=Effect("blocks", "responses end elsewhere"),
    )
    max_sequences: int = Field(
        256, ge=1, description="Native: responses decoded at once on one device.", effect=CACHE, resumable=True
    )
    prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="Native: prompt tokens of one forward pass. Default: 8,192, or what the device does best at once "
        "within an eighth of its memory.",
        effect=CACHE,
        resumable=True,
    )
    block_tokens: int = Field(
        16, ge=1, description="Native: tokens of one block of the key/value cache.", effect=CACHE, resumable=True
    )
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="Native: memory of the key/value cache. Default: what the step can use, at most half of what is "
        "free.",
        effect=CACHE,
        resumable=True,
    )
    free_cache: bool | None = Field(
        None,
        description="Native: give the cache back after each phase. `false` keeps it, and with it what was captured for "
        "it: faster where memory is plentiful. Default: kept where passes are captured and it takes at most a "
        "twentieth of the memory.",
        effect=CACHE,
        resumable=True,
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="A process of its own, one for each rank, generates while the run trains, with weights that are at "
        "most so many steps older than those its responses train (0: it waits for them). Default: generation and "
        "training take turns. Over 0, `algorithm.correction.bypass` is `true` where the recipe does not say and the "
        "loss clips, otherwise `algorithm.correction.weight` is `token`.",
        effect=Effect("matters", "responses are drawn by weights of earlier steps, and how early is a matter of time"),
    )
    worker_device: int | None = Field(
        None,
        ge=0,
        description="With `max_staleness`: number of the device that this process generates on; of several ranks on a "
        "machine the r-th, from 0, has the device of this number and r. Default: the one that trains.",
        effect=Effect("harmless", "the same model on another device of the same kind"),
        resumable=True,
    )
    hand_over: Literal["auto", "memory", "files", "collective"] = Field(
        "auto",
        description="How weights reach who generates: by a `collective` of the devices (on a CPU: of the processes), "
        "with `max_staleness` also through shared `memory` of the host, to a serving engine also through `files`; vLLM "
        "on the run's own machine opens the `memory` that they are in. `auto` is the collective where the process "
        "beside the run has a device of its own, memory where not; for a server memory where the run started it on its "
        "own device and the device can be shared so, else files.",
        effect=Effect("harmless", "the same weights by another way; a probe shows that they are"),
        resumable=True,
    )
    max_logprob_diff: float | Literal["auto"] | None = Field(
        "auto",
        description="Stop before the updates of a step when the engine's log-probabilities of its own tokens differ "
        "from the trainer's by more than this on average, or when their divergence (k3) is over half of it. `auto` "
        "checks serving engines: 0.005 in fp32, 0.03 in fp16, 0.1 in bf16, divided by a `temperature` below 1. `null`: "
        "no check.",
        effect=Effect("harmless", "only when the run is stopped"),
        resumable=True,
    )
    max_probs_diff: float | None = Field(
        None,
        gt=0,
        description="Stop when the mean difference of engine's and trainer's probabilities is over this.",
        effect=Effect("harmless", "only when the run is stopped"),
        resumable=True,
    )
