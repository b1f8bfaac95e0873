"""Tables of what a frozen model says: found again by everything they depend on, never half, and the same numbers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.data.updates import arrange
from lockstep.device.select import explain
from lockstep.model.tiny import write_tiny
from lockstep.parallel.world import World
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.train import logprob_cache, offline
from lockstep.train import reference_logprobs as caching
from lockstep.train.logprob_cache import MANIFEST, Columns, Shape, fingerprint, open_cache
from lockstep.train.offline import train_offline
from lockstep.types import Example, Item, Origin, Ranking, ScoredExample
from preference_rows import write_recipe

ORIGIN = Origin("rows.jsonl", 0)


def row(*ids: int, trained: int = 1) -> Example:
    """The last `trained` tokens are targets."""
    return Example(list(ids), [0] * (len(ids) - trained) + [1] * trained, ORIGIN)


ITEMS = [Ranking((row(i, i + 1, i + 2, trained=2), row(i, i + 5))) for i in range(7)]
EXAMPLES = [example for item in ITEMS for example in item.examples]
SHAPES = {"logprobs": Shape("float32"), "ids": Shape("int32", 2)}


class Computed:
    """Numbers that tell which target they belong to, and a count of the calls."""

    def __init__(self, fail_at: int | None = None):
        self.calls, self.fail_at = 0, fail_at

    def __call__(self, items: Sequence[Item]) -> Columns:
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        words = [float(word) for item in items for e in item.examples for _, word in e.scored_tokens()]
        numbers = torch.tensor(words)
        return {"logprobs": numbers, "ids": torch.stack([numbers, -numbers], -1).int()}


def opened(parent: Path, compute: Computed, identity: dict[str, Any] | None = None) -> logprob_cache.LogprobCache:
    return open_cache(parent, "reference", identity or {"a": 1}, SHAPES, ITEMS, compute, World(), lambda rows: None)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprob_cache, "GROUP", 3)


def test_every_target_finds_its_number_in_any_order(tmp_path: Path) -> None:
    table = opened(tmp_path, Computed())
    update = arrange([ITEMS[5], ITEMS[0], ITEMS[3]], World(), tokens=100, rows=None, pad_id=0)
    # The targets of row i are i + 1 and i + 2, then i + 5 of its second sequence.
    assert table.take("logprobs", table.rows(update)).tolist() == [6, 7, 10, 1, 2, 5, 4, 5, 8]
    assert table.take("ids", table.rows(update))[:2].tolist() == [[6, -6], [7, -7]]
    # Items are made anew each time that they are asked for, so a row is known by what it is.
    again = arrange(copy.deepcopy([ITEMS[5], ITEMS[0], ITEMS[3]]), World(), tokens=100, rows=None, pad_id=0)
    assert table.rows(again).tolist() == table.rows(update).tolist()
    stranger = arrange([Ranking((row(4, 8),))], World(), tokens=100, rows=None, pad_id=0)
    with pytest.raises(KeyError):
        table.rows(stranger)


def test_a_table_is_computed_once(tmp_path: Path) -> None:
    first, second, other = Computed(), Computed(), Computed()
    opened(tmp_path, first)
    assert first.calls == 3  # seven rows in groups of at most three
    assert opened(tmp_path, second).take("logprobs", np.arange(3)).tolist() == [1, 2, 5]
    assert second.calls == 0
    opened(tmp_path, other, {"a": 2})
    assert other.calls == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_the_folder_says_what_it_depends_on(tmp_path: Path) -> None:
    opened(tmp_path, Computed(), {"model": "x", "asked": {"dtype": "fp32"}})
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / MANIFEST).read_text()) == {"model": "x", "asked": {"dtype": "fp32"}}
    assert {file.name for file in folder.iterdir()} == {MANIFEST, "logprobs.npy", "ids.npy"}
    assert np.load(folder / "logprobs.npy").shape == (21,)
    assert np.load(folder / "ids.npy").dtype == np.int32


def test_interrupted_writing_leaves_no_table(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        opened(tmp_path, Computed(fail_at=3))
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".writing-")] == []
    again = Computed()
    assert opened(tmp_path, again).take("logprobs", np.arange(21))[-3:].tolist() == [7, 8, 11]
    assert again.calls == 3
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_without_its_manifest_is_made_anew(tmp_path: Path) -> None:
    opened(tmp_path, Computed())
    (folder,) = tmp_path.iterdir()
    (folder / MANIFEST).unlink()
    (folder / "logprobs.npy").write_bytes(b"half")
    again = Computed()
    opened(tmp_path, again)
    assert again.calls == 3


def test_a_table_that_was_cut_short_is_made_anew(tmp_path: Path) -> None:
    opened(tmp_path, Computed())
    (folder,) = tmp_path.iterdir()
    content = (folder / "logprobs.npy").read_bytes()
    (folder / "logprobs.npy").write_bytes(content[: len(content) // 2])
    again = Computed()
    assert opened(tmp_path, again).take("logprobs", np.arange(3)).tolist() == [1, 2, 5]
    assert again.calls == 3


def test_the_fingerprint_holds_weights_rows_and_what_was_asked(tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    base = fingerprint(str(model), EXAMPLES, {"dtype": "fp32"})
    assert fingerprint(str(model), list(EXAMPLES), {"dtype": "fp32"}) == base
    # Another place with the same content is the same model; a tokenizer file changes rows, not numbers.
    (model / "notes.txt").write_text("mine")
    assert fingerprint(str(model), EXAMPLES, {"dtype": "fp32"}) == base
    assert fingerprint(str(tiny_folder), EXAMPLES, {"dtype": "fp32"}) == base
    others = [
        fingerprint(str(model), EXAMPLES, {"dtype": "bf16"}),
        fingerprint(str(model), EXAMPLES, {"dtype": "fp32", "top_k": 4}),
        fingerprint(str(model), EXAMPLES[:-1], {"dtype": "fp32"}),
        fingerprint(str(model), [EXAMPLES[1], EXAMPLES[0], *EXAMPLES[2:]], {"dtype": "fp32"}),
        # Another token, the same tokens with another one trained, and the same tokens read elsewhere.
        fingerprint(str(model), [row(0, 1, 3, trained=2), *EXAMPLES[1:]], {"dtype": "fp32"}),
        fingerprint(str(model), [row(0, 1, 2, trained=1), *EXAMPLES[1:]], {"dtype": "fp32"}),
        fingerprint(
            str(model), [ScoredExample([0, 1, 2], bytes(3), ORIGIN, positions=(2,)), *EXAMPLES[1:]], {"dtype": "fp32"}
        ),
        # Word 2 asked after token 0; and the same numbers as four tokens of which nothing is asked.
        fingerprint(
            str(model), [ScoredExample([1, 2], bytes(2), ORIGIN, positions=(0,), token_ids=(2,))], {"dtype": "fp32"}
        ),
        fingerprint(str(model), [ScoredExample([1, 2, 0, 2], bytes(4), ORIGIN)], {"dtype": "fp32"}),
    ]
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    others.append(fingerprint(str(model), EXAMPLES, {"dtype": "fp32"}))
    (model / "model.safetensors").write_bytes((tiny_folder / "model.safetensors").read_bytes())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    others.append(fingerprint(str(model), EXAMPLES, {"dtype": "fp32"}))
    every = [json.dumps(found, sort_keys=True) for found in (base, *others)]
    assert len(set(every)) == len(every)


@pytest.fixture
def recipe_of(tiny_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    def make(method: str, *overrides: str) -> Any:
        path = write_recipe(tmp_path, tiny_folder, method)
        return load_recipe(str(path), ["run.steps=2", "run.export=false", *overrides])

    return make


def made(tmp_path: Path) -> int:
    return len(list((tmp_path / "runs" / "tables").iterdir()))


def refusing(*_: Any) -> Any:
    raise AssertionError("the frozen model was loaded although its table is there")


def test_a_second_run_does_not_load_the_reference(recipe_of, tmp_path: Path, monkeypatch) -> None:
    words = ["preference.precompute=true"]
    train_offline(recipe_of("dpo", *words), Console.silent())
    monkeypatch.setattr(caching, "load_reference", refusing)
    train_offline(recipe_of("dpo", *words, "run.name=second"), Console.silent())
    # Another method, rate and micro-batch size ask the reference for the same.
    train_offline(
        recipe_of("ipo", *words, "run.name=third", "optim.lr=2e-3", "batch.tokens=300", "preference.beta=0.3"),
        Console.silent(),
    )
    assert made(tmp_path) == 1
    with pytest.raises(AssertionError, match="although its table is there"):
        train_offline(recipe_of("dpo", *words, "run.name=fourth", "data.system=Be short."), Console.silent())


@pytest.mark.slow
def test_what_changes_the_numbers_makes_another_table(recipe_of, tiny_folder: Path, tmp_path: Path) -> None:
    changes = [
        [],
        ["data.system=Be short."],
        ["model.dtype=bf16"],
        ["data.val=[]"],
    ]
    for number, words in enumerate(changes):
        train_offline(recipe_of("dpo", "preference.precompute=true", f"run.name=n{number}", *words), Console.silent())
        assert made(tmp_path) == number + 1
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("<|im_start|>", "<|im_start|> "))
    train_offline(
        recipe_of("dpo", "preference.precompute=true", "run.name=template", f"model.path={model}"), Console.silent()
    )
    assert made(tmp_path) == len(changes) + 1


@pytest.mark.slow
def test_a_teachers_table_depends_on_its_words_and_temperature(recipe_of, tmp_path: Path, monkeypatch) -> None:
    teacher = tmp_path / "teacher"
    write_tiny(teacher, seed=5, hidden=32, layers=1)
    common = [f"distill.teacher={teacher}"]
    for number, words in enumerate((["distill.top_k=4"], ["distill.top_k=5"], ["distill.temperature=2.0"])):
        words = ["distill.top_k=4", *words]
        train_offline(recipe_of("distill", *common, f"run.name=n{number}", *words), Console.silent())
        assert made(tmp_path) == number + 1
    monkeypatch.setattr(caching, "load_teacher", refusing)
    # The divergence and its weight are the student's affair.
    words = ["distill.top_k=4", "distill.divergence=jsd", "distill.coefficient=0.9", "run.name=again"]
    train_offline(recipe_of("distill", *common, *words), Console.silent())


def logits(folder: Path, examples: Sequence[Example]) -> list[torch.Tensor]:
    """Of each sequence by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(e.ids)]), use_cache=False).logits[0].double() for e in examples]


