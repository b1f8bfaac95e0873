"""Checks of the options of the commands that generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.model.load import DTYPES, load_config
from lockstep.rollout.native.limits import refuse_moving_positions
from lockstep.types import Prompt


def refuse_options(dtype: str, n: int, temperature: float) -> None:
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}", code="unknown-name")
    if n > 1 and not temperature:
        raise Refusal.at(
            "--n", f"{n} greedy answers would be identical", "set --temperature too", code="identical-samples"
        )


def as_options(refusal: Refusal, options: Mapping[str, str]) -> Refusal:
    """The refusal with recipe keys replaced by command options."""

    def renamed(text: str) -> str:
        for key, option in options.items():
            text = text.replace(key, option)
        return text

    return Refusal(
        [Problem(renamed(p.where), renamed(p.why), renamed(p.remedy), code=p.code) for p in refusal.problems]
    )


def refuse_judge(folder: str, model: str) -> None:
    """Rejects a reward model, whose layers would generate noise."""
    if any(name.endswith("ForSequenceClassification") for name in load_config(folder).architectures or []):
        why = "is a reward model: it scores answers and does not generate"
        raise Refusal.at(model, why, "use it with `lockstep eval` or `lockstep serve`", code="wrong-model-kind")


def over_context(prompts: Sequence[Prompt], max_new_tokens: int, config: Any) -> list[Problem]:
    """Prompts that leave no room for an answer in the model's context."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    problems: list[Problem] = []
    for prompt in prompts:
        length = len(prompt.ids)
        if context and length + max_new_tokens > context:
            why = f"{length} tokens plus a response of {max_new_tokens} exceed the model's context of {context}"
            less = f"set --max-new-tokens to {context - length} or less, or " if length < context else ""
            problems.append(Problem(str(prompt.question.origin), why, f"{less}remove it", code="over-context"))
    return problems


def refuse_long_answers(prompts: Sequence[Prompt], max_new_tokens: int, folder: str) -> None:
    """Rejects, before loading the model, answers that exceed the context or would move cached positions."""
    config = load_config(folder)
    refuse_all(over_context(prompts, max_new_tokens, config), "rows")
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    refuse_moving_positions(config.get_text_config(), longest, config.model_type, "--max-new-tokens")
