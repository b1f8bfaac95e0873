"""The nouns of the domain, a type per stage. Nothing here is None until later.

Tensor shapes carry a suffix: N micro-batch rows, T positions, K trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """Where a row came from, for every message that must name it."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


@dataclass(frozen=True)
class Example:
    """A row as tokens. `trained[i]` is 1 where token i is a target (predicted from the tokens before it), else 0."""

    ids: Sequence[int]
    loss_mask: Sequence[int]
    origin: Origin

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def examples(self) -> tuple[Example, ...]:
        return (self,)

    def scored_tokens(self) -> list[tuple[int, int]]:
        """(position, token id) of each question to the model. The first token has nothing before it."""
        return [(i - 1, self.ids[i]) for i in range(1, len(self.ids)) if self.loss_mask[i]]

    @property
    def targets(self) -> int:
        """How many tokens are really predicted."""
        return self.loss_mask[1:].count(1)

    @property
    def trained_tokens(self) -> int:
        """How many tokens something is learned at, for people."""
        return self.targets

    def cut(self, span: slice) -> Self:
        """The tokens of the span alone."""
        return replace(self, ids=self.ids[span], loss_mask=self.loss_mask[span])


@dataclass(frozen=True)
class ScoredExample(Example):
    """A row whose targets are outputs at given positions: the model scores each of `token_ids` at each of `positions`.

    A model with a scalar head has one output per position; `token_ids` then has one entry, which is not used.
    """

    positions: Sequence[int] = ()
    token_ids: Sequence[int] = (0,)

    def scored_tokens(self) -> list[tuple[int, int]]:
        return [(position, token) for position in self.positions for token in self.token_ids]

    @property
    def targets(self) -> int:
        return len(self.positions) * len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        """Positions, however many token ids are scored at each."""
        return len(self.positions)

    def cut(self, span: slice) -> Self:
        kept = tuple(position - span.start for position in self.positions if span.start <= position < span.stop)
        return replace(super().cut(span), positions=kept)


class Item(Protocol):
    """What a data set of an offline method is made of: the sequences that one loss compares."""

    @property
    def examples(self) -> tuple[Example, ...]: ...

    @property
    def origin(self) -> Origin: ...


@dataclass(frozen=True)
class Ranking:
    """Responses to one prompt, the best first; a pair is a ranking of two. `margin` is asked of a pair's scores."""

    examples: tuple[Example, ...]
    margin: float = 0.0

    @property
    def origin(self) -> Origin:
        return self.examples[0].origin


@dataclass(frozen=True)
class _SingleExample:
    """A row of one sequence, with something said about it."""

    example: Example

    @property
    def examples(self) -> tuple[Example, ...]:
        return (self.example,)

    @property
    def origin(self) -> Origin:
        return self.example.origin


@dataclass(frozen=True)
class LabeledResponse(_SingleExample):
    """A response with a verdict."""

    desirable: bool


@dataclass(frozen=True)
class StepLabels(_SingleExample):
    """A solution with a verdict on each step: `labels[i]` is the wanted distribution over the token ids at step i."""

    example: ScoredExample
    labels: tuple[tuple[float, ...], ...]


class ContextSplit(Protocol):
    """How the ranks of a context group divide a micro-batch (`parallel/context_split.py`)."""

    def local_part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of the micro-batch, and the targets that they predict."""

    @property
    def local_T(self) -> torch.Tensor:
        """On the host: where this rank's tokens stand on the whole line."""

    def layout(self, device: torch.device, kernel: str) -> Any:
        """How the attention named `kernel` finds the tokens of all ranks."""

    def gather_outputs(self, said: Any) -> Any:
        """What a module says of this rank's targets, as what it says of all."""


@dataclass(frozen=True)
class MicroBatch:
    """What one device runs forward at once: packed rows in one line (N = 1), or right-padded rows.

    `lengths` are the sequence lengths in order: along the line when packed, one for each row when padded. Sequences on
    a line may share their beginning, which then stands there once; `packed_index_E` says where each token of the whole
    sequences, one after another, is on the line (None: they stand there whole).
    `predictors_K` index the flattened N*T positions whose hidden state predicts `targets_K`; `index_K` says where
    these targets stand among all the targets of the update.
    """

    input_ids_NT: torch.Tensor
    position_ids_NT: torch.Tensor
    lengths: tuple[int, ...]
    packed: bool
    predictors_K: torch.Tensor
    targets_K: torch.Tensor
    index_K: torch.Tensor
    origins: tuple[Origin, ...] = field(default=())
    packed_index_E: torch.Tensor | None = None
    teacher: Callable[[MicroBatch], Any] | None = None
    """Tells what a teacher says of the targets, when the micro-batch is run (see `kernels/divergence.py`)."""
    local_index_K: torch.Tensor | None = None
    """Where they stand among those targets of the update that this rank has; None where it has all of them."""
    token_grads: Callable[..., Any] | None = None
    """Tells how the loss depends on each target, up to a factor, before it is whole (see `kernels/logprob.py`)."""
    context: ContextSplit | None = None
    """Who has which of its tokens, where the ranks of a context group divide it. A rank's own part says so too, and
    its `lengths` are still those of whole sequences."""

    @property
    def vector_index_K(self) -> torch.Tensor:
        """Where the targets stand in this rank's vectors of the update."""
        return self.index_K if self.local_index_K is None else self.local_index_K

    @property
    def tokens(self) -> int:
        """Real tokens, padding not counted; the one token of an empty share is none."""
        return sum(self.lengths) if len(self.targets_K) else 0


