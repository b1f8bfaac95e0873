"""Stores encoded items (rows) as a few large arrays, in memory or memory-mapped; items are built on access.

The byte layout is the same in memory and on disk: a JSON header with metadata (`about`) and array offsets, then the
arrays. Array names end with their dimensions, which are I items, E sequences of all items, T tokens of all sequences.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from lockstep.data.batching import packed_tokens
from lockstep.types import Example, Item, LabeledResponse, Origin, Prompt, Question, Ranking, ScoredExample, StepLabels
from lockstep.vision.images import file_digest
from lockstep.vision.spans import ImageRef, ImageSpan

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
OriginOf = Callable[[int], Origin]
"""Maps a row number of a data source to the origin of the row: its file and line."""

_ALIGNED = 8


def to_bytes(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> bytes:
    """Serialises one-dimensional arrays and their metadata."""
    places: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    end = 0
    for name, values in arrays.items():
        places[name] = [values.dtype.str, end, len(values)]
        parts.append(_padded(values.tobytes()))
        end += len(parts[-1])
    header = _padded(json.dumps({"about": about, "arrays": places}).encode(), b" ")
    return b"".join([len(header).to_bytes(_ALIGNED, "little"), header, *parts])


def _padded(data: bytes, filling: bytes = b"\0") -> bytes:
    return data + filling * (-len(data) % _ALIGNED)


def from_bytes(data: Any) -> tuple[Arrays, dict[str, Any]]:
    """Reads the output of `to_bytes`. The arrays are views of `data`, not copies."""
    view = memoryview(data)
    start = _ALIGNED + int.from_bytes(view[:_ALIGNED], "little")
    header = json.loads(bytes(view[_ALIGNED:start]))
    arrays = {
        name: np.frombuffer(view, dtype, count, start + place)
        for name, (dtype, place, count) in header["arrays"].items()
    }
    return arrays, header["about"]


class _Items(Sequence[T]):
    """Sequence base class. Subclasses implement `_at` for non-negative indices."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        return self._at(index % len(self))

    def _at(self, index: int) -> T:
        raise NotImplementedError


class Store(_Items[T]):
    """A sequence of items. Each item is built from the arrays on access; `about` is the metadata."""

    def __init__(self, data: Any, origin_of: OriginOf):
        self._arrays, self.about = from_bytes(data)
        self._origin_of = origin_of
        self._kind = _KINDS[self.about["kind"]]
        self._starts, self._sequences, self._rows = (self._arrays[name] for name in ("starts", "sequences", "rows"))
        self._tokens, self._trained = self._arrays["tokens"], self._arrays["trained"]

    def __len__(self) -> int:
        return len(self._rows)

    def _at(self, index: int) -> T:
        origin = self._origin_of(int(self._rows[index]))
        sequences = range(int(self._sequences[index]), int(self._sequences[index + 1]))
        item: T = self._kind.build(self._arrays, index, [self._sequence(number, origin) for number in sequences])
        return item

    def _sequence(self, number: int, origin: Origin) -> Example:
        first, last = int(self._starts[number]), int(self._starts[number + 1])
        ids = array("q")
        ids.frombytes(self._tokens[first:last].astype(np.int64).tobytes())
        trained = self._trained[first:last].tobytes()
        images = _read_images(self._arrays, self.about["images"], number) if self.about.get("images") else ()
        if self.about["asked"] is None:
            return Example(ids, trained, origin, images=images)
        begin, end = self._arrays["position_starts"][number : number + 2]
        positions = tuple(self._arrays["positions"][begin:end].tolist())
        return ScoredExample(ids, trained, origin, positions, tuple(self.about["asked"]), images=images)

    @property
    def lengths_E(self) -> np.ndarray:
        """Length of each sequence."""
        return np.diff(self._starts)

    @property
    def counts_I(self) -> np.ndarray:
        """Number of sequences of each item."""
        return np.diff(self._sequences)

    @property
    def firsts_I(self) -> np.ndarray:
        """Index of the first sequence of each item."""
        return self._sequences[:-1]

    @property
    def packed_tokens_I(self) -> np.ndarray:
        """Number of tokens of each item in a packed row; a shared prefix counts once."""
        return self._arrays["line"]

    @property
    def digests_I(self) -> np.ndarray:
        """Hash of the tokens and images of each item."""
        return self._arrays["digests"]

    @property
    def tokens_T(self) -> np.ndarray:
        return self._tokens


