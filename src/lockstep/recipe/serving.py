"""Keys of a serving engine (`rollout.server`): the process that lockstep starts, and how long it is waited for."""

from __future__ import annotations

from lockstep.recipe.effects import Effect
from lockstep.recipe.section import Field, Section

_WHERE = Effect("harmless", "where the engine runs")
_HOW = Effect("matters", "the engine is started otherwise: rounding, or more; the log-probs tell")
_LIMIT = Effect("harmless", "only when the run is stopped")


class ServerSettings(Section):
    devices: list[int] | None = Field(
        None,
        min_length=1,
        description="Devices of this machine that the engine sees, by their numbers. Default: those of the run.",
        effect=_WHERE,
        resumable=True,
    )
    tensor_parallel: int = Field(
        1, ge=1, description="Devices that divide the engine's weights among them.", effect=_HOW, resumable=True
    )
    args: list[str] = Field(
        default_factory=list,
        description="Further arguments of the engine's command line, such as `[--gpu-memory-utilization, '0.5']`.",
        effect=_HOW,
        resumable=True,
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the engine.", effect=_HOW, resumable=True
    )
    python: str | None = Field(
        None,
        description="The Python that has the engine installed, such as `.venv-vllm/bin/python`: engines pin a torch of "
        "their own. Default: the one that runs lockstep.",
        effect=_HOW,
        resumable=True,
    )
    folder: str | None = Field(
        None,
        description="Folder through which weights reach the engine: run and engine must both see it under this name. "
        "Default: shared memory (`/dev/shm`), or the system's folder for temporary files.",
        effect=_WHERE,
        resumable=True,
    )
    start_limit: float = Field(
        1800.0,
        gt=0,
        description="Seconds in which an engine must answer after its start, or again after it was lost.",
        effect=_LIMIT,
        resumable=True,
    )
    answer_limit: float = Field(
        1800.0,
        gt=0,
        description="Seconds that the engine may take for one response, or to load weights.",
        effect=_LIMIT,
        resumable=True,
    )
