"""Converts dataset rows, responses and micro-batches to the form that a tape stores, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch

from lockstep.tape.tape_format import StepRecord
from lockstep.tape.tape_images import TapeImages, stored_spans
from lockstep.trajectory import Trajectory, TrajectoryRow
from lockstep.types import (
    Example,
    Failure,
    Item,
    LabeledResponse,
    Origin,
    Prompt,
    Question,
    Ranking,
    Rollout,
    Score,
    ScoredExample,
    StepLabels,
)
from lockstep.vision.spans import ImageSpan

# The key of a step's JSON with the images of the input sequences.
FED_IMAGES = "fed_images"
# The names of the values that a tape stores for each target token of an update.
RECEIVED = ("target", "position", "context")
HASH = np.uint64(0xBF58476D1CE4E5B9)
# The names that the types of training items have on a tape. The names are fixed by the tape format.
KINDS: dict[type, str] = {Ranking: "Ranking", LabeledResponse: "Judged", StepLabels: "Steps"}
# Conversions of parquet types that JSON does not have: the Python type, a function that converts a value to text, and a
# function that converts the text back. The order matters, because a datetime is also a date.
_TAGS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "$datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "$date": (date, date.isoformat, date.fromisoformat),
    "$time": (time, time.isoformat, time.fromisoformat),
    "$microseconds": (
        timedelta,
        lambda value: str(value // timedelta(microseconds=1)),
        lambda text: timedelta(microseconds=int(text)),
    ),
    "$decimal": (Decimal, str, Decimal),
    "$bytes": (bytes, bytes.hex, bytes.fromhex),
}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_tagged)


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_untagged)


def _tagged(value: Any) -> dict[str, str]:
    for tag, (kind, to_text, _) in _TAGS.items():
        if isinstance(value, kind):
            return {tag: to_text(value)}
    raise TypeError(f"a row on a tape cannot contain a value of type {type(value).__name__}")


def _untagged(found: dict[str, Any]) -> Any:
    [tag, *more] = found or [""]
    return found if more or tag not in _TAGS else _TAGS[tag][2](found[tag])


def rollout_rows(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    rows = [_rollout_row(rollout) for rollout in rollouts]
    # All rows of a table have the same columns.
    if any(rollout.trajectory is not None for rollout in rollouts):
        rows = [row | {"trajectory": _trajectory_text(one)} for row, one in zip(rows, rollouts, strict=True)]
    if any(rollout.rows for rollout in rollouts):
        lengths = [[len(part.ids) for part in rollout.rows] for rollout in rollouts]
        rows = [row | {"row_lengths": counts} for row, counts in zip(rows, lengths, strict=True)]
    if any(route is not None for rollout in rollouts for route in _routes(rollout)):
        rows = [row | _route_columns(rollout) for row, rollout in zip(rows, rollouts, strict=True)]
    if any(images_of(rollout) for rollout in rollouts):
        rows = [row | _image_columns(rollout) for row, rollout in zip(rows, rollouts, strict=True)]
    return rows


def images_of(rollout: Rollout) -> list[ImageSpan]:
    """Returns the images of the prompt and of the rows of the trajectory."""
    of_rows = () if rollout.trajectory is None else rollout.trajectory.images
    return [*rollout.prompt.images, *chain.from_iterable(of_rows)]


def _image_columns(rollout: Rollout) -> dict[str, str]:
    of_rows = () if rollout.trajectory is None else rollout.trajectory.images
    return {
        "images": json.dumps(stored_spans(rollout.prompt.images)),
        "row_images": json.dumps([stored_spans(images) for images in of_rows]),
    }


def _routes(rollout: Rollout) -> list[np.ndarray | None]:
    """Returns the recorded experts of each training sequence."""
    return [row.routes for row in rollout.rows] or [rollout.routes]


def _route_columns(rollout: Rollout) -> dict[str, Any]:
    """Returns the experts as bytes, the number of tokens of each sequence that have experts, and the sizes (layers,
    experts per token, bytes per number). A failed response has none."""
    routes = [route for route in _routes(rollout) if route is not None]
    sizes = [*routes[0].shape[1:], routes[0].dtype.itemsize] if routes else [0, 0, 1]
    return {
        "routes": b"".join(np.ascontiguousarray(route).tobytes() for route in routes),
        "route_tokens": [len(route) for route in routes],
        "route_sizes": sizes,
    }


def _read_routes(row: dict[str, Any]) -> list[np.ndarray]:
    if not row.get("route_tokens"):
        return []
    layers, top_k, size = row["route_sizes"]
    numbers = np.frombuffer(row["routes"], dtype=np.uint8 if size == 1 else np.int16).reshape(-1, layers, top_k)
    return np.split(numbers, list(accumulate(row["route_tokens"]))[:-1])


def _trajectory_text(rollout: Rollout) -> str:
    """Returns the trajectory as JSON, or an empty text. The tokens of the trajectory are in the other columns."""
    return "" if rollout.trajectory is None else to_json(rollout.trajectory.as_dict())


def _trajectory_rows(row: dict[str, Any]) -> tuple[TrajectoryRow, ...]:
    ends = list(accumulate(row.get("row_lengths") or (), initial=0))
    spans = [slice(start, stop) for start, stop in pairwise(ends)]
    routes: list[np.ndarray | None] = [*_read_routes(row)]
    routes = routes or [None] * len(spans)
    return tuple(
        TrajectoryRow(row["ids"][at], row["trained"][at], row["logprobs"][at], route)
        for at, route in zip(spans, routes, strict=True)
    )


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
        **({} if rollout.key is None else {"key": rollout.key}),
        "prompt_ids": list(rollout.prompt.ids),
        "ids": list(rollout.ids),
        "logprobs": list(rollout.logprobs),
        "trained": list(rollout.loss_mask),
        **({"versions": list(rollout.versions)} if rollout.versions else {}),
        "stop": rollout.stop,
        "text": rollout.text,
        "score": total,
        "judgement": json.dumps(judgement),
        "earned": json.dumps(rollout.token_rewards),
        "data_source": question.data_source,
        "ground_truth": question.ground_truth,
        "prompt": to_json(question.prompt),
        "extra_info": to_json(question.extra_info),
        **({"columns": to_json(question.columns)} if question.columns else {}),
        "file": question.origin.file,
        "row": question.origin.row,
    }


def rollouts_of(rows: Sequence[dict[str, Any]], files: TapeImages) -> list[Rollout]:
    return [_rollout(row, files) for row in rows]


def _rollout(row: dict[str, Any], files: TapeImages) -> Rollout:
    images = files.read(json.loads(row.get("images") or "[]"))
    question = Question(
        row["data_source"],
        from_json(row["prompt"]),
        row["ground_truth"],
        Origin(row["file"], row["row"]),
        from_json(row["extra_info"]),
        columns=from_json(row["columns"]) if row.get("columns") else {},
        images=tuple(image.ref for image in images),
    )
    judged = json.loads(row["judgement"])
    score: Score | Failure
    if row["score"] is None:
        score = Failure(judged["part"], judged["why"])
    else:
        score = Score(row["score"], judged["parts"], tuple((end, share) for end, share in judged["steps"]))
    earned = tuple((token, share) for token, share in json.loads(row["earned"]))
    prompt = Prompt(question, row["prompt_ids"], images)
    trajectory = Trajectory.from_dict(from_json(row["trajectory"])) if row.get("trajectory") else None
    if trajectory is not None:
        of_rows = [files.read(stored) for stored in json.loads(row.get("row_images") or "[]")]
        trajectory = replace(trajectory, images=tuple(of_rows))
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
        # Tapes of earlier lockstep versions have no loss mask, because the policy had generated every token of a
        # response.
        row.get("trained") or (),
        row.get("versions") or (),
        trajectory,
        _trajectory_rows(row) if row.get("row_lengths") else (),
        row.get("key"),
        None if row.get("row_lengths") else next(iter(_read_routes(row)), None),
    )


def item_rows(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Returns one table row per sequence. The sequences of the same training item have the same number `item`."""
    with_images = any(example.images for item in items for example in item.examples)
    return [
        {
            "item": number,
            "kind": KINDS.get(type(item), type(item).__name__),
            "ids": list(example.ids),
            "trained": list(example.loss_mask),
            "places": list(example.positions) if isinstance(example, ScoredExample) else None,
            "words": list(example.token_ids) if isinstance(example, ScoredExample) else None,
            "said": json.dumps(_labels(item)),
            "file": example.origin.file,
            "row": example.origin.row,
            **({"images": json.dumps(stored_spans(example.images))} if with_images else {}),
        }
        for number, item in enumerate(items)
        for example in item.examples
    ]


