"""`parallel.launcher: ray`: the ranks of a run on a Ray cluster, with elastic restarts."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from lockstep.device.select import DEVICES, select
from lockstep.errors import Refusal, first_line, missing_extra
from lockstep.launch.ray_rank import RankHeard, RankProcess, RankSeat
from lockstep.launch.restarts import worst
from lockstep.masking import variables
from lockstep.parallel.context import refuse_ranks
from lockstep.parallel.rendezvous import TELL_AGAIN_SECONDS, TELL_SECONDS, log_wait, say
from lockstep.parallel.sharding import grid_of, refuse_offload
from lockstep.recipe.keys_parallel import Parallel

if TYPE_CHECKING:
    from lockstep.recipe import Recipe


# `parallel.elastic`: with how many devices a run goes on that has lost some.


def fitting_devices(settings: Parallel, there: int) -> int:
    """The most devices, of those that are there and no more than were asked for, that the recipe's layout comes out
    even on; 0 where there are too few for any."""
    most = min(settings.devices or 1, there)
    return next((devices for devices in range(most, 0, -1) if _fits(settings, devices)), 0)


def _fits(settings: Parallel, devices: int) -> bool:
    try:
        grid_of(settings, devices)
        refuse_ranks(settings.group, devices)  # whole groups of those that work together
        refuse_offload(settings, devices)
    except Refusal:
        return False
    return True


def layout_of(settings: Parallel) -> str:
    """The keys that a number of devices has to fit, in words."""
    asked = {
        "shard": settings.shard is not None,
        "replicate": settings.replicate is not None,
        "tensor": settings.tensor > 1,
        "context": settings.context > 1,
        "offload": settings.offload in ("params", "all"),
        "offload_critic": settings.offload_critic in ("params", "all"),
    }
    return " and ".join(f"parallel.{key}={getattr(settings, key)}" for key, said in asked.items() if said)


def refuse_rigid(settings: Parallel) -> None:
    """A layout that fits no fewer devices would lose the run with the first of them, hours from now."""
    asked = settings.devices or 1
    if not settings.elastic or asked == 1 or fitting_devices(settings, asked - 1):
        return
    both = settings.shard is not None and settings.replicate is not None
    way = "remove parallel.shard or parallel.replicate, which is then found from the other" if both else "ask for more"
    raise Refusal.at(
        "parallel.elastic",
        f"no fewer than {asked} devices fit {layout_of(settings)}",
        f"{way}, or remove parallel.elastic: a restart then waits for the lost devices",
    )


# `parallel.launcher: ray`: the ranks of a run on a Ray cluster, or on one that is started here for the run alone.
#
# A placement group with a bundle a device, an actor in each bundle, and each actor runs the same `lockstep train` as
# one rank. Which of them run where is Ray's to say; what they compute, torch.distributed's.

# What the ranks are told of the driver's environment; all of it would be that of another machine.
PASSED_ON = (
    *("LOCKSTEP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "OMP_", "PYTHONPATH", "TRITON_"),
    *("WANDB_", "MLFLOW_", "SWANLAB_"),
    *(f"{kind.collective.upper()}_" for kind in DEVICES.values()),
)
_KILLED = 128 + signal.SIGKILL
# An actor answers that often, with or without news.
_BEAT_SECONDS = 1.0
# After the first rank has failed, for the others to say what they saw.
_GRACE_SECONDS = 5.0
# For a cluster to put what it has where it is asked for, and after a failure to come back as it was.
_TRY_SECONDS, _PLACE_SECONDS, _RETURN_SECONDS = 10.0, 120.0, 300.0

# For a cluster that RAY_ADDRESS names to take a connection.
_CONNECT_SECONDS = 60.0
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})/?")
_SETTINGS_FRAME, _FRAME_HEAD = 4, 9
_START_REMEDY = "start it (`ray start --head`), or unset RAY_ADDRESS and `ray stop` for one that the run starts itself"

Start = Callable[[Sequence[str], int], int]


@contextmanager
def ray_cluster(recipe: Recipe) -> Iterator[Start]:
    """Connected to the cluster that RAY_ADDRESS names or that `ray start` has started on this machine; else one for
    this run is started.

    Yields the function that runs `lockstep` with given words in all ranks, and returns the exit status.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray", "parallel.launcher=ray") from error

    refuse_rigid(recipe.parallel)
    devices = recipe.parallel.devices or 1
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    named = os.environ.get("RAY_ADDRESS")
    refuse_unreachable(named)
    where = f"RAY_ADDRESS={named}" if named else "the Ray cluster"
    try:
        with log_wait(f"{where} to answer"):
            try:
                # More ranks than processors are slow and no error, as with the other launchers.
                ray.init(num_cpus=max(devices, os.cpu_count() or 1), include_dashboard=False, **quiet)
            except ValueError:
                ray.init(**quiet)  # there is a cluster, which knows what it has
    except Exception as error:  # a node that does not come up in time is a bare one
        raise Refusal.at(where, first_line(error), _START_REMEDY) from error
    try:
        yield Cluster(recipe, ray).run
    finally:
        ray.shutdown()


