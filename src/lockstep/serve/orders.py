"""From the body of a request to what the engine is asked: OpenAI's keys, and those that vLLM adds to them."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lockstep.data.encode.template_checks import refuse_vanished
from lockstep.errors import Refusal, first_line
from lockstep.serve.fields import Fields, check_model, is_ids, sound, wrong
from lockstep.serve.replies import ApiError
from lockstep.serve.tickets import GenerationOrder
from lockstep.types import Message, Origin, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Below this a temperature only makes numbers that no longer fit; 0 is greedy.
COLDEST = 0.01
MOST_CHOICES, MOST_STOPS, MOST_STOP_IDS = 128, 16, 128
# Characters for each token of the longest sequence: a text of more is tried by its beginning first.
TRIED_CHARACTERS = 16
# What `max_tokens` is without being said, as in OpenAI's own completions.
USUAL_COMPLETION = 16
_NO_TOOLS = "the model's answer is given as text, calls of tools are not read out of it"
# What the call of a template takes besides its own arguments, and what is said elsewhere in a request.
_TEMPLATES_OWN = {
    *("messages", "conversation", "chat_template", "tools", "documents", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
_NO_PENALTY = "is not here; repetition_penalty is"
_HERE = Origin("messages", 0)


@dataclass(frozen=True)
class Served:
    """The model as requests see it. `longest` is the most tokens of a prompt and its answer together."""

    names: tuple[str, ...]
    """The first is the one that is told."""
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    stop_ids: tuple[int, ...]
    longest: int

    def decode(self, ids: list[int]) -> str:
        """Without marks such as the end of a turn."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


@dataclass(frozen=True)
class ApiRequest:
    """A request that was understood."""

    order: GenerationOrder
    stream: bool
    usage: bool
    """Whether a stream ends with the count of tokens."""
    token_ids: bool
    logprobs: bool
    """Whether they are told; `order.likeliest` says how many beside each."""


def chat_asked(body: bytes, served: Served) -> ApiRequest:
    """`/v1/chat/completions`."""
    fields = Fields(body)
    check_model(fields, served.names)
    ids = _chat_ids(_messages(fields.take("messages")), fields.object("chat_template_kwargs"), served)
    wanted = fields.whole("max_completion_tokens", None, 1)
    most = fields.whole("max_tokens", wanted, 1)
    if wanted is not None and most != wanted:
        raise wrong("max_tokens", "says another number than max_completion_tokens")
    logprobs = fields.switch("logprobs")
    likeliest = fields.whole("top_logprobs", None, 0, 20)
    if likeliest is not None and not logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    fields.only("tools", ([],), _NO_TOOLS)
    fields.only("tool_choice", ("none", "auto"), _NO_TOOLS)
    fields.only("response_format", ({"type": "text"},), "answers are text; no grammar holds them")
    fields.only("modalities", (["text"],), "answers are text")
    fields.ignore("store", "metadata", "parallel_tool_calls", "service_tier")
    told = (likeliest or 0) if logprobs else None
    return _asked(fields, served, [ids], most, told, None)


def completion_asked(body: bytes, served: Served) -> ApiRequest:
    """`/v1/completions`."""
    fields = Fields(body)
    check_model(fields, served.names)
    prompts = _prompts(fields.take("prompt"), fields.switch("add_special_tokens", True), served)
    most = fields.whole("max_tokens", None, 1)
    likeliest = fields.whole("logprobs", None, 0, 20)
    fields.only("echo", (False,), "the prompt is not repeated in the answer; ask with return_token_ids")
    fields.only("suffix", ("",), "text is written at the end only")
    fields.only("best_of", (1,), "every answer is given; ask for n of them")
    return _asked(fields, served, prompts, most, likeliest, USUAL_COMPLETION)


def _asked(
    fields: Fields,
    served: Served,
    prompts: Sequence[Sequence[int]],
    most: int | None,
    likeliest: int | None,
    usual: int | None,
) -> ApiRequest:
    n = fields.whole("n", 1, 1, MOST_CHOICES) or 1
    stream, token_ids = fields.switch("stream"), fields.switch("return_token_ids")
    usage = _usage(fields.object("stream_options"), stream)
    stops = _stops(fields)
    seed = fields.whole("seed", None, -(2**63), 2**63 - 1)
    sampling = _sampling(fields, served)
    fields.only("frequency_penalty", (0, 0.0), _NO_PENALTY)
    fields.only("presence_penalty", (0, 0.0), _NO_PENALTY)
    fields.only("logit_bias", ({},), "is not here")
    fields.ignore("user", "safety_identifier", "prompt_cache_key")
    fields.nothing_left()
    samplings = [
        replace(
            sampling,
            max_tokens=_room(ids, most, served, usual),
            # Without a seed every prompt has noise of its own, also the same one asked twice.
            seed=secrets.randbits(63) if seed is None else seed,
        )
        for ids in prompts
    ]
    order = GenerationOrder(prompts, n, samplings, stops, likeliest)
    return ApiRequest(order, stream, usage, token_ids, likeliest is not None)


