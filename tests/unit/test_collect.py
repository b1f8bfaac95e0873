"""Collecting: results in order, every response judged once, and judging beside decoding."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from hang import HANG
from lockstep.parallel.watchdog import Watch
from lockstep.parallel.world import World
from lockstep.rollout.collect import collect
from lockstep.types import Completion, Failure, Origin, Prompt, Question, Request, Sampling, Score

SAMPLING = Sampling(max_tokens=4)


def prompt(number: int) -> Prompt:
    return Prompt(Question("sums", [], str(number), Origin("rows", number)), [number] * 3)


def decode(ids: Sequence[int]) -> str:
    return "-".join(map(str, ids))


class Script:
    """An engine that finishes responses in a given order and says what it was asked."""

    def __init__(self, order: Sequence[tuple[int, int]]):
        self.order, self.events = order, []
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.requests = list(requests)
        for request, sample in self.order:
            self.events.append(("decoded", request, sample))
            yield Completion(request, sample, [request, sample, 9], [-0.5] * 3, "token")


class Judge:
    """Scores a response by its text; runs `before` in its own thread first."""

    def __init__(self, before: threading.Event | None = None):
        self.pool, self.before = ThreadPoolExecutor(1), before
        self.judged: list[tuple[str, str]] = []
        self.flushed = 0

    def submit(self, question: Question, text: str) -> Future[Score | Failure]:
        assert not self.flushed
        self.judged.append((question.ground_truth, text))
        return self.pool.submit(self._score, text)

    def _score(self, text: str) -> Score | Failure:
        assert self.before is None or self.before.wait(HANG)
        return Failure("rule", "no answer") if text == "1-0-9" else Score(float(text.replace("-", "")))

    def flush(self) -> None:
        self.flushed += 1


class Phases:
    def __init__(self) -> None:
        self.names: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield


MIXED = [(2, 1), (0, 0), (2, 0), (1, 1), (1, 0), (0, 1)]


def test_rollouts_come_in_order_whatever_was_finished_first() -> None:
    prompts, judge, phases, advanced = [prompt(n) for n in range(3)], Judge(), Phases(), []
    engine = Script(MIXED)
    made = collect(engine, judge, prompts, [70, 71, 72], 2, SAMPLING, World(), decode, phases, advanced.append).rollouts
    assert engine.requests == [Request([n] * 3, 70 + n, 2, question=prompts[n].question) for n in range(3)]
    assert [(r.prompt_index, r.sample) for r in made] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [r.prompt for r in made] == [prompts[0], prompts[0], prompts[1], prompts[1], prompts[2], prompts[2]]
    assert [r.text for r in made] == ["0-0-9", "0-1-9", "1-0-9", "1-1-9", "2-0-9", "2-1-9"]
    failure = Failure("rule", "no answer")
    assert [r.score for r in made] == [Score(9), Score(19), failure, Score(119), Score(209), Score(219)]
    assert all(r.ids == [r.prompt_index, r.sample, 9] and r.logprobs == [-0.5] * 3 and r.stop == "token" for r in made)
    assert judge.judged == [(str(r), f"{r}-{s}-9") for r, s in MIXED]
    assert judge.flushed == 1
    assert phases.names == ["gen", "reward"]
    assert sum(advanced) == 6


def test_the_sample_that_is_waited_for_is_named() -> None:
    """Looked at each time that the engine goes on to the next response, where one that hangs would stay."""
    watch = Watch(dist.HashStore(), rank=0, size=1, after=1000)
    seen: list[str] = []

    class Looking(Script):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
            for completion in super().generate(requests, sampling):
                seen.append(watch._moment.where)
                yield completion
            seen.append(watch._moment.where)

    @contextmanager
    def phases(name: str) -> Iterator[None]:
        with watch.stage(name):
            yield

    try:
        prompts = [prompt(n) for n in range(3)]
        with watch.stage("step 4"):
            collect(Looking(MIXED), Judge(), prompts, [70, 71, 72], 2, SAMPLING, World(watch=watch), decode, phases)
    finally:
        watch.close()
    # Six are left, then five, ...; of those the one that was asked first.
    *waiting, done = seen
    form = re.compile(r"step 4, gen, sample (\d) of prompt 0 .*\(rows row 0\)(?: and (\d) more)?")
    found = [form.fullmatch(one) for one in waiting]
    rest = [("0", "5"), ("0", "4"), ("1", "3"), ("1", "2"), ("1", "1"), ("1", None)]
    assert [one and one.groups() for one in found] == rest
    assert done == "step 4, gen"


def test_a_slow_judge_does_not_stop_decoding() -> None:
    """No score comes before the last response is decoded; collecting would wait for ever if it waited for one."""
    decoded = threading.Event()

    class Announcing(Script):
        def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
            yield from super().generate(requests, sampling)
            decoded.set()

    made = collect(
        Announcing(MIXED),
        Judge(decoded),
        [prompt(n) for n in range(3)],
        [0, 1, 2],
        2,
        SAMPLING,
        World(),
        decode,
        Phases(),
    )
    assert len(made.rollouts) == 6


def test_a_response_is_judged_before_the_next_is_decoded() -> None:
    engine = Script(MIXED)
    judge = Judge()
    submit = judge.submit
    judge.submit = lambda question, text: (engine.events.append(("judged", text)), submit(question, text))[1]  # type: ignore[method-assign]
    collect(engine, judge, [prompt(n) for n in range(3)], [0, 1, 2], 2, SAMPLING, World(), decode, Phases())
    assert engine.events[:4] == [("decoded", 2, 1), ("judged", "2-1-9"), ("decoded", 0, 0), ("judged", "0-0-9")]


def test_a_rank_generates_its_share_and_has_it_alone() -> None:
    """The longest expected first, to the rank with the least: 12 | 8; 12 | 8 + 7; 12 + 6 (prompts have 3 tokens)."""
    prompts = [prompt(n) for n in range(4)]
    expected, shares = [4.0, 9.0, 3.0, 5.0], {0: [1, 2], 1: [3, 0]}
    for rank, share in shares.items():
        engine, judge = Script([(1, 0), (0, 0)]), Judge()
        made = collect(
            engine, judge, prompts, [5, 6, 7, 8], 1, SAMPLING, World(rank, 2), decode, Phases(), expected=expected
        )
        assert engine.requests == [Request([n] * 3, 5 + n, 1, question=prompts[n].question) for n in share]
        # The engine's requests are in the order of the share, its rollouts in that of the prompts.
        assert judge.judged == [(str(share[1]), "1-0-9"), (str(share[0]), "0-0-9")]
        assert [(r.prompt_index, r.prompt) for r in made.rollouts] == [(n, prompts[n]) for n in sorted(share)]
        assert made.taken == 0


def test_a_judge_that_breaks_breaks_the_step() -> None:
    class Broken(Judge):
        def _score(self, text: str) -> Score:
            raise RuntimeError("the scorer is gone")

    with pytest.raises(RuntimeError, match="the scorer is gone"):
        collect(
            Script(MIXED), Broken(), [prompt(n) for n in range(3)], [0, 1, 2], 2, SAMPLING, World(), decode, Phases()
        )


def test_ranks_that_divide_a_model_generate_the_same_and_one_of_them_judges() -> None:
    """Ranks 2 and 3 of four have the same prompts, and 2 speaks for both."""
    prompts = [prompt(n) for n in range(4)]
    for rank, spoken in ((2, [1, 3]), (3, [])):
        judge, engine = Judge(), Script([(0, 0), (1, 0)])
        world = World(rank, 4, tensor=2)
        made = collect(engine, judge, prompts, [5, 6, 7, 8], 1, SAMPLING, world, decode, Phases())
        assert [request.key for request in engine.requests] == [6, 8]
        assert [int(truth) for truth, _ in judge.judged] == spoken
        assert [rollout.prompt_index for rollout in made.rollouts] == spoken
