"""What a server could not do."""

from __future__ import annotations


class ServerFailed(Exception):
    """A server did not do what it was asked. `lost`: it may be gone or broken, and another one could."""

    def __init__(self, why: str, *, lost: bool = False, status: int | None = None):
        super().__init__(why)
        self.lost, self.status = lost, status
