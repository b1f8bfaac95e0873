"""Sends weights to a server: pause, push the weights, flush caches, set the version, resume, run the weight check."""

from __future__ import annotations

import asyncio
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.device.base import Device
from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import LostProcess, Refusal
from lockstep.model.adapters.peft_folder import adapter_parameters
from lockstep.model.check import RUN_ERRORS
from lockstep.parallel.sharding import reshard
from lockstep.rollout.servers.adapter import Answer, Placed, PushedWeights, ServerFailed, WantedSample
from lockstep.rollout.servers.fleet import Server
from lockstep.rollout.servers.server_manager import POLL_SECONDS, RESUME_REMEDY, ServerManager, refusal_kind
from lockstep.rollout.servers.weight_check import (
    MORE_PROMPTS,
    Bounds,
    CheckResult,
    calibrated,
    can_score_in_fp32,
    check_requests,
    checked,
    most_of,
    repeat_noise,
    why_not_repeated,
    why_rejected,
)
from lockstep.rollout.servers.weight_source import GatherWeights, ScoreAnswers, WeightSource, file_names
from lockstep.rollout.servers.weight_transports import (
    REMEDY,
    KeptFiles,
    SharedMemory,
    Unopened,
    WeightLink,
    by_collective,
    by_memory,
    transfer_folder,
    write_adapter,
    write_weights,
)
from lockstep.types import Sampling

_UNTOUCHED = "the last checkpoint is untouched; rollout.engine=native generates with the trained modules"


