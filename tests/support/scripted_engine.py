"""An engine that writes given texts, for tests of conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lockstep.rollout.engine import SharedWeights, why_ended
from lockstep.types import Completion, Request, Sampling

Say = Callable[[Request, int], str]
"""Returns the text of a turn. The number counts the turns of the request's session."""


class Scripted(SharedWeights):
    """Writes what `say` returns, with the end token, up to the limits of the request. Log-probs are -1, -2, -3 ..."""

    instead = ""

    def __init__(self, tokenizer: Any, say: Say):
        self.tokenizer, self.say = tokenizer, say
        self.batches: list[list[Request]] = []
        self.turns: dict[int | None, int] = {}

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.batches.append(list(requests))
        for number, request in enumerate(requests):
            turn = self.turns.get(request.session, 0)
            self.turns[request.session] = turn + 1
            text = self.say(request, turn)
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
            limits = request.limits(sampling)
            for end in range(1, len(ids) + 1):
                if why := why_ended(ids[:end], 0, limits, self.tokenizer.decode):
                    break
            assert why, "the text ends with the end token"
            yield Completion(number, request.first, ids[:end], [-float(i + 1) for i in range(end)], why)
