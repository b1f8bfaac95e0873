"""Trained weights by broadcast: the run and its rollout worker are the two ranks of a group over their devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from lockstep.rollout.server.plugin.lockstep_group import RUN, joined, left

HERE = "127.0.0.1"
WORKER = 1
_LOOK_SECONDS = 0.5


class BroadcastFailed(RuntimeError):
    """The other side is gone or does not answer."""


class WeightGroup:
    """One side of it. The other is waited for at the first hand-over, for `seconds` at most, then and later."""

    def __init__(self, rank: int, backend: str, store: dist.TCPStore, seconds: float):
        self.rank, self.backend, self.store = rank, backend, store
        self._seconds = seconds
        self._joined: dist.ProcessGroup | None = None
        self.ended: Callable[[], bool] = lambda: False
        """Whether the worker has ended, as the run sees it."""

    @classmethod
    def opened(cls, backend: str, seconds: float) -> WeightGroup:
        """The run's side, which holds the store where the two meet."""
        return cls(RUN, backend, dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False), seconds)

    @classmethod
    def met(cls, backend: str, port: int, seconds: float) -> WeightGroup:
        """The worker's side."""
        return cls(WORKER, backend, dist.TCPStore(HERE, port, is_master=False), seconds)

    @property
    def port(self) -> int:
        return int(self.store.port)

    def give(self, parameters: Iterable[tuple[str, torch.Tensor]], tell: Callable[[], None]) -> None:
        """Tell the worker that weights come, and send them."""
        tell()
        if self._joined is None:
            self._meet()
        for _, parameter in parameters:
            self._broadcast(parameter.detach().contiguous())

    @torch.no_grad()
    def read_into(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, parameter in parameters:
            if parameter.is_contiguous():
                self._broadcast(parameter.detach())
            else:
                parameter.copy_(self._broadcast(torch.empty_like(parameter, memory_format=torch.contiguous_format)))

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self._group().broadcast(tensor, RUN).wait()
        except RuntimeError as error:
            raise BroadcastFailed(str(error)) from error
        return tensor

    def _meet(self) -> None:
        """Join the group, on a thread: the store where the two meet waits for a worker that has ended too."""
        failed: list[BaseException] = []

        def join() -> None:
            try:
                self._group()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                failed.append(error)

        thread = threading.Thread(target=join, daemon=True, name="weights")
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if thread.is_alive() and self.ended():
                raise BroadcastFailed("the worker has ended")
        if failed:
            raise BroadcastFailed(str(failed[0])) from failed[0]

    def _group(self) -> dist.ProcessGroup:
        if self._joined is None:
            # A process may train twice, each time with a worker of its own: the port tells the groups apart.
            name = f"lockstep/weights/{self.port}"
            self._joined = joined(self.backend, self.store, name, self.rank, 2, self._seconds)
        return self._joined

    def close(self) -> None:
        if self._joined is not None:
            left(self._joined)
        self._joined = None
