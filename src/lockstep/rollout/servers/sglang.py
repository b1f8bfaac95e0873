"""The adapter of SGLang, written for version 0.5.23 and tested with 0.5.17 on an NVIDIA GPU (there is no CPU build)."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from safetensors import safe_open

from lockstep.device.serving import serving_on
from lockstep.kernels.sampling import Truncation
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
    prompt_digest,
    refuse_other_prompt,
)
from lockstep.rollout.servers.server_client import KEY_VARIABLE, LEAVE_SECONDS, SWITCH_SECONDS
from lockstep.types import Sampling

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_BAD_REQUEST, _NOT_FOUND = 400, 404
# The load format of SGLang that quantises weights again in every update. SGLang supports it for Qwen2 and Qwen3, and
# does not start with other models.
RELOADED = "flash_rl"
_TAGS: dict[MemoryPart, str] = {"weights": "weights", "cache": "kv_cache"}


class Sglang:
    """`ServerAdapter` of SGLang."""

    name = "sglang"
    package = "sglang"
    samples_together = False
    opens_memory = False
    bucket_bytes = BUCKET_BYTES
    receives_all = False
    reads_key_file = True
    # Status 503 is not listed, because a paused server returns 503 if its health check generates tokens.
    gone_statuses = (502, 504)

    def install(self, device: str) -> str:
        return serving_on(device, self.name).install

    # -- start

    def command(self, start: ServerStart) -> list[str]:
        device = start.needs.device
        words = [start.python, "-m", "sglang.launch_server", *self.flags(start.needs)]
        words += ["--model-path", start.model, "--host", start.host, "--port", str(start.port)]
        words += ["--dtype", _DTYPES[start.dtype], "--tp-size", str(start.tensor_parallel), "--device", device]
        words += ["--config", start.key_file] if start.key_file else []
        return [*words, *serving_on(device, self.name).words, *start.args]

    def flags(self, needs: ServerNeeds) -> list[str]:
        """Returns the flags that every SGLang server needs, no matter whether lockstep or the user starts the
        server."""
        # SGLang ignores the seeds of requests without this flag.
        words = ["--enable-deterministic-inference"]
        return [*words, *(word for flag in self.settings(needs) for word in flag.split())]

    def settings(self, needs: ServerNeeds) -> dict[str, str]:
        flags = {}
        if needs.lora_rank is not None:
            lora = f"--enable-lora --max-lora-rank {needs.lora_rank} --lora-target-modules all"
            flags[lora] = "the run's adapter"
        if needs.sleep:
            flags["--enable-memory-saver"] = "rollout.sleep: SGLang cannot release its memory without this flag"
        if needs.sleep and needs.lora_rank is not None:
            backup = "the run sends only the adapter after a sleep, so the server must keep the base weights"
            flags["--enable-weights-cpu-backup"] = backup
        if needs.precision is not None:
            # With --quantization alone, an update would copy new weights into quantised tensors without their scales.
            flags[f"--quantization {needs.precision} --load-format {RELOADED}"] = (
                "rollout.precision: every push is quantised"
            )
        return flags

    def environment(self, start: ServerStart) -> dict[str, str]:
        return {
            # SGLang shall return log-probs of the sampling distribution, after temperature scaling.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            # If this variable is 1, the health check generates tokens, which fails while the server is paused.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            **serving_on(start.needs.device, self.name).environment(sleep=start.needs.sleep),
        }

    def started_by_hand(self, needs: ServerNeeds) -> str:
        flags = " ".join(self.flags(needs))
        return (
            f"if the server has an --api-key, set {KEY_VARIABLE} to it for the run; start the server with python -m "
            f"sglang.launch_server --model-path FOLDER --dtype DTYPE {flags}"
        )

    # -- generate

    def ask(self, wanted: WantedSample) -> tuple[str, dict[str, Any]]:
        sampling = wanted.sampling
        _refuse_unsupported(sampling)
        params: dict[str, Any] = {
            # All samples of one request have the same seed and would be identical, so each sample is a separate
            # request.
            "n": 1,
            "max_new_tokens": wanted.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "sampling_seed": wanted.seed,
            # `ignore_eos: true` would also disable `stop_token_ids`. So a request with stop ids keeps the model's end
            # tokens active, and `read` checks which token ended the response.
            "ignore_eos": not sampling.stop_ids,
            "stop_token_ids": list(sampling.stop_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.stop_strings:
            params["stop"] = list(sampling.stop_strings)
        body: dict[str, Any] = {
            # SGLang returns this request id with the answer; the id must be unique.
            "rid": f"{prompt_digest(wanted.ids)}-{uuid.uuid4().hex}",
            "input_ids": list(wanted.ids),
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        if _scores_truncated(sampling):
            body["return_sampling_mask"] = True
        if wanted.adapter is not None:
            body["lora_path"] = wanted.adapter
        return "/generate", body

    def read(self, answered: Any, wanted: WantedSample) -> Answer:
        try:
            ids, meta = list(answered["output_ids"]), answered["meta_info"]
            scored = meta["output_token_logprobs"]
            logprobs, named = [entry[0] for entry in scored], [entry[1] for entry in scored]
            if _scores_truncated(wanted.sampling):
                logprobs = meta["output_token_sampling_logprobs"]
            reason = meta["finish_reason"]
            kind = reason["type"]
            prompt, cached = str(meta["id"]).partition("-")[0], int(meta.get("cached_tokens") or 0)
            # If SGLang aborts a request before scheduling it, `prompt_tokens` does not count the prompt.
            length = len(wanted.ids) if kind == "abort" else meta["prompt_tokens"]
        except (KeyError, TypeError, IndexError) as error:
            raise ServerFailed(f"malformed answer: {error!r}") from error
        refuse_other_prompt(wanted, prompt)
        if length != len(wanted.ids):
            raise ServerFailed(f"an answer is for a prompt of {length} tokens, but the request has {len(wanted.ids)}")
        if named != ids or len(logprobs) != len(ids):
            raise ServerFailed(
                f"an answer has {len(ids)} tokens, but its log-probs belong to {len(named)} different tokens"
            )
        if not all(isinstance(each, int | float) and math.isfinite(each) for each in logprobs):
            raise ServerFailed("an answer has a log-prob that is not a finite number")
        ended = "aborted" if kind == "abort" else _ended(kind, reason.get("matched"), ids, wanted)
        return Answer(ids, [float(each) for each in logprobs], ended, _one_version(meta), cached)

    # -- weights

    def pause(self, client: Channel) -> None:
        client.post("/pause_generation", {"mode": "abort"}, seconds=SWITCH_SECONDS)

    def resume(self, client: Channel) -> None:
        client.post("/continue_generation", {}, seconds=SWITCH_SECONDS)

    def push(self, client: Channel, weights: PushedWeights) -> None:
        """Sends weights by files. SGLang loads every file of the folder and silently keeps the old values of parameters
        that no file has. Because of this behaviour, the names are checked before the push, and the weight check runs
        after the push."""
        folder = _folder_of(weights)
        _refuse_other_names(weights)
        answer = client.post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "load_format": "safetensors", "flush_cache": True},
        )
        _succeeded(client, answer, "message")

    def take(self, client: Channel, placed: Placed) -> str | None:
        raise ServerFailed("SGLang cannot open shared memory of a run: its interface needs pickled Python objects")

    def end(self, client: Channel, version: str) -> None:
        answer = client.post(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}, seconds=SWITCH_SECONDS
        )
        _succeeded(client, answer, "message")

    def flush(self, client: Channel, images: bool) -> None:
        client.post("/flush_cache", seconds=SWITCH_SECONDS)

    def version(self, client: Channel) -> str:
        # /server_info is not used, because it reports the weight version from the start of the server.
        return str(client.get("/model_info")["weight_version"])

    # -- weights by broadcast in a process group

    def workers(self, client: Channel) -> int:
        info = client.get("/server_info")
        for key in ("dp_size", "pp_size"):
            if info.get(key, 1) != 1:
                # SGLang uses the tensor-parallel rank as the rank in the process group, so several workers would have
                # the same rank.
                raise ServerFailed(
                    f"{client.address}: {key} is {info[key]}, which the collective weight sync does not "
                    "support: set rollout.weight_sync=files"
                )
        return int(info["tp_size"])

    def join(self, client: Channel, meeting: GroupMeeting) -> None:
        body = {
            "master_address": meeting.address,
            "master_port": meeting.port,
            "rank_offset": meeting.first,
            "world_size": meeting.size,
            "group_name": meeting.name,
            "backend": meeting.backend,
        }
        _succeeded(client, client.post("/init_weights_update_group", body, meeting.seconds), "message")

    def begin(self, client: Channel) -> None:
        """Opens a weight update. Only a broadcast of weights needs `begin`, because SGLang opens and closes an update
        from disk internally."""
        try:
            _succeeded(client, client.post("/begin_weight_update", {}), "message")
        except ServerFailed as error:
            if error.status == _NOT_FOUND:
                # Older releases such as 0.5.17 do not have this route, which prepares the model for new weights.
                why = "this SGLang has no /begin_weight_update, which rollout.weight_sync=collective needs"
                raise ServerFailed(f"{client.address}: {why}: use 0.5.23, or set rollout.weight_sync=files") from error
            # If an aborted push left an update open, close that update and open a new one.
            if error.status != _BAD_REQUEST or "already open" not in str(error):
                raise
            self.finish(client)
            _succeeded(client, client.post("/begin_weight_update", {}), "message")

    def receive(self, client: Channel, group: str, announced: Announced) -> None:
        """Makes the server receive the announced tensors. SGLang silently keeps the old values of parameters that are
        not announced; the weight check detects old values."""
        body = {
            "names": list(announced.names),
            "dtypes": [announced.dtype] * len(announced.names),
            "shapes": [list(shape) for shape in announced.shapes],
            "group_name": group,
            "flush_cache": False,
        }
        try:
            _succeeded(client, client.post("/update_weights_from_distributed", body), "message")
        except ServerFailed as error:
            # The error that asks for `init_weights_update_group` means that the server was restarted and is no longer
            # in the process group.
            lost = error.lost or "call `init_weights_update_group` first" in str(error)
            raise ServerFailed(str(error), lost=lost, status=error.status if error.lost else None) from error

    def finish(self, client: Channel) -> None:
        _succeeded(client, client.post("/end_weight_update", {}), "message")

    def leave(self, client: Channel, group: str) -> None:
        client.post("/destroy_weights_update_group", {"group_name": group}, LEAVE_SECONDS)

    # -- adapters

    def load_adapter(self, client: Channel, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            answer = client.post("/load_lora_adapter", body)
        except ServerFailed as error:
            # A server that was lost for a while may already have loaded this adapter in an earlier attempt.
            if error.status != _BAD_REQUEST or "already loaded" not in str(error):
                raise
            self._unload(client, name)
            answer = client.post("/load_lora_adapter", body)
        _succeeded(client, answer, "error_message")
        for other in answer["loaded_adapters"]:
            if other != name:
                self._unload(client, other)

    def _unload(self, client: Channel, name: str) -> None:
        answer = client.post("/unload_lora_adapter", {"lora_name": name}, seconds=SWITCH_SECONDS)
        _succeeded(client, answer, "error_message")

    # -- memory

    def sleep(self, client: Channel, *, discard_weights: bool) -> None:
        if wrong := _keeps_memory(client.get("/server_info"), discard_weights=discard_weights):
            raise ServerFailed(f"{client.address}: {wrong}")
        client.post("/release_memory_occupation", {"tags": list(_TAGS.values())})

    def wake(self, client: Channel, part: MemoryPart) -> None:
        client.post("/resume_memory_occupation", {"tags": [_TAGS[part]]})

    # -- health

    def healthy(self, client: Channel) -> None:
        try:
            client.get("/health", seconds=SWITCH_SECONDS)
        except ServerFailed as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            # `/health` of a paused server fails, because it generates. A push that lost its connection, or its run,
            # leaves the server paused; no request goes to it before the next push has set its weights.
            self.resume(client)
            client.get("/health", seconds=SWITCH_SECONDS)

    def metadata(self, client: Channel, needs: ServerNeeds) -> ServerMetadata:
        info = client.get("/server_info")
        wrong = []
        if not info.get("enable_deterministic_inference"):
            wrong.append("seeds have no effect on this server: start it with --enable-deterministic-inference")
        if (problem := other_quantization(info.get("quantization"), needs.precision)) is not None:
            wrong.append(problem)
        if needs.precision is not None and info.get("load_format") != RELOADED:
            wrong.append(f"an update would not quantise the new weights: start it with --load-format {RELOADED}")
        if info.get("speculative_algorithm") is not None:
            wrong.append(
                f"its draft model ({info['speculative_algorithm']}) gets no new weights: start without a draft model"
            )
        if needs.lora_rank is not None and not info.get("enable_lora"):
            wrong.append(
                f"the server does not accept LoRA adapters, but the run has an adapter of rank {needs.lora_rank}"
            )
        if needs.sleep and (kept := _keeps_memory(info, discard_weights=needs.lora_rank is None)):
            wrong.append(kept)
        dtype, longest = info.get("dtype"), info.get("context_length")
        return ServerMetadata(
            f"sglang {info['version']}",
            longest=longest if isinstance(longest, int) else None,
            dtype=dtype if dtype != "auto" else None,
            wrong=wrong,
        )


def _keeps_memory(info: Any, *, discard_weights: bool) -> str | None:
    """Returns why the server cannot release its memory while the run trains (`rollout.sleep`), or None if it can."""
    if not info.get("enable_memory_saver"):
        return "the server cannot release memory: start it with --enable-memory-saver"
    if not discard_weights and not info.get("enable_weights_cpu_backup"):
        return "the server would lose its weights: start it with --enable-weights-cpu-backup"
    return None


def _refuse_unsupported(sampling: Sampling) -> None:
    """Raises `ServerFailed` for settings that SGLang ignores or scores differently from the trainer."""
    if sampling.min_p:
        raise ServerFailed("SGLang does not sample with a seed and min_p: set min_p to 0")
    if sampling.repetition_penalty != 1:
        raise ServerFailed("SGLang's log-probs include the penalty: set repetition_penalty to 1")
    if _scores_truncated(sampling) and (sampling.top_p < 1 or not sampling.top_k):
        raise ServerFailed("SGLang returns log-probs of a truncated distribution only for top_k: remove top_p")


def _scores_truncated(sampling: Sampling) -> bool:
    """Returns whether SGLang must return log-probs of the truncated distribution, instead of its default, the full
    distribution."""
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    return sampling.score_truncated and truncation.active and sampling.temperature > 0


def _ended(kind: str, matched: Any, ids: Sequence[int], wanted: WantedSample) -> Ended:
    sampling = wanted.sampling
    # If a response ends for several reasons at once, SGLang may report another reason than the end token.
    if ids and ids[-1] in sampling.stop_ids:
        return "token"
    if kind == "stop" and matched in sampling.stop_strings:
        return "string"
    if kind == "stop" and isinstance(matched, int):
        raise ServerFailed(
            f"token {matched} ended a response: it is an end token for SGLang but not for this run: "
            "add it to rollout.stop_ids"
        )
    if kind == "length" and len(ids) >= wanted.max_tokens:
        return "length"
    if kind == "length":
        raise ServerFailed(
            f"a response was cut after {len(ids)} of {wanted.max_tokens} tokens: SGLang's --context-length, its KV "
            "cache or SGLANG_MAX_NEW_TOKENS_LIMIT is too small for the response"
        )
    # For NaN logits, SGLang reports a stop string that the request does not have.
    raise ServerFailed(f"a response ended for an unexpected reason: {kind} ({matched})")


def _one_version(meta: Any) -> str | None:
    """Returns the weight version of a response. All tokens of a response have the same version, because a pause aborts
    running requests."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version")}]
    versions = {span["version"] for span in spans}
    return str(versions.pop()) if len(versions) == 1 else " and ".join(str(span["version"]) for span in spans)


def _folder_of(weights: PushedWeights) -> Path:
    folders = {file.parent for file in weights.files}
    folder = folders.pop()
    others = sorted(str(file) for file in set(folder.glob("*.safetensors")) - set(weights.files))
    if folders or others:
        raise ServerFailed(f"SGLang loads all files of a folder, but {folder} has files of another push: {others[:3]}")
    return folder


def _refuse_other_names(weights: PushedWeights) -> None:
    found: list[str] = []
    for file in weights.files:
        with safe_open(file, framework="pt") as opened:
            found += opened.keys()
    missing, extra = sorted(set(weights.names) - set(found)), sorted(set(found) - set(weights.names))
    if missing or extra or len(found) != len(set(found)):
        raise ServerFailed(f"the files do not match the announced names: missing {missing[:5]}, too many {extra[:5]}")


def _succeeded(client: Channel, answer: Any, reason: str) -> None:
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise ServerFailed(f"{client.address}: {answer.get(reason) if isinstance(answer, dict) else answer}")