def stored(items: Sequence[Any], rows: Sequence[int], about: Mapping[str, Any], origin_of: OriginOf) -> bytes | None:
    """Serialises items with their row numbers.

    Returns None if the bytes would lose information; the caller then keeps the items as objects. To check that nothing
    is lost, items are rebuilt from the bytes and compared with the originals. Items of the kind `example` are compared
    with the arrays directly.
    """
    kinds = {type(item) for item in items}
    if len(kinds) != 1:
        return None
    kind = next((name for name, kind in _KINDS.items() if kind.item in kinds), None)
    if kind is None:
        return None
    sequences = [_KINDS[kind].sequences(item) for item in items]
    examples = [example for group in sequences for example in group]
    label_tokens = {tuple(one.token_ids) if isinstance(one, ScoredExample) else None for one in examples}
    extra = _KINDS[kind].columns(items)
    if len(label_tokens) != 1 or extra is None:
        return None
    (token_ids,) = label_tokens
    arrays = {
        "rows": np.asarray(rows, dtype=np.int64),
        "sequences": _offsets(len(group) for group in sequences),
        "starts": _offsets(len(example) for example in examples),
        "tokens": np.concatenate([np.asarray(example.ids, dtype=np.int32) for example in examples]),
        "trained": np.frombuffer(b"".join(bytes(example.loss_mask) for example in examples), dtype=np.uint8),
        "line": np.array([_packed_tokens(group) for group in sequences], dtype=np.int64),
        "digests": np.array([digest_of(*_contents(group)) for group in sequences], dtype=np.uint64),
        **extra,
    }
    scored = [one for one in examples if isinstance(one, ScoredExample)]
    if scored:
        arrays["position_starts"] = _offsets(len(one.positions) for one in scored)
        arrays["positions"] = np.array([position for one in scored for position in one.positions], dtype=np.int64)
    images = _image_columns(examples, arrays)
    data = to_bytes(arrays, {**about, "kind": kind, "asked": token_ids, "images": images})
    if kind == "example" and not images:
        return data if _are_all_of(examples, arrays["tokens"], rows, origin_of) else None
    made = Store[Any](data, origin_of)
    return data if all(rebuilt == item for rebuilt, item in zip(made, items, strict=True)) else None


_SPAN_FIELDS = tuple(field.name for field in fields(ImageSpan) if field.name not in ("start", "ref"))


def _image_columns(examples: Sequence[Example], arrays: Arrays) -> list[list[Any]]:
    """Adds the images of the examples to `arrays`: the place of each in its sequence, its index among the distinct
    images, and the bytes of images that are not files. Returns the other values of the distinct images."""
    spans = [span for example in examples for span in example.images]
    if not spans:
        return []
    distinct = {replace(span, start=0): None for span in spans}
    numbers = {span: number for number, span in enumerate(distinct)}
    data = [span.ref.data or b"" for span in distinct]
    arrays["image_starts"] = _offsets(len(example.images) for example in examples)
    arrays["image_places"] = np.array([span.start for span in spans], dtype=np.int64)
    arrays["image_numbers"] = np.array([numbers[replace(span, start=0)] for span in spans], dtype=np.int64)
    arrays["image_byte_starts"] = _offsets(map(len, data))
    arrays["image_bytes"] = np.frombuffer(b"".join(data), dtype=np.uint8)
    return [[one.ref.digest, one.ref.path, {name: getattr(one, name) for name in _SPAN_FIELDS}] for one in distinct]


