"""Templates that never end or build gigabytes are stopped in one line; those that only work hard are not.
No clock is needed: a hostile template here would take hours or all memory if it were not stopped."""

from typing import Any

import pytest

from octavo.errors import ConfigError, InvalidRequest
from octavo.text.chat.template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = HI, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(messages, **variables)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% for i in range(99999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
]
ENORMOUS = [
    "{{ 'a' * 10 ** 12 }}",
    "{{ [1] * 99999999999 }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = '%s%s' % (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = '{0}{0}'.format(ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aaa') %}{% endfor %}",
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{{ x }}{% endmacro %}"
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{{ [s] * 100000 }}",
    "{% set s = 'a' * 1000000 %}{{ ([s] * 100000) | tojson }}",
    "{% set s = 'a' * 1000000 %}{{ {'k': [s] * 100000}.values() | string }}",
    "{% set ns = namespace(x=['a' * 1000000] * 100000) %}{{ ns }}",
    "{% set s = 'a' * 1000000 %}{{ range(99999) | map('string') | join(s) }}",
    "{% set s = 'a' * 1000000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(99999) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "{{ [[1] * 99999] | map('list') | list | sum(start=[]) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ ('\\n' * 100000) | indent(100000) }}",
    "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "{{ ('a ' * 1000000) | wordwrap(2, wrapstring='b' * 1000000) }}",
    "{{ tools | tojson(indent=100000) }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 5 | round(-1000000000) }}",
    "{{ 'a'.translate('a'.maketrans({'a': 'b'})) }}",
    "{{ '{:.{}f}'.format(1.5, 2000000000) }}",
    "{{ '{:{width}}'.format(1, width='>2000000000') }}",
    "{{ '{0:{1[0]}}'.format('a', [2000000000]) }}",
    "{{ '{:{}{}}'.format('a', '20000', '00000') }}",
    "{{ (' ' * 1000000) | wordwrap(1) }}",
    "{{ (1).to_bytes(2000000000, 'big') | length }}",
]


@pytest.mark.parametrize("source", [*ENDLESS, *ENORMOUS])
def test_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.text.chat.template_limits.MAX_SECONDS", 0.2)
    with pytest.raises(InvalidRequest, match=r"the chat template .*which is not allowed") as raised:
        render(source, tools=[{"a": 1}])
    assert "\n" not in raised.value.message
    assert raised.value.param == "messages"


def test_hard_work_is_not() -> None:
    """Several hundred times the work of a long chat, for every operation that is counted."""
    source = (
        "{% macro show(m) %}{{ '<' ~ m.role ~ '>' + m.content | trim }}{{ m.content[:5].upper() }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{{ '%s|' % loop.index }}{{ m | tojson(indent=2) | length }}"
        "{{ m.content.replace('a', 'bb') | replace('b', 'c') | length }}{{ ['x', m.role] | join(',') }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": f" message {at} " + "a" * 1000} for at in range(2000)]
    text = render(source, messages)
    assert text.startswith("<user>message 0 aaa")
    assert text.count("\n") == 2000
    assert len(text) > 2_000_000


def test_widths_that_are_values_are_rendered() -> None:
    assert render("{{ '{:>{}}|{:.{n}f}'.format('a', 4, 1.25, n=1) }}") == "   a|1.2"


def test_one_rendering_does_not_pay_for_another() -> None:
    template = ChatTemplate({"default": "{{ ('a' * 30000000) | length }}"}, {})
    assert [template.render(HI) for _ in range(5)] == ["30000000"] * 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x" * 2_000_000, "2,000,000 characters"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "cannot be compiled"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_a_start_up_mistake(source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        ChatTemplate({"default": source}, {})
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends 'x' %}",
        "{{ messages.__class__ }}{{ ''.__class__.__base__.__subclasses__()[0] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ lipsum(99999) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
    ],
)
def test_nothing_outside_can_be_reached(source: str) -> None:
    with pytest.raises((InvalidRequest, ConfigError)):
        print(render(source))
