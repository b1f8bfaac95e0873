"""The rollout worker: a real process with weights of its own, asked ahead, paused, probed and killed."""

from __future__ import annotations

import copy
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

import environment_classes
from conftest import write_online_recipe
from hang import HANG, wait_until
from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.errors import LostProcess, Refusal
from lockstep.launch.supervisor import NOBODY, descendants
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy, evaluating
from lockstep.recipe import Recipe, load_recipe
from lockstep.rollout.worker import worker_engine as engine_module
from lockstep.rollout.worker.prompt_exchange import PromptExchange
from lockstep.rollout.worker.worker_engine import WorkerEngine
from lockstep.rollout.worker.worker_loop import _Worker, work
from lockstep.rollout.worker.worker_protocol import (
    Answered,
    Ask,
    BroadcastFailed,
    Failed,
    GivenUp,
    HandOver,
    Opening,
    WeightGroup,
    WeightMemory,
    Withdraw,
)
from lockstep.types import Completion, Example, Origin, Question, Request, Sampling
from refusals import refuses

SAMPLING = Sampling(max_tokens=200, seed=3)
CPU = torch.device("cpu")


pytestmark = pytest.mark.xdist_group("rollout worker")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Recipe:
    online_file = write_online_recipe(tmp_path_factory.mktemp("online"), tiny_folder)
    return load_recipe(str(online_file), ["rollout.max_staleness=1", "rollout.worker_restarts=0"])


def policy_of(recipe: Recipe) -> Policy:
    return load_policy(recipe.model, CPU, Cpu().attention, seed=0)


@pytest.fixture(scope="module")
def started() -> Iterator[list[WorkerEngine]]:
    """The workers of all tests. They are closed at the end, in whatever state they were left."""
    engines: list[WorkerEngine] = []
    yield engines
    for engine in engines:
        engine.close()
        assert living(engine) == []


@pytest.fixture
def worker(recipe: Recipe, started: list[WorkerEngine], tmp_path: Path, request: pytest.FixtureRequest) -> WorkerEngine:
    """The one of the test before where that is alive: its imports take longer than what is asked of it here. So a test
    hands over weights of its own numbers, and asks prompts of its own keys. Its weights come by shared memory, or by
    the collective that the test names."""
    collective = getattr(request, "param", None)
    for engine in started:
        if engine.collective == collective and engine.process.alive:
            return engine
    log = tmp_path / "rollout" / "worker.log"
    started.append(WorkerEngine(policy_of(recipe), CPU, recipe, (), log, collective))
    return started[-1]


VERSIONS = count()
"""Of the weights, over all tests: they are handed over in a rising order."""


def living(engine: WorkerEngine) -> list[int]:
    """Processes that carry the worker's mark."""
    return descendants(NOBODY, engine.process._mark)


