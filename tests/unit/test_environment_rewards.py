"""Rewards of trajectories: the text of the model alone, the parts that an environment gives, and their weights."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hand_rollouts import question
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.parts import PartOutcome, RewardPart, StepOutcome, settled
from lockstep.reward.scorer import Scorer, active_weights
from lockstep.rollout.collect import collect
from lockstep.trajectory import Trajectory, TurnRecord
from lockstep.types import Completion, Failure, Prompt, Question, Request, Rollout, Sampling, Score

CPU = torch.device("cpu")
# The calculator gives the right answer, in the format of the rule. The model does not repeat it.
TOOL = "#### 4"
MODEL = ["<tool_call>2+2</tool_call>", "I do not know."]
CONVERSATION = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": MODEL[0]},
    {"role": "tool", "content": TOOL},
    {"role": "assistant", "content": MODEL[1]},
]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def encoded(*texts: str) -> list[int]:
    return [ord(letter) for text in texts for letter in text]


def completion(
    turns: list[str], tool: str = TOOL, rewards: tuple[float, float] = (0.25, 0.5), **more: Any
) -> Completion:
    """A completion of two turns of the model with the result of a tool between them."""
    first, second = turns
    ids = encoded(first, tool, second)
    mask = [1] * len(first) + [0] * len(tool) + [1] * len(second)
    records = [
        TurnRecord(0, len(first), rewards[0]),
        TurnRecord(len(first) + len(tool), len(ids), rewards[1]),
    ]
    trajectory = Trajectory(
        [
            *CONVERSATION[:1],
            {"role": "assistant", "content": first},
            CONVERSATION[2],
            {"role": "assistant", "content": second},
        ],
        records,
        "completed",
        info={"calls": 1},
        state={"value": 4},
        **more,
    )
    return Completion(0, 0, ids, [-0.1] * len(ids), "token", mask, trajectory=trajectory)


class Said:
    """An engine that returns a given completion."""

    instead = ""

    def __init__(self, answer: Completion):
        self.answer = answer

    def generate(self, requests: list[Request], sampling: Sampling) -> Any:
        yield self.answer


class _Steps(RewardPart):
    """A reward whose second step ends with the text."""

    name = "process"

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        return settled(StepOutcome({self.name: 3.0}, [(5, 1.0), (len(text), 2.0)]))


def scored(settings: Reward, answer: Completion, scorer: Scorer | None = None) -> Rollout:
    """The rollout that a run makes of a completion with an environment."""
    asked = question()
    opened = scorer or Scorer.open(settings, [asked.data_source], CPU, environment=True)
    with opened as judge:
        prompt = Prompt(asked, [1, 2])
        found = collect(
            Said(answer),
            judge,
            [prompt],
            [0],
            1,
            Sampling(99),
            World(),
            decode,
            lambda phase: nullcontext(),  # type: ignore[arg-type]
        )
    return found.rollouts[0]


def test_the_output_of_a_tool_does_not_satisfy_a_rule() -> None:
    settings = Reward(weights={"rule": 1.0, "environment": 0.0})
    rollout = scored(settings, completion(MODEL))
    assert rollout.text == "\n\n".join(MODEL)
    assert isinstance(rollout.score, Score)
    assert rollout.score.parts["rule"] == 0.0
    answered = scored(settings, completion([MODEL[0], "The answer is #### 4"]))
    assert isinstance(answered.score, Score)
    assert answered.score.parts["rule"] == 1.0


FUNCTIONS = """
def of_verl(data_source, solution_str, ground_truth, extra_info):
    assert "#### 4" not in solution_str
    assert [one["role"] for one in extra_info["messages"]] == ["user", "assistant", "tool", "assistant"]
    return float(extra_info["state"]["value"] + extra_info["info"]["calls"])

def of_openrlhf(queries, prompts, labels, messages=None, state=None, info=None):
    assert "#### 4" not in queries[0]
    assert messages[0][2]["content"] == "#### 4"
    return [float(state[0]["value"] + info[0]["calls"])]

def of_trl(completions, messages, state, info, **kwargs):
    assert "#### 4" not in completions[0][0]["content"]
    assert messages[0][2]["content"] == "#### 4"
    return [float(state[0]["value"] + info[0]["calls"])]
