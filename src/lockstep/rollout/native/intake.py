"""Converts requests to sequences of the native engine's scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.kernels.sampling import sequence_keys
from lockstep.rollout.native.cached_spans import SequenceState, SharedPrompt
from lockstep.types import PartialResponse, Request, Sampling


class Intake:
    """Counts the requests of one call of `generate` and converts them to sequences."""

    def __init__(self, sampling: Sampling):
        self.sampling = sampling
        self.asked = 0
        """The number of requests so far, which is also the index of the next request."""

    def sequences(self, requests: Sequence[Request], first: int) -> tuple[list[SharedPrompt], list[SequenceState]]:
        """Returns the prompts and sequences of more requests. `first` is the scheduler's next request index.

        Each trajectory of a group asks on its own, so requests with a session and the same prompt share its prefill.
        """
        prefixes: list[SharedPrompt] = []
        sequences: list[SequenceState] = []
        numbers: dict[tuple[tuple[int, ...], tuple[str, ...]], int] = {}
        for request in requests:
            if not request.ids:
                raise ValueError(f"request {self.asked} has no prompt tokens")
            if request.images and request.images[-1].stop >= len(request.ids):
                raise ValueError(f"request {self.asked}: the prompt ends with an image")
            # Different images may have the same tokens.
            prompt = (tuple(request.ids), tuple(image.ref.digest for image in request.images))
            number = numbers.get(prompt) if request.session is not None else None
            if number is None:
                number = first + len(prefixes)
                prefixes.append(SharedPrompt(list(request.ids[:-1]), images=request.images))
                if request.session is not None:
                    numbers[prompt] = number
            sequences += self._samples(request, number)
            self.asked += 1
        return prefixes, sequences

    def _samples(self, request: Request, number: int) -> list[SequenceState]:
        begun = request.partial_responses or {
            which: PartialResponse() for which in range(request.first, request.first + request.n)
        }
        if request.session is not None and len(begun) != 1:
            raise ValueError(f"session {request.session} asks for {len(begun)} samples; a session has one")
        most = self.sampling.max_tokens
        return [
            SequenceState(
                [*request.ids, *so_far.ids],
                request=number,
                number=which,
                prompt=len(request.ids),
                limit=len(request.ids) + min(most, request.max_tokens or most),
                keys=sequence_keys(self.sampling.seed, request.key, which),
                logprobs=list(so_far.logprobs),
                asked=self.asked,
                stops=request.limits(self.sampling) if request.stop_strings or request.stop_ids else None,
                session=request.session,
                images=request.images,
                routes=so_far.routes,
            )
            for which, so_far in begun.items()
        ]
