"""A handle on a model: sampling, log-probabilities, gradients, optimizer steps. `lockstep.load` creates one.

    model = lockstep.load("folder", lr=1e-4)
    responses = model.sample(["2+3="], n=8)
    model.forward_backward([r.datum(advantage=1.0) for r in responses], "policy_gradient")
    model.optim_step()

A handle uses one process and one device. For several processes or devices, use `lockstep.train`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.api.losses import (
    Datum,
    LossFunction,
    Per,
    PromptLike,
    Response,
    as_data,
    batch_loss,
    by_scoring,
    checked,
    chosen_loss,
)
from lockstep.data.encode.chat import check_messages
from lockstep.data.encode.chat_template import is_named, template_text, turn_ends
from lockstep.data.encode.chat_text import render_prompt
from lockstep.data.encode.encoding import Encoding, as_chat
from lockstep.data.encode.responses import ResponseEncoder
from lockstep.data.updates import Update, arrange, row_size
from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.rotary import fixed_length
from lockstep.kernels.sampling import Truncation
from lockstep.model.export_check import probe_of
from lockstep.model.export_folder import export_model
from lockstep.model.policy import Policy, Scoring
from lockstep.model.resolve import folders_of
from lockstep.model.text_model import text_config
from lockstep.model.weights import restore_weights, trained_weights
from lockstep.recipe.keys_data import Data
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.engine import end_ids
from lockstep.rollout.engine_check import check_engine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.run import checkpoint as checkpoints
from lockstep.run.folder import RunFolder
from lockstep.train.models import score_targets
from lockstep.train.step import Learner
from lockstep.types import Completion, Example, Origin, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Gathered:
    """The number of tokens or examples in the gradients that `forward_backward` accumulated since the last step."""

    count: int = 0
    per: Per | None = None


class Handle:
    """A model that samples, scores and trains. `optim_step` divides summed losses by the token or example count."""

    def __init__(
        self,
        settings: Model,
        tokenizer: PreTrainedTokenizerBase,
        learner: Learner,
        reference: Policy | None,
        device: Device,
        data: Data,
        lr: float,
        batch_tokens: int,
        seed: int,
    ):
        self.settings, self.tokenizer, self.lr, self.seed = settings, tokenizer, lr, seed
        self.steps = 0
        self.sampled = 0
        policy = learner.module
        assert isinstance(policy, Policy)
        self._policy, self._learner, self._reference, self._batch_tokens = policy, learner, reference, batch_tokens
        self._engine = NativeEngine(policy, device, RolloutSettings(), tokenizer.decode)
        self._engine_checked = False
        self._encoding = Encoding(tokenizer, data)
        self._encode = ResponseEncoder(self._encoding)
        self._stop_ids = tuple(sorted({*end_ids(policy.causal_lm, tokenizer), *turn_ends(tokenizer, data)}))
        self._files = {RunFolder(Path()).template.name: template_text(data.template)} if is_named(data) else {}
        self._gathered = _Gathered()

    # Examples ----------------------------------------------------------------------------------------------------

    def example(self, prompt: str | Sequence[Any], response: str, **columns: Any) -> Datum:
        """Returns an example of a prompt and a response to train on, tokenised like the rows of a recipe."""
        return self._datum(prompt, [response], columns)

    def pair(self, prompt: str | Sequence[Any], chosen: str, rejected: str, **columns: Any) -> Datum:
        """Returns an example of a preference pair: two responses to one prompt, the better one first."""
        return self._datum(prompt, [chosen, rejected], columns)

    def tokens(self, ids: Sequence[int], trained: Sequence[int], **columns: Any) -> Datum:
        """Returns an example of token ids with a loss mask: 1 for trained tokens, 0 for context."""
        if len(ids) != len(trained) or not set(trained) <= {0, 1}:
            raise Refusal.at(
                "trained",
                f"{len(trained)} entries for {len(ids)} tokens, or values other than 0 and 1",
                "give one 0 or 1 per token",
                code="wrong-count",
            )
        return Datum((Example(list(ids), [int(one) for one in trained], Origin("tokens of an example", 0)),), columns)

    def encode(self, prompt: PromptLike) -> list[int]:
        """Returns the token ids of a prompt."""
        origin = Origin("prompt", 0)
        if not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt):
            ids = [token for token in prompt if isinstance(token, int)]
        elif isinstance(prompt, str) and not self._encoding.templated:
            ids = self._encoding.opening + self._encoding.ids(prompt)
        else:
            messages = as_chat(prompt)
            self._encoding.need_template(origin)
            check_messages([*messages, {"role": "assistant", "content": "?"}], origin)
            ids = self._encoding.ids(render_prompt(self.tokenizer, messages, origin))
        if not ids:
            raise Refusal.at(
                "prompt", f"{prompt!r} has no tokens", "give a prompt that is not empty", code="empty-prompt"
            )
        return ids

    # Sampling and training ---------------------------------------------------------------------------------------

    def sample(
        self,
        prompts: str | Sequence[PromptLike],
        *,
        n: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: str | Sequence[str] = (),
    ) -> list[Response]:
        """Samples `n` responses per prompt, grouped by prompt. Temperature 0 is greedy.

        Each call samples new responses; the same sequence of calls with the same `seed` gives the same responses.
        Log-probabilities are those of the sampling distribution; for greedy decoding, those of the unmodified model.
        """
        if n > 1 and not temperature:
            raise Refusal.at(
                "n", f"{n} greedy responses would be identical", "set a temperature", code="identical-samples"
            )
        # Temperature 0 is valid in `sample`, but not in a recipe.
        kinds = {"n": n, "max_tokens": max_tokens, "temperature": 1.0 if temperature == 0 else temperature}
        stops = [stop] if isinstance(stop, str) else list(stop)
        checked(RolloutSettings, **kinds, top_p=top_p, top_k=top_k, min_p=min_p, stop=stops)
        prompt_ids = [self.encode(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        for number, ids in enumerate(prompt_ids):
            self._refuse_unknown_tokens(ids, f"prompt {number}")
        self._refuse_too_long(prompt_ids, max_tokens)
        truncation = Truncation(top_k, top_p, min_p)
        scoring = Scoring(temperature or 1.0, truncation if truncation.active else None)
        sampling = Sampling(
            max_tokens,
            temperature,
            top_p,
            top_k,
            min_p,
            stop_ids=self._stop_ids,
            stop_strings=tuple(stops),
            seed=self.seed,
            score_truncated=True,
        )
        made = self._generate(prompt_ids, n, sampling)
        return [self._response(one, prompt_ids[one.request], scoring) for one in made]

    def _response(self, made: Completion, prompt: Sequence[int], scoring: Scoring) -> Response:
        text = str(self.tokenizer.decode(made.ids, skip_special_tokens=True))
        ids, logprobs = tuple(made.ids), tuple(made.logprobs)
        return Response(made.request, made.sample, tuple(prompt), ids, logprobs, text, made.stop, scoring)

    @torch.no_grad()
    def _generate(self, prompt_ids: Sequence[list[int]], n: int, sampling: Sampling) -> list[Completion]:
        """Returns `n` completions per prompt, in the order of the prompts."""
        requests = [Request(ids, self.sampled + number, n) for number, ids in enumerate(prompt_ids)]
        self.sampled += len(prompt_ids)
        if not self._engine_checked:
            engine, where = self._engine, self._learner.device
            check_engine(engine, self._policy, where, self.settings.path, paged_on=engine.device)
            self._engine_checked = True
        return sorted(self._engine.generate(requests, sampling), key=lambda one: (one.request, one.sample))

    def logprobs(self, examples: Sequence[Datum | Response], *, reference: bool = False) -> list[torch.Tensor]:
        """Returns the log-probabilities of the trained tokens: one CPU vector per sequence (two for a preference pair).

        With `reference`, the reference model computes the log-probabilities: the frozen copy or, with LoRA, the model
        without its adapter.
        """
        data = as_data(examples)
        found: dict[int, list[torch.Tensor]] = {}
        with self._scored_by(reference) as policy:
            for scoring, numbers in by_scoring(data):
                update = self._arranged([data[number] for number in numbers])
                with _scored_as(policy, scoring):
                    flat = score_targets(
                        policy, update, self._learner.world, self._learner.device, lambda scores: scores.logprobs_K
                    )
                vectors = iter(flat.split(update.lengths_S.tolist()))
                for number in numbers:
                    found[number] = [next(vectors) for _ in data[number].sequences]
        return [vector for number in sorted(found) for vector in found[number]]

    def forward_backward(
        self,
        examples: Sequence[Datum | Response],
        loss: str | LossFunction,
        *,
        per: Per | None = None,
        **settings: Any,
    ) -> dict[str, float]:
        """Accumulates the gradient of the summed losses and counts tokens or examples for the division in `optim_step`.

        `loss` is the recipe name of a built-in loss (then `settings` are its recipe keys), or a function. A function is
        called as `loss(*logprobs, **columns)` for each example and must return a sum. `per` is the unit that
        `optim_step` counts and divides by. The default is `token` (trained tokens) for supervised and policy losses,
        and `example` for pair losses and functions. So one call with all examples and several calls with parts of them
        give the same optimizer step. Returns `loss` and the metrics of the loss, as means over the examples or tokens
        of this call.
        """
        data = as_data(examples)
        chosen = chosen_loss(loss, per, settings)
        if self._gathered.per not in (None, chosen.per):
            raise Refusal.at(
                "per",
                f"the gradients are sums over {self._gathered.per}s, and loss {chosen.name} counts {chosen.per}s",
                "set the same per= in all forward_backward calls of a step, or call optim_step between them",
                code="mixed-units",
            )
        count = len(data) if chosen.per == "example" else sum(datum.targets for datum in data)
        totals: dict[str, float] = {"loss": 0.0}
        try:
            for scoring, numbers in by_scoring(data):
                update = self._arranged([data[number] for number in numbers])
                with _scored_as(self._policy, scoring):
                    outcome = self._learner.forward_backward(update.batches, batch_loss(chosen, update), 1.0)
                for name, value in {"loss": outcome.loss, **outcome.sums}.items():
                    totals[name] = totals.get(name, 0.0) + value
        except BaseException:
            # A failed call must not contribute to the next optimizer step.
            self.forget()
            raise
        self._gathered = _Gathered(self._gathered.count + count, chosen.per)
        return {name: value / count for name, value in totals.items()}

    def optim_step(self, *, lr: float | None = None) -> dict[str, float]:
        """Runs one AdamW step with the accumulated gradients divided by the number of tokens or examples; `lr` replaces
        the handle's."""
        if not self._gathered.count:
            raise Refusal.at("optim_step", "there is no gradient", "call forward_backward first", code="missing-input")
        rate = self.lr if lr is None else lr
        if not (math.isfinite(rate) and rate >= 0):
            raise Refusal.at("lr", f"{rate} is not a valid learning rate", "give 0 or more", code="out-of-range")
        try:
            metrics = self._learner.optim_step(rate, divisor=float(self._gathered.count))
        except BaseException:
            self.forget()
            raise
        self._gathered = _Gathered()
        self.steps += 1
        return {name.partition("/")[2]: value for name, value in metrics.items()}

    def forget(self) -> None:
        """Discards the accumulated gradients."""
        self._learner.optimizer.forget()
        self._gathered = _Gathered()

    # Folders -----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Writes a checkpoint `folder/step_N` atomically. See `restore`."""
        if self._gathered.count:
            raise Refusal.at(
                "save",
                "the accumulated gradients would not be saved in the checkpoint",
                "call optim_step, or forget()",
                code="unsaved-gradients",
            )
        if not self.steps:
            raise Refusal.at(
                "save", "nothing was trained yet", "call optim_step, or export the model", code="nothing-trained"
            )
        target = checkpoints.folder_of(Path(folder), self.steps)
        if target.exists():
            raise Refusal.at(str(target), "already exists", "choose another folder", code="already-exists")
        scale = self._learner.scale
        state = checkpoints.State(
            step=self.steps,
            rows_seen=0,
            recipe={"model": self.settings.model_dump(mode="json"), "run": {"seed": self.seed}},
            data={},
            world_size=1,
            loss_scale=[scale.value, float(scale.quiet)] if scale else [],
            skipped=self._learner.skipped,
            end_tokens=list(self._stop_ids),
            kind="policy",
            files=self._files,
            carried={"sampled": float(self.sampled)},
            decay_rule="role",
            probe=probe_of(self._policy, self._learner.device),
        )
        tensors = {
            checkpoints.MODEL: trained_weights(self._policy.stored),
            checkpoints.OPTIMIZER: self._learner.optimizer.full_state(),
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        return checkpoints.save(Path(folder), state, tensors)

    def restore(self, folder: str | Path) -> None:
        """Restores a checkpoint of `save`, or the newest checkpoint in a folder. Model and settings must match the
        checkpoint."""
        steps = checkpoints.steps_in(Path(folder))
        path = checkpoints.folder_of(Path(folder), steps[-1]) if steps else Path(folder)
        damage = checkpoints.damage_of(path)
        if damage is not None:
            raise Refusal.at(
                str(path),
                f"is not a complete checkpoint: {damage}",
                "give a folder that save() wrote",
                code="damaged-checkpoint",
            )
        found = checkpoints.read(path)
        saved, current = found.state.recipe["model"], self.settings.model_dump(mode="json")
        for key in ("dtype", "lora", "quantize"):
            if saved[key] != current[key]:
                raise Refusal.at(
                    str(path),
                    f"was saved with {key}={saved[key]!r}, and the handle has {current[key]!r}",
                    "call lockstep.load with the settings of the checkpoint",
                    code="changed-setting",
                )
        restore_weights(self._policy.stored, found.weights, str(path))
        self._learner.optimizer.restore(found.optimizer)
        scale = self._learner.scale
        if scale is not None:
            scale.value, scale.quiet = found.state.loss_scale[0], int(found.state.loss_scale[1])
        self._learner.skipped, self.steps = found.state.skipped, found.state.step
        self.sampled = int(found.state.carried["sampled"])
        self.forget()

    def export(self, folder: str | Path, *, adapter: bool = False) -> Path:
        """Writes a Hugging Face folder with any LoRA adapter merged, or (`adapter`) only the adapter in PEFT format."""
        out = Path(folder)
        weights = trained_weights(self._policy.stored)
        how: dict[str, Any] = {
            "where": "the handle",
            "folders": folders_of(self.settings),
            "end_tokens": self._stop_ids,
            "files": self._files,
        }
        probe = probe_of(self._policy, self._learner.device)
        verified = export_model(self.settings, weights, out, adapter=adapter, probe=probe, **how)
        if not verified.done:
            warnings.warn(f"{out}: {verified.sentence}", stacklevel=2)
        return out

    # Internals ---------------------------------------------------------------------------------------------------

    def _datum(self, prompt: Any, responses: list[str], columns: dict[str, Any]) -> Datum:
        origin = Origin(f"example {responses[0][:40]!r} after", 0)
        turns = prompt if isinstance(prompt, str) else list(prompt)
        return Datum(tuple(self._encode(turns, responses, origin)), columns)

    def _arranged(self, data: Sequence[Datum]) -> Update[Datum]:
        moving = fixed_length(text_config(self._policy.causal_lm.config)) is not None
        # In a packed batch, the two sequences of a pair share their prompt. A shared prompt gives wrong results for
        # models whose position embeddings depend on the sequence length.
        packed = not (moving and any(len(datum.sequences) > 1 for datum in data))
        for datum in data:
            for sequence in datum.sequences:
                self._refuse_unknown_tokens(sequence.ids, str(datum.origin))
                if self._context is not None and len(sequence) > self._context:
                    raise Refusal.at(
                        str(datum.origin),
                        f"has {len(sequence)} tokens, more than the model's context of {self._context}",
                        "shorten it",
                        code="over-context",
                    )
            if packed and row_size(datum, packed=True) > self._batch_tokens:
                raise Refusal.at(
                    str(datum.origin),
                    f"has {row_size(datum, packed=True)} tokens, more than batch_tokens={self._batch_tokens}",
                    "give lockstep.load a larger batch_tokens",
                    code="over-batch-tokens",
                )
        pad = self.tokenizer.pad_token_id
        return arrange(
            data,
            self._learner.world,
            tokens=self._batch_tokens if packed else None,
            rows=None if packed else 1,
            pad_id=pad if pad is not None else 0,
        )

    @contextmanager
    def _scored_by(self, reference: bool) -> Iterator[Policy]:
        """Yields the model that computes log-probabilities: the policy or the reference."""
        if not reference:
            yield self._policy
        elif self._reference is not None:
            yield self._reference
        elif self.settings.lora is not None:
            with self._policy.as_reference():
                yield self._policy
        else:
            raise Refusal.at(
                "reference",
                "the handle has no reference",
                "use lockstep.load(..., reference=True)",
                code="missing-input",
            )

    @property
    def _context(self) -> int | None:
        return getattr(text_config(self._policy.causal_lm.config), "max_position_embeddings", None)

    def _refuse_unknown_tokens(self, ids: Sequence[int], where: str) -> None:
        vocabulary = self._policy.causal_lm.get_input_embeddings().weight.shape[0]
        for position, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                why = f"token {token} at position {position} is not one of the model's {vocabulary:,} tokens"
                raise Refusal.at(where, why, "encode the text with this model's tokenizer", code="unknown-token")

    def _refuse_too_long(self, prompt_ids: Sequence[Sequence[int]], max_tokens: int) -> None:
        context = self._context
        for number, ids in enumerate(prompt_ids):
            if context is not None and len(ids) + max_tokens > context:
                raise Refusal.at(
                    f"prompt {number}",
                    f"{len(ids)} tokens plus a response of {max_tokens} exceed the model's context of {context}",
                    "lower max_tokens, or shorten the prompt",
                    code="over-context",
                )


@contextmanager
def _scored_as(policy: Policy, scoring: Scoring) -> Iterator[None]:
    before, policy.scoring = policy.scoring, scoring
    try:
        yield
    finally:
        policy.scoring = before
