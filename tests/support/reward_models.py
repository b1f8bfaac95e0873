"""A tiny reward model on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch


def write_reward_model(tiny: Path, folder: Path, *, labels: int = 1, **config) -> Path:
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    settings = Qwen2Config.from_pretrained(tiny, num_labels=labels)
    settings.architectures = ["Qwen2ForSequenceClassification"]
    for key, value in config.items():
        setattr(settings, key, value)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Qwen2ForSequenceClassification(settings)
        # Large weights make scores of order one, so that a wrong position or a missing mask shows.
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.data.normal_(0.0, 2.0 * weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder / file)
    return folder
