"""What the options of the commands that generate cannot mean."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.errors import Refusal
from lockstep.model.load import DTYPES, load_config
from lockstep.rollout.native.positions import refuse_moving_positions
from lockstep.types import Prompt


def refuse_options(dtype: str, n: int, temperature: float) -> None:
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}")
    if n > 1 and not temperature:
        raise Refusal.at("--n", f"{n} greedy answers would all be the same", "give a --temperature too")


def refuse_long_answers(prompts: Sequence[Prompt], max_new_tokens: int, folder: str) -> None:
    """Before the model is loaded: answers in which the positions of cached keys would move."""
    config = load_config(folder)
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    refuse_moving_positions(config.get_text_config(), longest, config.model_type, "--max-new-tokens")
