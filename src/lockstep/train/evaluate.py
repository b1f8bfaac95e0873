"""Validation: the loss on held-out rows, and greedy answers to questions that a rule can check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from lockstep.data.batching import micro_batch, plan_micro_batches, to_device
from lockstep.data.chat import render_prompt
from lockstep.model.policy import Policy
from lockstep.parallel.shard import gathered
from lockstep.parallel.world import World
from lockstep.reward.rules import rule_for
from lockstep.rollout.hf import end_ids, generate_batches
from lockstep.train.step import Loss
from lockstep.types import Answer, Example, MicroBatch, Question

# Rows planned into micro-batches together: enough to pack well, few enough to plan quickly.
GROUP = 512


def micro_batches(
    examples: Sequence[Example], world: World, *, tokens: int | None, rows: int | None, pad_id: int
) -> list[MicroBatch]:
    """This rank's share of some rows."""
    plan = plan_micro_batches([len(e) for e in examples], devices=world.size, tokens=tokens, rows=rows)
    return [
        micro_batch([examples[i] for i in members], packed=tokens is not None, pad_id=pad_id)
        for members in plan[world.rank]
    ]


@contextmanager
def _evaluating(policy: Policy) -> Iterator[None]:
    policy.eval()
    try:
        yield
    finally:
        policy.train()


@torch.no_grad()
def validation_loss(
    policy: Policy,
    examples: Sequence[Example],
    loss: Loss,
    world: World,
    device: torch.device,
    *,
    tokens: int | None,
    rows: int | None,
    pad_id: int,
) -> float:
    """Mean loss over the trained tokens of all rows."""
    total, count = 0.0, 0
    with _evaluating(policy):
        for start in range(0, len(examples), GROUP):
            group = examples[start : start + GROUP]
            for batch in micro_batches(group, world, tokens=tokens, rows=rows, pad_id=pad_id):
                total += loss(policy(to_device(batch, device))).loss.item()
                count += len(batch.targets_K)
    total, count_all = world.sum([total, count])
    return total / count_all


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    text = render_prompt(tokenizer, question.prompt, question.origin)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    world: World,
    device: torch.device,
    *,
    max_new_tokens: int,
    end_tokens: Sequence[int] = (),
) -> list[Answer]:
    """Greedy answers, scored by the rule of each question's data source, in the order of the questions."""
    mine = list(range(world.rank, len(questions), world.size))
    if world.size > 1:
        # A sharded model must be entered through its root once; `generate` enters below it.
        with torch.no_grad():
            policy(to_device(micro_batch([], packed=True, pad_id=0), device))
    answers: list[tuple[int, Answer]] = []
    with gathered(policy), policy.generating() as model:
        stops = sorted({*end_ids(model, tokenizer), *end_tokens})
        prompts = [prompt_ids(tokenizer, questions[i]) for i in mine]
        batches = generate_batches(model, tokenizer, prompts, max_new_tokens=max_new_tokens, stop_ids=stops)
        texts = [generated for batch in batches for generated in batch]
    for i, generated in zip(mine, texts, strict=True):
        question = questions[i]
        score = rule_for(question.data_source)(generated.text, question.ground_truth)
        answers.append((i, Answer(question, generated.text, score, len(generated.ids), generated.stopped)))
    everyone = [pair for share in world.gather(answers) for pair in share]
    return [given for _, given in sorted(everyone, key=lambda pair: pair[0])]


def accuracy(answers: Sequence[Answer]) -> dict[str, float]:
    """Mean score overall, and by data source where there are several."""
    metrics = {"val/accuracy": sum(a.score for a in answers) / len(answers)}
    sources = sorted({a.question.data_source for a in answers})
    for source in sources if len(sources) > 1 else []:
        scores = [a.score for a in answers if a.question.data_source == source]
        metrics[f"val/accuracy/{source}"] = sum(scores) / len(scores)
    metrics["val/answered"] = sum(a.stopped for a in answers) / len(answers)
    return metrics
