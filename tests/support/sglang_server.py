"""A server that speaks the schema of SGLang's source (0.5.23), and is not the real package: that has no CPU build.

It is real in what matters to a client: a transformers model generates, log-probs are the model's, weights are read from
disk, and what goes wrong in SGLang goes wrong here: a stale prefix cache where nobody flushed, weights that are gone
after memory was released, samples that are alike where they share a seed, half-new weights after a failed update.

In this process as `serving(folder)`; in a process of its own as a folder whose `sglang.launch_server` is this file's
`main` (`write_package`), so that real command lines start it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hang import HANG
from sglang_schema import FORMS, Asked, Rejected, read_generate

VERSION = "0.5.23"
ALL_TAGS = ("kv_cache", "weights", "cuda_graph")
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Running:
    """A response being written."""

    asked: Asked
    model: Any
    ids: list[int]
    written: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)
    support_logprobs: list[float] = field(default_factory=list)
    cache: Any = None
    retractions: int = 0
    aborted: bool = False
    spans: list[dict[str, Any]] = field(default_factory=list)


class Engine:
    """The model and everything that requests share; `state` guards all of it."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.path, self.version = args, args.model_path, args.weight_version
        self.model: Any = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=DTYPES[args.dtype]).eval()
        self.tokenizer = None if args.skip_tokenizer_init else AutoTokenizer.from_pretrained(args.model_path)
        self.vocabulary = self.model.get_input_embeddings().weight.shape[0]
        self.context = args.context_length or self.model.config.max_position_embeddings
        self.end_ids = _end_ids(self.model)
        self.state = threading.Condition()
        self.paused: str | None = None
        self.running: list[Running] = []
        self.released: set[str] = set()
        self.prefixes: dict[tuple[str | None, tuple[int, ...]], Any] = {}
        self.adapters: dict[str, str] = {}
        self.adapted: dict[str, Any] = {}
        self.asked: list[tuple[str, Any]] = []
        """Every request of a client, in order: (path, body)."""
        self.dropped_tensors: set[str] = set()
        self.groups: dict[str, Any] = {}
        self.updating = False
        self.raw_logprobs = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")

    # Requests.

    def generate(self, body: Any) -> Any:
        asked = read_generate(
            body, tokenizer=self.tokenizer is not None, vocabulary=self.vocabulary, context=self.context
        )
        if asked.min_p and self.args.enable_deterministic_inference:
            raise Rejected(500, "Internal Server Error")  # SGLang's scheduler dies of an assertion
        with self.state:
            self.state.wait_for(lambda: self.paused is None)
            if self.released:
                raise Rejected(500, "Internal Server Error")
            if asked.lora is not None and asked.lora not in self.adapters:
                raise Rejected.value(f"Got LoRA adapter that has never been loaded: {asked.lora}")
            rows = [Running(asked, self._model(asked.lora), list(asked.ids)) for _ in range(asked.n)]
            self.running += rows
        try:
            answers = [self._write(row, body.get("rid") or uuid.uuid4().hex) for row in rows]
        finally:
            with self.state:
                self.running = [row for row in self.running if row not in rows]
                self.state.notify_all()
        return answers if asked.n > 1 else answers[0]

    def _model(self, adapter: str | None) -> Any:
        return self.model if adapter is None else self.adapted[adapter]

    def _adapt(self, path: str) -> Any:
        from peft import PeftModel

        return PeftModel.from_pretrained(copy.deepcopy(self.model), path).merge_and_unload().eval()

    def _write(self, row: Running, rid: str) -> dict[str, Any]:
        reason = None if row.asked.max_new_tokens else {"type": "length", "length": 0}
        while reason is None:
            with self.state:
                self.state.wait_for(lambda: self.paused in (None, "abort") or row.aborted)
                if row.aborted:
                    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                    break
                reason = self._token(row)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(row.asked.ids),
            "weight_version": self.version,
            "num_retractions": row.retractions,
            "reasoning_tokens": 0,
            "completion_tokens": len(row.written),
            "cached_tokens": 0,
        }
        if row.asked.logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(row.logprobs, row.written, strict=True)
            ]
        if row.asked.mask:
            meta["output_token_sampling_mask"] = row.support
            meta["output_token_sampling_logprobs"] = row.support_logprobs
            meta["output_token_sampling_mask_length"] = len(row.support)
        if row.spans:
            meta["weight_versions"], meta["weight_version"] = row.spans, row.spans[-1]["version"]
        answer: dict[str, Any] = {"output_ids": row.written, "meta_info": meta}
        if self.tokenizer is not None:
            answer["text"] = self.tokenizer.decode(row.written)
        return answer

    @torch.no_grad()
    def _token(self, row: Running) -> dict[str, Any] | None:
        logits = self._logits(row)
        token, logprob, support = _choose(logits, row, self.args.enable_deterministic_inference, raw=self.raw_logprobs)
        row.ids.append(token)
        row.written.append(token)
        row.logprobs.append(logprob)
        if row.asked.mask:
            row.support.append(support[0])
            row.support_logprobs.append(support[1])
        if not row.spans or row.spans[-1]["version"] != self.version:
            row.spans.append({"version": self.version, "start": len(row.written) - 1, "end": len(row.written)})
        row.spans[-1]["end"] = len(row.written)
        return self._ended(row)

    def _logits(self, row: Running) -> torch.Tensor:
        if row.cache is None:
            prompt = tuple(row.ids[:-1])
            key = (row.asked.lora, prompt)
            if prompt and key not in self.prefixes:
                cache = DynamicCache(config=row.model.config)
                row.model(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True)
                self.prefixes[key] = cache
            row.cache = copy.deepcopy(self.prefixes[key]) if prompt else DynamicCache(config=row.model.config)
        last = torch.tensor([row.ids[-1:]])
        logits: torch.Tensor = row.model(input_ids=last, past_key_values=row.cache, use_cache=True).logits[0, -1]
        return logits.float()

    def _ended(self, row: Running) -> dict[str, Any] | None:
        asked, token = row.asked, row.written[-1]
        if asked.stop:
            assert self.tokenizer is not None
            text = self.tokenizer.decode(row.written[-4 * max(len(each) for each in asked.stop) :])
            for each in asked.stop:
                if each in text:
                    return {"type": "stop", "matched": each}
        if not asked.ignore_eos:
            own = {self.tokenizer.eos_token_id} if self.tokenizer is not None else set()
            if token in asked.stop_ids or token in self.end_ids or token in own:
                return {"type": "stop", "matched": token}
        if len(row.written) >= asked.max_new_tokens:
            return {"type": "length", "length": asked.max_new_tokens}
        return None

    # Control.

    def pause_generation(self, body: dict[str, Any]) -> Any:
        with self.state:
            self.paused = body["mode"]
            if self.paused == "abort":
                self._abort_all()
                self.state.wait_for(lambda: not self.running)
            elif self.paused == "retract":
                for row in self.running:
                    row.cache, row.retractions = None, row.retractions + 1
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, body: dict[str, Any]) -> Any:
        with self.state:
            self.paused = None
            self.state.notify_all()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def _abort_all(self) -> None:
        for row in self.running:
            row.aborted = True
        self.state.notify_all()

    def abort_request(self, body: dict[str, Any]) -> Any:
        with self.state:
            if body["abort_all"]:
                self._abort_all()
        return None

    def update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        with self.state:
            if body["abort_all_requests"]:
                self._abort_all()
            if self.paused is None or body["abort_all_requests"]:
                self.state.wait_for(lambda: not self.running)
            answer = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            try:
                self._load(Path(body["model_path"]))
            except Exception as error:
                why = f"Failed to update weights: {error}.\nRolling back to original weights."
                raise Rejected(400, {**answer, "success": False, "message": why}) from error
            self.path = body["model_path"]
            if body["flush_cache"] and not self._flush():
                why = "Weights were updated, but the cache was not flushed because requests are running or queued."
                raise Rejected(400, {**answer, "success": False, "message": why})
            if body["weight_version"] is not None:
                self.version = body["weight_version"]
                answer["message"] = f"{answer['message']} Weight version updated to {self.version}."
            return answer

    def _load(self, folder: Path) -> None:
        """As a loader of SGLang does it: what is in the files is copied, what is not there stays as it was."""
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise RuntimeError(f"Cannot find any model weights with `{folder}`")
        own = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        with torch.no_grad():
            for file in files:
                for name, tensor in load_file(file).items():
                    place = _place(own, name)
                    if place is None:
                        raise KeyError(name)
                    if name not in self.dropped_tensors:
                        place.copy_(tensor)

    # Weights by a collective.

    def init_weights_update_group(self, body: dict[str, Any]) -> Any:
        name = body["group_name"]
        limit = timedelta(seconds=HANG)
        try:
            store: Any = dist.TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=limit)
            # As torch's own helper names them. It would not make two ends of one group in one process, and tests do.
            for prefix in (name, f"{name}/", "cpu/"):
                store = dist.PrefixStore(prefix, store)
            rank = body["rank_offset"]
            if body["backend"] != "gloo":
                raise ValueError(f"no {body['backend']} on a CPU")
            self.groups[name] = dist.ProcessGroupGloo(store, rank, body["world_size"], limit)
        except (RuntimeError, ValueError) as error:
            message = f"Failed to initialize custom process group: {error}."
            raise Rejected(400, {"success": False, "message": message}) from error
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def destroy_weights_update_group(self, body: dict[str, Any]) -> Any:
        if self.groups.pop(body["group_name"], None) is None:
            raise Rejected(400, {"success": False, "message": "The group to be destroyed does not exist."})
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    def begin_weight_update(self, body: dict[str, Any]) -> Any:
        return self._session(True, "a weight-update session is already open; call end_weight_update() first")

    def end_weight_update(self, body: dict[str, Any]) -> Any:
        return self._session(False, "no weight-update session is open; call begin_weight_update() first")

    def _session(self, opened: bool, why: str) -> Any:
        with self.state:
            if self.updating == opened:
                raise Rejected(400, {"success": False, "message": why})
            self.updating = opened
        return {"success": True, "message": "Success"}

    def update_weights_from_distributed(self, body: dict[str, Any]) -> Any:
        with self.state:
            why = self._received(body)
            if why is not None:
                raise Rejected(400, {"success": False, "message": why})
            if body["flush_cache"] and not self._flush():
                raise Rejected(
                    400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
                )
            self.version = body["weight_version"] or self.version
        return {"success": True, "message": "Succeeded to update parameter online."}

    @torch.no_grad()
    def _received(self, body: dict[str, Any]) -> str | None:
        """Why it could not; SGLang takes a bucket whole before it loads any of it."""
        name = body["group_name"]
        if not self.updating:
            return "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
        if name not in self.groups:
            told = f"Group {name} not in {list(self.groups)}. Please call `init_weights_update_group` first."
            return f"Failed to receive weights: {told}"
        taken = []
        for tensor, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                self.groups[name].broadcast(weight, 0).wait()
            except RuntimeError as error:
                return f"Failed to receive weights: {error}"
            taken.append((tensor, weight))
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for tensor, weight in taken:
            place = _place(own, tensor)
            if place is None:
                return f"Failed to update parameter online: {tensor}."
            if tensor not in self.dropped_tensors:
                place.copy_(weight)
        return None

    def _flush(self) -> bool:
        if any(row.cache is not None for row in self.running) or (self.running and self.paused is None):
            return False
        self.prefixes.clear()
        return True

    def flush_cache(self) -> tuple[int, str]:
        with self.state:
            done = self._flush()
        return (200, "Cache flushed.\n") if done else (400, "Flush cache failed.\n")

    def update_weight_version(self, body: dict[str, Any]) -> Any:
        with self.state:
            if body["abort_all_requests"]:
                self._abort_all()
            self.version = body["new_version"]
        new = {"new_version": self.version}
        return {"success": True, "message": f"Weight version updated to {self.version}", **new}

    def release_memory_occupation(self, body: dict[str, Any]) -> Any:
        with self.state:
            if self.running:
                raise Rejected(500, "Internal Server Error")  # an assertion of SGLang's scheduler
            tags = set(body["tags"] or ALL_TAGS)
            self.released |= tags
            self.prefixes.clear()
            if "weights" in tags and not self.args.enable_weights_cpu_backup and self.args.enable_memory_saver:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.fill_(
                            float("nan")
                        )  # what the memory holds after it is taken again is anybody's guess
        return None

    def resume_memory_occupation(self, body: dict[str, Any]) -> Any:
        with self.state:
            tags = set(body["tags"] or ALL_TAGS)
            if not tags <= self.released:
                raise Rejected(500, "Internal Server Error")  # a KeyError of SGLang's scheduler
            self.released -= tags
        return None

    def weights_checker(self, body: dict[str, Any]) -> Any:
        if body["action"] != "checksum":
            raise Rejected(400, {"success": False, "message": f"only checksum here: {body['action']}"})
        with self.state:
            sums = {name: _digest(tensor) for name, tensor in self.model.named_parameters()}
        whole = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
        place = {"role": "target", **dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0)}
        place |= dict.fromkeys(("tp_size", "dp_size", "pp_size", "size"), 1)
        rank = {"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": [place]}
        return {"success": True, "message": "Success", "ranks": [rank], "per_engine_checksum": whole}

    def load_lora_adapter(self, body: dict[str, Any]) -> Any:
        with self.state:
            self._lora_is_on()
            name, path = body["lora_name"], body["lora_path"]
            why = None
            if name in self.adapters:
                why = f"Failed to load LoRA adapter {name} because it is already loaded"
            elif not (Path(path) / "adapter_config.json").is_file():
                why = f"Failed to load LoRA adapter {name} from {path}: there is no adapter_config.json."
            elif (rank := json.loads((Path(path) / "adapter_config.json").read_text())["r"]) > self.args.max_lora_rank:
                why = f"LoRA adapter {name} with rank {rank} is incompatible with max_lora_rank."
            if why is not None:
                raise Rejected(400, self._lora_answer(why))
            self.adapters[name], self.adapted[name] = path, self._adapt(path)
            return self._lora_answer()

    def unload_lora_adapter(self, body: dict[str, Any]) -> Any:
        with self.state:
            self._lora_is_on()
            if body["lora_name"] not in self.adapters:
                raise Rejected(400, self._lora_answer(f"LoRA with name {body['lora_name']} does not exist."))
            self.state.wait_for(lambda: not any(row.asked.lora == body["lora_name"] for row in self.running))
            del self.adapters[body["lora_name"]]
            self.adapted.pop(body["lora_name"], None)
            return self._lora_answer()

    def _lora_is_on(self) -> None:
        if not self.args.enable_lora:
            raise Rejected(400, self._lora_answer("LoRA is not enabled. Please set `--enable-lora` to enable LoRA."))

    def _lora_answer(self, why: str | None = None) -> dict[str, Any]:
        shape = {"rid": None, "http_worker_ipc": None, "success": why is None, "error_message": why}
        return {**shape, "loaded_adapters": dict(self.adapters)}

    # What is asked of it.

    def model_info(self) -> dict[str, Any]:
        config = self.model.config
        return {
            "model_path": self.path,
            "served_model_name": self.args.model_path,
            "tokenizer_path": self.args.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.version,
            "load_format": "auto",
            "model_type": config.model_type,
            "architectures": config.architectures,
        }

    def server_info(self) -> dict[str, Any]:
        """The flags as they were at the start, `weight_version` among them: a later one is in `model_info` only."""
        given = {
            name: value for name, value in vars(self.args).items() if name not in ("admin_api_key", "api_key", "config")
        }
        backend = "pytorch" if self.args.enable_deterministic_inference else self.args.sampling_backend or "flashinfer"
        given |= {"sampling_backend": backend, "sampling_mask_max_tokens": 4096, "disable_radix_cache": False}
        return {**given, "version": VERSION, "internal_states": [{}], "context_length": self.context}


