"""Chats and templates: what transformers renders, what a sandbox refuses, and which special tokens there are."""

import json
from pathlib import Path
from typing import Any

import pytest

from specgen.errors import RecipeError, RowError
from specgen.job.contents import Base64, checked_messages
from specgen.job.prompts import PromptBuilder, chat_template_of
from specgen.job.readers import Row
from specgen.job.templates import ChatTemplate, ColumnTemplate
from specgen.model_path import resolve_model
from specgen.recipe import recipe_from_settings
from specgen.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
LOOPY = """{{ bos_token }}{% for m in messages if m.role != 'skip' %}
{% if loop.index > 2 %}{% break %}{% endif %}
{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}{% endgeneration %}{% else %}
{{ m | tojson }}{{ m | tojson(ensure_ascii=True) }}
{{ m | tojson(ensure_ascii=false, sort_keys=True, indent=1, separators=(',', ':')) }}{% endif %}

{% endfor %}{% if mood is defined %}{{ mood }}{% endif %}"""
CHAT = [
    {"role": "user", "content": "  Hi «there» <3  "},
    {"role": "assistant", "content": "Ja"},
    {"role": "user", "content": "Bye"},
]


def template(text: str, **options: Any) -> ChatTemplate:
    tokens = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return ChatTemplate(text, "test", **({"tokens": tokens, "system": None, "args": None} | options))


@pytest.mark.parametrize("text", [CHATML, LOOPY])
def test_a_chat_is_rendered_as_transformers_does(text: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = resolve_model("stories-7m")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>"
    )
    theirs = tokenizer.apply_chat_template(
        CHAT, chat_template=text, tokenize=False, add_generation_prompt=True, mood="glad"
    )
    assert template(text, args={"mood": "glad"}).render(checked_messages(CHAT, "messages")) == theirs


def test_the_system_prompt_is_for_chats_without_one() -> None:
    text = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    rendered = template(text, system="be kind").render(checked_messages(CHAT[:1], "m"))
    assert rendered == "system=be kind;user=  Hi «there» <3  ;"
    own = [{"role": "system", "content": "be brief"}, CHAT[0]]
    assert template(text, system="be kind").render(checked_messages(own, "m")).startswith("system=be brief;user")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses the row"),
        ("{{ messages.append(1) }}", "refuses the row"),
        ("{{ nothing.at.all }}", "refuses the row"),
        ("{% for i in range(10**9) %}x{% endfor %}", "refuses the row"),
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
    ],
)
def test_what_a_template_may_not_do_is_its_rows_error(text: str, part: str) -> None:
    with pytest.raises(RowError, match=part) as caught:
        template(text).render(checked_messages(CHAT, "messages"))
    assert caught.value.code == "bad_template"


def test_a_day_is_the_recipes_or_none() -> None:
    text = "{{ strftime_now('%d %b %Y') if strftime_now is defined else 'no day' }}"
    chat = checked_messages(CHAT, "messages")
    assert template(text).render(chat) == "no day"
    assert template(text, args={"now": "2026-01-31"}).render(chat) == "31 Jan 2026"
    with pytest.raises(RecipeError, match="must be a date"):
        template(text, args={"now": "today"})


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    def find(file: str | None = None) -> str | None:
        found = ChatTemplate.of(tmp_path, file, system=None, args=None)
        return found and found.text

    assert find() is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]})
    )
    assert find() == "d"
    for declared in (["d"], [{"name": ["default"]}], 5, {"name": "default"}):
        config.write_text(json.dumps({"chat_template": declared}))
        assert find() is None
    config.write_text(json.dumps({"chat_template": "one"}))
    assert find() == "one"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert find() == "own file"
    (tmp_path / "mine").write_bytes(b"\xef\xbb\xbfmine")
    assert find(str(tmp_path / "mine")) == "mine"
    with pytest.raises(RecipeError, match=r"missing: the chat template cannot be read: No such file or directory$"):
        find(str(tmp_path / "missing"))
    (tmp_path / "mine").write_bytes(b"\xff")
    with pytest.raises(RecipeError, match="mine: the chat template cannot be read: it is not UTF-8"):
        find(str(tmp_path / "mine"))
    (tmp_path / "mine").write_text("{% for %}")
    with pytest.raises(RecipeError, match=r"mine: the chat template is broken: .* \(line 1\)"):
        find(str(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("messages", "code", "part"),
    [
        ("text", "bad_messages", "must be a list of messages"),
        ([], "empty_prompt", "is empty"),
        (None, "empty_prompt", "m is null, or an empty cell"),
        ([{"role": "user", "content": Base64("YQ==")}], "bad_messages", r"content must be a text, not bytes"),
        (["x"], "bad_messages", r"m\[0\] must be an object"),
        ([{"content": "x"}], "bad_messages", r"m\[0\].role must be a text"),
        ([{"role": "user"}], "bad_messages", r"m\[0\].content must be a text, not null"),
        ([CHAT[0], {"role": "user", "content": 5}], "bad_messages", r"m\[1\].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "bad_messages",
            r"m\[0\].content\[0\]: only parts of text are supported, not 'image_url'",
        ),
    ],
)
def test_what_is_no_chat_says_where(messages: object, code: str, part: str) -> None:
    with pytest.raises(RowError, match=part) as caught:
        checked_messages(messages, "m")
    assert caught.value.code == code


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}], "m").messages == [{"role": "user", "content": "ab"}]


