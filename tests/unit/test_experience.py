"""The responses of a step as flat vectors."""

from __future__ import annotations

import pytest
import torch

from hand_rollouts import FAILED, rollout
from lockstep.errors import Refusal
from lockstep.train.experience import build_experience
from lockstep.types import Origin, Rollout


def some() -> list[Rollout]:
    """Four prompts; the third has no scored response at all, the second one of two."""
    return [
        rollout(0, [10, 11], 1.0, logprobs=[-0.1, -0.2]),
        rollout(0, [12], 0.0, sample=1, logprobs=[-0.3]),
        rollout(1, [13, 14, 15], FAILED),
        rollout(1, [16, 17, 18], 0.5, sample=1, logprobs=[-0.4, -0.5, -0.6]),
        rollout(2, [19], FAILED),
        rollout(2, [20], FAILED, sample=1),
        rollout(3, [21, 22], -2.0, prompt=(8,), logprobs=[-0.7, -0.8]),
    ]


def test_responses_without_a_score_are_in_no_vector() -> None:
    experience = build_experience(some())
    assert [r.ids for r in experience.rollouts] == [[10, 11], [12], [16, 17, 18], [21, 22]]
    assert experience.sequences == 4
    assert experience.sequence_K.tolist() == [0, 0, 1, 2, 2, 2, 3, 3]
    assert experience.group_S.tolist() == [0, 0, 1, 3]
    assert experience.scores_S.tolist() == [1.0, 0.0, 0.5, -2.0]
    assert experience.rollout_logprobs_K.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7, -0.8])
    assert experience.last_K.tolist() == [1, 2, 5, 7]
    assert experience.baseline_S is None


def test_prompt_tokens_are_given_and_response_tokens_are_trained() -> None:
    experience = build_experience(some())
    last = experience.examples[-1]
    assert list(last.ids) == [8, 21, 22]
    assert list(last.loss_mask) == [0, 1, 1]
    assert last.origin == Origin("rows.jsonl", 3)
    assert sum(e.targets for e in experience.examples) == len(experience.sequence_K)


@pytest.mark.parametrize(
    ("first", "last", "responses", "tokens"),
    [
        (0, 1, (0, 2), (0, 3)),
        (0, 2, (0, 3), (0, 6)),
        (1, 2, (2, 3), (3, 6)),
        (2, 3, (0, 0), (0, 0)),
        (2, 4, (3, 4), (6, 8)),
        (0, 4, (0, 4), (0, 8)),
        (4, 9, (0, 0), (0, 0)),
    ],
)
def test_prompts_have_a_run_of_responses_and_these_a_run_of_tokens(
    first: int, last: int, responses: tuple[int, int], tokens: tuple[int, int]
) -> None:
    experience = build_experience(some())
    found = experience.responses_to(first, last)
    assert (found.start, found.stop) == responses
    held = experience.local_tokens(found)
    assert (held.start, held.stop) == tokens
    assert sorted(set(experience.sequence_K[held].tolist())) == list(range(*responses))


def test_a_prompt_without_its_baseline_is_left_out() -> None:
    experience = build_experience(some(), {0: 0.25, 3: -1.0})
    assert experience.group_S.tolist() == [0, 0, 3]
    assert experience.baseline_S is not None
    assert experience.baseline_S.tolist() == [0.25, 0.25, -1.0]
    assert experience.sequence_K.tolist() == [0, 0, 1, 2, 2]
    assert experience.rollout_logprobs_K.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.7, -0.8])


def test_a_response_without_a_token_is_refused_by_name() -> None:
    """Its score would fall on its neighbour's last token, or, were it the first, on the last of the step."""
    with pytest.raises(Refusal) as caught:
        build_experience([rollout(0, [1, 2], 1.0), rollout(0, [], 5.0, sample=1), rollout(4, [3], 0.0)])
    (problem,) = caught.value.problems
    assert problem.where == "response 1 to rows.jsonl row 0"
    assert "no token" in problem.why
    # One that is left out anyway carries no score.
    assert build_experience([rollout(0, [], FAILED), rollout(1, [3], 2.0)]).last_K.tolist() == [0]


@pytest.mark.parametrize("baselines", [None, {}])
def test_nothing_scored_is_an_empty_experience(baselines: dict[int, float] | None) -> None:
    experience = build_experience([rollout(0, [1], FAILED)], baselines)
    assert experience.sequences == 0
    assert experience.sequence_K.dtype == torch.long
    assert len(experience.scores_S) == len(experience.rollout_logprobs_K) == len(experience.last_K) == 0


def with_turns() -> list[Rollout]:
    """Two turns of the policy around one of an environment; then one that ends with the environment's."""
    early = ((1, 0.3), (3, 0.4))
    return [
        rollout(0, [10, 90, 91, 11, 12], 1.0, logprobs=[-0.1, 0, 0, -0.2, -0.3], trained=[1, 0, 0, 1, 1], earned=early),
        rollout(1, [13, 14, 92], 0.5, logprobs=[-0.4, -0.5, 0], trained=[1, 1, 0], earned=((0, 0.1), (2, 0.2))),
    ]


def test_what_an_environment_wrote_is_seen_and_not_trained() -> None:
    experience = build_experience(with_turns())
    first = experience.examples[0]
    assert list(first.ids) == [5, 6, 7, 10, 90, 91, 11, 12]
    assert list(first.loss_mask) == [0, 0, 0, 1, 0, 0, 1, 1]
    assert experience.sequence_K.tolist() == [0, 0, 0, 1, 1]
    assert experience.rollout_logprobs_K.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert experience.last_K.tolist() == [2, 4]
    assert experience.local_tokens(slice(1, 2)) == slice(3, 5)
    # A share that was earned in the environment's turn is the policy's last token's before it.
    assert experience.token_rewards_K.tolist() == pytest.approx([0.3, 0.4, 0, 0.1, 0.2])
    assert sum(e.targets for e in experience.examples) == len(experience.sequence_K)


def test_turns_are_cut_where_the_writer_changes() -> None:
    first, second = with_turns()
    assert [(turn.policy, turn.ids) for turn in first.turns] == [(True, [10]), (False, [90, 91]), (True, [11, 12])]
    assert [turn.policy for turn in second.turns] == [True, False]
    assert (first.num_response_tokens, second.num_response_tokens) == (3, 2)
    assert list(rollout(0, [1, 2], 0.0).loss_mask) == [1, 1]
    with pytest.raises(ValueError, match="the loss mask has 1 entries for 2 tokens"):
        rollout(0, [1, 2], 0.0, trained=[1])


def test_a_response_of_an_environment_alone_is_refused() -> None:
    with pytest.raises(Refusal, match="has no token of the policy"):
        build_experience([rollout(0, [90, 91], 1.0, trained=[0, 0])])
