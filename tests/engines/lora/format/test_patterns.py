"""Expressions of a configuration mean what they mean to `re`, in bounded time."""

import json
import re
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from engines.lora.format.patterns import MAX_PATTERN_CHARACTERS, Budget, Pattern, PatternRefused
from engines.lora.format.peft_config import parse_config

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
    r"a{0}b?|[]a-c-]+|x{,2}",
    r"(?i)MODEL\..*(?<=_PROJ)(?<!o_proj)|(?i:LM_HEAD)",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_real_expressions_match_as_re_matches_them(expression: str, name: str) -> None:
    assert Pattern(expression, Budget()).fullmatch(name) is (re.fullmatch(expression, name) is not None)
    if not expression.startswith("(?i)"):  # PEFT's text puts something before it
        end = rf"(.*\.)?({expression})$"
        assert Pattern(end, Budget()).match(name) is (re.match(end, name) is not None)


_atoms = st.sampled_from(
    ["a", "b", ".", r"\.", r"\d", r"\w", r"\W", r"\s", r"\D", r"\b", r"\B", "^", "$", "[ab]", "[^a.]", "[a-c0-9]", "1",
     "(?<=a)", "(?<!b)", "(?i:A)", "(?-i:a)", "[]a-]", r"[^\d_]", r"\A", r"\Z"]
)  # fmt: skip
_quantifiers = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{1,}", "{0}"])


def _grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.sampled_from(["(", "(?:", "(?P<n>", "(?=", "(?!"])
    group = st.builds(lambda start, body, end: f"{start}{body}){end}", groups, inner, _quantifiers)
    return st.one_of(group, st.builds(lambda x, y: f"{x}|{y}", inner, inner), st.builds(str.__add__, inner, inner))


_expressions = st.recursive(st.builds(str.__add__, _atoms, _quantifiers), _grow, max_leaves=8)


@given(expression=_expressions, name=st.text("ab.1_ A", min_size=1, max_size=7))
@settings(max_examples=2000, deadline=None)
def test_made_up_expressions_match_as_re_matches_them(expression: str, name: str) -> None:
    try:
        expected, ending = re.fullmatch(expression, name), re.match(rf"(.*\.)?({expression})$", name)
    except re.error:
        return
    assert Pattern(expression, Budget()).fullmatch(name) is (expected is not None)
    assert Pattern(rf"(.*\.)?({expression})$", Budget()).match(name) is (ending is not None)


@given(
    expression=st.text("ab.\\[](){}|*+?^$-0,1d:=!<Pi#&~ s\n", max_size=12),
    name=st.text("ab.01 -", min_size=1, max_size=4),
)
@settings(max_examples=3000, deadline=None)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_anything_that_is_accepted_means_what_it_means_to_re(expression: str, name: str) -> None:
    try:
        found = Pattern(expression, Budget()).fullmatch(name)
    except PatternRefused:
        return
    assert found is (re.fullmatch(expression, name) is not None)


