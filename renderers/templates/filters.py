"""The jinja filters that a chat template has: which of them, our replacements, and the checks before one runs."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from inspect import signature
from string import Formatter
from typing import Any

from jinja2 import Environment, pass_environment
from jinja2.filters import FILTERS, make_attrgetter

from renderers.templates.bounds import RenderBudget, TooMuch
from renderers.templates.provenance import TracedText, escape_html, safe

_FROM_JINJA = """
abs attr capitalize count d default dictsort first float format groupby indent int items last length list lower
map max min reject rejectattr replace reverse round select selectattr sort string sum title trim truncate unique
upper urlencode wordcount
"""
FROM_JINJA = frozenset(_FROM_JINJA.split())
"""The others print HTML, wrap or pad text, or draw at random."""

_PRINTF_WIDTH = re.compile(r"%(\([^()]*\))?[^%a-zA-Z()]*(\d{4}|\*)|%\([^)]*\(")
_FORMAT_WIDTH = re.compile(r"\d{4}|\{")
"""Formats that pad to 1000 characters or more, or to a width that comes with the values (or hide it in a name)."""

_MAX_WIDTH = 1000
_MAX_JSON_SEPARATORS = 64
_MAX_PRECISION = 20
_MAX_BACKWARD_STEPS = 10**8


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' `tojson`: unlike jinja's it does not escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def join(environment: Environment, value: Iterable[Any], d: str = "", attribute: int | str | None = None) -> str:
    """jinja's `join`, but the trust of the joined texts is kept."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    separator = str(d)
    return (separator if isinstance(separator, TracedText) else TracedText(separator, bytes(len(separator)))).join(
        map(str, value)
    )


OWN: Mapping[str, Callable[..., Any]] = {
    "e": escape_html,
    "escape": escape_html,
    "join": join,
    "safe": safe,
    "tojson": to_json,
}


def check(function: Callable[..., Any], budget: RenderBudget, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises `TooMuch` if this filter would make a large result of these arguments."""
    if function in _TAKING_APART:
        for argument in args:
            budget.expect_items(argument)
    if function in _CHECKS:
        arguments = _SIGNATURES[function].bind(*args, **kwargs)
        arguments.apply_defaults()
        _CHECKS[function](budget, **arguments.arguments)


def check_string_method(budget: RenderBudget, text: str, name: str, args: Sequence[Any]) -> None:
    match name, args:
        case "replace", [str(old), str(new), *_]:
            budget.expect(len(text) + text.count(old) * len(new))
        case "join", [items] if isinstance(items, Sized):
            budget.expect_items(items)
            budget.expect(budget.weigh(items) + len(text) * len(items))
        case "rfind" | "rindex" | "rpartition" | "rsplit", [str(part), *_]:
            # Python searches backwards in time quadratic in the worst case.
            if len(text) * len(part) > _MAX_BACKWARD_STEPS:
                raise TooMuch("it searches backwards for a long text in a long text")
        case "center" | "ljust" | "rjust" | "zfill", [int(width), *_]:
            budget.expect(width)


def check_printf(budget: RenderBudget, template: str, values: Any) -> None:
    if _PRINTF_WIDTH.search(template):
        raise TooMuch("it formats to a width of 1000 or more")
    budget.expect(len(template) + template.count("%") * budget.weigh(values))


def check_format(budget: RenderBudget, template: str, values: Any) -> None:
    fields = [spec for _, name, spec, _ in Formatter().parse(template) if name is not None]
    if any(spec and _FORMAT_WIDTH.search(spec) for spec in fields):
        raise TooMuch("it formats to a width of 1000 or more")
    budget.expect(len(template) + len(fields) * budget.weigh(values))


def _check_format_filter(budget: RenderBudget, value: Any, args: Any = (), kwargs: Any = None) -> None:
    check_printf(budget, str(value), kwargs or args)


def _check_replace(budget: RenderBudget, s: Any, old: Any, new: Any, **_: Any) -> None:
    check_string_method(budget, str(s), "replace", [str(old), str(new)])


def _check_join(budget: RenderBudget, value: Any, d: Any, **_: Any) -> None:
    check_string_method(budget, str(d), "join", [value])


def _check_indent(budget: RenderBudget, s: Any, width: Any, **_: Any) -> None:
    indent_len = len(width) if isinstance(width, str) else int(width)
    if indent_len > _MAX_WIDTH:
        raise TooMuch(f"it indents by more than {_MAX_WIDTH}")
    budget.expect(len(str(s)) + (str(s).count("\n") + 1) * indent_len)


def _check_json(budget: RenderBudget, value: Any, indent: Any, separators: Any, **_: Any) -> None:
    separators_len = len(indent) if isinstance(indent, str) else int(indent or 0)
    separators_len += sum(map(len, separators or ()))
    if separators_len > _MAX_JSON_SEPARATORS:
        raise TooMuch(f"it separates the items of JSON by more than {_MAX_JSON_SEPARATORS} characters")
    if indent is not None:  # the length grows with the depth
        length = 0
        for chunk in json.JSONEncoder(indent=indent).iterencode(value):
            length += len(chunk)
            budget.expect(length)
            budget.step()


def _check_round(budget: RenderBudget, precision: Any, **_: Any) -> None:
    if abs(int(precision)) > _MAX_PRECISION:
        raise TooMuch(f"it rounds to more than {_MAX_PRECISION} digits")


def _check_sum(budget: RenderBudget, start: Any, **_: Any) -> None:
    if not isinstance(start, int | float):  # adding lists to lists is quadratic
        raise TooMuch("it sums values that are not numbers")


_TAKING_APART = frozenset(
    FILTERS[name]
    for name in (
        "groupby",
        "list",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "select",
        "selectattr",
        "sort",
        "unique",
    )
) | {join}

_CHECKS: Mapping[Callable[..., Any], Callable[..., None]] = {
    FILTERS["format"]: _check_format_filter,
    FILTERS["indent"]: _check_indent,
    FILTERS["replace"]: _check_replace,
    FILTERS["round"]: _check_round,
    FILTERS["sum"]: _check_sum,
    join: _check_join,
    to_json: _check_json,
}
_SIGNATURES = {function: signature(function) for function in _CHECKS}
