"""`EnvironmentEngine`: an engine whose responses are conversations with environments.

Each trajectory runs at its own pace: the engine `inner` generates the turns that are ready, while other trajectories
wait for their environments. If deterministic algorithms are enabled, the turns are generated in rounds of a fixed
order, because rounding depends on the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from math import inf
from typing import Any

import torch

from lockstep.environments.conversation import (
    ChatConversation,
    ChatFormat,
    Suffix,
    TokenConversation,
    prompt_text,
    refuse_unknown,
    with_ids,
)
from lockstep.environments.dispatch import Dispatch, HostCall
from lockstep.environments.host import EnvironmentHosts, Host, HostAnswer
from lockstep.environments.host_worker import LOADING
from lockstep.environments.message_images import prompt_images, refuse_image_tokens, refuse_sampled_images
from lockstep.environments.running import Pausing, Running, TurnEngine, row_of
from lockstep.errors import Refusal
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.trajectory import (
    COMPLETED,
    CONTEXT_OVERFLOW,
    MAX_TOKENS,
    MAX_TOOL_CALLS,
    MAX_TURNS,
    PARSE_ERROR,
    TIMEOUT,
    TOOL_ERROR,
    TurnRecord,
)
from lockstep.types import Completion, Request, Sampling

# While trajectories wait for their environments, a pause is noticed after LOOK_SECONDS, and progress is reported after
# PROGRESS_SECONDS. Every call of an environment has a time limit, so a wait is no stall of the run.
LOOK_SECONDS, PROGRESS_SECONDS = 0.1, 1.0


# A later trajectory may have a prompt that is longer than those at the start of the engine by this factor and number of
# tokens, if the engine has room for it. For a longer one, the engine finishes its turns and starts again.
LONGER, MORE = 1.25, 64


class EnvironmentEngine:
    """An engine that has a conversation with an environment for each response.

    A request without a question, such as a request of the engine check, is passed directly to `inner`. If an
    environment fails, `failure` of the completion contains the reason; if `tolerant` is False, the first failure raises
    `Refusal`.
    """

    def __init__(
        self,
        inner: TurnEngine,
        hosts: EnvironmentHosts,
        settings: EnvironmentSettings,
        chat: ChatFormat,
        vocabulary: int,
        prompt_limit: int | None = None,
        *,
        tolerant: bool = True,
    ):
        self.inner, self.hosts, self.settings, self.chat = inner, hosts, settings, chat
        self.vocabulary, self.prompt_limit, self.tolerant = vocabulary, prompt_limit, tolerant
        self.instead = inner.instead
        self.sessions = count()
        self._prefill = (0, 0)
        self.progress: Callable[[], None] = lambda: None
        """Tells the watchdog of the ranks that the run is not stalled."""
        self.pausing: Pausing | None = None
        """Set by a rollout worker, in which generation pauses for newer weights."""

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.inner.sync(weights)

    def release_memory(self) -> None:
        self.inner.release_memory()

    def count_prefill(self) -> None:
        """Adds the prompt tokens of the last call of the inner engine to the totals, if the engine counts them."""
        if hasattr(self.inner, "prompt_counts"):
            counts = self.inner.prompt_counts()
            self._prefill = (self._prefill[0] + counts.computed, self._prefill[1] + counts.reused)

    def take_prefill(self) -> tuple[int, int]:
        """Returns how many prompt tokens the inner engine has computed and reused since the last call."""
        found, self._prefill = self._prefill, (0, 0)
        return found

    def longest_prompt(self, response: int) -> float:
        """Returns the largest number of tokens of a prompt, if its response has `response` tokens."""
        room = self.inner.longest_sequence() if hasattr(self.inner, "longest_sequence") else inf
        return min(room - response, inf if self.prompt_limit is None else self.prompt_limit)

    def close(self) -> None:
        """Kills the host processes. The owner of the inner engine closes that engine."""
        self.hosts.close()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        if any(request.question is None for request in requests):
            yield from self.inner.generate(requests, sampling)
            return
        batch = self._batch(requests, sampling)
        try:
            yield from batch.run()
        finally:
            batch.close()

    def _batch(self, requests: Sequence[Request], sampling: Sampling) -> TrajectoryBatch:
        return TrajectoryBatch(self, requests, sampling)


class TrajectoryBatch:
    """The trajectories of one call of `generate`. All methods run in the thread that calls the engine."""

    def __init__(self, engine: EnvironmentEngine, requests: Sequence[Request], sampling: Sampling):
        self.engine, self.hosts, self.settings = engine, engine.hosts, engine.settings
        self.sampling, self.requests = sampling, list(requests)
        self.waiting = [running for number in range(len(requests)) for running in self._new(number)]
        self.active: set[Running] = set()
        self.ready: list[Running] = []
        """Trajectories that wait for a turn of the model."""
        self.done: list[Completion] = []
        self.dispatch = Dispatch(self.hosts, self.settings.step_timeout, self)
        self.groups: dict[int, list[Running]] = {}
        self.unscored: list[int] = []
        """The groups that wait for a host that scores them."""
        self.asked: list[Running] = []
        """The trajectory of each request that the inner engine has got."""
        self.longest_prompt = max((len(request.ids) for request in requests), default=0)
        self.pausing = engine.pausing
        self.rounds = torch.are_deterministic_algorithms_enabled()
        self.continuous = not self.rounds and hasattr(engine.inner, "end_session")
        """Whether the inner engine takes requests while it generates, and keeps its cache for the next turn."""

    def _new(self, number: int) -> list[Running]:
        request = self.requests[number]
        assert request.question is not None
        return [
            Running(number, request, sample, session, self.settings, self.sampling, request.question)
            for sample, session in zip(
                range(request.first, request.first + request.n), self.engine.sessions, strict=False
            )
        ]

    # The loop: turns of the model, and answers of the environments.

    def run(self) -> Iterator[Completion]:
        inner, continuous = self.engine.inner, self.continuous
        while self.waiting or self.active or self.done or self.unscored or self.dispatch.outstanding:
            self._wait()
            yield from self._finished()
            if self._between() or not self.ready:
                continue
            self.asked = []
            self._enlarge()
            requests = self._taken(len(self.ready))
            if continuous:
                inner.further = self  # type: ignore[attr-defined]
            try:
                for completion in inner.generate(requests, self.sampling):
                    running = self.asked[completion.request]
                    if running.sampled(completion, None if self.pausing is None else self.pausing.version()):
                        self._turn(running, completion)
                    yield from self._finished()
            finally:
                if continuous:
                    inner.further = None  # type: ignore[attr-defined]
                self.engine.count_prefill()
            # After a pause, these turns continue, or start, in the next call.
            self.ready += [one for one in dict.fromkeys(self.asked) if one.asks and self._open(one)]

    def _enlarge(self) -> None:
        """Makes room for the prompts that are ready and, if possible, for longer ones."""
        longest = max(map(_prompt_length, self.ready))
        spare = min(int(longest * LONGER) + MORE, self.engine.longest_prompt(self.sampling.max_tokens))
        self.longest_prompt = int(max(self.longest_prompt, longest, spare))

    def _between(self) -> bool:
        """Lets a rollout worker load weights and add requests, if it wants a pause. Returns whether it did."""
        if self.pausing is None or not self._paused():
            return False
        for request, first in self.pausing.between():
            self.requests.append(request)
            added = self._new(len(self.requests) - 1)
            self.waiting = [*added, *self.waiting] if first else [*self.waiting, *added]
        self.waiting = self.pausing.unstarted(self.waiting)
        return True

    def _open(self, one: Running) -> bool:
        return one in self.active

    # The interface `Conversations` of an engine that takes requests while it generates (`rollout/engine.py`).

    @property
    def sessions(self) -> int:
        """The largest number of trajectories that are open at once."""
        return min(len(self.waiting) + len(self.active), self.settings.max_concurrent)

    @property
    def longest_sequence(self) -> int:
        """The largest number of tokens of a prompt and its trajectory together."""
        return self.longest_prompt + self.sampling.max_tokens

    def take(self, room: int, wait: bool = False) -> list[Request]:
        """Returns requests for at most `room` turns that are ready. With `wait`, waits until a turn is ready or all
        trajectories have ended. A pause ends the wait."""
        self._pump(block=False)
        while wait and not self.ready and self.more:
            self._pump(block=True)
        return [] if self._outgrown else self._taken(room)

    @property
    def more(self) -> bool:
        """Whether requests may follow although none is ready."""
        return self.dispatch.outstanding and not self._outgrown and not self._paused()

    @property
    def _outgrown(self) -> bool:
        """Whether a prompt is longer than `longest_prompt`, for which the inner engine has room. No turn starts then,
        so that the prompt does not wait for all other trajectories; the next call of the engine has more room."""
        return any(_prompt_length(running) > self.longest_prompt for running in self.ready)

    def _taken(self, room: int) -> list[Request]:
        # The trajectory with the most turns left decides when the batch ends, so it goes first.
        taken = sorted(self.ready, key=lambda one: (len(one.turns), *one.order))[:room]
        self.ready = [one for one in self.ready if one not in taken]
        self.asked += taken
        return [running.next_request() for running in taken]

    def _finished(self) -> Iterator[Completion]:
        done, self.done = self.done, []
        yield from done

    def _wait(self) -> None:
        """Waits until a trajectory is ready for a turn of the model or has ended. In rounds, waits until no trajectory
        waits for its environment. A pause ends the wait."""
        self._pump(block=False)
        while self._waits and (self.rounds or not (self.ready or self.done)) and not self._paused():
            self._pump(block=True)

    @property
    def _waits(self) -> bool:
        """Whether an answer of a host is needed to continue. Trajectories may wait for a host."""
        return self.dispatch.outstanding or (bool(self.waiting or self.unscored) and not self.active)

    def _pump(self, *, block: bool) -> None:
        """Starts trajectories, and handles the answers that have arrived. With `block`, waits for one answer or for the
        next deadline."""
        self._admit()
        self.dispatch.pump(block=block, seconds=PROGRESS_SECONDS if self.pausing is None else LOOK_SECONDS)
        self.engine.progress()
        self._admit()

    def _paused(self) -> bool:
        return self.pausing is not None and self.pausing.wanted()

    def _admit(self) -> None:
        while self.unscored and (host := self._place(-1 - self.unscored[0])) is not None:
            self._send_group(host, self.unscored.pop(0))
        while self.waiting and len(self.active) < self.settings.max_concurrent:
            running = self.waiting[0]
            if (host := self._place(running.session)) is None:
                return
            self.waiting.pop(0)
            self.active.add(running)
            running.started, running.host = time.monotonic(), host
            self._start(running)

    def _start(self, running: Running) -> None:
        text = prompt_text(self.engine.chat.tokenizer, running.request.ids) if self.hosts.writes_text else None
        row = row_of(running.question, text, self.engine.chat.images)
        self._call("reset", running, row=row, seed=running.seed)

    def _place(self, trajectory: int) -> Host | None:
        """Returns the host for a trajectory or a group; None if it must wait for an answer of a host."""
        idle = not self.active and not self.dispatch.calls and not self.dispatch.cancels
        return self.hosts.place_now(trajectory) if idle else self.hosts.place(trajectory)

    # Calls of the environments.

    def _call(self, kind: str, running: Running, **fields: Any) -> None:
        assert running.host is not None
        try:
            self.dispatch.send(kind, running.host, running, **fields)
        except ValueError as error:
            self._fail(running, str(error), TOOL_ERROR)

    def answered(self, call: HostCall, answer: HostAnswer) -> None:
        running = call.running
        if running is None:
            self.hosts.release(call.host, -1 - call.group)
            self._group_scored(call.group, answer)
        elif answer.why:
            self._fail(running, answer.why, TOOL_ERROR)
        else:
            fields = with_ids(self.engine.chat.tokenizer, answer.fields, () if running.turns else running.request.ids)
            getattr(self, f"_after_{call.kind}")(running, fields)

    def timed_out(self, call: HostCall, why: str) -> None:
        if call.running is None:
            self._group_scored(call.group, HostAnswer(LOADING, why=why), TIMEOUT)
        else:
            self._fail(call.running, why, TIMEOUT)

    def requested(self, request: Any) -> None:
        raise TypeError("an environment sends no requests")

    def lost(self, host: Host, calls: list[HostCall], why: str) -> None:
        for call in calls:
            if call.running is None:
                self._group_scored(call.group, HostAnswer(LOADING, why=why))
        # A trajectory that waits for the model fails too, because its environment is lost.
        for running in [running for running in self.active if running.host is host]:
            self.ready = [one for one in self.ready if one is not running]
            self._fail(running, why, TOOL_ERROR)

    def _after_reset(self, running: Running, fields: dict[str, Any]) -> None:
        running.anchor = fields["anchor"]
        try:
            if fields["tokens"]:
                images = prompt_images(fields["ids"], running.request, self.engine.chat.images)
                running.conversation = TokenConversation(fields["ids"], self.engine.chat.decode, images)
                refuse_unknown(fields["ids"], self.engine.vocabulary)
            else:
                running.conversation = ChatConversation(
                    self.engine.chat, running.question, fields["messages"], fields["tools"]
                )
            running.end_turns_at(fields)
        except Refusal as refusal:
            self._fail(running, f"reset returned a prompt that cannot be used: {refusal.problems[0].why}", TOOL_ERROR)
            return
        length, limit = len(running.conversation.prompt), self.engine.prompt_limit
        if limit is not None and length > limit:
            why = f"reset returned a prompt of {length} tokens, over the limit of {limit} (data.max_prompt_tokens)"
            self._fail(running, why, CONTEXT_OVERFLOW)
            return
        self.ready.append(running)

    def _turn(self, running: Running, completion: Completion) -> None:
        """Handles a turn of the model: sends it to the environment, unless a limit is reached."""
        if running not in self.active:
            # The host of its environment was lost during the turn.
            if self.continuous:
                self.engine.inner.end_session(running.session)  # type: ignore[attr-defined]
            return
        conversation = running.conversation
        assert conversation is not None
        reply = running.read_turn(completion, self.engine.chat)
        start, stop = conversation.add_turn(completion)
        running.ended_by = completion.stop
        running.reply = reply = conversation.add_reply(reply)
        record = TurnRecord(start, stop, 0.0, reply.finish, reply.calls, reply.parse_error, anchor=running.anchor)
        running.turns.append(record)
        running.turn_rows.append(conversation.number)
        limit = self.settings.max_tool_calls
        if limit is not None and running.tool_calls > limit:
            self._end(running, MAX_TOOL_CALLS)
            return
        self._call("step", running, reply=running.reply)

    def _after_step(self, running: Running, fields: dict[str, Any]) -> None:
        running.answered(fields)
        last, cut = running.turns[-1], running.reply.finish == "length"
        if cut and (fields["done"] or running.room() <= 0):
            self._end(running, MAX_TOKENS, fields)
        elif fields["done"]:
            unread = last.parse_error and not running.reply.valid_calls
            self._end(running, PARSE_ERROR if unread else COMPLETED, fields)
        elif len(running.turns) >= self.settings.max_turns:
            self._end(running, MAX_TURNS, fields)
        elif running.late:
            self._end(running, TIMEOUT, fields)
        else:
            self._continue(running, fields)

    def _continue(self, running: Running, fields: dict[str, Any]) -> None:
        """Appends the environment's messages, after which the trajectory is ready for the next turn of the model."""
        conversation = running.conversation
        try:
            if isinstance(conversation, TokenConversation):
                refuse_unknown(fields["ids"], self.engine.vocabulary)
                refuse_image_tokens(fields["ids"], self.engine.chat.images)
                extension = Suffix(fields["ids"])
            else:
                assert conversation is not None
                extension = conversation.extension(running.reply, fields["messages"])
                if extension.images and hasattr(self.engine.inner, "expands_images"):
                    refuse_sampled_images(conversation.ids, conversation.loss_mask, self.engine.chat.images)
            running.end_turns_at(fields)
        except Refusal as refusal:
            self._fail(running, f"step returned messages that cannot be used: {refusal.problems[0].why}", TOOL_ERROR)
            return
        used = -len(conversation.context) if extension.new_row else 0
        if running.room(len(extension.ids) + used) <= 0:
            self._end(running, CONTEXT_OVERFLOW, fields)
            return
        conversation.extend(extension)
        self.ready.append(running)

    # The end of a trajectory.

    def _end(self, running: Running, stop: str, fields: dict[str, Any] | None = None) -> None:
        """Scores the trajectory and closes its environment. `fields` has the environment's last messages, which the
        model does not see."""
        running.stop = stop
        if fields is not None and running.conversation is not None:
            running.conversation.add_messages(fields)
        self._call("finish", running, finished=running.trajectory())

    def _after_finish(self, running: Running, fields: dict[str, Any]) -> None:
        assert running.host is not None
        running.scores |= fields["score"] or {}
        running.info, running.state = fields["info"], fields["state"]
        self.hosts.release(running.host, running.session)
        self._complete(running)

    def _fail(self, running: Running, why: str, stop: str) -> None:
        """Ends a trajectory whose environment failed. The environment is closed, if its host still runs."""
        host, setup = running.host, self.hosts.setup
        assert host is not None
        log = setup.log(host.index)
        shown = f" (its last output is in {log})" if log is not None and log.parent.parent.is_dir() else ""
        running.failure, running.stop = f"{setup.shown}: {why}{shown}", stop
        if not self.engine.tolerant:
            raise Refusal.at(
                setup.where, f"{why}, for {running.question.origin}", "fix the environment", code="function-raised"
            )
        if not host.dead and stop != TIMEOUT:
            self.dispatch.close(host, running)
        self._complete(running)

    def _complete(self, running: Running) -> None:
        self.active.discard(running)
        if self.continuous:
            self.engine.inner.end_session(running.session)  # type: ignore[attr-defined]
        group = self.groups.setdefault(running.number, [])
        group.append(running)
        if not self.hosts.scores_groups:
            self.done.append(running.completion())
        elif len(group) == self.requests[running.number].n:
            self._score_group(running.number)

    def _score_group(self, number: int) -> None:
        """Calls `score_group` with all trajectories of a prompt that have not failed."""
        group = sorted(self.groups[number], key=lambda one: one.order)
        whole = [one for one in group if not one.failure]
        if not whole:
            self.done += [one.completion() for one in group]
            return
        # The group has a number among the trajectories of the host that no session has.
        host = self._place(-1 - number)
        if host is None:
            self.unscored.append(number)
        else:
            self._send_group(host, number)

    def _send_group(self, host: Host, number: int) -> None:
        group = sorted(self.groups[number], key=lambda one: one.order)
        trajectories = [one.trajectory() for one in group if not one.failure]
        self.dispatch.send("group", host, None, number, trajectories=trajectories)

    def _group_scored(self, number: int, answer: HostAnswer, stop: str = TOOL_ERROR) -> None:
        group = sorted(self.groups[number], key=lambda one: one.order)
        whole = [one for one in group if not one.failure]
        for place, running in enumerate(whole):
            if answer.why:
                running.failure, running.stop = f"{self.hosts.setup.shown}: {answer.why}", stop
            else:
                running.scores["group"] = answer.fields["scores"][place]
        self.done += [one.completion() for one in group]

    def close(self) -> None:
        """Ends the batch, also if it was interrupted."""
        open_hosts = {running.host for running in self.active if running.host is not None}
        self.dispatch.end(wait=not self.active and not self.waiting, busy=open_hosts)


def _prompt_length(running: Running) -> int:
    assert running.conversation is not None
    return len(running.conversation.prompt)
