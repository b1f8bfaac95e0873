"""Weights handed over to the servers: pause, push, flush, version, resume; then the probe, which tells."""

from __future__ import annotations

import asyncio
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.rollout.servers.adapter import Answer, Placed, ServerFailed, WantedSample
from lockstep.rollout.servers.collective_transport import WeightLink, Weights, by_collective
from lockstep.rollout.servers.file_transport import travelling, write_adapter, written_weights
from lockstep.rollout.servers.fleet import Server
from lockstep.rollout.servers.memory_transport import REMEDY as MEMORY_REMEDY
from lockstep.rollout.servers.memory_transport import SharedMemory, Unopened, by_memory
from lockstep.rollout.servers.server_manager import POLL_SECONDS, RESUME, ServerManager, refusal_kind
from lockstep.rollout.servers.weight_check import (
    MOST,
    Bounds,
    ProbeResult,
    calibrated,
    probe_requests,
    probed,
    repeat_noise,
    why_refused,
)
from lockstep.types import Sampling

_UNTOUCHED = "the last checkpoint is untouched; rollout.engine=native generates with the trained modules themselves"


class WeightSync:
    """Rank 0's: what was given to which server, and what the probe has said of it."""

    def __init__(self, manager: ServerManager, device: Device):
        self.manager, self.device = manager, device
        self.server_adapter, self.policy, self.settings = manager.server_adapter, manager.policy, manager.settings
        self.fleet, self.dtype, self.world = manager.fleet, manager.dtype, manager.world
        self.updates = 0
        """Updates that the weights have seen which are handed over next."""
        self.pushes = 0
        self.probed: dict[str, ProbeResult] = {}
        """The last probe of each server, by its address."""
        self.bounds: Bounds | None = None
        """Of the probes, from the first two pushes."""
        self.by_memory = by_memory(
            self.settings, self.server_adapter, device, self.world.size, adapter=manager.lora_rank is not None
        )
        """Whether the server opens the run's own memory."""
        self.seconds: dict[str, float] = {}
        """Of each part of the last hand-over."""
        self._memory = SharedMemory(device)
        self._run, self._noise = secrets.token_hex(4), 0.0
        self._links: dict[str, WeightLink] = {}

    @property
    def adapter(self) -> str | None:
        """The name under which a server has the adapter of now, in a LoRA run."""
        return None if self.manager.lora_rank is None else f"lockstep-{self.fleet.version}"

    @property
    def way(self) -> str:
        """As `rollout.hand_over` would say it."""
        return "collective" if by_collective(self.settings) else "memory" if self.by_memory else "files"

    # -- to whom

    def to_all(self, weights: Weights) -> None:
        """To every server that can be reached, and to one at least."""
        self.seconds.clear()
        self._next_version()
        reached = []
        for server in self._reachable():
            try:
                self._to_one(server, weights)
                reached.append(server)
            except ServerFailed as error:
                if not (error.lost and self._goes_on_without(server, error)):
                    raise self._push_refused(server, error) from error
        if not reached:
            self._wait_for_one(weights)

    def _reachable(self) -> list[Server]:
        """Servers that were lost are given the weights when they answer again (`bring_up`); where all were, each is
        tried."""
        known = [server for server in self.fleet.servers if not server.left_out]
        return [server for server in known if not server.why] or known

    def bring_up(self, server: Server, weights: Weights | None = None) -> None:
        """The weights of the step once more, for a server that answers again."""
        try:
            self.server_adapter.healthy(server.client)
            if not self.world.main:
                # Rank 0 does it when it finds out; until then this server is not asked.
                server.up = self.server_adapter.version(server.client) == self.fleet.version
                return
            if not self.manager.met_late(server):
                return
            # It is a fresh server: the probe before says nothing of it.
            self.probed.pop(server.client.address, None)
            self._to_one(server, list(self.policy.stored.named_parameters()) if weights is None else weights)
        except ServerFailed as error:
            server.why = str(error)
            if not error.lost:
                raise self._push_refused(server, error) from error
            if server.process is not None and not server.process.alive:
                self.manager.start_again(server)

    def _goes_on_without(self, server: Server, error: ServerFailed) -> bool:
        """A server that cannot be reached at all is left out, and looked after while the others generate. One that
        breaks in the middle of a push has weights that nobody knows: no sample is asked of it before the next push."""
        server.up, server.why, server.since = False, str(error), time.monotonic()
        return error.status is None

    def _wait_for_one(self, weights: Weights) -> None:
        """All are lost: those of ours are started again, and the first to answer is given the weights."""
        for server in self.fleet.servers:
            self.manager.start_again(server)
        while not self.fleet.up():
            self.manager.refuse_all_silent()
            for server in self.fleet.servers:
                if not server.left_out:
                    self.bring_up(server, weights)
            self.world.progress("a server that answers")
            time.sleep(POLL_SECONDS)

    # -- how

    def _to_one(self, server: Server, weights: Weights) -> None:
        try:
            if not (server.up or server.asleep):
                self._unlink(server)  # a server that was lost has lost its group
            self._give_and_probe(server, weights)
        except ServerFailed as error:
            self._unlink(server)
            if not error.gone:
                self._abandon(server)
            raise

    def _abandon(self, server: Server) -> None:
        """A push that failed half-way: the server says that its weights are nobody's, closes the update, and does not
        stand still for the next run (some tell their health by generating)."""
        client = server.client
        if by_collective(self.settings):
            with suppress(ServerFailed):
                self.server_adapter.finish(client)
        for verb in (
            partial(self.server_adapter.end, version=f"{self.fleet.version}-incomplete"),
            self.server_adapter.resume,
        ):
            with suppress(ServerFailed):
                verb(client)

    def _give_and_probe(self, server: Server, weights: Weights) -> None:
        """The first time all of it twice, which tells what is noise."""
        self._give(server, weights)
        said = self._probe(server)
        if self.bounds is None:
            self._refuse_probe(server, why_refused(said, None, MOST[self.dtype], 0.0))
            self._next_version()
            self._give(server, weights)
            again = self._probe(server)
            self.bounds, self._noise = calibrated(said, again, self.dtype), repeat_noise(said, again)
            self._refuse_probe(server, why_refused(again, None, self.bounds, 0.0))
            self._refuse_other_truncation(server)
            said = again
        before = self.probed.get(server.client.address)
        self._refuse_probe(server, why_refused(said, before, self.bounds, self._noise))
        self.probed[server.client.address] = said
        server.up, server.why, server.starts = True, "", 0

    def _next_version(self) -> None:
        self.pushes += 1
        self.fleet.version = f"{self._run}-{self.pushes}"

    def _give(self, server: Server, weights: Weights) -> None:
        server_adapter, client, version = self.server_adapter, server.client, self.fleet.version
        server.up = False
        with self._prepared(server, weights) as push:
            if server.asleep:
                with self._timed("wake"):
                    server_adapter.wake(client, "weights")
            with self._timed("pause"):
                server_adapter.pause(client)
            with self._timed("push"):
                push()
            if server.asleep:
                with self._timed("wake"):
                    server_adapter.wake(client, "cache")
                server.asleep = False
            with self._timed("flush"):
                server_adapter.flush(client)
            with self._timed("version"):
                server_adapter.end(client, version)
            with self._timed("resume"):
                server_adapter.resume(client)
        with self._timed("version"):
            found = server_adapter.version(client)
        if found != version:
            raise ServerFailed(
                f"{client.address}: it was given weights of version {version} and says that it has {found}"
            )

    @contextmanager
    def _prepared(self, server: Server, weights: Weights) -> Iterator[Callable[[], None]]:
        """What pushes once the server stands still: all that can be done before has been done."""
        if by_collective(self.settings):
            with self._timed("prepare"):
                link = self._linked(server)
            yield partial(link.give, weights, self.dtype)
            return
        with self._folder() as folder:
            with self._timed("prepare"):
                push = self._by_files(folder, server, weights)
            yield push

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with ExitStack() as stack:
            folder = stack.enter_context(travelling(self.settings.server.folder))
            yield folder
            with self._timed("remove"):
                stack.close()

    def _by_files(self, folder: Path, server: Server, weights: Weights) -> Callable[[], None]:
        """Also for what has no other way."""
        if self.adapter is not None:
            write_adapter(folder, self.policy.model)
            return partial(self.server_adapter.load_adapter, server.client, self.adapter, folder)
        if self.by_memory:
            try:
                placed = self._memory.placed(weights, self.dtype, folder)
                return partial(self._take, folder, server, weights, placed)
            except Unopened as error:
                self._give_memory_up(str(error))
        return partial(self.server_adapter.push, server.client, written_weights(folder, weights, self.dtype))

    def _take(self, folder: Path, server: Server, weights: Weights, placed: Placed) -> None:
        unopened = self.server_adapter.take(server.client, placed)
        if unopened is not None:
            self._give_memory_up(f"the server does not open the run's memory: {unopened}")
            self._by_files(folder, server, weights)()

    def _give_memory_up(self, why: str) -> None:
        """Files lead there as well; but one who asked for memory is to know."""
        if self.settings.hand_over == "memory":
            raise ServerFailed(f"{why}: {MEMORY_REMEDY}")
        warnings.warn(
            f"weights go to {self.server_adapter.name} through files, which takes longer: {why}", stacklevel=2
        )
        self.by_memory = False

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - begun

    # -- groups of a collective

    def _linked(self, server: Server) -> WeightLink:
        """The group with the server's workers, which is made where there is none."""
        link = self._links.get(server.client.address)
        if link is None:
            index, limit = self.world.local_rank, self.settings.server.answer_limit
            link = WeightLink(self.server_adapter, server.client, self.device, index, limit, self.world.progress)
            self._links[server.client.address] = link
            link.join()
        return link

    def _unlink(self, server: Server) -> None:
        link = self._links.pop(server.client.address, None)
        if link is not None:
            link.close(told=False)

    def close(self) -> None:
        for server in self.fleet.servers:
            link = self._links.pop(server.client.address, None)
            if link is not None:
                # One of ours ends next, and needs no word.
                link.close(told=server.process is None)

    def _push_refused(self, server: Server, error: ServerFailed) -> Refusal:
        # A server that breaks at its first push would break again; one that had weights may take them again.
        lost = error.lost and self.bounds is not None
        return refusal_kind(lost=lost).at(
            f"rollout.engine {self.server_adapter.name} at {server.client.address}",
            f"it did not take the weights after {self.updates} updates: {error}",
            RESUME if lost else _UNTOUCHED,
        )

    # -- the probe

    def _probe(self, server: Server, sampling: Sampling | None = None) -> ProbeResult:
        asked = probe_requests(self.policy, self.adapter, sampling)
        with self._timed("probe"):
            # Begun together, so that they go together.
            answers = self.manager.clients.start(self._sampled(server, asked)).result()
        for answer in answers:
            if answer.version is not None and answer.version != self.fleet.version:
                raise ServerFailed(
                    f"{server.client.address}: the probe was answered by weights of version {answer.version}"
                )
        with self._timed("score"):
            return probed(self.policy, self.device.torch_device(self.world.local_rank), asked, answers)

    async def _sampled(self, server: Server, asked: Sequence[WantedSample]) -> list[Answer]:
        return list(await asyncio.gather(*(self.fleet.sampled(server, wanted) for wanted in asked)))

    def _refuse_probe(self, server: Server, why: str | None) -> None:
        if why is not None:
            server.up = False
            raise Refusal.at(
                f"rollout.engine {self.server_adapter.name} at {server.client.address}",
                f"it does not generate with the weights after {self.updates} updates that it was given: {why}",
                _UNTOUCHED,
            )

    def _refuse_other_truncation(self, server: Server) -> None:
        """With `rollout.truncated: mask` both sides must leave out the same tokens."""
        how = self.settings
        sampling = Sampling(
            max_tokens=1,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            min_p=how.min_p,
            score_truncated=how.truncated == "mask",
        )
        if (how.top_p, how.top_k, how.min_p) == (1.0, 0, 0.0):
            return
        said, most = self._probe(server, sampling), MOST[self.dtype]
        if not said.off.mean <= most.mean:
            raise Refusal.at(
                "rollout.truncated",
                f"engine {self.server_adapter.name} truncates otherwise than the trainer (top_p {how.top_p:g}, top_k "
                f"{how.top_k}, min_p {how.min_p:g}): log-probs differ by {said.off.mean:.3g} on average",
                "remove top_p, top_k and min_p",
            )
