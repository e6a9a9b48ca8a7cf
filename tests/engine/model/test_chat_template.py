from datetime import datetime
from typing import Any

import pytest

from tidegate_engine.model.chat_template import ChatTemplate, ChatTemplateError

CHAT = [{"role": "user", "content": 'say "hé" <b>'}, {"role": "assistant", "content": "hé"}]


def render(source: str) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(CHAT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages | length }}{{ eos_token }}", "<s>2</s>"),
        ("{% if add_generation_prompt %}assistant:{% endif %}", "assistant:"),
        ("{% if tools %}no{% endif %}{% if tools is defined %}no{% endif %}ok", "ok"),
        ("{{ messages[0]['content'] | tojson }}", '"say \\"hé\\" <b>"'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", "user"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "hé!"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("  {% if true %}\nline\n  {% endif %}\n", "line\n"),
    ],
)
def test_templates_get_what_transformers_gives_them(source: str, expected: str) -> None:
    assert render(source) == expected


def test_templates_know_the_day() -> None:
    before = datetime.now().astimezone()
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    after = datetime.now().astimezone()
    assert text in {before.strftime("%Y-%m-%d"), after.strftime("%Y-%m-%d")}


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.strip() }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ '%d' | format('x') }}",
    ],
)
def test_a_template_that_fails_on_messages_says_so(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="messages: "):
        render(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}"])
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template isn't valid"):
        render(source)


@pytest.mark.reference
@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}</s>\n{% endfor %}",
        "{{ messages | tojson }} {{ messages | tojson(indent=2) }}\n{% if 1 %}\n x\n{% endif %}",
        "{%- for m in messages[::-1] %}{{ loop.index0 }}{% generation %}{{ m.content }}"
        "{% endgeneration %}{%- endfor %}{{ bos_token }}",
    ],
)
def test_templates_render_as_in_the_reference(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert [render(source)] == rendered[0]