def _place(own: dict[str, torch.Tensor], name: str) -> torch.Tensor | None:
    """Where a tensor of a checkpoint goes: a parameter, or the part of one expert in a stack, as SGLang loads
    Qwen3-MoE. A stack itself is no tensor of a checkpoint."""
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if expert is None:
        return None if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else own.get(name)
    stack, number, kind = expert[1], int(expert[2]), expert[3]
    if kind == "down":
        return own[f"{stack}.down_proj"][number]
    return own[f"{stack}.gate_up_proj"][number].chunk(2)[kind == "up"]


def _end_ids(model: Any) -> set[int]:
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        ids = getattr(config, "eos_token_id", None)
        found |= set(ids) if isinstance(ids, list) else set() if ids is None else {ids}
    return found


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _choose(
    logits: torch.Tensor, row: Running, seeded: bool, *, raw: bool
) -> tuple[int, float, tuple[list[int], float]]:
    """A token, its log-prob as SGLang tells it (of the whole vocabulary, at the temperature), and what was left to
    choose from with the log-prob among that."""
    asked = row.asked
    if asked.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(row.ids)))
        values = logits[seen]
        factor = asked.repetition_penalty
        logits = logits.clone()
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if asked.top_k == 1:
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token]), ([token], 0.0)
    whole = (logits / asked.temperature).log_softmax(-1)
    told = logits.log_softmax(-1) if raw else whole
    shares, order = whole.exp().sort(descending=True)
    left = (torch.arange(len(shares)) < asked.top_k) & (shares.cumsum(-1) - shares <= asked.top_p)
    left &= shares >= shares[0] * asked.min_p
    shares = shares * left
    noise = torch.Generator()
    if seeded:
        noise.manual_seed(((42 if asked.seed is None else asked.seed) * 1_000_003 + len(row.ids)) % 2**63)
    else:
        noise.seed()
    drawn = (shares.double() / torch.empty_like(shares, dtype=torch.float64).exponential_(generator=noise)).argmax()
    token = int(order[drawn])
    support = [int(each) for each in order[left]]
    return token, float(told[token]), (support, float((shares[drawn] / shares.sum()).log()))


