"""`ServerAdapter`: the operations that lockstep needs from a serving engine, and their arguments."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from lockstep.types import Sampling
from lockstep.vision.spans import ImageSpan

Ended = Literal["token", "string", "length", "aborted"]
MemoryPart = Literal["weights", "cache"]
# The largest accepted log-prob is above 0, because rounding can make the log-prob of a token with probability 1
# slightly positive.
_MOST_LOGPROB = 0.01
BUCKET_BYTES = 256 * 2**20


class ServerFailed(Exception):
    """A request to a server failed. If `lost`, the server may be down, and another server could answer the request. If
    `gone`, the server has ended, or its health checks have failed for `GONE_SECONDS`."""

    def __init__(self, why: str, *, lost: bool = False, status: int | None = None, gone: bool = False):
        super().__init__(why)
        self.lost, self.status, self.gone = lost, status, gone


class Channel(Protocol):
    """Sends HTTP requests to one server. Every call ends within `seconds`; a failure raises `ServerFailed`."""

    @property
    def address(self) -> str: ...

    def get(self, path: str, seconds: float | None = None) -> Any:
        """Returns the parsed JSON of the response, or None for an empty body."""

    def post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any: ...


@dataclass(frozen=True)
class WantedSample:
    """A request for one sample: the prompt, the sampling settings, and the LoRA adapter (None means the base model)."""

    ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    seed: int
    adapter: str | None = None
    session: int | None = None
    """The trajectory of this turn. All turns go to the same server, whose prefix cache has the turns before."""
    images: tuple[ImageSpan, ...] = ()
    """The images of `ids`, which have their placeholder tokens."""
    row: str = ""
    """The data row of the prompt, for messages."""

    @property
    def unexpanded_ids(self) -> list[int]:
        """The ids with one placeholder token per image, from which a server writes the placeholder tokens itself."""
        made, done = list[int](), 0
        for image in self.images:
            made += [*self.ids[done : image.start], self.ids[int(image.places()[0])]]
            done = image.stop
        return [*made, *self.ids[done:]]


@dataclass(frozen=True)
class Answer:
    """The answer to a `WantedSample`. If the model generated an end token, it is the last entry of `ids`. `version` is
    the version of the weights that generated the tokens, or None if the engine does not report it. `cached` is the
    number of prompt tokens from the prefix cache, 0 if the engine does not report it."""

    ids: list[int]
    logprobs: list[float]
    ended: Ended
    version: str | None = None
    cached: int = 0
    routes: np.ndarray | None = None
    """The experts of the first tokens of prompt and response, [tokens, layers, experts per token]. The engine may count
    layers without experts too."""


def prompt_digest(ids: Sequence[int]) -> str:
    """Returns a digest that identifies a prompt; `plugin/lockstep_samples.py` computes the same digest."""
    return hashlib.sha256(json.dumps(list(ids), separators=(",", ":")).encode()).hexdigest()[:16]


def refuse_other_prompt(wanted: WantedSample, answered: object, ids: Sequence[int] | None = None) -> None:
    """Raises `ServerFailed` if `answered`, the prompt digest in the server's answer, is not the digest of the requested
    prompt. `ids` are the token ids that the server made of a prompt with images."""
    digest = prompt_digest(wanted.ids)
    if answered == digest:
        return
    if not wanted.images or ids is None:
        raise ServerFailed(f"the answer belongs to another prompt: its digest is {answered}, not {digest}")
    place = next((at for at, (own, other) in enumerate(zip(wanted.ids, ids, strict=False)) if own != other), None)
    place = min(len(wanted.ids), len(ids)) if place is None else place
    raise ServerFailed(
        f"the prompt of {wanted.row or 'a request'} with {len(wanted.images)} images has {len(wanted.ids)} tokens, but "
        f"{len(ids)} in the server, and they differ from token {place} on: use the same model folder with the same "
        "preprocessor_config.json"
    )


def checked_answer(answer: Answer, wanted: WantedSample, vocabulary: int) -> Answer:
    """Validates an answer; raises `ServerFailed` if it cannot be an answer to the request `wanted`."""
    ids, logprobs, stops = answer.ids, answer.logprobs, wanted.sampling.stop_ids
    if answer.ended == "aborted":
        return answer  # an aborted answer is dropped and requested again
    if len(ids) != len(logprobs):
        raise ServerFailed(f"an answer has {len(ids)} tokens but {len(logprobs)} log-probs; expected equal numbers")
    if not 1 <= len(ids) <= wanted.max_tokens:
        raise ServerFailed(f"an answer of {len(ids)} tokens; the request allows 1 to {wanted.max_tokens}")
    for place, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ServerFailed(f"token {place} of an answer is {token!r}: the vocabulary has {vocabulary:,} tokens")
    for place, logprob in enumerate(logprobs):
        if not (math.isfinite(logprob) and logprob <= _MOST_LOGPROB):
            raise ServerFailed(f"the log-prob of token {place} of an answer is {logprob}: above 0 or not finite")
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    if end is not None and end < len(ids) - 1:
        raise ServerFailed(f"an answer of {len(ids)} tokens continues after its end token {ids[end]} at position {end}")
    if answer.ended == "token" and end is None:
        raise ServerFailed(f"an answer ended with token {ids[-1]}, which is not an end token of the run")
    if answer.ended == "string" and not wanted.sampling.stop_strings:
        raise ServerFailed("an answer ended by a stop string, but the request has no stop strings")
    return answer if end is None else replace(answer, ended="token")


@dataclass(frozen=True)
class PushedWeights:
    """Weights for a server: safetensors files with every trained tensor, named as in the Hugging Face checkpoint.
    `names` lists the tensors of all files."""

    files: Sequence[Path]
    names: Sequence[str]
    sums: Sequence[int]
    """The checksum of each tensor (`bit_sum` of `plugin/lockstep_group.py`), in the order of `names`. An adapter has
    none."""
    bytes: int = 0


@dataclass(frozen=True)
class GroupMeeting:
    """The rendezvous data of a process group in which the run is rank 0 and the workers of servers are the other
    ranks."""

    address: str
    port: int
    """Port of the run's TCP store."""
    name: str
    backend: str
    """The torch.distributed backend of the device class."""
    size: int
    seconds: float
    """Time limit of the rendezvous."""
    first: int
    """The rank of the server's first worker. One group may have the workers of several servers."""


