"""How the endpoint is reached and what it takes: every limit has a clear answer where it is met."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from lockstep.errors import Refusal


@dataclass(frozen=True)
class ServeLimits:
    """`body_bytes` of a request; `queue` sequences that wait or run at once; `seconds` that a request may take, from
    its last byte to that of its answer; `idle_seconds` for a client to send a whole request, and between two."""

    body_bytes: int = 16 * 2**20
    queue: int = 256
    seconds: float = 600.0
    idle_seconds: float = 75.0
    connections: int = 1024


@dataclass(frozen=True)
class ListenAddress:
    """Where the endpoint listens, and the key that it asks for. Port 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not self.loopback and not self.api_key:
            raise Refusal.at(
                "--host",
                f"{self.host} can be reached from other machines, and whoever reaches it could use the model",
                "set --api-key (or LOCKSTEP_API_KEY), or leave --host at 127.0.0.1",
            )

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine itself reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