@torch.no_grad()
def move(policy: Policy) -> None:
    """As an update does, only further."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.trainable():
        parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def scored(policy: Policy, prompt: list[int], response: list[int]) -> torch.Tensor:
    row = Example([*prompt, *response], [0] * len(prompt) + [1] * len(response), Origin("test", 0))
    with evaluating(policy):
        return policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K


@pytest.mark.slow
def test_a_response_goes_on_under_new_weights_and_every_token_names_its_own(worker: WorkerEngine) -> None:
    policy, old, new = worker.policy, next(VERSIONS), next(VERSIONS)
    short, long = Request([5, 6, 7], 1, 1, max_tokens=4), Request([8, 9], 2, 8)
    worker.hand_over(old, [short, long], SAMPLING)
    (first,) = worker.generate([short], SAMPLING)
    mine = living(worker)
    for one in mine:
        os.kill(one, signal.SIGSTOP)  # what follows takes its time on a loaded machine
    assert list(first.versions) == [old] * 4
    torch.testing.assert_close(scored(policy, [5, 6, 7], first.ids), torch.tensor(first.logprobs), rtol=0, atol=1e-4)
    before = copy.deepcopy(policy)
    move(policy)
    # The long ones run in the batch of the short one, so they have begun; and they have far to go.
    for one in mine:
        os.kill(one, signal.SIGCONT)
    worker.hand_over(new, [], SAMPLING)
    done = list(worker.generate([long], SAMPLING))
    assert sorted(one.sample for one in done) == list(range(8))
    for one in done:
        assert len(one.ids) == len(one.versions) == len(one.logprobs) == 200
        assert list(one.versions) == sorted(one.versions)
        assert one.versions[0] == old
        assert one.versions[-1] == new
        own = torch.where(
            torch.tensor(one.versions) == old, scored(before, [8, 9], one.ids), scored(policy, [8, 9], one.ids)
        )
        torch.testing.assert_close(own, torch.tensor(one.logprobs), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_what_was_asked_ahead_and_what_was_not_come_together(worker: WorkerEngine) -> None:
    ahead, now = Request([5, 6, 7], 3, 2, max_tokens=5), Request([5, 6], 9, 1, max_tokens=3)
    worker.hand_over(next(VERSIONS), [ahead], SAMPLING)
    done = list(worker.generate([now, ahead], SAMPLING))
    assert sorted((one.request, one.sample, len(one.ids)) for one in done) == [(0, 0, 3), (1, 0, 5), (1, 1, 5)]
    again = list(worker.generate([ahead], SAMPLING))
    assert {one.sample: one.ids for one in again} == {one.sample: one.ids for one in done if one.request == 1}
    assert worker.busy() > 0


def corrupted(write: Callable[..., None], memory: WeightMemory) -> Callable[..., None]:
    def wrong(parameters: object) -> None:
        write(parameters)
        next(value for name, value in memory.weights.items() if "down_proj" in name).zero_()

    return wrong


def test_a_corrupted_hand_over_is_caught_by_the_probe(worker: WorkerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.hand_over(next(VERSIONS), [], SAMPLING)
    monkeypatch.setattr(worker.channel, "write", corrupted(worker.channel.write, worker.channel))
    wrong = next(VERSIONS)
    said = rf"(?s)after {wrong} steps.*differs by up to .* in the worker, .* in the trainer"
    with pytest.raises(Refusal, match=said) as caught:
        worker.hand_over(wrong, [], SAMPLING)
    assert not isinstance(caught.value, LostProcess)


def test_weights_that_were_not_handed_over_are_caught_however_small_the_update(
    worker: WorkerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.hand_over(next(VERSIONS), [], SAMPLING)
    monkeypatch.setattr(worker.channel, "write", lambda parameters: None)
    with torch.no_grad():
        for _, parameter in worker.policy.trainable():
            parameter *= 1 + 1e-6
    with refuses("rollout.max_staleness", "weights-differ", "before the last update"):
        worker.hand_over(next(VERSIONS), [], SAMPLING)


def child_of(worker: WorkerEngine) -> int:
    """The process that generates, below its supervisor."""
    supervisor = worker.process._process.pid
    (child,) = (pid for pid in living(worker) if pid != supervisor)
    return child


BY_COLLECTIVE = pytest.mark.parametrize("worker", ["gloo"], indirect=True)


@BY_COLLECTIVE
@pytest.mark.slow
def test_weights_come_through_a_collective_and_are_probed(
    worker: WorkerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(worker.channel, WeightGroup)
    policy = worker.policy
    short = Request([5, 6, 7], 1, 2, max_tokens=4)
    worker.hand_over(next(VERSIONS), [short], SAMPLING)
    move(policy)
    version = next(VERSIONS)
    worker.hand_over(version, [], SAMPLING)
    assert len(list(worker.generate([short], SAMPLING))) == 2
    again = Request([5, 6, 7], 9, 2, max_tokens=4)
    for one in worker.generate([again], SAMPLING):
        assert list(one.versions) == [version] * 4
        torch.testing.assert_close(scored(policy, [5, 6, 7], one.ids), torch.tensor(one.logprobs), rtol=0, atol=1e-4)
    # Another tensor in the place of one: what is sent is not what is trained.
    sent = worker.channel._broadcast
    monkeypatch.setattr(worker.channel, "_broadcast", lambda tensor: sent(tensor.flip(0)))
    wrong = next(VERSIONS)
    with pytest.raises(Refusal, match=rf"after {wrong} steps.*differs by up to"):
        worker.hand_over(wrong, [], SAMPLING)


@BY_COLLECTIVE
@pytest.mark.slow
def test_a_worker_killed_before_a_collective_hand_over_is_told(worker: WorkerEngine) -> None:
    worker.hand_over(next(VERSIONS), [], SAMPLING)
    os.kill(child_of(worker), signal.SIGKILL)
    with pytest.raises(LostProcess, match=r"the rollout process was killed \(SIGKILL\)"):
        worker.hand_over(next(VERSIONS), [], SAMPLING)


def test_a_worker_that_ended_before_the_two_have_met_is_not_waited_for() -> None:
    """The store where they meet would wait for it as long as for one that is slow."""
    group = WeightGroup.opened("gloo", HANG)
    told: list[str] = []
    group.ended = lambda: bool(told)
    with pytest.raises(BroadcastFailed, match="the worker has ended"):
        group.give([("a", torch.zeros(2))], lambda: told.append("weights come"))


def test_a_killed_worker_ends_the_run_with_a_message_and_leaves_nobody(worker: WorkerEngine) -> None:
    long = Request([8, 9], 4, 8)
    worker.hand_over(next(VERSIONS), [long], SAMPLING)
    os.kill(child_of(worker), signal.SIGKILL)
    with pytest.raises(LostProcess, match=r"the rollout process was killed \(SIGKILL\)"):
        list(worker.generate([long], SAMPLING))
    assert living(worker) == []


@pytest.mark.slow
def test_a_worker_that_hangs_is_not_waited_for(worker: WorkerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Request([8, 9], 5, 8)
    worker.hand_over(next(VERSIONS), [long], SAMPLING)
    os.kill(child_of(worker), signal.SIGSTOP)
    monkeypatch.setattr(engine_module, "SILENT_SECONDS", 0.5)
    with pytest.raises(LostProcess, match=r"has not responded for 0\.5 s"):
        list(worker.generate([long], SAMPLING))
    worker.process.kill()
    assert living(worker) == []


@pytest.mark.slow  # its own side, in the process of the test, is below
def test_a_worker_that_cannot_load_says_why(recipe: Recipe, tmp_path: Path) -> None:
    gone = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(tmp_path / "gone")})})
    engine = WorkerEngine(policy_of(recipe), CPU, gone, (), tmp_path / "rollout" / "worker.log")
    try:
        with pytest.raises(Refusal, match="gone") as caught:
            engine.hand_over(0, [], SAMPLING)
        assert not isinstance(caught.value, LostProcess)  # it would be refused again
        assert engine._failed is not None
        engine._failed = replace(engine._failed, refused=False)
        assert isinstance(engine._refusal(), LostProcess)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_slow_prompt_is_never_starved_by_those_of_later_steps(recipe: Recipe) -> None:
    """The worker's own side, in this process. There are two rows; the slow response comes with the first weights, and
    each later hand-over, eight rounds after the one before, brings more short ones than the rows can take."""
    few = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_sequences": 2})})
    policy = policy_of(recipe)
    memory = WeightMemory.of(policy.trainable())
    memory.write(policy.trainable())
    ours, its = Pipe()
    worker = _Worker(its, Opening(few, [], memory.places, 0, torch.get_num_threads()), [memory.file])
    slow, tokens, answered, waited_for = 0, [0], [], []

    def heard() -> None:
        while ours.poll():
            said = ours.recv()
            if isinstance(said, Answered):
                answered.append(said.number)

    for step in range(20):
        requests = {100 * step + i: Request([5, 6, 7 + i], 100 * step + i, max_tokens=3) for i in range(1, 9)}
        if step == 0:
            requests = {slow: Request([8, 9], 0, max_tokens=60), **requests}
        worker._handle(HandOver(step, Ask(requests, SAMPLING)))
        if step == 2:
            # What the trainer waits for goes before all others, and no further.
            waited_for = [1000, 1001, 1002]
            worker._handle(Ask({n: Request([3, 4], n, max_tokens=2) for n in waited_for}, SAMPLING, first=True))
        worker.engine.pause = (lambda rounds: lambda: next(rounds) == 8)(count())  # type: ignore[attr-defined]
        worker._generate(worker._same_sampling())
        heard()
        if slow in answered:
            break
        (job,) = (job for job in worker.jobs if job.number == slow)
        tokens.append(len(job.begun[0].response.ids))
    assert slow in answered
    # Of eight rounds up to three go to the prompt and to its tokens so far, which are computed again.
    grown = [after - before for before, after in pairwise(tokens)]
    assert all(more >= 5 for i, more in enumerate(grown) if i != 2), tokens
    assert set(waited_for) <= set(answered)
    # Beside it, not after it, and in the order they came: nobody of a later step overtakes one of an earlier.
    later = [number for number in answered if number not in (slow, *waited_for)]
    assert later == sorted(later)
    assert len(later) > 8
    assert len([job for job in worker.jobs if job.number >= 100]) > 8  # and many more could have taken its place
    memory.close()


def test_a_response_that_another_worker_continues_is_the_same(recipe: Recipe) -> None:
    """The worker's own side, in this process: one worker generates alone, and one gives up half to another."""
    policy = policy_of(recipe)
    memory = WeightMemory.of(policy.trainable())
    memory.write(policy.trainable())
    requests = {number: Request([5, 6, 7 + number], number, 2, max_tokens=12) for number in range(3)}
    lines, workers = [], []
    for _ in range(3):
        ours, its = Pipe()
        lines.append(ours)
        workers.append(_Worker(its, Opening(recipe, [], memory.places, 0, torch.get_num_threads()), [memory.file]))
    whole, first, second = workers

    def finished(*those: int) -> dict[tuple[int, int], Completion]:
        said = [one for line in those for one in messages(lines[line]) if isinstance(one, Answered)]
        return {(one.number, one.completion.sample): one.completion for one in said}

    for worker in (whole, first):
        worker._handle(HandOver(4, Ask(requests, SAMPLING)))
    whole._generate(whole._same_sampling())
    first.engine.pause = (lambda rounds: lambda: next(rounds) == 3)(count())  # type: ignore[attr-defined]
    first._generate(first._same_sampling())
    first._handle(Withdraw())
    (given,) = (one for one in messages(lines[1]) if isinstance(one, GivenUp))
    # Of six samples the last three: one of the second request, two of the third.
    assert {number: sorted(begun) for number, begun in given.begun.items()} == {2: [0, 1], 1: [1]}
    assert all(0 < len(one.response.ids) < 12 for begun in given.begun.values() for one in begun.values())
    assert sorted((job.number, sample) for job in first.jobs for sample in job.begun) == [(0, 0), (0, 1), (1, 0)]
    second._handle(HandOver(5, None))
    second._handle(Ask({number: requests[number] for number in given.begun}, SAMPLING, begun=given.begun))
    for worker in (first, second):
        worker.engine.pause = lambda: False  # type: ignore[attr-defined]
        worker._generate(worker._same_sampling())
    alone, shared = finished(0), finished(1, 2)
    assert shared.keys() == alone.keys()
    assert all(shared[key].ids == alone[key].ids for key in alone)
    begun = len(given.begun[2][0].response.ids)
    assert list(shared[2, 0].versions) == [4] * begun + [5] * (12 - begun)
    assert list(shared[0, 0].versions) == [4] * 12
    memory.close()


