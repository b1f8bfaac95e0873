"""The images of messages: in the process of an environment as content parts with data URIs, and in the run as
placeholder tokens with their images.

A message with images has a list of parts as content. An image part contains a PIL image, bytes or a data URI. Paths and
web addresses are not read, because the text of a tool may come from the model.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Refusal
from lockstep.types import Message, Origin, Question, Request
from lockstep.vision.images import IMAGE_PARTS, image_bytes, image_ref
from lockstep.vision.processors import ImageTokens
from lockstep.vision.spans import ImageRef, ImageSpan

Content = str | list[dict[str, Any]]
_TEXTS = ("text", "input_text", "output_text")
# The keys under which an image part has its image.
_INSIDE = ("image", "image_url", "url", "base64", "bytes", "data")


def image_part(value: Any) -> dict[str, Any] | None:
    """Returns an image as a part with a data URI, or None if the value is not an image: a PIL image, or a content part
    with a PIL image, bytes, base64 text or a data URI."""
    if _is_pil(value):
        return _part(_png_uri(value))
    if not isinstance(value, Mapping) or value.get("type") not in IMAGE_PARTS:
        return None
    return _part(uri) if (uri := _inner_uri(value)) else None


def _inner_uri(value: Mapping[str, Any]) -> str:
    """Returns the data URI of the image inside a part, or an empty text."""
    for key in _INSIDE:
        inside = value.get(key)
        if _is_pil(inside):
            return _png_uri(inside)
        if isinstance(inside, bytes | bytearray | memoryview):
            return f"data:application/octet-stream;base64,{base64.b64encode(inside).decode()}"
        if isinstance(inside, Mapping) and (found := _inner_uri(inside)):
            return found
        if isinstance(inside, str) and inside.startswith("data:"):
            return inside
        if isinstance(inside, str) and key in ("base64", "data"):
            return f"data:application/octet-stream;base64,{inside}"
    return ""


def _part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def _png_uri(image: Any) -> str:
    # The reference of a PIL image has it as PNG.
    png = image_ref(image, Path(), "an image").data or b""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _is_pil(value: Any) -> bool:
    return hasattr(value, "save") and hasattr(value, "convert")


def checked_content(content: Any) -> Content | None:
    """Returns the content of an environment's message as text, or as parts if it has images. Returns None if it is
    neither text nor a list of texts and images."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return None
    parts: list[dict[str, Any]] = []
    for one in content:
        text = one if isinstance(one, str) else one.get("text") if _is_text(one) else None
        part = {"type": "text", "text": text} if isinstance(text, str) else image_part(one)
        if part is None:
            return None
        parts.append(part)
    return joined(parts)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _TEXTS


def joined(parts: list[dict[str, Any]]) -> Content:
    """Returns parts without images as one text."""
    return "".join(part["text"] for part in parts) if all(map(_is_text, parts)) else parts


def with_text(content: Content, text: str) -> Content:
    """Returns the content with more text at its end."""
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]


def with_texts(content: Content, change: Callable[[str], str]) -> Content:
    """Returns the content with each of its texts changed."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if _is_text(part) else part for part in content]


def row_images(question: Question, tokens: ImageTokens | None) -> dict[str, Any]:
    """Returns `prompt` and `images` of the row that an environment gets, if the question has images: messages whose
    images are parts with data URIs, and the references of the images, which the host process opens."""
    if not question.images or tokens is None:
        return {}
    refs = iter(question.images)
    placeholder = tokens.family.placeholder
    return {
        "prompt": [_in_parts(message, placeholder, refs, question.origin) for message in question.prompt],
        "images": list(question.images),
    }


def _in_parts(message: Message, placeholder: str, refs: Iterator[ImageRef], origin: Origin) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or placeholder not in content:
        return message
    first, *rest = content.split(placeholder)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}] if first else []
    for text in rest:
        data = base64.b64encode(image_bytes(next(refs), origin)).decode()
        parts.append(_part(f"data:application/octet-stream;base64,{data}"))
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def opened_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the row with PIL images in `images`. Runs in the host process."""
    images = row.get("images")
    if not isinstance(images, list) or not all(isinstance(one, ImageRef) for one in images):
        return row
    from lockstep.vision.images import read_image

    return {**row, "images": [read_image(ref, "the row") for ref in images]}


