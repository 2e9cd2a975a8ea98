"""What a template may do, and what ends with an error before it takes long or fills the memory."""

import time
import tracemalloc
from typing import Any

import jinja2
import pytest

from specgen.errors import RecipeError, RowError
from specgen.job import sandbox
from specgen.job.contents import checked_messages
from specgen.job.sandbox import Sandbox
from specgen.job.templates import ChatTemplate, ColumnTemplate

ROW = {"a": "x" * 1000, "big": "y" * 1_000_000, "lines": "\t\n" * 5000, "n": 10**9, "many": ["z" * 100_000] * 1000}
STEPS = r"takes more than 1,000,000 steps"
TEXT = r"makes a text of more than 10,000,000 characters"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{{ "x" * 10**10 }}', TEXT),
        ("{{ n * a }}", TEXT),
        ("{{ [0] * n }}", "makes a list of more than 1,000,000 items"),
        ("{{ 9**(9**9) }}", "makes a number of more than 10,000 bits"),
        ("{% set x = namespace(v=7) %}{% for i in range(99) %}{% set x.v = x.v * x.v %}{% endfor %}", "10,000 bits"),
        ("{% set x = namespace(v=a) %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}", TEXT),
        ("{% set x = namespace(v=a) %}{% for i in range(99) %}{% set x.v = x.v ~ x.v %}{% endfor %}", TEXT),
        ("{% set x = namespace(v=[1]) %}{% for i in range(99) %}{% set x.v = [x.v, x.v] %}{% endfor %}{{ x.v }}", TEXT),
        ("{% set x = namespace(v=[1]) %}{% for i in range(99) %}{% set x.v = x.v + x.v %}{% endfor %}", "makes a list"),
        ("{% for i in range(99999) %}{{ a }}{% endfor %}", TEXT),
        ("{% for i in range(99999) %}" + "t" * 1000 + "{% endfor %}", TEXT),
        ("{% set x %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}", TEXT),
        ("{% for i in range(99999) %}{{ 'c' * 1000 }}{% endfor %}", TEXT),
        ("{{ many }}", TEXT),
        ("{{ many | join }}", TEXT),
        ("{{ ''.join(many) }}", TEXT),
        ("{{ many | string }}", TEXT),
        ("{{ many | tojson }}", TEXT),
        ("{{ [1] | tojson(indent=n) }}", TEXT),
        ("{{ many | sum(start=[]) }}", "adds up lists"),
        ("{{ a.ljust(n) }}", TEXT),
        ("{{ a.center(width=n) if false else a | center(n) }}", TEXT),
        ("{{ lines.expandtabs(n) }}", TEXT),
        ("{{ lines | indent(100000) }}", TEXT),
        ("{{ lines | indent(big) }}", TEXT),
        ("{{ big.replace('y', a) }}", TEXT),
        ("{{ big | replace('y', a) }}", TEXT),
        ("{{ n.to_bytes(n) }}", TEXT),
        ("{{ '%9999999999d' % 1 }}", "formats to a width"),
        ("{{ '%*d' % (n, 1) }}", "formats to a width"),
        ("{{ '%9999999999d' | format(1) }}", "formats to a width"),
        ("{{ '{:>9999999999}'.format(1) }}", "formats to a width"),
        ("{{ '{:{}}'.format(1, n) }}", "formats to a width"),
    ],
)
def test_what_would_fill_the_memory_is_the_rows_error(text: str, told: str) -> None:
    tracemalloc.start()
    try:
        refused(text, told)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60e6


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", STEPS),
        ("{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}", STEPS),
        ("{% for i in range(99999) %}{% set x = [1] | batch(1000000, 0) | list %}{% endfor %}", STEPS),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", STEPS),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not end"),
    ],
)
def test_what_would_not_end_is_the_rows_error(text: str, told: str) -> None:
    started = time.process_time()
    refused(text, told)
    assert time.process_time() - started < 20


def refused(text: str, told: str) -> None:
    template = ColumnTemplate(text)
    with pytest.raises(RowError, match=told) as caught:
        template.render(ROW)
    assert caught.value.code == "bad_template"
    assert str(caught.value).startswith("input.template ")


def test_a_limit_is_one_rows_and_the_next_one_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "", tokens={}, system=None, args=None)
    chat = [{"role": "user", "content": "a"}]
    for _ in range(3):
        assert template.render(checked_messages(chat * 90, "m")) == "a" * 90
        with pytest.raises(RowError, match=r"the chat template takes more than 100 steps"):
            template.render(checked_messages(chat * 110, "m"))


@pytest.mark.parametrize(
    "text",
    [
        "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }};"
        "{% else %}none{% endfor %}",
        "{% for x in xs if x > 1 %}{{ x }}{{ loop.revindex }}{% endfor %}",
        "{% for k, v in d.items() %}{{ k ~ v }}{% endfor %}{% for x in gone %}{% endfor %}",
        "{% for x in nested recursive %}[{{ loop(x) if x is iterable else x }}]{% endfor %}",
        "{% for x in [] %}{% else %}empty{% endfor %}",
        "{% for x in xs %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
        "{% macro f(a, b=2) %}{{ a + b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3) %}c{% endcall %}",
        "{{ 2**10 }} {{ 7 * 6 }} {{ 'ab' * 3 }} {{ [1] * 3 + [2] }} {{ '%05.1f|%s' % (2, 'x') }} {{ 7 % 4 }}",
        "{{ '{:>8}|{}'.format('x', 10**12) }}{{ 'a,b'.split(',') | join('-') }}{{ xs | map('string') | join }}",
        "{{ d | tojson(indent=2) }}{{ xs | batch(2, 'z') | list }}{{ 'l\nl' | indent(4) }}{{ xs | sum(start=4) }}",
        "{{ 'x' | center(9) }}{{ 'aXa'.replace('X', 'yy') | replace('a', 'b', 1) }}{{ missing | default(10**12) }}",
        "{{ 'x' | default(10**12) }}{{ '7' | int(default=10**12) }}",
        "{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n ~ none }}",
        "{% set s %}t{{ 1 }}{% endset %}{{ s }}{% filter upper %}a{{ s }}{% endfilter %}{{ 'lit' }}{{ 3 }}",
    ],
)
def test_everything_else_is_as_jinja_has_it(text: str) -> None:
    names: dict[str, Any] = {"xs": [1, 2, 3], "d": {"a": 1, "é": [2]}, "nested": [1, [2, [3]]]}
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    plain.filters["tojson"] = sandbox._to_json
    ours = Sandbox()
    assert ours.rendered(ours.from_string(text), names) == plain.from_string(text).render(names)


@pytest.mark.parametrize("text", ["{{ [1, 2] | random }}", "{{ a }}{{ lipsum() }}"])
def test_chance_has_no_part_in_a_prompt(text: str) -> None:
    with pytest.raises((RecipeError, RowError), match=r"No filter named 'random'|'lipsum' is undefined"):
        ColumnTemplate(text).render(ROW)


def test_what_is_no_text_is_refused_in_a_concatenation_too() -> None:
    with pytest.raises(RowError, match="a value is null, and would be written as None"):
        ColumnTemplate("{{ a ~ b }}").render({"a": "x", "b": None})