REFUSED = {
    "(": "is not a regular expression: missing \\), unterminated subpattern at position 0",
    "a)": "is not a regular expression: unbalanced parenthesis",
    "[a": "is not a regular expression: unterminated character set",
    "[z-a]": "is not a regular expression: bad character range z-a",
    "*": "is not a regular expression: nothing to repeat",
    "a**": "is not a regular expression: multiple repeat",
    "a{3,2}": "is not a regular expression: min repeat greater than max",
    "a\\": "is not a regular expression: bad escape",
    "(?<=a*)b": "is not a regular expression: look-behind requires fixed-width",
    "a(?i)b": "is not a regular expression: global flags not at the start",
    "a*+": r"uses the possessive quantifier \*\+",
    "a{99999999999999}": r"uses '\{' at position 1, which is not supported there",
    "(?:foo){e<=1}": r"uses '\{' at position 7, which is not supported there",  # to `regex` one error is allowed
    "{2}a": "is not a regular expression: nothing to repeat",
    r"(a)\1": r"uses the escape \\1",
    r"\p{L}": r"uses the escape \\p",
    r"\L<names>": r"uses the escape \\L",
    r"\N{DIGIT ONE}": r"uses the escape \\N",
    r"[\b]\x61": r"uses the escape \\x",
    r"[\1]": r"uses the escape \\1",
    "(a)(?(1)b)": r"uses \(\?, which is not supported",
    "(?P<a>b)(?P=a)": r"uses \(\?P, which is not supported",
    "(?>a)": r"uses \(\?, which is not supported",
    "(?#)": r"uses \(\?, which is not supported",
    "(?x) a": r"uses \(\?x\), which is not supported",
    "(?R)": r"uses \(\?R\), which is not supported",
    "(?V1)a": r"uses \(\?V, which is not supported",
    "[[:alpha:]]": r"uses the set '\[\[:alpha:\]', which is not supported",
    "[a--b]": r"uses the set '\[a--b\]', which is not supported",
    "(?i:é)": "uses 'é' at position 4, which is not supported there",
    "(" * 30 + "a" + ")" * 30: "nests deeper than 24",
    "a"
    * (MAX_PATTERN_CHARACTERS + 1): f"has {MAX_PATTERN_CHARACTERS + 1} characters, more than {MAX_PATTERN_CHARACTERS}",
    # Each of these takes `regex` gigabytes to compile.
    "a{65535}": "repeats so much that it is 65536 characters, more than 20000",
    "(a{300}){300}": "repeats so much that it is 91203 characters, more than 20000",
    "(" * 20 + "a" + ")+" * 20: "repeats so much that it is .* characters, more than 20000",
    "(?=" * 20 + "a" + "){1,}" * 20: "repeats so much that it is .* characters, more than 20000",
}


@pytest.mark.parametrize("expression", REFUSED)
def test_an_expression_is_refused(expression: str) -> None:
    with pytest.raises(PatternRefused, match=f"^{REFUSED[expression]}"):
        Pattern(expression, Budget())


HOSTILE = [
    "(a+)+b",
    "((((a{1,9}){1,9}){1,9}){1,9})x",
    "(a|aa|a*)*" * 100 + "b",
    "(.*.*.*.*)*x",
    "(?=(a*)*x)*" * 9,
    "a?" * 2000 + "a" * 90,
    ".*?" * 1300 + "x",
    "(?:" * 20 + "a" + ")*" * 20,
    "(?:a|b|ab)*" * 200 + "[^a]",
    "(?:" * 20 + "ab?" + ")?" * 20 + "x",
    "((b*)*a){100,}b",
    "|".join("a" * k for k in range(1, 120)),
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_a_hostile_expression_takes_a_tenth_of_a_second_and_little_memory(expression: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    try:
        Pattern(expression, Budget()).fullmatch("a" * 512)
    except PatternRefused as exc:
        assert str(exc).startswith("takes too long to match 'aaa")  # noqa: PT017 - either outcome is right
    assert time.thread_time() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_all_expressions_of_an_adapter_share_a_budget() -> None:
    budget = Budget(seconds=0.3, weight=2000)
    slow = Pattern("((((a{1,9}){1,9}){1,9}){1,9})x", budget)
    refusals: list[str] = []
    for _ in range(7):  # each takes 0.05 s at least, and at most twice that
        with pytest.raises(PatternRefused) as refused:
            slow.fullmatch("a" * 500)
        refusals.append(str(refused.value))
    assert refusals[0].startswith("takes too long to match 'aa")
    assert refusals[-1] == "takes too long to match, with the expressions before it"
    with pytest.raises(PatternRefused, match="is too much to compile, with the expressions before it"):
        Pattern("a" * 2000, budget)


_keys = st.text("q.1_", max_size=4) | st.sampled_from([r"q\..*", "(q|1)_", "q)|(1", "^q", ".*"])


@given(keys=st.lists(_keys, max_size=6, unique=True), name=st.text("q.1_", min_size=1, max_size=9))
@settings(max_examples=1000, deadline=None)
def test_the_first_key_that_matches_counts_as_in_peft(keys: list[str], name: str) -> None:
    numbers = {key: order + 1 for order, key in enumerate(keys)}
    config = parse_config(json.dumps({"peft_type": "LORA", "r": 100, "rank_pattern": numbers}).encode())
    assert config.rank_and_scale(name)[0] == numbers.get(get_pattern_key(keys, name), 100)
