"""Responses of two engines, token by token: a tie is not a fault, an early end is not a tie."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.kernels.sampling import gumbel_noise, sequence_keys
from lockstep.parity.replay.replay_checks import Check
from lockstep.parity.replay.stage_checks import check_generation
from lockstep.types import Origin, Prompt, Question, Rollout, Score

SEED, FIRST_KEY, VOCABULARY = 7, 40, 11


def response(ids: list[int], logprobs: list[float], place: int = 0) -> Rollout:
    question = Question("sums", [], "2", Origin("rows", place))
    return Rollout(Prompt(question, [1, 2]), place, 0, ids, logprobs, "token", "", Score(1.0))


def held(ours: list[Rollout], theirs: list[Rollout], *, greedy: bool = False, known_noise: bool = True) -> Check:
    return check_generation(
        3,
        ours,
        theirs,
        1e-3,
        seed=SEED,
        first_key=FIRST_KEY,
        vocabulary=VOCABULARY,
        greedy=greedy,
        known_noise=known_noise,
    )


def test_the_error_is_the_root_mean_square_over_all_tokens() -> None:
    ours = [response([1, 2, 3], [-1.0, -2.0, -0.5]), response([4], [-0.25], place=1)]
    theirs = [response([1, 2, 3], [-1.0, -2.3, -0.5]), response([4], [-0.65], place=1)]
    # (0.3^2 + 0.4^2) / 4 = 0.0625
    assert held(ours, theirs).error == pytest.approx(0.25)
    assert "token 0: 4 (-0.25) against 4 (-0.65)" in held(ours, theirs).where
    assert held(ours, ours).passed


def test_a_tie_between_two_tokens_is_no_fault() -> None:
    """The sums of log-probability and noise are equal; the noise is that of data position 40 + 2."""
    keys = sequence_keys(SEED, FIRST_KEY + 2, 0)
    noise = gumbel_noise(torch.tensor([keys], dtype=torch.int32), torch.tensor([1]), VOCABULARY)[0].tolist()
    a = response([1, 5, 6], [-1.0, -2.0, -0.1], place=2)
    tied = -2.0 + noise[5] - noise[8]
    assert held([a], [response([1, 8, 9], [-1.0, tied, -3.0], place=2)]).error == pytest.approx(0, abs=1e-6)
    apart = held([a], [response([1, 8, 9], [-1.0, tied + 0.2, -3.0], place=2)])
    # 0 at the first token, 0.2 at the second; later tokens have other prefixes.
    assert apart.error == pytest.approx((0.2**2 / 2) ** 0.5, rel=1e-5)
    assert "1 of 1 responses" in apart.what


def test_greedy_choices_are_compared_without_noise() -> None:
    found = held([response([5], [-1.0])], [response([8], [-1.5])], greedy=True)
    assert found.error == pytest.approx(0.5)


def test_a_response_that_only_one_side_ends_is_a_fault() -> None:
    """An end token is a token. With a different limit or stop string one side just ends."""
    longer = response([1, 2, 3], [-1.0, -2.0, -0.5])
    shorter = response([1, 2], [-1.0, -2.0])
    for pair in ((longer, shorter), (shorter, longer)):
        found = held([pair[0]], [pair[1]])
        assert found.error == math.inf
        assert not found.passed
        assert "nothing" in found.where


def test_responses_on_one_side_only() -> None:
    one = response([1], [-1.0])
    found = held([one, replace(one, sample=1)], [one])
    assert found.error == math.inf
    assert "1 responses" in found.where
    assert "prompt 0, sample 1" in found.where


def test_of_a_serving_engine_only_tokens_before_the_divergence_are_judged() -> None:
    ours = [response([1, 5, 6], [-1.0, -2.0, -0.1]), response([4, 4], [-0.25, -0.5], place=1)]
    # The first parts after one token, the second ends early; both agree before.
    theirs = [response([1, 8, 9], [-1.0, -7.0, -3.0]), response([4], [-0.25], place=1)]
    found = held(ours, theirs, known_noise=False)
    assert found.passed
    assert "2 of 2 responses diverge; first differences are not checked" in found.what
    assert not held(ours, theirs).passed
    # (0.3^2 + 0) / 2 = 0.045
    off = [response([1, 8, 9], [-1.3, -7.0, -3.0]), theirs[1]]
    assert held(ours, off, known_noise=False).error == pytest.approx(0.045**0.5)
