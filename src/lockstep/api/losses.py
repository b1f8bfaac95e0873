"""Training data and losses for a model handle: examples, responses, and built-in losses by their recipe name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from pydantic import ValidationError

from lockstep.algorithms import policy_loss as policy
from lockstep.algorithms import preference
from lockstep.algorithms import preference as pair_losses
from lockstep.algorithms.token_losses import nll
from lockstep.data.updates import Update
from lockstep.errors import Problem, Refusal
from lockstep.kernels.logprob import Scores
from lockstep.model.policy import Scoring
from lockstep.recipe.keys_offline import Preference
from lockstep.recipe.keys_online import Algorithm
from lockstep.recipe.methods import PREFERENCE_READS
from lockstep.recipe.registry import LOSSES
from lockstep.recipe.section import Section, invalid_reason
from lockstep.types import Example, Message, MicroBatch, Origin, Sums

# A prompt is a text, a chat, or token ids.
PromptLike = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Datum:
    """The input of one loss call: one sequence, or several (chosen and rejected), with named columns.

    `scoring` defines the distribution (temperature, truncation) of the log-probabilities. For a sampled response,
    `scoring` is the sampling distribution.
    """

    sequences: tuple[Example, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def examples(self) -> tuple[Example, ...]:
        return self.sequences

    @property
    def origin(self) -> Origin:
        return self.sequences[0].origin

    @property
    def targets(self) -> int:
        """The number of trained tokens."""
        return sum(sequence.targets for sequence in self.sequences)

    def having(self, **columns: Any) -> Datum:
        """Returns a copy of this example with additional columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Response:
    """A sampled response without a reward. `prompt` is the index of the prompt, and `sample` is the index of the
    response among all samples of this prompt.

    `logprobs` has one entry per id in `ids`, including a generated end token. `text` has no special tokens. `stop` is
    the reason why generation ended: `token`, `string` or `length`.
    """

    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    stop: str
    scoring: Scoring = field(default_factory=Scoring)

    def datum(self, **columns: Any) -> Datum:
        """Returns a training example in which all tokens of the response, and none of the prompt, are targets."""
        origin = Origin(f"response {self.sample} to prompt", self.prompt)
        trained = [0] * len(self.prompt_ids) + [1] * len(self.ids)
        return Datum((Example([*self.prompt_ids, *self.ids], trained, origin),), columns, self.scoring)


def as_data(examples: Sequence[Datum | Response]) -> list[Datum]:
    """Converts responses to examples; rejects other types and examples without trained tokens."""
    data = []
    for number, example in enumerate(examples):
        if isinstance(example, Response):
            example = example.datum()
        if not isinstance(example, Datum):
            raise Refusal.at(
                f"example {number}",
                f"is a {type(example).__name__}, not an example",
                "use a response of sample(), or model.example(prompt, response), model.pair(...), model.tokens(...)",
                code="wrong-type",
            )
        for sequence in example.sequences:
            if not sequence.targets:
                raise Refusal.at(
                    f"example {number} ({sequence.origin})",
                    "has no trained token",
                    "remove it",
                    code="no-trained-token",
                )
        data.append(example)
    if not data:
        raise Refusal.at("examples", "must not be empty", "give at least one", code="empty-value")
    return data


def by_scoring(data: Sequence[Datum]) -> list[tuple[Scoring, list[int]]]:
    """Groups the indices of the examples by `Datum.scoring`, the distribution of their log-probabilities."""
    groups: dict[Scoring, list[int]] = {}
    for number, datum in enumerate(data):
        groups.setdefault(datum.scoring, []).append(number)
    return list(groups.items())


SectionT = TypeVar("SectionT", bound=Section)


def checked(section: type[SectionT], **arguments: Any) -> SectionT:
    """Checks arguments that are keys of a recipe section; error messages contain the argument's name."""
    try:
        return section(**arguments)
    except ValidationError as failure:
        raise Refusal(
            [
                Problem(
                    ".".join(map(str, error["loc"])),
                    f"{invalid_reason(error)} (given: {error['input']!r})",
                    "see `lockstep help recipe`",
                    code="invalid-value",
                )
                for error in failure.errors()
            ]
        ) from failure