@dataclass(frozen=True)
class Announced:
    """Describes the tensors that the run sends next, in the order of sending, with their names in the Hugging Face
    checkpoint."""

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    dtype: str
    """The name of the torch dtype, such as `bfloat16`."""
    counts: Sequence[int]
    """The number of tensors of each bucket."""


@dataclass(frozen=True)
class Placed:
    """Describes tensors in memory that the server can map."""

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    sums: Sequence[int]
    """The checksum of each tensor (`bit_sum` of `plugin/lockstep_group.py`)."""
    dtype: str
    places: Sequence[Mapping[str, Any]]
    """The location of each tensor (`plugin/lockstep_shared.py`)."""


@dataclass(frozen=True)
class ServerNeeds:
    """What a run requires of its server, no matter whether lockstep or the user starts the server."""

    device: str
    """Name of the device class (`device/`)."""
    sleep: bool = False
    lora_rank: int | None = None
    """Rank of the LoRA adapter, or None if the run has no adapter."""
    turns: bool = False
    """Whether trajectories have several turns, which the prefix cache of the server speeds up."""
    precision: str | None = None
    """The value of `rollout.precision`: the server quantises the weights of every push."""
    routes: bool = False
    """Whether answers must have the experts of each token (`algorithm.routing_replay: rollout`)."""
    images: bool = False
    """Whether prompts have images."""


@dataclass(frozen=True)
class ServerStart:
    """The arguments for starting a server."""

    python: str
    model: str
    dtype: str
    """Precision of the weights: fp32, bf16 or fp16."""
    host: str
    port: int
    tensor_parallel: int
    needs: ServerNeeds
    args: Sequence[str] = ()
    key: str = ""
    """The API key of the server."""
    key_file: str = ""
    """A config file for SGLang that contains the API key. The key is not a flag, because every user of the machine can
    read command lines."""


@dataclass(frozen=True)
class ServerMetadata:
    """The properties that a server reports; a property is None if the server does not report it."""

    engine: str
    """Name and version of the engine, such as `vllm 0.32.0`."""
    vocabulary: int | None = None
    longest: int | None = None
    """Maximum sequence length in tokens."""
    dtype: str | None = None
    wrong: Sequence[str] = field(default=())
    """Reasons why the run cannot use the server's settings, each with a remedy."""


def other_quantization(found: str | None, expected: str | None) -> str | None:
    """Returns why the run cannot use a server with the quantisation `found`, or None if it is the expected one."""
    if found == expected:
        return None
    if expected is None:
        return f"its weights are quantized ({found}): start it without quantization"
    return f"its weights are not quantized as rollout.precision needs it ({found}): use --quantization {expected}"


