"""What a serving engine calls things: the verbs that lockstep needs of one, and the nouns that they take."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from lockstep.types import Sampling

Ended = Literal["token", "string", "length", "aborted"]
MemoryPart = Literal["weights", "cache"]
# What rounding may leave of the log-prob of a token that is certain.
_MOST_LOGPROB = 0.01


class ServerFailed(Exception):
    """A request to a server failed. `lost`: the server may be down or broken, and another one could serve the request.
    `gone`: the health checks have failed for a while."""

    def __init__(self, why: str, *, lost: bool = False, status: int | None = None, gone: bool = False):
        super().__init__(why)
        self.lost, self.status, self.gone = lost, status, gone


class Channel(Protocol):
    """One server, over HTTP. Every call ends within `seconds`; what is no success is `Failed` (see `line.py`)."""

    @property
    def address(self) -> str: ...

    def get(self, path: str, seconds: float | None = None) -> Any:
        """What is answered, from its JSON; None for an answer without a body."""

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any: ...


@dataclass(frozen=True)
class WantedSample:
    """One sample: a prompt, how it is continued, and by which adapter (None: by the model itself)."""

    ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    seed: int
    adapter: str | None = None


@dataclass(frozen=True)
class Answer:
    """What became of it. An end token that was produced is the last of `ids`. `version` is that of the weights which
    drew the tokens, None where the engine does not say."""

    ids: list[int]
    logprobs: list[float]
    ended: Ended
    version: str | None = None


def prompt_digest(ids: Sequence[int]) -> str:
    """Tells prompts apart in an answer (`plugin/lockstep_samples.py` computes the same)."""
    return hashlib.sha256(json.dumps(list(ids), separators=(",", ":")).encode()).hexdigest()[:16]


def refuse_other_prompt(wanted: WantedSample, answered: object) -> None:
    """`answered` is the digest of the prompt that the answer belongs to, as the server has it."""
    own = prompt_digest(wanted.ids)
    if answered != own:
        raise ServerFailed(f"an answer to another prompt: the digest of its prompt is {answered}, not {own}")


def checked_answer(answer: Answer, wanted: WantedSample, vocabulary: int) -> Answer:
    """The answer where it can be a response to what was asked; `ServerFailed` where it cannot."""
    ids, logprobs, stops = answer.ids, answer.logprobs, wanted.sampling.stop_ids
    if answer.ended == "aborted":
        return answer  # it is dropped and asked again
    if len(ids) != len(logprobs):
        raise ServerFailed(f"an answer with {len(ids)} tokens and {len(logprobs)} log-probs")
    if not 1 <= len(ids) <= wanted.max_tokens:
        raise ServerFailed(f"an answer of {len(ids)} tokens, and 1 to {wanted.max_tokens} were asked for")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ServerFailed(f"token {place} of an answer is {token!r}: the vocabulary has {vocabulary:,} tokens")
    for place, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= _MOST_LOGPROB):
            raise ServerFailed(f"the log-prob of token {place} of an answer is {logprob}")
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    if end is not None and end < len(ids) - 1:
        raise ServerFailed(f"an answer of {len(ids)} tokens goes on after its end token {ids[end]} at place {end}")
    if answer.ended == "token" and end is None:
        raise ServerFailed(f"an answer that ended with token {ids[-1]}, which is no end token of the run")
    if answer.ended == "string" and not wanted.sampling.stop_strings:
        raise ServerFailed("an answer that a stop text ended, and none was asked for")
    return answer if end is None else replace(answer, ended="token")


@dataclass(frozen=True)
class PushedWeights:
    """Weights on their way: safetensors files that hold every trained tensor of the model, under the names of its
    Hugging Face checkpoint. `names` are all of them, over all files."""

    files: Sequence[Path]
    names: Sequence[str]
    sums: Sequence[int]
    """Of the bits of each tensor, as `Announced` has them."""


@dataclass(frozen=True)
class GroupMeeting:
    """Where a run, which is rank 0, and the workers of a server, which are the ranks behind it, make a group."""

    address: str
    port: int
    """Of the run's TCP store."""
    name: str
    backend: str
    """Of torch.distributed, as the device class says it."""
    size: int
    seconds: float
    """The most that one waits for the others."""


@dataclass(frozen=True)
class Announced:
    """Tensors that come next, in this order, under the names of the Hugging Face checkpoint."""

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    sums: Sequence[int]
    """Of the bits of each tensor (`plugin/lockstep_group.py`)."""
    dtype: str
    """As torch says it."""


@dataclass(frozen=True)
class Placed(Announced):
    """Tensors in memory that the server can open."""

    places: Sequence[Mapping[str, Any]]
    """Where each is (`plugin/lockstep_shared.py`)."""


@dataclass(frozen=True)
class ServerNeeds:
    """What a run needs of a server, whoever starts it."""

    device: str
    """Name of the device class (`device/`)."""
    sleep: bool = False
    lora_rank: int | None = None
    """None: no adapter."""