"""


@pytest.mark.parametrize("name", ["of_verl", "of_openrlhf", "of_trl"])
def test_functions_of_all_signatures_see_the_speakers_apart(name: str, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    settings = Reward(function=f"{tmp_path}/rewards.py:{name}", weights={"environment": 0.0})
    asked = replace(question(), columns={"prompt": question().prompt, "level": 1})
    trajectory = completion(MODEL).trajectory
    with Scorer.open(settings, [asked.data_source], CPU, environment=True) as scorer:
        waiting = scorer.submit(asked, "\n\n".join(MODEL), trajectory)
        scorer.flush()
        found = waiting.result(20)
    assert isinstance(found, Score), found
    assert found.total == 5.0


def asked_with(**fields: Any) -> Question:
    return replace(question(), columns={"prompt": question().prompt, **fields.pop("columns", {})}, **fields)


@pytest.mark.parametrize(
    ("name", "fields", "field"),
    [
        ("of_verl", {"extra_info": {"state": 1}}, "extra_info.state"),
        ("of_openrlhf", {"extra_info": {"info": 1}}, "extra_info.info"),
        ("of_trl", {"columns": {"messages": "mine"}}, "messages"),
        ("of_trl", {"columns": {"state": None}}, "state"),
    ],
)
def test_a_row_with_a_field_of_the_trajectory_is_refused(
    name: str, fields: dict[str, Any], field: str, tmp_path: Path
) -> None:
    """Otherwise a reward function would get the trajectory's value without notice. A row that was not read before
    training, in a stream, fails."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    settings = Reward(function=f"{tmp_path}/rewards.py:{name}", weights={"environment": 0.0})
    asked = asked_with(**fields)
    with Scorer.open(settings, [asked.data_source], CPU, environment=True) as scorer:
        with pytest.raises(Refusal) as refused:
            scorer.dry_run([question(), asked], conversations=True)
        found = scorer.submit(asked, "", completion(MODEL).trajectory).result(20)
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == (str(asked.origin), "duplicate-name")
    assert repr(field) in problem.why
    assert isinstance(found, Failure)
    assert repr(field) in found.why


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("of_verl", {"columns": {"state": 1}}),  # this signature gets no columns
        ("of_trl", {"columns": {"messages": question().prompt}}),  # the column of the prompt
    ],
)
def test_other_fields_of_a_row_stay(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    settings = Reward(function=f"{tmp_path}/rewards.py:{name}", weights={"environment": 0.0})
    asked = asked_with(**fields)
    with Scorer.open(settings, [asked.data_source], CPU, environment=True) as scorer:
        waiting = scorer.submit(asked, "", completion(MODEL).trajectory)
        scorer.flush()
        found = waiting.result(20)
    assert isinstance(found, Score), found
    assert found.total == 5.0


def test_a_rule_reads_no_field_of_the_trajectory() -> None:
    asked = asked_with(extra_info={"state": 1})
    with Scorer.open(Reward(weights={"rule": 1.0}), [asked.data_source], CPU, environment=True) as scorer:
        assert isinstance(scorer.submit(asked, "", completion(MODEL).trajectory).result(20), Score)


def test_the_parts_of_an_environment_have_weights() -> None:
    """0.5 x (0.25 + 0.5) + 2 x 3 + 1 x 7 + 10 x the rule's 0. Named scores are logged and not counted again."""
    settings = Reward(weights={"environment": 0.5, "score": 2.0, "rule": 10.0})
    scores = {"score": 3.0, "score/style": 1.0, "score/truth": 2.0, "group": 7.0}
    rollout = scored(settings, completion(MODEL, scores=scores))
    assert isinstance(rollout.score, Score)
    assert rollout.score.total == pytest.approx(0.375 + 6.0 + 7.0)
    assert rollout.score.parts == {"rule": 0.0, "environment": 0.75, **scores}
    first, last = len(MODEL[0]) - 1, len(rollout.ids) - 1
    assert rollout.token_rewards == ((first, 0.125), (last, 0.25))


def test_steps_of_a_text_are_at_the_tokens_of_their_turns() -> None:
    """A step that ends with the text of the model ends at the last token, not at a token of the tool."""
    scorer = Scorer([_Steps()], {"process": 1.0}, {})
    rollout = scored(Reward(), completion(MODEL, rewards=(0.0, 0.0)), scorer)
    assert rollout.token_rewards == ((4, 1.0), (len(rollout.ids) - 1, 2.0))


@pytest.mark.parametrize("rewards", [(1e308, 1e308), (1e39, 0.0), (-2e38, -2e38)])
def test_a_sum_that_overflows_is_a_failure(rewards: tuple[float, float]) -> None:
    """Each reward is a finite number, but the trainer would compute with infinity."""
    rollout = scored(Reward(), completion(MODEL, rewards=rewards))
    assert isinstance(rollout.score, Failure)
    assert rollout.score.part == "environment"


def test_a_score_with_a_weight_must_exist() -> None:
    rollout = scored(Reward(weights={"group": 1.0}), completion(MODEL))
    assert rollout.score == Failure(
        "group", "reward.weights has an entry 'group', but the environment has no method score_group"
    )


def test_a_failed_environment_is_a_failed_response() -> None:
    failed = Completion(
        0,
        0,
        [],
        [],
        "failed",
        failure="game.py:Game: step raised KeyError",
        failure_key="rollout.environment",
        trajectory=completion(MODEL).trajectory,
    )
    rollout = scored(Reward(), failed)
    assert isinstance(rollout.score, Failure)
    assert rollout.score.key == "rollout.environment"


def test_the_rule_is_used_only_if_it_is_listed() -> None:
    assert active_weights(Reward(), environment=True)[0] == {"environment": 1.0, "score": 1.0, "group": 1.0}
    assert "rule" in active_weights(Reward(weights={"rule": 1.0}), environment=True)[0]
    _, problems = active_weights(Reward(weights={"score": 1.0}))
    assert [str(problem.where) for problem in problems] == ["reward.weights.score"]
    assert "rollout.environment is not set" in problems[0].why
