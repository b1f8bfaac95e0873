"""`lockstep eval` in one line, and log-probabilities of plain transformers to hold it against."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.commands.eval import score_model


def evaluated(model: Path, data: Path, out: Path, **more) -> tuple[dict[str, float], list[dict]]:
    settings = {"rows": None, "max_new_tokens": 8, "n": 1, "temperature": 0.0, "seed": 0, "dtype": "fp32"}
    metrics = score_model(str(model), str(data), out=out, device_name="cpu", **{**settings, **more})
    return metrics, [json.loads(line) for line in out.read_text().splitlines()]


def response_logprob(folder: Path, prompt: str, response: str) -> tuple[float, int]:
    """The summed log-probability of the response with its end token, and its tokens."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": prompt}]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    text = before + response + "<|im_end|>"
    start = len(tokenizer(before, add_special_tokens=False)["input_ids"])
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        every = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return float(every[start - 1 :].sum()), ids.shape[1] - start
