"""What SGLang 0.5.23 takes and refuses, from its sources (`io_struct.py`, `sampling_params.py`, `api_types.py`).

Stricter than SGLang in one way: where it ignores a field that it does not know, this refuses it, so that a misspelt one
does not pass. Status codes are SGLang's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Stands for no top-k at all, as in SGLang.
TOP_K_ALL = 1 << 30
MASK_LIMIT = 4096
"""SGLang's default of --sampling-mask-max-tokens."""


class Rejected(Exception):
    """An answer that is an error, in the shape that its route gives."""

    def __init__(self, status: int, body: Any):
        super().__init__(str(body))
        self.status, self.body = status, body

    @classmethod
    def contract(cls, why: str) -> Rejected:
        """/generate, whose JSON breaks the schema."""
        return cls(400, {"error": why})

    @classmethod
    def validation(cls, why: str) -> Rejected:
        """The other routes: FastAPI's error, as SGLang reshapes it."""
        return cls(400, {"object": "error", "message": why, "type": "Bad Request", "param": None, "code": 400})

    @classmethod
    def value(cls, why: str) -> Rejected:
        """A ValueError while the request is served."""
        return cls(400, {"error": {"message": why}})


Check = Callable[[Any], bool]


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return _text(value) or (isinstance(value, list) and all(_text(each) for each in value))


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(_integer(each) for each in value)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


SAMPLING: dict[str, Check] = {
    "max_new_tokens": _optional(_integer),
    "stop": _optional(_texts),
    "stop_token_ids": _optional(_integers),
    "temperature": _optional(_number),
    "top_p": _optional(_number),
    "top_k": _optional(_integer),
    "min_p": _optional(_number),
    "frequency_penalty": _optional(_number),
    "presence_penalty": _optional(_number),
    "repetition_penalty": _optional(_number),
    "min_new_tokens": _optional(_integer),
    "n": _optional(_integer),
    "ignore_eos": _optional(_flag),
    "skip_special_tokens": _optional(_flag),
    "spaces_between_special_tokens": _optional(_flag),
    "no_stop_trim": _optional(_flag),
    "sampling_seed": _optional(_integer),
}
GENERATE: dict[str, Check] = {
    "rid": _optional(_texts),
    "text": _optional(_texts),
    "input_ids": _optional(_integers),
    "sampling_params": _optional(lambda value: isinstance(value, dict)),
    "return_logprob": _optional(_flag),
    "logprob_start_len": _optional(_integer),
    "top_logprobs_num": _optional(_integer),
    "return_text_in_logprobs": _optional(_flag),
    "return_sampling_mask": _optional(_flag),
    "sampling_logprobs_mode": _optional(lambda value: value in ("selected", "support")),
    "stream": _optional(_flag),
    "lora_path": _optional(_text),
}


