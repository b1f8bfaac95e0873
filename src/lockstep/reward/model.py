"""The reward component `model`: sequence classification models that score batches of responses."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jinja2 import TemplateError

from lockstep.errors import Problem, Refusal, shortened
from lockstep.kernels.rotary import own_positions, sequences
from lockstep.model.pretrained import pretrained, refuse_not_finite, tokenizer_of
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import text_config, writable_text_config
from lockstep.parallel.offload import keep_on_host, resident
from lockstep.reward.judged_images import JudgedImages, image_arguments
from lockstep.reward.parts import Countdown, PartOutcome, RewardPart, promised, settled
from lockstep.types import Failure, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Maximum number of tokens of one right-padded batch. The scores of responses do not depend on the batch size.
BATCH_TOKENS = 16384

T = TypeVar("T")
TokenRows = Sequence[Sequence[int]]


def in_batches(rows: TokenRows, run: Callable[[TokenRows], Sequence[T]]) -> list[T]:
    """Calls `run` on batches of rows of similar length; returns the results in row order."""
    results: dict[int, T] = {}
    for members in batches([len(row) for row in rows], BATCH_TOKENS):
        results.update(zip(members, run([rows[i] for i in members]), strict=True))
    return [results[i] for i in range(len(rows))]


def batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yields batches of row indices sorted by length, within a budget of padded tokens. A row longer than the budget is
    a batch by itself."""
    members: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if members and lengths[i] * (len(members) + 1) > tokens:
            yield members
            members = []
        members.append(i)
    if members:
        yield members


