"""Who may ask: whoever has the key; without a key only this machine, and no page of a browser."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from lockstep.serve.http import HttpRequest
from lockstep.serve.limits import ListenAddress, is_loopback
from lockstep.serve.replies import ApiError


def check_caller(request: HttpRequest, address: ListenAddress) -> None:
    """Refuse who may not ask."""
    if address.api_key is not None:
        if request.method in ("GET", "HEAD") and request.path.rstrip("/") == "/health":
            return  # supervisors and load balancers ask for it, without a key
        # The name of the scheme is read in any case (RFC 7235).
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        if not hmac.compare_digest(given.encode(), address.api_key.encode()):
            raise ApiError(401, "the key is missing or wrong (Authorization: Bearer KEY)", code="invalid_api_key")
        return
    # Any page that a browser shows can send requests to this machine, also under a name of its own for it.
    for name in ("host", "origin"):
        said = request.headers.get(name)
        if said is not None and not is_loopback(_host(said)):
            raise ApiError(403, f"{name} {said[:80]!r} is not this machine; set --api-key to be asked from elsewhere")


def _host(said: str) -> str:
    try:
        return urlsplit(said if "://" in said else f"//{said}").hostname or ""
    except ValueError:
        return ""
