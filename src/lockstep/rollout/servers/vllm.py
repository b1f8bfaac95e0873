"""The server adapter of vLLM and vllm-ascend."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.device.serving import serving_on
from lockstep.rollout.servers.adapter import (
    BUCKET_BYTES,
    Announced,
    Answer,
    Channel,
    Ended,
    GroupMeeting,
    MemoryPart,
    Placed,
    PushedWeights,
    ServerFailed,
    ServerMetadata,
    ServerNeeds,
    ServerStart,
    WantedSample,
    other_quantization,
    refuse_other_prompt,
)
from lockstep.rollout.servers.server_client import ENGINE_KEY, KEY_VARIABLE, LEAVE_SECONDS, SWITCH_SECONDS
from lockstep.vision.images import image_bytes
from lockstep.vision.spans import ImageRef

PLUGIN = Path(__file__).parent / "plugin"
MODEL = "lockstep"
SAMPLES = "/lockstep/samples"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# The values of --max-lora-rank that vLLM accepts.
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NOT_FOUND = 404
# The quantisation of vLLM for a value of `rollout.precision`. It has one scale per output row and per token, like the
# native engine, and `reload_weights` quantises the new weights.
QUANTIZATION = {"fp8": "fp8_per_channel"}


class Vllm:
    """`ServerAdapter` of vLLM."""

    name = "vllm"
    package = "vllm"
    samples_together = True
    opens_memory = True
    bucket_bytes = BUCKET_BYTES
    receives_all = True
    reads_key_file = False
    gone_statuses = (502, 503, 504)

    def install(self, device: str) -> str:
        return serving_on(device, self.name).install

    # -- start

    def command(self, start: ServerStart) -> list[str]:
        # The console script `vllm` is not used, because it requires a Python distribution named vllm, and some builds
        # have other names.
        words = [start.python, "-m", "vllm.entrypoints.openai.api_server", *self.flags(start.needs)]
        words += ["--model", start.model, "--host", start.host, "--port", str(start.port)]
        words += ["--dtype", _DTYPES[start.dtype], "--tensor-parallel-size", str(start.tensor_parallel)]
        # The run does not need access logs and statistics.
        words += ["--disable-uvicorn-access-log", "--disable-log-stats"]
        return [*words, *serving_on(start.needs.device, self.name).words, *start.args]

    def flags(self, needs: ServerNeeds) -> list[str]:
        """Returns the flags that every vLLM server needs, no matter whether lockstep or the user starts the server."""
        words = ["--served-model-name", MODEL, "--logprobs-mode", "processed_logprobs"]
        # Ignore the sampling defaults of the model folder.
        words += ["--generation-config", "vllm"]
        words += ["--worker-extension-cls", "lockstep_vllm.WeightExtension"]
        words += ["--middleware", "lockstep_samples.SampleRoute", "--scheduler-cls", "lockstep_scheduler.scheduler"]
        return [*words, *(word for flag in self.settings(needs) for word in flag.split())]

    def settings(self, needs: ServerNeeds) -> dict[str, str]:
        flags = {}
        if needs.device == "cpu":
            # Chunked prefill rewinds the random generator of a request with a seed, which a CPU generator does not
            # support.
            flags["--no-enable-chunked-prefill"] = "vLLM 0.32 crashes on a seeded request with a chunked prompt"
        elif needs.sleep:
            flags["--enable-sleep-mode"] = "rollout.sleep: vLLM cannot release its memory without this flag"
        if needs.lora_rank is not None:
            room = next((rank for rank in _LORA_RANKS if rank >= needs.lora_rank), needs.lora_rank)
            flags[f"--enable-lora --max-loras 1 --max-lora-rank {room}"] = "the run's adapter"
        if needs.routes:
            flags["--enable-return-routed-experts"] = "algorithm.routing_replay: answers have the experts of each token"
            flags["--enable-prefix-caching"] = "vLLM stores the experts of a token with its cache"
        elif needs.turns:
            # It is the default for most models, but some versions of vLLM leave it off for hybrid models.
            flags["--enable-prefix-caching"] = "rollout.environment: each turn reuses the cache of the turns before"
        if needs.precision is not None:
            flags[f"--quantization {QUANTIZATION[needs.precision]}"] = "rollout.precision: every push is quantised"
        return flags

    def environment(self, start: ServerStart) -> dict[str, str]:
        variables = {
            "PYTHONPATH": str(PLUGIN),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            KEY_VARIABLE: start.key,
            ENGINE_KEY: start.key,
        }
        return variables | serving_on(start.needs.device, self.name).environment(sleep=start.needs.sleep)

    def started_by_hand(self, needs: ServerNeeds) -> str:
        return (
            f"set {KEY_VARIABLE}=SECRET for the server and for the run; start the server with PYTHONPATH={PLUGIN} "
            "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server "
            f"--model FOLDER --dtype DTYPE {' '.join(self.flags(needs))}"
        )

    # -- generate

    def ask(self, wanted: WantedSample) -> tuple[str, dict[str, Any]]:
        sampling = wanted.sampling
        params: dict[str, Any] = {
            "n": 1,
            "max_tokens": wanted.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": wanted.seed,
            "logprobs": 0,
            # `stop_token_ids` lists the end tokens explicitly; the end tokens of the model folder are ignored.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "detokenize": bool(sampling.stop_strings),
            "skip_special_tokens": False,
        }
        if sampling.stop_strings:
            params["stop"] = list(sampling.stop_strings)
        body = {"model": wanted.adapter or MODEL, "token_ids": wanted.unexpanded_ids, "sampling_params": params}
        if wanted.images:
            body["images"] = {image.ref.digest: _base64(image.ref) for image in wanted.images}
            body["image_order"] = [image.ref.digest for image in wanted.images]
        return SAMPLES, body

    def read(self, answered: Any, wanted: WantedSample) -> Answer:
        try:
            ids = list(answered["token_ids"])
            logprobs = [float(each) for each in answered["logprobs"]]
            reason, stop = answered["finish_reason"], answered["stop_reason"]
            versions = [str(each) for each in answered["versions"] or ()]
            prompt, cached = answered["prompt"], int(answered.get("cached") or 0)
            routes = _routes(answered) if wanted.sampling.routes else None
            prompt_ids = answered.get("prompt_ids")
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFailed(f"malformed answer: {error!r}") from error
        if len(ids) != len(logprobs):
            raise ServerFailed(f"an answer has {len(ids)} tokens but {len(logprobs)} log-probs; expected equal numbers")
        refuse_other_prompt(wanted, prompt, prompt_ids)
        # All tokens of a response come from the same weights, because a push of new weights aborts running responses.
        version = " and ".join(dict.fromkeys(versions)) or None
        return Answer(ids, logprobs, _ended(reason, stop, ids, wanted), version, cached, routes)

    # -- weights

    def pause(self, client: Channel) -> None:
        client.post("/pause?mode=abort", seconds=SWITCH_SECONDS)

    def resume(self, client: Channel) -> None:
        client.post("/resume", seconds=SWITCH_SECONDS)

    def push(self, client: Channel, weights: PushedWeights) -> None:
        files = [str(file) for file in weights.files]
        _call(client, "lockstep_load", files=files, names=list(weights.names), sums=list(weights.sums))

    def take(self, client: Channel, placed: Placed) -> str | None:
        results = _call(client, "lockstep_take", **asdict(placed))
        unopened = [worker["unopened"] for worker in results if "unopened" in worker]
        if unopened and len(unopened) < len(results):
            raise ServerFailed(f"{client.address}: only some of its workers could map the run's memory: {unopened[0]}")
        return str(unopened[0]) if unopened else None

    def end(self, client: Channel, version: str) -> None:
        _call(client, "lockstep_version", version=version)
        with _unless_unknown():
            client.post("/update_weight_version", {"new_version": version}, seconds=SWITCH_SECONDS)

    def flush(self, client: Channel, images: bool) -> None:
        answer = client.post("/reset_prefix_cache", seconds=SWITCH_SECONDS)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerFailed(f"{client.address}: the prefix cache of the previous weights could not be reset")
        if images:
            client.post("/reset_encoder_cache", seconds=SWITCH_SECONDS)

    def version(self, client: Channel) -> str:
        """Returns the weight version that the workers report. If the engine, whose version is part of every answer,
        reports another version, the result contains both versions."""
        versions = {str(worker["version"]) for worker in _call(client, "lockstep_version")}
        if len(versions) > 1:
            raise ServerFailed(f"{client.address}: its workers have weights of several versions: {sorted(versions)}")
        (version,) = versions
        with _unless_unknown():
            engine = client.get("/weight_info")["weight_version"]
            return version if version == engine else f"{version} (the engine reports {engine})"
        return version

    # -- weights by broadcast in a process group

    def workers(self, client: Channel) -> int:
        return len(_call(client, "lockstep_version"))

    def join(self, client: Channel, meeting: GroupMeeting) -> None:
        _call(client, "lockstep_join", **asdict(meeting))

    def begin(self, client: Channel) -> None:
        """Does nothing, because the worker extension receives all tensors in one call of `receive`."""

    def receive(self, client: Channel, group: str, announced: Announced) -> None:
        _call(client, "lockstep_receive", group=group, **asdict(announced))

    def finish(self, client: Channel) -> None:
        """Does nothing, because the worker extension receives all tensors in one call of `receive`, which also ends the
        update."""

    def leave(self, client: Channel, group: str) -> None:
        _call(client, "lockstep_leave", limit=LEAVE_SECONDS)

    # -- adapters

    def load_adapter(self, client: Channel, name: str, folder: Path) -> None:
        client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        for other in _adapters(client):
            if other != name:
                client.post("/v1/unload_lora_adapter", {"lora_name": other}, seconds=SWITCH_SECONDS)

    # -- memory

    def sleep(self, client: Channel, *, discard_weights: bool) -> None:
        client.post(f"/sleep?level={2 if discard_weights else 1}")

    def wake(self, client: Channel, part: MemoryPart) -> None:
        client.post(f"/wake_up?tags={ {'weights': 'weights', 'cache': 'kv_cache'}[part] }")

    # -- health

    def healthy(self, client: Channel) -> None:
        client.get("/health", seconds=SWITCH_SECONDS)

    def metadata(self, client: Channel, needs: ServerNeeds) -> ServerMetadata:
        try:
            info = _call(client, "lockstep_facts")[0]
            client.get(SAMPLES)
        except ServerFailed as error:
            if error.lost and error.status is None:
                raise
            raise ServerFailed(f"{error}; the server was not started with lockstep's plug-ins") from error
        wrong = []
        if needs.images and not info.get("images"):
            wrong.append("the server reads no images: start it with the folder of the vision-language model")
        if needs.images and not _resets_features(client):
            wrong.append("the server cannot reset the features of images after an update: use a newer vLLM")
        if info["logprobs_mode"] != "processed_logprobs":
            wrong.append(f"--logprobs-mode is {info['logprobs_mode']}: set processed_logprobs")
        expected = None if needs.precision is None else QUANTIZATION[needs.precision]
        if (problem := other_quantization(info["quantization"], expected)) is not None:
            wrong.append(problem)
        if needs.sleep and not info["sleep"] and info["device"] != "cpu":
            # The route /sleep succeeds even if the flag is missing, so the flag is checked here.
            wrong.append("the server cannot release memory (rollout.sleep): start it with --enable-sleep-mode")
        if needs.routes and not info["routes"]:
            wrong.append(
                "its answers have no experts (algorithm.routing_replay): start it with --enable-return-routed-experts"
            )
        if needs.lora_rank is not None and (info["lora_rank"] or 0) < needs.lora_rank:
            takes = f"LoRA adapters of rank {info['lora_rank']} at most" if info["lora_rank"] else "no LoRA adapters"
            wrong.append(f"the server accepts {takes}, but the run has an adapter of rank {needs.lora_rank}")
        return ServerMetadata(f"vllm {info['version']}", info["vocabulary"], info["longest"], info["dtype"], wrong)


def _routes(answered: Any) -> np.ndarray:
    """Returns the experts of an answer. `plugin/lockstep_samples.py` writes them."""
    if "routes" not in answered:
        raise ValueError("the answer has no experts, although the run replays them (algorithm.routing_replay)")
    numbers = np.frombuffer(base64.b64decode(answered["routes"]), dtype="<i2")
    return numbers.reshape(answered["route_shape"])


def _ended(reason: str | None, stop: int | str | None, ids: Sequence[int], wanted: WantedSample) -> Ended:
    if reason == "abort":
        return "aborted"
    if reason == "length":
        return "length"
    if reason == "stop" and isinstance(stop, str):
        return "string"
    if reason == "stop" and ids and ids[-1] in wanted.sampling.stop_ids:
        return "token"
    raise ServerFailed(f"a response ended for an unexpected reason: {reason} ({stop})")


@lru_cache(maxsize=256)
def _base64(ref: ImageRef) -> str:
    return base64.b64encode(image_bytes(ref, "an image of a prompt")).decode()


def _resets_features(client: Channel) -> bool:
    try:
        client.post("/reset_encoder_cache", seconds=SWITCH_SECONDS)
    except ServerFailed as error:
        if error.status != _NOT_FOUND:
            raise
        return False
    return True


@contextmanager
def _unless_unknown() -> Iterator[None]:
    """Ignores the error of older vLLM versions that have no route for the weight version; the workers still report the
    version."""
    try:
        yield
    except ServerFailed as error:
        if error.status != _NOT_FOUND:
            raise


def _call(client: Channel, method: str, *, limit: float | None = None, **arguments: Any) -> list[dict[str, Any]]:
    """Calls a method of the worker extension on every worker, within `limit` seconds."""
    answered = client.post("/collective_rpc", {"method": method, "args": [json.dumps(arguments)]}, limit)
    results = answered["results"]
    for result in results:
        if "error" in result:
            raise ServerFailed(f"{client.address}: {result['error']}", lost=bool(result.get("lost")))
    return list(results)


def _adapters(client: Channel) -> list[str]:
    listed = client.get("/v1/models")["data"]
    return [model["id"] for model in listed if model.get("parent") is not None]