# A loss is called once per example, `loss(*logprobs, **columns)`: one vector of log-probabilities per sequence, then
# the columns of the example by name. The loss returns a sum, not a mean; `optim_step` divides the sum once, by the
# number of tokens or of examples (`per`).

Per = Literal["token", "example"]
LossFunction = Callable[..., "torch.Tensor | Sums"]


@dataclass(frozen=True)
class Chosen:
    """A loss function with its settings, the unit (token or example) that it is averaged over, and its name."""

    function: LossFunction
    per: Per
    name: str

    def __call__(self, datum: Datum, logprobs: Sequence[torch.Tensor]) -> Sums:
        try:
            inspect.signature(self.function).bind(*logprobs, **datum.columns)
        except TypeError as error:
            columns = ", ".join(datum.columns) or "none"
            raise Refusal.at(
                f"loss {self.name}",
                f"cannot be called for {datum.origin}, which has {len(logprobs)} sequence(s) and the columns "
                f"{columns}: {error}",
                "add the missing columns: example.having(name=value)",
                code="missing-column",
            ) from error
        result = self.function(*logprobs, **datum.columns)
        sums = result if isinstance(result, Sums) else Sums(result)
        _refuse_no_number(sums.loss, self.name, datum)
        return Sums(sums.loss.reshape(()), sums.metrics, sums.maxima)


def chosen_loss(loss: str | LossFunction, per: Per | None, settings: Mapping[str, Any]) -> Chosen:
    """Returns the requested loss, ready to be called for each example."""
    if per is not None and per not in get_args(Per):
        raise Refusal.at(
            "per", f"{per!r} is not supported", f"use one of {', '.join(get_args(Per))}", code="unknown-name"
        )
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        if settings:
            raise Refusal.at(
                f"loss {name}",
                f"is your function, and {', '.join(settings)} are settings of built-in losses",
                "bind the settings with functools.partial, or add them as columns of the examples",
                code="unused-key",
            )
        return Chosen(loss, per or "example", name)
    if loss == "nll":
        _refuse_unread(loss, settings, ())
        return Chosen(lambda logprobs: nll(logprobs), per or "token", loss)
    if loss in LOSSES and LOSSES[loss].selection_keys is None:
        return Chosen(_of_response(loss, settings), per or "token", loss)
    if loss in pair_losses.LOSSES:
        return Chosen(_of_pair(loss, settings), per or "example", loss)
    if loss in pair_losses.RANKED:
        raise Refusal.at(
            f"loss {loss}",
            "ranks all pairs of an update, but forward_backward computes each example separately",
            "use lockstep.train with preference.loss",
            code="unsupported-combination",
        )
    if loss in LOSSES:  # the loss selects tokens over a full update, but a call gets a single example
        raise Refusal.at(
            f"loss {loss}",
            "selects tokens over a full update, but forward_backward computes each example separately",
            "use lockstep.train with algorithm.loss",
            code="unsupported-combination",
        )
    names = ["nll", *(name for name, row in LOSSES.items() if row.selection_keys is None), *pair_losses.LOSSES]
    raise Refusal.at(
        f"loss {loss!r}", "does not exist", f"give a function, or one of {', '.join(names)}", code="unknown-name"
    )


def _of_response(name: str, settings: Mapping[str, Any]) -> LossFunction:
    arguments = LOSSES[name].keys
    _refuse_unread(name, settings, list(arguments.values()))
    keys = _checked(Algorithm, {"loss": name, **settings}, "algorithm")
    bound = partial(policy.LOSSES[name], **{word: getattr(keys, key) for word, key in arguments.items()})

    def loss(logprobs: torch.Tensor, *, advantage: Any, old: Any = None) -> Sums:
        """Computes the loss. `advantage` is one number or one per token; `old` has the log-probs before the update."""
        before = logprobs.detach() if old is None else _vector(old, logprobs, "old")
        advantages = _vector(advantage, logprobs, "advantage", spread=True)
        sequence = torch.zeros(len(logprobs), dtype=torch.long, device=logprobs.device)
        return bound(policy.PolicyTokens(logprobs, before, advantages, torch.ones_like(logprobs), sequence))

    return loss


