"""What a user's function gives, where it is `async` too."""

from __future__ import annotations

import inspect
from typing import Any


def awaited(value: Any) -> Any:
    """The value itself, or that of an awaitable."""
    if not inspect.isawaitable(value):
        return value
    # Importing it takes nearly as long as all else that a process needs to call functions, and few of them need it.
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())