def builder(tokenizer: Tokenizer, tmp_path: Path, text: str, *sets: str) -> PromptBuilder:
    (tmp_path / "chat.jinja").write_text(text)
    recipe = recipe_from_settings(
        ["sampling.seed=7", "input.messages=messages", f"input.chat_template={tmp_path / 'chat.jinja'}", *sets]
    )
    found = chat_template_of(recipe, resolve_model("stories-7m"), needed=True)
    return PromptBuilder(recipe, tokenizer, max_model_len=200, vocab_size=4096, template=found)


def test_a_template_owns_its_special_tokens_and_raw_text_gets_bos_once(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def ids(text: str) -> list[int]:
        row = Row(0, 1, None, {"messages": [{"role": "user", "content": "Hello"}]})
        return builder(tokenizer, tmp_path, text).build(row).token_ids

    hello = tokenizer.encode("Hello")[1:]
    assert ids("{{ messages[0].content }}") == hello
    assert ids("{{ bos_token }}{{ messages[0].content }}") == [0, *hello]
    assert ids("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == [0, 0, *hello, 1]
    assert not caplog.text
    raw = PromptBuilder(recipe_from_settings(), tokenizer, max_model_len=200, vocab_size=4096)
    for line, prompt in enumerate(["Hello", "<|bos|>Hello", "<|bos|>Hello"], start=1):
        assert raw.build(Row(0, line, None, {"prompt": prompt})).token_ids == [0, *hello]
    assert caplog.text.count("begins with <|bos|>") == 1
    assert "line 2" in caplog.text


def test_a_chat_template_that_gives_nothing_is_its_rows_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made = builder(tokenizer, tmp_path, "{% if messages[0]['content'] != 'hi' %}ok{% endif %}")
    rows = [Row(0, 1, None, {"messages": [{"role": "user", "content": text}]}) for text in ("ho", "hi")]
    assert made.build(rows[0]).token_ids == tokenizer.encode_batch(["ok"])[0]
    with pytest.raises(RowError, match="no tokens: the chat template gave an empty text") as caught:
        made.build(rows[1])
    assert caught.value.code == "empty_prompt"


def test_a_template_over_columns(tokenizer: Tokenizer) -> None:
    column = ColumnTemplate("Q: {{ question }}{% if hint %} ({{ hint | upper }}){% endif %}\nA:")
    assert column.render({"question": "why?", "hint": "ja"}) == "Q: why? (JA)\nA:"
    with pytest.raises(RowError, match=r"'question' is undefined \(columns: hint\)"):
        column.render({"hint": 1})
    assert column.render({"question": "why?", "hint": None}) == "Q: why?\nA:"
    with pytest.raises(RowError, match="a value is null, and would be written as None"):
        column.render({"question": None, "hint": None})
    with pytest.raises(RowError, match=r"a value is bytes .*, which are no text"):
        column.render({"question": Base64("YQ=="), "hint": None})
    with pytest.raises(RowError, match="empty text"):
        ColumnTemplate("{{ a }}").render({"a": ""})
    recipe = recipe_from_settings(["input.template=Tell me of {{ a }}"])
    built = PromptBuilder(recipe, tokenizer, max_model_len=200, vocab_size=4096).build(Row(0, 1, None, {"a": "dogs"}))
    assert built.token_ids == tokenizer.encode("Tell me of dogs")


def test_one_prompt_is_enough() -> None:
    with pytest.raises(RecipeError, match=r"input\.messages and input\.template both say what the prompt is"):
        recipe_from_settings(["input.template=x", "input.messages=m"])