def stored(recipe: Any, tmp_path: Path) -> tuple[Path, list[Example]]:
    train_offline(recipe, Console.silent())
    prepared = offline.prepare_offline(recipe, explain("cpu")[0], 1, Console.silent())
    assert prepared.val is not None
    (folder,) = (tmp_path / "runs" / "tables").iterdir()
    return folder, [*prepared.train.examples, *prepared.val.examples]


def test_the_reference_is_what_transformers_computes(recipe_of, tiny_folder: Path, tmp_path: Path) -> None:
    folder, examples = stored(recipe_of("dpo", "preference.precompute=true"), tmp_path)
    assert len(examples) == 2 * (24 + 7)
    wanted = []
    for example, found in zip(examples, logits(tiny_folder, examples), strict=True):
        every = found.log_softmax(-1)
        wanted += [float(every[place, word]) for place, word in example.scored_tokens()]
    assert np.load(folder / "logprobs.npy").tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_the_teacher_is_what_transformers_computes(recipe_of, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    write_tiny(teacher, seed=5, hidden=32, layers=1)
    words = [f"distill.teacher={teacher}", "distill.top_k=3", "distill.temperature=1.5"]
    folder, examples = stored(recipe_of("distill", *words), tmp_path)
    ids, logprobs, start = np.load(folder / "ids.npy"), np.load(folder / "logprobs.npy"), 0
    for example, found in zip(examples, logits(teacher, examples), strict=True):
        every = (found / 1.5).log_softmax(-1)
        for place, _ in example.scored_tokens():
            values, words_ = every[place].sort(descending=True)
            assert ids[start].tolist() == words_[:3].tolist()
            rest = float(values[3:].exp().sum().log())
            assert logprobs[start].tolist() == pytest.approx([*values[:3].tolist(), rest], abs=1e-4)
            start += 1
    assert start == len(ids) == len(logprobs)


@pytest.mark.slow
def test_a_run_from_a_table_is_that_beside_a_live_model(recipe_of, tmp_path: Path) -> None:
    """A table of every word leaves nothing out."""
    from lockstep.run.metrics import read_metrics

    teacher = tmp_path / "teacher"
    write_tiny(teacher, seed=5, hidden=32, layers=1)
    pairs = {
        "dpo": ([], ["preference.precompute=true"]),
        "distill": ([f"distill.teacher={teacher}"], [f"distill.teacher={teacher}", "distill.top_k=99999"]),
    }
    for method, variants in pairs.items():
        losses = []
        for name, words in zip(("live", "disk"), variants, strict=True):
            train_offline(recipe_of(method, f"run.name={method}-{name}", "run.steps=4", *words), Console.silent())
            history = read_metrics(tmp_path / "runs" / f"{method}-{name}" / "metrics.jsonl")
            losses.append([(m["train/loss"], m.get("val/loss", 0.0)) for _, m in history])
        flat = [[value for pair in found for value in pair] for found in losses]
        assert flat[1] == pytest.approx(flat[0], abs=1e-4)
