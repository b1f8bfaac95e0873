"""Commands that convert files of other programs: dequantize, migrate, import-gguf.

Each command imports its modules when it runs, so that `--help` is fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.arguments import PeerVersion, ScriptWords, Verify, VerifyJson
from lockstep.run.output import write


def dequantize(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder or hub model with quantised weights.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(help="Type of the written weights: bf16, fp16 or fp32.")] = "bf16",
) -> None:
    """Write a folder with quantised weights (GPTQ, AWQ, fp8, MXFP4, ...) as a folder with bf16 weights."""
    from lockstep.commands.dequantize import dequantize_named

    write(dequantize_named(folder, out, dtype))


def migrate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT.sh|CHECKPOINT", help="A training script or a checkpoint folder of verl or OpenRLHF."
        ),
    ],
    words: ScriptWords = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="Path to write: the recipe file, or the model folder."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with config and tokenizer, if the checkpoint has none.")
    ] = None,
    verify: Verify = False,
    json: VerifyJson = False,
    peer_version: PeerVersion = None,
) -> None:
    """Convert a training script of another trainer to a recipe, or its checkpoint to a Hugging Face folder."""
    if source.is_dir():
        if out is None:
            raise typer.BadParameter("converting a checkpoint needs an output folder", param_hint="--out")

        from lockstep.compat.checkpoints import convert_checkpoint

        write(convert_checkpoint(source, out, model))
        return

    from lockstep.compat.migrate import migrate as convert

    convert(source, words or [], out, peer_version, verify=verify or json, as_json=json)


def import_gguf(
    file: Path,
    folder: Path,
    tie: Annotated[
        bool, typer.Option("--tie", help="Tie the output head to the embedding, even if the file has an output head.")
    ] = False,
) -> None:
    """Convert a GGUF file to a Hugging Face folder."""
    from lockstep.model.gguf import import_gguf as convert

    for line in convert(file, folder, tie=tie):
        write(line)
