"""The requests of one call of `generate`, as samples for the servers. More may arrive while the servers generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.kernels.sampling import sequence_keys
from lockstep.rollout.engine import Conversations, Further
from lockstep.rollout.servers.adapter import WantedSample
from lockstep.types import Request, Sampling

_SEED_BITS = 2**63 - 1
# How often a source of more requests is asked while nothing happens, and how often time limits are checked without one.
_STREAM_SECONDS, _PLAIN_SECONDS = 0.01, 1.0


class RequestStream:
    """Implements `Arrivals` of `fleet.py`: the requests of the call first, then those that `further` adds. `room`
    returns how many samples the servers take at once."""

    def __init__(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        adapter: str | None,
        further: Further | None,
        room: Callable[[], int],
    ):
        self._first, self._sampling, self._adapter = list(requests), sampling, adapter
        self._further, self._room = further, room
        self._asked = 0
        self.sent: list[tuple[int, int, WantedSample]] = []
        """The samples in the order in which they were sent, each with the index of its request and its number."""
        self.poll_seconds = _PLAIN_SECONDS if further is None else _STREAM_SECONDS

    def __call__(self, pending: int) -> list[WantedSample]:
        if self._first:
            requests, self._first = self._first, []
            return self._wanted(requests)
        room = self._room() - pending
        if self._further is None or room <= 0:
            return []
        return self._wanted(self._further.take(room))

    @property
    def more(self) -> bool:
        """Whether requests may follow, after the source has returned none. The engine does not wait in `take`, because
        it must restart servers that are lost meanwhile."""
        return isinstance(self._further, Conversations) and self._further.more

    def _wanted(self, requests: Sequence[Request]) -> list[WantedSample]:
        first = len(self.sent)
        for request in requests:
            limits = request.limits(self._sampling)
            row = "" if request.question is None else str(request.question.origin)
            for sample in range(request.first, request.first + request.n):
                seed = _seed(self._sampling.seed, request.key, sample)
                wanted = WantedSample(
                    request.ids, limits, limits.max_tokens, seed, self._adapter, request.session, request.images, row
                )
                self.sent.append((self._asked, sample, wanted))
            self._asked += 1
        return [wanted for _, _, wanted in self.sent[first:]]


def _seed(run: int, key: int, sample: int) -> int:
    """Returns the seed of a sample, derived from the same random keys that the native engine uses."""
    first, second = sequence_keys(run, key, sample)
    return ((first & 0xFFFFFFFF) << 32 | (second & 0xFFFFFFFF)) & _SEED_BITS
