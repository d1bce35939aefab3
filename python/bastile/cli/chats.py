"""Chats as training examples: the loss is taken on what the assistant says, and on the token that ends its turn.

Where the assistant's words lie in the rendered text is found by rendering the chat once more with a marker in place of
each answer. So any chat template will do; few templates mark their answers themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from bastile.cli.errors import UsageError
from bastile.cli.examples import IGNORED

# For a tokenizer that has no template of its own.
PLAIN_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}{{ eos_token or '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_MARKER = "\x02answer\x03"  # no template writes it, and none strips it


def tokenize(chats: Iterable[tuple[str, Any]], tokenizer: Any, longest: int) -> Iterator[tuple[list[int], list[int]]]:
    """(ids, labels) of each (where it stands, messages), cut at `longest` tokens. A chat with no answer before the cut
    has nothing to learn and is left out."""
    if not getattr(tokenizer, "is_fast", False):
        raise UsageError(f"chats need a fast tokenizer, which knows where its tokens lie; {type(tokenizer).__name__}")
    special = set(tokenizer.all_special_ids)
    for where, messages in chats:
        _check(where, messages)
        text = _render(tokenizer, where, messages)
        spans = [
            _answer(tokenizer, where, messages, turn, text)
            for turn, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = encoded["input_ids"][:longest], encoded["offset_mapping"][:longest]
        learned = [any(begin < last and first < end for first, last in spans) for begin, end in offsets]
        for position in range(1, len(ids)):  # the model is to end its turns itself
            if learned[position - 1] and ids[position] in special and not learned[position]:
                learned[position] = True
        if any(learned[1:]):  # the first token is never predicted
            yield ids, [token if wanted else IGNORED for token, wanted in zip(ids, learned, strict=True)]


def _check(where: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: 'messages' must be a list of messages")
    for message in messages:
        good = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not good:
            raise UsageError(f"{where}: each message needs a 'role' and a 'content', both text; one is {message!r:.80}")


def _render(tokenizer: Any, where: str, messages: list[dict[str, Any]]) -> str:
    from jinja2.exceptions import TemplateError

    template = None if tokenizer.chat_template else PLAIN_TEMPLATE
    try:
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    except TemplateError as error:
        raise UsageError(f"{where}: the tokenizer's chat template refuses this chat: {error}") from error


def _answer(tokenizer: Any, where: str, messages: list[dict[str, Any]], turn: int, text: str) -> tuple[int, int]:
    """Where in the text the answer of this turn stands: (first character, one past the last)."""
    marked = [{**message, "content": _MARKER} if at == turn else message for at, message in enumerate(messages)]
    before, marker, after = _render(tokenizer, where, marked).partition(_MARKER)
    if not marker or not text.endswith(after):
        raise UsageError(f"{where}: the chat template writes what follows message {turn + 1} by what it says")
    end = len(text) - len(after)
    begin = len(before) if text.startswith(before) else _common(before, text)
    return min(begin, end), end


def _common(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