@contextmanager
def padded(model: Any, rows: TokenRows, padding: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the padded rows, with their images, as model inputs. The model accepts these inputs only inside the `with`
    block."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    with sequences(own_positions(model), [len(row) for row in rows], ids.shape, None, packed=False):
        yield {"input_ids": ids, "attention_mask": mask, **image_arguments(model, rows, ids)}


@dataclass(frozen=True)
class Waiting:
    """An encoded response that waits for `flush`, and the end positions of its steps in the response text."""

    ids: Sequence[int]
    ends: Sequence[int]
    future: Future[PartOutcome]


class BatchedPart(RewardPart):
    """Base class of components that collect responses until `flush` scores them in the caller's thread. `context` is
    the context length of the reward model."""

    def __init__(self, context: int | None):
        self._context = context
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []

    def outcomes(self, waiting: Sequence[Waiting]) -> Sequence[PartOutcome]:
        """Returns the outcome of each response."""
        raise NotImplementedError

    def wait(self, ids: Sequence[int], ends: Sequence[int] = ()) -> Future[PartOutcome]:
        if self._context is not None and len(ids) > self._context:
            return settled(
                Failure(self.name, f"{len(ids)} tokens are more than the model's context of {self._context}")
            )
        entry = Waiting(ids, ends, promised())
        with self._lock:
            self._waiting.append(entry)
        return entry.future

    def flush(self) -> None:
        waiting = self._taken()
        for entry, outcome in zip(waiting, self.outcomes(waiting), strict=True):
            entry.future.set_result(outcome)

    def close(self) -> None:
        for entry in self._taken():
            entry.future.set_result(Failure(self.name, "the run ended before the response was scored"))

    def _taken(self) -> list[Waiting]:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return waiting


# File in the model folder with the mean and the standard deviation by which scores are normalised.
STATS = "score_stats.json"


@dataclass(frozen=True)
class RewardModel:
    """A sequence classification model with one label, with its tokenizer and chat template. A score is
    `(raw - mean) / std`, where `raw` is the output of the model."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    context: int | None
    mean: float = 0.0
    std: float = 1.0
    images: JudgedImages | None = None
    """Reads the images of prompts, if the policy has a vision tower."""

    def encode(self, question: Question, answer: str) -> list[int]:
        """Returns the tokens of the chat with the answer as last turn, in the chat template of the reward model.

        Without a template, the text is the contents of the prompt and the answer joined by line breaks, with the
        tokenizer's special tokens.
        """
        question = question if self.images is None else self.images.prompt(question)
        ids = self._ids(question, answer)
        return ids if self.images is None else self.images.tokens(ids, question)

    def _ids(self, question: Question, answer: str) -> list[int]:
        if self.tokenizer.chat_template:
            chat = [*question.prompt, {"role": "assistant", "content": answer}]
            if self.images is None:
                text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            else:
                text = self.images.rendered(self.tokenizer, chat)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        text = "\n".join([*[str(message["content"]) for message in question.prompt], answer])
        return list(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns the scores of encoded rows."""
        with resident(self.model):
            return [(score - self.mean) / self.std for score in in_batches(rows, self._forward)]

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        config = writable_text_config(self.model.config)
        padding = config.pad_token_id
        if padding is None:
            # The model finds the end of a row by the padding token, so no row may end with the padding token.
            ends = {row[-1] for row in rows}
            padding = next(token for token in range(len(ends) + 1) if token not in ends)
        stored = config.pad_token_id
        config.pad_token_id = padding
        try:
            with padded(self.model, rows, padding, self.device) as inputs:
                logits = self.model(**inputs).logits
        finally:
            config.pad_token_id = stored
        return [float(score) for score in logits[:, 0].float().tolist()]


def load_reward_model(path: str, device: torch.device, policy: str | None = None) -> RewardModel:
    """Loads the reward model in its stored precision. Raises `Refusal` if the model does not give one score per text.
    `policy` is the model folder of the policy, if prompts have images."""
    where = f"reward.model {path}"
    folder = model_folder(path, "reward.model")
    from transformers import AutoModelForSequenceClassification

    config = reward_config(path)
    tokenizer = tokenizer_of(folder, where)
    mean, std = _statistics(Path(folder) / STATS)
    images = None if policy is None else JudgedImages(policy, folder, tokenizer, where)
    kind, how = AutoModelForSequenceClassification, {"dtype": "auto", "output_loading_info": True}
    model, info = pretrained(kind, folder, where, "its weights", config=config, **how)
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        problems = [
            Problem(where, f"the weights lack {key}, which would be initialised randomly", code="missing-weight")
            for key in missing
        ]
        raise Refusal(shortened(problems, "weights"))
    refuse_not_finite(dict(model.named_parameters()), where)
    largest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if largest >= rows:
        why = f"its tokenizer has a token with id {largest}, but its embedding has only {rows} rows"
        raise Refusal.at(
            where, why, "use the tokenizer that the reward model was trained with", code="other-vocabulary"
        )
    model.to(device).eval().requires_grad_(False)
    context = getattr(text_config(config), "max_position_embeddings", None)
    return RewardModel(model, tokenizer, device, context, mean, std, images)


def reward_config(path: str) -> Any:
    """Returns the config of the reward model. Raises `Refusal` if the model does not give one score per text."""
    from transformers import AutoConfig

    where = f"reward.model {path}"
    config = pretrained(AutoConfig, model_folder(path, "reward.model"), where, "its config.json")
    _refuse_wrong_kind(where, config)
    return config


def normalized_by_config(model: RewardModel) -> RewardModel:
    """Returns the model with `mean` and `std` from its config.json, where OpenRLHF writes them, if present."""
    config = model.model.config
    if not hasattr(config, "mean"):
        return model
    mean, std = float(config.mean), float(getattr(config, "std", 1.0))
    if not (abs(mean) < float("inf") and 0 < std < float("inf")):
        raise Refusal.at(
            "config.json",
            f"mean {mean} and std {std} cannot normalise a score",
            "fix the model's folder",
            code="not-a-number",
        )
    return replace(model, mean=mean, std=std)


def _refuse_wrong_kind(where: str, config: Any) -> None:
    kinds = config.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise Refusal.at(
            where,
            f"this is not a sequence classification model; its architecture is {', '.join(kinds) or 'not stated'}",
            "train a reward model, or give the path of a reward model",
            code="wrong-model-kind",
        )
    if config.num_labels != 1:
        raise Refusal.at(
            where,
            f"gives {config.num_labels} labels; a reward is one number",
            "use a model with one label",
            code="wrong-model-kind",
        )


def _statistics(file: Path) -> tuple[float, float]:
    """Returns the mean and standard deviation that normalise scores; 0 and 1 if the file does not exist."""
    if not file.is_file():
        return 0.0, 1.0
    try:
        stats = json.loads(file.read_text(encoding="utf-8"))
        mean, std = float(stats["mean"]), float(stats["std"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = 'it must contain {"mean": NUMBER, "std": NUMBER}'
        raise Refusal.at(file, f"cannot be read: {type(error).__name__} {error}", remedy, code="unreadable") from error
    if not (abs(mean) < float("inf") and 0 < std < float("inf")):
        raise Refusal.at(
            file,
            f"mean {mean} and std {std} cannot normalise a score",
            "use finite numbers, with std above 0",
            code="not-a-number",
        )
    return mean, std


class ModelPart(BatchedPart):
    """Scores responses with one reward model."""

    name = "model"

    def __init__(self, path: str, device: torch.device, *, offload: bool = False, policy: str | None = None):
        """`policy` is the model folder of the policy, if prompts have images."""
        self._reward_model = load_reward_model(path, device, policy)
        if offload:
            keep_on_host(self._reward_model.model, device)
        super().__init__(self._reward_model.context)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        try:
            return self.wait(self._reward_model.encode(question, text))
        except TemplateError as error:
            return settled(
                Failure(self.name, f"{question.origin}: the model's chat template refuses this chat: {error}")
            )
        except Refusal as refusal:
            return settled(Failure(self.name, str(refusal.problems[0])))

    def outcomes(self, waiting: Sequence[Waiting]) -> list[PartOutcome]:
        scores = self._reward_model.score([entry.ids for entry in waiting])
        if self._reward_model.images is not None:
            self._reward_model.images.forget()
        return [
            {self.name: score} if math.isfinite(score) else Failure(self.name, f"the score is {score}")
            for score in scores
        ]


class ModelsPart(RewardPart):
    """The weighted sum of the scores of several reward models. The scores are logged as `model/1`, `model/2`, ..."""

    name = "model"

    def __init__(
        self,
        paths: Sequence[str],
        weights: Sequence[float],
        device: torch.device,
        *,
        offload: bool = False,
        policy: str | None = None,
    ):
        self._weights = list(weights) or [1.0] * len(paths)
        with ExitStack() as opened:
            self._parts: list[ModelPart] = []
            for path in paths:
                self._parts.append(ModelPart(path, device, offload=offload, policy=policy))
                opened.callback(self._parts[-1].close)
            opened.pop_all()

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        outcomes = [part.submit(question, text) for part in self._parts]
        future = promised()
        remaining = Countdown(len(outcomes), lambda: future.set_result(self._sum([o.result() for o in outcomes])))
        for outcome in outcomes:
            outcome.add_done_callback(remaining)
        return future

    def flush(self) -> None:
        for part in self._parts:
            part.flush()

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _sum(self, outcomes: Sequence[PartOutcome]) -> PartOutcome:
        """Returns the first failure in the order of the models, or the weighted sum of their scores."""
        scores: list[float] = []
        for outcome in outcomes:
            if isinstance(outcome, Failure):
                return outcome
            scores.append(outcome[self.name])
        total = sum(weight * score for weight, score in zip(self._weights, scores, strict=True))
        return {self.name: total, **{f"{self.name}/{i}": score for i, score in enumerate(scores, 1)}}
