"""One answer, or a conversation, with a model on the console."""

from __future__ import annotations

from contextlib import nullcontext

from transformers import AutoModelForCausalLM

from lockstep.data.chat import render_prompt
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.pretrained import pretrained
from lockstep.model.resolve import model_folder
from lockstep.rollout.ending import end_ids
from lockstep.rollout.hf import HfEngine
from lockstep.run.output import write
from lockstep.types import Message, Origin, Request, Sampling

_HERE = Origin("the prompt", 0)


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
    ):
        chosen = select(device)
        folder = model_folder(model)
        self.tokenizer = load_tokenizer(folder)
        load_config(folder)
        loaded = pretrained(AutoModelForCausalLM, folder, f"model.path {folder}", "its weights", dtype="auto")
        self.model = loaded.to(chosen.torch_device()).eval()
        stops = tuple(end_ids(self.model, self.tokenizer))
        self.sampling = Sampling(
            max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stop_ids=stops, seed=seed
        )
        self.engine = HfEngine(lambda: nullcontext(self.model), self.tokenizer.decode)
        self.said = 0
        self.opening: list[Message] = [{"role": "system", "content": system}] if system else []

    def answer(self, prompt: str) -> str:
        """The reply to one user message."""
        if not self.tokenizer.chat_template:
            return self.continue_text(prompt)
        return self.reply([*self.opening, {"role": "user", "content": prompt}])

    def reply(self, messages: list[Message]) -> str:
        if not self.tokenizer.chat_template:
            raise Refusal.at("--chat", "the model has no chat template", "give a prompt with --raw")
        text = render_prompt(self.tokenizer, messages, _HERE)
        return self._generate(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def continue_text(self, prompt: str) -> str:
        ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise Refusal.at("prompt", "is empty")
        return self._generate(ids)

    def _generate(self, ids: list[int]) -> str:
        # Each reply draws noise of its own.
        self.said += 1
        (completion,) = self.engine.generate([Request(ids, key=self.said)], self.sampling)
        return self.tokenizer.decode(completion.ids, skip_special_tokens=True)


def converse(conversation: Conversation, first: str | None) -> None:
    """Turn by turn until the input ends or an empty line is given."""
    messages = list(conversation.opening)
    said = first
    while True:
        if said is None:
            try:
                said = input("you> ").strip()
            except EOFError:
                write()
                return
        if not said:
            return
        messages.append({"role": "user", "content": said})
        reply = conversation.reply(messages)
        write(f"model> {reply}")
        messages.append({"role": "assistant", "content": reply})
        said = None
