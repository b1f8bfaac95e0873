"""Lines of samples.jsonl: a response with its score and per-token details."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.types import Failure, Rollout

# A response as a line of samples.jsonl.


def sample_line(
    step: int, kind: str, rollout: Rollout, advantage: float | None, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`details` tell of each token (`token_details.py`); they come last, behind what a person reads in the file."""
    question, score = rollout.prompt.question, rollout.score
    line: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "origin": str(question.origin),
        "sample": rollout.sample,
        "prompt": question.prompt,
        "response": rollout.text,
        "ground_truth": question.ground_truth,
    }
    if isinstance(score, Failure):
        line |= {"score": None, "failure": f"{score.part}: {score.why}"}
    else:
        line |= {"score": score.total, "parts": score.parts}
    if advantage is not None:
        line["advantage"] = advantage
    if rollout.versions:
        line["versions"] = list(rollout.versions)
    line |= {"prompt_tokens": len(rollout.prompt.ids), "tokens": len(rollout.ids), "stop": rollout.stop}
    return line if details is None else line | {"token_details": details}


# What a stored response tells of each token: its text, log-prob and advantage, for the page that colours them.

MOST_TOKENS = 2048
"""Of a response from its beginning: a step's samples stay some hundred KB, however long responses are."""
DIGITS = 4
# A character has at most four bytes, each of which may be a token; what is no text is not waited for.
LONGEST_CHARACTER = 4
UNFINISHED = "\ufffd"


class TokenTexts:
    """The text of each token, as a tokenizer writes it. A character of several tokens stands at the last of them."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Joined they are the text; where a tokenizer writes a token otherwise after others, they are asked for so."""
        apart = self._apart(ids)
        return apart if "".join(apart) == self._decode(list(ids)) else self._in_turn(ids)

    def _apart(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        begun: tuple[int, ...] = ()
        for place, token in enumerate(ids, start=1):
            begun = (*begun, token)
            text = self._known.get(begun)
            if text is None:
                text = self._known[begun] = self._decode(list(begun))
            if text.endswith(UNFINISHED) and len(begun) < LONGEST_CHARACTER and place < len(ids):
                texts.append("")
            else:
                texts.append(text)
                begun = ()
        return texts

    def _in_turn(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        before = told = 0
        for end in range(1, len(ids) + 1):
            context, text = self._decode(list(ids[before:told])), self._decode(list(ids[before:end]))
            if text.endswith(UNFINISHED) and end - told < LONGEST_CHARACTER and end < len(ids):
                texts.append("")
                continue
            texts.append(text[len(context) :] if text.startswith(context) else self._decode(list(ids[told:end])))
            before, told = told, end
        return texts


def token_details(rollout: Rollout, texts: TokenTexts, advantages: Sequence[float] | None) -> dict[str, Any]:
    """`texts`, `logprobs` (of the engine that wrote them; null where an environment did) and, where the tokens differ
    in it, `advantages`, of the first `MOST_TOKENS` tokens. Those given have one number for each written token."""
    ids, trained = rollout.ids[:MOST_TOKENS], list(rollout.trained[:MOST_TOKENS])
    logprobs = zip(rollout.logprobs, trained, strict=False)
    details: dict[str, Any] = {
        "texts": texts.of(ids),
        "logprobs": [round(value, DIGITS) if wrote else None for value, wrote in logprobs],
    }
    if advantages is not None and len(set(advantages)) > 1:
        own = iter(advantages)
        details["advantages"] = [float(f"{next(own):.{DIGITS}g}") if wrote else None for wrote in trained]
    return details
