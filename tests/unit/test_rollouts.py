"""The experience of a step with scripted responses and scores: what is kept, replaced, shaped, counted and refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import load as load_policy_of

from hand_rollouts import FAILED, question, recipe_of
from lockstep.data.dataset import Loader
from lockstep.errors import Refusal
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.rollout.collect import ExpectedLengths
from lockstep.rollout.generator import Generator
from lockstep.train.rollouts import Rollouts, take_rollouts
from lockstep.types import Completion, Failure, Prompt, Question, Request, Sampling, Score
from refusals import has_problem, refuses

PROMPT_TOKENS = 3
# Scores of the responses to each prompt; the greedy response is under the prompt's number and "greedy".
Script = dict[Any, Any]


@contextmanager
def untimed(name: str) -> Iterator[None]:
    yield


class Scripted:
    """Engine and judge in one: responses name their prompt and sample, and the script says what they earn."""

    def __init__(self, script: Script, lengths: dict[Any, int]):
        self.script, self.lengths = script, lengths
        self.keys: list[int] = []
        self.asked: list[list[int]] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.asked.append([request.ids[0] for request in requests])
        greedy = sampling.temperature == 0
        if not greedy:
            self.keys += [request.key for request in requests]
        # Finished out of order, as the engine may.
        for number, request in reversed(list(enumerate(requests))):
            for sample in range(request.n):
                row = request.ids[0]
                length = self.lengths.get((row, "greedy" if greedy else sample), 2)
                ids = [row, 250 if greedy else sample, *[0] * (length - 2)][:length]
                stop = "length" if length == sampling.max_tokens else "token"
                yield Completion(number, sample, ids, [-1.0] * length, stop)

    def submit(self, asked: Question, text: str) -> Future[Score | Failure]:
        row, sample = map(int, text.split()[:2])
        earned = self.script[row, "greedy"] if sample == 250 else self.script[row][sample]
        future: Future[Score | Failure] = Future()
        future.set_result(earned if isinstance(earned, Failure) else Score(earned, {"function": earned}))
        return future

    def flush(self) -> None:
        pass

    def sync(self, weights: Any) -> None:
        """It has none."""


class ScriptedGenerator(Generator):
    """The real one with a scripted engine; texts are token ids."""

    def __init__(self, policy: Policy, engine: Scripted):
        self.policy, self.engine, self.world, self.device = policy, engine, World(), torch.device("cpu")  # type: ignore[assignment]
        self.responder = engine  # type: ignore[assignment]
        self.stop_ids, self.lengths, self.served, self._ahead = (0,), ExpectedLengths(), False, None

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> Policy:
    return load_policy_of(tiny_folder)


def take(
    policy: Policy,
    script: Script,
    *,
    position: int = 0,
    lengths: dict[Any, int] | None = None,
    **keys: Any,
) -> tuple[Rollouts, Scripted]:
    rows = sorted({key if isinstance(key, int) else key[0] for key in script})
    recipe = recipe_of(
        **{"rollout__n": 2, "batch__prompts": 2, "reward__max_failures": 1.0, "rollout__max_tokens": 10, **keys}
    )
    scripted = Scripted(script, lengths or {})
    prompts = [Prompt(question(row), [row] * PROMPT_TOKENS) for row in rows]
    loader: Loader[Prompt] = Loader(
        [prompts], None, rows_per_update=recipe.batch.prompts, seed=0, shuffle=False, total_rows=None
    )
    generator = ScriptedGenerator(policy, scripted)
    return take_rollouts(loader, position, generator, scripted, recipe, untimed), scripted  # type: ignore[arg-type]


def prompts_of(taken: Rollouts) -> list[int]:
    """The prompt of each group, by its index."""
    return list({r.prompt_index: r.prompt.question.origin.row for r in taken.experience.rollouts}.values())


MIXED, SAME = [0.0, 1.0], [1.0, 1.0]


# -- without dynamic sampling ------------------------------------------------------------------------------------------


def test_a_plain_step_takes_its_prompts_and_no_more(policy: Policy) -> None:
    taken, engine = take(policy, {0: SAME, 1: MIXED, 2: MIXED}, position=1)
    assert prompts_of(taken) == [1, 2]
    assert taken.position == 3
    assert engine.keys == [1, 2]
    assert taken.experience.scores_S.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert "train/num_gen_batches" not in taken.metrics


def test_the_noise_of_a_prompt_is_counted_on_over_the_end_of_an_epoch(policy: Policy) -> None:
    """A prompt that comes again is answered anew."""
    taken, engine = take(policy, {0: MIXED, 1: MIXED, 2: MIXED}, position=5)
    assert prompts_of(taken) == [2, 0]
    assert engine.keys == [5, 6]


# -- dynamic sampling --------------------------------------------------------------------------------------------------


def test_groups_that_agree_are_replaced_by_the_next_prompts(policy: Policy) -> None:
    script = {0: SAME, 1: MIXED, 2: SAME, 3: SAME, 4: MIXED, 5: MIXED}
    taken, engine = take(policy, script, method="dapo", algorithm__dynamic_sampling__max_gen_batches=5)
    # Two are asked, one is missing; then one at a time until the step is full.
    assert engine.asked == [[0, 1], [2], [3], [4]]
    assert prompts_of(taken) == [1, 4]
    assert taken.experience.group_S.tolist() == [0, 0, 1, 1]
    assert taken.position == 5
    assert taken.metrics["train/num_gen_batches"] == 4
    assert taken.metrics["train/uniform_groups"] == 3
    assert taken.metrics["train/filled_groups"] == 0


def test_mixed_groups_come_first_and_the_rest_is_filled_up(policy: Policy) -> None:
    script = {0: SAME, 1: SAME, 2: SAME, 3: MIXED, 4: SAME}
    taken, engine = take(policy, script, method="dapo", algorithm__dynamic_sampling__max_gen_batches=3)
    assert engine.asked == [[0, 1], [2, 3], [4]]
    assert prompts_of(taken) == [3, 0]
    assert taken.metrics["train/num_gen_batches"] == 3
    assert taken.metrics["train/uniform_groups"] == 4
    assert taken.metrics["train/filled_groups"] == 1
    assert taken.position == 5


def test_a_full_first_round_is_the_only_one(policy: Policy) -> None:
    taken, engine = take(policy, {0: MIXED, 1: MIXED, 2: MIXED}, method="dapo")
    assert engine.asked == [[0, 1]]
    assert taken.metrics["train/num_gen_batches"] == 1


def test_a_group_is_judged_by_the_responses_that_have_a_score(policy: Policy) -> None:
    script = {0: [FAILED, 1.0], 1: [FAILED, FAILED], 2: MIXED, 3: MIXED}
    taken, engine = take(policy, script, method="dapo", algorithm__dynamic_sampling__max_gen_batches=2)
    assert engine.asked == [[0, 1], [2, 3]]
    assert prompts_of(taken) == [2, 3]
    # Three failures of eight responses, also those of groups that were replaced.
    assert taken.metrics["reward/failed"] == 3
    assert taken.failed.count == 3


def test_all_tokens_that_were_generated_are_counted(policy: Policy) -> None:
    script = {0: SAME, 1: MIXED, 2: MIXED}
    taken, _ = take(policy, script, method="dapo", lengths={(0, 0): 6, (2, 1): 4})
    # Six responses of two tokens, four and two more; each after its prompt. Lengths are those of what is kept.
    assert taken.metrics["perf/total_num_tokens"] == 6 * (2 + PROMPT_TOKENS) + 4 + 2
    assert taken.metrics["response_length/mean"] == (2 + 2 + 2 + 4) / 4
    assert taken.metrics["response_length/max"] == 4


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "stops"), [(0.25, False), (0.2499, True), (0.0, True)])
def test_failures_at_the_limit_pass_and_over_it_stop(policy: Policy, most: float, stops: bool) -> None:
    script = {0: [FAILED, 0.0], 1: MIXED}
    if not stops:
        taken, _ = take(policy, script, reward__max_failures=most)
        assert taken.experience.scores_S.tolist() == [0.0, 0.0, 1.0]
        assert taken.metrics["reward/failed"] == 1
        return
    with pytest.raises(Refusal) as caught:
        take(policy, script, reward__max_failures=most)
    (problem,) = caught.value.problems
    assert problem.where == "reward.function"
    assert f"1 of 4 responses could not be scored, over reward.max_failures={most:g}" in problem.why
    assert "rows.jsonl row 0: no idea" in problem.why
    assert "reward.max_failures" in problem.remedy


def test_no_failure_passes_a_limit_of_none(policy: Policy) -> None:
    assert take(policy, {0: MIXED, 1: SAME}, reward__max_failures=0.0)[0].metrics["reward/failed"] == 0


def test_failures_are_a_share_of_everything_that_was_generated(policy: Policy) -> None:
    """Two of eight in all rounds; of the four responses that are kept it would be none."""
    script = {0: [FAILED, FAILED], 1: SAME, 2: MIXED, 3: MIXED}
    keys = {"method": "dapo", "algorithm__dynamic_sampling__max_gen_batches": 2}
    taken, _ = take(policy, script, reward__max_failures=0.25, **keys)
    assert taken.metrics["reward/failed"] == 2
    with pytest.raises(Refusal, match="2 of 8 responses"):
        take(policy, script, reward__max_failures=0.24, **keys)


def test_nothing_scored_is_refused_with_the_reason_though_all_may_fail(policy: Policy) -> None:
    with pytest.raises(Refusal) as caught:
        take(policy, {0: [FAILED, FAILED], 1: [FAILED, FAILED]}, reward__max_failures=1.0)
    assert has_problem(caught.value, "reward", "reward-failed", "4 of 4 responses", "none is left", "no idea")


# -- shaping -----------------------------------------------------------------------------------------------------------


def test_long_responses_lose_reward_and_show_it_as_a_part(policy: Policy) -> None:
    """A limit of 10 and a buffer of 4: from 6 tokens on a quarter of the factor for each token."""
    taken, _ = take(
        policy,
        {0: [0.5, 0.5], 1: [1.0, FAILED]},
        lengths={(0, 0): 6, (0, 1): 7, (1, 0): 10, (1, 1): 10},
        algorithm__overlong={"buffer": 4, "factor": 2.0},
    )
    parts = [r.score.parts for r in taken.experience.rollouts if isinstance(r.score, Score)]
    assert parts == [
        {"function": 0.5, "overlong": 0.0},
        {"function": 0.5, "overlong": -0.5},
        {"function": 1.0, "overlong": -2.0},
    ]
    assert taken.experience.scores_S.tolist() == [0.5, 0.0, -1.0]
    assert taken.metrics["reward/overlong/mean"] == pytest.approx(-2.5 / 3)
    assert taken.metrics["reward/function/mean"] == pytest.approx(2 / 3)
    assert taken.metrics["response_length/clip_ratio"] == 0.5


def test_a_buffer_of_nothing_adds_no_part(policy: Policy) -> None:
    taken, _ = take(policy, {0: MIXED, 1: MIXED}, lengths={(0, 0): 10})
    assert "reward/overlong/mean" not in taken.metrics


# -- remax -------------------------------------------------------------------------------------------------------------

REMAX = {"method": "remax", "rollout__n": 1}


def test_the_greedy_response_is_the_baseline(policy: Policy) -> None:
    script = {0: [1.0], 1: [0.0], (0, "greedy"): 0.25, (1, "greedy"): 0.5}
    taken, engine = take(policy, script, **REMAX)
    assert engine.asked == [[0, 1], [0, 1]]
    assert taken.experience.baseline_S is not None
    assert taken.experience.baseline_S.tolist() == [0.25, 0.5]
    assert taken.experience.scores_S.tolist() == [1.0, 0.0]
    # The greedy responses cost tokens too, and are no experience.
    assert taken.metrics["perf/total_num_tokens"] == 4 * (2 + PROMPT_TOKENS)
    assert taken.experience.sequences == 2


def test_a_failed_greedy_response_leaves_its_prompt_out_and_is_counted(policy: Policy) -> None:
    script = {0: [1.0], 1: [0.0], (0, "greedy"): FAILED, (1, "greedy"): 0.5}
    taken, _ = take(policy, script, reward__max_failures=0.25, **REMAX)
    assert taken.experience.group_S.tolist() == [1]
    assert taken.experience.baseline_S is not None
    assert taken.experience.baseline_S.tolist() == [0.5]
    assert taken.metrics["reward/failed"] == 1
    assert [r.prompt.question.origin.row for r in taken.failed.first] == [0]
    with pytest.raises(Refusal, match="1 of 4 responses"):
        take(policy, script, reward__max_failures=0.2, **REMAX)


def test_no_baseline_at_all_is_refused_with_the_reason(policy: Policy) -> None:
    script = {0: [1.0], 1: [0.0], (0, "greedy"): FAILED, (1, "greedy"): FAILED}
    with refuses("reward", "reward-failed", "2 of 4 responses", "none is left", "no idea"):
        take(policy, script, reward__max_failures=1.0, **REMAX)


def test_the_baseline_is_shaped_as_the_responses_are(policy: Policy) -> None:
    """Otherwise a long greedy answer would be a baseline that no long response can reach."""
    script = {0: [1.0], 1: [1.0], (0, "greedy"): 1.0, (1, "greedy"): 1.0}
    lengths = {(0, 0): 10, (0, "greedy"): 10, (1, "greedy"): 8}
    taken, _ = take(policy, script, lengths=lengths, algorithm__overlong={"buffer": 4}, **REMAX)
    assert taken.experience.scores_S.tolist() == [0.0, 1.0]
    assert taken.experience.baseline_S is not None
    assert taken.experience.baseline_S.tolist() == [0.0, 0.5]
