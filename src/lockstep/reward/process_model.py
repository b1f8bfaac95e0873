"""The reward component `process`: a process reward model scores each step of a response.

A separator string splits the response into steps. The score of a step is the probability that the step is good, divided
by the number of steps. The score of the response is the sum of its step scores, which is the mean probability that a
step is good. A response without steps scores 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.algorithms.token_losses import good_probability
from lockstep.data.encode.step_rows import Marks, StepWriter
from lockstep.errors import Refusal, first_line
from lockstep.model.policy import output_head
from lockstep.model.pretrained import pretrained, tokenizer_of, whole_model
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import LanguageModel, text_config
from lockstep.model.towers.vision_model import VisionModel
from lockstep.parallel.offload import keep_on_host, resident
from lockstep.reward.judged_images import JudgedImages
from lockstep.reward.model import BatchedPart, Waiting, in_batches, padded
from lockstep.reward.parts import PartOutcome, StepOutcome, settled
from lockstep.types import Failure, Question

# File in the model folder with the placeholder that marks the end of a step, and the label tokens.
PROCESS = "process_reward.json"


@dataclass(frozen=True)
class ProcessModel:
    """A loaded process reward model."""

    model: Any
    writer: StepWriter
    device: torch.device
    context: int | None
    images: JudgedImages | None = None
    """Reads the images of prompts, if the policy has a vision tower."""

    @torch.no_grad()
    def judge(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the probability of being good for each step of each encoded row."""
        with resident(self.model):
            return in_batches(rows, self._forward)

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        with padded(self.model, rows, 0, self.device) as inputs:
            # The base model of a class with a vision tower also takes images.
            base = self.model.get_decoder() if self.images is None else self.model.model
            hidden = base(**inputs, use_cache=False).last_hidden_state
        head, judging = output_head(self.model), torch.tensor(self.writer.marks.token_ids, device=self.device)
        # Only the logits of the label tokens are needed.
        bias = None if head.bias_V is None else head.bias_V[judging]
        head = head._replace(weight_VH=head.weight_VH[judging], bias_V=bias)
        verdicts = []
        for row, states in zip(rows, hidden, strict=True):
            positions = torch.tensor(self.writer.positions(row), device=self.device)
            verdicts.append(good_probability(head.logits(states[positions]).float()).tolist())
        return verdicts


def load_process_model(
    path: str, device: torch.device, key: str = "reward.process", policy: str | None = None
) -> ProcessModel:
    """Loads the process reward model in its stored precision, with its placeholder and label tokens. `policy` is the
    model folder of the policy, if prompts have images."""
    where, folder = f"{key} {path}", Path(model_folder(path, key))
    if not (folder / PROCESS).is_file():
        raise Refusal.at(
            where,
            f"is not a process reward model: it has no {PROCESS}",
            'train one with method prm, or write this file: {"placeholder": TEXT, "tokens": [GOOD, BAD]}',
            code="wrong-model-kind",
        )
    trained_with = read_judging(folder)
    tokenizer = tokenizer_of(str(folder), where)
    marks = Marks.of(tokenizer, trained_with["placeholder"], trained_with["tokens"])
    images = None if policy is None else JudgedImages(policy, str(folder), tokenizer, where)
    kind = LanguageModel if images is None else VisionModel
    model = whole_model(kind, str(folder), where, "its weights", dtype="auto")
    if not tokenizer.chat_template:
        raise Refusal.at(
            where,
            "its tokenizer has no chat template",
            "put a chat_template.jinja into its folder",
            code="no-chat-template",
        )
    model.to(device).eval().requires_grad_(False)
    context = getattr(text_config(model.config), "max_position_embeddings", None)
    return ProcessModel(model, StepWriter(tokenizer, marks), device, context, images)


def process_config(path: str) -> Any:
    """Returns the config of the process reward model."""
    from transformers import AutoConfig

    return pretrained(AutoConfig, model_folder(path, "reward.process"), f"reward.process {path}", "its config.json")


def read_judging(folder: Path) -> dict[str, Any]:
    """Reads the `placeholder` and the label `tokens` of a process reward model."""
    file, remedy = folder / PROCESS, 'it must contain {"placeholder": TEXT, "tokens": [GOOD, BAD]}'
    try:
        trained_with: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        texts = [trained_with["placeholder"], *trained_with["tokens"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal.at(
            file, f"the file cannot be read: {type(error).__name__}: {first_line(error)}", remedy, code="unreadable"
        ) from error
    if not isinstance(trained_with["tokens"], list) or not all(isinstance(text, str) for text in texts):
        raise Refusal.at(file, "its placeholder and tokens must all be strings", remedy, code="damaged-file")
    return trained_with


def steps_of(text: str, separator: str) -> list[tuple[str, int]]:
    """Returns the non-blank steps of a response, each with its end position in the text."""
    steps, start = [], 0
    for piece in text.split(separator):
        if piece.strip():
            steps.append((piece.strip(), start + len(piece.rstrip())))
        start += len(piece) + len(separator)
    return steps


class ProcessPart(BatchedPart):
    """Scores responses with a process reward model."""

    name = "process"

    def __init__(
        self, path: str, separator: str, device: torch.device, *, offload: bool = False, policy: str | None = None
    ):
        """`policy` is the model folder of the policy, if prompts have images."""
        self._model = load_process_model(path, device, policy=policy)
        if offload:
            keep_on_host(self._model.model, device)
        self._separator = separator
        super().__init__(self._model.context)

    def submit(self, question: Question, text: str) -> Future[PartOutcome]:
        steps = steps_of(text, self._separator)
        if not steps:
            return settled(StepOutcome({self.name: 0.0}, ()))
        writer, images = self._model.writer, self._model.images
        answer = writer.marked([step for step, _ in steps])
        try:
            question = question if images is None else images.prompt(question)
            _, ids = writer.chat([*question.prompt, {"role": "assistant", "content": answer}], question.origin)
            ids = ids if images is None else images.tokens(ids, question)
        except Refusal as refusal:
            return settled(Failure(self.name, str(refusal.problems[0])))
        if len(writer.positions(ids)) != len(steps):
            why = f"the response contains the placeholder {writer.marks.placeholder!r}"
            return settled(Failure(self.name, why))
        return self.wait(ids, [end for _, end in steps])

    def outcomes(self, waiting: Sequence[Waiting]) -> list[PartOutcome]:
        verdicts = self._model.judge([entry.ids for entry in waiting])
        if self._model.images is not None:
            self._model.images.forget()
        return [
            self._outcome(entry.ends, probabilities) for entry, probabilities in zip(waiting, verdicts, strict=True)
        ]

    def _outcome(self, ends: Sequence[int], probabilities: Sequence[float]) -> PartOutcome:
        mean = sum(probabilities) / len(probabilities)
        if not math.isfinite(mean):
            return Failure(self.name, f"the score is {mean}")
        shares = [probability / len(probabilities) for probability in probabilities]
        return StepOutcome(
            {self.name: mean, f"{self.name}_worst": min(probabilities)}, list(zip(ends, shares, strict=True))
        )
