"""Recipe keys of the group `rollout`: the generation engine, sampling, and the server of a serving engine. The keys of
environments are in `keys_environment.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.recipe.keys_parallel import Labels
from lockstep.recipe.registry import ENGINES
from lockstep.recipe.section import CACHE, GROUPS, SAMPLING, Effect, Field, Named, Section

_WHERE = Effect("harmless", "this key affects only on which machine or device the engine runs")
_HOW = Effect(
    "matters", "the engine starts with other settings, so log-probs differ by rounding or more; compare the log-probs"
)
_LIMIT = Effect("harmless", "this key affects only whether and when the run stops")


class ServerSettings(Section):
    devices: list[int] | None = Field(
        None,
        min_length=1,
        description="Indices of the devices on this machine that the engine may use. Default: the devices of the run.",
        effect=_WHERE,
        resumable=True,
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Tensor-parallel size of the engine.", effect=_HOW, resumable=True
    )
    replicas: int | None = Field(
        None,
        ge=1,
        description="Number of engines on a Ray cluster. Each engine is a Ray actor on any node, with "
        "`tensor_parallel` devices of its own. Default: process 0 starts one engine on its own node, which uses "
        "its device.",
        effect=_WHERE,
        resumable=True,
    )
    cpus: int | None = Field(
        None,
        ge=1,
        description="CPUs that Ray reserves for each engine of `replicas`. Default: `tensor_parallel` + 2.",
        effect=_WHERE,
        resumable=True,
    )
    labels: Labels = Field(
        default_factory=dict,
        description="Labels of the nodes on which Ray places the engines of `replicas`, as in `parallel.ray.labels`. "
        "Default: any node.",
        effect=_WHERE,
        resumable=True,
    )
    args: list[str] = Field(
        default_factory=list,
        description="Additional command-line arguments of the engine, such as `[--gpu-memory-utilization, '0.5']`.",
        effect=_HOW,
        resumable=True,
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the engine.", effect=_HOW, resumable=True
    )
    python: str | None = Field(
        None,
        description="Python interpreter that has the engine installed, such as `.venv-vllm/bin/python`. Engines pin "
        "their torch version, so they may need a separate environment. Default: the interpreter that runs lockstep.",
        effect=_HOW,
        resumable=True,
    )
    folder: str | None = Field(
        None,
        description="Folder used to transfer weights to the engine. The run and the engine must see this folder under "
        "the same path. Default: a folder in shared memory (`/dev/shm`), or the system's folder for temporary files; "
        "with `replicas`, the run folder.",
        effect=_WHERE,
        resumable=True,
    )
    start_timeout: float = Field(
        1800.0,
        gt=0,
        description="Timeout in seconds for the engine to respond after its start, or after the connection to it was "
        "lost.",
        effect=_LIMIT,
        resumable=True,
    )
    request_timeout: float = Field(
        1800.0,
        gt=0,
        description="Timeout in seconds of one request to the engine for a response, and of one transfer of weights.",
        effect=_LIMIT,
        resumable=True,
    )


def _stop_text(text: str) -> str:
    if not text:
        raise PydanticCustomError("stop", "must not be empty: an empty string would end every response after one token")
    return text


def _stop_id(token: int) -> int:
    # The upper bound is the vocabulary size, which is checked after the model is loaded.
    if token < 0:
        raise PydanticCustomError("stop_id", "must be at least 0: no token has a negative id")
    return token


class EngineSettings(Section):
    engine: Annotated[str, Named(ENGINES)] = Field(
        "native",
        description="`native` is the built-in engine; `hf` is Hugging Face `generate` (slow, for comparison); "
        "`vllm` and `sglang` are servers with a separate copy of the weights (`lockstep help engines`).",
        effect=Effect(
            "matters",
            "the engines sample from the same distribution, with other kernels and, for a server, another "
            "random generator",
        ),
    )
    url: str | list[str] | None = Field(
        None,
        description="Address of a running serving engine, or a list of addresses among which the run divides the "
        "requests. Default: lockstep starts a server with the settings of `rollout.server`.",
        effect=Effect("harmless", "this key affects only on which machine or device the engine runs"),
        resumable=True,
    )
    server: ServerSettings = Field(default_factory=ServerSettings)
    sleep: bool = Field(
        False,
        description="The serving engine releases its memory while the run trains.",
        effect=Effect("harmless", "the engine only releases its memory and reloads the same weights"),
        resumable=True,
    )
    function: str | None = Field(
        None,
        description="Your function (`path/to/file.py:name`) that generates a full response turn by turn. The function "
        "requests each turn of the policy from the engine.",
        effect=Effect("matters", "the rollout functions may differ, or only their paths; compare the samples"),
    )
    function_timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout in seconds for the code of `rollout.function` between two turns of the policy. If the "
        "function exceeds this timeout, the response fails.",
        effect=Effect(
            "harmless",
            "this key changes the metrics only if a response exceeds the timeout; see the metric reward/failed",
        ),
        resumable=True,
    )
    n: int = Field(8, ge=1, description="Responses per prompt.", effect=GROUPS)
    max_tokens: int = Field(
        256,
        ge=1,
        description="Maximum response length in tokens.",
        effect=Effect("blocks", "the length limit differs, and truncated responses get a lower reward"),
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Sampling temperature, which divides the logits in the engine and in the trainer's "
        "log-probabilities.",
        effect=SAMPLING,
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: sample from the smallest set of most likely tokens with at "
        "least this total probability.",
        effect=SAMPLING,
    )
    top_k: int = Field(
        0,
        ge=0,
        description="Sample only from this many of the most likely tokens; 0 means from all tokens.",
        effect=SAMPLING,
    )
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Exclude tokens whose probability is below this fraction of the probability of the most likely "
        "token.",
        effect=SAMPLING,
    )
    truncated_sampling: Literal["refuse", "mask", "ignore"] = Field(
        "refuse",
        description="How the trainer computes log-probabilities if `top_p`, `top_k` or `min_p` truncates sampling. "
        "`mask`: log-probabilities with the same truncation as in sampling. `ignore`: log-probabilities under the "
        "full distribution, which biases the importance ratios. `refuse`: the run stops with an error that asks for "
        "`mask` or `ignore`.",
        effect=Effect("blocks", "the trainer computes log-probabilities under a different distribution"),
    )
    stop: list[Annotated[str, AfterValidator(_stop_text)]] = Field(
        default_factory=list,
        description="Strings that end a response.",
        effect=Effect("blocks", "responses end at different tokens"),
    )
    stop_ids: list[Annotated[int, AfterValidator(_stop_id)]] = Field(
        default_factory=list,
        description="Token ids that end a response, in addition to the model's end tokens.",
        effect=Effect("blocks", "responses end at different tokens"),
    )
    max_sequences: int = Field(
        256,
        ge=1,
        description="Native engine: maximum number of responses decoded at once on one device.",
        effect=CACHE,
        resumable=True,
    )
    prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="Native engine: prompt tokens per prefill pass. Default: the most efficient number for the device. "
        "A default above 8,192 tokens is lowered until a prefill pass needs at most an eighth of the device memory, "
        "but never below 8,192 tokens.",
        effect=CACHE,
        resumable=True,
    )
    precision: Literal["fp8", "int8"] | None = Field(
        None,
        description="Generate training responses with weights and activations of eight bits. The weights are quantised "
        "after every update, with one scale per row; activations have one scale per token. Embeddings, output head, "
        "norms, routers and recurrent layers keep `model.dtype`. Then `algorithm.rollout_correction.weight` is `token` "
        "by default, and a correction is required. Validation of the native engine generates in `model.dtype`; "
        "validation of a server has this precision. Default: the precision of `model.dtype`.",
        effect=Effect("matters", "responses are sampled from a quantised policy, and importance weights correct this"),
    )
    kv_cache: Literal["fp8"] | None = Field(
        None,
        description="Native engine: keep keys and values of training responses in fp8, with one scale per token and "
        "head. The correction of `precision` applies here too. Default: the precision of `model.dtype`.",
        effect=Effect("matters", "responses are sampled with rounded keys and values; importance weights correct this"),
    )
    block_tokens: int = Field(
        16, ge=1, description="Native engine: tokens per block of the KV cache.", effect=CACHE, resumable=True
    )
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="Native engine: size of the KV cache in GB. Default: as large as the responses of a step can use, "
        "at most half of the free device memory.",
        effect=CACHE,
        resumable=True,
    )
    free_cache: bool | None = Field(
        None,
        description="Native engine: free the KV cache after each generation phase. `false` keeps the cache and the "
        "graphs captured for it, which is faster if memory is plentiful. Default: keep the cache if the device "
        "captures graphs and the cache takes at most a twentieth of its memory.",
        effect=CACHE,
        resumable=True,
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Generate in a separate process per rank while the run trains. The weights that generate a "
        "response are at most this many steps older than the weights that train on it; with 0, generation waits for "
        "the current weights. Default: generation and training alternate in one process. A value above 0 changes two "
        "defaults: for a loss that clips, `algorithm.rollout_correction.bypass` is `true`; for other losses, "
        "`algorithm.rollout_correction.weight` is `token`.",
        effect=Effect("matters", "responses are sampled with weights of earlier steps; the lag depends on timing"),
    )
    worker_device: int | None = Field(
        None,
        ge=0,
        description="With `max_staleness`: index of the device on which the separate process generates. With several "
        "ranks on a machine, local rank r uses this index plus r. Default: the training device.",
        effect=Effect("harmless", "the same model generates on another device of the same type"),
        resumable=True,
    )
    worker_restarts: int = Field(
        2,
        ge=0,
        description="With `max_staleness`: how often a rank starts its generating process again after it was killed, "
        "hung or failed. The unfinished responses are generated again, also by the processes of other ranks. "
        "After that, and always if `weight_sync` is `collective`, a lost process ends the run, and "
        "`parallel.max_restarts` restarts it from the last checkpoint.",
        effect=Effect("harmless", "responses are generated again with the same weights"),
        resumable=True,
    )
    weight_sync: Literal["auto", "memory", "files", "collective"] = Field(
        "auto",
        description="How weights reach the process that generates. `collective`: the devices (on a CPU, the "
        "processes) broadcast the weights. `memory`: with `max_staleness`, the weights pass through shared memory of "
        "the host; a vLLM server on the same machine maps the device memory of the run. `files`: a serving engine "
        "reads the weights from files. With `max_staleness`, `auto` selects `collective` if the generating process "
        "has a separate device, otherwise `memory`. With a server, `auto` selects `collective` with "
        "`rollout.server.replicas`, except for LoRA, and `memory` if a run with one process starts a vLLM server on "
        "its own device and this device can share memory; otherwise `files`.",
        effect=Effect("harmless", "the same weights are sent by another transport; a weight check verifies them"),
        resumable=True,
    )
    max_logprob_diff: float | Literal["auto"] | None = Field(
        "auto",
        description="Largest mean difference between the engine's and the trainer's log-probabilities of the "
        "generated tokens. The run stops before the updates of a step if the difference is larger, or if the k3 "
        "estimate of the KL divergence exceeds half of this value. `auto` checks serving engines, with 0.005 in fp32, "
        "0.03 in fp16 and 0.1 in bf16, and every engine with `precision`, with 0.25; the limit is divided by "
        "`temperature` if that is below 1. `null`: no check.",
        effect=Effect("harmless", "this key affects only whether and when the run stops"),
        resumable=True,
    )
    max_probs_diff: float | None = Field(
        None,
        gt=0,
        description="Stop the run if the mean difference between the engine's and the trainer's probabilities of the "
        "generated tokens exceeds this value.",
        effect=Effect("harmless", "this key affects only whether and when the run stops"),
        resumable=True,
    )


class RolloutSettings(EnvironmentSettings, EngineSettings):
    """All keys of the group `rollout`."""

    @property
    def low_precision(self) -> str | None:
        """Describes in which low precision training responses are generated; None in full precision."""
        cache = None if self.kv_cache is None else f"a KV cache in {self.kv_cache}"
        return " with ".join(filter(None, (self.precision, cache))) or None