def parser() -> argparse.ArgumentParser:
    """The flags of `sglang.launch_server` that a client of ours may use; one that is not here is refused."""
    flags = argparse.ArgumentParser("sglang.launch_server", allow_abbrev=False)
    flags.add_argument("--model-path", required=True)
    flags.add_argument("--host", default="127.0.0.1")
    flags.add_argument("--port", type=int, default=30000)
    flags.add_argument("--tp-size", type=int, default=1)
    flags.add_argument("--dtype", choices=DTYPES, default="auto")
    flags.add_argument("--device", default="cpu")
    flags.add_argument("--attention-backend")
    flags.add_argument("--sampling-backend")
    flags.add_argument("--context-length", type=int)
    flags.add_argument("--mem-fraction-static", type=float)
    flags.add_argument("--random-seed", type=int)
    flags.add_argument("--weight-version", default="default")
    flags.add_argument("--max-lora-rank", type=int, default=64)
    flags.add_argument("--lora-target-modules", nargs="*")
    flags.add_argument("--admin-api-key")
    flags.add_argument("--api-key")
    flags.add_argument("--config")
    flags.add_argument("--log-level", default="info")
    for switch in (
        "skip-tokenizer-init",
        "enable-deterministic-inference",
        "enable-memory-saver",
        "enable-weights-cpu-backup",
        "enable-lora",
        "trust-remote-code",
        "disable-cuda-graph",
    ):
        flags.add_argument(f"--{switch}", action="store_true")
    return flags


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, address: tuple[str, int]):
        super().__init__(address, Handler)
        self.engine = engine
        self.dead = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def die(self) -> None:
        """As if it were killed: connections break off, and none is taken any more."""
        self.dead = True
        with self.engine.state:
            self.engine._abort_all()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        engine, path = self.server.engine, urlsplit(self.path).path
        plain = {"/model_info": engine.model_info, "/server_info": engine.server_info}
        if path in ("/health", "/health_generate"):
            # Where health is told by a generation, a pause holds it up until it has taken too long.
            switch = os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "1").lower()
            generates = path != "/health" or switch in ("1", "true")
            self._say(503 if generates and engine.paused is not None else 200, "")
        elif path in plain:
            try:
                self._allowed(path)
            except Rejected as rejected:
                self._say(rejected.status, rejected.body)
                return
            self._say(200, plain[path]())
        else:
            self._say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        engine, where = self.server.engine, urlsplit(self.path)
        given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if where.path == "/flush_cache":
                self._allowed(where.path)
                timeout = parse_qs(where.query).get("timeout", ["0"])[0]
                if not float(timeout) >= 0:
                    raise Rejected.validation("query.timeout: Input should be greater than or equal to 0")
                engine.asked.append((where.path, None))
                self._say(*engine.flush_cache())
                return
            self._allowed(where.path)
            body = self._read(given)
            engine.asked.append((where.path, body))
            if where.path == "/generate":
                self._say(200, engine.generate(body))
            elif where.path in FORMS:
                self._say(200, getattr(engine, where.path[1:])(FORMS[where.path].read(body)))
            else:
                self._say(404, {"detail": "Not Found"})
        except Rejected as rejected:
            self._say(rejected.status, rejected.body)

    def _read(self, given: bytes) -> Any:
        if self.headers.get("Content-Type") != "application/json":
            raise Rejected.validation("Input should be a valid dictionary or object to extract fields from")
        try:
            return json.loads(given)
        except ValueError as error:
            raise Rejected.validation(f"JSON decode error: {error}") from error

    def _allowed(self, path: str) -> None:
        """As `srt/utils/auth.py` decides; the routes of administration take the common key where there is no other."""
        args = self.server.engine.args
        key = (
            args.api_key if path in ("/generate", "/model_info", "/server_info") else args.admin_api_key or args.api_key
        )
        scheme, _, given = (self.headers.get("Authorization") or "").partition(" ")
        if key is not None and not (scheme.lower() == "bearer" and given == key):
            raise Rejected(401, {"error": "Unauthorized"})

    def _say(self, status: int, body: Any) -> None:
        if self.server.dead:
            self.close_connection = True
            return
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        """Quiet."""


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    """A server in this process, on a port of its own; `flags` as on SGLang's command line."""
    engine = Engine(parser().parse_args(["--model-path", str(folder), *flags]))
    server = Server(engine, ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        if not server.dead:
            server.die()


def write_package(folder: Path) -> Path:
    """A folder for PYTHONPATH whose `python -m sglang.launch_server` is this server."""
    package = folder / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f'__version__ = "{VERSION}"\n', encoding="utf-8")
    here = Path(__file__).parent
    start = f"import sys\nsys.path.insert(0, {str(here)!r})\nfrom sglang_server import main\nmain()\n"
    (package / "launch_server.py").write_text(start, encoding="utf-8")
    info = folder / f"sglang-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n", encoding="utf-8")
    return folder


def main(words: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if words is None else words)
    if "--config" in given:
        # As `server_args_config_parser.py` merges it: flags of the command line win.
        at = given.index("--config")
        read = yaml.safe_load(Path(given[at + 1]).read_text(encoding="utf-8"))
        given = (
            [word for key, value in read.items() for word in (f"--{key}", str(value))] + given[:at] + given[at + 2 :]
        )
    args = parser().parse_args(given)
    Server(Engine(args), (args.host, args.port)).serve_forever()


if __name__ == "__main__":
    main()
