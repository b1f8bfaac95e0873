"""Responses by a function of the user's own, on a real engine: turns, masks, log-probs, and what it may get wrong."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, native, prompts, run, write_model
from transformers import Qwen2Config

from hang import HANG
from lockstep.data.batching import micro_batch
from lockstep.errors import Refusal
from lockstep.functions import register_callable
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy, Scoring
from lockstep.rollout.engine import Engine, SharedWeights
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.rollout_function import KEY, Canned, FunctionEngine, Generate, try_function
from lockstep.types import Completion, Example, Origin, Prompt, Question, Request, Sampling

SAMPLING = Sampling(max_tokens=24, temperature=0.8, stop_ids=(7, 9, 11, 13, 15, 17), seed=3)
END = (7, 9, 11, 13, 15, 17)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen2") / "model", Qwen2Config(**SIZES), tiny_folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


@pytest.fixture(scope="module")
def engine(policy: Policy, folder: Path) -> Engine:
    return native(policy, folder)


def question(row: int) -> Question:
    return Question("sums", [{"role": "user", "content": "?"}], str(row), Origin("rows.jsonl", row), {"row": row})


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(ids, 100 + key, 3, question=question(key)) for key, ids in enumerate(prompts(5))]


def by(function: Callable[..., Any], inner: Engine, seconds: float = HANG, *, tolerant: bool = True) -> FunctionEngine:
    return FunctionEngine(
        inner, register_callable(KEY, function), lambda text: list(text.encode()), str, 259, seconds, tolerant=tolerant
    )


def straight(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
    turn = generate(prompt.ids)
    return turn.ids, [1] * len(turn.ids)


def conversation(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
    """Up to three turns of at most 5 tokens, each answered by the environment with the number of its row."""
    ids: list[int] = []
    trained: list[int] = []
    for _ in range(3):
        turn = generate([*prompt.ids, *ids], max_tokens=5)
        ids += turn.ids
        trained += [1] * len(turn.ids)
        if turn.stop == "token" or len(ids) + 2 > 24:
            break
        said = generate.encode(f"<{prompt.question.ground_truth}")
        ids += said
        trained += [0] * len(said)
    return ids, trained


def test_one_turn_alone_is_what_the_engine_gives(engine: Engine, requests: list[Request]) -> None:
    assert run(by(straight, engine), requests, SAMPLING) == run(engine, requests, SAMPLING)


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_turns_are_masked_and_scored_as_the_trainer_scores_them(
    engine: Engine, policy: Policy, folder: Path, requests: list[Request], kind: str
) -> None:
    inner = engine if kind == "native" else HfEngine(policy.generating, load_tokenizer(str(folder)).decode)
    made = run(by(conversation, inner), requests, SAMPLING)
    assert [(one.request, one.sample) for one in made] == [(r, s) for r in range(5) for s in range(3)]
    assert any(0 in one.loss_mask for one in made)
    for one in made:
        spoken = [token for token, mine in zip(one.ids, one.loss_mask, strict=True) if not mine]
        assert bytes(spoken).decode() == f"<{one.request}" * (len(spoken) // 2)
        assert all((score == 0.0) == (not mine) for score, mine in zip(one.logprobs, one.loss_mask, strict=True))
        prompt = list(requests[one.request].ids)
        row = Example(prompt + one.ids, [0] * len(prompt) + list(one.loss_mask), Origin("x", 0))
        policy.scoring = Scoring(temperature=0.8)
        with torch.no_grad():
            scored = policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K
        policy.scoring = Scoring()
        wanted = torch.tensor([score for score, mine in zip(one.logprobs, one.loss_mask, strict=True) if mine])
        torch.testing.assert_close(scored, wanted, rtol=0, atol=2e-4)


def test_the_order_of_threads_changes_nothing(
    engine: Engine, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(SharedWeights):
        instead = ""

        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
            self.asked.append([request.key for request in requests])
            return engine.generate(requests, sampling)

    def reversed_order(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        threading.Event().wait((5 - prompt.question.extra_info["row"]) / 50)
        return conversation(prompt, generate)

    usual = run(by(conversation, engine), requests, SAMPLING)
    watched = Watched()
    assert run(by(reversed_order, watched), requests, SAMPLING) == usual
    # A batch in another order may round otherwise on some devices.
    assert watched.asked[0] == [100 + row for row in range(5) for _ in range(3)]
    # Fewer at a time are other batches, whose rounding may differ; tokens and masks may not.
    monkeypatch.setattr("lockstep.rollout.rollout_function.SIDE_BY_SIDE", 2)
    few = run(by(conversation, engine), requests, SAMPLING)
    assert [(one.ids, one.loss_mask, one.stop) for one in few] == [(one.ids, one.loss_mask, one.stop) for one in usual]


def test_those_who_wait_are_answered_together(requests: list[Request]) -> None:
    sizes = []

    class Counted(Canned):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
            sizes.append(len(requests))
            return super().generate(requests, sampling)

    made = run(by(conversation, Counted([40, 41, 42])), requests, SAMPLING)
    assert len(made) == 15
    assert sizes == [15]  # Canned ends each turn with a "token"


def test_a_later_turn_draws_other_noise_than_the_first(engine: Engine, requests: list[Request]) -> None:
    drawn: list[list[int]] = []

    def twice(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        one, other = generate(prompt.ids), generate(prompt.ids)
        drawn.append([*one.ids, -1, *other.ids])
        assert one.ids != other.ids
        return other.ids, [1] * len(other.ids)

    (made, *_) = run(by(twice, engine), requests[:1], SAMPLING)
    assert made.ids in [one[one.index(-1) + 1 :] for one in drawn]


def test_a_turn_may_be_kept_in_part_and_has_no_more_room_than_the_response(
    engine: Engine, requests: list[Request]
) -> None:
    rooms: list[tuple[int, int]] = []

    def cut(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        first = generate(prompt.ids).ids[:2]
        filler = [50] * (24 - len(first))
        none, one = generate([*prompt.ids, *first, *filler]), generate([*prompt.ids, *first, *filler[:-1]])
        rooms.append((len(none.ids), len(one.ids)))
        return [*first, 50], [1] * len(first) + [0]

    made = run(by(cut, engine), requests[:2], SAMPLING)
    assert set(rooms) == {(0, 1)}
    assert {one.stop for one in made} == {"environment"}
    assert all(len(one.logprobs) == len(one.ids) and one.logprobs[-1] == 0.0 for one in made)


def returning(value: Any) -> Callable[..., Any]:
    def mine(prompt: Prompt, generate: Generate) -> Any:
        turn = generate(prompt.ids)
        return value(turn.ids[:9]) if callable(value) else value

    return mine


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "returned a NoneType, expected two values"),
        (lambda ids: ids, "expected two values|not an integer|returned ids as a int"),
        (lambda ids: (ids, [1]), "entries of the mask"),
        (lambda ids: (ids, [2] * len(ids)), "a mask with 2 in it"),
        (lambda ids: (ids, [0] * len(ids)), "no token that the policy generated"),
        (lambda ids: (ids + [50] * 30, [1] * len(ids) + [0] * 30), "over rollout.max_tokens=24"),
        (lambda ids: ([*ids[:1], 300], [1, 0]), "token id 300, but the model's vocabulary has 259"),
        (lambda ids: ([*ids[:1], -1], [1, 0]), "token id -1, but the model's vocabulary has 259"),
        (lambda ids: ("text", [1] * 4), "returned ids with 't' among them"),
        (lambda ids: (3, [1]), "returned ids as a int, not a list"),
        (lambda ids: ([50, *ids], [1] * (len(ids) + 1)), "marks token 0 of the response as the policy's"),
        (lambda ids: ([50, *ids], [0] + [1] * len(ids)), "marks token 1 of the response as the policy's"),
        (lambda ids: ([*ids, 50], [1] * (len(ids) + 1)), "as the policy's, but generate did not return it"),
    ],
)
def test_what_a_function_returns_is_held_to_what_was_drawn(
    engine: Engine, requests: list[Request], value: Any, said: str
) -> None:
    function = returning(value)
    for one in run(by(function, engine), requests[1:2], SAMPLING):
        assert re.search(said, one.failure)
        assert (one.ids, one.logprobs, one.stop) == ([], [], "failed")
    with pytest.raises(Refusal, match=said) as caught:
        run(by(function, engine, tolerant=False), requests[1:2], SAMPLING)
    (problem,) = caught.value.problems
    assert (problem.where, problem.code) == (f"rollout.function {__file__}:mine", "invalid-return")
    assert "rows.jsonl row 1" in problem.why
    assert "return (ids, trained)" in problem.remedy


def test_what_a_function_raises_names_file_line_and_row_and_ends_the_others(
    engine: Engine, requests: list[Request]
) -> None:
    before = set(threading.enumerate())

    def mine(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        turn = generate(prompt.ids)
        if prompt.question.extra_info["row"] == 3:
            raise KeyError("gone")
        while True:  # the others are in the middle of something
            generate([*prompt.ids, *turn.ids[:1]], max_tokens=1)

    with pytest.raises(Refusal, match=r"raised KeyError: 'gone' \(test_rollout_function.py line \d+\), for rows.jsonl"):
        run(by(mine, engine, tolerant=False), requests, SAMPLING)
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG)
        assert not thread.is_alive()


def test_generate_continues_the_prompt_and_nothing_else(engine: Engine, requests: list[Request]) -> None:
    def mine(prompt: Prompt, generate: Generate) -> Any:
        return generate([1, 2, 3])

    with pytest.raises(Refusal, match="do not start with the prompt"):
        run(by(mine, engine, tolerant=False), requests[:1], SAMPLING)


@pytest.mark.daily("KeyError('gone')", "SystemExit(3)")
@pytest.mark.parametrize("error", [KeyError("gone"), SystemExit(3), MemoryError()], ids=repr)
def test_a_function_that_raises_fails_its_own_response_alone(
    engine: Engine, requests: list[Request], error: BaseException
) -> None:
    def mine(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        answer = conversation(prompt, generate)
        if prompt.question.extra_info["row"] == 3:
            raise error
        return answer

    usual = run(by(conversation, engine), requests, SAMPLING)
    made = run(by(mine, engine), requests, SAMPLING)
    assert [one for one in made if one.request != 3] == [one for one in usual if one.request != 3]
    failed = [one for one in made if one.request == 3]
    assert [one.sample for one in failed] == [0, 1, 2]
    for one in failed:
        assert type(error).__name__ in one.failure
        assert (one.ids, one.stop) == ([], "failed")


def in_pieces(limit: int, end: Any = None) -> Callable[..., Any]:
    """Turns of at most 6 tokens until `limit`, whatever stops them; `end` is a third value to return."""

    def mine(prompt: Prompt, generate: Generate) -> Any:
        ids: list[int] = []
        while len(ids) < limit:
            ids += generate([*prompt.ids, *ids], max_tokens=min(6, limit - len(ids))).ids
        return (ids, [1] * len(ids)) if end is None else (ids, [1] * len(ids), end)

    return mine


@pytest.mark.parametrize(
    ("limit", "end", "stop"),
    [
        (12, None, "environment"),  # the last turn is cut by its own max_tokens, the response is not
        (24, None, "length"),  # rollout.max_tokens
        (12, True, "length"),
        (24, False, "environment"),
    ],
)
def test_a_response_is_truncated_by_its_own_limit_alone(
    engine: Engine, requests: list[Request], limit: int, end: bool | None, stop: str
) -> None:
    endless = replace(SAMPLING, stop_ids=())
    assert {one.stop for one in run(by(in_pieces(limit, end), engine), requests, endless)} == {stop}


def test_an_end_token_at_the_limit_is_no_truncation(requests: list[Request]) -> None:
    canned = Canned([40, 41, 42])
    made = run(by(straight, canned), requests[:1], replace(SAMPLING, max_tokens=3))
    assert {one.stop for one in made} == {"token"}


def test_a_third_value_is_true_or_false(engine: Engine, requests: list[Request]) -> None:
    (made, *_) = run(by(in_pieces(12, "length"), engine), requests[:1], SAMPLING)
    assert "neither True nor False" in made.failure


def test_a_check_of_the_engine_goes_to_the_engine(engine: Engine) -> None:
    plain = [Request(ids, key) for key, ids in enumerate(prompts(2))]
    assert run(by(returning(None), engine), plain, SAMPLING) == run(engine, plain, SAMPLING)


def test_the_dry_run_needs_no_model() -> None:
    prompt = Prompt(question(4), [1, 2, 3])
    tried = (prompt, 24, [48, 7], lambda text: list(text.encode()), str, 259, HANG)
    line = try_function(register_callable(KEY, straight), *tried)
    assert line.endswith("straight: 2 tokens of the policy and 0 of the environment (tested with a stub policy)")
    with pytest.raises(Refusal, match=r"returned a NoneType, expected two values, for rows\.jsonl row 4"):
        try_function(register_callable(KEY, returning(None)), *tried)


@pytest.mark.parametrize("tolerant", [True, False])
def test_an_environment_that_never_answers_fails_by_name(
    engine: Engine, requests: list[Request], tolerant: bool
) -> None:
    """Between two turns, while other responses wait for theirs. Its thread is let go, and nothing is left running."""
    for_ever = threading.Event()

    def stalls(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        turn = generate(prompt.ids, max_tokens=2)
        if prompt.question.extra_info["row"] == 2:
            for_ever.wait()
            generate([*prompt.ids, *turn.ids])
        return turn.ids, [1] * len(turn.ids)

    before, said = set(threading.enumerate()), "did not respond for 0.2 s"
    stalling = by(stalls, engine, 0.2, tolerant=tolerant)
    if tolerant:
        made = run(stalling, requests, SAMPLING)
        assert {(one.request, said in one.failure) for one in made} == {(r, r == 2) for r in range(5)}
    else:
        with pytest.raises(Refusal, match=r"did not respond for 0\.2 s, for rows\.jsonl row 2") as refused:
            run(stalling, requests, SAMPLING)
        assert refused.value.problems[0].where.startswith("rollout.function")
        assert "rollout.function_timeout" in refused.value.problems[0].remedy
    for_ever.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG)
        assert not thread.is_alive()
