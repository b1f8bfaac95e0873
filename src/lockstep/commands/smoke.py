"""`lockstep train --smoke`: two small steps with small models that exercise everything."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lockstep.data.prepare.generated import write_arithmetic, write_preferences
from lockstep.errors import Refusal, unwritten
from lockstep.launch.launcher import is_rank
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.miniature import POSITION_COUNTS, miniature_config
from lockstep.model.pretrained import pretrained
from lockstep.model.resolve import model_folder
from lockstep.model.tiny import write_tiny
from lockstep.recipe import Recipe
from lockstep.recipe.loader import checked_recipe, resolved
from lockstep.recipe.methods import OFFLINE, ONLINE, PAIR_COLUMNS, STEP_COLUMNS, SUPERVISED_COLUMNS
from lockstep.recipe.registry import ENGINES, estimator_row
from lockstep.reward.process_model import PROCESS
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.train.start import run_recipe

# Small stand-ins for the models of a recipe: the same architecture and tokenizer, random weights, few parameters.

# What a model must have in common with its tokenizer and its rows; the rest of a configuration is made small.
KEPT = ("vocab_size", "vocab_size_per_layer_input", "bos_token_id", "eos_token_id", "pad_token_id", *POSITION_COUNTS)
TINY = {"hidden": 64, "layers": 2}


def small_model(path: str, folder: Path, seed: int = 0) -> str:
    """Write a small model in the place of `path` to `folder`; returns what it is. Where there is no model at `path`, or
    none of its kind can be made small, it is the embedded tiny one."""
    found = local_folder(path)
    if found is None:
        write_tiny(folder, seed=seed, **TINY)
        return f"the tiny model: there is no folder {path}"
    from transformers import AutoModelForCausalLM

    config = load_config(found)
    try:
        small = small_config(config)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # an architecture that cannot be had with other sizes
        write_tiny(folder, seed=seed, **TINY)
        return f"the tiny model: {config.model_type} cannot be made small ({type(error).__name__})"
    model.save_pretrained(folder)
    load_tokenizer(found).save_pretrained(folder)
    generation = Path(found) / "generation_config.json"
    if generation.is_file():
        shutil.copy(generation, folder / generation.name)
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"a {config.model_type} with {count:,} random weights and the tokenizer of {path}"


def small_config(config: Any) -> Any:
    """A miniature that reads the same tokens at as many positions."""
    small = miniature_config(config)
    for own, of in ((small, config), (small.get_text_config(), config.get_text_config())):
        for name in KEPT:
            if hasattr(of, name) and hasattr(own, name):
                setattr(own, name, getattr(of, name))
    small.architectures = None
    return small


def small_judge(model: Path, folder: Path) -> None:
    """A reward model of the architecture of `model`, with its tokenizer and random weights."""
    from transformers import AutoModelForSequenceClassification

    config = load_config(str(model))
    config.num_labels = 1
    tokenizer = load_tokenizer(str(model))
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, trust_remote_code=False)
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def local_folder(path: str) -> str | None:
    """The model folder behind `path`; None where there is none on this machine."""
    try:
        folder = model_folder(path)
    except Refusal:
        return None
    return folder if (Path(folder) / "config.json").is_file() else None


# `lockstep train RECIPE --smoke`: two tiny steps of a recipe with everything on, in a temporary folder.
#
# The recipe's method, columns, rewards, adapter, optimizer and dtype stay; its models become small ones of the same
# architecture with random weights, and of its rows the first are taken (or sums are generated where there are none).
# Validation, checkpoint, export and tape happen at each step, whatever the recipe says.

STEPS = 2
ROWS = 64
RESPONSE_TOKENS = 16
UPDATE = 4
# What two steps in a temporary folder have no use for: an early end, and rows kept for later runs.
UNUSED = (("run", "stop_early", None), ("data", "cache", "off"))


def smoke_test(recipe: Recipe) -> None:
    """Train the small form of a recipe, and look at what the run left."""
    if is_rank():
        raise Refusal.at("--smoke", "is one process, and several were started", "leave the launcher out")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lockstep-smoke-") as temporary:
        smoke = Smoke(recipe, Path(temporary))
        try:
            small = smoke.recipe()
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
            raise unwritten(temporary, error, "TMPDIR names the folder of temporary files") from error
        Console.open().banner(f"smoke test of {recipe.run.name}", smoke.said)
        run = RunFolder(run_recipe(small))
        done = _looked_at(run, small)
    console = Console.open()
    console.say("the folder was a temporary one, and is gone")
    console.say(f"smoke test passed in {time.perf_counter() - began:.0f} s: {', '.join(done)}")


class Smoke:
    """A recipe being made small; `said` are the rows that tell how."""

    def __init__(self, recipe: Recipe, folder: Path):
        self.given, self.folder = recipe, folder
        self.values = resolved(recipe)
        self.online = recipe.method in ONLINE
        self.said: list[tuple[str, str]] = []

    def recipe(self) -> Recipe:
        self._models()
        self._rows()
        self._sizes()
        self._one_process()
        run = self.values["run"]
        run.update(name="smoke", folder=str(self.folder / "runs"), steps=STEPS, epochs=None, resume="auto", export=True)
        self.values["checkpoint"].update(every=1)
        self.values["log"].update(track=[], every=1)
        self._tape()
        for section, key, value in UNUSED:
            if key in self.values[section]:
                self.values[section][key] = value
        return checked_recipe(self.values)

    # -- models --------------------------------------------------------------------------------------------------------

    def _models(self) -> None:
        values, model = self.values, self.folder / "model"
        self.said.append(("model", small_model(values["model"]["path"], model)))
        values["model"]["path"] = str(model)
        lora = values["model"]["lora"]
        if lora is not None and lora["adapter"] is not None:
            self.said.append(("model.lora", "a new adapter of rank 4"))
            lora.update(adapter=None, rank=lora["rank"] or 4)
        judging = values.get("prm")
        if judging and local_folder(self.given.model.path) is None:
            # The tiny model's tokens are bytes.
            judging.update(placeholder="@", tokens=["+", "-"])
        self._beside("preference", "reference", lambda: str(model))
        self._beside("critic", "path", lambda: str(model))
        self._beside("distill", "teacher", self._teacher)
        if self.online and values["algorithm"]["kl"]["reference"] is not None:
            values["algorithm"]["kl"]["reference"] = self._teacher()
        self._judges(values.get("reward", {}), model)

    def _beside(self, section: str, key: str, stand_in: Callable[[], str]) -> None:
        if self.values.get(section, {}).get(key) is not None:
            self.values[section][key] = stand_in()

    def _teacher(self) -> str:
        """Other weights than the model's, so that there is something to learn from them."""
        folder = self.folder / "teacher"
        if not folder.exists():
            small_model(self.given.model.path, folder, seed=1)
        return str(folder)

    def _judges(self, reward: dict[str, Any], model: Path) -> None:
        if reward.get("model"):
            small_judge(model, self.folder / "judge")
            several = isinstance(reward["model"], list)
            reward["model"] = (
                [str(self.folder / "judge")] * len(reward["model"]) if several else str(self.folder / "judge")
            )
            self.said.append(("reward.model", "a small one with random weights"))
        if reward.get("process"):
            told = local_folder(reward["process"])
            if told is None or local_folder(self.given.model.path) is None:
                reward["process"] = None
                reward["weights"].pop("process", None)
                self.said.append(("reward.process", "left out: it needs a folder of its own"))
            else:
                folder = self.folder / "steps"
                shutil.copytree(model, folder)
                shutil.copy(Path(told) / PROCESS, folder / PROCESS)
                reward["process"] = str(folder)
                self.said.append(("reward.process", "a small one with random weights"))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        data, val = self.values["data"], self.values["val"]
        absent = [one["path"] for one in data["train"] if not _is_there(one["path"]) and not data["reader"]]
        if absent:
            self.said.append(("data", f"generated rows: there is no {absent[0]}"))
            self._generate(data, val)
        else:
            data["train"] = [{**one, "rows": min(one["rows"] or ROWS, ROWS)} for one in data["train"]]
            self.said.append(("data", f"the first {ROWS} rows of {', '.join(one['path'] for one in data['train'])}"))
            self._validation(data, val)
        if val["questions"]:
            val["question_rows"] = min(val["question_rows"] or UPDATE, UPDATE)
            val["max_new_tokens"] = min(val["max_new_tokens"], RESPONSE_TOKENS)
        val["every"], val["at_start"] = (1, True) if data["val"] or val["questions"] else (None, False)

    def _validation(self, data: dict[str, Any], val: dict[str, Any]) -> None:
        """Of the recipe's own rows; where it names none, of the first training rows."""
        paths = [val["questions"]] if isinstance(val["questions"], str) else val["questions"] or []
        if not all(_is_there(path) for path in paths):
            self.said.append(("val.questions", f"left out: there is no {paths[0]}"))
            val["questions"] = val["question_rows"] = None
        if self.online:
            if not val["questions"]:
                val["questions"] = data["train"][0]["path"]
            return
        there = [one for one in data["val"] if _is_there(one["path"]) or data["reader"]]
        if data["val"] and not there:
            self.said.append(("data.val", f"the first training rows: there is no {data['val'][0]['path']}"))
        data["val"] = [{**one, "rows": UPDATE} for one in there or data["train"]]

    def _generate(self, data: dict[str, Any], val: dict[str, Any]) -> None:
        """Rows of the kind that the method reads, with the usual names of their columns."""
        folder = self.folder / "data"
        for key in [name for name in data if name.endswith("_key") or name in ("shape", "reader")]:
            del data[key]
        val["questions"] = val["question_rows"] = None
        columns = () if self.online else OFFLINE[self.given.method].columns
        if self.online or columns == SUPERVISED_COLUMNS:
            write_arithmetic(folder, train_rows=ROWS, val_rows=8)
            names = ("train", None) if self.online else ("sft_train", "sft_val")
            val["questions"] = str(folder / "val.parquet")
        else:
            write_preferences(folder, train_rows=ROWS, val_rows=8)
            kind = "steps" if columns == STEP_COLUMNS else "pairs"
            assert kind == "steps" or set(columns) & set(PAIR_COLUMNS)
            names = (f"{kind}_train", f"{kind}_val")
        data["train"] = [{"path": str(folder / f"{names[0]}.parquet")}]
        data["val"] = [{"path": str(folder / f"{names[1]}.parquet")}] if names[1] else []
        data.setdefault("reader", None)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def _sizes(self) -> None:
        values = self.values
        batch, optim = values["batch"], values["optim"]
        if batch["rows"] is not None:
            batch["rows"] = min(batch["rows"], 2)
        # A whole number is of steps.
        if optim["warmup"] >= 1:
            optim["warmup"] = 1
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
        parallel, usual = self.values["parallel"], type(self.given.parallel)().model_dump(mode="json")
        if parallel != usual:
            changed = [name for name, value in parallel.items() if value != usual[name]]
            self.said.append(("parallel", f"one process, without {', '.join(changed)}"))
            self.values["parallel"] = usual
        if not self.online:
            return
        rollout = self.values["rollout"]
        if ENGINES[rollout["engine"]].served:
            self.said.append(("rollout.engine", f"native in the place of {rollout['engine']}"))
            usual = type(self.given.rollout)().model_dump(mode="json")
            rollout.update({key: usual[key] for key in ("engine", "url", "server", "sleep")})
        rollout["worker_device"] = None

    def _tape(self) -> None:
        lora = self.values["model"]["lora"]
        beside = self.online and self.values["rollout"]["max_staleness"] is not None
        record = not beside and not (lora and lora["dropout"])
        if not record:
            self.said.append(("tape", "left out: " + ("a process generates beside" if beside else "dropout")))
        self.values["tape"].update(record=record, steps=STEPS, every=1)


def _is_there(path: str) -> bool:
    """Of a file, a folder or a pattern; what is on a hub is not fetched."""
    return not path.startswith("hub:") and (Path(path).exists() or any(Path().glob(path) if _relative(path) else ()))


def _relative(path: str) -> bool:
    return bool(path) and not Path(path).is_absolute()


def _looked_at(run: RunFolder, recipe: Recipe) -> list[str]:
    """What a run must have left; a part that is missing is an error of ours."""
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
    done.append("export (loaded by plain transformers)")
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
