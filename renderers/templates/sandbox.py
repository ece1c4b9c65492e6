"""The jinja environment of chat templates: transformers' own, with limits, and with the template's literals marked.

A template comes with a model or a checkpoint, so its code is untrusted. jinja's sandbox protects Python's internals,
but not the machine's memory and time: `'x' * 10**9`, nested loops, nested lists. Here an operation that can make a
large result is checked before it runs, every value is weighed, and the time of a rendering is limited (`bounds`). Names
that no chat template needs do not exist.

The template's literals become `TracedText`, trusted (`provenance`).
"""

import types
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from renderers.templates import filters
from renderers.templates.bounds import RenderBudget, TooMuch
from renderers.templates.provenance import TracedText, mask_of

_BUDGET: ContextVar[RenderBudget] = ContextVar("the budget of the rendering")

_STRING_METHODS = """
capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind
rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
"""
_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
"""The methods that a template may call on a value. Those that change it or multiply its size are left out."""


class TemplateRefusal(TemplateError):
    """The template itself refused the conversation, by `raise_exception`."""


class BoundedTemplate:
    """A compiled template; thread-safe. Raises what jinja and Python's compiler raise for a source with faults."""

    def __init__(self, source: str) -> None:
        self._template = _Environment().from_string(source)

    def render(self, variables: Mapping[str, object]) -> TracedText:
        """Raises `TemplateRefusal`, `TooMuch`, and whatever Python raises for what the template does."""
        token = _BUDGET.set(RenderBudget(variables))
        try:
            return _concat(self._template.root_render_func(self._template.new_context(dict(variables))))
        finally:
            _BUDGET.reset(token)


def _concat(parts: Iterable[str]) -> TracedText:
    """Joins the output of a template, macro or block: what `"".join` does in an ordinary environment."""
    budget, texts, length = _BUDGET.get(), [], 0
    for part in parts:
        length += len(part)
        budget.expect(length)
        budget.step()
        texts.append(part)
    return budget.admit(TracedText("".join(texts), b"".join(map(mask_of, texts))))