def _labels(item: Item) -> dict[str, Any]:
    """Returns the values of a training item other than its sequences, such as labels."""
    if isinstance(item, Ranking):
        return {"margin": item.margin}
    if isinstance(item, LabeledResponse):
        return {"desirable": item.desirable}
    if isinstance(item, StepLabels):
        return {"labels": item.labels}
    return {}


def items_of(rows: Sequence[dict[str, Any]], files: TapeImages) -> list[Item]:
    grouped: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["item"], []).append(row)
    return [_item(group, files) for group in grouped.values()]


def _item(rows: list[dict[str, Any]], files: TapeImages) -> Item:
    examples = [_example(row, files) for row in rows]
    kind, labels = rows[0]["kind"], json.loads(rows[0]["said"])
    if kind == KINDS[Ranking]:
        return Ranking(tuple(examples), labels["margin"])
    if kind == KINDS[LabeledResponse]:
        return LabeledResponse(examples[0], labels["desirable"])
    if kind == KINDS[StepLabels]:
        assert isinstance(examples[0], ScoredExample)
        return StepLabels(examples[0], tuple(tuple(label) for label in labels["labels"]))
    return examples[0]


def _example(row: dict[str, Any], files: TapeImages) -> Example:
    origin, images = Origin(row["file"], row["row"]), files.read(json.loads(row.get("images") or "[]"))
    if row["places"] is None:
        return Example(row["ids"], row["trained"], origin, images=images)
    return ScoredExample(row["ids"], row["trained"], origin, row["places"], row["words"], images=images)


