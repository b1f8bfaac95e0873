"""Sequences within the limit of tokens, as `data.overlong` says: refused, dropped, or cut at an end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from lockstep.errors import Refusal
from lockstep.types import Example, Origin

ExampleT = TypeVar("ExampleT", bound=Example)

_DROP = "raise data.max_tokens or drop the row"


class OverLimit(Refusal):
    """A row over the limit, which is `data.overlong`'s business alone."""


def kept_span(tokens: int, limit: int, overlong: str, over: Refusal) -> slice | None:
    """Which of the tokens stay: None when the row is dropped. `over` is raised where nothing may be cut."""
    if tokens <= limit:
        return slice(0, tokens)
    if overlong == "drop":
        return None
    if overlong == "error":
        raise over
    return slice(tokens - limit, tokens) if overlong == "truncate_left" else slice(0, limit)


def too_long(origin: Origin, what: str, limit: int) -> OverLimit:
    return OverLimit.at(
        origin,
        f"{what} tokens, over data.max_tokens={limit}",
        "raise data.max_tokens as far as batch.tokens and the model's context allow, or set data.overlong to drop, "
        "truncate_left or truncate_right",
    )


def fit(example: ExampleT, limit: int, overlong: str, needed: str = "trained token") -> ExampleT | None:
    """The example within `limit` tokens, of which one `needed` must stay; None when it is dropped."""
    if len(example) <= limit:
        return example
    over = too_long(example.origin, f"has {len(example)}", limit)
    span = kept_span(len(example), limit, overlong, over)
    if span is None:
        return None
    short = example.cut(span)
    if not short.targets:
        raise Refusal.at(example.origin, f"{overlong} to {limit} tokens leaves no {needed}", _DROP)
    return short


def fit_responses(
    examples: Sequence[Example], names: Sequence[str], limit: int, overlong: str
) -> Sequence[Example] | None:
    """Responses to one prompt within `limit` tokens each; None when they are dropped.

    From the left the prompt alone is cut, for all responses at the same position; from the right each response.
    """
    longest = max(len(example) for example in examples)
    if longest <= limit:
        return examples
    origin, name = examples[0].origin, names[[len(example) for example in examples].index(longest)]
    span = kept_span(longest, limit, overlong, too_long(origin, f"prompt and {name} have {longest}", limit))
    if span is None:
        return None
    if overlong == "truncate_left":
        prompt = prompt_length(examples[0])
        if span.start >= prompt:
            raise Refusal.at(
                origin, f"{name} alone has {longest - prompt} tokens and leaves nothing of {limit} to the prompt", _DROP
            )
        return [example.cut(span) for example in examples]
    short = [example.cut(span) for example in examples]
    for name, example in zip(names, short, strict=True):
        if not example.targets:
            raise Refusal.at(origin, f"truncate_right to {limit} tokens leaves nothing of {name}", _DROP)
    refuse_equal(short, names, f" once cut to {limit} tokens")
    return short


def prompt_length(example: Example) -> int:
    """Tokens before the response."""
    return example.trained.index(1)


def refuse_equal(examples: Sequence[Example], names: Sequence[str], after: str = "") -> None:
    """Refuse responses that are the same tokens: there is nothing to prefer."""
    first: dict[tuple[int, ...], str] = {}
    for name, example in zip(names, examples, strict=True):
        twin = first.setdefault(tuple(example.ids), name)
        if twin != name:
            raise Refusal.at(
                example.origin, f"{twin} and {name} are identical{after}", _DROP if after else "remove the row"
            )