class _Generator(CodeGenerator):
    """Compiles string literals to `TracedText`. Has the code that makes, compares or prints values weigh them."""

    environment: "_Environment"

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802
        if type(node.value) is str:
            self.write(self._literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._weighed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.arg, nodes.Slice):
            self._weighed(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self._weighed(super().visit_Compare, node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("concat(map(environment.shown, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.shown(")

    def _weighed(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.admit(")
        visit(node, frame)
        self.write(")")

    def _literal(self, text: str) -> str:
        self.environment.literals.append(TracedText.trusted(text))
        return f"environment.literals[{len(self.environment.literals) - 1}]"

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # Nothing but literals is computed while a template is compiled: there is no budget then.
        if isinstance(node, nodes.TemplateData | nodes.Const):
            return super()._output_child_to_const(node, frame, finalize)
        raise nodes.Impossible

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._literal("".join(group))


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: renders its content. (transformers uses the tag to find the assistant's
    tokens.)
    """

    tags = {"generation"}  # noqa: RUF012 - the type that jinja declares

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(lineno)

    def _enclosed(self, caller: Macro) -> str:
        return caller()


class _TemplateNamespace(Namespace):
    """jinja's, but its attributes cannot reach into Python, and printing it does not print them."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # So that `namespace(self=…)` works, as in jinja.
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _DictMaker:
    """The `dict` of templates: makes dicts, but is not the type, whose attributes would expose Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}: it starts with an underscore")


class _Environment(ImmutableSandboxedEnvironment):
    """One per template: it holds the template's literals."""

    code_generator_class = _Generator
    concat = staticmethod(_concat)
    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        # The optimizer is off: it would compute `'x' * 10**9` while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.literals: list[TracedText] = []
        self.filters = {name: _bounded(FILTERS[name]) for name in filters.FROM_JINJA}
        self.filters |= {name: _bounded(function) for name, function in filters.OWN.items()}
        self.filters["iterated"] = _iterated
        self.tests = {name: _stepped(test) for name, test in TESTS.items()}
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, of at most 100 000 items
            "namespace": _TemplateNamespace,
            "dict": _DictMaker(),
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "iterated", [], [], None, None).set_lineno(loop.lineno)
        _replace_list_changes(template)
        template.set_environment(self)
        return template

    def admit(self, value: Any) -> Any:
        return _BUDGET.get().admit(value)

    def shown(self, value: Any) -> str:
        """Replaces the `str` of an ordinary environment: a value as it is printed."""
        text = str(value)
        return text if isinstance(value, str) else self.admit(text)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _BUDGET.get().step()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                budget.expect(len(left) + len(right))
            case "*":
                _check_product(budget, left, right)
            case "**":
                _check_power(left, right)
            case "%" if isinstance(left, str):
                filters.check_printf(budget, left, right)
        return budget.admit(self.binop_table[operator](left, right))

    def call(__self, __context: Context, __callable: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _BUDGET.get()
        for argument in (*args, *kwargs.values()):
            budget.admit(argument)
        _check_callable(budget, __callable, args)
        return budget.admit(super().call(__context, __callable, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, TracedText):
            value = getattr("".join([value.__self__]), value.__name__)  # jinja makes the result of the string's type
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        @wraps(formatted)
        def bounded(*args: Any, **kwargs: Any) -> str:
            filters.check_format(_BUDGET.get(), value.__self__, (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return bounded


def _replace_list_changes(node: nodes.Node) -> None:
    """Kimi K2's template keeps a queue: `{% set _ = ns.ids.append(x) %}`, `{% set x = ns.ids.pop(0) %}`.

    A list that changed would outgrow its weight, so no list can change here. The two statements become `ns.ids + [x]`
    and `ns.ids[1:]`, which make a new list. (A second name for the list keeps the old one.)
    """
    for child in node.iter_child_nodes():
        _replace_list_changes(child)
    for name, statements in node.iter_fields():
        if isinstance(statements, list) and any(isinstance(statement, nodes.Assign) for statement in statements):
            setattr(node, name, [step for statement in statements for step in _without_list_change(statement)])


def _without_list_change(statement: nodes.Node) -> list[nodes.Node]:
    steps: list[tuple[nodes.Expr, nodes.Expr]]
    match statement:
        case nodes.Assign(
            node=nodes.Call(
                node=nodes.Getattr(node=nodes.Getattr(node=nodes.Name() as owner, attr=attr) as items, attr=method),
                args=args,
                kwargs=[],
                dyn_args=None,
                dyn_kwargs=None,
            )
        ):
            pass
        case _:
            return [statement]
    match method, args:
        case "append", [nodes.Expr() as item]:
            steps = [(nodes.NSRef(owner.name, attr), nodes.Add(items, nodes.List([item])))]
            steps.append((statement.target, nodes.Const(None)))
        case "pop", [nodes.Const(value=0)]:
            rest = nodes.Slice(nodes.Const(1), None, None)
            steps = [(statement.target, nodes.Getitem(items, nodes.Const(0), "load"))]
            steps.append((nodes.NSRef(owner.name, attr), nodes.Getitem(items, rest, "load")))
        case _:
            return [statement]
    return [nodes.Assign(target, value).set_lineno(statement.lineno, override=True) for target, value in steps]


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are lists rather than lazy iterators, and whose result is weighed."""

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _BUDGET.get()
        settled = [_settled(budget, argument) for argument in args]
        filters.check(function, budget, settled, kwargs)
        return budget.admit(_settled(budget, function(*settled, **kwargs)))

    return bounded


def _stepped(test: Any) -> Callable[..., Any]:
    @wraps(test)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        _BUDGET.get().step()
        return test(*args, **kwargs)

    return stepped


def _iterated(items: Any) -> Any:
    """What a loop runs over, wrapped around it in `_parse`: a loop without any operation checks the time too."""
    _BUDGET.get().step()
    return _settled(_BUDGET.get(), items)


def _settled(budget: RenderBudget, value: Any) -> Any:
    # A loop's own object is an iterator too, but its items are counted by the loop.
    return value if isinstance(value, LoopContext) else budget.settle(value)


def _check_callable(budget: RenderBudget, function: Any, args: tuple[Any, ...]) -> None:
    if not isinstance(function, types.BuiltinMethodType | types.MethodType):
        return
    owner, name = function.__self__, function.__name__
    if isinstance(owner, _DictMaker):
        budget.expect_items(args[0] if args else None)
    if isinstance(owner, LoopContext | jinja2.ext.Extension | _DictMaker):
        return
    allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset[str]())
    if name not in allowed:
        raise SecurityError(f"a chat template cannot call {name!r} of a value of type {type(owner).__name__!r}")
    if isinstance(owner, str):
        filters.check_string_method(budget, owner, name, args)


def _check_product(budget: RenderBudget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > 4096:
            raise TooMuch("it multiplies numbers that are too large")
    elif isinstance(left, int) or isinstance(right, int):
        count, value = (left, right) if isinstance(left, int) else (right, left)
        budget.expect(count * budget.weigh(value))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > 4096:
        raise TooMuch("it raises a number to a power that is too large")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(template: str) -> str:
    if len(template) > 1000:
        raise TooMuch("it formats a date in more than 1000 characters")
    return datetime.now().strftime(template)
