"""`lockstep generate` and its `--chat`: prints answers of a model on the console."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace

from lockstep.commands.without_recipe import as_options, load_generator, refuse_judge, refuse_long_answers
from lockstep.data.encode.chat_text import render_prompt
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.messages import image_placeholder
from lockstep.data.encode.prompt_rows import encoded_prompt
from lockstep.data.encode.template_checks import refuse_dropped_by_template
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.model.load import load_config, load_tokenizer, refuse_foreign_tokenizer, with_lora
from lockstep.model.load_folder import DTYPES
from lockstep.model.pretrained import whole_model
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import LanguageModel, text_config
from lockstep.parallel.world import World
from lockstep.recipe.schema import Lora
from lockstep.rollout.engine import end_ids
from lockstep.rollout.hf import HfEngine
from lockstep.run.console import Console
from lockstep.run.output import write
from lockstep.serve.text_stream import TextStream
from lockstep.types import Message, Origin, Question, Request, Sampling
from lockstep.vision.families import FAMILIES

_HERE = Origin("the prompt", 0)
Hear = Callable[[str], None]


def silent(piece: str) -> None:
    """Discards the streamed text."""


class Conversation:
    """A loaded model that streams its answers. Any language model that transformers can generate with is supported."""

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
        chosen = select(device)
        folder = model_folder(model)
        self.tokenizer = load_tokenizer(folder)
        refuse_judge(folder, model)
        refuse_foreign_tokenizer(self.tokenizer, text_config(load_config(folder)).vocab_size, folder)
        loaded = whole_model(LanguageModel, folder, f"model.path {folder}", "its weights", dtype="auto")
        prepare_products(loaded.dtype)
        if adapter is not None:
            # Use the base model with the LoRA layers inserted, without PEFT's wrapper.
            try:
                loaded = with_lora(loaded, Lora(adapter=adapter), seed=0).base_model.model
            except Refusal as refusal:
                raise as_options(refusal, {"model.lora.adapter": "--adapter"}) from refusal
        config = load_config(folder)
        family = FAMILIES.get(config.model_type)
        self.placeholder = "" if family is None else family.spelled(config, self.tokenizer).pad
        """The token in place of which the model gets a feature of an image, or an empty text."""
        self.model = loaded.to(chosen.torch_device()).eval()
        self.context: int | None = getattr(text_config(loaded.config), "max_position_embeddings", None)
        """The maximum number of tokens of conversation plus answer, or None if the model's config has no limit."""
        stops = tuple(end_ids(self.model, self.tokenizer))
        self.sampling = Sampling(
            max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stop_ids=stops, seed=seed
        )
        self.engine = HfEngine(lambda: nullcontext(self.model), self.tokenizer.decode)
        self.replies = 0
        self.interruptible = False
        """Whether Ctrl-C ends only the current reply instead of the program."""
        self.opening: list[Message] = [{"role": "system", "content": system}] if system else []

    def answer(self, prompt: str, hear: Hear = silent) -> str:
        """Returns the reply to one user message; `hear` is called with each chunk of streamed text."""
        if not self.tokenizer.chat_template:
            if self.opening:
                raise Refusal.at("--system", "the model has no chat template", "remove it", code="no-chat-template")
            return self.continue_text(prompt, hear)
        return self.reply([*self.opening, {"role": "user", "content": prompt}], hear)

    def reply(self, messages: list[Message], hear: Hear = silent) -> str:
        if not self.tokenizer.chat_template:
            raise Refusal.at(
                "--chat", "the model has no chat template", "give a prompt with --raw", code="no-chat-template"
            )
        text = render_prompt(self.tokenizer, messages, _HERE)
        try:
            refuse_dropped_by_template(text, messages, (), _HERE, image_placeholder(self.tokenizer))
        except Refusal as refusal:
            raise Refusal.at(
                "the prompt",
                refusal.problems[0].why,
                "put the text that the template drops into the user message",
                code=refusal.problems[0].code,
            ) from refusal
        return self._generate(self.tokenizer(text, add_special_tokens=False)["input_ids"], hear)

    def continue_text(self, prompt: str, hear: Hear = silent) -> str:
        ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
            raise Refusal.at("prompt", "is empty", code="empty-prompt")
        return self._generate(ids, hear)

    def _generate(self, ids: list[int], hear: Hear) -> str:
        sampling = self.sampling
        if self.placeholder and self.tokenizer.convert_tokens_to_ids(self.placeholder) in ids:
            why = f"contains {self.placeholder}, which is the model's placeholder of an image"
            raise Refusal.at("the prompt", why, "remove it, or give the image with --image", code="not-text")
        if self.context:
            left = self.context - len(ids)
            if left < 1:
                why = f"has {len(ids)} tokens, and the model's context is {self.context}"
                raise Refusal.at(
                    "the prompt", why, "shorten the prompt; in a chat, use /undo or /reset", code="over-context"
                )
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        # Each reply has a separate random seed.
        self.replies += 1
        stream = TextStream(lambda some: str(self.tokenizer.decode(some, skip_special_tokens=True)))
        self.engine.on_token = lambda token: hear(stream.push(token))
        try:
            (completion,) = self.engine.generate([Request(ids, key=self.replies)], sampling)
            hear(stream.end())
        except KeyboardInterrupt:
            hear(stream.end())
            if not self.interruptible:
                raise
            return stream.text
        finally:
            self.engine.on_token = None
        return str(self.tokenizer.decode(completion.ids, skip_special_tokens=True))