def messages(line: Connection) -> list[object]:
    found = []
    while line.poll():
        found.append(line.recv())
    return found


def of_samples(completions: Iterable[Completion]) -> dict[tuple[int, int], list[int]]:
    return {(one.request, one.sample): one.ids for one in completions}


@pytest.mark.slow
def test_prompts_move_from_a_busy_and_from_a_killed_worker(recipe: Recipe, tmp_path: Path) -> None:
    """Two ranks in this process, with a worker each. The prompts are those of the first rank."""
    again = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"worker_restarts": 1})})
    store, policy = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), policy_of(recipe)
    engines = []
    for rank in range(2):
        # Each rank has a connection of its own: a rank that waits for a key blocks its connection.
        exchange = PromptExchange(rank, TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
        engines.append(WorkerEngine(policy, CPU, again, (), tmp_path / f"worker_{rank}.log", exchange=exchange))
    first, second = engines
    try:
        for engine in engines:
            engine.hand_over(0, [], SAMPLING)
        busy, killed, alone = ([Request([8, 9 + i], key + i, 16) for i in range(2)] for key in (100, 200, 100))
        first.hand_over(1, busy, SAMPLING)
        second.hand_over(1, [], SAMPLING)  # before it, the second worker does not start prompts of version 1
        found = of_samples(first.generate(busy, SAMPLING))
        assert 0 < first.moved < 32
        for engine in engines:
            engine.hand_over(2, killed if engine is first else [], SAMPLING)
        before = first.moved
        os.kill(child_of(first), signal.SIGKILL)
        assert len(of_samples(first.generate(killed, SAMPLING))) == 32
        assert first.moved > before
        assert first.restarts == 1
        # The worker that was started again has the weights, and generates.
        for engine in engines:
            engine.hand_over(3, [], SAMPLING)
        assert of_samples(first.generate(alone, SAMPLING)) == found
    finally:
        for engine in engines:
            engine.close()
        assert [living(engine) for engine in engines] == [[], []]


@pytest.mark.slow
def test_a_restarted_worker_of_staleness_0_gives_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    exact = recipe.model_copy(
        update={"rollout": recipe.rollout.model_copy(update={"worker_restarts": 1, "max_staleness": 0})}
    )
    engine = WorkerEngine(policy_of(recipe), CPU, exact, (), tmp_path / "worker.log")
    requests = [Request([8, 9 + i], i, 3, max_tokens=20 * (1 + i)) for i in range(4)]
    try:
        runs = []
        for version in range(2):
            engine.hand_over(version, requests, SAMPLING)
            found = []
            for one in engine.generate(requests, SAMPLING):
                if version == 1 and not found:
                    os.kill(child_of(engine), signal.SIGKILL)
                found.append(one)
            runs.append({(one.request, one.sample): (one.ids, one.logprobs) for one in found})
            assert len(found) == 12
        assert engine.restarts == 1
        assert runs[0] == runs[1]
        os.kill(child_of(engine), signal.SIGKILL)
        with pytest.raises(LostProcess, match=r"was killed \(SIGKILL\)"):
            engine.hand_over(2, requests, SAMPLING)
    finally:
        engine.close()


def test_the_conversations_of_a_worker_have_the_template_the_limit_and_the_logs_of_the_run(
    recipe: Recipe, tmp_path: Path
) -> None:
    """The worker's own side, in this process."""
    template = tmp_path / "template.jinja"
    template.write_text("{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}", encoding="utf-8")
    played = {
        "environment": f"{environment_classes.__file__}:Echo",
        "environment_args": {"turns": 1},
        "environment_workers": 1,
    }
    talking = recipe.model_copy(
        update={
            "rollout": recipe.rollout.model_copy(update=played),
            "data": recipe.data.model_copy(update={"template": str(template), "require_end": False}),
        }
    )
    policy = policy_of(recipe)
    memory = WeightMemory.of(policy.trainable())
    memory.write(policy.trainable())
    ours, its = Pipe()
    text = "<user>two"
    opening = Opening(talking, [], memory.places, 0, torch.get_num_threads(), len(text), tmp_path / "worker")
    worker = _Worker(its, opening, [memory.file])
    try:
        chats = {number: [{"role": "user", "content": words}] for number, words in enumerate(("two", "three"))}
        requests = {
            number: Request([5], number, question=Question("x", chat, "", Origin("rows", number)))
            for number, chat in chats.items()
        }
        worker._handle(HandOver(0, Ask(requests, replace(SAMPLING, max_tokens=4))))
        worker._generate(worker._same_sampling())
        heard = []
        while ours.poll():
            heard.append(ours.recv())
        first, second = sorted((one for one in heard if isinstance(one, Answered)), key=lambda one: one.number)
    finally:
        worker.engine.close()
        memory.close()
    assert len(first.completion.prompt_ids) == len(text)  # one token per byte
    assert worker.engine.chat.tokenizer.decode(first.completion.prompt_ids) == text  # type: ignore[attr-defined]
    assert first.completion.failure == ""
    assert second.completion.trajectory.stop == "context_overflow"
    assert "data.max_prompt_tokens" in second.completion.failure
    assert (tmp_path / "worker").is_dir()


def test_a_worker_gives_up_whole_requests_of_an_environment_that_have_not_started(recipe: Recipe) -> None:
    """The worker's own side, in this process: one trajectory at a time, and the first one runs."""
    played = {
        "environment": f"{environment_classes.__file__}:Echo",
        "environment_args": {"turns": 1},
        "environment_workers": 1,
        "max_concurrent": 1,
    }
    talking = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=played)})
    policy = policy_of(recipe)
    memory = WeightMemory.of(policy.trainable())
    memory.write(policy.trainable())
    ours, its = Pipe()
    worker = _Worker(its, Opening(talking, [], memory.places, 0, torch.get_num_threads()), [memory.file])
    question = Question("x", [{"role": "user", "content": "two"}], "", Origin("rows", 0))
    requests = {number: Request([5], number, 2, question=question) for number in range(3)}
    try:
        worker._handle(HandOver(0, Ask(requests, replace(SAMPLING, max_tokens=4))))
        ours.send(Withdraw())  # read at the first pause
        worker._generate(worker._same_sampling())
        said = messages(ours)
    finally:
        worker.engine.close()
        memory.close()
    (given,) = (one for one in said if isinstance(one, GivenUp))
    # Of six samples at most three, and only both samples of a request.
    assert {number: sorted(begun) for number, begun in given.begun.items()} == {2: [0, 1]}
    answered = sorted((one.number, one.completion.sample) for one in said if isinstance(one, Answered))
    assert answered == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert worker.jobs == []


