"""What lockstep adds to vLLM's HTTP server (`--middleware lockstep_samples.SampleRoute`): one request for many samples.

vLLM's own routes take a request for each prompt, make objects for each token's log-prob, and tell of a request after
each of its tokens: with a small model that takes longer than the device does. Here each sample is told of once, when it
is finished, on a line of its own.

Runs in the server's Python, which need not have lockstep: it imports the file beside it, and vLLM when it is asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from lockstep_scheduler import LOGPROBS, SAMPLE  # type: ignore[import-not-found]

PATH = "/lockstep/samples"
_LINES = "application/x-ndjson"

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class SampleRoute:
    """ASGI middleware. POST takes `{"prompts": [[id, ...], ...], "samples": [{model, token_ids, sampling_params}]}`,
    with the number of a prompt as `token_ids`. It answers a line of JSON for each sample, in the order in which they
    finish: `{number, answer}`, or `{number, status, error}`. GET says that the route is there."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            await _answer(send, {"samples": "POST"})
        else:
            await _samples(scope["app"].state, receive, send)


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