def answer_about(
    images: Sequence[str], prompt: str, model: str, device: str, sampling: Sampling, system: str | None
) -> str:
    """Returns the answer to a prompt about image files, which the built-in engine generates."""
    folder, where = model_folder(model), Origin("--image", 0)
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    reader = RowImages(folder, tokenizer, "")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    row, refs = reader.read({"prompt": messages, "images": list(images)}, ("prompt",), where)
    asked = encoded_prompt(tokenizer, Question("", row["prompt"], "", where, images=tuple(refs)), None, reader)
    refuse_long_answers([asked], sampling.max_tokens, folder)
    dtype = next((name for name, one in DTYPES.items() if one == text_config(config).dtype), "fp32")
    generator = load_generator(folder, tokenizer, dtype, select(device), World(), Console.silent(), images=True)
    with closing(generator):
        request = Request(asked.ids, key=1, images=asked.images)
        (completion,) = generator.engine.generate([request], replace(sampling, stop_ids=generator.stop_ids))
    return str(tokenizer.decode(completion.ids, skip_special_tokens=True))


HELP = """/reset          clear the conversation
/undo           remove the last question and its answer
/system [TEXT]  set or remove the system message; clears the conversation
/history        show the conversation
/help           show this help
/exit           exit; an empty line and Ctrl-D exit too
A line that ends with \\ continues on the next line; \"\"\" starts and ends a text of
several lines. //... sends /... . Ctrl-C stops an answer."""
FENCE = '"""'


class Chat:
    """A conversation on the console. `enter` handles one message or /command; answers are streamed."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.messages: list[Message] = list(conversation.opening)
        self.over = False

    def enter(self, text: str) -> None:
        if text.startswith("//"):
            self._answer(text[1:])
        elif text.startswith("/"):
            self._command(text)
        else:
            self._answer(text)

    def _answer(self, text: str) -> None:
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        write("model> ", end="")
        try:
            reply = self.conversation.reply(messages, lambda piece: write(piece, end=""))
        except Refusal as refusal:
            write(f"\n{refusal}")
            return
        write()
        self.messages = [*messages, {"role": "assistant", "content": reply}]

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        opening = [message for message in self.messages if message["role"] == "system"]
        if name == "reset":
            self.messages = opening
            write("conversation cleared")
        elif name == "undo":
            if len(self.messages) > len(opening):
                removed = self.messages[-2]
                self.messages = self.messages[:-2]
                write(f"removed: {removed['content']}")
            else:
                write("the conversation is empty")
        elif name == "system":
            system = rest.strip()
            self.messages = [{"role": "system", "content": system}] if system else []
            write("a new conversation" + (" with that system message" if system else " without a system message"))
        elif name == "history":
            for message in self.messages:
                write(f"{message['role']}> {message['content']}")
        elif name == "exit":
            self.over = True
        else:
            if name != "help":
                write(f"no such command: /{name}")
            write(HELP)


def converse(conversation: Conversation, first: str | None) -> None:
    """Runs the chat until the input ends, or the user enters an empty line or /exit."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            # Importing readline enables arrow keys and the line history.
            import readline  # noqa: F401
    chat = Chat(conversation)
    conversation.interruptible = True
    text = first
    while not chat.over:
        if text is None:
            try:
                text = entered(input)
            except (EOFError, KeyboardInterrupt):
                write()
                return
        if not text:
            return
        chat.enter(text)
        text = None


def entered(ask: Callable[[str], str]) -> str:
    """Reads one message: a line, lines that end with a backslash, or text between two triple quotes."""
    line = ask("you> ").strip()
    if line.startswith(FENCE):
        lines = [line[len(FENCE) :]]
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(ask("...> "))
        lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(ask("...> ").rstrip())
    return "\n".join(lines)