@dataclass(frozen=True)
class Form:
    """The body of an administrative route: fields with their checks and their defaults."""

    fields: Mapping[str, Check]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def read(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise Rejected.validation("Input should be a valid dictionary")
        for name, value in body.items():
            if name not in self.fields:
                raise Rejected.validation(f"unknown field {name!r} (SGLang itself would ignore it)")
            if not self.fields[name](value):
                raise Rejected.validation(f"body.{name}: invalid value {value!r}")
        missing = [name for name in self.fields if name not in body and name not in self.defaults]
        if missing:
            raise Rejected.validation(f"body.{missing[0]}: Field required")
        return {**self.defaults, **body}


def _shapes(value: Any) -> bool:
    return isinstance(value, list) and all(_integers(each) for each in value)


def _list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and _texts(value)


def _selector(value: Any) -> bool:
    return value in ("target", "draft", "all")


_TAGS = _optional(lambda value: isinstance(value, list) and all(_text(each) for each in value))
FORMS: dict[str, Form] = {
    "/pause_generation": Form({"mode": lambda v: v in ("abort", "retract", "in_place")}, {"mode": "abort"}),
    "/continue_generation": Form({"torch_empty_cache": _flag}, {"torch_empty_cache": True}),
    "/update_weights_from_disk": Form(
        {
            "model_path": _text,
            "load_format": _optional(_text),
            "abort_all_requests": _flag,
            "weight_version": _optional(_text),
            "is_async": _flag,
            "torch_empty_cache": _flag,
            "keep_pause": _flag,
            "recapture_cuda_graph": _flag,
            "token_step": _integer,
            "flush_cache": _flag,
        },
        {
            "load_format": None,
            "abort_all_requests": False,
            "weight_version": None,
            "is_async": False,
            "torch_empty_cache": False,
            "keep_pause": False,
            "recapture_cuda_graph": False,
            "token_step": 0,
            "flush_cache": True,
        },
    ),
    "/init_weights_update_group": Form(
        {
            "master_address": _text,
            "master_port": _integer,
            "rank_offset": _integer,
            "world_size": _integer,
            "group_name": _text,
            "backend": _text,
        },
        {"group_name": "weight_update_group", "backend": "nccl"},
    ),
    "/destroy_weights_update_group": Form({"group_name": _text}, {"group_name": "weight_update_group"}),
    "/begin_weight_update": Form({"selector": _selector}, {"selector": "all"}),
    "/end_weight_update": Form({}),
    "/update_weights_from_distributed": Form(
        {
            "names": _list_of_texts,
            "dtypes": _list_of_texts,
            "shapes": _shapes,
            "group_name": _text,
            "flush_cache": _flag,
            "abort_all_requests": _flag,
            "weight_version": _optional(_text),
            "load_format": _optional(_text),
            "selector": _selector,
            "torch_empty_cache": _flag,
        },
        {
            "group_name": "weight_update_group",
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": None,
            "load_format": None,
            "selector": "all",
            "torch_empty_cache": False,
        },
    ),
    "/update_weight_version": Form({"new_version": _text, "abort_all_requests": _flag}, {"abort_all_requests": True}),
    "/release_memory_occupation": Form({"tags": _TAGS}, {"tags": None}),
    "/resume_memory_occupation": Form({"tags": _TAGS}, {"tags": None}),
    "/weights_checker": Form(
        {"action": _text, "allow_quant_error": _flag, "selector": _selector},
        {"action": "checksum", "allow_quant_error": False, "selector": "all"},
    ),
    "/load_lora_adapter": Form({"lora_name": _text, "lora_path": _text, "pinned": _flag}, {"pinned": False}),
    "/unload_lora_adapter": Form({"lora_name": _text}),
    "/abort_request": Form({"rid": _text, "abort_all": _flag}, {"rid": "", "abort_all": False}),
}


@dataclass(frozen=True)
class Asked:
    """A /generate request that passed, with SGLang's defaults filled in."""

    ids: list[int]
    lora: str | None
    logprobs: bool
    mask: bool
    max_new_tokens: int
    stop: list[str]
    stop_ids: frozenset[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    n: int
    ignore_eos: bool
    seed: int | None


def read_generate(body: Any, *, tokenizer: bool, vocabulary: int, context: int) -> Asked:
    if not isinstance(body, dict):
        raise Rejected.contract("invalid type, expected struct GenerateRequest")
    for name, value in body.items():
        if name not in GENERATE:
            raise Rejected.contract(f"unknown field `{name}` (SGLang itself would ignore it)")
        if not GENERATE[name](value):
            raise Rejected.contract(f"invalid type for `{name}`: {value!r}")
    given = body.get("sampling_params") or {}
    for name, value in given.items():
        if name not in SAMPLING:
            raise Rejected.contract(f"unknown field `{name}`, expected one of {', '.join(SAMPLING)}")
        if not SAMPLING[name](value):
            raise Rejected.contract(f"invalid type for `{name}`: {value!r}")
    if body.get("stream"):
        raise Rejected.value("this test server does not stream")
    if body.get("text") is not None or body.get("input_ids") is None:
        raise Rejected.value("Either text, input_ids or input_embeds should be provided; this test server takes ids.")
    return _verified(body, given, tokenizer, vocabulary, context)


def _verified(body: dict[str, Any], given: dict[str, Any], tokenizer: bool, vocabulary: int, context: int) -> Asked:
    def value(name: str, default: Any) -> Any:
        return default if given.get(name) is None else given[name]

    temperature, top_k = float(value("temperature", 1.0)), value("top_k", TOP_K_ALL)
    # As SGLang does it: greedy is the likeliest one at temperature 1.
    if 0 <= temperature < 1e-6:
        temperature, top_k = 1.0, 1
    top_k = TOP_K_ALL if top_k == -1 else top_k
    top_p, min_p, penalty = value("top_p", 1.0), value("min_p", 0.0), value("repetition_penalty", 1.0)
    stop = value("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    limit, seed, ids = value("max_new_tokens", 128), given.get("sampling_seed"), body["input_ids"]
    for wrong, why in (
        (not math.isfinite(temperature) or temperature < 0, "temperature must be a non-negative finite number"),
        (not 0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}."),
        (not 0 <= min_p <= 1, f"min_p must be in [0, 1], got {min_p}."),
        (top_k < 1, f"top_k must be -1 (disable) or at least 1, got {top_k}."),
        (not 0 < penalty <= 2, f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {penalty}."),
        (limit < 0, f"max_new_tokens must be at least 0, got {limit}."),
        (seed is not None and not -(2**63) <= seed <= 2**63 - 1, "sampling_seed must be in [-2**63, 2**63 - 1]"),
        (bool(stop) and not tokenizer, f"stop={stop!r} is unavailable when skip_tokenizer_init=True"),
        (len(ids) >= context, f"The input ({len(ids)} tokens) is longer than the model's context length"),
        (len(ids) + limit > context, "Requested token count exceeds the model's maximum context length"),
        (not ids or any(not 0 <= each < vocabulary for each in ids), "input_ids hold a token that is not there"),
    ):
        if wrong:
            raise Rejected.value(why)
    mask = bool(body.get("return_sampling_mask"))
    if mask and not 1 <= top_k <= MASK_LIMIT:
        raise Rejected.value(f"return_sampling_mask requires top_k=1 or finite 1 < top_k <= {MASK_LIMIT}")
    return Asked(
        ids=ids,
        lora=body.get("lora_path"),
        logprobs=bool(body.get("return_logprob")),
        mask=mask,
        max_new_tokens=limit,
        stop=stop,
        stop_ids=frozenset(value("stop_token_ids", [])),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=penalty,
        n=value("n", 1),
        ignore_eos=value("ignore_eos", False),
        seed=seed,
    )
