"""Recipe keys of generation: the engine, sampling, and the server of a serving engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.recipe.registry import ENGINES
from lockstep.recipe.section import CACHE, GROUPS, SAMPLING, Effect, Field, Named, Section

_WHERE = Effect("harmless", "changes only where the engine runs")
_HOW = Effect("matters", "the engine starts with other settings: rounding or larger differences; compare the log-probs")
_LIMIT = Effect("harmless", "changes only when the run stops")


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
        description="Python interpreter that has the engine installed, such as `.venv-vllm/bin/python`; engines "
        "pin their torch version. Default: the interpreter that runs lockstep.",
        effect=_HOW,
        resumable=True,
    )
    folder: str | None = Field(
        None,
        description="Folder used to transfer weights to the engine. The run and the engine must see it under the "
        "same path. Default: shared memory (`/dev/shm`), or the system's folder for temporary files.",
        effect=_WHERE,
        resumable=True,
    )
    start_timeout: float = Field(
        1800.0,
        gt=0,
        description="Timeout in seconds for the engine to respond after its start, or after it was lost.",
        effect=_LIMIT,
        resumable=True,
    )
    request_timeout: float = Field(
        1800.0,
        gt=0,
        description="Timeout in seconds for one response, and for loading weights.",
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


class RolloutSettings(Section):
    engine: Annotated[str, Named(ENGINES)] = Field(
        "native",
        description="`native` is the built-in engine; `hf` is Hugging Face `generate` (slow, for comparison); "
        "`vllm` and `sglang` are servers with a separate copy of the weights (docs/engines.md).",
        effect=Effect(
            "matters", "the same distribution with other kernels and, for a server, another random generator"
        ),
    )
    url: str | list[str] | None = Field(
        None,
        description="Address of a running serving engine, or a list of addresses that share the requests. Default: "
        "lockstep starts a server as set in `rollout.server`.",
        effect=Effect("harmless", "changes only where the engine runs"),
        resumable=True,
    )
    server: ServerSettings = Field(default_factory=ServerSettings)
    sleep: bool = Field(
        False,
        description="The serving engine releases its memory while the run trains.",
        effect=Effect("harmless", "the engine releases its memory and reloads the weights"),
        resumable=True,
    )
    function: str | None = Field(
        None,
        description="Your function that generates a full response turn by turn: `path/to/file.py:name`. It "
        "requests each turn of the policy from the engine.",
        effect=Effect("matters", "a different function, or the same one at another path; compare the samples"),
    )
    function_timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout in seconds of `function` between two turns of the policy. After it, the response fails.",
        effect=Effect("harmless", "matters only if a response fails; see reward/failed"),
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
        description="Divides the logits, both in the engine and in the trainer's log-probabilities.",
        effect=SAMPLING,
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the most likely tokens with this total probability.", effect=SAMPLING
    )
    top_k: int = Field(0, ge=0, description="Sample from this many most likely tokens; 0 means all.", effect=SAMPLING)
    min_p: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Exclude tokens whose probability is below this fraction of the most likely token's.",
        effect=SAMPLING,
    )
    truncated_sampling: Literal["refuse", "mask", "ignore"] = Field(
        "refuse",
        description="How the trainer computes log-probabilities with `top_p`, `top_k` or `min_p`: `mask` with the "
        "same truncation; `ignore` under the full distribution (the ratios are then biased); `refuse` stops with "
        "an error until you choose.",
        effect=Effect("blocks", "log-probabilities are of a different distribution"),
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
        description="Native: maximum number of responses decoded at once on one device.",
        effect=CACHE,
        resumable=True,
    )
    prefill_tokens: int | None = Field(
        None,
        ge=1,
        description="Native: prompt tokens per forward pass. Default: 8,192, or the most efficient number for the "
        "device within an eighth of its memory.",
        effect=CACHE,
        resumable=True,
    )
    block_tokens: int = Field(
        16, ge=1, description="Native: tokens per block of the KV cache.", effect=CACHE, resumable=True
    )
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="Native: size of the KV cache in GB. Default: as much as the step can use, at most half of "
        "the free memory.",
        effect=CACHE,
        resumable=True,
    )
    free_cache: bool | None = Field(
        None,
        description="Native: free the KV cache after each generation phase. `false` keeps it and the graphs "
        "captured for it: faster if memory is plentiful. Default: keep it if graphs are captured and it takes at "
        "most a twentieth of the memory.",
        effect=CACHE,
        resumable=True,
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Generate in a separate process per rank while the run trains. Its weights are at most this "
        "many steps older than the weights that its responses train (0: it waits for them). Default: generation "
        "and training alternate. Above 0, if the recipe does not set them, `algorithm.rollout_correction.bypass` "
        "is `true` for a loss that clips, otherwise `algorithm.rollout_correction.weight` is `token`.",
        effect=Effect("matters", "responses are sampled with weights of earlier steps; the lag depends on timing"),
    )
    worker_device: int | None = Field(
        None,
        ge=0,
        description="With `max_staleness`: index of the device on which this process generates. With several "
        "ranks on a machine, local rank r uses this index plus r. Default: the training device.",
        effect=Effect("harmless", "the same model on another device of the same kind"),
        resumable=True,
    )
    weight_sync: Literal["auto", "memory", "files", "collective"] = Field(
        "auto",
        description="How weights reach the process that generates. `collective`: a collective of the devices (on a "
        "CPU: of the processes). `memory`: with `max_staleness` the shared memory of the host; a vLLM server on "
        "the same machine opens the run's device memory. `files`: files, for a serving engine. `auto`: with "
        "`max_staleness`, the collective if the generating process has a separate device, otherwise memory; for a "
        "server, memory if the run started it on the run's device and the device supports sharing, otherwise files.",
        effect=Effect("harmless", "the same weights over another transport; a weight check verifies them"),
        resumable=True,
    )
    max_logprob_diff: float | Literal["auto"] | None = Field(
        "auto",
        description="Stop before the updates of a step if the engine's log-probabilities of the generated tokens "
        "differ from the trainer's by more than this on average, or if their divergence (k3) exceeds half of it. "
        "`auto` checks serving engines: 0.005 in fp32, 0.03 in fp16, 0.1 in bf16, divided by a `temperature` below "
        "1. `null`: no check.",
        effect=Effect("harmless", "changes only when the run stops"),
        resumable=True,
    )
    max_probs_diff: float | None = Field(
        None,
        gt=0,
        description="Stop if the mean difference between the engine's and the trainer's probabilities exceeds this.",
        effect=Effect("harmless", "changes only when the run stops"),
        resumable=True,
    )
