"""Runs the ranks on a Ray cluster, with elastic restarts (`parallel.launcher: ray`)."""

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
from lockstep.errors import STALLED, Problem, Refusal, first_line, missing_extra
from lockstep.launch.ray_engines import EngineHost
from lockstep.launch.ray_placement import (
    PlacedBundles,
    Placement,
    cpus_per_engine,
    cpus_per_rank,
    refuse_rigid,
    replicas,
    starts_server,
)
from lockstep.launch.ray_rank import RankOutput, RankPlace, RankProcess
from lockstep.launch.restarts import worst
from lockstep.masking import variables
from lockstep.parallel.rendezvous import log_wait, say

if TYPE_CHECKING:
    from lockstep.recipe import Recipe


# The ranks run on an existing Ray cluster, or on one that is started for the run. A placement group has one bundle per
# device and one actor per bundle, and each actor runs `lockstep train` as one rank. Ray decides on which node each rank
# runs; torch.distributed connects the ranks.

# Prefixes of the driver's environment variables that are passed to the ranks. Variables with other prefixes describe
# only the driver's host, so they are not passed.
PASSED_ON = (
    *("LOCKSTEP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH_", "PYTORCH_", "OMP_", "PYTHONPATH", "TRITON_"),
    *("WANDB_", "MLFLOW_", "SWANLAB_"),
    *(f"{kind.collective.upper()}_" for kind in DEVICES.values()),
)
_KILLED = 128 + signal.SIGKILL
# Interval at which the actor of a rank replies to the driver, with or without new output.
_BEAT_SECONDS = 1.0
# After the first failure of a rank, the driver waits this long for the reports of the other ranks.
_GRACE_SECONDS = 5.0
# A head node that does not answer for this time is lost. After 60 s Ray ends the driver itself, without a reason.
_HEAD_SECONDS = 40.0
# Time limit for a connection to the cluster of RAY_ADDRESS.
_CONNECT_SECONDS = 60.0
_ADDRESS = re.compile(r"(?:ray://)?(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})/?")
_SETTINGS_FRAME, _FRAME_HEAD = 4, 9
_START_REMEDY = (
    "start a cluster (`ray start --head`); or unset RAY_ADDRESS and run `ray stop`: the run then starts its own"
)

StartRanks = Callable[[Sequence[str], int], int]


@contextmanager
def ray_cluster(recipe: Recipe) -> Iterator[StartRanks]:
    """Connects to the Ray cluster of RAY_ADDRESS, or to one started on this machine with `ray start`. If there is no
    cluster, starts one for this run.

    Yields a function that runs `lockstep` with given arguments in all ranks and returns the exit status.
    """
    try:
        import ray
    except ImportError as error:
        raise missing_extra("ray", "ray", "parallel.launcher=ray") from error

    refuse_rigid(recipe.parallel)
    devices = (recipe.parallel.devices or 1) * cpus_per_rank(recipe) + starts_server(recipe)
    devices += replicas(recipe) * cpus_per_engine(recipe)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if recipe.parallel.ray.runtime_env:
        quiet["runtime_env"] = _checked_environment(recipe.parallel.ray.runtime_env)
    named = os.environ.get("RAY_ADDRESS")
    refuse_unreachable(named)
    where = f"RAY_ADDRESS={named}" if named else "the Ray cluster"
    try:
        with log_wait(f"{where} to answer"):
            try:
                # More ranks than CPU cores are slow but allowed, as with the other launchers. By default Ray gives its
                # workers niceness 15.
                own: dict[str, Any] = {"include_dashboard": False, "_system_config": {"worker_niceness": 0}}
                ray.init(num_cpus=max(devices, os.cpu_count() or 1), **own, **quiet)
            except ValueError:
                ray.init(**quiet)  # num_cpus is not allowed when connecting to an existing cluster
    except Exception as error:  # Ray raises a bare Exception if a node does not start in time
        raise Refusal.at(where, first_line(error), _START_REMEDY, code="ray-unreachable") from error
    try:
        yield Cluster(recipe, ray).run
    finally:
        ray.shutdown()


def _checked_environment(settings: dict[str, Any]) -> dict[str, Any]:
    from ray.runtime_env import RuntimeEnv

    where = "parallel.ray.runtime_env"
    remedy = "use the fields of Ray's runtime environments, such as pip and env_vars"
    # Ray ignores unknown fields.
    unknown = [name for name in settings if name not in RuntimeEnv.known_fields]
    if unknown:
        why = f"Ray's runtime environments have no field {unknown[0]}"
        raise Refusal.at(where, why, remedy, code="invalid-value")
    try:
        return dict(RuntimeEnv(**settings))
    except (TypeError, ValueError) as error:
        raise Refusal.at(where, first_line(error), remedy, code="invalid-value") from error


