"""Weights by a collective to a server's workers: two real processes over gloo, one of which has the plugin alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hang import HANG
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.launch.supervisor import _without_rank
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.servers import weight_transports as collective
from lockstep.rollout.servers.adapter import Announced, Channel, GroupMeeting, ServerFailed
from lockstep.rollout.servers.plugin.lockstep_group import bit_sum
from lockstep.rollout.servers.vllm import PLUGIN
from lockstep.rollout.servers.weight_source import WeightSource, bucket_counts
from lockstep.rollout.servers.weight_transports import WeightLink, own_address, refuse_shared_device

# A worker as a server has them: it reads verbs, and answers each with a line.
WORKER = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import torch
import torch.distributed as dist
from lockstep_group import Arriving, left, met
# As a server's workers are: in a group of their own, bound to a device.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.group.WORLD.bound_device_id = torch.device("cuda:0")
assert not [name for name in sys.modules if name.split(".")[0] in ("lockstep", "vllm", "transformers", "safetensors")]
group = None
for line in sys.stdin:
    verb, told = json.loads(line)
    try:
        if verb == "join":
            group, store = met(rank=told.pop("first"), **told)
            said = {"bound": str(dist.group.WORLD.bound_device_id)}
        elif verb == "receive":
            del told["group"]
            arriving = Arriving(group, **told, device=torch.device("cpu"))
            taken = [next(arriving) for _ in range(2)]  # a loader that does not ask for all of them
            said = {"ignored": arriving.take_rest(), "spoiled": arriving.spoiled}
            said["values"] = {name: tensor.double().sum().item() for name, tensor in taken}
        else:
            left(group)
            said = {}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said), flush=True)
"""


