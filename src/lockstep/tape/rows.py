"""Rows and responses as plain table rows, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from lockstep.tape.values import from_json, to_json
from lockstep.types import (
    Example,
    Failure,
    Item,
    Judged,
    Origin,
    Probe,
    Prompt,
    Question,
    Ranking,
    Rollout,
    Score,
    Steps,
)

# What is kept of the micro-batches of an update, for each target.
RECEIVED = ("target", "position", "context")
HASH = np.uint64(0xBF58476D1CE4E5B9)


def rollout_rows(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    return [_rollout_row(rollout) for rollout in rollouts]


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    question, score = rollout.prompt.question, rollout.score
    judgement: dict[str, Any]
    if isinstance(score, Failure):
        total, judgement = None, {"part": score.part, "why": score.why}
    else:
        total, judgement = score.total, {"parts": score.parts, "steps": score.steps}
    return {
        "place": rollout.prompt_index,
        "sample": rollout.sample,
        "prompt_ids": list(rollout.prompt.ids),
        "ids": list(rollout.ids),
        "logprobs": list(rollout.logprobs),
        "trained": list(rollout.trained),
        **({"versions": list(rollout.versions)} if rollout.versions else {}),
        "stop": rollout.stop,
        "text": rollout.text,
        "score": total,
        "judgement": json.dumps(judgement),
        "earned": json.dumps(rollout.earned),
        "data_source": question.data_source,
        "ground_truth": question.ground_truth,
        "prompt": to_json(question.prompt),
        "extra_info": to_json(question.extra_info),
        "file": question.origin.file,
        "row": question.origin.row,
    }


def rollouts_of(rows: Sequence[dict[str, Any]]) -> list[Rollout]:
    return [_rollout(row) for row in rows]


def _rollout(row: dict[str, Any]) -> Rollout:
    question = Question(
        row["data_source"],
        from_json(row["prompt"]),
        row["ground_truth"],
        Origin(row["file"], row["row"]),
        from_json(row["extra_info"]),
    )
    judged = json.loads(row["judgement"])
    score: Score | Failure
    if row["score"] is None:
        score = Failure(judged["part"], judged["why"])
    else:
        score = Score(row["score"], judged["parts"], tuple((end, share) for end, share in judged["steps"]))
    earned = tuple((token, share) for token, share in json.loads(row["earned"]))
    prompt = Prompt(question, row["prompt_ids"])
    return Rollout(
        prompt,
        row["place"],
        row["sample"],
        row["ids"],
        row["logprobs"],
        row["stop"],
        row["text"],
        score,
        earned,
        # A tape of before there were environments has no mask: every token is the policy's.
        row.get("trained") or (),
        row.get("versions") or (),
    )


def item_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """A row for each sequence; `item` says which belong together."""
    return [
        {
            "item": number,
            "kind": type(item).__name__,
            "ids": list(example.ids),
            "trained": list(example.trained),
            "places": list(example.positions) if isinstance(example, Probe) else None,
            "words": list(example.token_ids) if isinstance(example, Probe) else None,
            "said": json.dumps(_said(item)),
            "file": example.origin.file,
            "row": example.origin.row,
        }
        for number, item in enumerate(items)
        for example in item.examples
    ]


def _said(item: Item) -> dict[str, Any]:
    """What is known of an item besides its sequences."""
    if isinstance(item, Ranking):
        return {"margin": item.margin}
    if isinstance(item, Judged):
        return {"desirable": item.desirable}
    if isinstance(item, Steps):
        return {"labels": item.labels}
    return {}


def items_of(rows: Sequence[dict[str, Any]]) -> list[Item]:
    grouped: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["item"], []).append(row)
    return [_item(group) for group in grouped.values()]


def _item(rows: list[dict[str, Any]]) -> Item:
    examples = [_example(row) for row in rows]
    kind, said = rows[0]["kind"], json.loads(rows[0]["said"])
    if kind == "Ranking":
        return Ranking(tuple(examples), said["margin"])
    if kind == "Judged":
        return Judged(examples[0], said["desirable"])
    if kind == "Steps":
        assert isinstance(examples[0], Probe)
        return Steps(examples[0], tuple(tuple(label) for label in said["labels"]))
    return examples[0]


def _example(row: dict[str, Any]) -> Example:
    origin = Origin(row["file"], row["row"])
    if row["places"] is None:
        return Example(row["ids"], row["trained"], origin)
    return Probe(row["ids"], row["trained"], origin, row["places"], row["words"])


@dataclass(frozen=True)
class Fed(Example):
    """A sequence as a step's record holds it: with the very questions that were asked."""

    pairs: tuple[tuple[int, int], ...] = ()

    def asked(self) -> list[tuple[int, int]]:
        return list(self.pairs)

    @property
    def targets(self) -> int:
        return len(self.pairs)