def refuse_unreachable(address: str | None) -> None:
    """An address at which no cluster takes a connection for a minute: Ray itself would try for many, without a word.
    What Ray finds by itself (`auto`, `local`, other schemes) is left to it."""
    if not address or address in ("auto", "local") or ("://" in address and not address.startswith("ray://")):
        return
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise Refusal.at(
            "RAY_ADDRESS",
            f"{address!r} is no address of a Ray cluster",
            "write HOST:PORT of its head node (6379 unless it says otherwise), ray://HOST:10001, or auto",
        )
    given_up = time.monotonic() + _CONNECT_SECONDS
    with log_wait(f"a connection to RAY_ADDRESS={address}"):
        while True:
            try:
                _meet(found["host"].strip("[]"), int(found["port"]), max(1.0, given_up - time.monotonic()))
                return
            except OSError as error:
                if time.monotonic() + _BEAT_SECONDS >= given_up:
                    why = f"no cluster answers for {_CONNECT_SECONDS:g} s: {error.strerror or error}"
                    raise Refusal.at(f"RAY_ADDRESS={address}", why, _START_REMEDY) from error
            time.sleep(_BEAT_SECONDS)


def _meet(host: str, port: int, seconds: float) -> None:
    """OSError where nobody takes a connection, or who takes it does not speak gRPC: it answers the beginning of HTTP/2
    with a frame of its settings. A cluster with TLS is only connected to."""
    with socket.create_connection((host, port), timeout=seconds) as line:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0]))
        head = b""
        while len(head) < _FRAME_HEAD and (piece := line.recv(_FRAME_HEAD - len(head))):
            head += piece
        if len(head) < _FRAME_HEAD or head[3] != _SETTINGS_FRAME:
            raise OSError("what listens there is no Ray cluster")


