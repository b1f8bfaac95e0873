"""What a server could not do."""

from __future__ import annotations


class ServerFailed(Exception):
    """A server did not do what it was asked. `lost`: it may be gone or broken, and another one could. `gone`: looks at
    it have found nobody for a while."""

    def __init__(self, why: str, *, lost: bool = False, status: int | None = None, gone: bool = False):
        super().__init__(why)
        self.lost, self.status, self.gone = lost, status, gone
