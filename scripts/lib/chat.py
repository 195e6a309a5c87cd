"""Chat rendering: text of any teacher to token ids and loss mask of one verifier."""

from dataclasses import dataclass

from jinja2 import TemplateError

_MARK = "\u241ecf83e1357eef\u241e"


@dataclass(frozen=True)
class Rendered:
    """A conversation under one tokenizer.

    Attributes:
        input_ids: [tokens] token ids.
        loss_mask: [tokens] True on reasoning, content and end of turn of assistant turns.
    """

    input_ids: list[int]
    loss_mask: list[bool]


class RenderError(ValueError):
    """A conversation that does not survive rendering; its text is the counted reason."""


def end_of_turn_ids(tokenizer, generation_eos=None) -> set[int]:
    """Return the token ids that end an assistant turn.

    Args:
        tokenizer: the verifier's tokenizer.
        generation_eos: `eos_token_id` of its generation config (int, list or None).
    """
    found = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if generation_eos is not None:
        found |= set(generation_eos if isinstance(generation_eos, list) else [generation_eos])
    return found


class Renderer:
    """Renders conversations with one tokenizer and chat template.

    Needs no generation tag in the template: an assistant turn is what the
    template appends to the conversation before it plus its generation prompt.
    Prompt and answer are tokenised apart, as they are when the model answers.
    """

    def __init__(self, tokenizer, template: str, end_ids: set[int]):
        self.tokenizer, self.template, self.end_ids = tokenizer, template, end_ids
        # An answer that spells one would teach the draft to propose it. Prompts may: the
        # server reads them in the same way.
        self.special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }

    def text(self, messages: list[dict], generation_prompt: bool) -> str:
        """Render messages as text."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False,
                add_generation_prompt=generation_prompt,
            )  # fmt: skip
        except TemplateError as error:
            raise RenderError(f"template refuses the conversation: {error}") from error

    def _ending(self, turns: list[dict], prefix: str) -> str:
        """Return what the template puts after the content of the last of `turns`.

        The content itself may look like part of the ending ("n", "|"), so a content
        that occurs nowhere else marks the place.
        """
        marked = self.text([*turns[:-1], turns[-1] | {"content": _MARK}], False)
        head, mark, ending = marked.rpartition(_MARK)
        if not mark or not head.startswith(prefix):
            raise RenderError("template changes the answer's text")
        return ending

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _answer(self, span: str, ending: str, complete: bool) -> tuple[list[int], int]:
        """Tokenise an assistant turn; return its ids and how many are supervised."""
        end = len(span) - len(ending)
        body = self._ids(span[:end])
        if self.tokenizer.decode(body, skip_special_tokens=False) != span[:end]:
            raise RenderError("text does not survive the tokenizer")
        if not complete:
            return body, len(body)
        tail = self._ids(span[end:])
        for position, token in enumerate(tail):
            if token in self.end_ids:
                return body + tail, len(body) + position + 1
        raise RenderError("template ends the turn with no end-of-turn token")

    def conversation(
        self, messages: list[dict], content: str, reasoning: str = "", complete: bool = True
    ) -> Rendered:
        """Render a prompt with its answer.

        Args:
            messages: the prompt; earlier assistant turns are supervised as well.
            content: the answer's text.
            reasoning: the answer's reasoning, handed to the template apart.
            complete: False when the answer was cut by its token limit; then no end
                of turn is appended or supervised.

        Raises:
            RenderError: when an assistant turn cannot be located, its text is changed by
                the tokenizer, or one would turn into special tokens of the verifier.
        """
        earlier = [m["content"] for m in messages if m["role"] == "assistant"]
        if any(token in text for text in (content, reasoning, *earlier) for token in self.special):
            raise RenderError("answer holds special tokens of the verifier")
        answer = {"role": "assistant", "content": content}
        if reasoning:  # templates do not agree on the field's name
            answer |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
        turns = [*messages, answer]
        full = self.text(turns, False)
        ids: list[int] = []
        mask: list[bool] = []
        position = 0
        for index, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            last = index == len(turns) - 1
            prefix = self.text(turns[:index], True)
            whole = full if last else self.text(turns[: index + 1], False)
            if not (full.startswith(whole) and whole.startswith(prefix)):
                if last:
                    raise RenderError("template rewrites the conversation")
                continue  # a history turn that the template shows differently
            span, ending = whole[len(prefix) :], self._ending(turns[: index + 1], prefix)
            text = span.removesuffix(ending)
            if not (span.endswith(ending) and text.endswith(turn["content"])):
                raise RenderError("template changes the answer's text")
            if last and reasoning.strip() not in text:
                raise RenderError("template drops the reasoning")
            before = self._ids(full[position : len(prefix)])
            answer_ids, supervised = self._answer(span, ending, complete or not last)
            ids += before + answer_ids
            mask += [False] * len(before)
            mask += [True] * supervised + [False] * (len(answer_ids) - supervised)
            position = len(whole)
        return Rendered(ids, mask)
