"""`lockstep train RECIPE --smoke`: tests a recipe with two small steps, validation, checkpoint, export and tape.

Method, columns, rewards, adapter, optimizer and dtype are those of the recipe. The models are replaced by small models
of the same architecture with random weights. The first rows of the data are used, or generated rows if the data does
not exist.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError

from lockstep.data.prepare.agent_rows import TEMPLATE
from lockstep.data.prepare.generated import write_arithmetic, write_preferences
from lockstep.data.prepare.squares import SQUARES_SOURCE, write_squares
from lockstep.errors import Refusal, unwritten
from lockstep.launch.launcher import is_rank
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.miniature import POSITION_COUNTS, miniature_config
from lockstep.model.pretrained import pretrained
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import FullModel, text_config
from lockstep.model.tiny import write_tiny
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import Recipe
from lockstep.recipe.loader import checked_recipe, resolved
from lockstep.recipe.methods import OFFLINE, ONLINE, PAIR_COLUMNS, STEP_COLUMNS, SUPERVISED_COLUMNS
from lockstep.recipe.registry import ENGINES, estimator_row
from lockstep.reward.process_model import PROCESS
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.train.start import run_recipe

# Settings of a model config that must match the tokenizer and the rows; the other sizes are reduced.
KEPT = ("vocab_size", "vocab_size_per_layer_input", "bos_token_id", "eos_token_id", "pad_token_id", *POSITION_COUNTS)
TINY = {"hidden": 64, "layers": 2}


def small_model(path: str, folder: Path, seed: int = 0, *, vision: bool = False) -> str:
    """Writes a small replacement of the model at `path` to `folder` and returns its description. If there is no model
    at `path`, or its architecture cannot be reduced, the embedded tiny model is used. With `vision` it is the tiny
    vision-language model, because a miniature of another tower may not fit its image processor."""
    if vision:
        write_tiny_vlm(folder, seed=seed, **TINY)
        return "the tiny vision-language model"
    source = local_folder(path)
    if source is None:
        write_tiny(folder, seed=seed, **TINY)
        return f"the tiny model, because the folder {path} does not exist"
    config = load_config(source)
    try:
        small = small_config(config)
        torch.manual_seed(seed)
        model = FullModel.from_config(small, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # the architecture may not support smaller sizes
        write_tiny(folder, seed=seed, **TINY)
        return f"the tiny model, because {config.model_type} cannot be reduced ({type(error).__name__})"
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    generation = Path(source) / "generation_config.json"
    if generation.is_file():
        shutil.copy(generation, folder / generation.name)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"a {config.model_type} with {count:,} random weights and the tokenizer of {path}"


def small_config(config: Any) -> Any:
    """Returns a miniature configuration with the same vocabulary and number of positions."""
    small = miniature_config(config)
    for target, source in ((small, config), (text_config(small), text_config(config))):
        for name in KEPT:
            if hasattr(source, name) and hasattr(target, name):
                setattr(target, name, getattr(source, name))
    small.architectures = None
    return small


def small_reward_model(model: Path, folder: Path) -> None:
    """Writes a reward model with the architecture and tokenizer of `model` and random weights."""
    from transformers import AutoModelForSequenceClassification

    config = text_config(load_config(str(model)))
    config.num_labels = 1
    tokenizer = load_tokenizer(str(model))
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    torch.manual_seed(0)
    reward_model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
    reward_model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def local_folder(path: str) -> str | None:
    """Returns the local model folder of `path`, or None if there is no such folder."""
    try:
        folder = model_folder(path)
    except Refusal:
        return None
    return folder if (Path(folder) / "config.json").is_file() else None


STEPS = 2
ROWS = 64
RESPONSE_TOKENS = 16
UPDATE = 4
# Recipe keys that are turned off for the smoke test: early stopping and the row cache.
UNUSED = (("run", "early_stopping", None), ("data", "cache", "off"))


def smoke_test(recipe: Recipe) -> None:
    """Trains the small version of a recipe and checks the files of the run."""
    if is_rank():
        raise Refusal.at(
            "--smoke",
            "runs in one process, and several processes were started",
            "run the command without torchrun or another launcher",
            code="one-process-only",
        )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lockstep-smoke-") as temporary:
        smoke = Smoke(recipe, Path(temporary))
        try:
            small = smoke.recipe()
        except (OSError, SafetensorError) as error:  # safetensors raises SafetensorError for a full disk
            raise unwritten(temporary, error, "set TMPDIR to another folder for temporary files") from error
        Console.open().banner(f"smoke test of {recipe.run.name}", smoke.changes)
        run = RunFolder(run_recipe(small))
        done = _check_run(run, small)
    console = Console.open()
    console.say("the folder of this run was temporary and is deleted; without --smoke, the command trains")
    console.say(f"smoke test passed in {time.perf_counter() - began:.0f} s: {', '.join(done)}")


class Smoke:
    """Makes the small version of a recipe; `changes` lists the changed keys."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.given, self.folder = recipe, folder
        self.values = resolved(recipe)
        self.online, self.vision = recipe.method in ONLINE, recipe.model.vision is not None
        self.changes: list[tuple[str, str]] = []

    def recipe(self) -> Recipe:
        self._models()
        self._template()
        self._rows()
        self._lengths()
        self._sizes()
        self._one_process()
        run = self.values["run"]
        run.update(name="smoke", folder=str(self.folder / "runs"), steps=STEPS, epochs=None, resume="auto", export=True)
        self.values["checkpoint"].update(every=1)
        self.values["log"].update(track=[], prometheus=None, every=1)
        self._tape()
        for section, key, value in UNUSED:
            if key in self.values[section]:
                self.values[section][key] = value
        return checked_recipe(self.values)

    # -- models --------------------------------------------------------------------------------------------------------

    def _models(self) -> None:
        values, model = self.values, self.folder / "model"
        self.changes.append(("model", small_model(values["model"]["path"], model, vision=self.vision)))
        values["model"]["path"] = str(model)
        lora = values["model"]["lora"]
        if lora is not None and lora["adapter"] is not None:
            self.changes.append(("model.lora", "a new adapter of rank 4"))
            lora.update(adapter=None, rank=lora["rank"] or 4, reference="base")
        if lora is not None and lora["layers"] is not None:
            self.changes.append(("model.lora.layers", "all layers of the small model"))
            lora.update(layers=None)
        prm = values.get("prm")
        if prm and local_folder(self.given.model.path) is None:
            # Every token of the tiny model is one byte, so step placeholder and labels must be single bytes.
            prm.update(placeholder="@", tokens=["+", "-"])
        self._replace_model("preference", "reference", lambda: str(model))
        self._replace_model("critic", "path", lambda: str(model))
        self._replace_model("distill", "teacher", self._teacher)
        if self.online and values["algorithm"]["kl"]["reference"] is not None:
            values["algorithm"]["kl"]["reference"] = self._teacher()
        self._reward_models(values.get("reward", {}), model)

    def _replace_model(self, section: str, key: str, replacement: Callable[[], str]) -> None:
        if self.values.get(section, {}).get(key) is not None:
            self.values[section][key] = replacement()

    def _teacher(self) -> str:
        """Writes a teacher model whose weights differ from the student's, so that distillation has a signal."""
        folder = self.folder / "teacher"
        if not folder.exists():
            small_model(self.given.model.path, folder, seed=1, vision=self.vision)
        return str(folder)

    def _reward_models(self, reward: dict[str, Any], model: Path) -> None:
        if reward.get("model"):
            small_reward_model(model, self.folder / "judge")
            several = isinstance(reward["model"], list)
            reward["model"] = (
                [str(self.folder / "judge")] * len(reward["model"]) if several else str(self.folder / "judge")
            )
            self.changes.append(("reward.model", "a small model with random weights"))
        if reward.get("process"):
            process_folder = local_folder(reward["process"])
            if process_folder is None or local_folder(self.given.model.path) is None:
                reward["process"] = None
                reward["weights"].pop("process", None)
                self.changes.append(("reward.process", "removed: its folder does not exist"))
            else:
                folder = self.folder / "steps"
                shutil.copytree(model, folder)
                shutil.copy(Path(process_folder) / PROCESS, folder / PROCESS)
                reward["process"] = str(folder)
                self.changes.append(("reward.process", "a small model with random weights"))

    def _template(self) -> None:
        """Replaces a template file that does not exist yet, and the template of the tiny model, which has no tools."""
        data, rollout = self.values["data"], self.values.get("rollout", {})
        given, tiny = data["template"], local_folder(self.given.model.path) is None
        missing = given.endswith(".jinja") and not _exists(given)
        if self.vision:
            if missing:
                self.changes.append(("data.template", f"that of the model, because {given} does not exist"))
                data["template"] = "auto"
            return
        several_turns = any(rollout.get(key) for key in ("tools", "environment", "agent"))
        needs_tools = several_turns and tiny and given == "auto"
        if missing or needs_tools:
            file = self.folder / "template.jinja"
            file.write_text(TEMPLATE, encoding="utf-8")
            why = f", because {given} does not exist" if missing else " for the tiny model"
            self.changes.append(("data.template", f"a template with tools{why}"))
            data["template"] = str(file)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        data, val = self.values["data"], self.values["val"]
        absent = [source["path"] for source in data["train"] if not _exists(source["path"]) and not data["reader"]]
        if absent:
            self.changes.append(("data", f"generated rows, because {absent[0]} does not exist"))
            self._generate(data, val)
        elif data["streaming"]:
            # If the recipe has no validation rows, there is no validation: streamed files may be larger than memory.
            self.changes.append(("data", "streamed rows, as in the recipe"))
            if data["val"] or val["questions"]:
                self._validation(data, val)
        else:
            data["train"] = [{**one, "rows": min(one["rows"] or ROWS, ROWS)} for one in data["train"]]
            self.changes.append(("data", f"the first {ROWS} rows of {', '.join(one['path'] for one in data['train'])}"))
            self._validation(data, val)
        if val["questions"]:
            val["question_rows"] = min(val["question_rows"] or UPDATE, UPDATE)
            val["max_new_tokens"] = min(val["max_new_tokens"], RESPONSE_TOKENS)
        val["every"], val["at_start"] = (1, True) if data["val"] or val["questions"] else (None, False)

    def _validation(self, data: dict[str, Any], val: dict[str, Any]) -> None:
        """Uses the validation rows of the recipe, or the first training rows if the recipe has no validation rows."""
        paths = [val["questions"]] if isinstance(val["questions"], str) else val["questions"] or []
        if not all(_exists(path) for path in paths):
            self.changes.append(("val.questions", f"removed, because {paths[0]} does not exist"))
            val["questions"] = val["question_rows"] = None
        if self.online:
            if not val["questions"]:
                val["questions"] = data["train"][0]["path"]
            return
        existing = [one for one in data["val"] if _exists(one["path"]) or data["reader"]]
        if data["val"] and not existing:
            self.changes.append(
                ("data.val", f"the first training rows, because {data['val'][0]['path']} does not exist")
            )
        data["val"] = [{**one, "rows": UPDATE} for one in existing or data["train"]]

    def _generate(self, data: dict[str, Any], val: dict[str, Any]) -> None:
        """Generates rows of the kind that the method reads, with default column names."""
        folder = self.folder / "data"
        for key in [name for name in data if name.endswith("_key") or name in ("shape", "reader")]:
            del data[key]
        val["questions"] = val["question_rows"] = None
        columns = () if self.online else OFFLINE[self.given.method].columns
        if self.online or columns == SUPERVISED_COLUMNS:
            (write_squares if self.vision else write_arithmetic)(folder, train_rows=ROWS, val_rows=8)
            if self.vision:
                scored = self.values["reward"] if self.online else val
                scored["rules"] = {**(scored["rules"] or {}), SQUARES_SOURCE: "exact"}
            names = ("train", None) if self.online else ("sft_train", "sft_val")
            val["questions"] = str(folder / "val.parquet")
            if not self.online and data["prompt_format"] is not None:
                # A format applies to a prompt in a column of its own.
                names = ("train", "val")
                data.update(shape="prompt_response", prompt_key="extra_info.question", response_key="extra_info.answer")
        else:
            write_preferences(folder, train_rows=ROWS, val_rows=8)
            kind = "steps" if columns == STEP_COLUMNS else "pairs"
            assert kind == "steps" or set(columns) & set(PAIR_COLUMNS)
            names = (f"{kind}_train", f"{kind}_val")
            if data["template"] == "none":
                _as_plain_text([folder / f"{name}.parquet" for name in names])
        data["train"] = [{"path": str(folder / f"{names[0]}.parquet")}]
        data["val"] = [{"path": str(folder / f"{names[1]}.parquet")}] if names[1] else []
        data.setdefault("reader", None)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _lengths(self) -> None:
        """Reduces lengths to the context of the replaced model, and removes arguments of another chat template."""
        data, model = self.values["data"], self.values["model"]["path"]
        context = getattr(text_config(load_config(model)), "max_position_embeddings", None)
        for key, room in (("max_tokens", 0), ("max_prompt_tokens", RESPONSE_TOKENS)):
            if context is not None and data.get(key) is not None and data[key] > context - room:
                self.changes.append((f"data.{key}", f"{context - room}, because the small model has no more context"))
                data[key] = context - room
        if data.get("template_arguments") and local_folder(self.given.model.path) is None:
            self.changes.append(("data.template_arguments", "none, because the template of the tiny model has none"))
            data["template_arguments"] = {}

    def _sizes(self) -> None:
        values = self.values
        batch, optim = values["batch"], values["optim"]
        if batch["micro_batch_size"] is not None:
            batch["micro_batch_size"] = min(batch["micro_batch_size"], 2)
        # A warmup of 1 or more is a number of steps, not a fraction.
        if optim["warmup"] >= 1:
            optim["warmup"] = 1
        # Parameters of the recipe's model have other names, and its layers other numbers.
        optim["groups"] = []
        if not self.online:
            batch["rows_per_update"] = min(batch["rows_per_update"], UPDATE)
            return
        several = batch["prompts_per_update"] is not None and batch["prompts_per_update"] < batch["prompts"]
        batch.update(prompts=UPDATE, prompts_per_update=UPDATE // 2 if several else UPDATE)
        rollout, algorithm = values["rollout"], values["algorithm"]
        rollout["n"] = min(rollout["n"], 2)
        rollout["max_tokens"] = min(rollout["max_tokens"], RESPONSE_TOKENS)
        algorithm["overlong"]["buffer"] = min(algorithm["overlong"]["buffer"], RESPONSE_TOKENS)
        if estimator_row(algorithm["advantage"]).critic:
            values["critic"]["warmup"] = min(values["critic"]["warmup"], 1)

    def _one_process(self) -> None:
        parallel, defaults = self.values["parallel"], type(self.given.parallel)().model_dump(mode="json")
        if parallel != defaults:
            changed = [name for name, value in parallel.items() if value != defaults[name]]
            self.changes.append(("parallel", f"one process, without {', '.join(changed)}"))
            self.values["parallel"] = defaults
        if not self.online:
            return
        rollout = self.values["rollout"]
        if ENGINES[rollout["engine"]].served:
            self.changes.append(("rollout.engine", f"native instead of {rollout['engine']}"))
            defaults = type(self.given.rollout)().model_dump(mode="json")
            rollout.update({key: defaults[key] for key in ("engine", "url", "server", "sleep")})
        rollout["worker_device"] = None

    def _tape(self) -> None:
        lora = self.values["model"]["lora"]
        asynchronous = self.online and self.values["rollout"]["max_staleness"] is not None
        without = "asynchronous generation" if asynchronous else "dropout" if lora and lora["dropout"] else ""
        without = without or ("images" if self.vision else "")
        if without:
            self.changes.append(("tape", f"off: {without}"))
        self.values["tape"].update(record=not without, steps=STEPS, every=1)


def _as_plain_text(files: Sequence[Path]) -> None:
    """Replaces the lists of one message in rows by the text of the message."""
    for file in files:
        rows = pq.read_table(file).to_pylist()
        for row in rows:
            lists = {key: value for key, value in row.items() if isinstance(value, list) and isinstance(value[0], dict)}
            row.update({key: message["content"] for key, (message,) in lists.items()})
        pq.write_table(pa.Table.from_pylist(rows), file)


def _exists(path: str) -> bool:
    """Returns whether a file, folder or glob match exists locally. For `hub:` data the result is False, because nothing
    is downloaded."""
    return not path.startswith("hub:") and (Path(path).exists() or any(Path().glob(path) if _relative(path) else ()))


def _relative(path: str) -> bool:
    return bool(path) and not Path(path).is_absolute()


def _check_run(run: RunFolder, recipe: Recipe) -> list[str]:
    """Checks the files that every run must write; a missing file is a bug of lockstep."""
    lines = [json.loads(line) for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    names = {name for line in lines for name in line["data"]}
    done = [f"{max(line['step'] for line in lines)} steps"]
    if recipe.val.every:
        if not any(name.startswith("val/") for name in names):
            raise AssertionError("no validation was logged")
        done.append("validation")
    kept = sorted(folder.name for folder in run.checkpoints.iterdir())
    if f"step_{STEPS}" not in kept:
        raise AssertionError(f"checkpoints are {kept}")
    done.append("checkpoint")
    _load(run.export)
    done.append("export (loaded with transformers)")
    if recipe.tape.record:
        if not any(run.tape.iterdir()):
            raise AssertionError("the tape is empty")
        done.append("tape")
    return done


def _load(folder: Path) -> None:
    import transformers

    from lockstep.model.load import load_config

    kind = getattr(transformers, load_config(str(folder)).architectures[0])
    pretrained(kind, str(folder), str(folder), "the export")
