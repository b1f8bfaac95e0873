"""The processes of a converted command that starts its own workers, as verl's `main_ppo` does with Ray.

One command with `trainer.n_gpus_per_node=8` trains on 8 devices: lockstep starts one process per device, on this
machine or on the Ray cluster in which the command runs. What it cannot start is refused, never ignored.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from lockstep.compat.key_table import Conversion
from lockstep.compat.offload_keys import keep_weights_on_device
from lockstep.errors import Refusal
from lockstep.launch.launcher import is_rank

# Programs that start workers on the devices of the command, with the keys for devices per node and for nodes. All other
# programs train on the processes of their launcher (torchrun, deepspeed).
_KEYS = {
    "main_ppo": ("trainer.n_gpus_per_node", "trainer.nnodes"),
    "train_ppo_ray": ("actor_num_gpus_per_node", "actor_num_nodes"),
}
_RAY_ONLY = {"sft_trainer_ray": "main_ppo"}
# A CPU counts as one device, and any number of processes can share it. More processes than this would be a mistake.
_CPU_PROCESSES = 8
_ALONE = "this process trains on one device"


def set_devices(done: Conversion, program: str) -> str:
    """Writes `parallel.devices` and `parallel.launcher` for a command that starts its own workers. Returns a sentence
    on the processes for the report. Raises `Refusal` if this machine cannot start them."""
    start, processes = _start(done, program)
    if processes == 1:
        keep_weights_on_device(done)
    return start


def _start(done: Conversion, program: str) -> tuple[str, int]:
    """Returns a sentence on the processes, and their number."""
    name = program.rsplit(".", 1)[-1]
    keys = _KEYS.get(done.settings.program) or _KEYS.get(_RAY_ONLY.get(name, ""))
    if is_rank():
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        asked = done.devices * done.nodes
        if keys is None or asked == ranks or not done.is_set(*keys):
            return f"processes of the launcher: {ranks}", ranks
        more = f"the command asks for {asked}; results do not depend on it"
        return f"processes of the launcher: {ranks} ({more})", ranks
    if keys is None or done.problems:
        return _ALONE, 1
    if in_ray_cluster(done.nodes):
        done.write("parallel.launcher", "ray", keys[1])
        devices = done.devices * done.nodes
        done.write("parallel.devices", devices, *keys)
        return f"starts {devices} processes on the Ray cluster, one per device", devices
    if done.nodes > 1:
        raise _several_nodes(done, keys[1], program)
    devices = _local_devices(done, keys[0])
    if devices == 1:
        return _ALONE, 1
    done.write("parallel.devices", devices, keys[0])
    return f"starts {devices} processes on this machine, one per device", devices


def in_ray_cluster(nodes: int) -> bool:
    """Returns whether the command runs in a Ray cluster: RAY_ADDRESS is set, as in every `ray job submit`, or a command
    for several nodes runs on a node of a cluster (`ray start`)."""
    if find_spec("ray") is None:
        return False
    started = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    return bool(os.environ.get("RAY_ADDRESS")) or (nodes > 1 and started.is_file())


def _local_devices(done: Conversion, key: str) -> int:
    from lockstep.device.select import select  # imports torch, which a conversion does not need

    written = done.recipe.get("device")
    device = select(str(written.value) if written else "auto")
    shared = device.meets_itself  # several processes can share a CPU
    here = max(_CPU_PROCESSES, os.cpu_count() or 1) if shared else device.count()
    if not done.is_set(key):
        # The peers' default of 8 devices describes their authors' machines; it means all devices of this machine.
        return 1 if shared else min(done.devices, here)
    if done.devices > here:
        shown = f"{done.settings.spelling(key)}={here}" if "." in key else f"{done.settings.spelling(key)} {here}"
        few = f"this machine has {here} ({device.name})" if not shared else f"a CPU runs at most {here} processes"
        remedy = f"set {shown} (the number of devices does not change results), or use a machine with more devices"
        raise Refusal.at(
            done.named(key), f"asks for {done.devices} devices, but {few}", remedy, code="wrong-process-count"
        )
    return max(1, done.devices)


def _several_nodes(done: Conversion, key: str, program: str) -> Refusal:
    peer = "openrlhf" if done.settings.program == "train_ppo_ray" else "verl"
    command = (
        f"torchrun --nnodes {done.nodes} --nproc-per-node {done.devices} --node-rank RANK --master-addr HOST "
        f"-m lockstep.compat.{peer} {program} SETTINGS"
    )
    remedy = (
        f"start this command on each node, with the settings of the command: {command}; or run it in a Ray cluster "
        "(`ray job submit`, or RAY_ADDRESS), with the package ray"
    )
    why = f"asks for {done.nodes} nodes, but this process is alone and in no Ray cluster"
    return Refusal.at(done.named(key), why, remedy, code="wrong-process-count")
