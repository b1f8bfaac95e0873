"""The life of a run's servers: started or found, waited for, started again when they are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lockstep.device.base import Device
from lockstep.errors import LostProcess, Refusal, with_secrets
from lockstep.model.load import DTYPES
from lockstep.model.policy import Policy
from lockstep.parallel.rendezvous import TELL_AGAIN_SECONDS, TELL_SECONDS, say
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import RunPlace
from lockstep.rollout.servers.adapter import Channel, ServerAdapter, ServerFailed, ServerMetadata, ServerNeeds
from lockstep.rollout.servers.fleet import Fleet, Server
from lockstep.rollout.servers.server_client import ClientThread, HealthCheck, ServerClient, is_address
from lockstep.rollout.servers.server_process import ServerProcess, refuse_absent, start_server

T = TypeVar("T")
# Restarts in a row of a server of ours that is lost again before it has weights; at the next loss the run ends.
STARTS = 3
POLL_SECONDS = 1.0
# Once one server of several answers, the others have so long before the run starts without them.
OTHERS_SECONDS = 60.0
RESUME = "the same command goes on from the last checkpoint"


class ServerManager:
    """Of all servers of a run, as rank 0 leads it; the other ranks know the addresses."""

    def __init__(
        self, server_adapter: ServerAdapter, policy: Policy, device: Device, settings: RolloutSettings, place: RunPlace
    ):
        self.server_adapter, self.policy, self.settings, self.place = server_adapter, policy, settings, place
        self.device = device
        self.world = place.world
        self.dtype: torch.dtype = next(policy.parameters()).dtype
        self.lora_rank = _lora_rank(policy)
        self.needs = ServerNeeds(device.name, settings.sleep, self.lora_rank)
        self.engines: dict[str, str] = {}
        """Name and version of the engine at each address."""
        self.met = False
        """Whether all servers have answered and fit the run: one that is lost from then on may work again."""
        self.clients = ClientThread()
        self.vocabulary: int = policy.causal_lm.get_input_embeddings().weight.shape[0]
        self.fleet = Fleet(server_adapter, self.clients, [], settings.server.answer_limit, self.vocabulary)

    # -- start

    def start(self, host: str) -> tuple[str, str]:
        """One server of ours; its address and its key. It is not waited for."""
        refuse_absent(self.settings, self.device)
        dtype = next(name for name, kind in DTYPES.items() if kind == self.dtype)
        log = self.place.folder / f"{self.server_adapter.name}.log"
        process, address, key = start_server(
            self.server_adapter, self.settings, self.device, self.place.model, dtype, self.lora_rank, log, host
        )
        self.fleet.servers = [Server(self._client(address, process), process, since=time.monotonic())]
        return address, key

    def find(self, addresses: Sequence[str]) -> None:
        """Servers that somebody else has started, or rank 0."""
        self.fleet.servers = [Server(self._client(address), since=time.monotonic()) for address in addresses]

    def _client(self, address: str, process: ServerProcess | None = None) -> ServerClient:
        def ended() -> str | None:
            return None if process is None or process.alive else process.how_ended()

        self.clients.health[address] = HealthCheck(address, self.server_adapter.gone_statuses, ended)
        return ServerClient(self.clients, address, self.settings.server.answer_limit)

    def wait_for_all(self) -> None:
        """Until all answer, or one does and the others have had their time; what they say of themselves must fit the
        model. A server that answers later is given the weights then."""
        missing, first = list(self.fleet.servers), 0.0
        while missing:
            for server in list(missing):
                if self._answers(server):
                    self.meet(server)
                    missing.remove(server)
                    first = first or time.monotonic()
                elif not first:
                    self.refuse_silent(server)
            if first and missing and time.monotonic() - first > OTHERS_SECONDS:
                self._tell_left_out(missing)
                return
            if missing:
                self.world.progress(f"the start of {missing[0].client.address}")
                time.sleep(POLL_SECONDS)

    def _answers(self, server: Server) -> bool:
        try:
            self.server_adapter.healthy(server.client)
        except ServerFailed as error:
            server.why = str(error)
            return False
        server.why = ""
        return True

    def meet(self, server: Server) -> None:
        """A server that answers for the first time."""
        metadata = self.asked(server, lambda client: self.server_adapter.metadata(client, self.needs))
        self._refuse_unfit(server, metadata)
        self.engines[server.client.address] = metadata.engine

    def met_late(self, server: Server) -> bool:
        """Whether a server that was not there at the start fits the run. One that does not is left out: the others have
        the run's work."""
        if server.client.address in self.engines:
            return True
        try:
            self.meet(server)
        except Refusal as refusal:
            server.left_out = True
            say(f"warning: {server.client.address} is left out of the run: {refusal.problems[0].why}")
            return False
        return True

    def _tell_left_out(self, missing: Sequence[Server]) -> None:
        count = len(self.fleet.servers)
        say(
            f"warning: {len(missing)} of {count} servers of rollout.url did not answer within {OTHERS_SECONDS:g} s of "
            f"the first. The run starts with {count - len(missing)} and gives the others weights when they answer: "
            + "; ".join(server.describe() for server in missing)
        )

    def asked(self, server: Server, verb: Callable[[Channel], T]) -> T:
        """What must succeed; a server that cannot do it ends the run."""
        try:
            return verb(server.client)
        except ServerFailed as error:
            where = f"rollout.engine {self.server_adapter.name} at {server.client.address}"
            lost = error.lost and self.met
            remedy = RESUME if lost else self.server_adapter.started_by_hand(self.needs)
            raise refusal_kind(lost=lost).at(where, str(error), remedy) from error

    # -- lost servers

    def start_again(self, server: Server) -> None:
        """One of ours, that has ended or hangs. Others come back by themselves, or do not."""
        server.since = time.monotonic()
        if server.process is None:
            return
        server.starts += 1
        if server.starts > STARTS:
            raise LostProcess.at(
                f"rollout.engine {self.server_adapter.name}",
                f"the server was lost {server.starts} times in a row: {server.why}{server.process.last_lines()}",
                RESUME,
            )
        server.process.restart()

    def refuse_silent(self, server: Server) -> None:
        """A server that has ended, or is waited for too long. One of ours that has worked before is tried again."""
        limit = self.settings.server.start_limit
        self._tell_silent(server)
        if server.process is not None and not server.process.alive:
            if self.met:
                server.why = f"it {server.process.how_ended()} before it answered"
                self.start_again(server)
                return
            raise refusal_kind(lost=server.process.killed).at(
                f"rollout.engine {self.server_adapter.name}",
                f"the server {server.process.ended()}",
                "its own words above say why; rollout.server.args and rollout.server.env reach it",
            )
        if time.monotonic() - server.since > limit:
            last = server.process.last_lines() if server.process is not None else ""
            raise refusal_kind(lost=self.met).at(
                "rollout.server.start_limit",
                f"no answer in {limit:g} s from {server.describe()}{last}",
                "raise it, or look why the server does not come up" + (f"; {RESUME}" if self.met else ""),
            )

    def _tell_silent(self, server: Server) -> None:
        now = time.monotonic()
        if now - server.since >= TELL_SECONDS and now - server.told_at >= TELL_AGAIN_SECONDS:
            server.told_at = now
            limit = self.settings.server.start_limit
            say(
                f"waiting for an answer from {server.describe()} for {now - server.since:.0f} s; the run gives up after "
                f"{limit:g} s (rollout.server.start_limit)"
            )

    def refuse_all_silent(self) -> None:
        """While one is up, the others may take their time."""
        if not self.fleet.up():
            self.refuse_silent(max(self.fleet.servers, key=lambda server: server.since))

    def _refuse_unfit(self, server: Server, metadata: ServerMetadata) -> None:
        where = f"rollout.engine {self.server_adapter.name} at {server.client.address}"
        remedy = self.server_adapter.started_by_hand(self.needs)
        for wrong in metadata.wrong:
            raise Refusal.at(where, wrong, remedy)
        if metadata.vocabulary is not None and metadata.vocabulary != self.vocabulary:
            why = f"it has a vocabulary of {metadata.vocabulary:,} tokens, the model of the run one of {self.vocabulary:,}"
            raise Refusal.at(where, why, f"start it with the model {self.place.model}")
        own = str(self.dtype).removeprefix("torch.")
        if metadata.dtype is not None and metadata.dtype != own:
            raise Refusal.at(where, f"it computes in {metadata.dtype}, the trainer in {own}", f"start it with {own}")

    def close(self) -> None:
        for server in self.fleet.servers:
            if server.process is not None:
                server.process.close()
                server.process.remove_key()
        self.clients.close()


def refusal_kind(*, lost: bool) -> type[Refusal]:
    """What a failure of a server is: of one that was lost the run may go on, what it refuses it would refuse again."""
    return LostProcess if lost else Refusal


def named_servers(settings: RolloutSettings) -> list[str] | None:
    """The addresses of `rollout.url`; None where the run starts a server of its own."""
    if settings.url is None:
        return None
    urls = [settings.url] if isinstance(settings.url, str) else settings.url
    found = [address.rstrip("/") for address in dict.fromkeys(urls)]
    for address in found:
        if not is_address(address):
            raise Refusal.at("rollout.url", f"{address!r} is not an HTTP address", "write http://host:port")
        with_secrets(address, "rollout.url")
    if not found:
        raise Refusal.at("rollout.url", "names no server", "write http://host:port, or remove it")
    return found


def _lora_rank(policy: Policy) -> int | None:
    configs = getattr(policy.model, "peft_config", None)
    return None if configs is None else max(int(config.r) for config in configs.values())
