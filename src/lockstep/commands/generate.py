"""A loaded model that answers, in pieces as its tokens come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from lockstep.commands.options import as_options, refuse_judge
from lockstep.data.chat import render_prompt
from lockstep.data.vanished import refuse_vanished
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.kernels.wide_products import prepare_products
from lockstep.model.load import load_config, load_tokenizer, refuse_foreign_tokenizer, with_lora
from lockstep.model.pretrained import whole_model
from lockstep.model.resolve import model_folder
from lockstep.recipe.schema import Lora
from lockstep.rollout.ending import end_ids
from lockstep.rollout.hf import HfEngine
from lockstep.serve.text import TextStream
from lockstep.types import Message, Origin, Request, Sampling

_HERE = Origin("the prompt", 0)
Hear = Callable[[str], None]


def silent(piece: str) -> None:
    """Nobody listens while it speaks."""


class Conversation:
    """A loaded model that answers. Any language model that transformers generates from will do: none is trained."""

    def __init__(
        self,
        model: str,
        device: str,
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        system: str | None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        adapter: str | None = None,
    ):
        from transformers import AutoModelForCausalLM

        chosen = select(device)
        folder = model_folder(model)
        self.tokenizer = load_tokenizer(folder)
        refuse_judge(folder, model)
        refuse_foreign_tokenizer(self.tokenizer, load_config(folder).get_text_config().vocab_size, folder)
        loaded = whole_model(AutoModelForCausalLM, folder, f"model.path {folder}", "its weights", dtype="auto")
        prepare_products(loaded.dtype)
        if adapter is not None:
            # The layers of the model itself carry the adapter then.
            try:
                loaded = with_lora(loaded, Lora(adapter=adapter), seed=0).base_model.model
            except Refusal as refusal:
                raise as_options(refusal, {"model.lora.adapter": "--adapter"}) from refusal
        self.model = loaded.to(chosen.torch_device()).eval()
        self.context: int | None = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
        """The most tokens of all that was said and the answer, where the model tells."""
        stops = tuple(end_ids(self.model, self.tokenizer))
        self.sampling = Sampling(
            max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stop_ids=stops, seed=seed
        )
        self.engine = HfEngine(lambda: nullcontext(self.model), self.tokenizer.decode)
        self.said = 0
        self.interruptible = False
        """Whether Ctrl-C ends a reply, which then is what was said so far, or the program."""
        self.opening: list[Message] = [{"role": "system", "content": system}] if system else []

    def answer(self, prompt: str, hear: Hear = silent) -> str:
        """The reply to one user message; `hear` is given its pieces."""
        if not self.tokenizer.chat_template:
            if self.opening:
                raise Refusal.at("--system", "the model has no chat template to write it in", "remove it")
            return self.continue_text(prompt, hear)
        return self.reply([*self.opening, {"role": "user", "content": prompt}], hear)

    def reply(self, messages: list[Message], hear: Hear = silent) -> str:
        if not self.tokenizer.chat_template:
            raise Refusal.at("--chat", "the model has no chat template", "give a prompt with --raw")
        text = render_prompt(self.tokenizer, messages, _HERE)
        try:
            refuse_vanished(text, messages, (), _HERE)
        except Refusal as refusal:
            raise Refusal.at("the prompt", refusal.problems[0].why, "say it in what the user says") from refusal
        return self._generate(self.tokenizer(text, add_special_tokens=False)["input_ids"], hear)

    def continue_text(self, prompt: str, hear: Hear = silent) -> str:
        ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise Refusal.at("prompt", "is empty")
        return self._generate(ids, hear)

    def _generate(self, ids: list[int], hear: Hear) -> str:
        sampling = self.sampling
        if self.context:
            left = self.context - len(ids)
            if left < 1:
                why = f"has {len(ids)} tokens, and the model's context is {self.context}"
                raise Refusal.at("the prompt", why, "say less; in a chat, /undo or /reset")
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        # Each reply draws noise of its own.
        self.said += 1
        stream = TextStream(lambda some: str(self.tokenizer.decode(some, skip_special_tokens=True)))
        self.engine.heard = lambda token: hear(stream.push(token))
        try:
            (completion,) = self.engine.generate([Request(ids, key=self.said)], sampling)
            hear(stream.end())
        except KeyboardInterrupt:
            hear(stream.end())
            if not self.interruptible:
                raise
            return stream.text
        finally:
            self.engine.heard = None
        return str(self.tokenizer.decode(completion.ids, skip_special_tokens=True))