@dataclass
class Sums:
    """A loss and its companions as sums over tokens; the one division happens in the step."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


# What a module gives for a micro-batch, and the micro-batch, to sums.
Loss = Callable[[Any, MicroBatch], Sums]


@dataclass(frozen=True)
class Question:
    """A prompt whose answer a reward can judge (one RL row)."""

    data_source: str
    prompt: list[Message]
    ground_truth: str
    origin: Origin
    extra_info: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()
    """What the answer may call, as JSON schemas that the chat template writes down."""


@dataclass(frozen=True)
class Prompt:
    """A question as the tokens that the model will continue."""

    question: Question
    ids: Sequence[int]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy. `seed` is the run's; see `kernels/sampling.py` for the rest."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    score_truncated: bool = False
    """Log-probabilities are those of the truncated distribution (top-p, top-k, min-p), not of the whole one."""


@dataclass(frozen=True)
class PartialResponse:
    """A response as far as it was written before a pause."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """A prompt to be continued `n` times. `key` is the prompt's part of the noise's counter, `first` the number of the
    first sample.

    `max_tokens` is a limit of its own, below the sampling's. `question` is what the prompt asks, for what is more than
    a model; engines do not look at it. `begun` names, after a pause, the samples that are left and how far each is; an
    engine that never pauses does not look at it either.
    """

    ids: Sequence[int]
    key: int
    n: int = 1
    first: int = 0
    max_tokens: int | None = None
    question: Question | None = None
    partial_responses: Mapping[int, PartialResponse] | None = None


# Why a completion ended that did not end: its engine was asked to pause.
PAUSED = "paused"
# Stop reason of a completion that a rollout function failed to make, and the key of that function.
FAILED = "failed"
ROLLOUT_FUNCTION = "rollout.function"


@dataclass(frozen=True)
class Completion:
    """Sample number `sample` of request number `request`. An end token that was produced is the last of `ids`."""

    request: int
    sample: int
    ids: list[int]
    logprobs: list[float]
    stop: str
    """Why it ended: `token`, `string` or `length`; `environment` where a rollout function ended it, `failed` where
    that function failed."""
    loss_mask: Sequence[int] = ()
    """As in `Rollout`."""
    versions: Sequence[int] = ()
    """As in `Rollout`."""
    failure: str = ""
    """Why there is no response, where a rollout function failed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", _mask(self.loss_mask, self.ids))


def _mask(trained: Sequence[int], ids: Sequence[int]) -> list[int]:
    """One entry for each token; none at all says that the policy wrote every token."""
    if trained and len(trained) != len(ids):
        raise ValueError(f"a mask of {len(trained)} entries for {len(ids)} tokens")
    return list(trained) or [1] * len(ids)


@dataclass(frozen=True)
class Score:
    """What a response earned: the weighted total, and each reward by itself.

    `steps` are the shares of the total that were earned before the end: (end of the step in the text, share).
    """

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Failure:
    """A reward that gave no score, or a rollout function that gave no response: it is left out of baselines and loss,
    and counted. Never a zero. `part` is the reward, or `ROLLOUT_FUNCTION`."""

    part: str
    why: str
    log: str | None = field(default=None, compare=False)
    """File with the last lines that the reward's process printed. Which process it was depends on who was free."""

    @property
    def key(self) -> str:
        """The recipe's key of what failed."""
        return self.part if self.part == ROLLOUT_FUNCTION else f"reward.{self.part}"

    @property
    def message(self) -> str:
        """Why, and where to look further."""
        return self.why + (f" (what it printed last is in {self.log})" if self.log else "")


@dataclass(frozen=True)
class Turn:
    """A run of tokens by one writer: the policy, or an environment."""

    policy: bool
    ids: list[int]


@dataclass(frozen=True)
class Rollout:
    """A completion with its prompt, its text and its judgement. `prompt_index` is the prompt's index in the step.

    `trained[i]` is 1 where the policy wrote token i, and 0 where an environment did: such a token is seen, never
    trained, and its entry in `logprobs` is 0. `earned` are the shares of the score that belong to a token before the
    last: (token, share). `versions` are the updates that the weights had seen which drew each token; empty where
    generation and training take turns, so that it is the step's own number.
    """

    prompt: Prompt
    prompt_index: int
    sample: int
    ids: list[int]
    logprobs: list[float]
    stop: str
    text: str
    score: Score | Failure
    token_rewards: tuple[tuple[int, float], ...] = ()
    loss_mask: Sequence[int] = ()
    versions: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", _mask(self.loss_mask, self.ids))

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the policy wrote."""
        return sum(self.loss_mask)

    @property
    def turns(self) -> list[Turn]:
        """The tokens in order, cut wherever the writer changes."""
        found: list[Turn] = []
        for token, trained in zip(self.ids, self.loss_mask, strict=True):
            if not found or found[-1].policy != bool(trained):
                found.append(Turn(bool(trained), []))
            found[-1].ids.append(token)
        return found


@dataclass(frozen=True)
class RolloutMeta:
    """A rollout without its tokens and its text: what every rank knows of it, wherever it is."""

    prompt_index: int
    sample: int
    prompt_tokens: int
    response_length: int
    """Of the response, an environment's among them."""
    num_response_tokens: int
    """Those that the policy wrote."""
    shared: int
    """Tokens at the beginning of the sequence that all scored responses to the prompt have in common, none trained."""
    stop: str
    score: Score | Failure
    """Without its steps."""

    @property
    def length(self) -> int:
        """Of the whole sequence."""
        return self.prompt_tokens + self.response_length
