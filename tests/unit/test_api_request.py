"""Checks of requests without a model: the keys of a body, the caller, and the events of a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lockstep.http_server.http_api import ApiError, HttpRequest, as_events, check_caller, is_loopback
from lockstep.http_server.request_body import BodyReader, check_model, valid_text


def reader(**keys: Any) -> BodyReader:
    return BodyReader(json.dumps(keys).encode())


@pytest.mark.parametrize(
    ("read", "keys", "value"),
    [
        (lambda body: body.number("x", 0.5, 0, 1), {}, 0.5),
        (lambda body: body.number("x", 0.5, 0, 1), {"x": None}, 0.5),
        (lambda body: body.number("x", 0.5, 0, 1), {"x": 1}, 1.0),
        (lambda body: body.integer("x", None, 1), {}, None),
        (lambda body: body.integer("x", None, 1), {"x": 3}, 3),
        (lambda body: body.boolean("x"), {}, False),
        (lambda body: body.boolean("x"), {"x": True}, True),
        (lambda body: body.text("x", "y"), {}, "y"),
        (lambda body: body.object("x"), {"x": {"a": 1}}, {"a": 1}),
        (lambda body: body.accept_only("x", (0, []), "no"), {"x": []}, None),
    ],
)
def test_a_key_is_read(read: Callable[[BodyReader], Any], keys: dict[str, Any], value: Any) -> None:
    body = reader(**keys)
    assert read(body) == value
    body.check_all_read()


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (lambda body: body.number("x", 0.5, 0, 1), 1.5),
        (lambda body: body.number("x", 0.5, 0, 1), -0.1),
        (lambda body: body.number("x", 0.5, 0), True),
        (lambda body: body.number("x", 0.5, 0), "1"),
        (lambda body: body.number("x", 0.5, 0), float("nan")),
        (lambda body: body.number("x", 0.5, 0), float("inf")),
        (lambda body: body.integer("x", None, 1), 1.0),
        (lambda body: body.integer("x", None, 1), False),
        (lambda body: body.integer("x", None, 1, 4), 5),
        (lambda body: body.boolean("x"), 1),
        (lambda body: body.text("x"), 5),
        (lambda body: body.object("x"), []),
        (lambda body: body.accept_only("x", (0,), "no"), 1),
        (lambda body: body.check_all_read(), 1),
    ],
)
def test_a_wrong_value_is_reported_with_its_key(read: Callable[[BodyReader], Any], value: Any) -> None:
    with pytest.raises(ApiError) as error:
        read(reader(x=value))
    assert (error.value.status, error.value.param) == (400, "x")
    assert str(error.value).startswith("x: ")


def test_a_missing_key_and_a_body_that_is_no_object() -> None:
    with pytest.raises(ApiError, match="x: is missing"):
        reader().take("x")
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(ApiError) as error:
            BodyReader(body)
        assert error.value.status == 400
    with pytest.raises(ApiError) as error:
        check_model(reader(model="x" * 10_000), ("mine",))
    assert (error.value.status, error.value.code) == (404, "model_not_found")
    assert len(str(error.value)) < 400
    with pytest.raises(ApiError, match="surrogate"):
        valid_text("\ud83d", "prompt")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None),
        ({"host": "localhost:8000"}, None),
        ({"host": "127.0.0.1", "origin": "http://127.0.0.1:3000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"host": "127.8.9.1"}, None),
        ({"host": "evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "127.0.0.1", "origin": "http://evil.example"}, 403),
        ({"host": "127.0.0.1", "origin": "null"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": ""}, 403),
        ({"host": "10.0.0.1"}, 403),
    ],
)
def test_without_a_key_only_this_machine_may_call(headers: dict[str, str], status: int | None) -> None:
    request = HttpRequest("POST", "/v1/completions", headers)
    if status is None:
        check_caller(request, None)
        return
    with pytest.raises(ApiError) as error:
        check_caller(request, None)
    assert error.value.status == status
    assert "--api-key" in str(error.value)


def test_a_key_replaces_the_check_of_the_host() -> None:
    headers = {"host": "evil.example", "authorization": "Bearer s3cret"}
    check_caller(HttpRequest("POST", "/v1/completions", headers), "s3cret")
    for given in ("Bearer s3cre", "Bearer s3cret2", "Bearer é", ""):
        with pytest.raises(ApiError) as error:
            check_caller(HttpRequest("POST", "/v1/completions", {"authorization": given}), "s3cret")
        assert error.value.status == 401
        assert "s3cret" not in str(error.value)


def test_addresses_of_this_machine() -> None:
    hosts = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "10.1.1.1", "x")
    assert [host for host in hosts if is_loopback(host)] == ["localhost", "127.0.0.1", "::1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_ends_with_done_or_with_its_error(fails: bool) -> None:
    async def events() -> AsyncIterator[dict[str, int]]:
        yield {"number": 1}
        if fails:
            raise ApiError(504, "too late", code="timeout")

    async def lines() -> list[bytes]:
        body = as_events(events(), lambda: None).body
        assert not isinstance(body, bytes)
        return [line async for line in body]  # type: ignore[union-attr]

    first, last = asyncio.run(lines())
    assert first == b'data: {"number": 1}\n\n'
    if fails:
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "timeout"
    else:
        assert last == b"data: [DONE]\n\n"