def _read_images(arrays: Arrays, distinct: Sequence[Any], number: int) -> tuple[ImageSpan, ...]:
    """Returns the images of the sequence `number`."""
    found = []
    for at in range(*map(int, arrays["image_starts"][number : number + 2])):
        index = int(arrays["image_numbers"][at])
        digest, path, fixed = distinct[index]
        begin, end = arrays["image_byte_starts"][index : index + 2]
        ref = ImageRef(digest, path, None if path is not None else arrays["image_bytes"][begin:end].tobytes())
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fixed.items()
        }
        found.append(ImageSpan(start=int(arrays["image_places"][at]), ref=ref, **values))
    return tuple(found)


def image_files(items: Sequence[Any]) -> dict[str, str]:
    """Returns the digest of each image file of stored items, by path, in the order of the rows."""
    if isinstance(items, Joined):
        return {path: digest for part in items.parts for path, digest in image_files(part).items()}
    if isinstance(items, Store):
        named = ((path, digest) for digest, path, *_ in items.about.get("images") or ())
    else:
        groups = (_prompt_sequence(item) if isinstance(item, Prompt) else item.examples for item in items)
        refs = (image.ref for group in groups for example in group for image in example.images)
        named = ((ref.path, ref.digest) for ref in refs)
    return {path: digest for path, digest in named if path is not None}


def unchanged_images(about: Mapping[str, Any]) -> bool:
    """Returns whether the image files of stored items still have the content that the items were made from."""
    named = ((digest, path) for digest, path, *_ in about.get("images") or () if path is not None)
    return all(file_digest(Path(path)) == digest for digest, path in named)


def _are_all_of(examples: Sequence[Example], tokens: np.ndarray, rows: Sequence[int], origin_of: OriginOf) -> bool:
    """Returns whether the examples can be rebuilt from the tokens and the row numbers."""
    plain = all(
        type(one.ids) is array and type(one.loss_mask) is bytes and len(one.ids) == len(one.loss_mask)
        for one in examples
    )
    return (
        plain
        and np.array_equal(np.concatenate([np.asarray(one.ids) for one in examples]), tokens)
        and all(origin_of(row) == one.origin for row, one in zip(rows, examples, strict=True))
    )


