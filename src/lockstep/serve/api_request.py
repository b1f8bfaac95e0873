"""Parses and checks request bodies of the OpenAI API, including keys that vLLM adds, and tokenizes the prompts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.encode.chat_text import RESERVED, uses
from lockstep.data.encode.template_checks import refuse_dropped_by_template
from lockstep.errors import Refusal, first_line
from lockstep.http_server.http_api import ApiError
from lockstep.http_server.request_body import BodyReader, bad_value, check_model, is_token_ids, valid_text
from lockstep.serve.engine_worker import GenerationRequest
from lockstep.types import Message, Origin, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The smallest accepted temperature above 0, because logits divided by a smaller temperature would overflow. The
# temperature 0 means greedy decoding.
MIN_TEMPERATURE = 0.01
MAX_CHOICES, MAX_STOPS, MAX_STOP_IDS = 128, 16, 128
# If a text has more characters than this number times the context length, first only its beginning is tokenized.
CHARACTERS_PER_TOKEN = 16
# The default of `max_tokens` in OpenAI's completions API.
DEFAULT_COMPLETION_TOKENS = 16
_NO_TOOLS = "the answer is plain text; tool calls are not parsed"
_NO_PENALTY = "is not supported; use repetition_penalty"
_ORIGIN = Origin("messages", 0)


@dataclass(frozen=True)
class ServedModel:
    """The model that the server serves. `max_model_len` limits the tokens of prompt and answer together."""

    names: tuple[str, ...]
    """The model names that a request may use. Replies contain the first of these model names."""
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    stop_ids: tuple[int, ...]
    max_model_len: int

    def decode(self, ids: list[int]) -> str:
        """Returns the text without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class ApiRequest:
    """A parsed request."""

    generation: GenerationRequest
    stream: bool
    usage: bool
    """Whether the last event of a stream contains the token counts (`include_usage`)."""
    token_ids: bool
    logprobs: bool
    """Whether the reply contains log-probs. `generation.top_logprobs` is the number of alternatives per token."""


def chat_request(body: bytes, served: ServedModel) -> ApiRequest:
    """Parses a request to `/v1/chat/completions`."""
    fields = BodyReader(body)
    check_model(fields, served.names)
    ids = _chat_ids(_messages(fields.take("messages")), fields.object("chat_template_kwargs"), served)
    completion_tokens = fields.integer("max_completion_tokens", None, 1)
    max_tokens = fields.integer("max_tokens", completion_tokens, 1)
    if completion_tokens is not None and max_tokens != completion_tokens:
        raise bad_value("max_tokens", "differs from max_completion_tokens")
    logprobs = fields.boolean("logprobs")
    top_logprobs = fields.integer("top_logprobs", None, 0, 20)
    if top_logprobs is not None and not logprobs:
        raise bad_value("top_logprobs", "needs logprobs: true")
    fields.accept_only("tools", ([],), _NO_TOOLS)
    fields.accept_only("tool_choice", ("none", "auto"), _NO_TOOLS)
    fields.accept_only("response_format", ({"type": "text"},), "is not supported; answers are plain text")
    fields.accept_only("modalities", (["text"],), "answers are text")
    fields.ignore("store", "metadata", "parallel_tool_calls", "service_tier")
    alternatives = (top_logprobs or 0) if logprobs else None
    return _parsed(fields, served, [ids], max_tokens, alternatives, None)


def completion_request(body: bytes, served: ServedModel) -> ApiRequest:
    """Parses a request to `/v1/completions`."""
    fields = BodyReader(body)
    check_model(fields, served.names)
    prompts = _prompts(fields.take("prompt"), fields.boolean("add_special_tokens", True), served)
    max_tokens = fields.integer("max_tokens", None, 1)
    top_logprobs = fields.integer("logprobs", None, 0, 20)
    fields.accept_only("echo", (False,), "is not supported; set return_token_ids to get the tokens of the prompt")
    fields.accept_only("suffix", ("",), "is not supported; text is only generated after the prompt")
    fields.accept_only("best_of", (1,), "is not supported; use n, which returns all answers")
    return _parsed(fields, served, prompts, max_tokens, top_logprobs, DEFAULT_COMPLETION_TOKENS)


