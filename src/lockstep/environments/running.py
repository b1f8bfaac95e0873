"""A running trajectory: its conversation, its limits, and the record that it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.environments.conversation import ChatConversation, ChatFormat, TokenConversation
from lockstep.environments.environment import Reply
from lockstep.environments.host import Host
from lockstep.environments.message_images import row_images
from lockstep.environments.parsers import parse_reply
from lockstep.kernels.sampling import turn_key
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.trajectory import TRUNCATED, Trajectory, TurnRecord, with_own
from lockstep.types import ENVIRONMENT, FAILED, PAUSED, Completion, PartialResponse, Question, Request, Sampling
from lockstep.vision.processors import ImageTokens

if TYPE_CHECKING:
    import torch


class TurnEngine(Protocol):
    """The engine that generates the turns of the model (`rollout.engine.Engine`)."""

    instead: str

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]: ...

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...

    def release_memory(self) -> None: ...

    def close(self) -> None: ...


# The parser of a turn sees this many tokens before it: chat templates may open the reasoning in the generation prompt.
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Pausing:
    """What a rollout worker does when it pauses: turns that have started continue with newer weights. The engine for
    the turns must pause by the same `wanted`."""

    wanted: Callable[[], bool]
    """Returns whether the turns shall pause."""
    between: Callable[[], Sequence[tuple[Request, bool]]]
    """Called when no turn is being generated: loads newer weights, and returns more requests. A request with True
    starts before those that wait."""
    version: Callable[[], int]
    """Returns the version of the weights."""
    unstarted: Callable[[list[Running]], list[Running]]
    """Called after `between` with the trajectories that have not started. Returns those that stay here; the worker of
    another rank generates the others."""


def environment_seed(run: int, key: int, sample: int) -> int:
    """Returns the seed of a trajectory: 31 bits, which every random generator accepts."""
    return int.from_bytes(sha256(f"{run}:{key}:{sample}".encode()).digest()[:4], "big") >> 1


def row_of(question: Question, rendered: str | None = None, images: ImageTokens | None = None) -> dict[str, Any]:
    """Returns the data row that `reset` gets: the columns of the row, the fields of the question, and the rendered
    prompt if it is given. `images` writes the images of the model."""
    return {
        **question.columns,
        "prompt": question.prompt,
        "ground_truth": question.ground_truth,
        "data_source": question.data_source,
        "extra_info": question.extra_info,
        "tools": list(question.tools),
        **({} if rendered is None else {"prompt_text": rendered}),
        **row_images(question, images),
    }


def spread_versions(sampled: Sequence[int], trained: Sequence[int]) -> list[int]:
    """Returns a version for each token of a trajectory, given those of the sampled tokens. A token of the environment
    has the version of the sampled token before it."""
    if not sampled:
        return []
    if len(sampled) != sum(trained):
        raise ValueError(f"{len(sampled)} versions of weights for {sum(trained)} sampled tokens")
    left, versions, last = iter(sampled), [], sampled[0]
    for mask in trained:
        last = next(left) if mask else last
        versions.append(last)
    return versions


@dataclass(eq=False)
class Running:
    """One trajectory that is not finished. `number` is the index of its request, `session` its number in the run."""

    number: int
    request: Request
    sample: int
    session: int
    settings: EnvironmentSettings
    sampling: Sampling
    question: Question
    host: Host | None = None
    conversation: ChatConversation | TokenConversation | None = None
    reply: Reply = field(default_factory=lambda: Reply(""))
    ended_by: str = ""
    """The stop reason of the model's last turn: `token`, `string` or `length`."""
    stop_strings: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    turns: list[TurnRecord] = field(default_factory=list)
    """The turns of the model. Their token ranges are relative to the head of their row until the trajectory ends."""
    turn_rows: list[int] = field(default_factory=list)
    """The number of the row in which each turn was sampled."""
    counts: dict[str, float] = field(default_factory=dict)
    """The sums of the metrics that the environment reports, over the turns."""
    run_counts: dict[str, float] = field(default_factory=dict)
    """Metrics that the run itself counts, besides those of every trajectory."""
    seconds: float = 0.0
    stop: str = ""
    failure: str = ""
    failure_key: str = ENVIRONMENT
    """The recipe key of the code that failed."""
    scores: dict[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    anchor: str | None = None
    """The text that identifies the state in which the next turn starts."""
    started: float = field(default_factory=time.monotonic)

    asks: bool = False
    """Whether the engine has a request for the next turn and has not finished it."""
    partial: PartialResponse = field(default_factory=PartialResponse)
    """The tokens of a turn that was paused."""
    partial_versions: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The version of the weights of each token of the finished turns, or empty if versions are not known."""

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of the trajectory, which does not depend on timing."""
        return self.number, self.sample

    @property
    def seed(self) -> int:
        return environment_seed(self.sampling.seed, self.request.key, self.sample)

    @property
    def late(self) -> bool:
        limit = self.settings.trajectory_timeout
        return limit is not None and time.monotonic() - self.started > limit

    @property
    def tool_calls(self) -> int:
        return sum(len(turn.calls) for turn in self.turns)

    def room(self, added: int = 0) -> int:
        """Returns how many tokens the model may generate in the next turn, after `added` tokens of the environment in
        the current row."""
        assert self.conversation is not None
        sampled = sum(turn.stop - turn.start for turn in self.turns)
        rooms = [
            self.sampling.max_tokens - self.conversation.used - added,
            (self.settings.trajectory_tokens or self.sampling.max_tokens) - sampled,
        ]
        return min([*rooms, *([self.settings.turn_tokens] if self.settings.turn_tokens else [])])

    def next_request(self) -> Request:
        """Returns the request for the next turn of the model. The sampling noise depends only on the row, the sample
        and the turn."""
        assert self.conversation is not None
        self.asks = True
        return Request(
            self.conversation.context,
            turn_key(self.request.key, len(self.turns)),
            first=self.sample,
            max_tokens=self.room(),
            partial_responses={self.sample: self.partial} if self.partial.ids else None,
            session=self.session,
            stop_strings=self.stop_strings,
            stop_ids=self.stop_ids,
            images=self.conversation.images,
            question=self.question,
        )

    def sampled(self, completion: Completion, version: int | None) -> bool:
        """Records which weights generated the tokens of a turn, if `version` is given. Returns False if the turn was
        paused; its tokens are then kept for the next request."""
        new = len(completion.ids) - len(self.partial_versions)
        versions = list(completion.versions) if version is None else [*self.partial_versions, *[version] * new]
        if completion.stop == PAUSED:
            self.partial = PartialResponse(completion.ids, completion.logprobs, completion.routes)
            self.partial_versions = versions
            return False
        self.asks, self.partial, self.partial_versions = False, PartialResponse(), []
        self.versions += versions
        return True

    def end_turns_at(self, fields: Mapping[str, Any]) -> None:
        """Sets the strings and token ids that end the next turn, as the environment's answer says."""
        if fields.get("stop") is not None:
            self.stop_strings = tuple(fields["stop"])
        if fields.get("stop_ids") is not None:
            self.stop_ids = tuple(fields["stop_ids"])

    def read_turn(self, completion: Completion, chat: ChatFormat) -> Reply:
        """Returns a turn of the model, before its tokens are added to the conversation."""
        conversation, ids = self.conversation, list(completion.ids)
        assert conversation is not None
        while ids and ids[-1] in chat.end_ids:
            ids.pop()
        finish = "length" if completion.stop == "length" else "stop"
        if isinstance(conversation, TokenConversation):
            text = chat.decode(ids)
            return Reply(text, text, finish=finish, ids=tuple(completion.ids))
        reply = parse_reply(
            ids,
            chat.tokenizer,
            self.settings.parser,
            conversation.tools,
            prompt=chat.decode(conversation.context[-PROMPT_TOKENS:]),
            finish=finish,
            first_call=self.tool_calls,
        )
        return replace(reply, ids=tuple(completion.ids))

    def answered(self, fields: Mapping[str, Any]) -> None:
        """Records the environment's answer to the last turn."""
        metrics, self.anchor = fields["metrics"], fields["anchor"]
        self.turns[-1] = replace(self.turns[-1], reward=fields["reward"], metrics=metrics)
        for name, value in metrics.items():
            self.counts[name] = self.counts.get(name, 0.0) + value

    def trajectory(self) -> Trajectory:
        conversation = self.conversation
        _, rows = ([], []) if conversation is None else conversation.rows()
        metrics = {
            **self.run_counts,
            "turns": float(len(self.turns)),
            "tool_calls": float(self.tool_calls),
            "parse_errors": float(sum(bool(turn.parse_error) for turn in self.turns)),
            "tokens": float(sum(row.loss_mask.count(0) for row in rows)),
            "rows": float(len(rows)),
            "seconds": self.seconds,
        }
        messages = [] if conversation is None else list(conversation.messages)
        offsets = [] if conversation is None else conversation.offsets()
        turns = tuple(
            replace(turn, start=turn.start + offsets[row], stop=turn.stop + offsets[row])
            for turn, row in zip(self.turns, self.turn_rows, strict=True)
        )
        named = with_own(metrics, self.counts)
        images = [] if conversation is None else conversation.row_images()
        return Trajectory(messages, turns, self.stop, dict(self.scores), named, self.info, self.state, images)

    def completion(self) -> Completion:
        trajectory, conversation = self.trajectory(), self.conversation
        if self.failure or conversation is None:
            failed = Completion(self.number, self.sample, [], [], FAILED, failure=self.failure or "no turn")
            return replace(failed, failure_key=self.failure_key, trajectory=replace(trajectory, images=()))
        stop = self.ended_by if self.ended_by in ("token", "string") else "environment"
        prompt, rows = conversation.rows()
        trained = [mask for row in rows for mask in row.loss_mask]
        return Completion(
            self.number,
            self.sample,
            [token for row in rows for token in row.ids],
            [logprob for row in rows for logprob in row.logprobs],
            "length" if self.stop in TRUNCATED else stop,
            trained,
            versions=spread_versions(self.versions, trained),
            prompt_ids=prompt,
            trajectory=trajectory,
            rows=tuple(rows) if len(rows) > 1 else (),
            routes=rows[0].routes if len(rows) == 1 else None,
        )