class ServerAdapter(Protocol):
    """The interface to one serving engine, such as vLLM. Methods with an argument `client` send requests to one server
    and return when the requests are complete; a failed request raises `ServerFailed`."""

    name: str
    """The value of `rollout.engine`."""
    package: str
    """The Python package of the engine."""
    samples_together: bool
    """Whether one request to the HTTP route that `ask` returns can contain many samples."""
    opens_memory: bool
    """Whether `take` (weights from shared memory) is supported."""
    reads_key_file: bool
    """Whether the server reads its key from `ServerStart.key_file`."""
    gone_statuses: tuple[int, ...]
    """HTTP statuses with which GET /health reports that the engine behind the HTTP server is dead."""
    bucket_bytes: int
    """Maximum number of bytes of a bucket; a larger tensor is a bucket by itself."""
    receives_all: bool
    """Whether one call of `receive` receives all buckets, each as one buffer (`flat_bucket`). Otherwise a call receives
    one bucket, with one broadcast per tensor."""

    def install(self, device: str) -> str:
        """Returns the command that installs the engine for a device class in a separate environment."""

    # -- start

    def command(self, start: ServerStart) -> list[str]:
        """Returns the command line that starts a server."""

    def environment(self, start: ServerStart) -> dict[str, str]:
        """Returns the environment variables to add for a server; `rollout.server.env` overrides them."""

    def settings(self, needs: ServerNeeds) -> dict[str, str]:
        """Returns the command-line flags (`--name value`) that depend on `needs`, each with its reason."""

    def started_by_hand(self, needs: ServerNeeds) -> str:
        """Describes how a user starts a server for `rollout.url`, with the required flags and variables."""

    # -- generate

    def ask(self, wanted: WantedSample) -> tuple[str, dict[str, Any]]:
        """Returns the path and the body of the request for one sample. The request must ask for log-probs of the
        sampling distribution and override the defaults of the model folder (penalties, end tokens)."""

    def read(self, answered: Any, wanted: WantedSample) -> Answer:
        """Parses the server's answer; raises `ServerFailed` if the answer does not match the request."""

    # -- weights: pause, push, flush, end, resume

    def pause(self, client: Channel) -> None:
        """Stops generation and aborts running requests."""

    def resume(self, client: Channel) -> None: ...

    def push(self, client: Channel, weights: PushedWeights) -> None:
        """Loads the weights from files. After this call, the files can be deleted. Raises `ServerFailed` for missing or
        extra tensors and, if the engine supports checksums, for corrupt tensors."""

    def end(self, client: Channel, version: str) -> None:
        """Ends the push and sets the version of the loaded weights."""

    def flush(self, client: Channel, images: bool) -> None:
        """Drops the KV cache of the previous weights and, with `images`, the features of images."""

    def version(self, client: Channel) -> str:
        """Returns the version of the loaded weights. A server that has just started returns a version that no run
        uses."""

    def take(self, client: Channel, placed: Placed) -> str | None:
        """Loads the weights from shared memory of the same machine, as an alternative to `push`. Returns None on
        success, or the reason why the memory cannot be mapped; the weights are then unchanged."""

    # -- weights by broadcast in a process group instead of `push`: join once, then begin, receive, finish

    def workers(self, client: Channel) -> int:
        """Returns the number of worker processes of the server."""

    def join(self, client: Channel, meeting: GroupMeeting) -> None:
        """Makes all workers of the server join the process group."""

    def begin(self, client: Channel) -> None:
        """Starts a weight update through the process group."""

    def receive(self, client: Channel, group: str, announced: Announced) -> None:
        """Makes the server receive the announced tensors while the run broadcasts them. Raises `ServerFailed` with
        `lost=True` if the server is not in the process group."""

    def finish(self, client: Channel) -> None:
        """Ends a weight update through the process group."""

    def leave(self, client: Channel, group: str) -> None:
        """Makes the server's workers leave the group."""

    # -- adapters

    def load_adapter(self, client: Channel, name: str, folder: Path) -> None:
        """Loads a PEFT folder as the LoRA adapter `name` and unloads earlier adapters."""

    # -- memory

    def sleep(self, client: Channel, *, discard_weights: bool) -> None:
        """Makes the server release device memory. With `discard_weights` the server may drop its weights, because the
        run pushes them again before the next request."""

    def wake(self, client: Channel, part: MemoryPart) -> None:
        """Makes a sleeping server allocate the memory of its weights, or of its KV cache, again."""

    # -- health

    def healthy(self, client: Channel) -> None:
        """Raises `ServerFailed` if the server does not respond."""

    def metadata(self, client: Channel, needs: ServerNeeds) -> ServerMetadata: ...
