"""Copies the towers of a nested model (encoders and projectors for images, video or audio) to an export.

Training on text never loads the towers (`text_model.py`), and training on images may freeze them. The export copies the
processor files and the bytes of the towers' tensors, which keep the names that they have in the model folder. So
transformers loads the full class from the exported folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.model.check import RUN_ERRORS
from lockstep.model.streamed import conversions_of, weight_files
from lockstep.model.text_model import multimodal_class, without_towers
from lockstep.run.tensor_file import add_tensors, stored_names

# Settings of the processor of images, video or audio. The chat template is saved with the tokenizer.
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def tower_tensors(config: Any, folder: str, where: str) -> list[str]:
    """Returns the names of the tower tensors in the files of a model folder: none for a flat config. Raises `Refusal`
    if a tensor is missing, because transformers would initialise it randomly in the exported model."""
    kind = multimodal_class(config)
    if kind is None:
        return []
    files = weight_files(folder)
    if files is None:
        why = "its weights are not safetensors files, from which the export copies the tensors for images or audio"
        remedy = "load it with transformers, and save it with save_pretrained to a new folder"
        raise Refusal.at(where, why, remedy, code="unsupported-format")
    try:
        with torch.device("meta"):
            model = without_towers(kind)._from_config(config)
        places = _places(model, [name for file in files for name in stored_names(file)])
    except (*RUN_ERRORS, OSError) as error:
        why = f"its tensors for images or audio cannot be found: {first_line(error)}"
        remedy = "use a model that `lockstep help models` lists as supported"
        raise Refusal.at(where, why, remedy, code="unsupported-model") from error
    refuse_all(
        [
            Problem(
                where,
                f"the weights lack {name}, which is not trained but belongs to {kind.__name__}",
                "copy or download the model again",
                code="missing-weight",
            )
            for name in sorted(model.left_out.keys() - set(places.values()) - set(model.all_tied_weights_keys))
        ],
        "weights",
    )
    return list(places)


def _places(model: Any, keys: Sequence[str]) -> dict[str, str]:
    """Maps those names in `keys` (names of file tensors) that belong to towers to their names in the full class."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = conversions_of(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    state = {**model.state_dict(), **model.left_out}
    found = {}
    for key in keys:
        name: str = rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0]
        name = key if name not in state and key in state else name
        if name in model.left_out:
            found[key] = name
    return found


def add_towers(config: Any, source: str, out: Path, where: str, *, trained: bool = False) -> None:
    """Adds the tower tensors and processor files of the model folder `source` to the exported folder `out`. If the
    towers were `trained`, the folder has their tensors already."""
    names = tower_tensors(config, source, where)
    if not names:
        return
    if not trained:
        add_tensors(out, weight_files(source) or [], names)
    copy_processor(source, out)


def copy_processor(source: str, out: Path) -> None:
    """Copies the settings of the processor of images, video or audio."""
    for name in PROCESSOR:
        if (file := Path(source) / name).is_file():
            shutil.copyfile(file, out / name)
