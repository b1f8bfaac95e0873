"""Plays an environment through its host process, as a run does, with turns that a test writes."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hang import HANG
from lockstep.environments import Reply, ToolCall
from lockstep.environments.host import EnvironmentHosts, HostAnswer
from lockstep.environments.setup import host_setup
from lockstep.recipe.keys_rollout import RolloutSettings


class Player:
    """Trajectories of one host. A method returns the fields of the host's answer, or the answer itself if the call
    failed."""

    def __init__(self, hosts: EnvironmentHosts):
        self.hosts = hosts
        self.host = hosts.place(0)

    def reset(self, row: Mapping[str, Any] | None = None, seed: int = 0, trajectory: int = 0) -> Any:
        full = {"prompt": [{"role": "user", "content": "Play."}], "extra_info": {}, **(row or {})}
        return self._call(do="reset", trajectory=trajectory, row=full, seed=seed)

    def say(self, text: str, calls: Sequence[tuple[str, dict[str, Any]]] = (), trajectory: int = 0) -> Any:
        made = tuple(ToolCall(name, arguments, f"call_{at}") for at, (name, arguments) in enumerate(calls))
        return self._call(do="step", trajectory=trajectory, reply=Reply(text, text, calls=made))

    def finish(self, trajectory: int = 0) -> Any:
        return self._call(do="finish", trajectory=trajectory, finished={})

    def _call(self, **fields: Any) -> Any:
        call = self.hosts.send(self.host, **fields)
        while True:
            try:
                _, answer = self.hosts.inbox.get(timeout=HANG)
            except queue.Empty:
                raise AssertionError("the host does not answer") from None
            if answer.call == call or answer.why:
                return answer if answer.why else answer.fields


@contextmanager
def played(**settings: Any) -> Iterator[Player]:
    hosts = EnvironmentHosts(host_setup(RolloutSettings(environment_workers=1, **settings)))
    try:
        yield Player(hosts)
    finally:
        hosts.close()


def failed(answer: Any) -> HostAnswer:
    assert isinstance(answer, HostAnswer), answer
    return answer