def refuse_unreachable(address: str | None) -> None:
    """Raises `Refusal` if no Ray cluster accepts a connection at the address within a minute. Ray itself would retry
    for many minutes without output. Addresses that Ray resolves itself (`auto`, `local`, other schemes) are not
    checked."""
    if not address or address in ("auto", "local") or ("://" in address and not address.startswith("ray://")):
        return
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise Refusal.at(
            "RAY_ADDRESS",
            f"{address!r} is not the address of a Ray cluster",
            "set it to HOST:PORT of the cluster's head node (default port 6379), ray://HOST:10001, or auto",
            code="invalid-address",
        )
    deadline = time.monotonic() + _CONNECT_SECONDS
    with log_wait(f"a connection to RAY_ADDRESS={address}"):
        while True:
            try:
                _meet(match["host"].strip("[]"), int(match["port"]), max(1.0, deadline - time.monotonic()))
                return
            except OSError as error:
                if time.monotonic() + _BEAT_SECONDS >= deadline:
                    why = f"no cluster answers for {_CONNECT_SECONDS:g} s: {error.strerror or error}"
                    raise Refusal.at(f"RAY_ADDRESS={address}", why, _START_REMEDY, code="ray-unreachable") from error
            time.sleep(_BEAT_SECONDS)


def _meet(host: str, port: int, seconds: float) -> None:
    """Raises OSError if nothing accepts a connection at the address, or if the server there is not a gRPC server. A
    gRPC server answers the HTTP/2 preface with a SETTINGS frame. With TLS the answer is not checked."""
    with socket.create_connection((host, port), timeout=seconds) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS_FRAME, 0, 0, 0, 0, 0]))
        head = b""
        while len(head) < _FRAME_HEAD and (piece := connection.recv(_FRAME_HEAD - len(head))):
            head += piece
        if len(head) < _FRAME_HEAD or head[3] != _SETTINGS_FRAME:
            raise OSError("the server at this address is not a Ray cluster")


