"""Families that the generic renderer is nearly enough for, and SmolLM3: their end tokens, and their tools."""

import pytest

from renderers import registry
from renderers.base import ReplyEnd
from renderers.messages import Conversation
from tests.renderers.families.case import FORECAST, TOOLS
from tests.renderers.families.cases import gemma, llama, phi, qwen, smollm
from tests.support.renderer_kit import chatml_tokenizer, parse, pieces_of, system, template, user


def ends(renderer, tokenizer):
    return set(tokenizer.convert_ids_to_tokens(sorted(renderer.stop_token_ids)))


@pytest.mark.parametrize(
    ("tokenizer", "name", "expected"),
    [
        (llama.llama3_tokenizer, "llama3_1", {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"}),
        (gemma.gemma3_tokenizer, "gemma3", {"<end_of_turn>", "<eos>"}),
        (phi.phi4_tokenizer, "phi4", {"<|im_end|>", "<|endoftext|>"}),
        (phi.phi4_mini_tokenizer, "phi4_mini", {"<|end|>", "<|endoftext|>"}),
        (chatml_tokenizer, "smollm2", {"<|im_end|>", "<|endoftext|>"}),
        (smollm.smollm3_tokenizer, "smollm3", {"<|im_end|>"}),
    ],
)
def test_a_reply_ends_at_every_token_that_the_model_has_for_it(tokenizer, name, expected):
    renderer = registry.build(None, tokenizer(), template(name))
    assert ends(renderer, tokenizer()) == expected


def test_llama_s_tools_are_rendered_though_its_calls_are_text():
    renderer = registry.build(None, llama.llama3_tokenizer(), template("llama3_1"))
    prompt = renderer.render(Conversation((user("q"),), (FORECAST,)))
    assert '"name": "forecast"' in llama.llama3_tokenizer().decode(prompt.token_ids)
    assert not renderer.supports_tools


# --- SmolLM3 ---


def smollm3(source=None):
    return registry.build(None, smollm.smollm3_tokenizer(), source or template("smollm3"))


@pytest.mark.parametrize(("flag", "reasons"), [("/think", True), ("/no_think", False)])
def test_a_flag_in_the_system_message_decides_on_reasoning(flag, reasons):
    prompt = smollm3().render(Conversation((system(f"Be brief. {flag}"), user("q")), effort=not reasons))
    assert (prompt.prefill == "") is reasons
    written = "<think>\nwhy\n</think>\n\nhi<|im_end|>"
    found = parse(smollm3(), [pieces_of(smollm.smollm3_tokenizer(), written)], ReplyEnd.END, prompt.prefill)
    assert (found.reasoning == "why", found.malformed) == (reasons, not reasons)


def test_without_a_place_for_tools_in_the_template_smollm3_has_none():
    assert not smollm3().supports_tools


XML_TOOLS = """{{- '<|im_start|>system\\nReasoning Mode: /think\\n' }}
{%- for tool in xml_tools or [] %}{{- tool | string + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""


@pytest.mark.parametrize(
    ("source", "shown"),
    [(XML_TOOLS, FORECAST.declared["function"]), (XML_TOOLS.replace("xml_tools", "tools"), FORECAST.declared)],
)
def test_smollm3_gets_tools_in_the_variable_that_its_template_has(source, shown):
    renderer = smollm3(source)
    assert (renderer.name, renderer.supports_tools) == ("smollm3", True)
    text = smollm.smollm3_tokenizer().decode(renderer.render(Conversation((user("q"),), (FORECAST,))).token_ids)
    assert f"/think\n{shown}\n<|im_end|>" in text
    written = qwen.write_call("forecast", {"city": "Köln"})
    found = parse(renderer, [pieces_of(smollm.smollm3_tokenizer(), f"{written}<|im_end|>")], ReplyEnd.END, tools=TOOLS)
    assert found.calls == [("forecast", '{"city": "Köln"}')]