def _parsed(
    fields: BodyReader,
    served: ServedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    top_logprobs: int | None,
    default_tokens: int | None,
) -> ApiRequest:
    n = fields.integer("n", 1, 1, MAX_CHOICES) or 1
    stream, token_ids = fields.boolean("stream"), fields.boolean("return_token_ids")
    usage = _usage(fields.object("stream_options"), stream)
    stops = _stops(fields)
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    sampling = _sampling(fields, served)
    fields.accept_only("frequency_penalty", (0, 0.0), _NO_PENALTY)
    fields.accept_only("presence_penalty", (0, 0.0), _NO_PENALTY)
    fields.accept_only("logit_bias", ({},), "is not supported")
    fields.ignore("user", "safety_identifier", "prompt_cache_key")
    fields.check_all_read()
    samplings = [
        replace(
            sampling,
            max_tokens=_max_tokens(ids, max_tokens, served, default_tokens),
            # If the request has no seed, every prompt gets a new random seed, even if prompts are equal.
            seed=secrets.randbits(63) if seed is None else seed,
        )
        for ids in prompts
    ]
    generation = GenerationRequest(prompts, n, samplings, stops, top_logprobs)
    return ApiRequest(generation, stream, usage, token_ids, top_logprobs is not None)


def _usage(options: dict[str, Any], stream: bool) -> bool:
    if options and not stream:
        raise bad_value("stream_options", "needs stream: true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise bad_value(f"stream_options.{name}", "is not supported; use include_usage")
        if not isinstance(value, bool):
            raise bad_value(f"stream_options.{name}", "is neither true nor false")
    return bool(options.get("include_usage"))


def _sampling(fields: BodyReader, served: ServedModel) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0)
    if 0 < temperature < MIN_TEMPERATURE:
        raise bad_value("temperature", f"{temperature} is neither 0, which is greedy, nor at least {MIN_TEMPERATURE}")
    top_p = fields.number("top_p", 1.0, 0, 1)
    if top_p == 0:
        raise bad_value("top_p", "0 leaves no token to sample; use temperature 0 for greedy decoding")
    top_k = fields.integer("top_k", 0, -1) or 0
    stop_ids = fields.take("stop_token_ids", [])
    if not is_token_ids(stop_ids):
        raise bad_value("stop_token_ids", "is not a list of token ids")
    if len(stop_ids) > MAX_STOP_IDS:
        raise bad_value("stop_token_ids", f"has {len(stop_ids)} tokens, over the limit of {MAX_STOP_IDS}")
    _check_vocabulary(stop_ids, "stop_token_ids", served)
    ends = () if fields.boolean("ignore_eos") else served.stop_ids
    penalty = fields.number("repetition_penalty", 1.0, 0)
    if penalty == 0:
        raise bad_value("repetition_penalty", "must be above 0")
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
    stop_value = fields.take("stop", [])
    stops = [stop_value] if isinstance(stop_value, str) else stop_value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise bad_value("stop", "is neither text nor a list of texts")
    if not all(valid_text(stop, "stop") for stop in stops):
        raise bad_value("stop", "an empty stop string would end every answer before it begins")
    if len(stops) > MAX_STOPS:
        raise bad_value("stop", f"has {len(stops)} texts, over the limit of {MAX_STOPS}")
    return tuple(stops)


def _max_tokens(ids: Sequence[int], requested: int | None, served: ServedModel, default: int | None) -> int:
    """Returns the maximum number of new tokens: the limit in the request, or the default, or the rest of the
    context."""
    room = served.max_model_len - len(ids)
    if room < 1 or (requested is not None and requested > room):
        answer = f" and {requested} of the answer" if requested is not None else ""
        raise ApiError(
            400,
            f"{len(ids)} tokens of the prompt{answer} are over the limit of {served.max_model_len}",
            param="max_tokens" if room >= 1 else "prompt",
            code="context_length_exceeded",
        )
    return min(room, default or room) if requested is None else requested


