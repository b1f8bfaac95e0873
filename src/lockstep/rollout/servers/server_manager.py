"""Starts the servers of a run or connects to them, waits until they respond, and restarts lost servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lockstep.device.base import Device
from lockstep.errors import LostProcess, Refusal, with_secrets
from lockstep.model.adapters.peft_folder import refuse_unserved, served_rank
from lockstep.model.load_folder import DTYPES
from lockstep.model.policy import Policy
from lockstep.parallel.rendezvous import TELL_AGAIN_SECONDS, TELL_SECONDS, say
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import RunPlace
from lockstep.rollout.servers.adapter import Channel, ServerAdapter, ServerFailed, ServerMetadata, ServerNeeds
from lockstep.rollout.servers.fleet import Fleet, Server
from lockstep.rollout.servers.server_client import ClientThread, HealthCheck, ServerClient, is_address
from lockstep.rollout.servers.server_process import HOST, ServerProcess, refuse_absent, start_server

T = TypeVar("T")
# Maximum number of restarts of a server without a successful transfer of weights in between; the next loss ends the
# run.
STARTS = 3
POLL_SECONDS = 1.0
# After the first of several servers responds, the run waits this many seconds for the other servers.
OTHERS_SECONDS = 60.0
RESUME_REMEDY = "run the same command again to resume from the last checkpoint"


class ServerManager:
    """The servers of a run. Rank 0 starts and restarts the servers; the other ranks only have their addresses."""

    def __init__(
        self, server_adapter: ServerAdapter, policy: Policy, device: Device, settings: RolloutSettings, place: RunPlace
    ):
        self.server_adapter, self.policy, self.settings, self.place = server_adapter, policy, settings, place
        self.device = device
        self.world = place.world
        self.dtype: torch.dtype = next(policy.parameters()).dtype
        refuse_unserved(policy.model, server_adapter.name)
        self.lora_rank = served_rank(policy.model)
        routing = policy.decoder.routing
        self.needs = ServerNeeds(
            device.name,
            settings.sleep,
            self.lora_rank,
            settings.interactive,
            settings.precision,
            routes=routing is not None and routing.from_engine,
            images=policy.decoder.images is not None,
        )
        self.engines: dict[str, str] = {}
        """Name and version of the engine at each address."""
        self.accepted = False
        """Whether the start of the servers is complete. A server that is lost after the start may recover."""
        self._key = ""
        """The API key of the servers that lockstep has started."""
        self.clients = ClientThread()
        self.vocabulary: int = policy.causal_lm.get_input_embeddings().weight.shape[0]
        self.fleet = Fleet(server_adapter, self.clients, [], settings.server.request_timeout, self.vocabulary)

    # -- start

    def start(self, host: str) -> tuple[list[str], str]:
        """Starts one server at `host`, or those of `rollout.server.replicas`, without waiting until they respond;
        returns their addresses and API key."""
        name, replicas = self.server_adapter.name, self.settings.server.replicas
        if replicas is None:
            return [self._start_one(f"{name}.log", host=host)], self._key
        return [self._start_one(f"{name}_{engine}.log", engine=engine) for engine in range(replicas)], self._key

    def _start_one(self, log: str, host: str = HOST, engine: int | None = None) -> str:
        refuse_absent(self.settings, self.device, engine)
        dtype = next(name for name, kind in DTYPES.items() if kind == self.dtype)
        process, address, self._key = start_server(
            *(self.server_adapter, self.settings, self.device, self.place.model, dtype, self.needs),
            *(self.place.folder / log, host, engine, self._key),
        )
        self.fleet.servers.append(Server(self._client(address, process), process, since=time.monotonic()))
        return address

    def connect(self, addresses: Sequence[str]) -> None:
        """Connects to servers that the user or rank 0 started."""
        self.fleet.servers = [Server(self._client(address), since=time.monotonic()) for address in addresses]

    def _client(self, address: str, process: ServerProcess | None = None) -> ServerClient:
        def ended() -> str | None:
            return None if process is None or process.alive else process.exit_reason()

        self.clients.health[address] = HealthCheck(address, self.server_adapter.gone_statuses, ended)
        return ServerClient(self.clients, address, self.settings.server.request_timeout)

    def wait_for_all(self) -> None:
        """Waits until all servers respond, but at most `OTHERS_SECONDS` after the first response. Raises `Refusal` if a
        server does not fit the model. A server that responds later gets the weights when it responds."""
        missing, first = list(self.fleet.servers), 0.0
        while missing:
            for server in list(missing):
                if self._responds(server):
                    self.accept(server)
                    missing.remove(server)
                    first = first or time.monotonic()
                elif not first:
                    self.check_wait(server)
            if first and missing and time.monotonic() - first > OTHERS_SECONDS:
                self._warn_missing(missing)
                return
            if missing:
                self.world.progress(f"the start of {missing[0].client.address}")
                time.sleep(POLL_SECONDS)

    def _responds(self, server: Server) -> bool:
        try:
            self.server_adapter.healthy(server.client)
        except ServerFailed as error:
            server.why = str(error)
            return False
        server.why = ""
        return True

    def accept(self, server: Server) -> None:
        """Checks a server that responds for the first time."""
        metadata = self.call(server, lambda client: self.server_adapter.metadata(client, self.needs))
        self._refuse_unfit(server, metadata)
        self.engines[server.client.address] = metadata.engine

    def accept_late(self, server: Server) -> bool:
        """Returns whether a server that was missing at the start fits the run. If the server does not fit, it is
        excluded, and the run continues with the other servers."""
        if server.client.address in self.engines:
            return True
        try:
            self.accept(server)
        except Refusal as refusal:
            server.left_out = True
            say(f"warning: {server.client.address} is excluded from the run: {refusal.problems[0].why}")
            return False
        return True

    def _warn_missing(self, missing: Sequence[Server]) -> None:
        count = len(self.fleet.servers)
        say(
            f"warning: {len(missing)} of {count} servers of rollout.url did not answer within {OTHERS_SECONDS:g} s of "
            f"the first. The run starts with {count - len(missing)} servers; the others get weights when they respond: "
            + "; ".join(server.describe() for server in missing)
        )

    def call(self, server: Server, verb: Callable[[Channel], T]) -> T:
        """Calls the function `verb` with the HTTP client of a server. A failed request raises `Refusal`."""
        try:
            return verb(server.client)
        except ServerFailed as error:
            where = f"rollout.engine {self.server_adapter.name} at {server.client.address}"
            lost = error.lost and self.accepted
            remedy = RESUME_REMEDY if lost else self.server_adapter.started_by_hand(self.needs)
            raise refusal_kind(lost=lost).at(where, str(error), remedy, code="server-failed") from error

    # -- lost servers

    def restart(self, server: Server) -> None:
        """Restarts a server that has ended or hangs, if lockstep started this server; the user must restart all other
        servers."""
        server.since = time.monotonic()
        if server.process is None:
            return
        server.starts += 1
        if server.starts > STARTS:
            raise LostProcess.at(
                f"rollout.engine {self.server_adapter.name}",
                f"the server was lost {server.starts} times in a row: {server.why}{server.process.last_lines()}",
                RESUME_REMEDY,
                code="server-lost",
            )
        server.process.restart()

    def check_wait(self, server: Server) -> None:
        """Raises `Refusal` if a server has ended or does not respond in time. If the start of the servers was complete,
        a server process of lockstep that has ended is restarted instead."""
        limit = self.settings.server.start_timeout
        self._log_wait(server)
        if server.process is not None and not server.process.alive:
            if self.accepted:
                server.why = f"it {server.process.exit_reason()} before it responded"
                self.restart(server)
                return
            raise refusal_kind(lost=server.process.killed).at(
                f"rollout.engine {self.server_adapter.name}",
                f"the server {server.process.exit_report()}",
                "see the output of the server above; rollout.server.args and rollout.server.env set its flags and "
                "variables",
                code="server-lost",
            )
        if time.monotonic() - server.since > limit:
            last = server.process.last_lines() if server.process is not None else ""
            raise refusal_kind(lost=self.accepted).at(
                "rollout.server.start_timeout",
                f"no answer in {limit:g} s from {server.describe()}{last}",
                "raise rollout.server.start_timeout, or find out why the server does not start"
                + (f"; {RESUME_REMEDY}" if self.accepted else ""),
                code="server-lost",
            )

    def _log_wait(self, server: Server) -> None:
        now = time.monotonic()
        if now - server.since >= TELL_SECONDS and now - server.logged_at >= TELL_AGAIN_SECONDS:
            server.logged_at = now
            limit = self.settings.server.start_timeout
            say(
                f"waiting for {server.describe()} for {now - server.since:.0f} s; the run stops after "
                f"{limit:g} s (rollout.server.start_timeout)"
            )

    def check_waits(self) -> None:
        """Raises `Refusal` if all servers are down for longer than the time limit."""
        if not self.fleet.up():
            self.check_wait(max(self.fleet.servers, key=lambda server: server.since))

    def _refuse_unfit(self, server: Server, metadata: ServerMetadata) -> None:
        where = f"rollout.engine {self.server_adapter.name} at {server.client.address}"
        remedy = self.server_adapter.started_by_hand(self.needs)
        for wrong in metadata.wrong:
            raise Refusal.at(where, wrong, remedy, code="unfit-server")
        if metadata.vocabulary is not None and metadata.vocabulary != self.vocabulary:
            why = f"its vocabulary has {metadata.vocabulary:,} tokens, but the run's model has {self.vocabulary:,}"
            raise Refusal.at(where, why, f"start the server with the model {self.place.model}", code="other-vocabulary")
        dtype = str(self.dtype).removeprefix("torch.")
        if metadata.dtype not in (None, dtype):
            raise Refusal.at(
                where,
                f"the server computes in {metadata.dtype}, but the trainer computes in {dtype}",
                f"start it with {dtype}",
                code="unfit-server",
            )

    def close(self) -> None:
        for server in self.fleet.servers:
            if server.process is not None:
                server.process.close()
                server.process.remove_key()
        self.clients.close()


def refusal_kind(*, lost: bool) -> type[Refusal]:
    """Returns the error class, which is `LostProcess` if the run may succeed when it is resumed, or `Refusal` if it
    would fail again."""
    return LostProcess if lost else Refusal


def named_servers(settings: RolloutSettings) -> list[str] | None:
    """Returns the addresses in `rollout.url`, or None if the run starts a server."""
    if settings.url is None:
        return None
    urls = [settings.url] if isinstance(settings.url, str) else settings.url
    addresses = [address.rstrip("/") for address in dict.fromkeys(urls)]
    for address in addresses:
        if not is_address(address):
            raise Refusal.at(
                "rollout.url", f"{address!r} is not an HTTP address", "write http://host:port", code="invalid-address"
            )
        with_secrets(address, "rollout.url")
    if not addresses:
        raise Refusal.at(
            "rollout.url", "the list is empty", "write http://host:port, or remove rollout.url", code="empty-value"
        )
    return addresses
