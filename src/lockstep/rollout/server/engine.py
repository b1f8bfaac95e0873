"""A serving engine as the run sees it: started or found, given the weights before it generates, proven to have them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.noise import sequence_keys
from lockstep.model.load import DTYPES
from lockstep.model.policy import Policy
from lockstep.recipe.rollout import RolloutSettings
from lockstep.rollout.ending import why_ended
from lockstep.rollout.place import RunPlace
from lockstep.rollout.server.dialect import Answer, Channel, Dialect, PushedWeights, ServerFacts, WantedSample
from lockstep.rollout.server.fleet import Back, Done, Fleet, Lost, Server
from lockstep.rollout.server.line import Lines, ServerFailed, ServerLine, is_address
from lockstep.rollout.server.probe import (
    MOST,
    Bounds,
    ProbeResult,
    calibrated,
    probe_requests,
    probed,
    repeat_noise,
    why_refused,
)
from lockstep.rollout.server.process import dialect_of, refuse_absent, start_server
from lockstep.rollout.server.weights import fingerprint, travelling, write_adapter, written_weights
from lockstep.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
# Of a server of ours that ends before it has got weights.
STARTS = 3
_POLL_SECONDS = 1.0
_SEED_BITS = 2**63 - 1
_UNTOUCHED = "the last checkpoint is untouched; rollout.engine=native generates with the trained modules themselves"


class ServerEngine:
    """Rank 0 starts the servers and gives them weights; every rank asks them. The thread that made it calls it."""

    instead = "use rollout.engine=native, which generates with the trained modules themselves"

    def __init__(
        self,
        dialect: Dialect,
        policy: Policy,
        device: Device,
        settings: RolloutSettings,
        tokenizer: PreTrainedTokenizerBase,
        place: RunPlace,
    ):
        self.dialect, self.policy, self.settings, self.place = dialect, policy, settings, place
        self.world, self.decode = place.world, tokenizer.decode
        self.device = device.torch_device(place.world.local_rank)
        self.dtype = next(policy.parameters()).dtype
        self.lora_rank = _lora_rank(policy)
        self.updates = 0
        """Updates that the weights have seen which the next `sync` hands over; set by whoever counts them."""
        self.sync_seconds = 0.0
        """Of the last push, the probe included."""
        self._drawn_by = 0
        self._run, self._pushes = secrets.token_hex(4), 0
        self._pushed: tuple[int, ...] | None = None
        self._probed: dict[str, ProbeResult] = {}
        self._versions: dict[str, str] = {}
        self._bounds: Bounds | None = None
        self._noise = 0.0
        self.lines = Lines()
        self.fleet = Fleet(dialect, self.lines, [], settings.server.answer_limit)
        try:
            self.fleet.servers = self._servers(device)
            self._on_main(self._wait_for_all)
        except BaseException:
            self.close()
            raise

    # -- the servers

    def _servers(self, device: Device) -> list[Server]:
        urls = self.settings.url
        if urls is not None:
            addresses = _checked([urls] if isinstance(urls, str) else urls)
            return [Server(self._line(address), since=time.monotonic()) for address in addresses]
        started: list[Server] = []

        def start() -> str:
            refuse_absent(self.settings, device)
            dtype = next(name for name, kind in DTYPES.items() if kind == self.dtype)
            log = self.place.folder / f"{self.dialect.name}.log"
            process, address = start_server(
                self.dialect, self.settings, device, self.place.model, dtype, self.lora_rank, log
            )
            started.append(Server(self._line(address), process, since=time.monotonic()))
            return address

        address = self._on_main(start)
        return started or [Server(self._line(address), since=time.monotonic())]

    def _line(self, address: str) -> ServerLine:
        return ServerLine(self.lines, address, self.settings.server.answer_limit)

    def _wait_for_all(self) -> None:
        """Until all answer; what they say of themselves must fit the model."""
        for server in self.fleet.servers:
            while True:
                try:
                    self.dialect.healthy(server.line)
                    break
                except ServerFailed as error:
                    server.why = str(error)
                    self._refuse_silent(server)
                    self.world.progress(f"the start of {server.line.address}")
                    time.sleep(_POLL_SECONDS)
            facts = self._asked(server, self.dialect.facts)
            self._versions[server.line.address] = facts.engine
            self._refuse_unfit(server, facts)

    def _refuse_silent(self, server: Server) -> None:
        """A server that has ended, or is waited for too long."""
        limit = self.settings.server.start_limit
        if server.process is not None and not server.process.alive:
            raise Refusal.at(
                f"rollout.engine {self.dialect.name}",
                f"the server {server.process.ended()}",
                "its own words above say why; rollout.server.args and rollout.server.env reach it",
            )
        if time.monotonic() - server.since > limit:
            last = server.process.last_lines() if server.process is not None else ""
            raise Refusal.at(
                "rollout.server.start_limit",
                f"no answer in {limit:g} s from {server.told()}{last}",
                "raise it, or look why the server does not come up",
            )

    def _refuse_unfit(self, server: Server, facts: ServerFacts) -> None:
        where, remedy = f"rollout.engine {self.dialect.name} at {server.line.address}", self.dialect.started_by_hand()
        rows = self.policy.causal_lm.get_input_embeddings().weight.shape[0]
        for wrong in facts.wrong:
            raise Refusal.at(where, wrong, remedy)
        if facts.vocabulary is not None and facts.vocabulary != rows:
            why = f"it has a vocabulary of {facts.vocabulary:,} tokens, the model of the run one of {rows:,}"
            raise Refusal.at(where, why, f"start it with the model {self.place.model}")
        own = str(self.dtype).removeprefix("torch.")
        if facts.dtype is not None and facts.dtype != own:
            raise Refusal.at(where, f"it computes in {facts.dtype}, the trainer in {own}", f"start it with {own}")

    def _asked(self, server: Server, verb: Callable[[Channel], T]) -> T:
        try:
            return verb(server.line)
        except ServerFailed as error:
            where = f"rollout.engine {self.dialect.name} at {server.line.address}"
            raise Refusal.at(where, str(error), self.dialect.started_by_hand()) from error

    # -- weights

    def sync(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand the weights over where any has changed, to every server that is up, and prove it."""
        begun = time.monotonic()
        every = list(weights)

        def handed() -> tuple[str, int]:
            now = fingerprint(every)
            slept = any(server.asleep for server in self.fleet.servers)
            if now != self._pushed or slept or not self.fleet.up():
                self._hand_over_all(every)
                self._pushed = now
                self._drawn_by = self.updates
                self.sync_seconds = time.monotonic() - begun
            return self.fleet.version, self._drawn_by

        self.fleet.version, self._drawn_by = self._on_main(handed)
        if not self.world.main:
            for server in self.fleet.servers:
                server.up = True

    def _hand_over_all(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._pushes += 1
        self.fleet.version = f"{self._run}-{self._pushes}"
        reached = []
        for server in self.fleet.servers:
            try:
                self._hand_over(server, weights)
                reached.append(server)
            except ServerFailed as error:
                if not (error.lost and self._goes_on_without(server, error)):
                    raise self._push_refused(server, error) from error
        if not reached:
            self._wait_for_one(weights)

    def _goes_on_without(self, server: Server, error: ServerFailed) -> bool:
        """A server that cannot be reached at all is left out, and looked after while the others generate. One that
        breaks in the middle of a push has weights that nobody knows: no sample is asked of it before the next push."""
        server.up, server.why, server.since = False, str(error), time.monotonic()
        return error.status is None

    def _wait_for_one(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """All are lost: those of ours are started again, and the first to answer is given the weights."""
        for server in self.fleet.servers:
            self._start_again(server)
        while not self.fleet.up():
            self._refuse_all_silent()
            for server in self.fleet.servers:
                self._bring_up(server, weights)
            self.world.progress("a server that answers")
            time.sleep(_POLL_SECONDS)

    def _hand_over(self, server: Server, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Pause, push, flush, version, resume; then the probe. The first time all of it twice, which tells what is
        noise."""
        self._give(server, weights)
        said = self._probe(server)
        if self._bounds is None:
            self._refuse_probe(server, why_refused(said, None, MOST[self.dtype], 0.0))
            self._pushes += 1
            self.fleet.version = f"{self._run}-{self._pushes}"
            self._give(server, weights)
            again = self._probe(server)
            self._bounds, self._noise = calibrated(said, again, self.dtype), repeat_noise(said, again)
            self._refuse_probe(server, why_refused(again, None, self._bounds, 0.0))
            self._refuse_other_truncation(server)
            said = again
        before = self._probed.get(server.line.address)
        self._refuse_probe(server, why_refused(said, before, self._bounds, self._noise))
        self._probed[server.line.address] = said
        server.up, server.why, server.starts = True, "", 0

    def _give(self, server: Server, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        dialect, line, version = self.dialect, server.line, self.fleet.version
        server.up = False
        with travelling(self.settings.server.folder) as folder:
            pushed: PushedWeights | None = None
            if self.lora_rank is None:
                pushed = written_weights(folder, weights, self.dtype)
            else:
                write_adapter(folder, self.policy.model)
            if server.asleep:
                dialect.wake(line, "weights")
            dialect.pause(line)
            if pushed is None:
                dialect.load_adapter(line, _adapter(version), folder)
            else:
                dialect.begin(line)
                dialect.push(line, pushed)
            if server.asleep:
                dialect.wake(line, "cache")
                server.asleep = False
            dialect.flush(line)
            dialect.end(line, version)
            dialect.resume(line)
        found = dialect.version(line)
        if found != version:
            raise ServerFailed(
                f"{line.address}: it was given weights of version {version} and says that it has {found}"
            )

    def _push_refused(self, server: Server, error: ServerFailed) -> Refusal:
        return Refusal.at(
            f"rollout.engine {self.dialect.name} at {server.line.address}",
            f"it did not take the weights after {self.updates} updates: {error}",
            _UNTOUCHED,
        )

    # -- the probe

    def _probe(self, server: Server, sampling: Sampling | None = None) -> ProbeResult:
        asked = probe_requests(self.policy, self._adapter, sampling)
        begun = []
        for wanted in asked:
            path, body = self.dialect.ask(wanted)
            begun.append(self.lines.start(server.line.asked("POST", path, body, self.settings.server.answer_limit)))
        answers = [self.dialect.read(one.result(), wanted) for one, wanted in zip(begun, asked, strict=True)]
        for answer in answers:
            if answer.version is not None and answer.version != self.fleet.version:
                raise ServerFailed(
                    f"{server.line.address}: the probe was answered by weights of version {answer.version}"
                )
        return probed(self.policy, self.device, asked, answers)

    def _refuse_probe(self, server: Server, why: str | None) -> None:
        if why is not None:
            server.up = False
            raise Refusal.at(
                f"rollout.engine {self.dialect.name} at {server.line.address}",
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
                f"engine {self.dialect.name} truncates otherwise than the trainer (top_p {how.top_p:g}, top_k "
                f"{how.top_k}, min_p {how.min_p:g}): log-probs differ by {said.off.mean:.3g} on average",
                "remove top_p, top_k and min_p",
            )

    @property
    def _adapter(self) -> str | None:
        return None if self.lora_rank is None else _adapter(self.fleet.version)

    def told(self) -> dict[str, Any]:
        """What the run's record says of it: of rank 0, which asks the servers."""
        said: dict[str, Any] = {
            "version": ", ".join(dict.fromkeys(self._versions.values())) or None,
            "servers": len(self.fleet.servers),
            "started": self.settings.url is None,
        }
        if self._bounds is not None and self._probed:
            worst = max((each.off for each in self._probed.values()), key=lambda off: off.largest)
            said["probe"] = (
                f"log-probs off by {worst.mean:.2g} on average and {worst.largest:.2g} at most "
                f"(bounds {self._bounds.mean:.2g} and {self._bounds.largest:.2g})"
            )
        return said

    # -- generation

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        places: list[tuple[int, int]] = []
        asked: list[WantedSample] = []
        for number, request in enumerate(requests):
            longest = min(sampling.max_tokens, request.max_tokens or sampling.max_tokens)
            for sample in range(request.first, request.first + request.n):
                places.append((number, sample))
                seed = _seed(sampling.seed, request.key, sample)
                asked.append(WantedSample(request.ids, sampling, longest, seed, self._adapter))
        events = self.fleet.events(asked)
        silent = False
        try:
            for event in events:
                if isinstance(event, Done):
                    silent |= event.answer.version is None
                    yield self._completion(*places[event.number], asked[event.number], event.answer)
                elif isinstance(event, ServerFailed):
                    where = f"rollout.engine {self.dialect.name}"
                    raise Refusal.at(where, str(event), "the last checkpoint is untouched")
                elif isinstance(event, Lost):
                    self._start_again(event.server)
                elif isinstance(event, Back):
                    self._bring_up(event.server, None)
                    if not event.server.up:
                        self.fleet.watch(event.server)
                else:
                    self.world.progress("responses of the server")
                    self._refuse_all_silent()
        finally:
            events.close()
        if silent:
            self._refuse_changed()

    def _refuse_changed(self) -> None:
        """For engines that do not say with an answer which weights it is of."""
        for server in self.fleet.up():
            found = self._asked(server, self.dialect.version)
            if found != self.fleet.version:
                raise Refusal.at(
                    f"rollout.engine {self.dialect.name} at {server.line.address}",
                    f"its weights became those of version {found} while it generated with {self.fleet.version}",
                    "the same command goes on from the last checkpoint",
                )

    def _completion(self, number: int, sample: int, wanted: WantedSample, answer: Answer) -> Completion:
        ids, logprobs, stop = answer.ids, answer.logprobs, str(answer.ended)
        if wanted.sampling.stop_strings:
            ends = ((i, why_ended(ids[:i], 0, wanted.sampling, self.decode)) for i in range(1, len(ids) + 1))
            length, found = next(((i, why) for i, why in ends if why), (len(ids), stop))
            ids, logprobs, stop = ids[:length], logprobs[:length], found
        if stop == "length" and len(ids) < wanted.max_tokens:
            raise Refusal.at(
                f"rollout.engine {self.dialect.name}",
                f"a response to a prompt of {len(wanted.ids)} tokens was cut after {len(ids)} of {wanted.max_tokens}: "
                "the server's longest sequence is shorter",
                "raise it by rollout.server.args, or lower rollout.max_tokens",
            )
        return Completion(number, sample, ids, logprobs, stop, versions=[self._drawn_by] * len(ids))

    # -- servers that are lost

    def _refuse_all_silent(self) -> None:
        """While one is up, the others may take their time."""
        if not self.fleet.up():
            self._refuse_silent(max(self.fleet.servers, key=lambda server: server.since))

    def _start_again(self, server: Server) -> None:
        """One of ours, that has ended or hangs. Others come back by themselves, or do not."""
        server.since = time.monotonic()
        if server.process is None:
            return
        server.starts += 1
        if server.starts > STARTS:
            raise Refusal.at(
                f"rollout.engine {self.dialect.name}",
                f"the server was lost {server.starts} times in a row: {server.why}{server.process.last_lines()}",
                "the same command goes on from the last checkpoint",
            )
        server.process.restart()

    def _bring_up(self, server: Server, weights: Sequence[tuple[str, torch.Tensor]] | None) -> None:
        """The weights of the step once more, for a server that answers again."""
        try:
            self.dialect.healthy(server.line)
            if not self.world.main:
                # Rank 0 does it when it finds out; until then this server is not asked.
                server.up = self.dialect.version(server.line) == self.fleet.version
                return
            # It is a fresh server: the probe before says nothing of it.
            self._probed.pop(server.line.address, None)
            every = list(self.policy.stored.named_parameters()) if weights is None else weights
            self._hand_over(server, every)
        except ServerFailed as error:
            server.why = str(error)
            if not error.lost:
                raise self._push_refused(server, error) from error
            if server.process is not None and not server.process.alive:
                self._start_again(server)

    # -- the rest of an engine

    def free(self) -> None:
        """With `rollout.sleep`, while the run trains."""

        def asleep() -> None:
            verb = partial(self.dialect.sleep, discard_weights=self.lora_rank is None)
            for server in self.fleet.up():
                self._asked(server, verb)
                server.up, server.asleep = False, True

        if self.settings.sleep:
            self._on_main(asleep)

    def close(self) -> None:
        for server in self.fleet.servers:
            if server.process is not None:
                server.process.close()
        self.lines.close()

    def _on_main(self, work: Callable[[], T]) -> T:
        """Rank 0 does it; all have its result, or its refusal."""
        result: Any = None
        problems = None
        if self.world.main:
            try:
                result = work()
            except Refusal as refusal:
                problems = refusal.problems
                if self.world.size == 1:
                    raise
        result, problems = self.world.gather((result, problems))[0]
        if problems:
            raise Refusal(problems)
        return result


def open_engine(
    policy: Policy, device: Device, settings: RolloutSettings, tokenizer: PreTrainedTokenizerBase, place: RunPlace
) -> ServerEngine:
    return ServerEngine(dialect_of(settings), policy, device, settings, tokenizer, place)


def _seed(run: int, key: int, sample: int) -> int:
    """A function of what the sample is, as the noise of the built-in engine."""
    first, second = sequence_keys(run, key, sample)
    return ((first & 0xFFFFFFFF) << 32 | (second & 0xFFFFFFFF)) & _SEED_BITS


def _adapter(version: str) -> str:
    return f"lockstep-{version}"


def _lora_rank(policy: Policy) -> int | None:
    configs = getattr(policy.model, "peft_config", None)
    return None if configs is None else max(int(config.r) for config in configs.values())


def _checked(addresses: Sequence[str]) -> list[str]:
    found = [address.rstrip("/") for address in dict.fromkeys(addresses)]
    for address in found:
        if not is_address(address):
            raise Refusal.at("rollout.url", f"{address!r} is not an HTTP address", "write http://host:port")
    if not found:
        raise Refusal.at("rollout.url", "names no server", "write http://host:port, or remove it")
    return found
