"""`AgentEngine`: an engine whose responses are trajectories of agents, which ask for turns over HTTP.

A trajectory may have several requests at once. The engine `inner` generates the turns that are asked for, while other
agents work.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from lockstep.environments.agents.agent_replies import AgentAnswer, as_sent
from lockstep.environments.agents.agent_requests import TurnSpec
from lockstep.environments.agents.agent_server import AgentRequest, AgentServer, AgentSession
from lockstep.environments.agents.conversation_rows import AgentRow, AgentRows, Continuation
from lockstep.environments.conversation import ChatConversation
from lockstep.environments.dispatch import ASKED
from lockstep.environments.environment import Reply
from lockstep.environments.host import HostAnswer
from lockstep.environments.loop import EnvironmentEngine, TrajectoryBatch
from lockstep.environments.message_images import refuse_sampled_images
from lockstep.environments.parsers import parse_reply
from lockstep.environments.running import PROMPT_TOKENS, Running, row_of
from lockstep.errors import Refusal, first_line
from lockstep.http_server.http_api import ApiError
from lockstep.kernels.sampling import turn_key
from lockstep.trajectory import (
    COMPLETED,
    CONTEXT_OVERFLOW,
    MAX_TOKENS,
    MAX_TOOL_CALLS,
    MAX_TURNS,
    TIMEOUT,
    TOOL_ERROR,
)
from lockstep.types import AGENT, Completion, Request, Sampling

_LENGTH = "context_length_exceeded"


class AgentEngine(EnvironmentEngine):
    """An engine that runs an agent for each response."""

    server: AgentServer

    def close(self) -> None:
        super().close()
        self.server.close()

    def _batch(self, requests: Sequence[Request], sampling: Sampling) -> TrajectoryBatch:
        return AgentBatch(self, requests, sampling)


@dataclass(eq=False)
class AgentTrajectory(Running):
    """The trajectory of one agent."""

    agent_rows: AgentRows | None = None
    agent: AgentSession | None = None
    asked: dict[AgentRequest, list[AgentTurn]] = field(default_factory=dict)
    """The requests without an answer, with their turns."""
    held: list[AgentRequest] = field(default_factory=list)
    """The requests that wait until other requests of the agent leave enough of their reserved tokens."""
    started_turns: int = 0
    answered_requests: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    """How many turns were sampled after each context."""
    used: int = 0
    """The number of tokens beyond the prompt in the row of the last turn."""
    limit: str = ""
    """The limit that refused the last request."""
    model_seconds: float = 0.0
    waits_since: float = 0.0

    @property
    def tokens_left(self) -> int:
        """How many tokens the model may still generate, with the tokens that requests have reserved."""
        sampled = sum(turn.stop - turn.start for turn in self.turns)
        return (self.settings.trajectory_tokens or self.sampling.max_tokens) - sampled

    @property
    def reserved(self) -> int:
        """How many tokens the requests without an answer may still get."""
        return sum(turn.most for turns in self.asked.values() for turn in turns)

    @property
    def unanswered(self) -> list[AgentRequest]:
        return [*self.asked, *self.held]

    def left(self, used: int) -> int:
        """Returns how many tokens the next turn may have in a row that has `used` tokens beyond its prompt."""
        most = self.sampling.max_tokens
        return min(most - used, self.tokens_left, self.settings.turn_tokens or most)

    def reserve(self, most: int, turns: int) -> int | None:
        """Returns how many of `most` tokens each of these turns gets, so that all requests together stay within the
        limit of the trajectory. None if they must wait for the tokens of other requests."""
        free = self.tokens_left - self.reserved
        if self.reserved and free < min(most * turns, self.tokens_left):
            return None
        return min(most, free // turns)

    def noise(self, context: Sequence[int]) -> int:
        """Returns the number of a turn for the sampling noise. The noise depends on the tokens before the turn, and not
        on the order in which requests arrive."""
        digest = sha256(repr(list(context)).encode()).hexdigest()
        number = self.contexts[digest] = self.contexts.get(digest, 0) + 1
        return 1 + int(sha256(f"{digest}:{number}".encode()).hexdigest()[:12], 16)

    def merge(self) -> None:
        """Replaces the rows by one record, when the trajectory has ended."""
        if self.agent_rows is not None and any(row.ends for row in self.agent_rows.rows):
            merged = self.agent_rows.merged()
            self.conversation = merged  # type: ignore[assignment]
            self.turns, self.turn_rows, self.versions = merged.turns, merged.turn_rows, merged.versions


@dataclass(eq=False)
class AgentTurn:
    """A turn that an agent asked for. It has the attributes of `Running` that the loop uses for a turn."""

    running: AgentTrajectory
    request: AgentRequest
    row: AgentRow
    number: int
    """The number of the turn in its trajectory."""
    noise: int
    most: int
    """Maximum number of tokens."""
    part: Running
    """Keeps the tokens of the turn during a pause."""
    completion: Completion | None = None
    reply: Reply | None = None

    @property
    def turns(self) -> Sequence[Any]:
        return self.running.turns

    @property
    def order(self) -> tuple[int, int, int]:
        return *self.running.order, self.number

    @property
    def conversation(self) -> ChatConversation:
        return self.row.conversation

    @property
    def asks(self) -> bool:
        return self.part.asks

    def sampled(self, completion: Completion, version: int | None) -> bool:
        return self.part.sampled(completion, version)

    def next_request(self) -> Request:
        self.part.asks = True
        partial = self.part.partial
        running = self.running
        return Request(
            self.conversation.context,
            turn_key(running.request.key, self.noise),
            first=running.sample,
            max_tokens=self.most,
            partial_responses={running.sample: partial} if partial.ids else None,
            session=self.row.session,
            stop_strings=self.request.spec.stop,
            images=self.conversation.images,
        )


class AgentBatch(TrajectoryBatch):
    """The trajectories of one call of `generate`."""

    engine: AgentEngine
    active: set[AgentTrajectory]  # type: ignore[assignment]
    ready: list[AgentTurn]  # type: ignore[assignment]

    def _new(self, number: int) -> list[Running]:
        return [
            AgentTrajectory(
                one.number, one.request, one.sample, one.session, self.settings, self.sampling, one.question
            )
            for one in super()._new(number)
        ]

    def _open(self, one: Any) -> bool:
        return one.running in self.active

    def _start(self, running: Running) -> None:
        assert isinstance(running, AgentTrajectory)
        inbox, server = self.hosts.inbox, self.engine.server
        running.agent = server.open(
            lambda request: inbox.put((None, HostAnswer(ASKED, {"request": request})))  # type: ignore[arg-type]
        )
        running.agent_rows = AgentRows(self.engine.chat, running.question)
        running.run_counts = {"ignored_sampling": 0.0, "refused_requests": 0.0, "abandoned_turns": 0.0}
        url, row = server.url(running.agent), row_of(running.question, images=self.engine.chat.images)
        row.pop("images", None)  # the prompt has them as an agent sends them
        self._call("run", running, row=row, base_url=url, seed=running.seed)

    # Requests of agents.

    def requested(self, request: AgentRequest) -> None:
        """Handles a request of an agent, or the end of its connection."""
        running = next((one for one in self.active if one.agent is request.session), None)
        if running is None:
            request.answer(ApiError(404, "the trajectory has ended", code="trajectory_ended"))
        elif request.seen:
            self._abandon(running, request)
        else:
            request.seen = True
            if request.spec.ignored(self.sampling):
                running.run_counts["ignored_sampling"] += 1.0
            running.held.append(request)
            self._begin_held(running)

    def _begin_held(self, running: AgentTrajectory) -> None:
        """Begins the requests for which there are tokens, in the order of their arrival."""
        for request in [request for request in running.held if request.gone]:
            running.held.remove(request)
            running.run_counts["abandoned_turns"] += request.spec.n
        while running.held:
            request = running.held[0]
            try:
                if not self._begin(running, request):
                    return
            except ApiError as error:
                running.run_counts["refused_requests"] += 1.0
                request.answer(error)
            running.held.remove(request)

    def _begin(self, running: AgentTrajectory, request: AgentRequest) -> bool:
        """Makes the turns that a request asks for ready for the engine. Returns False if the request must wait for the
        tokens of other requests. Raises `ApiError` if a limit is reached."""
        spec, rows = request.spec, running.agent_rows
        assert rows is not None
        self._check_limits(running, spec)
        try:
            place = rows.find(spec)
            if place.images and hasattr(self.engine.inner, "expands_images"):
                held = place.conversation
                refuse_sampled_images(held.ids, held.loss_mask, self.engine.chat.images)
        except Refusal as refusal:
            raise ApiError(400, f"messages: {refusal.problems[0].why}", param="messages") from refusal
        except Exception as error:  # a template is code of the model, and an agent may send any message
            why = f"messages: the chat template does not accept them: {type(error).__name__}: {first_line(error)}"
            raise ApiError(400, why, param="messages") from error
        most = self._room(running, place, spec)
        if most is None:
            return False
        running.limit = ""
        found = [rows.begin(place)]
        found += [rows.branch(found[0]) for _ in range(spec.n - 1)]
        context = place.context
        turns = []
        for row in found:
            row.session = next(self.engine.sessions) if row.session < 0 else row.session
            part = Running(
                running.number, running.request, running.sample, -1, self.settings, self.sampling, running.question
            )
            turns.append(AgentTurn(running, request, row, running.started_turns, running.noise(context), most, part))
            running.started_turns += 1
        if not running.asked:
            running.waits_since = time.monotonic()
            self.dispatch.waits(running, True)
        running.asked[request] = turns
        self.ready += turns
        return True

    def _check_limits(self, running: AgentTrajectory, spec: TurnSpec) -> None:
        settings = self.settings
        if running.started_turns + spec.n > settings.max_turns:
            _refuse(running, MAX_TURNS, f"the agent has had its {settings.max_turns} turns (rollout.max_turns)")
        if settings.max_tool_calls is not None and running.tool_calls > settings.max_tool_calls:
            why = f"the model has made more than {settings.max_tool_calls} tool calls (rollout.max_tool_calls)"
            _refuse(running, MAX_TOOL_CALLS, why)
        if running.late:
            seconds = settings.trajectory_timeout
            _refuse(running, TIMEOUT, f"the trajectory has taken {seconds:g} s (rollout.trajectory_timeout)")

    def _room(self, running: AgentTrajectory, place: Continuation, spec: TurnSpec) -> int | None:
        """Returns the maximum number of tokens of a turn, or None if it must wait for the tokens of other requests.
        Raises `ApiError` if there is none."""
        length, limit = len(place.context), self.engine.prompt_limit
        start = len(place.conversation.prompt)
        if limit is not None and start > limit:
            why = f"the prompt has {start} tokens, over the limit of {limit} (data.max_prompt_tokens)"
            _refuse(running, CONTEXT_OVERFLOW, why, _LENGTH)
        if self.sampling.max_tokens <= place.used:
            most = self.sampling.max_tokens
            why = f"the messages have {length} tokens, and the conversation has room for {start + most - 1}: its prompt"
            _refuse(running, CONTEXT_OVERFLOW, f"{why} of {start} tokens, and rollout.max_tokens={most}", _LENGTH)
        most = running.left(place.used)
        found = running.reserve(min(most, spec.max_tokens or most), spec.n) if most > 0 else 0
        if found == 0:
            _refuse(running, MAX_TOKENS, "the model has generated all its tokens (rollout.trajectory_tokens)")
        return found

    def _abandon(self, running: AgentTrajectory, request: AgentRequest) -> None:
        """Drops the turns of a request whose agent has disconnected. Turns that the engine generates end first."""
        turns = running.asked.get(request, [])
        for turn in [turn for turn in turns if turn in self.ready]:
            self.ready.remove(turn)
            turns.remove(turn)
            self._drop(turn)
        self._begin_held(running)
        self._close_request(running, request)

    def _drop(self, turn: AgentTurn) -> None:
        """Removes a turn that nobody has seen. It is not trained."""
        assert turn.running.agent_rows is not None
        turn.running.run_counts["abandoned_turns"] += 1.0
        turn.running.agent_rows.drop(turn.row)

    # Turns of the model.

    def _turn(self, running: Any, completion: Completion) -> None:
        turn: AgentTurn = running
        trajectory, request = turn.running, turn.request
        if trajectory not in self.active or request not in trajectory.asked:
            return
        turn.completion = completion
        turn.reply = self._agent_reply(turn, completion)
        self._close_request(trajectory, request)

    def _close_request(self, running: AgentTrajectory, request: AgentRequest) -> None:
        """Answers a request if all its turns are complete."""
        turns = running.asked.get(request)
        if turns is None or any(turn.completion is None for turn in turns):
            return
        if request.gone:
            for turn in turns:
                self._drop(turn)
        else:
            self._answer(running, request, turns)
        del running.asked[request]
        self._begin_held(running)
        if not running.asked:
            running.model_seconds += time.monotonic() - running.waits_since
            self.dispatch.waits(running, False)

    def _answer(self, running: AgentTrajectory, request: AgentRequest, turns: Sequence[AgentTurn]) -> None:
        rows = running.agent_rows
        assert rows is not None
        prompt = len(turns[0].conversation.context)
        replies, logprobs = [], []
        for turn in turns:
            assert turn.completion is not None
            assert turn.reply is not None
            record = rows.finish(turn.row, turn.reply, turn.completion, turn.number, turn.noise, turn.part.versions)
            running.turns.append(record)
            running.reply, running.ended_by, running.used = turn.reply, turn.completion.stop, turn.conversation.used
            replies.append(as_sent(turn.reply))
            if request.spec.logprobs:
                pairs = zip(turn.completion.ids, turn.completion.logprobs, strict=True)
                logprobs.append([(self.engine.chat.decode([token]), logprob) for token, logprob in pairs])
        running.answered_requests += 1
        number = f"{running.seed:08x}{running.answered_requests:04d}"
        request.answer(AgentAnswer(replies, prompt, number, int(time.time()), logprobs))

    def _agent_reply(self, turn: AgentTurn, completion: Completion) -> Reply:
        """Returns a turn as the agent gets it: without end tokens, and without the stop string that ended it."""
        chat, spec = self.engine.chat, turn.request.spec
        ids = list(completion.ids)
        while ids and ids[-1] in chat.end_ids:
            ids.pop()
        text: str | list[int] = ids
        if completion.stop == "string":
            text = self.engine.chat.decode(ids)
            stops = [stop for stop in (*spec.stop, *self.sampling.stop_strings) if stop in text]
            text = text[: min((text.index(stop) for stop in stops), default=len(text))]
        reply = parse_reply(
            text,
            chat.tokenizer,
            self.settings.parser,
            turn.conversation.tools,
            prompt=self.engine.chat.decode(turn.conversation.context[-PROMPT_TOKENS:]),
            finish="length" if completion.stop == "length" else "stop",
            first_call=turn.running.tool_calls,
        )
        if not spec.calls and (reply.calls or reply.parse_error):
            reply = replace(reply, content=as_sent(replace(reply, calls=(), parse_error="no calls")).content)
            reply = replace(reply, calls=(), parse_error="")
        return replace(reply, ids=tuple(completion.ids))

    # The end of a trajectory.

    def _after_run(self, running: Running, fields: Mapping[str, Any]) -> None:
        assert isinstance(running, AgentTrajectory)
        assert running.agent is not None
        result, posted = fields["result"], running.agent.reward
        if result is not None and posted is not None:
            self._fail(running, "run returned a reward, and posted another one", TOOL_ERROR)
        elif not running.turns:
            self._fail(running, "run ended without a turn of the model, so there is nothing to train", TOOL_ERROR)
        elif result is None and posted is None:
            why = "run returned no reward: return a number, print it as the last line, or post it to base_url/reward"
            self._fail(running, why, TOOL_ERROR)
        else:
            self._ended(running, result or posted or {})

    def _ended(self, running: AgentTrajectory, result: Mapping[str, Any]) -> None:
        running.scores |= result["scores"]
        running.info = result["info"]
        running.counts |= result["metrics"]
        cut = running.reply.finish == "length" and running.left(running.used) <= 0
        running.stop = running.limit or (MAX_TOKENS if cut else COMPLETED)
        assert running.host is not None
        self.hosts.release(running.host, running.session)
        self._complete(running)

    def _fail(self, running: Running, why: str, stop: str) -> None:
        assert isinstance(running, AgentTrajectory)
        reward = self.settings.agent_limit_reward
        if running.limit and running.turns and running.host is not None and not running.host.dead:
            if reward is not None and stop != TIMEOUT:
                self._ended(running, {"scores": {"score": reward}, "metrics": {}, "info": {}})
                return
            remedy = "set rollout.agent_limit_reward, or let the agent return a reward"
            why += f", after the limit {running.limit} ({remedy})"
        running.failure_key = AGENT
        super()._fail(running, why, stop)

    def _complete(self, running: Running) -> None:
        assert isinstance(running, AgentTrajectory)
        assert running.agent is not None
        self.engine.server.end(running.agent)
        for request in running.unanswered:
            request.answer(ApiError(404, "the trajectory has ended", code="trajectory_ended"))
        self.ready = [turn for turn in self.ready if turn.running is not running]
        for row in _rows(running):
            if self.continuous:
                self.engine.inner.end_session(row.session)  # type: ignore[attr-defined]
        running.seconds = max(0.0, running.seconds - running.model_seconds)
        running.merge()
        super()._complete(running)

    def close(self) -> None:
        super().close()
        for running in self.active:
            if running.agent is not None:
                self.engine.server.end(running.agent)
            for request in running.unanswered:
                request.answer(ApiError(503, "the run has ended", code="run_ended"))


def _rows(running: AgentTrajectory) -> list[AgentRow]:
    return [] if running.agent_rows is None else running.agent_rows.rows


def _refuse(running: AgentTrajectory, limit: str, why: str, code: str | None = None) -> None:
    """Refuses a request because of a limit of the run. OpenAI's clients do not retry requests with the status 400."""
    running.limit = limit
    raise ApiError(400, why, code=code or limit)
