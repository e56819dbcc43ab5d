from typing import Any

import pytest

from jaxllm.config.errors import InputError
from jaxllm.text.chat_template import render_chat

HI = [{"role": "user", "content": "hi"}]
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_messages_and_generation_prompt_are_rendered() -> None:
    assert render_chat(PLAIN, HI) == "[user]hi[assistant]"
    assert render_chat(PLAIN, HI, add_generation_prompt=False) == "[user]hi"


def test_blocks_leave_no_blank_lines() -> None:
    template = (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    )
    assert render_chat(template, HI) == "hi\n"


def test_other_keywords_are_variables_of_the_template() -> None:
    assert (
        render_chat("{{ enable_thinking }}{{ missing }}{{ bos_token }}", HI, enable_thinking=False, bos_token="<s>")
        == "False<s>"
    )


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_tojson_keeps_unicode_quotes_and_order() -> None:
    tools = [{"name": "é<b>", "args": {"z": 1, "a": "'"}}]
    assert render_chat("{{ tools[0] | tojson }}", HI, tools=tools) == '{"name": "é<b>", "args": {"z": 1, "a": "\'"}}'
    assert render_chat("{{ tools | tojson(indent=1) }}", HI, tools=[{"a": 1}]) == '[\n {\n  "a": 1\n }\n]'
    assert render_chat("{{ tools is none }}", HI, tools=[]) == "True"


def test_loop_controls_namespaces_dates_and_generation_blocks_work() -> None:
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% set ns.n = ns.n + 1 %}{% endgeneration %}{% endfor %}{{ ns.n }}"
        "{{ strftime_now('%Y') | length }}"
    )
    assert render_chat(template, [*HI, *HI]) == "hi14"


def test_tool_calls_reach_the_template_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
    )
    assert render_chat(template, messages) == 'hi;{"x": [1]};ok;'
    assert call["function"]["arguments"] == '{"x": [1]}'


def test_null_fields_are_as_if_left_out() -> None:
    assert (
        render_chat("{{ messages[0].name is defined }}", [{"role": "user", "content": "hi", "name": None}]) == "False"
    )


@pytest.mark.parametrize(
    ("template", "kept"), [(PLAIN, " Once upon "), (PLAIN.replace("m['content']", "m.content | trim"), "Once upon")]
)
def test_the_final_message_can_be_left_open(template: str, kept: str) -> None:
    template += "<end>"
    messages = [*HI, {"role": "assistant", "content": " Once upon "}]
    text = render_chat(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"[user]hi[assistant]{kept}"
    assert messages[-1]["content"] == " Once upon "


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "refuses these messages: roles must alternate"),
        ("{{ messages[0].nothing.deeper }}", "refuses these messages: .*has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "refuses these messages: .*concatenate"),
        ("{{ messages.clear() }}", "refuses these messages: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: .*unsafe"),
        ("x\n{% if %}", "broken in line 2"),
        ("{% for m in messages %}", "broken"),
        ("{{ 1 | no_such_filter }}", "broken in line 1: No filter named"),
    ],
)
def test_a_template_that_fails_is_named_in_one_line(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        render_chat(template, HI)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list of messages, got str"),
        ({"role": "user"}, "messages must be a list of messages, got dict"),
        (["hi"], r"messages\[0\] must be an object with role and content, got str"),
        ([*HI, {"content": "x"}], r"messages\[1\].role must be a string such as 'user', got None"),
        ([{"role": "user"}], r"messages\[0\].content must be a string or a list of text parts, got NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be .* got int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\] has type 'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\] must be an object .* got str"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text must be a string"),
        ([{"role": "assistant", "tool_calls": "f"}], r"messages\[0\].tool_calls must be a list, got str"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"messages\[0\].tool_calls\[0\] must be an object"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"messages\[0\].tool_calls\[0\].function.arguments is not JSON",
        ),
    ],
)
def test_a_malformed_message_is_named_in_one_line(messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as refusal:
        render_chat(PLAIN, messages)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("tools", "message"),
    [("f", "tools must be a list of JSON schemas, got str"), ([print], r"tools\[0\] must be a JSON")],
)
def test_a_malformed_tool_is_named(tools: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render_chat(PLAIN, HI, tools=tools)


def test_a_final_message_cannot_be_new_and_continued_nor_left_unwritten() -> None:
    with pytest.raises(InputError, match="needs add_generation_prompt=False"):
        render_chat(PLAIN, HI, continue_final_message=True)
    with pytest.raises(InputError, match="does not write the final message"):
        render_chat("nothing", HI, add_generation_prompt=False, continue_final_message=True)