def with_placeholders(
    messages: Sequence[Message], tokens: ImageTokens | None, origin: Origin
) -> tuple[list[Message], list[ImageRef]]:
    """Returns the messages with the placeholder text of the model for each image, and the images in order. Raises
    `Refusal` if a message has an image and the model takes none, or if a text contains a placeholder."""
    refs: list[ImageRef] = []
    return [_placed(message, tokens, refs, origin) for message in messages], refs


def _placed(message: Message, tokens: ImageTokens | None, refs: list[ImageRef], origin: Origin) -> Message:
    content = message.get("content")
    if not isinstance(content, str | list):
        return message
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = []
    for part in parts:
        if _is_text(part):
            texts.append(_checked_text(part["text"], tokens, origin))
            continue
        if tokens is None:
            raise Refusal.at(
                origin,
                "a message has an image, but the model reads no images",
                "set model.vision=freeze, or return text only",
                code="not-text",
            )
        refs.append(image_ref(image_part(part), Path(), origin))
        texts.append(tokens.family.placeholder)
    return {**message, "content": "".join(texts)}


def _checked_text(text: str, tokens: ImageTokens | None, origin: Origin) -> str:
    for word in () if tokens is None else {tokens.family.pad, tokens.family.token} - {""}:
        if word in text:
            raise Refusal.at(
                origin,
                f"the text of a message contains {word}, which is the model's placeholder of an image",
                "remove it from the text, and return images as parts of the message",
                code="not-text",
            )
    return text


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Returns messages that the model does not see, with a note in place of each image."""
    return [
        {**message, "content": "".join(part["text"] if _is_text(part) else "[image]" for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def prompt_images(ids: Sequence[int], request: Request, tokens: ImageTokens | None) -> tuple[ImageSpan, ...]:
    """Returns the images of a prompt that an environment wrote as text or token ids: those of the request, if it is the
    prompt of the request. Raises `Refusal` if another prompt has placeholder tokens."""
    if list(ids) == list(request.ids):
        return request.images
    refuse_image_tokens(ids, tokens)
    return ()


def refuse_image_tokens(ids: Sequence[int], tokens: ImageTokens | None) -> None:
    """Raises `Refusal` if token ids contain the placeholder of an image."""
    if tokens is not None and not {tokens.pad_id, tokens.token_id}.isdisjoint(ids):
        raise Refusal.at(
            "token ids",
            f"contain {tokens.family.pad}, the model's placeholder of an image, but text and token ids have no images",
            "write an environment with messages (reset, step) to return images",
            code="not-text",
        )


def refuse_sampled_images(ids: Sequence[int], loss_mask: Sequence[int], tokens: ImageTokens | None) -> None:
    """Raises `Refusal` if the model sampled a placeholder token. A server that writes the placeholder tokens of later
    images would take it for an image."""
    sampled = {token for token, mask in zip(ids, loss_mask, strict=True) if mask}
    if tokens is not None and tokens.token_id in sampled:
        raise Refusal.at(
            "token ids",
            f"the model wrote {tokens.family.pad}, and the server would take it for an image",
            "use rollout.engine=native",
            code="not-text",
        )


def expanded(
    ids: list[int], refs: Sequence[ImageRef], tokens: ImageTokens | None, origin: Origin
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Returns the tokens of a rendered text with as many placeholder tokens as its images have features, and the
    images. Raises `Refusal` if the chat template did not render each image once."""
    if tokens is None:
        return ids, ()
    count = ids.count(tokens.token_id)
    if count != len(refs):
        raise Refusal.at(
            origin,
            f"the chat template renders {count} of {len(refs)} images",
            "use a template that renders images in messages of this role (data.template)",
            code="template-changes-chat",
        )
    if not refs:
        return ids, ()
    images = tokens.spans(ids, refs, origin)
    made, _ = tokens.expanded(ids, bytes(len(ids)), images)
    return list(made), tuple(images)