@dataclass(frozen=True)
class ServerStart:
    """A server that is to be started."""

    python: str
    model: str
    dtype: str
    """fp32, bf16 or fp16."""
    host: str
    port: int
    tensor_parallel: int
    needs: ServerNeeds
    args: Sequence[str] = ()
    key: str = ""
    """What every request must bring."""
    key_file: str = ""
    """A file of SGLang's flags that holds it: a command line can be read by every user of the machine."""


@dataclass(frozen=True)
class ServerMetadata:
    """What a server says of itself; None where it does not."""

    engine: str
    """Name and version, as in `vllm 0.32.0`."""
    vocabulary: int | None = None
    longest: int | None = None
    """Longest sequence in tokens."""
    dtype: str | None = None
    wrong: Sequence[str] = field(default=())
    """Settings of the server with which it cannot be used, each with what to set instead."""


class ServerAdapter(Protocol):
    """The verbs. All but `command`, `environment`, `ask` and `read` go to one server and return when it has done it; a
    server that does not, or says that it could not, raises `Failed`."""

    name: str
    """As `rollout.engine` says it."""
    package: str
    """The module that the server's Python must have."""
    samples_together: bool
    """Whether the route of `ask` takes many samples in one request (`together.py`)."""
    opens_memory: bool
    """Whether it has `take`."""
    reads_key_file: bool
    """Whether a server takes its key from `ServerStart.key_file`."""
    gone_statuses: tuple[int, ...]
    """Of GET /health, where the server answers and what generates behind it is dead."""
    bucket_bytes: int | None
    """The most that `receive` takes at once; None where it takes one tensor after another by itself."""

    def install(self, device: str) -> str:
        """The command that installs the engine for a device class, in an environment of its own."""

    # -- start

    def command(self, start: ServerStart) -> list[str]:
        """The command line of a server."""

    def environment(self, start: ServerStart) -> dict[str, str]:
        """Environment variables of a server, besides those of the run; `rollout.server.env` wins over them."""

    def settings(self, needs: ServerNeeds) -> dict[str, str]:
        """Flags that depend on what the run needs (`--name value`), each with why; for people and for `command`."""

    def started_by_hand(self, needs: ServerNeeds) -> str:
        """How a user starts a server for `rollout.url`: the flags and variables that it must have."""

    # -- generate

    def ask(self, wanted: WantedSample) -> tuple[str, dict[str, Any]]:
        """The path and the body of the request for one sample. Log-probs are asked of the distribution that is sampled
        from; nothing of the model's own defaults (penalties, end tokens) may be left to act."""

    def read(self, answered: Any, wanted: WantedSample) -> Answer:
        """The answer from its JSON; `Failed` where it is not what was asked for."""

    # -- weights: pause, push, flush, end, resume

    def pause(self, client: Channel) -> None:
        """Nothing is generated from here on; what is under way is aborted."""

    def resume(self, client: Channel) -> None: ...

    def push(self, client: Channel, weights: PushedWeights) -> None:
        """Take the weights from the files. Returns when they can be deleted; `Failed` where a tensor is missing, one
        too many, or (of engines that can tell) not what was written."""

    def end(self, client: Channel, version: str) -> None:
        """All weights have come; from here on they are `version`."""

    def flush(self, client: Channel) -> None:
        """Forget keys and values of earlier weights."""

    def version(self, client: Channel) -> str:
        """The version of the weights that it has; after a start something that no run says."""

    def take(self, client: Channel, placed: Placed) -> str | None:
        """In the place of `push`: take the weights from the memory that they are in, on the server's own machine. Why
        they cannot be opened, where nothing was touched; None where all is done."""

    # -- weights by a collective, in the place of `push`: join once, then begin, receive, finish

    def workers(self, client: Channel) -> int:
        """How many processes share the weights of the server: the ranks of a group besides the run."""

    def join(self, client: Channel, meeting: GroupMeeting) -> None:
        """All workers come to the meeting. Returns when the group is made."""

    def begin(self, client: Channel) -> None:
        """Tensors are coming."""

    def receive(self, client: Channel, group: str, announced: Announced) -> None:
        """Take what is announced from the group, while the run broadcasts it; `Failed` as lost where the server is in
        no such group."""

    def finish(self, client: Channel) -> None:
        """All tensors have come."""

    def leave(self, client: Channel, group: str) -> None:
        """Destroy the group."""

    # -- adapters

    def load_adapter(self, client: Channel, name: str, folder: Path) -> None:
        """Take a PEFT folder as the adapter `name`, and forget those before it."""

    # -- memory

    def sleep(self, client: Channel, *, discard_weights: bool) -> None:
        """Give memory back; `discard_weights` where they will come again before anything is generated."""

    def wake(self, client: Channel, part: MemoryPart) -> None:
        """Take the memory of weights, then that of the cache, again."""

    # -- health

    def healthy(self, client: Channel) -> None:
        """`Failed` where it does not answer yet, or any more."""

    def metadata(self, client: Channel, needs: ServerNeeds) -> ServerMetadata: ...
