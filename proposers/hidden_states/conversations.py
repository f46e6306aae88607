"""Lines of a data file as token ids, with a mask of what a draft model is to learn: the assistant's turns.

A line is a JSON object with one of these; what else it has is left, but for the `tools` of a conversation:

| key | what is run | mask |
|---|---|---|
| `messages`, or `conversations` | the chat template, and an answer where the user has the last word | assistant turns |
| `prompt` | the text, and an answer | the answer |
| `text` | the text | all of it |

Turns have a `role` and `content`, or `from` and `value` as ShareGPT has them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
# Of the template language, and not the variable add_generation_prompt.
_GENERATION = re.compile(r"\{%-?\s*generation\b")


class Rendered(NamedTuple):
    """One line.

    Attributes:
        mask: of the token ids, 1 where a token is to be learnt.
        wants_answer: the model is to go on; what it says is to be learnt too.
    """

    token_ids: list[int]
    mask: list[int]
    wants_answer: bool


class Lines:
    """A file's lines, by number, none of them in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = []
        with open(path, "rb") as file:
            offset = 0
            for line in file:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, numbers: "range | list[int]") -> Iterator[tuple[int, bytes]]:
        """The lines of these numbers, in this order."""
        with open(self._path, "rb") as file:
            for number in numbers:
                file.seek(self._offsets[number])
                yield number, file.readline()


class Renderer:
    """Makes token ids of lines, with a model's tokenizer and chat template."""

    def __init__(self, model: str | Path, chat_template: str | None = None) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template

    @property
    def chat_template(self) -> str | None:
        template: str | None = self._tokenizer.chat_template
        return template

    def render(self, line: bytes) -> Rendered:
        """Raises `ValueError` for a line that nothing can be made of."""
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"the line is no JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ValueError("the line is no JSON object")
        for key in ("prompt", "text"):
            if isinstance(entry.get(key), str):
                token_ids = self._tokenizer(entry[key])["input_ids"]
                return self._checked(Rendered(token_ids, [int(key == "text")] * len(token_ids), key == "prompt"))
        messages = entry.get("messages") or entry.get("conversations")
        if not isinstance(messages, list) or not messages:
            raise ValueError("the line has no messages, conversations, prompt or text")
        return self._checked(self._render_conversation([_message(message) for message in messages], entry.get("tools")))

    @staticmethod
    def _checked(rendered: Rendered) -> Rendered:
        if not rendered.token_ids:
            raise ValueError("the line has no tokens")
        return rendered

    def _render_conversation(self, messages: list[dict[str, Any]], tools: Any) -> Rendered:
        if self.chat_template is None:
            raise ValueError("the model has no chat template; give one (--chat-template)")
        wants_answer = messages[-1]["role"] != "assistant"
        if _GENERATION.search(self.chat_template):
            made = self._tokenizer.apply_chat_template(
                messages, tools, add_generation_prompt=wants_answer, return_dict=True, return_assistant_tokens_mask=True
            )
            return Rendered(made["input_ids"], made["assistant_masks"], wants_answer)
        text = self._text(messages, tools, wants_answer)
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [self._span(messages, tools, at, text) for at in turns]
        mask = [int(any(start <= at < stop for start, stop in spans)) for at, _ in made["offset_mapping"]]
        return Rendered(made["input_ids"], mask, wants_answer)

    def _span(self, messages: list[dict[str, Any]], tools: Any, at: int, text: str) -> tuple[int, int]:
        """Where in the text of a conversation the assistant's turn is, by what the template makes of its beginnings."""
        before, through = self._text(messages[:at], tools, True), self._text(messages[: at + 1], tools, False)
        if not text.startswith(through) or not through.startswith(before):
            raise ValueError(
                f"the chat template makes something else of the first {at + 1} turns when they stand alone, so it is "
                "not known where the assistant's are; give a template with generation blocks (--chat-template)"
            )
        return len(before), len(through)

    def _text(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        if not messages:
            return ""
        text: str = self._tokenizer.apply_chat_template(
            messages, tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError("a turn is no JSON object")
    if "from" in message:
        role = message["from"]
        message = {"role": _ROLES.get(role, role), "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise ValueError("a turn has no role")
    return message
