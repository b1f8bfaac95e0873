"""The bodies of requests to the OpenAI API, with the keys that vLLM adds: checked, and encoded as token ids."""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.encode.template_checks import refuse_dropped_by_template
from lockstep.errors import Refusal, first_line
from lockstep.serve.engine_worker import GenerationRequest
from lockstep.serve.http_api import ApiError
from lockstep.types import Message, Origin, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Logits divided by a smaller temperature overflow; 0 is greedy.
MIN_TEMPERATURE = 0.01
MAX_CHOICES, MAX_STOPS, MAX_STOP_IDS = 128, 16, 128
# Characters per token of the longest sequence. Of a longer text the beginning is tokenized first.
CHARACTERS_PER_TOKEN = 16
# Default of `max_tokens` in OpenAI's completions.
DEFAULT_COMPLETION_TOKENS = 16
_NO_TOOLS = "the model's answer is given as text, calls of tools are not read out of it"
# Arguments of `apply_chat_template` that are no variables of a template, or that other keys of the request set.
_RESERVED_TEMPLATE_ARGUMENTS = {
    *("messages", "conversation", "chat_template", "tools", "documents", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
_NO_PENALTY = "is not supported; use repetition_penalty"
_ORIGIN = Origin("messages", 0)


@dataclass(frozen=True)
class ServedModel:
    """The model as requests see it. `longest` is the limit of tokens of a prompt and its answer together."""

    names: tuple[str, ...]
    """Names that a request may use; replies have the first."""
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    stop_ids: tuple[int, ...]
    longest: int

    def decode(self, ids: list[int]) -> str:
        """The text without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class ApiRequest:
    """A parsed request."""

    generation: GenerationRequest
    stream: bool
    usage: bool
    """Whether a stream ends with the count of tokens."""
    token_ids: bool
    logprobs: bool
    """Whether the reply has log-probs; `generation.likeliest` is the number of alternatives per token."""


def chat_request(body: bytes, served: ServedModel) -> ApiRequest:
    """`/v1/chat/completions`."""
    fields = BodyReader(body)
    check_model(fields, served.names)
    ids = _chat_ids(_messages(fields.take("messages")), fields.object("chat_template_kwargs"), served)
    wanted = fields.integer("max_completion_tokens", None, 1)
    most = fields.integer("max_tokens", wanted, 1)
    if wanted is not None and most != wanted:
        raise wrong("max_tokens", "differs from max_completion_tokens")
    logprobs = fields.switch("logprobs")
    likeliest = fields.integer("top_logprobs", None, 0, 20)
    if likeliest is not None and not logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    fields.only("tools", ([],), _NO_TOOLS)
    fields.only("tool_choice", ("none", "auto"), _NO_TOOLS)
    fields.only("response_format", ({"type": "text"},), "answers are text without a grammar")
    fields.only("modalities", (["text"],), "answers are text")
    fields.ignore("store", "metadata", "parallel_tool_calls", "service_tier")
    alternatives = (likeliest or 0) if logprobs else None
    return _parsed(fields, served, [ids], most, alternatives, None)


def completion_request(body: bytes, served: ServedModel) -> ApiRequest:
    """`/v1/completions`."""
    fields = BodyReader(body)
    check_model(fields, served.names)
    prompts = _prompts(fields.take("prompt"), fields.switch("add_special_tokens", True), served)
    most = fields.integer("max_tokens", None, 1)
    likeliest = fields.integer("logprobs", None, 0, 20)
    fields.only("echo", (False,), "the answer does not repeat the prompt; set return_token_ids")
    fields.only("suffix", ("",), "text is only generated after the prompt")
    fields.only("best_of", (1,), "all answers are returned; use n")
    return _parsed(fields, served, prompts, most, likeliest, DEFAULT_COMPLETION_TOKENS)


def _parsed(
    fields: BodyReader,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    most: int | None,
    likeliest: int | None,
    default: int | None,
) -> ApiRequest:
    n = fields.integer("n", 1, 1, MAX_CHOICES) or 1
    stream, token_ids = fields.switch("stream"), fields.switch("return_token_ids")
    usage = _usage(fields.object("stream_options"), stream)
    stops = _stops(fields)
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    sampling = _sampling(fields, served)
    fields.only("frequency_penalty", (0, 0.0), _NO_PENALTY)
    fields.only("presence_penalty", (0, 0.0), _NO_PENALTY)
    fields.only("logit_bias", ({},), "is not supported")
    fields.ignore("user", "safety_identifier", "prompt_cache_key")
    fields.check_all_read()
    samplings = [
        replace(
            sampling,
            max_tokens=_max_tokens(ids, most, served, default),
            # Without a seed every prompt is sampled with a new one, also a repeated prompt.
            seed=secrets.randbits(63) if seed is None else seed,
        )
        for ids in prompts
    ]
    generation = GenerationRequest(prompts, n, samplings, stops, likeliest)
    return ApiRequest(generation, stream, usage, token_ids, likeliest is not None)


def _usage(options: dict[str, Any], stream: bool) -> bool:
    if options and not stream:
        raise wrong("stream_options", "needs stream: true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise wrong(f"stream_options.{name}", "is not supported; use include_usage")
        if not isinstance(value, bool):
            raise wrong(f"stream_options.{name}", "is neither true nor false")
    return bool(options.get("include_usage"))


def _sampling(fields: BodyReader, served: ServedModel) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise wrong("temperature", f"{temperature} is neither 0, which is greedy, nor at least {MIN_TEMPERATURE}")
    top_p = fields.number("top_p", 1.0, 0, 1)
    if top_p == 0:
        raise wrong("top_p", "0 leaves no token; use temperature 0 for greedy decoding")
    top_k = fields.integer("top_k", 0, -1) or 0
    stop_ids = fields.take("stop_token_ids", [])
    if not is_ids(stop_ids):
        raise wrong("stop_token_ids", "is not a list of token ids")
    if len(stop_ids) > MAX_STOP_IDS:
        raise wrong("stop_token_ids", f"has {len(stop_ids)} tokens, over the limit of {MAX_STOP_IDS}")
    _check_vocabulary(stop_ids, "stop_token_ids", served)
    ends = () if fields.switch("ignore_eos") else served.stop_ids
    penalty = fields.number("repetition_penalty", 1.0, 0)
    if penalty == 0:
        raise wrong("repetition_penalty", "0 cannot divide")
    min_p = fields.number("min_p", 0.0, 0, 1)
    return Sampling(
        max_tokens=1,
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=min_p,
        repetition_penalty=penalty,
        stop_ids=tuple(sorted({*ends, *stop_ids})),
    )


def _stops(fields: BodyReader) -> tuple[str, ...]:
    found = fields.take("stop", [])
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop", "is neither text nor a list of texts")
    if not all(valid_text(stop, "stop") for stop in stops):
        raise wrong("stop", "an empty text would end every answer before it begins")
    if len(stops) > MAX_STOPS:
        raise wrong("stop", f"has {len(stops)} texts, over the limit of {MAX_STOPS}")
    return tuple(stops)


def _max_tokens(ids: Sequence[int], most: int | None, served: ServedModel, default: int | None) -> int:
    """The limit of new tokens: that of the request, or what the context leaves."""
    left = served.longest - len(ids)
    if left < 1 or (most is not None and most > left):
        wanted = f" and {most} of the answer" if most is not None else ""
        raise ApiError(
            400,
            f"{len(ids)} tokens of the prompt{wanted} are over the limit of {served.longest}",
            param="max_tokens" if left >= 1 else "prompt",
            code="context_length_exceeded",
        )
    return min(left, default or left) if most is None else most


# -- prompts


def _prompts(found: Any, special: bool, served: ServedModel) -> list[list[int]]:
    """Text or token ids, or a list of either."""
    several = found if isinstance(found, list) and not is_ids(found) else [found]
    if is_ids(found) and not found:
        raise wrong("prompt", "is empty")
    if not several or not all(isinstance(one, str) or is_ids(one) for one in several):
        raise wrong("prompt", "is neither text nor token ids, nor a list of either")
    prompts = [
        _tokens(valid_text(one, "prompt"), "prompt", served, special=special) if isinstance(one, str) else list(one)
        for one in several
    ]
    for ids in prompts:
        _check_ids(ids, served)
    return prompts


def _tokens(text: str, key: str, served: ServedModel, *, special: bool) -> list[int]:
    """Token ids. Of a text that is far too long only the beginning is tokenized, because other requests wait for it."""
    length = CHARACTERS_PER_TOKEN * served.longest
    while length < len(text):
        found = len(served.tokenizer(text[:length], add_special_tokens=special)["input_ids"])
        # Twice, because a cut word may have more tokens than the complete word.
        if found > 2 * served.longest:
            why = f"{key}: its first {length} characters alone are {found} tokens, over the limit of {served.longest}"
            raise ApiError(400, why, param=key, code="context_length_exceeded")
        length *= 4
    return list(served.tokenizer(text, add_special_tokens=special)["input_ids"])


def _check_ids(ids: Sequence[int], served: ServedModel) -> None:
    if not ids:
        raise wrong("prompt", "has no tokens")
    _check_vocabulary(ids, "prompt", served)


def _check_vocabulary(ids: Sequence[int], key: str, served: ServedModel) -> None:
    if foreign := [token for token in ids if not 0 <= token < served.vocabulary]:
        raise wrong(key, f"token {str(foreign[0])[:20]} is not in the vocabulary of {served.vocabulary}")


def _messages(found: Any) -> list[Message]:
    if not isinstance(found, list) or not found:
        raise wrong("messages", "is not a list of messages")
    return [_message(one, f"messages[{number}]") for number, one in enumerate(found)]


def _message(found: Any, where: str) -> Message:
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise wrong(where, "has no role")
    more = [key for key, value in found.items() if value and key not in ("role", "content", "name")]
    if more:
        raise wrong(f"{where}.{more[0]}", _NO_TOOLS if "tool" in more[0] else "is not read")
    content = found.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(f"{where}.content", "is not text")
    # OpenAI's newer name of the role `system`; chat templates do not have it.
    role = "system" if found["role"] == "developer" else found["role"]
    named = found.get("name")
    if named is not None and not isinstance(named, str):
        raise wrong(f"{where}.name", "is not text")
    return {"role": role, "content": content, **({"name": named} if named else {})}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else None
        raise wrong(where, f"is of type {kind!r}; only text is read" if kind else "is not a part of type text")
    return str(part["text"])


def _chat_ids(messages: list[Message], arguments: dict[str, Any], served: ServedModel) -> list[int]:
    tokenizer = served.tokenizer
    for name in arguments:
        if name in _RESERVED_TEMPLATE_ARGUMENTS or not re.search(
            rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)
        ):
            raise wrong(f"chat_template_kwargs.{name}", "is no argument of the model's chat template")
    if not tokenizer.chat_template:
        raise ApiError(400, "messages: the model has no chat template; use /v1/completions", param="messages")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        refuse_dropped_by_template(text, messages, (), _ORIGIN)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # A template is code of the model and may raise anything for messages that it does not accept.
        raise wrong("messages", f"the chat template refuses them: {first_line(error)}") from error
    except Refusal as refusal:
        raise wrong("messages", refusal.problems[0].why) from refusal
    for number, message in enumerate(messages):
        if message.get("name", "") not in text:
            raise wrong(f"messages[{number}].name", "the model's chat template does not write it")
    ids = _tokens(valid_text(text, "messages"), "messages", served, special=False)
    _check_ids(ids, served)
    return ids


# -- keys of a body

_MISSING = object()
_LARGEST = sys.float_info.max


def wrong(key: str, why: str) -> ApiError:
    return ApiError(400, f"{key}: {why}", param=key)


class BodyReader:
    """The keys of a JSON body, each read and checked once; `check_all_read` rejects the others. As in OpenAI's API,
    `null` is the same as a missing key."""

    def __init__(self, body: bytes):
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ApiError(400, "the body is not a JSON object")
        self._left: dict[str, Any] = {key: found for key, found in value.items() if found is not None}

    def take(self, key: str, default: Any = _MISSING) -> Any:
        found = self._left.pop(key, default)
        if found is _MISSING:
            raise wrong(key, "is missing")
        return found

    def number(self, key: str, default: float, low: float, high: float = math.inf) -> float:
        found = self.take(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) <= _LARGEST:
            raise wrong(key, f"{_shown(found)} is not a number")
        if not low <= found <= high:
            raise wrong(key, f"{found} is not {_range(low, high)}")
        return float(found)

    def integer(self, key: str, default: int | None, low: float, high: float = math.inf) -> int | None:
        found = self.take(key, default)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise wrong(key, f"{_shown(found)} is not a whole number")
        if not low <= found <= high:
            raise wrong(key, f"{found} is not {_range(low, high)}")
        return found

    def switch(self, key: str, default: bool = False) -> bool:
        found = self.take(key, default)
        if not isinstance(found, bool):
            raise wrong(key, f"{_shown(found)} is neither true nor false")
        return found

    def text(self, key: str, default: Any = _MISSING) -> str:
        found = self.take(key, default)
        if not isinstance(found, str):
            raise wrong(key, f"{_shown(found)} is not text")
        return found

    def object(self, key: str) -> dict[str, Any]:
        found = self.take(key, {})
        if not isinstance(found, dict):
            raise wrong(key, f"{_shown(found)} is not an object")
        return found

    def only(self, key: str, allowed: Sequence[Any], why: str) -> None:
        """Reject a key of OpenAI's API that is not supported here, unless its value changes nothing."""
        found = self.take(key, None)
        if found is not None and found not in allowed:
            raise wrong(key, why)

    def ignore(self, *keys: str) -> None:
        """Drop keys that do not change the answer."""
        for key in keys:
            self._left.pop(key, None)

    def check_all_read(self) -> None:
        if self._left:
            key = next(iter(self._left))
            raise ApiError(400, f"{key}: this endpoint has no such key", param=key, code="unknown_parameter")


def check_model(fields: BodyReader, names: Sequence[str]) -> None:
    """Reject a request for another model."""
    name = fields.text("model", names[0])
    if name not in names:
        why = f"model: {name[:200]!r} is not served here; use {names[0]!r}"
        raise ApiError(404, why, param="model", code="model_not_found")


def valid_text(text: str, key: str) -> str:
    """The text. JSON can contain lone surrogates, which no tokenizer accepts: they are an error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(key, "contains half of a character (a lone surrogate)") from error
    return text


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
