"""Creates the lines of samples.jsonl: a response with its score and per-token details."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.run.files import written_aside
from lockstep.trajectory import Trajectory
from lockstep.types import Failure, Rollout
from lockstep.vision.images import preview_png
from lockstep.vision.spans import ImageRef


def sample_line(
    step: int, kind: str, rollout: Rollout, advantage: float | None, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a response as a line of samples.jsonl. `details` are the per-token values that `token_details`
    returns."""
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
    if images := rollout.sequences[-1].images:
        line["images"] = [{"file": image_file(one.ref), "start": one.start, "tokens": one.tokens} for one in images]
    if rollout.trajectory is not None:
        line |= conversation(rollout.trajectory)
    return line if details is None else line | {"token_details": details}


def image_file(ref: ImageRef) -> str:
    """Returns the file name of an image in the folder `images` of a run."""
    return f"{ref.digest[:32]}.png"


def store_images(folder: Path, rollouts: Sequence[Rollout]) -> None:
    """Writes the images of the responses to `folder` as PNG files, each once."""
    for rollout in rollouts:
        for image in rollout.sequences[-1].images:
            if not (path := folder / image_file(image.ref)).is_file():
                folder.mkdir(exist_ok=True)
                with written_aside(path) as aside:
                    aside.write_bytes(preview_png(image.ref, rollout.prompt.question.origin))


def conversation(trajectory: Trajectory) -> dict[str, Any]:
    """Returns the fields of a trajectory for samples.jsonl: the messages by speaker, and the turns of the model with
    their token ranges and rewards. A message that the model generated has the index of its turn."""
    spoken = [number for number, one in enumerate(trajectory.messages) if one.get("role") == "assistant"]
    # Assistant messages before the first turn belong to the prompt. The messages of an agent already have turns.
    known = any("turn" in message for message in trajectory.messages)
    turn_of = {} if known else dict(zip(reversed(spoken), reversed(range(len(trajectory.turns))), strict=False))
    messages = [
        {**message, **({"turn": turn_of[number]} if number in turn_of else {})}
        for number, message in enumerate(trajectory.messages)
    ]
    turns = [
        {
            "start": turn.start,
            "stop": turn.stop,
            "reward": turn.reward,
            "finish": turn.finish,
            "calls": len(turn.calls),
            **({"parse_error": turn.parse_error} if turn.parse_error else {}),
            **({"anchor": turn.anchor} if turn.anchor is not None else {}),
        }
        for turn in trajectory.turns
    ]
    metrics = dict(trajectory.metrics)
    return {"conversation": messages, "turns": turns, "environment_stop": trajectory.stop, "environment": metrics}


MOST_TOKENS = 2048
"""Maximum number of tokens per response whose details are logged, to limit the size of samples.jsonl."""
DIGITS = 4
# A character has at most four bytes, and each byte may be a token.
LONGEST_CHARACTER = 4
UNFINISHED = "\ufffd"


class TokenTexts:
    """Decodes the text of each token. A character that consists of several tokens is assigned to the last of these
    tokens."""

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._decoded: dict[tuple[int, ...], str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """Returns the text of each token. The concatenated texts are the decoded response. If decoding the tokens one
        by one does not give this text, each token is decoded together with the tokens before it."""
        apart = self._apart(ids)
        return apart if "".join(apart) == self._decode(list(ids)) else self._in_turn(ids)

    def _apart(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        begun: tuple[int, ...] = ()
        for place, token in enumerate(ids, start=1):
            begun = (*begun, token)
            text = self._decoded.get(begun)
            if text is None:
                text = self._decoded[begun] = self._decode(list(begun))
            if text.endswith(UNFINISHED) and len(begun) < LONGEST_CHARACTER and place < len(ids):
                texts.append("")
            else:
                texts.append(text)
                begun = ()
        return texts

    def _in_turn(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        before = done = 0
        for end in range(1, len(ids) + 1):
            context, text = self._decode(list(ids[before:done])), self._decode(list(ids[before:end]))
            if text.endswith(UNFINISHED) and end - done < LONGEST_CHARACTER and end < len(ids):
                texts.append("")
                continue
            texts.append(text[len(context) :] if text.startswith(context) else self._decode(list(ids[done:end])))
            before, done = done, end
        return texts


def token_details(rollout: Rollout, texts: TokenTexts, advantages: Sequence[float] | None) -> dict[str, Any]:
    """Returns the `texts` and the rollout `logprobs` of the first `MOST_TOKENS` tokens. Tokens of the environment, such
    as tool results, have a log-prob of null. The result contains `advantages` if they differ between tokens. The
    argument `advantages` has one number per generated token."""
    ids, trained = rollout.ids[:MOST_TOKENS], list(rollout.loss_mask[:MOST_TOKENS])
    logprobs = zip(rollout.logprobs, trained, strict=False)
    details: dict[str, Any] = {
        "texts": texts.of(ids),
        "logprobs": [round(value, DIGITS) if wrote else None for value, wrote in logprobs],
    }
    if advantages is not None and len(set(advantages)) > 1:
        values = iter(advantages)
        details["advantages"] = [float(f"{next(values):.{DIGITS}g}") if wrote else None for wrote in trained]
    return details