def digest_of(*sequences: Sequence[int]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for ids in sequences:
        digest.update(np.array([len(ids)], dtype=np.int32).tobytes())
        digest.update(np.asarray(ids, dtype=np.int32).tobytes())
    return int.from_bytes(digest.digest(), "little")


def _packed_tokens(group: Sequence[Example]) -> int:
    return len(group[0]) if len(group) == 1 else packed_tokens(Ranking(tuple(group)))


def _offsets(lengths: Iterator[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], dtype=np.int64)


@dataclass(frozen=True)
class _ItemKind(Generic[T]):
    """Describes how one type of item is stored: its sequences, its other fields as columns, and its constructor."""

    item: type[T]
    sequences: Callable[[T], Sequence[Example]]
    columns: Callable[[Sequence[T]], Arrays | None]
    build: Callable[[Arrays, int, list[Any]], T]


def _ranking_columns(items: Sequence[Ranking]) -> Arrays:
    return {"margin": np.array([item.margin for item in items], dtype=np.float64)}


def _ranking(arrays: Arrays, index: int, examples: list[Example]) -> Ranking:
    return Ranking(tuple(examples), float(arrays["margin"][index]))


def _judged_columns(items: Sequence[LabeledResponse]) -> Arrays:
    return {"desirable": np.array([item.desirable for item in items], dtype=np.uint8)}


def _judged(arrays: Arrays, index: int, examples: list[Example]) -> LabeledResponse:
    return LabeledResponse(examples[0], bool(arrays["desirable"][index]))


def _steps_columns(items: Sequence[StepLabels]) -> Arrays:
    """Stores one label per step; a label has a number for each label token."""
    numbers = [number for item in items for label in item.labels for number in label]
    return {
        "labels": np.array(numbers, dtype=np.float64),
        "label_starts": _offsets(sum(map(len, item.labels)) for item in items),
    }


def _steps(arrays: Arrays, index: int, examples: list[ScoredExample]) -> StepLabels:
    begin, end = arrays["label_starts"][index : index + 2]
    width = len(examples[0].token_ids)
    numbers = arrays["labels"][begin:end].reshape(-1, width).tolist()
    return StepLabels(examples[0], tuple(tuple(label) for label in numbers))


def _prompt_columns(items: Sequence[Prompt]) -> Arrays | None:
    """Returns the questions of the prompts as JSON, or None if JSON cannot represent a question."""
    try:
        texts = [json.dumps(_question_fields(item.question), ensure_ascii=True).encode() for item in items]
    except (TypeError, ValueError):
        return None
    return {"questions": np.frombuffer(b"".join(texts), dtype=np.uint8), "question_starts": _offsets(map(len, texts))}


def _question_fields(question: Question) -> list[Any]:
    inputs = [list(question.tools), dict(question.template_arguments), question.columns]
    return [question.data_source, question.prompt, question.ground_truth, question.extra_info, *inputs]


def _prompt(arrays: Arrays, index: int, examples: list[Example]) -> Prompt:
    begin, end = arrays["question_starts"][index : index + 2]
    source, prompt, truth, extra, tools, *inputs = json.loads(arrays["questions"][begin:end].tobytes())
    (example,) = examples
    refs = tuple(image.ref for image in example.images)
    question = replace(Question(source, prompt, truth, example.origin, extra, tools or (), *inputs), images=refs)
    return Prompt(question, list(example.ids), example.images)


def _prompt_sequence(item: Prompt) -> Sequence[Example]:
    return (Example(item.ids, bytes(len(item.ids)), item.question.origin, images=item.images),)


_KINDS: dict[str, _ItemKind[Any]] = {
    "example": _ItemKind(Example, lambda item: (item,), lambda items: {}, lambda arrays, index, examples: examples[0]),
    "probe": _ItemKind(
        ScoredExample, lambda item: (item,), lambda items: {}, lambda arrays, index, examples: examples[0]
    ),
    "ranking": _ItemKind(Ranking, lambda item: item.examples, _ranking_columns, _ranking),
    "judged": _ItemKind(LabeledResponse, lambda item: item.examples, _judged_columns, _judged),
    "steps": _ItemKind(StepLabels, lambda item: item.examples, _steps_columns, _steps),
    "prompt": _ItemKind(Prompt, _prompt_sequence, _prompt_columns, _prompt),
}


class Joined(_Items[T]):
    """Concatenation of several sequences."""

    def __init__(self, parts: Sequence[Sequence[T]]):
        self.parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _at(self, index: int) -> T:
        which = bisect_right(self._ends, index)
        part = self.parts[which]
        return part[index - self._ends[which] + len(part)]

    def __iter__(self) -> Iterator[T]:
        for part in self.parts:
            yield from part


def sequences(items: Iterable[Item]) -> Iterator[Example]:
    """Yields every sequence of every item, in order."""
    return (example for item in items for example in item.examples)


def _contents(examples: Sequence[Example]) -> Iterator[Sequence[int]]:
    """Yields the tokens of each sequence of an item, and the hash of each of its images."""
    for example in examples:
        yield example.ids
        yield from (list(bytes.fromhex(image.ref.digest)) for image in example.images)


def item_digests(items: Sequence[Any]) -> np.ndarray:
    """Returns for each item a hash of its tokens and images."""
    if isinstance(items, Joined):
        return np.concatenate([np.empty(0, dtype=np.uint64), *map(item_digests, items.parts)])
    if isinstance(items, Store):
        return items.digests_I
    groups = (_prompt_sequence(item) if isinstance(item, Prompt) else item.examples for item in items)
    return np.array([digest_of(*_contents(group)) for group in groups], dtype=np.uint64)
