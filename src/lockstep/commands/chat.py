"""`lockstep generate --chat`: a conversation on the console, with commands that change what was said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress

from lockstep.commands.generate import Conversation
from lockstep.errors import Refusal
from lockstep.run.output import write
from lockstep.types import Message

HELP = """/reset          forget what was said
/undo           take back the last question and its answer
/system [TEXT]  set the system message, or remove it; what was said is forgotten
/history        show what was said
/help           this
/exit           end; so do an empty line and Ctrl-D
A line that ends with \\ goes on in the next; \"\"\" begins and ends a text of
several lines. //... says /... . Ctrl-C stops an answer."""
FENCE = '"""'


class Chat:
    """What was said so far; `said` is a message or a command, and the answer is told piece by piece."""

    def __init__(self, conversation: Conversation):
        self.conversation = conversation
        self.messages: list[Message] = list(conversation.opening)
        self.over = False

    def enter(self, said: str) -> None:
        if said.startswith("//"):
            self._answer(said[1:])
        elif said.startswith("/"):
            self._command(said)
        else:
            self._answer(said)

    def _answer(self, said: str) -> None:
        asked: list[Message] = [*self.messages, {"role": "user", "content": said}]
        write("model> ", end="")
        try:
            reply = self.conversation.reply(asked, lambda piece: write(piece, end=""))
        except Refusal as refusal:
            write(f"\n{refusal}")
            return
        write()
        self.messages = [*asked, {"role": "assistant", "content": reply}]

    def _command(self, said: str) -> None:
        name, _, rest = said[1:].partition(" ")
        opening = [message for message in self.messages if message["role"] == "system"]
        if name == "reset":
            self.messages = opening
            write("forgotten")
        elif name == "undo":
            if len(self.messages) > len(opening):
                taken = self.messages[-2]
                self.messages = self.messages[:-2]
                write(f"taken back: {taken['content']}")
            else:
                write("nothing was said yet")
        elif name == "system":
            text = rest.strip()
            self.messages = [{"role": "system", "content": text}] if text else []
            write("a new conversation" + (" with that system message" if text else " without a system message"))
        elif name == "history":
            for message in self.messages:
                write(f"{message['role']}> {message['content']}")
        elif name == "exit":
            self.over = True
        else:
            if name != "help":
                write(f"there is no /{name}")
            write(HELP)


def converse(conversation: Conversation, first: str | None) -> None:
    """Turn by turn until the input ends, an empty line is given, or /exit."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            # Arrow keys: lines that were typed before, and moving in this one.
            import readline  # noqa: F401
    chat = Chat(conversation)
    conversation.interruptible = True
    said = first
    while not chat.over:
        if said is None:
            try:
                said = entered(input)
            except (EOFError, KeyboardInterrupt):
                write()
                return
        if not said:
            return
        chat.enter(said)
        said = None


def entered(ask: Callable[[str], str]) -> str:
    """One message: a line, lines that end with a backslash, or what stands between two fences."""
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