def fed_tensors(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Sequences as a step's record holds them (`fed_examples` reads them back)."""
    ids, asked, targets = _asked(examples) if _plain(examples) else _asked_each(examples)
    columns = {"ids": ids, "lengths": [len(one) for one in examples], "asked": asked, "targets": targets}
    return {f"fed/{name}": torch.from_numpy(np.asarray(column, dtype=np.int32)) for name, column in columns.items()}


def _plain(examples: Sequence[Example]) -> bool:
    return all(type(one).asked is Example.asked for one in examples)


def _asked(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, what `Example.asked` says and how many times, of all sequences at once."""
    ids = np.array(list(chain.from_iterable(one.ids for one in examples)), dtype=np.int64)
    trained = np.array(list(chain.from_iterable(one.trained for one in examples)), dtype=np.int64)
    lengths = np.array([len(one) for one in examples])
    ends = np.cumsum(lengths)
    trained[(ends - lengths)[lengths > 0]] = 0  # the first token has nothing before it
    at = np.flatnonzero(trained)
    owner = np.searchsorted(ends, at, side="right")
    starts = np.concatenate([[0], ends])[owner]
    return ids, np.stack([at - starts - 1, ids[at]], axis=1), np.bincount(owner, minlength=len(ends))


def _asked_each(examples: Sequence[Example]) -> tuple[list[int], np.ndarray, list[int]]:
    asked = [pair for one in examples for pair in one.asked()]
    return (
        [token for one in examples for token in one.ids],
        np.asarray(asked, dtype=np.int64).reshape(-1, 2),
        [one.targets for one in examples],
    )


def fed_examples(tensors: Mapping[str, torch.Tensor]) -> list[Fed]:
    """The sequences that the models saw in a recorded step."""
    ids, asked = tensors["fed/ids"].tolist(), tensors["fed/asked"].tolist()
    examples, token, target = [], 0, 0
    for number, (length, targets) in enumerate(
        zip(tensors["fed/lengths"].tolist(), tensors["fed/targets"].tolist(), strict=True)
    ):
        pairs = tuple((position, token) for position, token in asked[target : target + targets])
        own = ids[token : token + length]
        examples.append(Fed(own, [0] * length, Origin("tape", number), pairs))
        token, target = token + length, target + targets
    return examples


@dataclass(frozen=True)
class Received:
    """A micro-batch on the host, as the model got it."""

    ids_NT: torch.Tensor
    positions_NT: torch.Tensor
    predictors_K: torch.Tensor
    targets_K: torch.Tensor
    lengths: tuple[int, ...]
    packed: bool
    line_E: torch.Tensor | None

    def by_target(self) -> dict[str, torch.Tensor]:
        """For each target its token, the position that it is predicted from, and a hash of the tokens and positions
        from the beginning of the sequence up to there. They are the same in all right packings of the same rows."""
        ids, positions = (tensor.flatten().numpy() for tensor in (self.ids_NT, self.positions_NT))
        width = self.ids_NT.shape[1]
        hashes = np.zeros(len(ids), dtype=np.uint64)
        start = 0
        for row, length in enumerate(self.lengths):
            if self.line_E is not None:
                places = self.line_E[start : start + length].numpy()
            else:
                first = start if self.packed else row * width
                places = np.arange(first, min(first + length, len(ids)))
            hashes[places] = _running_hash(ids[places], positions[places])
            start += length
        predictors = self.predictors_K.numpy()
        found = {"target": self.targets_K.numpy(), "position": positions[predictors], "context": hashes[predictors]}
        return {name: torch.from_numpy(values.astype(np.int32)) for name, values in found.items()}


def _running_hash(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """At each token, of all up to it in their order."""
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        mixed = (mixed + np.arange(len(ids), dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)) * HASH
        mixed = (mixed ^ (mixed >> np.uint64(31))) * HASH
        return np.cumsum(mixed ^ (mixed >> np.uint64(33)), dtype=np.uint64) >> np.uint64(33)
