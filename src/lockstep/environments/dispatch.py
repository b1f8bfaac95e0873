"""The calls of environments that wait for an answer: time limits, cancelled calls, and hosts that are lost."""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lockstep.environments.host import EnvironmentHosts, Host, HostAnswer
from lockstep.environments.host_worker import LOADING
from lockstep.environments.running import Running
from lockstep.functions import LOAD_SECONDS

# Seconds in which a host must acknowledge that it cancels a call. A host that does not, does not run its loop.
ACKNOWLEDGE_SECONDS = 5.0
# Seconds that the environments of failed trajectories get at the end of a batch to close.
CLOSE_SECONDS = 5.0
# The number of an answer that is a request of an agent for a turn of the model.
ASKED = -1
# Seconds until the deadline of an agent that waits for the model.
WAITING_SECONDS = 1e8
# What a call runs, for messages.
_METHODS = {
    "run": "run neither asked the model nor returned",
    "finish": "score, info or close did not return",
    "group": "score_group did not return",
}


@dataclass
class HostCall:
    """A call without an answer. `kind` is the method; `close` closes an environment after a failure, and nothing waits
    for its answer. `group` is the number of the request whose trajectories are scored together."""

    kind: str
    host: Host
    running: Running | None
    deadline: float
    group: int = -1
    sent: float = field(default_factory=time.monotonic)
    waits: bool = False
    """Whether the agent waits for the model. Its time limit then does not run."""


class CallHandler(Protocol):
    """What happens after a call."""

    def answered(self, call: HostCall, answer: HostAnswer) -> None: ...

    def timed_out(self, call: HostCall, why: str) -> None: ...

    def requested(self, request: Any) -> None:
        """Handles a request of an agent."""
        ...

    def lost(self, host: Host, calls: list[HostCall], why: str) -> None:
        """Handles the end of a host. `calls` are its calls without an answer."""
        ...


class Dispatch:
    """Sends calls to the hosts, and passes the answers to a handler, in the thread that calls `pump`."""

    def __init__(self, hosts: EnvironmentHosts, seconds: float, handler: CallHandler):
        self.hosts, self._seconds, self._handler = hosts, seconds, handler
        self.calls: dict[int, HostCall] = {}
        self.cancels: dict[int, HostCall] = {}
        """The calls that are being cancelled, by the number of the call that cancels them."""

    @property
    def outstanding(self) -> bool:
        """Whether a trajectory waits for an answer."""
        return any(call.kind != "close" and not call.waits for call in self.calls.values())

    def send(self, kind: str, host: Host, running: Running | None, group: int = -1, **fields: Any) -> None:
        """Sends a call. Raises ValueError if the row cannot be sent to another process."""
        session = -1 if running is None else running.session
        do = "finish" if kind == "close" else kind
        number = self.hosts.send(host, do=do, trajectory=session, **fields)
        self.calls[number] = HostCall(kind, host, running, self._deadline(host), group)

    def waits(self, running: Running, waits: bool) -> None:
        """Notes whether the agent of a trajectory waits for the model. Its time limit starts again when it does not."""
        for call in self.calls.values():
            if call.running is running and call.waits != waits:
                call.waits = waits
                call.deadline = time.monotonic() + WAITING_SECONDS if waits else self._deadline(call.host)

    def close(self, host: Host, running: Running) -> None:
        """Closes the environment of a failed trajectory."""
        self.send("close", host, running, finished=None)

    def pump(self, *, block: bool, seconds: float | None = None) -> None:
        """Handles the answers that have arrived, and the calls over their time limit. With `block`, waits for one
        answer or for the next deadline, but at most `seconds`."""
        while True:
            patience = self._patience() if seconds is None else min(self._patience(), seconds)
            try:
                host, answer = self.hosts.inbox.get(timeout=patience) if block else self.hosts.inbox.get(False)
            except queue.Empty:
                break
            self._handle(host, answer)
            block = False
        self._expire()

    def _patience(self) -> float:
        deadlines = [call.deadline for call in (*self.calls.values(), *self.cancels.values())]
        return max(min(deadlines, default=0.0) - time.monotonic(), 0.0) + 0.001

    def _deadline(self, host: Host) -> float:
        """Returns the time by which a call must be answered. A new host also loads the class."""
        loading = 0.0 if host.is_loaded else LOAD_SECONDS
        return time.monotonic() + self._seconds + self.hosts.setup.more_seconds + loading

    def _handle(self, host: Host, answer: HostAnswer) -> None:
        if answer.call == ASKED:
            self._handler.requested(answer.fields["request"])
        elif answer.call == LOADING and answer.why:
            self._lost(host, answer.why)
        elif answer.call == LOADING:
            for call in [call for call in self.calls.values() if call.host is host and not call.waits]:
                call.deadline = self._deadline(host)
        elif answer.call in self.cancels:
            self._cancelled(self.cancels.pop(answer.call), answer)
        elif answer.call in self.calls:
            call = self.calls.pop(answer.call)
            host.stuck |= bool(answer.fields.get("stuck"))
            if call.running is not None:
                call.running.seconds += answer.time - call.sent
            if call.kind == "close" and call.running is not None:
                self.hosts.release(host, call.running.session)
            else:
                self._handler.answered(call, answer)

    def _expire(self) -> None:
        now = time.monotonic()
        for number in [number for number, call in self.calls.items() if call.deadline <= now]:
            call = self.calls.pop(number)
            cancel = self.hosts.send(call.host, do="cancel", cancelled=number)
            self.cancels[cancel] = replace(call, deadline=now + ACKNOWLEDGE_SECONDS)
            call.host.cancelling += 1
            if call.kind != "close":
                what = _METHODS.get(call.kind, f"{call.kind} did not return")
                self._handler.timed_out(call, f"{what} within {self._seconds:g} s (rollout.step_timeout)")
        for number in [number for number, call in self.cancels.items() if call.deadline <= now]:
            if number in self.cancels:
                self._lost(self.cancels[number].host, "its host process was killed, because it did not respond")

    def _cancelled(self, call: HostCall, answer: HostAnswer) -> None:
        """Handles the acknowledgement that a call is cancelled. A thread cannot be cancelled; its host gets no more
        trajectories and is killed when its other trajectories have ended."""
        session = -1 - call.group if call.running is None else call.running.session
        call.host.cancelling -= 1
        if answer.fields.get("stuck"):
            call.host.stuck = True
        elif call.kind not in ("close", "group") and call.running is not None:
            self.close(call.host, call.running)
            return
        self.hosts.release(call.host, session)

    def _lost(self, host: Host, why: str) -> None:
        """Kills a host that has ended or does not respond."""
        self.hosts.remove(host)
        self.cancels = {number: call for number, call in self.cancels.items() if call.host is not host}
        calls = [call for call in self.calls.values() if call.host is host]
        self.calls = {number: call for number, call in self.calls.items() if call.host is not host}
        self._handler.lost(host, calls, why)

    def end(self, *, wait: bool, busy: set[Host]) -> None:
        """Ends the calls of a batch. With `wait`, environments get some time to close. Hosts with calls that do not end
        are killed, and the hosts `busy` too."""
        given_up = time.monotonic() + min(CLOSE_SECONDS, self._seconds)
        while wait and (self.calls or self.cancels) and time.monotonic() < given_up:
            try:
                self._handle(*self.hosts.inbox.get(timeout=0.05))
            except queue.Empty:
                self._expire()
        busy = busy | {call.host for call in (*self.calls.values(), *self.cancels.values())}
        for host in list(self.hosts.hosts):
            if host in busy or host.stuck:
                self.hosts.remove(host)
