"""The reward part `function`: a user's function in killable processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal, with_secrets
from lockstep.functions import Unloadable, located, only_here
from lockstep.recipe.keys_online import Reward
from lockstep.reward.function_pool import LocalCalls, Pool, Target
from lockstep.reward.function_worker import CALL, Given, Raised, as_reward_function, prompt_text
from lockstep.reward.parts import PartOutcome, RewardPart, promised
from lockstep.types import Failure, Question


class FunctionPart(RewardPart):
    """Calls `f(data_source=, solution_str=, ground_truth=, extra_info=)` for each response in worker processes, or
    `f(queries=, prompts=, labels=)` with lists of one if that is its signature.

    `name` is the part of scores and failures; `reference` is `path/to/file.py:name` from the setting `key`.
    `output`-N.log keeps the last output lines of process N, if the parent folder exists. A function that only exists in
    this process (`only_here`) is called in it.
    """

    def __init__(
        self,
        reference: str,
        settings: Reward,
        *,
        name: str = "function",
        key: str = "reward.function",
        output: Path | None = None,
    ):
        self.name = name
        # The arguments of the recipe are for the user's function, not for built-in rules.
        arguments = settings.arguments if key == "reward.function" else {}
        self._arguments = {
            name: with_secrets(value, f"reward.arguments.{name}") if isinstance(value, str) else value
            for name, value in arguments.items()
        }
        function = only_here(reference)
        self._pool: Pool | LocalCalls
        if function is not None:
            self._pool = _local_calls(function, reference, key, settings, tuple(arguments))
            self.note = (
                f"reward {name}: {reference} is defined in this script or notebook and runs in its process: no memory "
                "limit, and a call over reward.time_limit fails but keeps its thread. A function in a separate file "
                "has both limits"
            )
            return
        path, word = located(reference, key)
        target = Target(str(path), word, settings.time_limit, settings.memory_limit_gb, output, key, tuple(arguments))
        self._pool = Pool(target, settings.workers)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        call = {
            "prompt": prompt_text(question.prompt),
            "data_source": question.data_source,
            "solution_str": text,
            "ground_truth": question.ground_truth,
            "extra_info": question.extra_info,
            **self._arguments,
        }
        future = promised()
        self._pool.submit(call).add_done_callback(lambda done: future.set_result(self._outcome(done.result())))
        return future

    def close(self) -> None:
        self._pool.close()

    def _outcome(self, answer: Given | Raised) -> PartOutcome:
        if isinstance(answer, Raised):
            return Failure(self.name, answer.why, answer.log)
        return {self.name: answer.score, **{f"{self.name}/{key}": value for key, value in answer.more.items()}}


def _local_calls(
    function: Callable[..., Any], reference: str, key: str, settings: Reward, extra: tuple[str, ...]
) -> LocalCalls:
    file, _, name = reference.rpartition(":")
    try:
        usable = as_reward_function(function, name, (*CALL, *extra))
    except Unloadable as error:
        raise Refusal.at(f"{key} {reference}", error.why, error.remedy, code=error.code) from error
    return LocalCalls(usable, file, settings.time_limit)
