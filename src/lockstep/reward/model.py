"""The part `model`: a sequence classification model with one label, its own tokenizer and its own chat template."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from lockstep.errors import Problem, Refusal, shortened
from lockstep.model.pretrained import pretrained, refuse_not_finite
from lockstep.model.resolve import model_folder
from lockstep.model.tokenizer import tokenizer_of
from lockstep.parallel.offload import keep_on_host, resident
from lockstep.reward.batched import BatchedPart, Waiting, in_batches, padded
from lockstep.reward.parts import PartOutcome, settled
from lockstep.types import Failure, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATS = "score_stats.json"


@dataclass(frozen=True)
class RewardModel:
    """A loaded reward model. Its scores are `(raw - mean) / std`."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    context: int | None
    mean: float = 0.0
    std: float = 1.0

    def encode(self, question: Question, answer: str) -> list[int]:
        """The chat with the answer as its last turn, in the reward model's own template.

        A tokenizer without a template gets the contents of the prompt and the answer, a line break between each,
        with the special tokens that it adds by itself.
        """
        if self.tokenizer.chat_template:
            chat = [*question.prompt, {"role": "assistant", "content": answer}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        text = "\n".join([*[str(message["content"]) for message in question.prompt], answer])
        return list(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Scores of encoded rows in their order."""
        with resident(self.model):
            return [(score - self.mean) / self.std for score in in_batches(rows, self._forward)]

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        text_config = self.model.config.get_text_config()
        padding = text_config.pad_token_id
        if padding is None:
            # The model finds the end of a row by the padding token, so it must be one that ends none of them.
            ends = {row[-1] for row in rows}
            padding = next(token for token in range(len(ends) + 1) if token not in ends)
        stored = text_config.pad_token_id
        text_config.pad_token_id = padding
        try:
            with padded(self.model, rows, padding, self.device) as inputs:
                logits = self.model(**inputs).logits
        finally:
            text_config.pad_token_id = stored
        return [float(score) for score in logits[:, 0].float().tolist()]


def load_reward_model(path: str, device: torch.device) -> RewardModel:
    """The folder's model in the precision it is stored in; refused unless it gives one score for a whole text."""
    where = f"reward.model {path}"
    folder = model_folder(path, "reward.model")
    from transformers import AutoModelForSequenceClassification

    config = reward_config(path)
    tokenizer = tokenizer_of(folder, where)
    mean, std = _statistics(Path(folder) / STATS)
    kind, how = AutoModelForSequenceClassification, {"dtype": "auto", "output_loading_info": True}
    model, info = pretrained(kind, folder, where, "its weights", config=config, **how)
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        problems = [Problem(where, f"the weights lack {key}, which would start random") for key in missing]
        raise Refusal(shortened(problems, "weights"))
    refuse_not_finite(dict(model.named_parameters()), where)
    largest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().num_embeddings
    if largest >= rows:
        why = f"its tokenizer has a token with id {largest}, but its embedding has {rows} rows"
        raise Refusal.at(where, why, "use the tokenizer that the reward model was trained with")
    model.to(device).eval().requires_grad_(False)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    return RewardModel(model, tokenizer, device, context, mean, std)


def reward_config(path: str) -> Any:
    """Of the folder's model; refused unless it gives one score for a whole text."""
    from transformers import AutoConfig

    where = f"reward.model {path}"
    config = pretrained(AutoConfig, model_folder(path, "reward.model"), where, "its config.json")
    _refuse_wrong_kind(where, config)
    return config


def normalized_by_config(model: RewardModel) -> RewardModel:
    """Its scores by `mean` and `std` of its config.json, where OpenRLHF writes them; else as the folder says."""
    config = model.model.config
    if not hasattr(config, "mean"):
        return model
    mean, std = float(config.mean), float(getattr(config, "std", 1.0))
    if not (abs(mean) < float("inf") and 0 < std < float("inf")):
        raise Refusal.at(
            "config.json", f"mean {mean} and std {std} cannot normalise a score", "mend the model's folder"
        )
    return replace(model, mean=mean, std=std)


def _refuse_wrong_kind(where: str, config: Any) -> None:
    kinds = config.architectures or []
    if not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise Refusal.at(
            where,
            f"is not a sequence classification model but {', '.join(kinds) or 'of no stated kind'}",
            "train a reward model, or name the folder of one",
        )
    if config.num_labels != 1:
        raise Refusal.at(where, f"gives {config.num_labels} labels; a reward is one number", "use a model of one label")


def _statistics(file: Path) -> tuple[float, float]:
    """Mean and deviation that scores are normalised by; 0 and 1 where the folder says nothing."""
    if not file.is_file():
        return 0.0, 1.0
    try:
        stats = json.loads(file.read_text(encoding="utf-8"))
        mean, std = float(stats["mean"]), float(stats["std"])
    except (ValueError, KeyError, TypeError) as error:
        remedy = 'it holds {"mean": NUMBER, "std": NUMBER}'
        raise Refusal.at(file, f"cannot be read: {type(error).__name__} {error}", remedy) from error
    if not (abs(mean) < float("inf") and 0 < std < float("inf")):
        raise Refusal.at(file, f"mean {mean} and std {std} cannot normalise a score", "std is over 0, both finite")
    return mean, std


class ModelPart(BatchedPart):
    name = "model"

    def __init__(self, path: str, device: torch.device, *, offload: bool = False):
        self._reward_model = load_reward_model(path, device)
        if offload:
            keep_on_host(self._reward_model.model, device)
        super().__init__(self._reward_model.context)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        try:
            return self.wait(self._reward_model.encode(question, text))
        except TemplateError as error:
            return settled(Failure(self.name, f"{question.origin}: its chat template refuses this chat: {error}"))

    def outcomes(self, waiting: Sequence[Waiting]) -> list[PartOutcome]:
        scores = self._reward_model.score([entry.ids for entry in waiting])
        return [
            {self.name: score} if math.isfinite(score) else Failure(self.name, f"the score is {score}")
            for score in scores
        ]
