"""What lockstep adds to vLLM's HTTP server (`--middleware lockstep_samples.SampleRoute`): one request for many samples,
and a key that every route but /health asks for.

vLLM's own routes take a request for each prompt, make objects for each token's log-prob, and tell of a request after
each of its tokens: with a small model that takes longer than the device does. Here each sample is told of once, when it
is finished, on a line of its own.

vLLM's own key guards the routes of OpenAI's API alone. Those that a run needs (`/collective_rpc` and the others of
VLLM_SERVER_DEV_MODE) load weights and open files for whoever reaches the port.

Runs in the server's Python, which need not have lockstep: it imports the file beside it, and vLLM when it is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from lockstep_scheduler import LOGPROBS, SAMPLE  # type: ignore[import-not-found]

PATH = "/lockstep/samples"
KEY_VARIABLE = "LOCKSTEP_SERVER_KEY"
_NO_KEY = f"the server has no key: start it with {KEY_VARIABLE} in its environment, and the run with the same"
_WRONG_KEY = f"the key is missing or wrong (Authorization: Bearer KEY): start the run with the server's {KEY_VARIABLE}"
_LINES = "application/x-ndjson"

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class SampleRoute:
    """ASGI middleware. POST takes `{"prompts": [[id, ...], ...], "samples": [{model, token_ids, sampling_params}]}`,
    with the number of a prompt as `token_ids`. It answers a line of JSON for each sample, in the order in which they
    finish: `{number, answer}`, or `{number, status, error}`. GET says that the route is there.

    Every request but GET /health must bring the key of the server's environment."""

    def __init__(self, app: Any):
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._may_ask(scope):
            await self._refuse(scope, send)
        elif scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            await _answer(send, {"samples": "POST"})
        else:
            await _samples(scope["app"].state, receive, send)

    def _may_ask(self, scope: dict[str, Any]) -> bool:
        if scope["type"] == "http" and scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            return True
        own = [value for name, value in scope["headers"] if name.lower() == b"x-lockstep-key"]
        if self._key and len(own) == 1 and hmac.compare_digest(own[0], self._key.encode()):
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        # Without a key nobody may: an empty one is none.
        same = hmac.compare_digest(key.strip(), self._key.encode())
        return bool(self._key) and scheme.lower() == b"bearer" and same

    async def _refuse(self, scope: dict[str, Any], send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, {"error": _WRONG_KEY if self._key else _NO_KEY}, status=401 if self._key else 403)


async def _samples(state: Any, receive: Receive, send: Send) -> None:
    try:
        said = json.loads(await _body(receive))
        wanted = [{**sample, "token_ids": said["prompts"][sample["token_ids"]]} for sample in said["samples"]]
    except (ValueError, LookupError, TypeError) as error:
        await _answer(send, {"error": f"no list of samples: {error!r}"}, status=400)
        return
    # None: whoever asked has gone.
    finished: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    asked = uuid.uuid4().hex
    tasks = [
        asyncio.create_task(_sample(state, f"{SAMPLE}{asked}-{number}", number, one, finished))
        for number, one in enumerate(wanted)
    ]
    tasks.append(asyncio.create_task(_gone(receive, finished)))
    try:
        await _begin(send, 200, _LINES)
        left = len(wanted)
        while left:
            ready = [await finished.get()]
            while not finished.empty():
                ready.append(finished.get_nowait())
            told = [one for one in ready if one is not None]
            left -= len(told)
            if len(told) < len(ready):
                return
            await _piece(send, b"".join(json.dumps(one).encode() + b"\n" for one in told), more=left > 0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample(
    state: Any, name: str, number: int, wanted: dict[str, Any], finished: asyncio.Queue[dict[str, Any] | None]
) -> None:
    try:
        said: dict[str, Any] = {"answer": await _generated(state, name, **wanted)}
    except Exception as error:  # noqa: BLE001 - told to the run: it ends, or asks again
        said = {"status": 400 if _is_of_the_request(error) else 500, "error": f"{type(error).__name__}: {error}"[:2000]}
    finished.put_nowait({"number": number, **said})


async def _generated(
    state: Any, name: str, model: str, token_ids: list[int], sampling_params: dict[str, Any]
) -> dict[str, Any]:
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # Told of once; log-probs as plain lists; nobody else has these settings, so that they need not be copied.
    kind = RequestOutputKind.FINAL_ONLY
    how = SamplingParams(**sampling_params, output_kind=kind, flat_logprobs=True, skip_clone=True)
    if how.stop:
        # Texts are looked for where the tokens are told: they must come as they are drawn.
        name = f"text-{name}"
    final = None
    adapter = _adapter(state.openai_serving_models, model)
    async for told in state.engine_client.generate(tokens_input(token_ids), how, name, lora_request=adapter):
        final = told
    if final is None:
        raise RuntimeError("the engine said nothing of a sample")
    (made,) = final.outputs
    return {
        "token_ids": list(made.token_ids),
        "logprobs": _logprobs(final),
        "finish_reason": made.finish_reason,
        "stop_reason": made.stop_reason,
        # Of the prompt that the engine answered: the run holds it against the one that it asked.
        "prompt": prompt_digest(final.prompt_token_ids),
        # Versions that know of it tell which weights drew which tokens.
        "versions": [span.version for span in getattr(made, "weight_versions", None) or ()] or None,
    }


def prompt_digest(ids: list[int]) -> str:
    """As `dialect.prompt_digest` of the run computes it."""
    return hashlib.sha256(json.dumps(list(ids), separators=(",", ":")).encode()).hexdigest()[:16]


def _is_of_the_request(error: Exception) -> bool:
    """Asking again would give the same. Newer versions have a class above all of these, older ones ValueErrors."""
    from vllm import exceptions

    names = ("VLLMClientError", "VLLMValidationError", "VLLMNotFoundError")
    kinds = [getattr(exceptions, name) for name in names if hasattr(exceptions, name)]
    return isinstance(error, (ValueError, TypeError, LookupError, *kinds))


def _logprobs(final: Any) -> list[float]:
    (made,) = final.outputs
    said = (final.kv_transfer_params or {}).get(LOGPROBS)
    if said is not None:
        return list(memoryview(said).cast("d"))
    # The sampled token stands first at each position.
    flat = made.logprobs
    if [flat.token_ids[start] for start in flat.start_indices] != list(made.token_ids):
        raise RuntimeError("vLLM gave log-probs of other tokens than the sampled ones")
    return [flat.logprobs[start] for start in flat.start_indices]


def _adapter(models: Any, model: str) -> Any:
    """None for the model itself."""
    return None if models.is_base_model(model) else models.lora_requests[model]


# -- ASGI


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _gone(receive: Receive, finished: asyncio.Queue[dict[str, Any] | None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    finished.put_nowait(None)


async def _begin(send: Send, status: int, kind: str) -> None:
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _piece(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _answer(send: Send, said: dict[str, Any], status: int = 200) -> None:
    await _begin(send, status, "application/json")
    await _piece(send, json.dumps(said).encode(), more=False)
