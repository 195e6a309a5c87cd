"""Tokens: the loss mask covers exactly what the assistant says, whatever the text."""

import random
from collections import Counter

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from scripts import tokens as stage
from scripts.lib import chat

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['reasoning_content'] %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does: reasoning of turns before the last question is cut out of the text.
FORGETFUL = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\n') }}",
)
END_OF_TURN = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_tokenizer(normalizer=None):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if normalizer:
        bpe.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    corpus = ["the assistant says hello to the user and the user says hello, is n't it ?\n"] * 9
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TURN)


def renderer(tokenizer, template=CHATML):
    return chat.Renderer(tokenizer, template, chat.end_of_turn_ids(tokenizer))


def turn(role, content):
    return {"role": role, "content": content}


def byte_alphabet():
    """The byte alphabet of GPT-2, written down independently."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


BYTES = byte_alphabet()


def bytes_of(tokenizer, token_id):
    token = tokenizer.convert_ids_to_tokens(token_id)
    return token.encode() if token in SPECIAL else bytes(BYTES[c] for c in token)


def chatml_segments(messages, content, reasoning="", complete=True):
    """Return [(text, supervised)] of a conversation, written down by hand."""
    segments = []
    for index, message in enumerate([*messages, turn("assistant", content)]):
        last, answer = index == len(messages), message["role"] == "assistant"
        segments.append((f"<|im_start|>{message['role']}\n", False))
        if last and reasoning:
            segments.append((f"<think>\n{reasoning}\n</think>\n\n", True))
        segments.append((message["content"], answer))
        if complete or not last:
            segments += [(END_OF_TURN, answer), ("\n", False)]
    return segments


def assert_mask_is(tokenizer, rendered, segments):
    """Compare byte by byte; no token may lie across a border of the mask."""
    found = b"".join(bytes_of(tokenizer, t) for t in rendered.input_ids)
    assert found.decode() == "".join(text for text, _ in segments)
    expected = [flag for text, flag in segments for _ in text.encode()]
    position = 0
    for token, flag in zip(rendered.input_ids, rendered.loss_mask, strict=True):
        size = len(bytes_of(tokenizer, token))
        assert expected[position : position + size] == [flag] * size, (position, flag)
        position += size


def supervised_text(tokenizer, rendered):
    pairs = zip(rendered.input_ids, rendered.loss_mask, strict=True)
    return b"".join(bytes_of(tokenizer, t) for t, keep in pairs if keep).decode()


# -- the mask ------------------------------------------------------------------------


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("reasoning", ["", "It is a greeting, answer in kind."])
@pytest.mark.parametrize(
    "messages",
    [
        [turn("user", "hello")],
        [turn("system", "You are the assistant."), turn("user", "hello")],
        [turn("user", "one"), turn("assistant", "first answer"), turn("user", "hello")],
        [turn("system", "s"), turn("user", "hi"), turn("assistant", "hello to you"),
         turn("user", "hi"), turn("assistant", "hello to you"), turn("user", "hi")],
    ],
    ids=["plain", "system", "two turns", "three turns"],
)  # fmt: skip
@pytest.mark.parametrize("content", ["hello to you", "assistant", "hello hello\n\nhello", "user\n"])
def test_mask_covers_reasoning_content_and_end_of_turn_alone(
    tokenizer, messages, content, reasoning, complete
):
    rendered = renderer(tokenizer).conversation(messages, content, reasoning, complete)
    assert_mask_is(tokenizer, rendered, chatml_segments(messages, content, reasoning, complete))
    earlier = [m["content"] + END_OF_TURN for m in messages if m["role"] == "assistant"]
    think = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    expected = "".join(earlier) + think + content + (END_OF_TURN if complete else "")
    assert supervised_text(tokenizer, rendered) == expected


PIECES = [
    "hello", " the", " user", "assistant", "\n", "\n\n", " ", "  ", "\t", ".", " ?", " n't", ",",
    "é", "e\u0301", "日本語", "العربية", "🙂", "\U0001f469\u200d\U0001f467", "\u200b", "\u00a0",
    "\ufb01", "½", "\r\n", "```python\n", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>",
    "</think>", "<|im_end", "{{ x }}", "{% if %}", "\\n", "&lt;", "<|im_start|>assistant\n",
    "<|im_start|>user\nhello<|im_end|>\n",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_mask_equals_a_slow_computation_on_random_texts(tokenizer, seed):
    draw = random.Random(seed)

    def text(least=1, pieces=PIECES):
        return "x" + "".join(draw.choices(pieces, k=draw.randint(least, 12)))

    def answer():
        return text(pieces=[p for p in PIECES if not any(s in p for s in SPECIAL)])

    messages = [turn("system", text())] if draw.random() < 0.5 else []
    for _ in range(draw.randint(0, 2)):
        messages += [turn("user", text()), turn("assistant", answer())]
    messages.append(turn("user", text()))
    content, reasoning = answer(), answer() if draw.random() < 0.5 else ""
    complete = draw.random() < 0.7
    rendered = renderer(tokenizer).conversation(messages, content, reasoning, complete)
    assert_mask_is(tokenizer, rendered, chatml_segments(messages, content, reasoning, complete))


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("content", ["end", "im_end", "|", "|>", "n", "<|im_end|"])
def test_answer_that_occurs_in_the_end_of_turn_marker(tokenizer, content, complete):
    messages = [turn("user", "hello")]
    rendered = renderer(tokenizer).conversation(messages, content, "", complete)
    assert_mask_is(tokenizer, rendered, chatml_segments(messages, content, "", complete))


def test_prompt_tokens_are_those_that_the_teacher_was_given(tokenizer):
    """What is served is tokenize(prompt) and then the answer: no merge across the border."""
    messages = [turn("user", "hello to the user")]
    prompt = tokenizer.apply_chat_template(
        messages, chat_template=CHATML, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    rendered = renderer(tokenizer).conversation(messages, "\nhello", "", True)
    assert rendered.input_ids[: len(prompt)] == prompt
    assert rendered.loss_mask.index(True) == len(prompt)


# -- other templates -------------------------------------------------------------------


def test_history_turn_that_the_template_rewrites_is_not_supervised(tokenizer):
    messages = [
        turn("user", "one"),
        turn("assistant", "<think>\nhm\n</think>\n\nfirst"),
        turn("user", "two"),
    ]
    rendered = renderer(tokenizer, FORGETFUL).conversation(messages, "second", "because", True)
    # Not what the teacher wrote, as the reasoning is cut out: shown, but nothing to learn from.
    history = [(text, False) for text, _ in chatml_segments([messages[0]], "first")]
    last = chatml_segments([messages[2]], "second", "because")
    assert_mask_is(tokenizer, rendered, history + last)


def test_template_without_end_of_turn_is_dropped_and_counted(tokenizer):
    bare = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    result, counts = stage.render_all([response("hello")], renderer(tokenizer, bare), 99)
    assert result == [] and sum(counts.values()) == 1
    assert "end-of-turn" in next(iter(counts))


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{{ m['content'] }}", "{{ m['content'] | upper }}"),
        CHATML.replace("{% if add_gen", "{{ messages | length }}{% if add_gen"),
        "{{ raise_exception('no system role') if messages[0]['role'] == 'user' }}",
    ],
    ids=["changes the text", "counts the turns", "refuses the roles"],
)
def test_conversation_that_the_template_does_not_render_is_dropped_and_counted(tokenizer, template):
    rows = [
        response("hello", messages=[turn("user", "a"), turn("assistant", "b"), turn("user", "c")])
    ]
    result, counts = stage.render_all(rows, renderer(tokenizer, template), 99)
    assert result == [] and [k.split(":")[0] for k in counts] == ["dropped"]


def test_text_that_the_tokenizer_changes_is_dropped_and_counted():
    lossy = make_tokenizer(normalizers.Sequence([normalizers.NFC()]))
    rows = [response("cafe\u0301"), response("caf\u00e9")]
    result, counts = stage.render_all(rows, renderer(lossy), 99)
    assert len(result) == 1 and counts["ok"] == 1
    assert counts["dropped: text does not survive the tokenizer"] == 1


@pytest.mark.parametrize(
    "generation, expected",
    [(None, {2}), (1, {1, 2}), ([0, 1], {0, 1, 2}), ([2], {2})],
)
def test_end_of_turn_ids_join_tokenizer_and_generation_config(tokenizer, generation, expected):
    assert tokenizer.convert_tokens_to_ids(END_OF_TURN) == 2
    assert chat.end_of_turn_ids(tokenizer, generation) == expected


def test_any_of_the_end_of_turn_ids_ends_a_turn(tokenizer):
    other = CHATML.replace(END_OF_TURN, "<|endoftext|>")
    ends = chat.end_of_turn_ids(tokenizer, 0)
    rendered = chat.Renderer(tokenizer, other, ends).conversation([turn("user", "a")], "b")
    assert supervised_text(tokenizer, rendered) == "b<|endoftext|>"


# -- rows ------------------------------------------------------------------------------


def response(content, status="ok", finish="stop", messages=None, rank=0):
    return {
        "prompt_id": f"{rank:032x}", "rank": rank, "messages": messages or [turn("user", "hello")],
        "reasoning": "", "content": content, "finish_reason": finish, "status": status,
    }  # fmt: skip


def test_rows_are_counted_by_what_became_of_them(tokenizer):
    rows = [
        response("hello", rank=0),
        response("", "empty", rank=1),
        response("", "too_long", "too_long", rank=2),
        response("loop loop", "loop", "length", rank=3),
        response("the " * 80, rank=4),
        response("hello", messages=[turn("user", "the " * 80)], rank=5),
    ]
    result, counts = stage.render_all(rows, renderer(tokenizer), 40)
    assert [r["rank"] for r in result] == [0, 3, 4]
    assert counts == Counter({
        "ok": 2, "truncated": 1, "dropped: response empty": 1, "dropped: response too_long": 1,
        "dropped: prompt fills max_length": 1,
    })  # fmt: skip
    assert counts.total() == len(rows)


def test_cut_row_is_a_prefix_of_the_whole_row(tokenizer):
    rows = [response("the user says hello " * 9)]
    (whole,), _ = stage.render_all(rows, renderer(tokenizer), 999)
    length = len(whole["input_ids"])
    (fits,), counts = stage.render_all(rows, renderer(tokenizer), length)
    assert fits == whole and counts == {"ok": 1}
    (cut,), counts = stage.render_all(rows, renderer(tokenizer), length - 5)
    assert counts == {"truncated": 1}
    for name in ("input_ids", "loss_mask"):
        assert cut[name] == whole[name][: length - 5]


def test_only_an_answer_that_stopped_by_itself_gets_an_end_of_turn(tokenizer):
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    rows = [response("hello", finish="stop"), response("hello", finish="length", rank=1)]
    (stopped, cut), _ = stage.render_all(rows, renderer(tokenizer), 99)
    ends = [
        [keep for token, keep in zip(r["input_ids"], r["loss_mask"], strict=True) if token == end]
        for r in (stopped, cut)
    ]
    assert ends == [[False, True], [False]]
    assert cut["loss_mask"][-1]


@pytest.mark.parametrize(
    "policy, text",
    [
        ("template", "<think>\nhm\n</think>\n\nyes<|im_end|>"),
        ("keep", "<think>\nhm\n</think>\n\nyes<|im_end|>"),
        ("drop", "yes<|im_end|>"),
    ],
)
def test_reasoning_is_formatted_kept_or_dropped_as_the_strategy_says(tokenizer, policy, text):
    row = {
        "prompt_id": "a", "rank": 0, "messages": [{"role": "user", "content": "well?"}],
        "content": "yes", "reasoning": "hm", "finish_reason": "stop", "status": "ok",
    }  # fmt: skip
    (done,), counts = stage.render_all([row], renderer(tokenizer), 100, policy)
    taught = [i for i, keep in zip(done["input_ids"], done["loss_mask"], strict=True) if keep]
    assert tokenizer.decode(taught) == text and counts == {"ok": 1}


def test_a_template_without_reasoning_drops_the_row_unless_the_policy_mends_it(tokenizer):
    plain = CHATML.replace("{% if m['reasoning_content'] %}", "{% if false %}")
    row = {
        "prompt_id": "a", "rank": 0, "messages": [{"role": "user", "content": "well?"}],
        "content": "yes", "reasoning": "hm", "finish_reason": "stop", "status": "ok",
    }  # fmt: skip
    show = renderer(tokenizer, plain)
    assert stage.render_all([row], show, 100)[1] == {"dropped: template drops the reasoning": 1}
    for policy in ("keep", "drop"):
        assert stage.render_all([row], show, 100, policy)[1] == {"ok": 1}


@pytest.mark.parametrize("place", ["content", "reasoning", "earlier"])
def test_an_answer_with_the_verifiers_special_tokens_is_dropped_and_counted(tokenizer, place):
    """Another model's answer may spell them; as ids they would end or open a turn."""
    bad = f"stop{END_OF_TURN}\n<|im_start|>user"
    earlier = [turn("user", "a"), turn("assistant", bad if place == "earlier" else "b")]
    row = {
        "prompt_id": "a", "rank": 0, "messages": [*earlier, turn("user", "well?")],
        "content": bad if place == "content" else "yes", "finish_reason": "stop", "status": "ok",
        "reasoning": bad if place == "reasoning" else "",
    }  # fmt: skip
    rows, counts = stage.render_all([row], renderer(tokenizer), 100)
    assert rows == [] and counts == {"dropped: answer holds special tokens of the verifier": 1}


def test_a_prompt_may_hold_special_tokens_as_the_server_reads_it_the_same_way(tokenizer):
    messages = [turn("user", f"what does {END_OF_TURN} mean?")]
    rendered = renderer(tokenizer).conversation(messages, "end of turn")
    assert_mask_is(tokenizer, rendered, chatml_segments(messages, "end of turn", "", True))
