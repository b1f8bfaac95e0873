"""One update on rows: by OpenRLHF's own trainers, from `fit` to the gradient, and by the migrated recipe.

Both get the same tokens, those of our reader, so that it is the updates that are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from lockstep.model.heads import ValueModel
from lockstep.recipe import Recipe
from lockstep.run.console import Console
from lockstep.train.offline import open_offline
from lockstep.types import Example

from .batch import Gradients, drawn, gradients
from .openrlhf_update import Strategy
from .peers import module, openrlhf_arguments


@dataclass(frozen=True)
class Update:
    """Our side: the rows of the first update, its loss and gradient, and the module that they belong to."""

    items: list[Any]
    loss: float
    gradients: Gradients
    module: torch.nn.Module
    recipe: Recipe

    @property
    def result(self) -> tuple[float, Gradients]:
        return self.loss, self.gradients


def our_update(recipe: Recipe) -> Update:
    with open_offline(recipe, Console(), keeps=False) as offline:
        models, items = offline.training.models, list(offline.loader.take(0))
        if isinstance(models.module, ValueModel):
            # A fresh head is zero, and nothing below it would have a gradient.
            models.module.head.weight.data.copy_(drawn(5, *models.module.head.weight.shape, scale=0.1))
        task = offline.objective.task(models.arrange(items), models)
        outcome = models.trained.forward_backward(task.batches, task.loss, task.divisor)
        trained = getattr(models.module, "model", models.module)
        return Update(items, outcome.loss, gradients(trained), trained, recipe)


@dataclass(frozen=True)
class Padded:
    """Examples as rows padded on the right: tokens, where they are, and how many belong to the prompt."""

    ids: torch.Tensor
    attended: torch.Tensor
    prompts: list[int]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Padded:
        width = max(len(example.ids) for example in examples)
        ids, attended = torch.zeros(2, len(examples), width, dtype=torch.long)
        for row, example in enumerate(examples):
            ids[row, : len(example.ids)] = torch.tensor(list(example.ids))
            attended[row, : len(example.ids)] = 1
        return cls(ids, attended, [prompt_length(example) for example in examples])


def prompt_length(example: Example) -> int:
    return next((i for i, trained in enumerate(example.loss_mask) if trained), len(example.ids))


def language_model(folder: Path, version: str) -> Any:
    """Their wrapper around the library's model."""
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    actor = module("openrlhf", version, "models").Actor(plain)
    actor.packing_samples = False  # set only where they load the model themselves
    return actor


class Scoring(torch.nn.Module):
    """The library's decoder with a head, as their reward models call it: the number at each row's last token."""

    def __init__(self, folder: Path, head: torch.Tensor):
        super().__init__()
        self.decoder = AutoModel.from_pretrained(folder, attn_implementation="eager")
        self.head = torch.nn.Linear(head.shape[1], 1, bias=False)
        self.head.weight.data.copy_(head)

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor, return_output: bool = True) -> Any:
        # The trainer pads the shorter side of the pairs on the left.
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)
        seen = {"input_ids": ids, "attention_mask": attention_mask, "position_ids": places, "use_cache": False}
        values = self.head(self.decoder(**seen).last_hidden_state)[..., 0]
        last = attention_mask.shape[1] - 1 - attention_mask.flip(1).argmax(1)
        return values.gather(1, last[:, None])[:, 0], {}


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Their trainers send to the current CUDA device, and one of their losses asks all ranks, of which there is one."""
    before = torch.cuda.current_device, torch.distributed.all_reduce
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.distributed.all_reduce = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.current_device, torch.distributed.all_reduce = before


def their_update(
    version: str, program: str, words: Sequence[str], rows: Any, model: torch.nn.Module, **more: Any
) -> tuple[float, Gradients]:
    """`fit` on a loader of one batch, with the trainer built as the program builds it."""
    args = openrlhf_arguments(version, program, list(words))
    name = program.removeprefix("train_")
    kind = getattr(module("openrlhf", version, f"trainer.{name}_trainer"), TRAINERS[name])
    strategy = Strategy(args)
    scheduler = MagicMock()
    scheduler.get_last_lr.return_value = [0.0]
    given: dict[str, Any] = {
        "model": model,
        "strategy": strategy,
        "tokenizer": AutoTokenizer.from_pretrained(args.pretrain),
        "optim": MagicMock(),
        "train_dataloader": _Loader([rows]),
        "eval_dataloader": _Loader([]),
        "scheduler": scheduler,
        "max_epochs": 1,
        **more,
    }
    if hasattr(args, "beta"):
        given["beta"] = args.beta
    if hasattr(args, "loss"):
        given["loss"] = args.loss
    taken = inspect.signature(kind.__init__).parameters
    with _on_the_host():
        trainer = kind(**{key: value for key, value in given.items() if key in taken})
        trainer.fit(args, 0, 1)
    assert len(strategy.losses) == 1
    return strategy.losses[0], gradients(getattr(model, "model", model))


TRAINERS = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer", "rm": "RewardModelTrainer"} | {
    "prm": "ProcessRewardModelTrainer",
    "kd": "KDTrainer",
}


class _Loader(list):  # type: ignore[type-arg]
    sampler: Callable[..., Any] | None = None
