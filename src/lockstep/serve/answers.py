"""From pieces of an answer to OpenAI's objects, whole or streamed, with the token ids that vLLM adds to them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.rollout.native.online_engine import DrawnToken
from lockstep.serve.orders import ApiRequest, Served
from lockstep.serve.tickets import Piece, Ticket

_BROKEN = "�"


@dataclass
class _Choice:
    text: str = ""
    tokens: list[DrawnToken] = field(default_factory=list)
    finish: str | None = None


class ApiAnswer:
    """One answer. `chat` tells the two endpoints apart."""

    def __init__(self, asked: ApiRequest, served: Served, *, chat: bool):
        self.asked, self.served, self.chat = asked, served, chat
        self.created = int(time.time())
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._offsets: dict[int, int] = {}

    async def whole(self, ticket: Ticket) -> dict[str, Any]:
        choices = [_Choice() for _ in range(self.asked.order.sequences)]
        left = len(choices)
        while left:
            piece = await ticket.piece()
            choice = choices[piece.choice]
            choice.text += piece.text
            choice.tokens += piece.tokens
            choice.finish = piece.finish
            left -= piece.finish is not None
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._body(kind, [self._choice(number, choice) for number, choice in enumerate(choices)])
        if self.chat and self.asked.token_ids:
            body["prompt_token_ids"] = list(self.asked.order.prompts[0])
        return {**body, "usage": self._usage(sum(len(choice.tokens) for choice in choices))}

    async def events(self, ticket: Ticket) -> AsyncIterator[dict[str, Any]]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        left, made = self.asked.order.sequences, 0
        opened: set[int] = set()
        while left:
            piece = await ticket.piece()
            left -= piece.finish is not None
            made += len(piece.tokens)
            first = piece.choice not in opened
            opened.add(piece.choice)
            if not first and not self._tells(piece):
                continue
            chunk = self._body(kind, [self._delta(piece, first=first)])
            if self.chat and self.asked.token_ids and first:
                chunk["prompt_token_ids"] = list(self.asked.order.prompts[0])
            yield chunk
        if self.asked.usage:
            yield {**self._body(kind, []), "usage": self._usage(made)}

    def _tells(self, piece: Piece) -> bool:
        """Characters that are not whole yet are not worth an event."""
        return bool(piece.text or piece.finish or self.asked.token_ids or self.asked.logprobs)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.served.names[0],
            "choices": choices,
        }

    def _usage(self, made: int) -> dict[str, int]:
        asked = sum(len(ids) for ids in self.asked.order.prompts)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

    def _choice(self, number: int, choice: _Choice) -> dict[str, Any]:
        # Where nothing is cut off, all tokens at once: no decoder can then be led astray by where the rounds ended.
        text = choice.text if self.asked.order.stops else self.served.decode([one.token for one in choice.tokens])
        said: dict[str, Any] = {"text": text}
        if self.chat:
            said = {"message": {"role": "assistant", "content": text}}
        return {
            "index": number,
            **said,
            "finish_reason": choice.finish,
            **self._more(number, choice.tokens, first=True),
        }

    def _delta(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"text": piece.text}
        if self.chat:
            said = {"delta": {**({"role": "assistant"} if first else {}), "content": piece.text}}
        more = self._more(piece.choice, piece.tokens, first=first)
        return {"index": piece.choice, **said, "finish_reason": piece.finish, **more}

    def _more(self, number: int, tokens: Sequence[DrawnToken], *, first: bool) -> dict[str, Any]:
        """Log-probabilities and token ids, where they were asked for."""
        more: dict[str, Any] = {"logprobs": None}
        if self.asked.logprobs:
            more["logprobs"] = self._chat_logprobs(tokens) if self.chat else self._plain_logprobs(number, tokens)
        if self.asked.token_ids:
            more["token_ids"] = [one.token for one in tokens]
            if not self.chat and first:
                more["prompt_token_ids"] = list(self.asked.order.prompts[number // self.asked.order.n])
        return more

    def _chat_logprobs(self, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._token(token)
            # A part of a character has no text of its own, and its bytes are not told.
            whole = None if _BROKEN in text else list(text.encode(errors="replace"))
            return {"token": text, "logprob": logprob, "bytes": whole}

        return {
            "content": [
                {**entry(one.token, _sure(one)), "top_logprobs": [entry(*other) for other in one.likeliest]}
                for one in tokens
            ]
        }

    def _plain_logprobs(self, number: int, tokens: Sequence[DrawnToken]) -> dict[str, Any]:
        texts = [self._token(one.token) for one in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(number, 0))
            self._offsets[number] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_sure(one) for one in tokens],
            # Parts of characters have one name for all of them: that of the likeliest stays.
            "top_logprobs": [{self._token(token): score for token, score in reversed(one.likeliest)} for one in tokens],
            "text_offset": offsets,
        }

    def _token(self, token: int) -> str:
        decode: Callable[[list[int]], str] = self.served.tokenizer.decode
        return decode([token])


def _sure(one: DrawnToken) -> float:
    assert one.logprob is not None
    return one.logprob