class WeightSync:
    """Sends weights to the servers and verifies with the weight check that the servers use them; used on rank 0."""

    def __init__(self, manager: ServerManager, device: Device):
        self.manager, self.device = manager, device
        self.server_adapter, self.policy, self.settings = manager.server_adapter, manager.policy, manager.settings
        self.fleet, self.dtype, self.world = manager.fleet, manager.dtype, manager.world
        self.updates = 0
        """The number of optimizer updates in the weights that are sent next."""
        self.pushes = 0
        self.checked: dict[str, CheckResult] = {}
        """The last weight check of each server, keyed by the server's address."""
        self.bounds: Bounds | None = None
        """Bounds of the weight check, calibrated by the first two pushes, or None before the calibration."""
        self.by_collective = by_collective(self.settings, adapter=manager.lora_rank is not None)
        """Whether weights are sent by broadcast in a process group."""
        self.by_memory = by_memory(
            self.settings, self.server_adapter, device, self.world.size, adapter=manager.lora_rank is not None
        )
        """Whether weights are sent by shared memory."""
        self.seconds: dict[str, float] = {}
        """Duration of each phase of the last sync in seconds."""
        self._memory = SharedMemory(device)
        self._run, self._noise = secrets.token_hex(4), 0.0
        self._truncation_checked = False
        self._links: dict[tuple[str, ...], WeightLink] = {}
        """The process groups, keyed by the addresses of their servers."""
        self.streams = self.world.size > 1 and not self.by_memory
        """Whether pushes gather the sharded weights tensor by tensor. Otherwise they are gathered before."""
        self._kept = KeptFiles()
        self._last_check: CheckResult | None = None
        """The last weight check in which all ranks have computed the log-probs."""
        self._names = file_names(self.policy) if manager.lora_rank is None else None
        self.sent_bytes = 0
        """Bytes that the last sync sent, summed over its pushes. A broadcast to several servers counts once."""

    def source(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> WeightSource:
        """Returns the weights to send: with LoRA only those of the adapter. `parameters` are shards if `streams`, else
        full tensors."""
        if self.streams:
            # Before the parameters are listed: the root may still have full ones, whose memory would be freed later.
            reshard(self.policy)
        if self.manager.lora_rank is not None:
            parameters = adapter_parameters(parameters)
        device = self.device.torch_device(self.world.local_rank) if self.streams else None
        return WeightSource(self.policy, parameters, self._names, device, lambda: self._lead(GatherWeights()))

    def follow(self, message: GatherWeights | ScoreAnswers) -> None:
        """Does the part of this rank in what rank 0 does."""
        if isinstance(message, ScoreAnswers):
            _ = self._scored_in_fp32(message) if message.fp32 else self._scored(message)
            return
        for _ in self.source(self.policy.stored.named_parameters()):
            pass

    def _lead(self, message: GatherWeights | ScoreAnswers) -> None:
        """Makes the other ranks call `follow`."""
        if self.streams and self.world.main:
            self.world.gather(message)

    @property
    def adapter(self) -> str | None:
        """The name of the current LoRA adapter on the servers, or None without LoRA."""
        return None if self.manager.lora_rank is None else f"lockstep-{self.fleet.version}"

    @property
    def transport(self) -> str:
        """The current weight transport, as a value of `rollout.weight_sync`."""
        return "collective" if self.by_collective else "memory" if self.by_memory else "files"

    # -- which servers

    def sync_all(self, weights: WeightSource) -> None:
        """Sends the weights to every reachable server; waits until at least one server has the weights."""
        self.seconds.clear()
        self.sent_bytes = 0
        self._next_version()
        self._restart_ended()
        reached = self._sync_together(self._targets(), weights)
        for server in self._targets():
            if server in reached:
                continue
            try:
                self._sync_one(server, weights)
                reached.append(server)
            except ServerFailed as error:
                if not (error.lost and self._lose(server, error)):
                    raise self._push_refusal(server, error) from error
        if not reached:
            self._wait_for_one(weights)

    def _restart_ended(self) -> None:
        """Restarts lost servers that have ended, if others are up. If none is up, `_wait_for_one` does it."""
        for server in self.fleet.servers if self.fleet.up() else []:
            if server.why and server.process is not None and not server.process.alive:
                self.manager.restart(server)

    def _sync_together(self, servers: Sequence[Server], weights: WeightSource) -> list[Server]:
        """Broadcasts the weights to all servers at once, and returns the servers that have them. If a server is lost,
        the others wait in the same process group, until the run ends. A restarted run sends the first weights to each
        server alone."""
        if not (self.by_collective and len(servers) > 1 and self.bounds is not None):
            return []  # the first push calibrates the weight check
        try:
            if not all(server.up or server.asleep for server in servers):
                self._unlink(servers)
            self._push(servers, weights)
        except ServerFailed as error:
            raise LostProcess.at(
                f"rollout.engine {self.server_adapter.name}",
                f"the broadcast of the weights after {self.updates} updates to {len(servers)} servers failed: {error}",
                RESUME_REMEDY,
                code="weight-sync-failed",
            ) from error
        for server in servers:
            try:
                self._accept_check(server, self._check(server))
            except ServerFailed as error:
                raise self._push_refusal(server, error) from error
        return list(servers)

    def _targets(self) -> list[Server]:
        """Returns the servers that get the weights now. A lost server gets the weights when it responds again
        (`bring_up`). If all servers are lost, all servers are returned."""
        usable = [server for server in self.fleet.servers if not server.left_out]
        return [server for server in usable if not server.why] or usable

    def bring_up(self, server: Server, weights: WeightSource | None = None) -> None:
        """Sends the current weights to a server that responds again."""
        try:
            self.server_adapter.healthy(server.client)
            if not self.world.main:
                # Rank 0 sends the weights. Until the server has the current version of the weights, this rank does not
                # use the server.
                server.up = self.server_adapter.version(server.client) == self.fleet.version
                return
            if not self.manager.accept_late(server):
                return
            if weights is None and self.streams:
                self._resume_use(server)
                return
            # The server may have been restarted, so its previous weight check is dropped.
            self.checked.pop(server.client.address, None)
            own = self.source(self.policy.stored.named_parameters()) if weights is None else weights
            self._sync_one(server, own)
        except ServerFailed as error:
            server.why = str(error)
            if not error.lost:
                raise self._push_refusal(server, error) from error
            if server.process is not None and not server.process.alive:
                self.manager.restart(server)

    def _resume_use(self, server: Server) -> None:
        """Uses a server again during generation. If it has lost the weights of this step, it gets the files of the last
        push. Weights that are sharded over several ranks can only be gathered at the start of a step, when all ranks
        take part."""
        server.up = self.server_adapter.version(server.client) == self.fleet.version
        if server.up:
            server.why, server.starts = "", 0
        elif self._kept.version == self.fleet.version:
            self._sync_one(server, None)
        elif not self.fleet.up():
            raise LostProcess.at(
                f"rollout.engine {self.server_adapter.name} at {server.client.address}",
                "the server lost its weights during generation, and no other server has them; with "
                f"rollout.weight_sync=collective, {self.world.size} processes send them only at the start of a step",
                RESUME_REMEDY,
                code="server-lost",
            )

    def _lose(self, server: Server, error: ServerFailed) -> bool:
        """Marks a server as lost. Returns True if the failure is not an HTTP error status. In this case the run
        continues with the other servers. A server that fails during a push has undefined weights and gets no requests
        before the next push."""
        server.up, server.why, server.since = False, str(error), time.monotonic()
        return error.status is None

    def _wait_for_one(self, weights: WeightSource) -> None:
        """Called when all servers are lost. Restarts the servers that lockstep started, and sends the weights to the
        first server that responds."""
        for server in self.fleet.servers:
            self.manager.restart(server)
        while not self.fleet.up():
            self.manager.check_waits()
            for server in self.fleet.servers:
                if not server.left_out:
                    self.bring_up(server, weights)
            self.world.progress("a server to respond")
            time.sleep(POLL_SECONDS)

    # -- one server

    def _sync_one(self, server: Server, weights: WeightSource | None) -> None:
        """Sends the weights to one server. Without `weights`, sends the files of the last push again."""
        try:
            if not (server.up or server.asleep):
                self._unlink([server])  # a lost server is no longer in its process group
            if weights is None:
                self._push_again(server)
            else:
                self._push_and_check(server, weights)
        except ServerFailed as error:
            self._unlink([server])
            if not error.gone:
                self._abandon(server)
            raise

    def _abandon(self, server: Server) -> None:
        """Cleans up after a failed push: marks the weights as incomplete, closes the update and resumes the server. The
        server must not stay paused, because the health check of some servers generates tokens and fails during a
        pause."""
        client = server.client
        if self.by_collective:
            with suppress(ServerFailed):
                self.server_adapter.finish(client)
        for action in (
            partial(self.server_adapter.end, version=f"{self.fleet.version}-incomplete"),
            self.server_adapter.resume,
        ):
            with suppress(ServerFailed):
                action(client)

    def _push_and_check(self, server: Server, weights: WeightSource) -> None:
        """Pushes the weights and runs the weight check. The first push is repeated, to measure the rounding noise of
        the check."""
        self._push([server], weights)
        result = self._check(server)
        if self.bounds is None:
            self._refuse_check(server, why_rejected(result, None, most_of(self.dtype, self.settings.precision), 0.0))
            self._next_version()
            self._push([server], weights)
            second = self._check(server)
            self.bounds = calibrated(result, second, self.dtype, self.settings.precision)
            self._noise = repeat_noise(result, second, self.settings.precision)
            self._refuse_check(server, why_rejected(second, None, self.bounds, 0.0))
            result = second
        if not self._truncation_checked:
            self._refuse_other_truncation(server)
            self._truncation_checked = True
        self._accept_check(server, result)

    def _push_again(self, server: Server) -> None:
        """Pushes the files of the last push to a server that was restarted. The other ranks generate meanwhile, so the
        weight check uses the trainer's log-probs of the last check."""
        assert self._last_check is not None
        assert self.bounds is not None
        self._push([server], None)
        self.checked.pop(server.client.address, None)
        answers = self._answers(server, check_requests(self.policy, self.adapter))
        self._refuse_check(server, why_not_repeated(answers, self._last_check, self.bounds))
        server.up, server.why, server.starts = True, "", 0

    def _accept_check(self, server: Server, result: CheckResult) -> None:
        assert self.bounds is not None
        before = self.checked.get(server.client.address)
        self._refuse_check(server, why_rejected(result, before, self.bounds, self._noise))
        self.checked[server.client.address] = self._last_check = result
        server.up, server.why, server.starts = True, "", 0

    def _next_version(self) -> None:
        self.pushes += 1
        self.fleet.version = f"{self._run}-{self.pushes}"

    def _push(self, servers: Sequence[Server], weights: WeightSource | None) -> None:
        """Pushes the weights to servers, several of them only by one broadcast. Without `weights`, pushes the files
        that were kept."""
        server_adapter, version = self.server_adapter, self.fleet.version
        for server in servers:
            server.up = False
        with self._prepare(servers, weights) as push:
            for server in servers:
                if server.asleep:
                    with self._timed("wake"):
                        server_adapter.wake(server.client, "weights")
                with self._timed("pause"):
                    server_adapter.pause(server.client)
            with self._timed("push"):
                push()
            for server in servers:
                if server.asleep:
                    with self._timed("wake"):
                        server_adapter.wake(server.client, "cache")
                    server.asleep = False
                with self._timed("flush"):
                    server_adapter.flush(server.client, self.manager.needs.images)
                with self._timed("version"):
                    server_adapter.end(server.client, version)
                with self._timed("resume"):
                    server_adapter.resume(server.client)
        for server in servers:
            with self._timed("version"):
                reported = server_adapter.version(server.client)
            if reported != version:
                raise ServerFailed(
                    f"{server.client.address}: weights of version {version} were pushed, but the server reports "
                    f"version {reported}"
                )

    @contextmanager
    def _prepare(self, servers: Sequence[Server], weights: WeightSource | None) -> Iterator[Callable[[], None]]:
        """Prepares a push and yields the function that pushes while the servers are paused."""
        if weights is None or (self.streams and not self.by_collective):
            if weights is not None and self._kept.version != self.fleet.version:
                with self._timed("prepare"):
                    self._kept.write(self.fleet.version, self._folder(), partial(self._write, weights=weights))
            (server,) = servers
            yield self._push_files(server, self._kept.pushed)
            return
        if self.by_collective:
            with self._timed("prepare"):
                link = self._link(servers)
            yield partial(self._broadcast, link, weights)
            return
        (server,) = servers
        with self._folder() as folder:
            with self._timed("prepare"):
                push = self._prepare_files(folder, server, weights)
            yield push

    def _broadcast(self, link: WeightLink, weights: WeightSource) -> None:
        link.give(weights, self.dtype)
        self.sent_bytes += link.sent_bytes

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with ExitStack() as stack:
            # Engines on other nodes see the run folder, but not this machine's shared memory.
            parent = self.settings.server.folder
            if parent is None and self.settings.server.replicas is not None:
                self.manager.place.folder.mkdir(exist_ok=True)
                parent = str(self.manager.place.folder)
            folder = stack.enter_context(transfer_folder(parent))
            yield folder
            with self._timed("remove"):
                stack.close()

    def _prepare_files(self, folder: Path, server: Server, weights: WeightSource) -> Callable[[], None]:
        """Prepares a push by files or shared memory."""
        if self.by_memory:
            try:
                placed = self._memory.placed(list(weights), self.dtype, folder)
                return partial(self._push_memory, folder, server, weights, placed)
            except Unopened as error:
                self._fall_back_to_files(str(error))
        return self._push_files(server, self._write(folder, weights))

    def _write(self, folder: Path, weights: WeightSource) -> PushedWeights:
        """Writes the weights to files. LoRA adapters are always sent by files."""
        if self.adapter is not None:
            return write_adapter(folder, self.policy.model, weights)
        return write_weights(folder, weights, self.dtype)

    def _push_files(self, server: Server, pushed: PushedWeights) -> Callable[[], None]:
        self.sent_bytes += pushed.bytes
        if self.adapter is not None:
            return partial(self.server_adapter.load_adapter, server.client, self.adapter, pushed.files[0].parent)
        return partial(self.server_adapter.push, server.client, pushed)

    def _push_memory(self, folder: Path, server: Server, weights: WeightSource, placed: Placed) -> None:
        unopened = self.server_adapter.take(server.client, placed)
        if unopened is not None:
            self._fall_back_to_files(f"the server cannot map the run's memory: {unopened}")
            self._prepare_files(folder, server, weights)()
        else:
            self.sent_bytes += weights.bytes_in(self.dtype)

    def _fall_back_to_files(self, why: str) -> None:
        """Warns and sends weights by files from now on; raises `ServerFailed` if the recipe sets `rollout.weight_sync:
        memory`."""
        if self.settings.weight_sync == "memory":
            raise ServerFailed(f"{why}: {REMEDY}")
        warnings.warn(
            f"weights are sent to {self.server_adapter.name} through files, which is slower: {why}", stacklevel=2
        )
        self.by_memory = False

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - begun

    # -- process groups for the broadcast

    def _link(self, servers: Sequence[Server]) -> WeightLink:
        """Returns the process group with the workers of these servers; creates the group on first use. A worker is in
        one group at a time."""
        key = tuple(server.client.address for server in servers)
        link = self._links.get(key)
        if link is None:
            self._unlink(servers, notify=True)
            index, limit = self.world.local_rank, self.settings.server.request_timeout
            clients = [server.client for server in servers]
            link = WeightLink(self.server_adapter, clients, self.device, index, limit, self.world.progress)
            self._links[key] = link
            link.join()
        return link

    def _unlink(self, servers: Sequence[Server], *, notify: bool = False) -> None:
        """Closes every group that has one of these servers. With `notify`, first asks the servers to leave it."""
        addresses = {server.client.address for server in servers}
        for key in [key for key in self._links if addresses & set(key)]:
            self._links.pop(key).close(notify=notify)

    def close(self) -> None:
        self._kept.remove()
        # A server that lockstep started is not asked to leave the group, because it is killed next.
        started = any(server.process is not None for server in self.fleet.servers)
        for link in self._links.values():
            link.close(notify=not started)
        self._links.clear()

    def _push_refusal(self, server: Server, error: ServerFailed) -> Refusal:
        # A server that fails at the first push would fail again, so the error is final. A failure after the first push
        # may be temporary.
        lost = error.lost and self.bounds is not None
        return refusal_kind(lost=lost).at(
            f"rollout.engine {self.server_adapter.name} at {server.client.address}",
            f"the server did not load the weights after {self.updates} updates: {error}",
            RESUME_REMEDY if lost else _UNTOUCHED,
            code="weight-sync-failed",
        )

    # -- weight check

    def _check(self, server: Server, sampling: Sampling | None = None) -> CheckResult:
        _, result = self._compared(server, check_requests(self.policy, self.adapter, sampling))
        bounds = self.bounds or most_of(self.dtype, self.settings.precision)
        if result.passes(bounds) or not can_score_in_fp32(self.policy, self.settings.precision):
            return result
        requests = check_requests(self.policy, self.adapter, sampling, MORE_PROMPTS)
        message, larger = self._compared(server, requests)
        with self._timed("score"):
            message = replace(message, fp32=True)
            self._lead(message)
            return replace(result, larger=replace(larger, exact_K=self._scored_in_fp32(message)))

    def _compared(self, server: Server, requests: Sequence[WantedSample]) -> tuple[ScoreAnswers, CheckResult]:
        message = ScoreAnswers(requests, self._answers(server, requests))
        with self._timed("score"):
            self._lead(message)
            return message, self._scored(message)

    def _scored_in_fp32(self, message: ScoreAnswers) -> torch.Tensor | None:
        """Returns None if the model cannot compute in fp32, for example because a kernel does not support it."""
        try:
            return self._scored(message).trainer_K
        except RUN_ERRORS as error:
            refuse_trouble(error, self.device.torch_device(self.world.local_rank))
            return None

    def _answers(self, server: Server, requests: Sequence[WantedSample]) -> list[Answer]:
        with self._timed("probe"):
            # The samples of the weight check are submitted together, so that they form one HTTP request.
            answers = self.manager.clients.start(self._sampled(server, requests)).result()
        for answer in answers:
            if answer.version is not None and answer.version != self.fleet.version:
                raise ServerFailed(
                    f"{server.client.address}: the server answered the weight check with weights of version "
                    f"{answer.version}"
                )
        return answers

    def _scored(self, message: ScoreAnswers) -> CheckResult:
        device = self.device.torch_device(self.world.local_rank)
        try:
            return checked(self.policy, device, message.requests, message.answers, fp32=message.fp32)
        finally:
            if self.streams:
                reshard(self.policy)

    async def _sampled(self, server: Server, requests: Sequence[WantedSample]) -> list[Answer]:
        return list(await asyncio.gather(*(self.fleet.sample(server, wanted) for wanted in requests)))

    def _refuse_check(self, server: Server, why: str | None) -> None:
        if why is not None:
            server.up = False
            raise Refusal.at(
                f"rollout.engine {self.server_adapter.name} at {server.client.address}",
                f"the server does not generate with the weights after {self.updates} updates: {why}",
                _UNTOUCHED,
                code="weights-differ",
            )

    def _refuse_other_truncation(self, server: Server) -> None:
        """Raises `Refusal` if the engine and the trainer exclude different tokens when `top_p`, `top_k` or `min_p`
        truncates sampling."""
        settings = self.settings
        sampling = Sampling(
            max_tokens=1,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            score_truncated=settings.truncated_sampling == "mask",
        )
        if (settings.top_p, settings.top_k, settings.min_p) == (1.0, 0, 0.0):
            return
        result, bounds = self._check(server, sampling), most_of(self.dtype, settings.precision)
        if not result.off.mean <= bounds.mean and not result.passes(bounds):
            raise Refusal.at(
                "rollout.truncated_sampling",
                f"engine {self.server_adapter.name} truncates sampling differently from the trainer (top_p "
                f"{settings.top_p:g}, top_k {settings.top_k}, min_p {settings.min_p:g}): the mean log-prob difference "
                f"is {result.off.mean:.3g}",
                "remove top_p, top_k and min_p",
                code="truncated-sampling",
            )