# -- prompts


def _prompts(value: Any, special: bool, served: ServedModel) -> list[list[int]]:
    """Returns the prompts as token ids. `value` is text or token ids, or a list of either."""
    prompts = value if isinstance(value, list) and not is_token_ids(value) else [value]
    if is_token_ids(value) and not value:
        raise bad_value("prompt", "is empty")
    if not prompts or not all(isinstance(prompt, str) or is_token_ids(prompt) for prompt in prompts):
        raise bad_value("prompt", "is neither text nor token ids, nor a list of either")
    token_ids = [
        _tokens(valid_text(prompt, "prompt"), "prompt", served, special=special)
        if isinstance(prompt, str)
        else list(prompt)
        for prompt in prompts
    ]
    for ids in token_ids:
        _check_ids(ids, served)
    return token_ids


def _tokens(text: str, key: str, served: ServedModel, *, special: bool) -> list[int]:
    """Returns token ids. A text with more than CHARACTERS_PER_TOKEN characters per token of the context is first
    tokenized only in part, so that a text that is too long is rejected quickly."""
    length = CHARACTERS_PER_TOKEN * served.max_model_len
    while length < len(text):
        tokens = len(served.tokenizer(text[:length], add_special_tokens=special)["input_ids"])
        # The check uses twice the limit, because a truncated word may have more tokens than the complete word.
        if tokens > 2 * served.max_model_len:
            limit = served.max_model_len
            why = f"{key}: its first {length} characters alone are {tokens} tokens, over the limit of {limit}"
            raise ApiError(400, why, param=key, code="context_length_exceeded")
        length *= 4
    return list(served.tokenizer(text, add_special_tokens=special)["input_ids"])


def _check_ids(ids: Sequence[int], served: ServedModel) -> None:
    if not ids:
        raise bad_value("prompt", "has no tokens")
    _check_vocabulary(ids, "prompt", served)


def _check_vocabulary(ids: Sequence[int], key: str, served: ServedModel) -> None:
    if invalid := [token for token in ids if not 0 <= token < served.vocabulary]:
        raise bad_value(key, f"token {str(invalid[0])[:20]} is not in the vocabulary of {served.vocabulary}")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise bad_value("messages", "is not a list of messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise bad_value(where, "has no role")
    unread = [key for key, value in message.items() if value and key not in ("role", "content", "name")]
    if unread:
        raise bad_value(f"{where}.{unread[0]}", _NO_TOOLS if "tool" in unread[0] else "is not supported")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise bad_value(f"{where}.content", "is not text")
    # `developer` is OpenAI's newer name for the role `system`; chat templates do not support it.
    role = "system" if message["role"] == "developer" else message["role"]
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise bad_value(f"{where}.name", "is not text")
    return {"role": role, "content": content, **({"name": name} if name else {})}


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, dict) else None
        raise bad_value(where, f"is of type {kind!r}; only text is supported" if kind else "is not a part of type text")
    return str(part["text"])


def _chat_ids(messages: list[Message], arguments: dict[str, Any], served: ServedModel) -> list[int]:
    tokenizer = served.tokenizer
    for name in arguments:
        if name in RESERVED or not uses(str(tokenizer.chat_template), name):
            raise bad_value(f"chat_template_kwargs.{name}", "is no argument of the model's chat template")
    if not tokenizer.chat_template:
        raise ApiError(400, "messages: the model has no chat template; use /v1/completions", param="messages")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        refuse_dropped_by_template(text, messages, (), _ORIGIN)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # A template is code of the model and may raise any error for messages that it does not accept.
        raise bad_value("messages", f"the chat template does not accept the messages: {first_line(error)}") from error
    except Refusal as refusal:
        raise bad_value("messages", refusal.problems[0].why) from refusal
    for number, message in enumerate(messages):
        if message.get("name", "") not in text:
            raise bad_value(f"messages[{number}].name", "the model's chat template does not use the name of a message")
    ids = _tokens(valid_text(text, "messages"), "messages", served, special=False)
    _check_ids(ids, served)
    return ids