class Cluster:
    def __init__(self, recipe: Recipe, ray: Any):
        self.ray, self.recipe = ray, recipe
        self.folder = self._working_folder()
        self.device = self._device()
        self.resource = DEVICES[self.device].ray_resource or "CPU"
        self.visible = DEVICES[self.device].visible_variable

    def _working_folder(self) -> str | None:
        """Where the ranks run: here, in a folder that all nodes have; None in their own copy of a job's files."""
        context = self.ray.get_runtime_context()
        if not context.runtime_env.working_dir():
            return os.getcwd()
        folder = Path(self.recipe.run.folder)
        if not folder.is_absolute():
            raise Refusal.at(
                "run.folder",
                f"{folder} would be made in the job's copy of its working directory, which goes with the job",
                "give an absolute path that all nodes share",
            )
        return None

    def _device(self) -> str:
        """The device of the ranks, which the driver's machine need not have."""
        if self.recipe.device == "auto":
            there = self.ray.cluster_resources()
            return next(name for name, kind in DEVICES.items() if there.get(kind.ray_resource or "CPU", 0) >= 1)
        if self.recipe.device not in DEVICES:
            select(self.recipe.device)  # which says what there is
        return self.recipe.device

    def run(self, words: Sequence[str], turn: int) -> int:
        """All ranks once; `turn` counts restarts."""
        from ray.exceptions import RayActorError

        with self._placed(turn) as (group, devices):
            told = [*words, f"device={self.device}", f"parallel.devices={devices}"]
            try:
                with self._actors(group, devices) as actors:
                    ranks = Ranks(self.ray, actors, self.recipe.parallel.stall_seconds)
                    return ranks.run(told, self._environments(actors), self.folder)
            except RayActorError as error:
                say(f"an actor is lost before its rank began: {first_line(error)}")
                return _KILLED

    @contextmanager
    def _placed(self, turn: int) -> Iterator[tuple[Any, int]]:
        """A placement group and its number of devices: as many as asked for; after a failure fewer, where that is
        allowed and some are gone."""
        from ray.util.placement_group import placement_group, remove_placement_group

        asked, elastic = self.recipe.parallel.devices or 1, turn > 0 and self.recipe.parallel.elastic
        tell_at = time.monotonic() + TELL_SECONDS
        given_up = time.monotonic() + (_RETURN_SECONDS if turn else _PLACE_SECONDS)
        while True:
            there = int(self.ray.cluster_resources().get(self.resource, 0))
            devices = fitting_devices(self.recipe.parallel, there) if elastic else asked
            if 0 < devices <= there:
                bundles = [{"CPU": 1.0, self.resource: 1.0}] * devices
                group = placement_group(bundles, strategy="PACK", name=self.recipe.run.name)
                try:
                    if group.wait(_TRY_SECONDS):
                        if devices < asked:
                            said = f"the cluster has {there} {self.resource} of {asked}: the run goes on with {devices}"
                            rounded = devices < min(asked, there)
                            why = f", the most that {layout_of(self.recipe.parallel)} leaves even" if rounded else ""
                            say(said + why)
                        yield group, devices
                        return
                finally:
                    remove_placement_group(group)
            elif turn == 0:
                given_up = 0
            if time.monotonic() >= given_up:
                free = int(self.ray.available_resources().get(self.resource, 0))
                raise Refusal.at(
                    "parallel.devices",
                    f"is {asked}, and the nodes of the Ray cluster have {there} {self.resource} together, {free} free",
                    "start more nodes (`ray start --address=...`), wait for what else runs there, or ask for fewer",
                )
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + TELL_AGAIN_SECONDS
                say(f"waiting for {asked} {self.resource} of the Ray cluster, which has {there}")
            # The cluster notices a lost node after a while, and another one may come in its place.
            time.sleep(_BEAT_SECONDS)

    @contextmanager
    def _actors(self, group: Any, devices: int) -> Iterator[list[Any]]:
        """An actor on each device, those of a node side by side."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind = self.ray.remote(RankProcess)
        actors: list[Any] = []
        try:
            for index in range(devices):
                options = kind.options(
                    name=f"{self.recipe.run.name}-{index}",
                    num_cpus=1,
                    num_gpus=1 if self.resource == "GPU" else 0,
                    resources={} if self.resource in ("CPU", "GPU") else {self.resource: 1},
                    max_concurrency=4,
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                )
                actors.append(options.remote())
            with log_wait(f"the {devices} actors of the Ray cluster to start"):
                nodes = [place.node for place in self.ray.get([actor.place.remote() for actor in actors])]
            yield [actor for _, actor in sorted(zip(nodes, actors, strict=True), key=lambda pair: pair[0])]
        finally:
            for actor in actors:
                self.ray.kill(actor)

    def _environments(self, actors: list[Any]) -> list[dict[str, str]]:
        """What torchrun would tell each rank."""
        places: list[RankSeat] = self.ray.get([actor.place.remote() for actor in actors])
        nodes, address = [place.node for place in places], places[0].address
        port = self.ray.get(actors[0].hold_store.remote(address))
        named = variables(self.recipe.model_dump(mode="json"))
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) or name in named}
        found = []
        for rank, place in enumerate(places):
            # A rank sees its own accelerator and no other one, also where Ray was told not to see to it.
            seen = {self.visible: ",".join(place.devices)} if self.visible else {}
            local = 0 if self.visible else nodes[:rank].count(place.node)
            found.append(
                {
                    **passed,
                    **seen,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(actors)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(nodes.count(place.node)),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                }
            )
        return found


class Ranks:
    """The ranks of one turn, as the driver sees them."""

    def __init__(self, ray: Any, actors: list[Any], stall_seconds: float | None):
        self.ray, self.actors = ray, actors
        # An actor that is stopped, or whose node is cut off, says nothing at all.
        self.silence = None if stall_seconds is None else max(60.0, stall_seconds)
        self.status: dict[int, int] = {}
        self.asked: list[int] = []

    def run(self, words: list[str], environments: list[dict[str, str]], folder: str | None) -> int:
        with _signals(self.asked):
            try:
                # One by one: of a refusal there is one to tell.
                for actor, environment in zip(self.actors, environments, strict=True):
                    with log_wait(f"rank {environment['RANK']} to start"):
                        problem = self.ray.get(actor.start.remote(words, environment, folder))
                    if problem is not None:
                        raise Refusal([problem])
                return self._follow()
            finally:
                self._end()

    def _follow(self) -> int:
        waiting = {actor.read.remote(_BEAT_SECONDS): rank for rank, actor in enumerate(self.actors)}
        heard_at = dict.fromkeys(range(len(self.actors)), time.monotonic())
        failed_at: float | None = None
        passed_on = False
        while waiting:
            # Ctrl-C is passed on once; a second one, and every other signal, is the end.
            if self.asked and self.asked != [signal.SIGINT]:
                return 128 + self.asked[-1]
            if self.asked and not passed_on:
                passed_on = True
                for actor in self.actors:
                    actor.send.remote(signal.SIGINT)
            now = time.monotonic()
            if failed_at is not None and now - failed_at > _GRACE_SECONDS:
                break
            ready, _ = self.ray.wait(list(waiting), num_returns=1, timeout=_BEAT_SECONDS / 2)
            for reference in ready:
                rank = waiting.pop(reference)
                heard = self._heard(rank, reference)
                heard_at[rank] = time.monotonic()
                self._show(rank, heard)
                if heard.status is None:
                    waiting[self.actors[rank].read.remote(_BEAT_SECONDS)] = rank
                else:
                    self.status[rank] = heard.status
            for reference, rank in list(waiting.items()):
                if self.silence is not None and now - heard_at[rank] > self.silence:
                    say(f"rank {rank}: its actor has not answered for {now - heard_at[rank]:.0f} s")
                    del waiting[reference]
                    self.status[rank] = _KILLED
            if failed_at is None and any(self.status.values()):
                failed_at = time.monotonic()
        return worst(self.status.values())

    def _heard(self, rank: int, reference: Any) -> RankHeard:
        from ray.exceptions import RayActorError

        try:
            heard: RankHeard = self.ray.get(reference)
        except RayActorError as error:
            say(f"rank {rank} is lost with its actor: {first_line(error)}")
            return RankHeard([], _KILLED)
        if heard.status is not None and heard.status > 128 and heard.status - 128 in list(signal.Signals):
            say(f"rank {rank} was ended by {signal.Signals(heard.status - 128).name}")
        return heard

    def _show(self, rank: int, heard: RankHeard) -> None:
        """Rank 0 as it is; of the others each line begins with the rank."""
        for number, line in heard.lines:
            stream = sys.stdout if number == 1 else sys.stderr
            stream.flush()
            stream.buffer.write(f"rank {rank}: ".encode() + line if rank else line)
            stream.buffer.flush()

    def _end(self) -> None:
        """No rank is left, also where the actor that would end it has gone: then it has ended with it."""
        ending = [actor.end.remote() for actor in self.actors]
        with suppress(self.ray.exceptions.RayError):
            self.ray.wait(ending, num_returns=len(ending), timeout=_GRACE_SECONDS)


@contextmanager
def _signals(asked: list[int]) -> Iterator[None]:
    def caught(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