@dataclass(frozen=True)
class RecordedExample(Example):
    """An input sequence of a recorded step. `pairs` has the position and the token id of each target."""

    pairs: tuple[tuple[int, int], ...] = ()

    def scored_tokens(self) -> list[tuple[int, int]]:
        return list(self.pairs)

    @property
    def targets(self) -> int:
        return len(self.pairs)


def fed_tensors(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """Returns the input sequences of the model as tensors. `fed_examples` converts the tensors back to sequences."""
    ids, scored, targets = _scored_tokens(examples) if _plain(examples) else _scored_tokens_each(examples)
    columns = {"ids": ids, "lengths": [len(one) for one in examples], "asked": scored, "targets": targets}
    tensors = {f"fed/{name}": torch.from_numpy(np.asarray(column, dtype=np.int32)) for name, column in columns.items()}
    routes = [one.routes for one in examples if one.routes is not None]
    if routes:
        tensors["fed/routes"] = torch.from_numpy(np.concatenate(routes))
        counts = [0 if one.routes is None else len(one.routes) for one in examples]
        tensors["fed/route_tokens"] = torch.tensor(counts, dtype=torch.int32)
    return tensors


def _plain(examples: Sequence[Example]) -> bool:
    return all(type(one).scored_tokens is Example.scored_tokens for one in examples)


def _scored_tokens(examples: Sequence[Example]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the token ids of all sequences, the pairs of `Example.scored_tokens`, and the number of pairs per
    sequence. The computation is vectorized over all sequences."""
    ids = np.array(list(chain.from_iterable(one.ids for one in examples)), dtype=np.int64)
    mask = np.array(list(chain.from_iterable(one.loss_mask for one in examples)), dtype=np.int64)
    lengths = np.array([len(one) for one in examples])
    ends = np.cumsum(lengths)
    mask[(ends - lengths)[lengths > 0]] = 0  # the first token of a sequence is never a target
    at = np.flatnonzero(mask)
    owner = np.searchsorted(ends, at, side="right")
    starts = np.concatenate([[0], ends])[owner]
    return ids, np.stack([at - starts - 1, ids[at]], axis=1), np.bincount(owner, minlength=len(ends))


def _scored_tokens_each(examples: Sequence[Example]) -> tuple[list[int], np.ndarray, list[int]]:
    pairs = [pair for one in examples for pair in one.scored_tokens()]
    return (
        [token for one in examples for token in one.ids],
        np.asarray(pairs, dtype=np.int64).reshape(-1, 2),
        [one.targets for one in examples],
    )


def fed_images(examples: Sequence[Example]) -> dict[str, Any]:
    """Returns the images of the input sequences as JSON values, or nothing without images."""
    spans = [stored_spans(example.images) for example in examples]
    return {FED_IMAGES: spans} if any(spans) else {}


def step_examples(record: StepRecord, files: TapeImages) -> list[RecordedExample]:
    """Returns the input sequences of the model in a recorded step."""
    return fed_examples(record.tensors, [files.read(stored) for stored in record.info.get(FED_IMAGES, ())])


def fed_examples(
    tensors: Mapping[str, torch.Tensor], images: Sequence[tuple[ImageSpan, ...]] = ()
) -> list[RecordedExample]:
    """Returns the input sequences of the model, given the tensors of `fed_tensors` and the images of each."""
    ids, scored = tensors["fed/ids"].tolist(), tensors["fed/asked"].tolist()
    examples, token, target = [], 0, 0
    routes = _fed_routes(tensors)
    for number, (length, targets) in enumerate(
        zip(tensors["fed/lengths"].tolist(), tensors["fed/targets"].tolist(), strict=True)
    ):
        pairs = tuple((position, token) for position, token in scored[target : target + targets])
        origin, recorded = Origin("tape", number), routes[number] if routes else None
        own = images[number] if images else ()
        parts = (ids[token : token + length], [0] * length, origin, pairs)
        examples.append(RecordedExample(*parts, images=own, routes=recorded))
        token, target = token + length, target + targets
    return examples


def _fed_routes(tensors: Mapping[str, torch.Tensor]) -> list[np.ndarray]:
    if "fed/routes" not in tensors:
        return []
    return [part.numpy() for part in tensors["fed/routes"].split(tensors["fed/route_tokens"].tolist())]


@dataclass(frozen=True)
class Received:
    """A copy on the CPU of a micro-batch that the model received."""

    ids_NT: torch.Tensor
    positions_NT: torch.Tensor
    predictors_K: torch.Tensor
    targets_K: torch.Tensor
    lengths: tuple[int, ...]
    packed: bool
    packed_index_E: torch.Tensor | None
    marks_NT: torch.Tensor | None = None
    """A number for each token that depends on its positions on three axes and on its image feature; None without
    images."""

    def by_target(self) -> dict[str, torch.Tensor]:
        """Returns for each target its token id, the position from which it is predicted, and a hash of its context. The
        context is all tokens, positions and image features of the sequence up to that position. The values do not
        depend on how the sequences are packed, if the packing is correct."""
        ids, positions = (tensor.flatten().numpy() for tensor in (self.ids_NT, self.positions_NT))
        placed = positions if self.marks_NT is None else positions + self.marks_NT.flatten().numpy()
        width = self.ids_NT.shape[1]
        hashes = np.zeros(len(ids), dtype=np.uint64)
        start = 0
        for row, length in enumerate(self.lengths):
            if self.packed_index_E is not None:
                places = self.packed_index_E[start : start + length].numpy()
            else:
                first = start if self.packed else row * width
                places = np.arange(first, min(first + length, len(ids)))
            hashes[places] = _running_hash(ids[places], placed[places])
            start += length
        predictors = self.predictors_K.numpy()
        found = {"target": self.targets_K.numpy(), "position": positions[predictors], "context": hashes[predictors]}
        return {name: torch.from_numpy(values.astype(np.int32)) for name, values in found.items()}


def image_marks(
    distinct: Sequence[ImageSpan], axes_3NT: torch.Tensor, places_M: torch.Tensor, features_M: torch.Tensor
) -> torch.Tensor:
    """Returns the marks of `Received`, given the fields of `ImageInputs`."""
    marks_NT = (axes_3NT * torch.tensor([7919, 104729, 1299709])[:, None, None]).sum(0)
    # A feature is identified by the hash of its image and its number within the image.
    own = [(int(image.ref.digest[:8], 16), number) for image in distinct for number in range(image.features)]
    of_features = torch.tensor([digest + 15485863 * (number + 1) for digest, number in own], dtype=torch.int64)
    marks_NT.view(-1)[places_M] += of_features[features_M]
    return marks_NT


def _running_hash(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns for each token a hash of the tokens and positions of the sequence up to this token."""
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
        mixed = (mixed + np.arange(len(ids), dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)) * HASH
        mixed = (mixed ^ (mixed >> np.uint64(31))) * HASH
        return np.cumsum(mixed ^ (mixed >> np.uint64(33)), dtype=np.uint64) >> np.uint64(33)
