"""The rollout engine that generates on vLLM or SGLang servers: starts the servers, syncs weights and sends requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal
from lockstep.model.policy import Policy
from lockstep.model.routing import KEY
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import Further, PrefillCounts, RunPlace, why_ended
from lockstep.rollout.servers.adapter import Answer, ServerAdapter, ServerFailed, WantedSample
from lockstep.rollout.servers.fleet import AT_ONCE, Back, Done, Lost
from lockstep.rollout.servers.request_stream import RequestStream
from lockstep.rollout.servers.server_manager import RESUME_REMEDY, ServerManager, named_servers, refusal_kind
from lockstep.rollout.servers.server_process import machine_of, served_host, server_adapter_of
from lockstep.rollout.servers.weight_sync import WeightSync
from lockstep.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


class ServerEngine:
    """An engine that generates on servers. Rank 0 starts the servers and sends them weights; every rank sends requests.
    Only one thread may call the methods of this engine."""

    instead = "use rollout.engine=native, which generates with the trained modules"
    expands_images = True
    """The servers write the placeholder tokens of images themselves."""

    def __init__(
        self,
        server_adapter: ServerAdapter,
        policy: Policy,
        device: Device,
        settings: RolloutSettings,
        tokenizer: PreTrainedTokenizerBase,
        place: RunPlace,
    ):
        self.server_adapter, self.policy, self.settings = server_adapter, policy, settings
        self.world, self.decode = place.world, tokenizer.decode
        self.updates = 0
        """The number of optimizer updates in the weights that the next `sync` sends; set by the caller."""
        self.sync_seconds = 0.0
        """Duration of the last sync in seconds, including the weight check."""
        self.sync_parts: dict[str, float] = {}
        """Duration of each phase of the last sync in seconds."""
        self.further: Further | None = None
        """A source of more requests, which `generate` asks while it waits for responses."""
        self._counts = PrefillCounts()
        self._version_updates = 0
        self._pushed_fingerprint: tuple[int, ...] | None = None
        self.manager = ServerManager(server_adapter, policy, device, settings, place)
        self.fleet = self.manager.fleet
        self.weight_sync = WeightSync(self.manager, device)
        try:
            self._open()
            self._on_main(self.manager.wait_for_all)
            self.manager.accepted = True
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        addresses = named_servers(self.settings)
        if addresses is None:
            machines = self.world.gather(machine_of(self.world))
            own = self.settings.server.replicas is None
            addresses, key = self._on_main(lambda: self.manager.start(served_host(machines) if own else ""))
            self.manager.clients.authorize(key)
        if not self.fleet.servers:
            self.manager.connect(addresses)

    @property
    def streams_weights(self) -> bool:
        """Whether `sync` needs the shards of this rank, and gathers the weights itself, bucket by bucket."""
        return self.weight_sync.streams

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """If a weight has changed, sends the weights to every server and verifies that the server uses them. All ranks
        must call this method, with their shards if `streams_weights`."""
        begun = time.monotonic()
        source = self.weight_sync.source(weights)
        reads = self.world.main or self.streams_weights
        current = source.held_sums() if reads else None
        changed = any(self.world.gather(current != self._pushed_fingerprint))
        compare_seconds = time.monotonic() - begun

        def push_if_changed() -> tuple[str, int, list[bool]]:
            slept = any(server.asleep for server in self.fleet.servers)
            if changed or slept or not self.fleet.up():
                self.weight_sync.updates = self.updates
                self.weight_sync.sync_all(source)
                self._version_updates = self.updates
                self.sync_seconds = time.monotonic() - begun
                self.sync_parts = {"compare": compare_seconds, **self.weight_sync.seconds}
            return self.fleet.version, self._version_updates, [server.up for server in self.fleet.servers]

        self.fleet.version, self._version_updates, up = self._on_main(push_if_changed)
        self._pushed_fingerprint = current
        if not self.world.main:
            for server, is_up in zip(self.fleet.servers, up, strict=True):
                server.up = is_up

    def take_sync_metrics(self) -> dict[str, float]:
        """Returns the bytes and seconds of the pushes since the last call; empty if nothing was pushed."""
        parts, self.sync_parts = self.sync_parts, {}
        if "push" not in parts:
            return {}
        return {"perf/weight_sync_bytes": float(self.weight_sync.sent_bytes), "timing_s/weight_push": parts["push"]}

    def metadata(self) -> dict[str, Any]:
        """Returns version, servers, weight transport and weight check for the run record."""
        info: dict[str, Any] = {
            "version": ", ".join(dict.fromkeys(self.manager.engines.values())) or None,
            "servers": len(self.fleet.servers),
            "started": self.settings.url is None,
            "hand_over": self.weight_sync.transport,
        }
        bounds, checks = self.weight_sync.bounds, self.weight_sync.checked
        if bounds is not None and checks:
            worst = max((each.off for each in checks.values()), key=lambda off: off.largest)
            info["probe"] = (
                f"log-probs off by {worst.mean:.2g} on average and {worst.largest:.2g} at most "
                f"(bounds {bounds.mean:.2g} and {bounds.largest:.2g})"
            )
        return info

    # -- generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yields the responses to the requests, and to those that `further` adds meanwhile."""
        arrivals = RequestStream(requests, sampling, self.weight_sync.adapter, self.further, self._room)
        events = self.fleet.events(arrivals)
        unversioned = False
        computed = reused = 0
        try:
            for event in events:
                if isinstance(event, Done):
                    unversioned |= event.answer.version is None
                    number, sample, wanted = arrivals.sent[event.number]
                    computed += len(wanted.ids) - event.answer.cached
                    reused += event.answer.cached
                    yield self._completion(number, sample, wanted, event.answer)
                elif isinstance(event, ServerFailed):
                    where = f"rollout.engine {self.server_adapter.name}"
                    remedy = RESUME_REMEDY if event.lost else "the last checkpoint is untouched"
                    raise refusal_kind(lost=event.lost).at(where, str(event), remedy, code="server-failed")
                elif isinstance(event, Lost):
                    self.manager.restart(event.server)
                elif isinstance(event, Back):
                    self.weight_sync.bring_up(event.server)
                    if not (event.server.up or event.server.left_out):
                        self.fleet.watch(event.server)
                else:
                    self.world.progress()  # tells the watchdog that the run is not stalled
                    self.manager.check_waits()
        finally:
            events.close()
            self._counts = PrefillCounts(computed, reused)
        if unversioned:
            self._refuse_changed()

    def _room(self) -> int:
        """Returns how many samples the servers take at once; further samples wait in the queues of the servers."""
        return AT_ONCE * max(1, len(self.fleet.up()))

    def end_session(self, session: int) -> None:
        """Forgets which server has the turns of a trajectory. Its prefix cache evicts them on its own."""
        self.fleet.end_session(session)

    def prompt_counts(self) -> PrefillCounts:
        return self._counts

    def _refuse_changed(self) -> None:
        """Raises `Refusal` if a server's weight version changed during generation. Used for engines whose answers do
        not include the weight version."""
        for server in self.fleet.up():
            version = self.manager.call(server, self.server_adapter.version)
            if version != self.fleet.version:
                raise Refusal.at(
                    f"rollout.engine {self.server_adapter.name} at {server.client.address}",
                    f"its weights changed to version {version} while it generated with version {self.fleet.version}",
                    RESUME_REMEDY,
                    code="weights-changed",
                )

    def _completion(self, number: int, sample: int, wanted: WantedSample, answer: Answer) -> Completion:
        ids, logprobs, stop = answer.ids, answer.logprobs, str(answer.ended)
        if wanted.sampling.stop_strings:
            ends = ((i, why_ended(ids[:i], 0, wanted.sampling, self.decode)) for i in range(1, len(ids) + 1))
            length, found = next(((i, why) for i, why in ends if why), (len(ids), stop))
            ids, logprobs, stop = ids[:length], logprobs[:length], found
            # Spaces around a stop string are ignored, because tokenizers differ in whether they decode a leading space
            # at the start of a text.
            text = self.decode(ids)
            if stop == "string" and not any(each.strip() in text for each in wanted.sampling.stop_strings):
                raise Refusal.at(
                    f"rollout.engine {self.server_adapter.name}",
                    f"a response of {len(ids)} tokens ended by a stop string, but contains none of rollout.stop",
                    "check for a proxy that changes answers, or another tokenizer in the server's model folder",
                    code="wrong-response",
                )
        if stop == "length" and len(ids) < wanted.max_tokens:
            raise Refusal.at(
                f"rollout.engine {self.server_adapter.name}",
                f"a response to a prompt of {len(wanted.ids)} tokens was cut after {len(ids)} of {wanted.max_tokens}: "
                "the server's maximum sequence length is too small",
                "raise the server's maximum length with rollout.server.args, or lower rollout.max_tokens",
                code="wrong-response",
            )
        routes = None if answer.routes is None else self._routes(answer.routes, len(wanted.ids) + len(ids) - 1)
        versions = [self._version_updates] * len(ids)
        return Completion(number, sample, ids, logprobs, stop, versions=versions, routes=routes)

    def _routes(self, routes: np.ndarray, tokens: int) -> np.ndarray:
        """Returns the experts of the first `tokens` tokens, in the layers of the policy that have a router."""
        routing = self.manager.policy.decoder.routing
        assert routing is not None
        found = routes[:tokens]
        if found.shape[1] == routing.all_layers:
            found = found[:, routing.layer_numbers]
        if (
            found.shape != (tokens, routing.layers, routing.top_k)
            or not 0 <= found.min() <= found.max() < routing.experts
        ):
            raise Refusal.at(
                KEY,
                f"{self.server_adapter.name} returned experts of shape {tuple(routes.shape)} for {tokens} tokens of a "
                f"policy with {routing.layers} layers with {routing.top_k} of {routing.experts} experts per token",
                "set it to old, and report the version of the engine; the last checkpoint is untouched",
                code="wrong-response",
            )
        return found.astype(np.uint8 if routing.dtype == torch.uint8 else np.int16)

    # -- memory and end

    def release_memory(self) -> None:
        """Puts the servers to sleep while the run trains, if `rollout.sleep` is set."""

        def sleep_all() -> None:
            put_to_sleep = partial(self.server_adapter.sleep, discard_weights=self.manager.lora_rank is None)
            for server in self.fleet.up():
                self.manager.call(server, put_to_sleep)
                server.up, server.asleep = False, True

        if self.settings.sleep:
            self._on_main(sleep_all)

    def close(self) -> None:
        self.weight_sync.close()
        self.manager.close()

    def _on_main(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0 and returns its result, or raises its error, on all ranks. The other ranks do what rank
        0 asks them to do meanwhile."""
        end = _End(None, Refusal, None)
        if self.world.main:
            try:
                end = _End(work(), Refusal, None)
            except Refusal as refusal:
                end = _End(None, type(refusal), refusal.problems)
                if self.world.size == 1:
                    raise
        while not isinstance(message := self.world.gather(end)[0], _End):
            self.weight_sync.follow(message)
        if message.problems:
            raise message.kind(message.problems)
        return message.result


@dataclass(frozen=True)
class _End:
    """The end of what rank 0 does alone: its result, or the problems of its error."""

    result: Any
    kind: type[Refusal]
    problems: Sequence[Problem] | None


def open_engine(
    policy: Policy, device: Device, settings: RolloutSettings, tokenizer: PreTrainedTokenizerBase, place: RunPlace
) -> ServerEngine:
    return ServerEngine(server_adapter_of(settings), policy, device, settings, tokenizer, place)
