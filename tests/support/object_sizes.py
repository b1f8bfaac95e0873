"""How many bytes objects hold, whatever they are made of: dataclasses, collections, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.parallel.world import World

NUMBER = 8


def sizes_of(**objects: Any) -> dict[str, int]:
    """By the path of the field that holds them (a list's items are one field). What several hold counts for the first,
    but for words and tuples, which Python makes one of or not as it likes.

    Something of an unknown kind is an error: it could hold anything.
    """
    found: dict[str, int] = {}
    seen: dict[int, Any] = {}
    for path, size in (told for name, one in objects.items() for told in _walked(name, one, seen)):
        found[path] = found.get(path, 0) + size
    return found


def _walked(path: str, one: Any, seen: dict[int, Any]) -> Iterator[tuple[str, int]]:
    if one is None or isinstance(one, bool | int | float | slice | np.number):
        yield path, NUMBER
        return
    # A view keeps all of its memory alive.
    memory = one.untyped_storage() if isinstance(one, torch.Tensor) else one
    key = memory.data_ptr() if isinstance(one, torch.Tensor) else id(one)
    if isinstance(one, World) or key in seen:
        return
    if not isinstance(one, str | tuple):
        seen[key] = memory
    match one:
        case torch.Tensor():
            yield path, memory.nbytes()
        case np.ndarray():
            yield path, (one if one.base is None else np.asarray(one.base)).nbytes
        case str() | bytes() | bytearray() | range():
            yield path, len(one) if not isinstance(one, range) else 3 * NUMBER
        case Mapping():
            for name, value in one.items():
                yield path, NUMBER
                yield from _walked(path, name, seen)
                yield from _walked(path, value, seen)
        case list() | tuple() | set() | frozenset():
            for value in one:
                yield path, NUMBER
                yield from _walked(path, value, seen)
        case _ if hasattr(one, "__dataclass_fields__"):
            # What was worked out and is kept (`cached_property`) is among them.
            for name, value in vars(one).items():
                yield from _walked(f"{path}.{name}", value, seen)
        case _:
            raise TypeError(f"{path} is a {type(one).__name__}")
