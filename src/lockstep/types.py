"""The data types that the stages of a training step exchange.

Suffixes of tensor names give the shape, where N is the number of rows, T the number of positions, and K the number of
target tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.trajectory import TokenRun, Trajectory, TrajectoryRow, check_rows, full_mask, token_runs
from lockstep.vision.spans import ImageInputs, ImageRef, ImageSpan, cut_images

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """The file and the row number of a dataset row. Messages contain it."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


@dataclass(frozen=True)
class Example:
    """A tokenized row. `loss_mask[i]` is 1 if token i is a target (predicted from the tokens before it), else 0."""

    ids: Sequence[int]
    loss_mask: Sequence[int]
    origin: Origin
    images: tuple[ImageSpan, ...] = field(default=(), kw_only=True)
    """The images of the row, in the order of their placeholder tokens."""
    routes: np.ndarray | None = field(default=None, kw_only=True, compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def examples(self) -> tuple[Example, ...]:
        return (self,)

    def scored_tokens(self) -> list[tuple[int, int]]:
        """Returns (position, token id) of each target. The first token is never a target: no token precedes it."""
        return [(i - 1, self.ids[i]) for i in range(1, len(self.ids)) if self.loss_mask[i]]

    @property
    def targets(self) -> int:
        return self.loss_mask[1:].count(1)

    @property
    def trained_tokens(self) -> int:
        """The number of trained positions, which reports show."""
        return self.targets

    def cut(self, span: slice) -> Self:
        """Returns the example with only the tokens of the slice `span`."""
        images = cut_images(self.images, span)
        routes = None if self.routes is None else self.routes[span]
        return replace(self, ids=self.ids[span], loss_mask=self.loss_mask[span], images=images, routes=routes)


@dataclass(frozen=True)
class ScoredExample(Example):
    """A row whose targets are outputs at given positions: the model scores each of `token_ids` at each of `positions`.

    A model with a scalar head has one output per position and does not use `token_ids`, which has one entry.
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
        """The number of scored positions, whatever the number of token ids that are scored at each position."""
        return len(self.positions)

    def cut(self, span: slice) -> Self:
        kept = tuple(position - span.start for position in self.positions if span.start <= position < span.stop)
        return replace(super().cut(span), positions=kept)


class Item(Protocol):
    """One item of the dataset of an offline method: the sequences of one loss term, such as a pair of DPO."""

    @property
    def examples(self) -> tuple[Example, ...]: ...

    @property
    def origin(self) -> Origin: ...


@dataclass(frozen=True)
class Ranking:
    """Responses to one prompt, best response first. A pair has two responses. `margin` is the margin of the pair
    loss."""

    examples: tuple[Example, ...]
    margin: float = 0.0

    @property
    def origin(self) -> Origin:
        return self.examples[0].origin


@dataclass(frozen=True)
class _SingleExample:
    """A dataset item that has only one sequence."""

    example: Example

    @property
    def examples(self) -> tuple[Example, ...]:
        return (self.example,)

    @property
    def origin(self) -> Origin:
        return self.example.origin


@dataclass(frozen=True)
class LabeledResponse(_SingleExample):
    """A response with a binary label (KTO)."""

    desirable: bool


@dataclass(frozen=True)
class StepLabels(_SingleExample):
    """A solution with labels for its steps. `labels[i]` is the target distribution over the token ids at step i."""

    example: ScoredExample
    labels: tuple[tuple[float, ...], ...]


class ContextSplit(Protocol):
    """The split of a micro-batch over the ranks of a context-parallel group (`parallel/context_split.py`)."""

    def local_part(self, batch: MicroBatch) -> MicroBatch:
        """Returns the tokens of the micro-batch that belong to this rank, and the targets that these tokens predict."""

    @property
    def local_T(self) -> torch.Tensor:
        """The indices of this rank's tokens in the full packed row, as a CPU tensor."""

    def layout(self, device: torch.device, kernel: str) -> Any:
        """Returns the attention layout over all ranks for the attention kernel with the name `kernel`."""

    def gather_outputs(self, output: Any) -> Any:
        """All-gathers the outputs: each rank has the outputs for its own targets and receives those for all targets."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass on one device: sequences packed into one row (N = 1), or right-padded rows.

    `lengths` are the lengths of the sequences, in the order of the sequences. Sequences in a packed row may share a
    prefix, which is stored once. `packed_index_E` maps each token of the concatenated full sequences to its index in
    the packed row; it is None if no prefix is shared. `predictors_K` are the indices of the flattened N*T positions
    whose hidden states predict `targets_K`. `index_K` are the indices of `targets_K` among all targets of the update.
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
    """Computes the teacher's distributions at the targets (see `kernels/logit_divergence.py`)."""
    local_index_K: torch.Tensor | None = None
    """The indices of the targets among this rank's targets of the update; None if this rank has all of them."""
    token_grads: Callable[..., Any] | None = None
    """Computes the gradient of the loss with respect to the log-prob of each target, up to a constant factor (see
    `kernels/logprob.py`)."""
    context: ContextSplit | None = None
    """The split of this micro-batch over a context-parallel group. A micro-batch that `local_part` returns keeps this
    split, and its `lengths` are those of the full sequences."""
    images: ImageInputs | None = None
    """The images of the micro-batch; None if it has none."""
    routes_TLK: torch.Tensor | None = None
    """The experts that routers use for each of the N*T positions (`model/routing.py`); None: routers choose."""

    @property
    def vector_index_K(self) -> torch.Tensor:
        """The indices of the targets in the vectors of this rank that have one number per target of the update."""
        return self.index_K if self.local_index_K is None else self.local_index_K

    @property
    def tokens(self) -> int:
        """The number of tokens without padding. An empty micro-batch, which has only a dummy token, has 0 tokens."""
        return sum(self.lengths) if len(self.targets_K) else 0


@dataclass
class Sums:
    """A loss and its metrics as sums over tokens. `train/step.py` divides the sums of an update once."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


# A loss function: computes `Sums` from the output of a module and the micro-batch.
Loss = Callable[[Any, MicroBatch], Sums]


@dataclass(frozen=True)
class Question:
    """One dataset row of an online method: a prompt with the data that a reward function needs."""

    data_source: str
    prompt: list[Message]
    ground_truth: str
    origin: Origin
    extra_info: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()
    """The JSON schemas of the tools that a response may call. The chat template renders the tool schemas."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for this row, such as `enable_thinking`."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The columns of the row, with its prompt as `prompt`, for a reward function with TRL's signature. The dict is
    empty if no reward reads the columns."""
    images: tuple[ImageRef, ...] = ()
    """The images of the prompt, in the order of their placeholders in its messages."""


@dataclass(frozen=True)
class Prompt:
    """A tokenized question."""

    question: Question
    ids: Sequence[int]
    images: tuple[ImageSpan, ...] = ()
    """The images of the question, in the order of their placeholder tokens in `ids`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 means greedy decoding. `seed` is the run's seed (`kernels/sampling.py`)."""

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
    """Whether log-probs are of the truncated distribution (top-p, top-k, min-p) and not of the full distribution."""
    full_precision: bool = False
    """Whether the built-in engine ignores `rollout.precision` and `rollout.kv_cache`, as in validation."""
    routes: bool = False
    """Whether completions have their experts (`algorithm.routing_replay: rollout`)."""


@dataclass(frozen=True)
class PartialResponse:
    """The tokens of a response that were generated before a pause. `routes` is as in `Completion`."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Request:
    """A request for `n` samples of one prompt. `key` seeds the random numbers of the samples. `first` is the sample
    index of the first of these samples. `max_tokens` is an additional limit, which is lower than `Sampling.max_tokens`.
    Only rollout functions and environments use `question`; engines ignore it. After a pause, `partial_responses` has
    the unfinished samples; only engines that can pause use it."""

    ids: Sequence[int]
    key: int
    n: int = 1
    first: int = 0
    max_tokens: int | None = None
    question: Question | None = None
    partial_responses: Mapping[int, PartialResponse] | None = None
    session: int | None = None
    """The number of the trajectory of which this request is a turn. The ids of a later turn of a session begin with the
    ids and the tokens of the earlier turns, so an engine can continue from its cache."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end this response, in addition to those of `Sampling`."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end this response, in addition to those of `Sampling`."""
    images: tuple[ImageSpan, ...] = ()
    """The images of `ids`, which have their placeholder tokens."""

    def limits(self, sampling: Sampling) -> Sampling:
        """Returns the sampling parameters with the length limit and the stop conditions of this request."""
        if self.max_tokens is None and not self.stop_strings and not self.stop_ids:
            return sampling
        return replace(
            sampling,
            max_tokens=min(sampling.max_tokens, self.max_tokens or sampling.max_tokens),
            stop_strings=tuple(dict.fromkeys((*sampling.stop_strings, *self.stop_strings))),
            stop_ids=tuple(sorted({*sampling.stop_ids, *self.stop_ids})),
        )


# The stop reason of a completion that is unfinished, because the engine was paused.
PAUSED = "paused"
# The stop reason of a completion whose rollout function, environment or agent failed, and the recipe keys of these.
FAILED = "failed"
ROLLOUT_FUNCTION = "rollout.function"
ENVIRONMENT = "rollout.environment"
AGENT = "rollout.agent"


@dataclass(frozen=True)
class Completion:
    """A response: sample number `sample` of the request with index `request`. `ids` includes the end token if one was
    generated."""

    request: int
    sample: int
    ids: list[int]
    logprobs: list[float]
    stop: str
    """The stop reason: `token`, `string`, `length`, `environment` (a rollout function or an environment ended the
    response) or `failed` (the rollout function or the environment failed)."""
    loss_mask: Sequence[int] = ()
    """The mask is 1 for tokens of the policy and 0 for tokens of the environment, as in `Rollout`."""
    versions: Sequence[int] = ()
    """The version of the weights that generated each token, as in `Rollout`."""
    failure: str = ""
    """The error message, if the rollout function or the environment failed."""
    failure_key: str = ROLLOUT_FUNCTION
    """The recipe key of the code that failed."""
    prompt_ids: Sequence[int] | None = None
    """The prompt of a trajectory, which the environment wrote. None: the prompt is that of the request."""
    trajectory: Trajectory | None = None
    """The conversation with the environment. None without an environment."""
    rows: tuple[TrajectoryRow, ...] = ()
    """The rows of the trajectory, if it has several. `ids`, `logprobs` and `loss_mask` then concatenate the rows."""
    routes: np.ndarray | None = field(default=None, compare=False)
    """The experts of the first tokens of prompt and response, [tokens, layers, experts per token], if the engine
    records them. The last token has none, because no pass had it as input."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", full_mask(self.loss_mask, self.ids))
        check_rows(self.rows, self.ids)