class Cluster:
    def __init__(self, recipe: Recipe, ray: Any):
        self.ray, self.recipe = ray, recipe
        self.folder = self._working_folder()
        self.device = self._device()
        self.resource = DEVICES[self.device].ray_resource or "CPU"
        self.visible = DEVICES[self.device].visible_variable
        self.placement = Placement(ray, recipe, self.resource)

    def _working_folder(self) -> str | None:
        """Returns the working directory of the ranks. The working directory is the current directory, which all nodes
        must share. For a submitted Ray job returns None, because the ranks then use the job's copy of its working
        directory."""
        context = self.ray.get_runtime_context()
        if not context.runtime_env.working_dir():
            return os.getcwd()
        folder = Path(self.recipe.run.folder)
        if not folder.is_absolute():
            raise Refusal.at(
                "run.folder",
                f"{folder} would be created in the job's copy of its working directory, which is deleted with the job",
                "use an absolute path that all nodes share",
                code="not-shared",
            )
        return None

    def _device(self) -> str:
        """Returns the device type of the ranks. The driver's machine may not have a device of this type."""
        if self.recipe.device == "auto":
            resources = self.ray.cluster_resources()
            return next(name for name, kind in DEVICES.items() if resources.get(kind.ray_resource or "CPU", 0) >= 1)
        if self.recipe.device not in DEVICES:
            select(self.recipe.device)  # raises an error that lists the devices
        return self.recipe.device

    def run(self, arguments: Sequence[str], turn: int) -> int:
        """Runs all ranks once and returns the exit status of the run. `turn` counts restarts."""
        from ray.exceptions import RayActorError

        with self.placement.placed(turn) as placed:
            rank_arguments = [*arguments, f"device={self.device}", f"parallel.devices={placed.devices}"]
            try:
                with self._actors(placed) as (actors, engines):
                    ranks = Ranks(self.ray, actors, engines, self.recipe.parallel.stall_seconds)
                    run_folder = str(Path(self.recipe.run.folder) / self.recipe.run.name)
                    return ranks.run(rank_arguments, self._environments(actors), self.folder, run_folder)
            except RayActorError as error:
                say(f"an actor was lost before its rank started: {first_line(error)}")
                return _KILLED

    @contextmanager
    def _actors(self, placed: PlacedBundles) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yields one Ray actor per device, and one per engine. Actors of ranks on the same node are adjacent in the
        list, and the actor of the first bundle is the first, because this bundle has the CPU of a serving engine, which
        rank 0 starts."""
        from ray.exceptions import RuntimeEnvSetupError

        actors: list[Any] = []
        engines: list[Any] = []
        name = self.recipe.run.name
        try:
            for index in range(placed.devices):
                actors.append(self._actor(RankProcess, placed.ranks, index, f"{name}-{index}", 0).remote())
            for index in range(replicas(self.recipe)):
                # Ray restarts the actor of an engine. Rank 0 then starts the engine again.
                engine = self._actor(EngineHost, placed.engines, index, f"{name}-engine-{index}", -1)
                engines.append(engine.remote(self._passed(), os.nice(0)))
            count = f"{placed.devices} ranks" + (f" and {len(engines)} engines" if engines else "")
            with log_wait(f"the Ray actors of {count} to start"):
                nodes = [place.node for place in self.ray.get([actor.place.remote() for actor in actors])]
                self.ray.get([engine.place.remote() for engine in engines])
            order = sorted(range(len(actors)), key=lambda index: (nodes[index] != nodes[0], nodes[index], index))
            yield [actors[index] for index in order], engines
        except RuntimeEnvSetupError as error:
            remedy = "correct it; `ray logs` on the node has the full output"
            raise Refusal.at("parallel.ray.runtime_env", first_line(error), remedy, code="invalid-value") from error
        finally:
            for actor in [*actors, *engines]:
                self.ray.kill(actor)

    def _actor(self, kind: type, group: Any, index: int, name: str, max_restarts: int) -> Any:
        """Returns an actor class with the options of one bundle of a placement group."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = group.bundle_specs[index]
        return self.ray.remote(kind).options(
            name=name,
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            resources={name: count for name, count in bundle.items() if name not in ("CPU", "GPU")},
            max_concurrency=4,
            max_restarts=max_restarts,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )

    def _passed(self) -> dict[str, str]:
        """Returns the driver's environment variables that ranks and engines get."""
        named = variables(self.recipe.model_dump(mode="json"))
        return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON) or name in named}

    def _environments(self, actors: list[Any]) -> list[dict[str, str]]:
        """Returns the environment variables that torchrun would set for each rank."""
        places: list[RankPlace] = self.ray.get([actor.place.remote() for actor in actors])
        nodes, address = [place.node for place in places], places[0].address
        port = self.ray.get(actors[0].hold_store.remote(address))
        passed = self._passed()
        environments = []
        for rank, place in enumerate(places):
            # A rank sees only its own accelerator, even if Ray is configured not to restrict it.
            seen = {self.visible: ",".join(place.devices)} if self.visible else {}
            local = 0 if self.visible else nodes[:rank].count(place.node)
            environments.append(
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
        return environments


class ClusterHead:
    """The head node of the cluster, with the GCS, which finds and restarts actors."""

    def __init__(self, ray: Any):
        # With `ray://` the driver does not reach the head itself.
        remote = os.environ.get("RAY_ADDRESS", "").startswith("ray://")
        self.address = "" if remote else str(ray.get_runtime_context().gcs_address)
        self._silent_since: float | None = None

    def answers(self) -> bool:
        """Returns whether the head accepts connections. Ends the driver if it has not done so for long: ranks and
        engines end with their nodes, and calls of Ray would wait for the head."""
        if not self.address:
            return True
        host, _, port = self.address.rpartition(":")
        try:
            _meet(host.strip("[]"), int(port), _GRACE_SECONDS)
            self._silent_since = None
        except OSError:
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since < _HEAD_SECONDS:
                return False
            say(
                f"the Ray cluster was lost: its head node at {self.address} has not answered for {_HEAD_SECONDS:.0f} "
                "s. Start it again and run the same command again: the run resumes from the last checkpoint"
            )
            sys.stdout.flush()
            os._exit(STALLED)
        return True


class Ranks:
    """Controls the ranks of one attempt (the first start or a restart) from the driver process."""

    def __init__(self, ray: Any, actors: list[Any], engines: list[Any], stall_seconds: float | None):
        self.ray, self.actors, self.engines = ray, actors, engines
        # An actor that does not reply for this time counts as lost: it may be stopped, or its node disconnected.
        self.silence = None if stall_seconds is None else max(60.0, stall_seconds)
        self.head = ClusterHead(ray)
        self.status: dict[int, int] = {}
        self.signals: list[int] = []

    def run(self, arguments: list[str], environments: list[dict[str, str]], folder: str | None, run_folder: str) -> int:
        niceness = os.nice(0)
        with _signals(self.signals):
            try:
                # Ranks are started one by one, so that a problem that all ranks have is reported only once.
                for actor, environment in zip(self.actors, environments, strict=True):
                    engines = self.engines if environment["RANK"] == "0" else []
                    with log_wait(f"rank {environment['RANK']} to start"):
                        begun = actor.start.remote(arguments, environment, folder, run_folder, niceness, engines)
                        started = self.ray.get(begun)
                    if isinstance(started, Problem):
                        raise Refusal([started])
                    if started > niceness and environment["RANK"] == "0":
                        say(
                            f"the ranks run with niceness {started}, as Ray's workers do: other processes of the nodes "
                            "slow them down. Start the nodes with RAY_worker_niceness=0 (`RAY_worker_niceness=0 ray "
                            "start ...`)"
                        )
                return self._follow()
            finally:
                self._end()

    def _follow(self) -> int:
        waiting = {actor.read.remote(_BEAT_SECONDS): rank for rank, actor in enumerate(self.actors)}
        heard_at = dict.fromkeys(range(len(self.actors)), time.monotonic())
        failed_at: float | None = None
        passed_on = False
        while waiting:
            # The first Ctrl-C is forwarded to the ranks. A second Ctrl-C, or any other signal, ends the run.
            if self.signals and self.signals != [signal.SIGINT]:
                return 128 + self.signals[-1]
            if self.signals and not passed_on:
                passed_on = True
                for actor in self.actors:
                    actor.send.remote(signal.SIGINT)
            now = time.monotonic()
            if failed_at is not None and now - failed_at > _GRACE_SECONDS:
                break
            ready, _ = self.ray.wait(list(waiting), num_returns=1, timeout=_BEAT_SECONDS / 2)
            for reference in ready:
                rank = waiting.pop(reference)
                output = self._read_output(rank, reference)
                heard_at[rank] = time.monotonic()
                self._show(rank, output)
                if output.status is None:
                    waiting[self.actors[rank].read.remote(_BEAT_SECONDS)] = rank
                else:
                    self.status[rank] = output.status
            silent = waiting and now - min(heard_at[rank] for rank in waiting.values()) > _GRACE_SECONDS
            if silent:
                self.head.answers()
            for reference, rank in list(waiting.items()):
                if self.silence is not None and now - heard_at[rank] > self.silence:
                    say(f"rank {rank}: its Ray actor has not responded for {now - heard_at[rank]:.0f} s")
                    del waiting[reference]
                    self.status[rank] = _KILLED
            if failed_at is None and any(self.status.values()):
                failed_at = time.monotonic()
        # Ranks that were lost with their actors may have been lost with the head.
        while any(self.status.values()) and not self.head.answers():
            time.sleep(_BEAT_SECONDS)
        return worst(self.status.values())

    def _read_output(self, rank: int, reference: Any) -> RankOutput:
        from ray.exceptions import RayActorError

        try:
            output: RankOutput = self.ray.get(reference)
        except RayActorError as error:
            say(f"rank {rank} was lost with its actor: {first_line(error)}")
            return RankOutput([], _KILLED)
        if output.status is not None and output.status > 128 and output.status - 128 in list(signal.Signals):
            say(f"rank {rank} was killed by {signal.Signals(output.status - 128).name}")
        return output

    def _show(self, rank: int, output: RankOutput) -> None:
        """Prints the output of rank 0 unchanged, and prefixes the lines of other ranks with the rank."""
        for number, line in output.lines:
            stream = sys.stdout if number == 1 else sys.stderr
            stream.flush()
            stream.buffer.write(f"rank {rank}: ".encode() + line if rank else line)
            stream.buffer.flush()

    def _end(self) -> None:
        """Ends all ranks and engines. A process whose Ray actor has ended does not run any more."""
        ending = [actor.end.remote() for actor in [*self.actors, *self.engines]]
        with suppress(self.ray.exceptions.RayError):
            self.ray.wait(ending, num_returns=len(ending), timeout=_GRACE_SECONDS)


@contextmanager
def _signals(received: list[int]) -> Iterator[None]:
    def caught(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