@dataclass
class Worker:
    """The process, and the operations of a server adapter that reach it; `hold` is called before each."""

    process: subprocess.Popen[str]
    name: str = "worker"
    bucket_bytes: int = 2**20
    receives_all: bool = True
    hold: Callable[[str], None] = lambda verb: None
    said: list[dict[str, Any]] = field(default_factory=list)

    def _ask(self, verb: str, told: dict[str, Any]) -> None:
        self.hold(verb)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([verb, told]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ServerFailed("the server is gone", lost=True)
        self.said.append(json.loads(line))
        if "error" in self.said[-1]:
            raise ServerFailed(self.said[-1]["error"])

    def workers(self, line: Channel) -> int:
        return 1

    def join(self, line: Channel, meeting: GroupMeeting) -> None:
        self._ask("join", asdict(meeting))

    def begin(self, line: Channel) -> None: ...

    def receive(self, line: Channel, group: str, announced: Announced) -> None:
        self._ask("receive", {"group": group, **asdict(announced)})

    def finish(self, line: Channel) -> None: ...

    def leave(self, line: Channel, group: str) -> None:
        self._ask("leave", {})


class Line:
    address = "http://127.0.0.1:8000"


@contextmanager
def started() -> Iterator[Worker]:
    command = [sys.executable, "-c", WORKER, str(PLUGIN)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with started() as worker:
        yield worker


def linked(worker: Worker, limit: float = HANG) -> WeightLink:
    link = WeightLink(worker, [Line()], Cpu(), 0, limit, lambda what: None)  # type: ignore[arg-type,list-item]
    link.join()
    return link


def source(sent: list[tuple[str, torch.Tensor]]) -> WeightSource:
    return WeightSource(None, sent, None)  # type: ignore[arg-type]


def weights() -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [("a", torch.randn(3, 5)), ("b", torch.randn(7).t()), ("c", torch.randn(2, 4).t())]


def test_the_sum_of_bits_is_that_of_the_numbers_they_spell() -> None:
    # 1.0 is 0x3f800000 in float32, 0x3f80 in bfloat16; -1.0 has the highest bit too, which counts as -2^31.
    assert bit_sum(torch.tensor([1.0, 1.0])).item() == 2 * 0x3F800000
    assert bit_sum(torch.tensor([1.0, -1.0])).item() == 0x3F800000 + 0xBF800000 - 2**32
    assert bit_sum(torch.tensor([1.0], dtype=torch.bfloat16)).item() == 0x3F80


def test_tensors_come_as_announced_in_several_pushes_and_groups(worker: Worker) -> None:
    worker.said.clear()
    sent = weights()
    for dtype in (torch.float32, torch.bfloat16):
        link = linked(worker)
        assert worker.said[-1] == {"bound": "cuda:0"}
        for _ in range(2):
            link.give(source(sent), dtype)
            assert link.sent_bytes == sum(8 + dtype.itemsize * tensor.numel() for _, tensor in sent)
            told = worker.said[-1]
            assert (told["ignored"], told["spoiled"]) == (["c"], [])
            assert told["values"] == {name: tensor.to(dtype).double().sum().item() for name, tensor in sent[:2]}
        link.close()
        assert worker.said[-1] == {}
    assert worker.process.poll() is None


def test_a_tensor_that_is_not_the_announced_one_is_found_out(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the same shape that changed places, and one that changed on its way."""
    sent = [("a", torch.randn(4)), ("b", torch.randn(4)), ("c", torch.randn(4))]
    link = linked(worker)
    flat = collective.flat_bucket

    def other(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The checksums of the announced tensors, and the bytes of others."""
        changed = flat([tensors[1], tensors[0], tensors[2] + 1], dtype)
        return torch.cat([flat(tensors, dtype)[: 8 * len(tensors)], changed[8 * len(tensors) :]])

    monkeypatch.setattr(collective, "flat_bucket", other)
    link.give(source(sent), torch.float32)
    assert worker.said[-1]["spoiled"] == ["a", "b", "c"]
    link.close()


@pytest.mark.parametrize("limit", [1, 30, 2**20])
def test_any_size_of_buckets_sends_the_same_tensors(worker: Worker, limit: int) -> None:
    link = linked(Worker(worker.process, bucket_bytes=limit))
    sent = weights()
    link.give(source(sent), torch.float32)
    said = link.server_adapter.said[-1]  # type: ignore[attr-defined]
    assert (said["ignored"], said["spoiled"]) == (["c"], [])
    assert said["values"] == {name: tensor.double().sum().item() for name, tensor in sent[:2]}
    link.close()


def test_a_bucket_is_taken_while_the_one_before_is_sent(worker: Worker) -> None:
    """The second bucket is gathered before the receiver has the first: the receiver waits for it."""
    taken: list[str] = []

    class Gathering(WeightSource):
        def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self.parameters:
                taken.append(name)
                yield name, tensor

    receiver = Worker(worker.process, bucket_bytes=1)
    link = linked(receiver)
    # The receiver starts only when the run has gathered the second bucket.
    receiver.hold = lambda verb: _wait_until(lambda: "b" in taken)
    link.give(Gathering(None, weights(), None), torch.float32)  # type: ignore[arg-type]
    assert taken == ["a", "b", "c"]
    link.close()


def _wait_until(ready: Callable[[], bool]) -> None:
    given_up = time.monotonic() + HANG
    while not ready():
        if time.monotonic() > given_up:
            raise TimeoutError("the run gathers no second bucket")
        time.sleep(0.01)


def test_two_servers_get_one_broadcast() -> None:
    with started() as one, started() as two:
        lines = {"http://127.0.0.1:1": one, "http://127.0.0.1:2": two}

        class Both(Worker):
            """The operations of an adapter, each sent to the worker of its line."""

            def workers(self, line: Channel) -> int:
                return 1

            def join(self, line: Channel, meeting: GroupMeeting) -> None:
                lines[line.address]._ask("join", asdict(meeting))

            def receive(self, line: Channel, group: str, announced: Announced) -> None:
                lines[line.address]._ask("receive", {"group": group, **asdict(announced)})

            def leave(self, line: Channel, group: str) -> None:
                lines[line.address]._ask("leave", {})

        clients = [SimpleNamespace(address=address) for address in lines]
        link = WeightLink(Both(one.process, bucket_bytes=32), clients, Cpu(), 0, HANG, lambda what: None)  # type: ignore[arg-type]
        link.join()
        assert [(meeting.first, meeting.size) for meeting in link.meetings] == [(1, 3), (2, 3)]
        sent = weights()
        link.give(source(sent), torch.float32)
        for worker in (one, two):
            said = worker.said[-1]
            assert (said["ignored"], said["spoiled"]) == (["c"], [])
            assert said["values"] == {name: tensor.double().sum().item() for name, tensor in sent[:2]}
        # Once, not for each server.
        assert link.sent_bytes == sum(8 + tensor.nbytes for _, tensor in sent)
        two.process.kill()
        with pytest.raises(ServerFailed) as caught:
            link.give(source([("a", torch.zeros(4_000_000)), *sent[1:]]), torch.float32)
        assert caught.value.lost
        link.close(notify=False)


def test_buckets_hold_what_fits_in_their_order() -> None:
    assert bucket_counts([16, 16, 400, 4], 32) == [2, 1, 1]
    assert bucket_counts([16, 16, 400, 4], 1000) == [4]
    assert bucket_counts([], 32) == []


def test_a_worker_that_cannot_join_says_why_at_once(worker: Worker) -> None:
    def hold(verb: str) -> None:
        raise ServerFailed("it has no such method")

    refused = Worker(worker.process, hold=hold)
    with pytest.raises(ServerFailed, match="it has no such method"):
        linked(refused)


def test_a_side_that_does_not_come_is_named(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "_GRACE_SECONDS", 0.1)
    over = threading.Event()
    late = Worker(worker.process, hold=lambda verb: over.wait() and None)  # type: ignore[func-returns-value]
    try:
        with pytest.raises(ServerFailed, match=r"1 workers of the server .* 0\.2 s") as caught:
            linked(late, limit=0.2)
        assert caught.value.lost
    finally:
        late.hold = lambda verb: (_ for _ in ()).throw(ServerFailed("over"))
        over.set()


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_of_a_push_is_lost() -> None:
    with started() as worker:
        link = linked(worker)
        worker.hold = lambda verb: worker.process.kill()
        with pytest.raises(ServerFailed) as caught:
            link.give(source([("a", torch.zeros(4_000_000))]), torch.float32)
        assert caught.value.lost
        link.close(notify=False)


def test_the_own_address_is_one_that_the_server_can_reach() -> None:
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"
    assert own_address("http://localhost:8000") in ("127.0.0.1", "::1")
    with pytest.raises(ServerFailed, match=r"set rollout\.weight_sync=files"):
        own_address("http://no-such-host.invalid:8000")


class Accelerator(Cpu):
    name = "cuda"
    meets_itself = False
    visible_variable = "SEEN_DEVICES"


@pytest.mark.parametrize(
    ("seen", "devices", "shared"),
    [(None, None, 0), (None, [1, 0], 0), (None, [1], None), ("2,3", [2], 2), ("2,3", [3], None), ("2", None, 2)],
)
def test_run_and_server_on_one_device_are_refused(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, devices: list[int] | None, shared: int | None
) -> None:
    if seen is None:
        monkeypatch.delenv("SEEN_DEVICES", raising=False)
    else:
        monkeypatch.setenv("SEEN_DEVICES", seen)
    settings = RolloutSettings(engine="vllm", weight_sync="collective", server={"devices": devices})
    refuse_shared_device(settings, Cpu())
    refuse_shared_device(settings.model_copy(update={"weight_sync": "auto"}), Accelerator())
    refuse_shared_device(settings.model_copy(update={"url": "http://there:1"}), Accelerator())
    if shared is None:
        refuse_shared_device(settings, Accelerator())
        return
    with pytest.raises(Refusal, match=rf"share device {shared}\n.*set rollout\.weight_sync=files"):
        refuse_shared_device(settings, Accelerator())


def test_a_server_does_not_take_itself_for_a_rank_of_the_run() -> None:
    of_a_rank = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    kept = {"RANK_TABLE_FILE": "x", "PATH": "/bin"}
    assert _without_rank({**dict.fromkeys(of_a_rank, "1"), **kept}) == kept