def test_what_a_worker_refuses_is_told_from_what_fails_in_it(recipe: Recipe, tmp_path: Path) -> None:
    """Its own side, in this process: a model that is not there, and a word that it does not know."""
    gone = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(tmp_path / "gone")})})
    for said, kind, refused in ((Opening(gone, [], [], 0, 1), Refusal, True), ("nonsense", AttributeError, False)):
        ours, its = socket.socketpair()
        socket.send_fds(ours, [b"."], [])
        with Connection(ours.detach()) as line:
            line.send(said)
            with pytest.raises(kind):
                work(its.detach())
            told = line.recv()
        assert isinstance(told, Failed)
        assert told.refused == refused


def test_the_memory_of_a_closed_worker_is_free(recipe: Recipe) -> None:
    policy = policy_of(recipe)
    memory = WeightMemory.of(policy.trainable())
    memory.write(policy.trainable())
    names = [name for name, _ in policy.trainable()]
    assert list(memory.weights) == names
    assert all(torch.equal(memory.weights[name], value) for name, value in policy.trainable())
    mapped = Path("/proc/self/maps").read_text().count("lockstep-weights")
    memory.close()
    memory.weights = {}
    del memory
    wait_until(lambda: Path("/proc/self/maps").read_text().count("lockstep-weights") < mapped)