def _of_pair(name: str, settings: Mapping[str, Any]) -> LossFunction:
    read = [key for key in PREFERENCE_READS[name] if key not in ("loss", "reference", "precompute", "ld_alpha")]
    _refuse_unread(name, settings, read)
    keys = _checked(Preference, {"loss": name, **settings}, "preference").model_dump(include=set(read))

    def loss(chosen: torch.Tensor, rejected: torch.Tensor, *, reference: Any = None) -> Sums:
        """Computes the loss. `reference` has the reference model's log-probs of the chosen and rejected tokens."""
        ref_logprobs: list[torch.Tensor | None] = [None, None]
        if reference is not None:
            both = zip(reference, (chosen, rejected), strict=True)
            ref_logprobs = [_vector(values, policy_logprobs, "reference") for values, policy_logprobs in both]
        sums = [None if values is None else values.sum()[None] for values in ref_logprobs]
        lengths = [torch.tensor([len(logprobs)], device=logprobs.device) for logprobs in (chosen, rejected)]
        pairs = preference.Pairs(chosen.sum()[None], rejected.sum()[None], *lengths, *sums)
        return preference.preference_loss(pairs, kind=name, **keys)

    return loss


def _vector(value: Any, like: torch.Tensor, column: str, *, spread: bool = False) -> torch.Tensor:
    vector = torch.as_tensor(value, dtype=like.dtype, device=like.device).detach()
    if spread and vector.ndim == 0:
        vector = vector.expand(like.shape)
    if vector.shape != like.shape or not bool(torch.isfinite(vector).all()):
        what = "a number or " if spread else ""
        raise Refusal.at(
            f"column {column}",
            f"has shape {tuple(vector.shape)}, but the example has {len(like)} trained tokens"
            if vector.shape != like.shape
            else "has non-finite numbers",
            f"give {what}one finite number for each trained token",
            code="wrong-shape",
        )
    return vector


def _checked(kind: type[Section], values: Mapping[str, Any], section: str) -> Any:
    try:
        return kind(**values)
    except ValidationError as failure:
        raise Refusal(
            [
                Problem(f"{section}.{'.'.join(map(str, e['loc']))}", invalid_reason(e), code="invalid-value")
                for e in failure.errors()
            ]
        ) from failure


def _refuse_unread(name: str, settings: Mapping[str, Any], read: Sequence[str]) -> None:
    """Rejects settings that the loss does not use."""
    unread = [key for key in settings if key not in read]
    if unread:
        raise Refusal.at(
            f"loss {name}",
            f"does not read {', '.join(unread)}",
            f"settings of this loss: {', '.join(read) or 'none'}",
            code="unused-key",
        )


def _refuse_no_number(loss: Any, name: str, datum: Datum) -> None:
    what = None
    if not isinstance(loss, torch.Tensor):
        what = f"returned a {type(loss).__name__}, not a tensor"
    elif loss.numel() != 1:
        what = f"returned {loss.numel()} numbers (shape {tuple(loss.shape)}), not one"
    elif not loss.requires_grad:
        what = "returned a number that does not depend on the log-probabilities: nothing would be trained"
    if what is not None:
        raise Refusal.at(
            f"loss {name}",
            f"{what}, for {datum.origin}",
            "return the sum over the example's tokens, a tensor",
            code="invalid-return",
        )


def batch_loss(chosen: Chosen, update: Update[Datum]) -> Any:
    """Returns the loss of a micro-batch: the sum over its examples."""
    counts = [len(datum.sequences) for datum in update.items]

    def loss(scores: Scores, batch: MicroBatch) -> Sums:
        sequences_S, _ = update.sequences_of(batch)
        vectors = iter(scores.logprobs_K.split(update.lengths_S[sequences_S].tolist()))
        items = torch.unique_consecutive(update.item_S[sequences_S]).tolist()
        every = [chosen(update.items[item], [next(vectors) for _ in range(counts[item])]) for item in items]
        names = every[0].metrics
        return Sums(
            torch.stack([one.loss for one in every]).sum(),
            {name: torch.stack([one.metrics[name] for one in every]).sum() for name in names},
        )

    return loss
