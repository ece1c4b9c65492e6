"""Expressions of a configuration mean what they mean to `re`, in bounded time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.lora.format.patterns import MAX_PATTERN_CHARACTERS, Budget, Pattern, PatternRefused

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.language_model.layers.1.mlp.experts.gate_up_proj",
    "model.visual.blocks.0.attn.qkv",
    "lm_head",
    "a",
    "",
)
# From trainers that write such expressions.
EXPRESSIONS = (
    r".*\.(q|k|v|o)_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj"
    r"|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention"
    r"|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))",
    r"^(model\.language_model(?=\.).*\.(gate_up_proj|q_proj))$",
    r"^(?!.*(?:visual|lm_head)).*(?:q_proj|down_proj).*",
    r".*\.gate_up_proj",
    r"model\.layers\.(?:[0-9]|1[0-5])\..*",
    r"[^v]*",
    r"\Amodel\b.*\Z",
    "",
    "|",
    r"(?P<layer>.*)proj",
    r"a{0}b?|[]a-c-]+|x{,2}|a{|a{}",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_real_expressions_match_as_re_matches_them(expression: str, name: str) -> None:
    pattern = Pattern(expression)
    assert pattern.fullmatch(name, Budget()) is (re.fullmatch(expression, name) is not None)
    # as peft.utils.other.get_pattern_key
    assert pattern.matches_end(name, Budget()) is (re.match(rf"(.*\.)?({expression})$", name) is not None)


_atoms = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", r"\W", r"\s", r"\D", r"\b", r"\B", "^", "$", "[ab]", "[^a.]", "[a-c0-9]", "1"]
)
_quantifiers = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{1,}", "{0}"])


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(["(", "(?:", "(?P<n>", "(?=", "(?!"])
    group = st.builds(lambda start, body, end: f"{start}{body}){end}", groups, inner, _quantifiers)
    return st.one_of(group, st.builds(lambda x, y: f"{x}|{y}", inner, inner), st.builds(str.__add__, inner, inner))


_expressions = st.recursive(st.builds(str.__add__, _atoms, _quantifiers), _grow, max_leaves=8)


@given(expression=_expressions, name=st.text("ab.1_ ", max_size=7))
@settings(max_examples=3000, deadline=None)
def test_made_up_expressions_match_as_re_matches_them(expression: str, name: str) -> None:
    try:
        expected = re.fullmatch(expression, name)
    except re.error:
        return
    assert Pattern(expression).fullmatch(name, Budget()) is (expected is not None)


@given(expression=st.text("ab.\\[](){}|*+?^$-0,1d:=!<P\n", max_size=12), name=st.text("ab.01", max_size=4))
@settings(max_examples=3000, deadline=None)
def test_anything_that_is_accepted_means_what_it_means_to_re(expression: str, name: str) -> None:
    try:
        found = Pattern(expression).fullmatch(name, Budget())
    except PatternRefused:
        return
    assert found is (re.fullmatch(expression, name) is not None)


REFUSED = {
    "(": "unbalanced parenthesis",
    "a)": "unbalanced parenthesis",
    "[a": "unbalanced bracket",
    "[z-a]": "bad range of characters",
    r"[\d-z]": "bad range of characters",
    "*": "repeats nothing",
    "{2}a": "repeats nothing",
    "(|+)": "repeats nothing",
    "^*": "repeats nothing",
    "a**": "repeats a repetition",
    "a*+": "possessive",
    "a{3,2}": "bounds are reversed",
    "a{10001}": "more than 10000 times",
    "a{99999999999999}": "more than 10000 times",
    "a\\": r"uses the escape \\",
    r"\1": r"uses the escape \\1",
    r"[\b]": r"uses the escape \\b",
    "(?i)a": "a group that is not supported",
    "(?<!a)b": "a group that is not supported",
    "(" * 30 + "a" + ")" * 30: "nests deeper than 24",
    "a" * (MAX_PATTERN_CHARACTERS + 1): f"has {MAX_PATTERN_CHARACTERS + 1} characters",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_an_expression_is_refused(expression: str) -> None:
    with pytest.raises(PatternRefused, match=REFUSED[expression]):
        Pattern(expression)


@pytest.mark.parametrize(
    "expression",
    ["(a+)+b", "((((a{1,999}){1,999}){1,999}){1,999})x", "(a|aa|a*)*" * 100 + "b", "(.*.*.*.*)*x", "(?=(a*)*x)*" * 9],
)
def test_an_expression_takes_less_than_seconds(expression: str) -> None:
    started = time.process_time()
    try:
        assert not Pattern(expression).fullmatch("a" * 512, Budget())
    except PatternRefused as exc:
        assert str(exc) == "takes too many steps to match"  # noqa: PT017 - either outcome is right
    assert time.process_time() - started < 5
