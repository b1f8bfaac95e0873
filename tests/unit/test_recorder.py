"""`lockstep_record.py`: what it writes, that it changes nothing, and that compare and replay find faults with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep_record
from lockstep.errors import Refusal
from lockstep.parity.compare.compare_runs import CompareOptions, compare_logs
from lockstep.parity.compare.logs import read_log
from lockstep.parity.replay.foreign_recording import compare_recordings, replay_recording
from lockstep.tape.digest import digest
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_recorder import sampled
from lockstep.tape.tape_rows import fed_examples
from lockstep_record import MicroBatch, record
from recorder.loops import UPDATES, plain, rows
from taped_runs import write_lively

PARTS = (slice(0, 4), slice(4, 8))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_lively(tmp_path_factory.mktemp("recorder") / "model"))


@pytest.fixture(scope="module")
def tape(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "tape"
    plain(model, str(folder))
    return folder


def test_it_needs_nothing_but_torch() -> None:
    """No import of lockstep, nor of anything besides torch that Python does not bring."""
    code = (
        "import sys, torch; before = {m.split('.')[0] for m in sys.modules};"
        f"sys.path.insert(0, {str(Path(lockstep_record.__file__).parent)!r}); import lockstep_record;"
        "after = {m.split('.')[0] for m in sys.modules} - before - set(sys.stdlib_module_names);"
        "print(sorted(after))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['lockstep_record']"


@pytest.mark.parametrize("shape", [(7,), (1,), (64, 3), (33, 257), (5, 6, 32), (3, 0), (0,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_digests_are_those_of_the_tape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 9).to(dtype)
    torch.testing.assert_close(lockstep_record.digest(tensor), digest(tensor).float(), rtol=2e-5, atol=2e-4)


def test_large_tensors_are_digested_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn((50, 12), generator=torch.Generator().manual_seed(4))
    complete = lockstep_record.digest(tensor)
    monkeypatch.setattr(lockstep_record, "CHUNK", 100)
    torch.testing.assert_close(lockstep_record.digest(tensor), complete, rtol=1e-6, atol=1e-6)
    bad = lockstep_record.digest(torch.tensor([[1.0, float("nan")]]))
    assert bad[3] == 1


def test_signs_and_samples_are_the_same_in_every_version_of_torch() -> None:
    """Fixed numbers: torch 2.1, 2.5 and 2.13 draw them from these seeds."""
    assert (
        "".join("+" if sign > 0 else "-" for sign in lockstep_record._signs(5, 1).flatten()) == "---+-+-+-+---+-+-+++"
    )
    assert lockstep_record._sampled(1000)[:6].tolist() == [907, 79, 47, 848, 851, 974]
    assert torch.equal(lockstep_record._sampled(1000), sampled(1000))


@pytest.mark.slow
def test_recording_changes_no_number(model: str, tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bit of the weights without modules; with them gradients of a snapshot may be summed in another order."""
    recorded = plain(model, str(tmp_path / "tape"), modules=())
    monkeypatch.setattr("recorder.loops.record", lambda *_, **__: nullcontext(_Silent()))
    alone = plain(model, str(tmp_path / "none"))
    for (name, a), b in zip(recorded.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert torch.nn.utils.clip_grad_norm_.__module__.startswith("torch.nn.utils")
    assert not recorded._forward_hooks
    assert not recorded._forward_pre_hooks
    with_modules, without = (read_log(str(path)).metrics for path in (tape, tmp_path / "tape"))
    assert with_modules["train/loss"].values[0] == without["train/loss"].values[0]
    for name in ("train/loss", "train/grad_norm"):
        assert with_modules[name].values.tolist() == pytest.approx(without[name].values.tolist(), rel=1e-4)


class _Silent:
    def log(self, **_: Any) -> None: ...


def test_batch_log_probs_and_slopes_by_hand(model: str, tape: Path) -> None:
    """Against a plain forward pass: all tokens of the rows without padding, and -1/60 where the loss has a token."""
    step = TapeFolder(tape).read_step(1)
    ids, mask = rows(0)
    fed = fed_examples(step.tensors)
    assert [example.ids for example in fed] == [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    network = AutoModelForCausalLM.from_pretrained(model).float()
    answers, pulls = [], []
    for part in PARTS:
        with torch.no_grad():
            logp = torch.log_softmax(network(input_ids=ids[part], attention_mask=mask[part]).logits, -1)
        for row, keep, logprobs in zip(ids[part], mask[part], logp, strict=True):
            alive = keep.nonzero().flatten().tolist()
            for before, at in pairwise(alive):
                answers.append(float(logprobs[before, row[at]]))
                pulls.append(-1 / 60 if at > 6 else 0.0)
    torch.testing.assert_close(step.tensors["train/0/answers"], torch.tensor(answers), rtol=0, atol=1e-5)
    torch.testing.assert_close(step.tensors["train/0/pulls"], torch.tensor(pulls), rtol=0, atol=1e-6)
    update = step.info["updates"][0]
    expected = -sum(a for a, p in zip(answers, pulls, strict=True) if p) / 60
    assert update["loss"] == pytest.approx(expected, rel=1e-5)
    assert update["slopes_exact"]
    assert (update["clip"], update["micro_batches"]) == (1.0, 2)


def test_gradients_and_weights_by_hand(model: str, tape: Path) -> None:
    """Against an update that torch makes without the recorder."""
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    ids, mask = rows(0)
    for part in PARTS:
        logp = torch.log_softmax(network(input_ids=ids[part], attention_mask=mask[part]).logits, -1)
        trained = (mask[part, 1:] * mask[part, :-1]).clone()
        trained[:, :6] = 0
        (-(logp[:, :-1].gather(2, ids[part, 1:, None])[..., 0] * trained).sum() / 60).backward()
    step = TapeFolder(tape).read_step(1)
    norm = float(torch.stack([p.grad.norm() for p in network.parameters()]).norm())  # type: ignore[union-attr]
    assert step.info["updates"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, parameter in network.named_parameters():
        size = float(parameter.grad.norm())  # type: ignore[union-attr]
        assert float(step.tensors[f"train/0/gradient/{name}"][0]) == pytest.approx(size, rel=1e-4, abs=1e-7), name
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    for name, parameter in network.named_parameters():
        found = step.tensors[f"train/0/weights/{name}"]
        torch.testing.assert_close(found, digest(parameter.detach()).float(), rtol=1e-4, atol=1e-3)


def test_curves_and_steps(tape: Path) -> None:
    folder = TapeFolder(tape)
    assert (folder.steps(), folder.weighed()) == ([1, 2, 3], [1, 3])
    log = read_log(str(tape))
    assert log.kind == "lockstep recording"
    assert log.metrics["train/loss"].steps.tolist() == [1, 2, 3]
    assert log.metrics["tokens"].values.tolist() == [float(rows(update)[1].sum()) for update in range(UPDATES)]


def epsilon(network: Any) -> None:
    network.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2


def backward(network: Any) -> None:
    projection = network.model.layers[1].mlp.up_proj
    forward = projection.forward
    projection.forward = lambda x: _Scaled.apply(forward(x))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1.02


def other_weights(network: Any) -> None:
    with torch.no_grad():
        network.model.layers[0].mlp.up_proj.weight[0] *= 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stage", "module"),
    [
        (epsilon, "log-probs", "model.layers.1.post_attention_layernorm"),
        (backward, "gradient", "model.layers.1.mlp.up_proj"),
        (other_weights, "weights", None),
    ],
)
def test_compare_names_the_first_module_that_differs(
    model: str, tape: Path, tmp_path: Path, fault: Callable[[Any], None], stage: str, module: str | None
) -> None:
    plain(model, str(tmp_path / "faulty"), fault=fault)
    result = compare_recordings(tape, tmp_path / "faulty")
    assert (result.in_step, result.stage, result.step) == (False, stage, 1)
    assert (result.module.module if result.module else None) == module
    if module is None:
        assert result.cause is not None
        assert "before the first update: model.layers.0.mlp.up_proj.weight" in result.cause.what


@pytest.mark.slow
def test_a_repeat_is_in_step(model: str, tape: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain(model, str(tmp_path / "again"))
    assert compare_recordings(tape, tmp_path / "again").in_step
    compare_logs(CompareOptions(str(tape), str(tmp_path / "again")), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["recordings"]["in_step"]
    assert found["recordings"]["steps"] == [1, 2, 3]


@pytest.mark.slow
def test_replay_makes_the_recorded_updates_again(model: str, tape: Path) -> None:
    result = replay_recording(tape, model, ["device=cpu"])
    assert result.in_step
    assert result.steps == [1, 3]
    assert {check.stage for check in result.checks} == {"batch", "log-probs", "gradient", "optimizer", "weights"}
    assert any("loss is not checked" in remark for remark in result.remarks)


@pytest.mark.slow
def test_replay_names_the_module_that_was_wrong_where_it_was_recorded(model: str, tmp_path: Path) -> None:
    plain(model, str(tmp_path / "faulty"), fault=epsilon)
    result = replay_recording(tmp_path / "faulty", model, ["device=cpu"], [1])
    assert result.stage == "log-probs"
    assert result.module is not None
    assert result.module.module == "model.layers.1.post_attention_layernorm"


def test_replay_refuses_a_recording_with_dropout(model: str, tape: Path, tmp_path: Path) -> None:
    """No second run draws the same masks: whatever it found would be blamed on them."""
    shutil.copytree(tape, tmp_path / "tape")
    file = tmp_path / "tape" / "tape.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    manifest["recorder"]["notes"]["dropout"] = "dropout is on"
    file.write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(Refusal, match="was recorded with active dropout"):
        replay_recording(tmp_path / "tape", model, ["device=cpu"])


def test_replay_refuses_another_model(model: str, tape: Path, tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    for file in tape.glob("*"):
        if file.is_file() and not file.name.startswith("weights_"):
            (tmp_path / "tape" / file.name).write_bytes(file.read_bytes())
    assert replay_recording(tmp_path / "tape", model, ["device=cpu"]).steps == [1]
    other = AutoModelForCausalLM.from_pretrained(model)
    other_weights(other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(Refusal, match=r"--model \[other-weights\]: .*up_proj\.weight .*update 1"):
        replay_recording(tmp_path / "tape", str(tmp_path / "other"), ["device=cpu"])
    with pytest.raises(Refusal, match="is not a model folder"):
        replay_recording(tape, str(tmp_path / "nothing"), ["device=cpu"])
    with pytest.raises(Refusal, match="has no recipe"):
        replay_recording(tape, model, ["batch.tokens=5"])


def test_an_entropy_bonus_hides_the_slopes_and_is_reported(model: str, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    ids, _ = rows(0)
    with record(network, optimizer, tmp_path / "tape"):
        logp = torch.log_softmax(network(input_ids=ids).logits, -1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        (-logp[:, :-1].gather(2, ids[:, 1:, None]).mean() - 0.1 * entropy).backward()
        optimizer.step()
    result = replay_recording(tmp_path / "tape", model, ["device=cpu"])
    assert result.in_step
    assert {check.stage for check in result.checks} == {"batch", "log-probs"}
    assert any("Gradients are not checked" in remark for remark in result.remarks)


def test_a_temperature_in_place_and_logits_of_the_last_tokens(model: str, tmp_path: Path) -> None:
    """As verl divides logits, and as TRL asks for those of the completion only."""
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    ids, _ = rows(0)
    with record(network, None, tmp_path / "tape", temperature=0.7):
        logits = network(input_ids=ids, logits_to_keep=6).logits
        logits.div_(0.7)
        logp = torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, -5:, None])[..., 0]
        (-2.0 * logp).sum().backward()
        optimizer.step()
    step = TapeFolder(tmp_path / "tape").read_step(1)
    assert step.tensors["train/0/answers"].shape == (8 * 5,)
    torch.testing.assert_close(step.tensors["train/0/answers"], logp.detach().flatten(), rtol=0, atol=1e-5)
    torch.testing.assert_close(step.tensors["train/0/pulls"], torch.full((40,), -2.0), rtol=1e-4, atol=0)
    assert replay_recording(tmp_path / "tape", model, ["device=cpu"]).in_step


def test_packed_rows_are_split_by_their_positions() -> None:
    call = MicroBatch(
        {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, {}
    )
    assert call.locate(torch.zeros(1, 5, 20))
    assert (call.lengths.tolist(), call.targets.tolist()) == ([3, 2], [2, 1])
    assert call.asked.tolist() == [[0, 6], [1, 7], [0, 9]]
    assert call.index.tolist() == [0, 1, 3]
    assert not call.locate(torch.zeros(1, 5, 9))  # fewer logits than tokens: no vocabulary
    assert call.locate(torch.zeros(1, 5, 1))  # a value for each token
    assert call.asked.tolist() == [[0, 5], [1, 6], [2, 7], [0, 8], [1, 9]]


def test_what_was_discarded_is_not_an_update(model: str, tmp_path: Path) -> None:
    """verl clears gradients that are not finite and makes no step: the next update must not hold their tokens."""
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    with record(network, optimizer, tmp_path / "tape") as recorder:
        for update in range(2):
            ids, _ = rows(update)
            network(input_ids=ids, labels=ids).loss.backward()
            if update == 0:
                optimizer.zero_grad()
        optimizer.step()
    step = TapeFolder(tmp_path / "tape").read_step(1)
    assert step.tensors["fed/ids"].tolist() == rows(1)[0].flatten().tolist()
    assert "discarded" in recorder.notes


def test_a_failure_ends_the_recording_and_not_the_training(model: str, tmp_path: Path) -> None:
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    ids, _ = rows(0)
    folder = tmp_path / "tape"
    with warnings.catch_warnings(record=True) as heard, record(network, optimizer, folder) as recorder:
        warnings.simplefilter("always")
        recorder._write_weights = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        for _ in range(2):
            network(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ["stopped recording at update 1: ZeroDivisionError" in str(w.message) for w in heard].count(True) == 1
    assert "ZeroDivisionError" in json.loads((folder / "tape.json").read_text())["recorder"]["stopped"]
    with pytest.raises(FileExistsError, match="already holds a tape"), record(network, optimizer, folder):
        pass


@pytest.mark.slow
def test_ranks_are_recorded_separately_and_read_together(
    model: str, tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        plain(model, str(tmp_path / "both"), fault=epsilon if rank else None)
    assert sorted(path.name for path in (tmp_path / "both").iterdir()) == ["rank_0", "rank_1"]
    a, b = (read_log(str(tmp_path / "both" / f"rank_{rank}")).metrics["train/loss"].values for rank in range(2))
    mean = read_log(str(tmp_path / "both")).metrics["train/loss"].values
    assert mean.tolist() == pytest.approx(((a + b) / 2).tolist(), rel=1e-12)
    assert compare_recordings(tmp_path / "both", tmp_path / "both").in_step
    monkeypatch.setenv("WORLD_SIZE", "1")
    replayed = replay_recording(tmp_path / "both" / "rank_0", model, ["device=cpu"], [1])
    assert any("sums over ranks" in remark for remark in replayed.remarks)
    with pytest.raises(Refusal, match="nothing-in-common"):
        compare_recordings(tmp_path / "both", tmp_path / "nothing")
