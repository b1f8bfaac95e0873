"""What the options of the commands that generate cannot mean."""

from __future__ import annotations

from lockstep.errors import Refusal
from lockstep.model.load import DTYPES


def refuse_options(dtype: str, n: int, temperature: float) -> None:
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}")
    if n > 1 and not temperature:
        raise Refusal.at("--n", f"{n} greedy answers would all be the same", "give a --temperature too")
