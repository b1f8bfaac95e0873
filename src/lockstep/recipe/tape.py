"""Keys of the tape."""

from __future__ import annotations

from lockstep.recipe.section import Field, Section


class Tape(Section):
    record: bool = Field(
        False, description="Record what a replay on another device needs; `tape=true` says the same in short."
    )
    steps: int = Field(100, ge=1, description="Steps that are recorded, from the first.")
    every: int = Field(
        10, ge=1, description="Steps between snapshots: digests by module and parameter, and weights where kept."
    )
    modules: list[str] = Field(
        ["*"],
        description="Modules that a snapshot digests, as patterns of their names (`*.layers.0.*`), each of which "
        "must match.",
    )
    tensors: list[str] = Field(
        default_factory=list, description="Modules whose whole inputs and outputs a snapshot keeps, as patterns."
    )
    rows: int = Field(4, ge=1, description="Sequences that a snapshot sends through the modules.")
    weights: bool | None = Field(
        None,
        description="Keep weights and optimizer state at snapshots, for teacher-forced replays. Default: of models "
        "with at most 16 million trained parameters.",
    )
