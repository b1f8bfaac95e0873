"""What each rank of bench/large.py does.

    torchrun --nproc-per-node 8 large_ranks.py FOLDER train RECIPE WORDS     # `lockstep train`, with its memory
    torchrun --nproc-per-node 8 large_ranks.py FOLDER push RECIPE            # all weights, in buckets, to two receivers

Every rank writes `FOLDER/rank.RANK.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.rollout.servers.vllm import PLUGIN

RECEIVERS = 2
# A receiver has only the plugin of a server. It draws every tensor again by its name in the files, and compares.
RECEIVER = """
import json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import torch
from large import drawn, drawn_pool
from lockstep_group import Arriving, left, met
group = None
for line in sys.stdin:
    verb, told = json.loads(line)
    if verb == "join":
        group, store = met(rank=told.pop("first"), **told)
        answer = {}
    elif verb == "receive":
        pool, bytes, other = drawn_pool(getattr(torch, told["dtype"])), 0, []
        arriving = Arriving(group, told["names"], told["shapes"], told["counts"], told["dtype"], torch.device("cpu"))
        for name, tensor in arriving:
            bytes += tensor.nbytes
            if not torch.equal(tensor, drawn(name, tensor.shape, pool)):
                other.append(name)
        answer = {"tensors": len(told["names"]), "bytes": bytes, "other": other, "spoiled": arriving.spoiled}
    else:
        left(group)
        answer = {}
    print(json.dumps(answer), flush=True)
"""


def resident() -> int:
    """Bytes of memory of this process that are not mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Sampler:
    """The most memory of each phase, above that before the first one. A phase may contain others."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._before: int | None = None
        self._begun: dict[str, int] = {}
        """The memory that each current phase is counted from."""
        threading.Thread(target=self._sample, daemon=True).start()

    def during(self, phase: str, call: Callable[..., Any], *, alone: bool = False) -> Callable[..., Any]:
        """Returns `call`, measured. With `alone`, memory is counted from the begin of this phase."""

        def within(*words: Any, **more: Any) -> Any:
            now = resident()
            if self._before is None:
                self._before = now
            self._begun[phase] = now if alone else self._before
            try:
                return call(*words, **more)
            finally:
                self._look()
                del self._begun[phase]

        return within

    def _look(self) -> None:
        now = resident()
        for phase, begun in list(self._begun.items()):
            self.peaks[phase] = max(self.peaks.get(phase, 0), now - begun)

    def _sample(self) -> None:
        while True:
            self._look()
            time.sleep(0.01)


def import_first() -> None:
    """Imports what a load imports: the memory of modules is not that of weights."""
    import peft  # noqa: F401
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    import lockstep.parallel.slice_reader  # noqa: F401


def train(sampler: Sampler, words: list[str]) -> dict[str, Any]:
    from lockstep.cli import main
    from lockstep.model.streamed import Streamed
    from lockstep.train import offline, training
    from lockstep.train.checkpointing import Checkpointer

    import_first()
    Streamed.shard = sampler.during("read", Streamed.shard, alone=True)  # type: ignore[method-assign]
    training.load_models = sampler.during("load", training.load_models)
    offline.train_step = sampler.during("update", offline.train_step)
    Checkpointer.save = sampler.during("save", Checkpointer.save)  # type: ignore[method-assign]
    Checkpointer.resume = sampler.during("resume", Checkpointer.resume)  # type: ignore[method-assign]
    sys.argv = ["lockstep", "train", *words]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
    return sampler.peaks


class Receivers:
    """Processes that stand for two servers, and the operations of a server adapter that reach them."""

    name, receives_all, bucket_bytes = "receivers", True, 2**26

    def __init__(self) -> None:
        command = [sys.executable, "-c", RECEIVER, str(PLUGIN), str(Path(__file__).parent)]
        # A receiver is no rank of this run.
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept)
            for _ in range(RECEIVERS)
        ]
        self.clients = [SimpleNamespace(address=f"http://127.0.0.1:{number}") for number in range(1, RECEIVERS + 1)]
        self.received: dict[str, dict[str, Any]] = {}

    def _ask(self, client: Any, verb: str, told: dict[str, Any]) -> dict[str, Any]:
        process = self.processes[self.clients.index(client)]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([verb, told]) + "\n")
        process.stdin.flush()
        return dict(json.loads(process.stdout.readline()))

    def workers(self, client: Any) -> int:
        return 1

    def join(self, client: Any, meeting: Any) -> None:
        self._ask(client, "join", asdict(meeting))

    def begin(self, client: Any) -> None: ...

    def receive(self, client: Any, group: str, announced: Any) -> None:
        self.received[client.address] = self._ask(client, "receive", asdict(announced))

    def finish(self, client: Any) -> None: ...

    def leave(self, client: Any, group: str) -> None:
        self._ask(client, "leave", {})

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def push(sampler: Sampler, recipe_file: str) -> dict[str, Any]:
    """Loads the model without its adapter, and sends all weights twice: the first push also opens the group. Then it
    writes them to files once, as for engines that take files."""
    from lockstep.device.cpu import Cpu
    from lockstep.model.load import load_policy
    from lockstep.model.load_folder import DTYPES
    from lockstep.parallel.sharding import sharding_of
    from lockstep.parallel.world import joined
    from lockstep.recipe import load_recipe
    from lockstep.rollout.servers.weight_source import WeightSource, file_names
    from lockstep.rollout.servers.weight_transports import WeightLink, transfer_folder, write_weights

    # A serving engine cannot be combined with tensor parallelism.
    recipe = load_recipe(recipe_file, ["parallel.tensor_parallel=1", "parallel.shard=null"])
    settings = recipe.model.model_copy(update={"lora": None})
    import_first()
    device = Cpu()
    with joined(device) as world:
        sharding = sharding_of(recipe.parallel, device, world)
        load = sampler.during("load", load_policy)
        policy = load(settings, device.torch_device(), device.attention, 0, None, sharding)
        source = WeightSource(
            policy, policy.stored.named_parameters(), file_names(policy), device.torch_device(world.local_rank)
        )
        dtype, found = DTYPES[settings.dtype], {}
        if not world.main:
            for phase in ("push", "push", "files"):
                sampler.during(phase, lambda: [None for _ in source] and None, alone=True)()
        else:
            receivers = Receivers()
            try:
                link = WeightLink(receivers, receivers.clients, device, 0, 600.0, world.progress)  # type: ignore[arg-type]
                link.join()
                seconds = []
                for _ in range(2):
                    began = time.monotonic()
                    sampler.during("push", link.give, alone=True)(source, dtype)
                    seconds.append(time.monotonic() - began)
                answers = list(receivers.received.values())
                link.close()
            finally:
                receivers.close()
            assert len(answers) == RECEIVERS
            assert all(one["other"] == one["spoiled"] == [] for one in answers), answers
            with transfer_folder(None) as folder:
                began = time.monotonic()
                sampler.during("files", write_weights, alone=True)(folder, source, dtype)
                files_seconds = time.monotonic() - began
            found = {"receivers": answers, "bytes": link.sent_bytes, "seconds": seconds, "files_seconds": files_seconds}
        peaks = world.gather(sampler.peaks)
        return {**found, "peak_bytes_of_ranks": peaks}


if __name__ == "__main__":
    folder, mode, *words = sys.argv[1:]
    sampler = Sampler()
    made = train(sampler, words) if mode == "train" else push(sampler, words[0])
    Path(folder, f"rank.{os.environ['RANK']}.json").write_text(json.dumps(made), encoding="utf-8")