def _usage(options: dict[str, Any], stream: bool) -> bool:
    if options and not stream:
        raise wrong("stream_options", "is for stream: true")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value):
            raise wrong(f"stream_options.{name}", "is not here; include_usage is")
        if not isinstance(value, bool):
            raise wrong(f"stream_options.{name}", "is neither true nor false")
    return bool(options.get("include_usage"))


def _sampling(fields: Fields, served: Served) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0)
    if 0 < temperature < COLDEST:
        raise wrong("temperature", f"{temperature} is neither 0, which is greedy, nor at least {COLDEST}")
    top_p = fields.number("top_p", 1.0, 0, 1)
    if top_p == 0:
        raise wrong("top_p", "0 leaves no token; temperature 0 is greedy")
    top_k = fields.whole("top_k", 0, -1) or 0
    own = fields.take("stop_token_ids", [])
    if not is_ids(own):
        raise wrong("stop_token_ids", "is not a list of token ids")
    if len(own) > MOST_STOP_IDS:
        raise wrong("stop_token_ids", f"has {len(own)} tokens, over the limit of {MOST_STOP_IDS}")
    _check_known(own, "stop_token_ids", served)
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
        stop_ids=tuple(sorted({*ends, *own})),
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    found = fields.take("stop", [])
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise wrong("stop", "is neither text nor a list of texts")
    if not all(sound(stop, "stop") for stop in stops):
        raise wrong("stop", "an empty text would end every answer before it begins")
    if len(stops) > MOST_STOPS:
        raise wrong("stop", f"has {len(stops)} texts, over the limit of {MOST_STOPS}")
    return tuple(stops)


def _room(ids: Sequence[int], most: int | None, served: Served, usual: int | None) -> int:
    """Tokens that the answer may have: what was asked for, or what is left."""
    left = served.longest - len(ids)
    if left < 1 or (most is not None and most > left):
        asked = f" and {most} of the answer" if most is not None else ""
        raise ApiError(
            400,
            f"{len(ids)} tokens of the prompt{asked} are over the {served.longest} that the model takes here",
            param="max_tokens" if left >= 1 else "prompt",
            code="context_length_exceeded",
        )
    return min(left, usual or left) if most is None else most


# -- prompts


def _prompts(found: Any, special: bool, served: Served) -> list[list[int]]:
    """Text or token ids, or a list of either."""
    several = found if isinstance(found, list) and not is_ids(found) else [found]
    if is_ids(found) and not found:
        raise wrong("prompt", "is empty")
    if not several or not all(isinstance(one, str) or is_ids(one) for one in several):
        raise wrong("prompt", "is neither text nor token ids, nor a list of either")
    prompts = [
        _tokens(sound(one, "prompt"), "prompt", served, special=special) if isinstance(one, str) else list(one)
        for one in several
    ]
    for ids in prompts:
        _check_ids(ids, served)
    return prompts


def _tokens(text: str, key: str, served: Served, *, special: bool) -> list[int]:
    """Of a text that is far too long only its beginning: whoever sends one holds up the others as little as can be."""
    length = TRIED_CHARACTERS * served.longest
    while length < len(text):
        found = len(served.tokenizer(text[:length], add_special_tokens=special)["input_ids"])
        # Twice, because a word that was cut may be more tokens than the whole word is.
        if found > 2 * served.longest:
            why = f"{key}: its first {length} characters alone are {found} tokens, over the {served.longest} here"
            raise ApiError(400, why, param=key, code="context_length_exceeded")
        length *= 4
    return list(served.tokenizer(text, add_special_tokens=special)["input_ids"])


def _check_ids(ids: Sequence[int], served: Served) -> None:
    if not ids:
        raise wrong("prompt", "has no tokens")
    _check_known(ids, "prompt", served)


def _check_known(ids: Sequence[int], key: str, served: Served) -> None:
    if foreign := [token for token in ids if not 0 <= token < served.vocabulary]:
        raise wrong(key, f"token {str(foreign[0])[:20]} is none of the model's {served.vocabulary}")


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
    # OpenAI's newer name of the system's role, which templates do not know.
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


def _chat_ids(messages: list[Message], arguments: dict[str, Any], served: Served) -> list[int]:
    tokenizer = served.tokenizer
    for name in arguments:
        if name in _TEMPLATES_OWN or not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise wrong(f"chat_template_kwargs.{name}", "is no argument of the model's chat template")
    if not tokenizer.chat_template:
        raise ApiError(400, "messages: the model has no chat template; ask /v1/completions", param="messages")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
        refuse_vanished(text, messages, (), _HERE)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # A template is code that came with the model: whatever it fails by, it does not take these messages.
        raise wrong("messages", f"the chat template refuses them: {first_line(error)}") from error
    except Refusal as refusal:
        raise wrong("messages", refusal.problems[0].why) from refusal
    for number, message in enumerate(messages):
        if message.get("name", "") not in text:
            raise wrong(f"messages[{number}].name", "the model's chat template does not write it")
    ids = _tokens(sound(text, "messages"), "messages", served, special=False)
    _check_ids(ids, served)
    return ids