@dataclass(frozen=True)
class Score:
    """The reward of a response: the weighted total, and each component (`parts`). `steps` assigns parts of the total to
    steps of the response, as pairs (end of the step in the text, amount). `tokens` assigns parts of the total to
    tokens, as pairs (token index, amount): the rewards of turns."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()
    tokens: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Failure:
    """A failed reward, rollout function or environment. The response is counted as failed and excluded from baselines
    and loss. The score of a failed response is never replaced by 0. `part` is the name of the reward component,
    `ROLLOUT_FUNCTION`, `ENVIRONMENT` or `AGENT`."""

    part: str
    why: str
    log: str | None = field(default=None, compare=False)
    """The last output of the process that ran the reward function. Timing decides which process that is."""

    @property
    def key(self) -> str:
        """The recipe key of the function that failed."""
        return self.part if self.of_rollout else f"reward.{self.part}"

    @property
    def of_rollout(self) -> bool:
        """Whether the response could not be generated, because the rollout function or the environment failed."""
        return self.part in (ROLLOUT_FUNCTION, ENVIRONMENT, AGENT)

    @property
    def message(self) -> str:
        """The reason of the failure, and the path of the log file if there is one."""
        return self.why + (f" (its last output is in {self.log})" if self.log else "")


@dataclass(frozen=True)
class Rollout:
    """A completion with its prompt, text and score. `prompt_index` is the index of the prompt in the step.

    `loss_mask[i]` is 1 for tokens of the policy and 0 for tokens of an environment. Environment tokens are not trained
    and have 0 in `logprobs`. `token_rewards` assigns parts of the score to tokens before the last token, as pairs
    (token index, amount). `versions` has for each token the version of the weights (number of steps) that generated it.
    `versions` is empty in synchronous runs, where all tokens of a step have the same version. `routes` is as in
    `Completion`; the rows of a trajectory have their own.
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
    trajectory: Trajectory | None = None
    """The conversation with the environment. None without an environment. `prompt.ids` is then the prompt that the
    environment wrote."""
    rows: tuple[TrajectoryRow, ...] = ()
    """The rows of the trajectory, if it has several rows, as in `Completion`."""
    key: int | None = None
    """The random key of the prompt, which seeds its sampling noise. None if it is not known."""
    routes: np.ndarray | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_mask", full_mask(self.loss_mask, self.ids))
        check_rows(self.rows, self.ids)

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens that the policy generated, without tokens of the environment."""
        return sum(self.loss_mask)

    @property
    def sequences(self) -> list[Example]:
        """The training sequences: one per row, in the order of the turns. Their loss masks select the policy tokens."""
        prompt, origin = list(self.prompt.ids), self.prompt.question.origin
        rows: Sequence[TrajectoryRow | Rollout] = self.rows or [self]
        of_rows = (self.trajectory.images if self.trajectory is not None else ()) or [self.prompt.images] * len(rows)
        masks = [[0] * len(prompt) + list(row.loss_mask) for row in rows]
        every = zip(rows, masks, of_rows, strict=True)
        return [Example(prompt + row.ids, mask, origin, images=own, routes=row.routes) for row, mask, own in every]

    @property
    def turn_tokens(self) -> list[int]:
        """The number of policy tokens of each turn of the policy."""
        if self.trajectory is not None and self.trajectory.turns:
            return [sum(self.loss_mask[turn.start : turn.stop]) for turn in self.trajectory.turns]
        return [len(run.ids) for run in self.turns if run.policy]

    @property
    def turns(self) -> list[TokenRun]:
        """The tokens of the response, split into turns of the policy and of the environment."""
        return token_runs(self.ids, self.loss_mask)


@dataclass(frozen=True)
class RolloutMeta:
    """The metadata of a rollout, without its tokens and text. Every rank has the metadata of all rollouts of a step."""

    prompt_index: int
    sample: int
    prompt_tokens: int
    response_length: int
    """The number of tokens of the response, including tokens of the environment."""
    num_response_tokens: int
    """The number of tokens that the policy generated."""
    shared: int
    """The number of tokens of the untrained prefix that all scored responses to this prompt have in common."""
    stop: str
    score: Score | Failure
    """The score, with empty `steps` and `tokens`."""
    trajectory_metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the trajectory, by their names in the run. Empty without an environment."""
    rows: tuple[int, ...] = ()
    """The numbers of tokens after the prompt of each row, if the trajectory has several rows."""
    anchors: tuple[str | None, ...] = ()
    """For each turn of the policy, a digest of the text that identifies the state in which the turn starts."""
    turn_rewards: tuple[float, ...] = ()
    """The part of the score of each turn of a trajectory; the last turn has the rest. Empty without an environment."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each training sequence: prompt and response, or prompt and row of a trajectory."""
        return tuple(self.prompt_tokens + row for row in self.rows or (self.response_length,))
