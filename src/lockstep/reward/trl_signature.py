"""Reward functions with TRL's signature, `reward(completions, **kwargs)`, which score a batch of responses per call.

As in TRL, a function gets `prompts`, `completions` and `trainer_state`, and each column of the rows as a list. All
arguments are passed by keyword. The worker process of a reward function imports this module, so this module imports no
large packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.functions import Unloadable

if TYPE_CHECKING:
    from lockstep.types import Question

COMPLETIONS = "completions"
_PASSED = ("prompts", COMPLETIONS, "trainer_state")
# Arguments of TRL that lockstep does not have when it scores a text.
_NOT_PASSED = ("completion_ids", "environments", "log_extra", "log_metric")
# A dataset column with one of these names is not passed to the function, because the name is an argument of TRL.
_NO_COLUMNS = frozenset({"prompt", "completion", *_PASSED, *_NOT_PASSED})
# For each other supported signature: an argument that only this signature has, and the owner of the signature.
_OTHERS = {"solution_str": "verl's", "queries": "OpenRLHF's"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class TrainerState:
    """The fields of transformers' `TrainerState` that lockstep knows: `global_step` counts finished steps."""

    def __init__(self, global_step: int, max_steps: int):
        self.global_step, self.max_steps = global_step, max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"lockstep's trainer_state has global_step and max_steps, but not {name}")


class TrlFunction:
    """A reward function with TRL's signature. A call scores a batch of responses."""

    def __init__(self, function: Callable[..., Any], name: str, arguments: Sequence[str]):
        """`arguments` are the names of `reward.arguments`. Raises `Unloadable` if the function cannot be called as in
        TRL."""
        parameters = inspect.signature(function).parameters
        self._function = function
        self._open = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self._names = {key for key, one in parameters.items() if one.kind in _NAMED}
        self._needed = [
            key
            for key, one in parameters.items()
            if one.default is inspect.Parameter.empty
            and one.kind in (*_NAMED, inspect.Parameter.POSITIONAL_ONLY)
            and key not in (*_PASSED, *arguments)
        ]
        if COMPLETIONS not in self._names:
            raise _unusable(name, f"{COMPLETIONS} is passed by keyword, but {name} takes it only by position")
        for key in self._needed:
            if key in _NOT_PASSED:
                raise _unusable(name, f"{name} needs {key}, which lockstep does not pass")
        for key in arguments:
            if not self._open and key not in self._names:
                raise _unusable(name, f"{name} has no argument {key}, which reward.arguments sets")

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        columns: Mapping[str, list[Any]],
        trainer_state: tuple[int, int] | None,
        arguments: Mapping[str, Any],
    ) -> Any:
        missing = [name for name in self._needed if name not in columns]
        if missing:
            there = ", ".join(columns) or "no other columns"
            raise ValueError(f"needs the column {', '.join(missing)}, and the rows have {there}")
        twice = [name for name in arguments if name in columns]
        if twice:
            raise ValueError(f"reward.arguments.{twice[0]} has the name of a column")
        state = None if trainer_state is None else TrainerState(*trainer_state)
        given = {"prompts": prompts, COMPLETIONS: completions, "trainer_state": state, **columns, **arguments}
        return self._function(**{name: value for name, value in given.items() if self._open or name in self._names})


def is_trl(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function has TRL's signature: an argument `completions`. Raises `Unloadable` if the function
    also has an argument of another signature."""
    try:
        names = inspect.signature(function).parameters
    except ValueError:
        return False
    if COMPLETIONS not in names:
        return False
    for word, whose in _OTHERS.items():
        if word in names:
            raise Unloadable(
                f"{name} has arguments of two signatures: {COMPLETIONS} is TRL's, {word} is {whose}",
                f"keep one of them: def {name}({COMPLETIONS}, **kwargs), "
                f"def {name}(data_source, solution_str, ground_truth, extra_info) "
                f"or def {name}(queries, prompts, labels)",
                code="invalid-function",
            )
    return True


def batch_call(
    responses: Sequence[tuple[Question, str]], trainer_state: tuple[int, int] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a `TrlFunction` for these responses. As in TRL, a completion is a text if the prompt
    column of its row is a text, and a list with an assistant message if the prompt is a chat."""
    rows = [question.columns or {"prompt": question.prompt} for question, _ in responses]
    images = [question.images for question, _ in responses]
    prompts = [row["prompt"] for row in rows]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _NO_COLUMNS]
    return {
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, (_, text) in zip(prompts, responses, strict=True)
        ],
        "columns": {name: [row.get(name) for row in rows] for name in names},
        "trainer_state": trainer_state,
        "arguments": dict(arguments),
        **({"images": images} if any(images) else {}),
    }


def _unusable(name: str, why: str) -> Unloadable:
    return Unloadable(why, f"write: def {name}({COMPLETIONS}, **kwargs)", code="invalid-function")
