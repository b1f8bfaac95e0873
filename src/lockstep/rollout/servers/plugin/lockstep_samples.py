"""HTTP middleware for vLLM (`--middleware lockstep_samples.SampleRoute`): adds a route for many samples per request and
requires an API key for every route except /health.

vLLM's own routes take one request per prompt, create objects for every log-prob and produce output after every token.
With a small model, this overhead of vLLM's own routes takes longer than decoding. The route `/lockstep/samples` returns
one line per sample when the sample is finished.

vLLM's own API key protects only the OpenAI routes. The routes that a run needs (`/collective_rpc` and others of
VLLM_SERVER_DEV_MODE) let any client load weights and open files, so the middleware requires the key for these routes
too.

The middleware runs in the server's Python, which may not have lockstep installed. So at its start the middleware
imports only files of this folder. It imports vLLM on the first request.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import io
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from lockstep_scheduler import LOGPROBS, SAMPLE  # type: ignore[import-not-found]

PATH = "/lockstep/samples"
KEY_VARIABLE = "LOCKSTEP_SERVER_KEY"
_NO_KEY = f"the server has no key: start the server and the run with the same {KEY_VARIABLE} in their environment"
_WRONG_KEY = f"the key is missing or wrong (Authorization: Bearer KEY): start the run with the server's {KEY_VARIABLE}"
_LINES = "application/x-ndjson"

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class SampleRoute:
    """ASGI middleware. POST takes `{"prompts": [[id, ...], ...], "samples": [{model, token_ids, sampling_params}]}`,
    where `token_ids` is the index of a prompt. A prompt with images has one placeholder token per image; `images` of
    the request has the image files as base64 text, and `image_order` of a sample has the keys of its images. The
    response has one line of JSON per sample (`{number, answer}` or `{number, status, error}`), in the order in which
    the samples finish. A GET request succeeds, which shows that the server has this route.

    Every request except GET and HEAD of /health needs the key in the server's environment variable
    LOCKSTEP_SERVER_KEY."""

    def __init__(self, app: Any):
        self._app = app
        self._key = os.environ.get(KEY_VARIABLE, "")

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not self._is_authorized(scope):
            await self._refuse(scope, send)
        elif scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            await _answer(send, {"samples": "POST"})
        else:
            await _samples(scope["app"].state, receive, send)

    def _is_authorized(self, scope: dict[str, Any]) -> bool:
        if scope["type"] == "http" and scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
            return True
        keys = [value for name, value in scope["headers"] if name.lower() == b"x-lockstep-key"]
        if self._key and len(keys) == 1 and hmac.compare_digest(keys[0], self._key.encode()):
            return True
        authorizations = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, key = (authorizations[0] if len(authorizations) == 1 else b"").partition(b" ")
        # If the server has no key, all requests are rejected.
        same = hmac.compare_digest(key.strip(), self._key.encode())
        return bool(self._key) and scheme.lower() == b"bearer" and same

    async def _refuse(self, scope: dict[str, Any], send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, {"error": _WRONG_KEY if self._key else _NO_KEY}, status=401 if self._key else 403)


async def _samples(state: Any, receive: Receive, send: Send) -> None:
    try:
        body = json.loads(await _body(receive))
        wanted = [{**sample, "token_ids": body["prompts"][sample["token_ids"]]} for sample in body["samples"]]
        if body.get("images"):
            images = await asyncio.to_thread(_opened, body["images"])
            for sample in wanted:
                sample["images"] = {key: images[key] for key in sample.get("image_order", ())}
    except (ValueError, LookupError, TypeError, OSError) as error:
        await _answer(send, {"error": f"malformed request: {error!r}"}, status=400)
        return
    # None in the queue means that the client has disconnected.
    finished: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    batch = uuid.uuid4().hex
    tasks = [
        asyncio.create_task(_sample(state, f"{SAMPLE}{batch}-{number}", number, item, finished))
        for number, item in enumerate(wanted)
    ]
    tasks.append(asyncio.create_task(_wait_for_disconnect(receive, finished)))
    try:
        await _begin(send, 200, _LINES)
        left = len(wanted)
        while left:
            ready = [await finished.get()]
            while not finished.empty():
                ready.append(finished.get_nowait())
            answers = [item for item in ready if item is not None]
            left -= len(answers)
            if len(answers) < len(ready):
                return
            await _piece(send, b"".join(json.dumps(item).encode() + b"\n" for item in answers), more=left > 0)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _sample(
    state: Any, name: str, number: int, wanted: dict[str, Any], finished: asyncio.Queue[dict[str, Any] | None]
) -> None:
    try:
        outcome: dict[str, Any] = {"answer": await _generated(state, name, **wanted)}
    except Exception as error:  # noqa: BLE001 - the error is sent to the run, which ends or retries
        outcome = {
            "status": 400 if _is_client_error(error) else 500,
            "error": f"{type(error).__name__}: {error}"[:2000],
        }
    finished.put_nowait({"number": number, **outcome})


def _opened(images: dict[str, str]) -> dict[str, Any]:
    """Returns PIL images, rotated as their EXIF data says, as the run reads them."""
    from PIL import Image, ImageOps

    found = {}
    for key, text in images.items():
        with Image.open(io.BytesIO(base64.b64decode(text, validate=True))) as image:
            found[key] = ImageOps.exif_transpose(image).convert("RGB")
    return found


async def _generated(
    state: Any,
    name: str,
    model: str,
    token_ids: list[int],
    sampling_params: dict[str, Any],
    image_order: list[str] | None = None,
    images: dict[str, Any] | None = None,
) -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # vLLM shall return one final output with flat log-probs, and shall not copy the sampling parameters.
    kind = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**sampling_params, output_kind=kind, flat_logprobs=True, skip_clone=True)
    if params.stop:
        # vLLM's front end searches for stop strings and needs each token, so the output of this request must not be
        # buffered. A request id without the prefix SAMPLE disables the buffering.
        name = f"text-{name}"
    final = None
    adapter = _adapter(state.openai_serving_models, model)
    prompt = await _prompt(state.engine_client, token_ids, [(images or {})[key] for key in image_order or ()])
    async for output in state.engine_client.generate(prompt, params, name, lora_request=adapter):
        final = output
    if final is None:
        raise RuntimeError("the engine returned no output for a sample")
    (made,) = final.outputs
    return {
        "token_ids": list(made.token_ids),
        "logprobs": _logprobs(final),
        "finish_reason": made.finish_reason,
        "stop_reason": made.stop_reason,
        # The run compares this digest with the digest of the prompt that it requested.
        "prompt": prompt_digest(final.prompt_token_ids),
        # The tokens that vLLM made of a prompt with images, so that the run can name the first difference.
        "prompt_ids": list(final.prompt_token_ids) if image_order else None,
        "cached": getattr(final, "num_cached_tokens", None),
        # Newer versions of vLLM report the weight version of each token.
        "versions": [span.version for span in getattr(made, "weight_versions", None) or ()] or None,
        **_routes(getattr(made, "routed_experts", None)),
    }


def _routes(routes: Any) -> dict[str, Any]:
    """Returns the experts of each token (--enable-return-routed-experts) as base64 of little-endian int16."""
    if routes is None:
        return {}
    return {"routes": base64.b64encode(routes.astype("<i2").tobytes()).decode(), "route_shape": list(routes.shape)}


async def _prompt(client: Any, token_ids: list[int], images: list[Any]) -> Any:
    """Returns the input of the engine. Newer versions of vLLM process images in threads, before the request."""
    from vllm.inputs import tokens_input

    if not images:
        return tokens_input(token_ids)
    prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}
    renderer: Any = getattr(client, "renderer", None)
    if not hasattr(renderer, "render_cmpl_async"):
        return prompt
    (rendered,) = await renderer.render_cmpl_async([prompt])
    return rendered


def prompt_digest(ids: list[int]) -> str:
    """Returns the same digest as `prompt_digest` of `adapter.py`."""
    return hashlib.sha256(json.dumps(list(ids), separators=(",", ":")).encode()).hexdigest()[:16]


def _is_client_error(error: Exception) -> bool:
    """Returns whether the error means that the request is invalid, so that a retry would fail too. For invalid
    requests, newer vLLM versions raise subclasses of a special base class, and older versions raise ValueError."""
    from vllm import exceptions

    names = ("VLLMClientError", "VLLMValidationError", "VLLMNotFoundError")
    kinds = [getattr(exceptions, name) for name in names if hasattr(exceptions, name)]
    return isinstance(error, (ValueError, TypeError, LookupError, *kinds))


def _logprobs(final: Any) -> list[float]:
    (made,) = final.outputs
    packed = (final.kv_transfer_params or {}).get(LOGPROBS)
    if packed is not None:
        return list(memoryview(packed).cast("d"))
    # The first entry at each position is the sampled token.
    flat = made.logprobs
    if [flat.token_ids[start] for start in flat.start_indices] != list(made.token_ids):
        raise RuntimeError("vLLM returned log-probs of tokens that were not sampled")
    return [flat.logprobs[start] for start in flat.start_indices]


def _adapter(models: Any, model: str) -> Any:
    """Returns the LoRA request for a model name, or None for the base model."""
    return None if models.is_base_model(model) else models.lora_requests[model]


# -- ASGI


async def _body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _wait_for_disconnect(receive: Receive, finished: asyncio.Queue[dict[str, Any] | None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    finished.put_nowait(None)


async def _begin(send: Send, status: int, kind: str) -> None:
    headers = [(b"content-type", kind.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _piece(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _answer(send: Send, body: dict[str, Any], status: int = 200) -> None:
    await _begin(send, status, "application/json")
    await _piece(send, json.dumps(body).encode(), more=False)
