"""Jinja2's sandbox with bounds: a stranger's template neither runs for ever nor fills the memory."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

from ttrain.core.errors import DataError

SECONDS = 10.0  # of computing that one rendering may take
VOLUME = 500_000_000  # characters and items that one rendering may make, those of values on the way included
_INTEGER = 1_000_000  # the largest that a filter or a method is given, such as a width
_WIDE = re.compile(r"%[^a-z%]*(?:\*|\d{7})|\{[^}]*\d{7}", re.IGNORECASE)  # a format with a width as large
_SAFE = (3, 1, 6)  # earlier versions of Jinja2 have known ways out of the sandbox


class Exceeded(Exception):
    """A rendering takes more than it may."""


class Meter(threading.local):
    """What the rendering of this thread may still take: nothing before `start`, so that nothing is folded."""

    until, left, checks = 0.0, 0, 0

    def start(self) -> None:
        """A rendering begins."""
        self.until, self.left, self.checks = time.thread_time() + SECONDS, VOLUME, 0

    def check(self, size: int = 0) -> None:
        """Raises Exceeded where no value of that size may be made any more, or the time is over."""
        if size > self.left:
            raise Exceeded(f"makes more than {VOLUME:,} characters")
        self.checks += 1
        if self.checks % 16 == 0 and time.thread_time() > self.until:  # asking the system costs more than the rest
            raise Exceeded(f"computes for more than {SECONDS:g} s")

    def made(self, value: Any) -> Any:
        """The value, which counts."""
        size = _size(value)
        self.check(size)
        self.left -= size
        return value

    def written(self, value: Any) -> str:
        """What an output writes of a value."""
        return str(self.made(str(value)))

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            self.check()
            yield item

    def given(self, name: str, value: Any, further: list[Any]) -> None:
        """Raises Exceeded for what a filter or method of this name must not be given beside its value."""
        if any(isinstance(each, int) and each > _INTEGER for each in further):
            raise Exceeded(f"gives {name} a number above {_INTEGER:,}")
        if name in ("format", "format_map"):
            self.check_format(value)
        elif name == "replace" and len(further) > 1:
            self.check(str(value).count(str(further[0])) * _size(further[1]))
        elif name == "join" and further:
            self.check(_size(value) * _size(further[0]))
        self.check()

    def check_format(self, text: Any) -> None:
        """Raises Exceeded for a format that asks for too wide a field."""
        if isinstance(text, str) and _WIDE.search(text):
            raise Exceeded(f"writes a field wider than {_INTEGER:,}")

    def check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Raises Exceeded for a product, power or format that would be too large."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.check(_size(left) * abs(right))
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(sized, int):
                    self.check(_size(sized) * times)
        elif operator == "%":
            self.check_format(left)


def _size(value: Any) -> int:
    """Characters, items, or bits of a whole number."""
    if isinstance(value, int):
        return value.bit_length()
    try:
        return len(value)
    except TypeError:
        return 0


def compiled(source: str, meter: Meter, opening: str = "", closing: str = "") -> Any:
    """The template in a sandbox: nothing of Python but data, no change to what it is given, no import, no file."""
    try:
        import jinja2
    except ImportError:
        raise DataError("data.template=tokenizer needs the package jinja2: pip install 'ttrain[hf]'.") from None
    if tuple(int(part) for part in re.findall(r"\d+", jinja2.__version__)[:3]) < _SAFE:
        raise DataError(f"jinja2 {jinja2.__version__} has holes in its sandbox: pip install -U 'jinja2>=3.1.6'.")
    environment = _metered_sandbox(meter)(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(opening, closing), "jinja2.ext.loopcontrols"]
    )

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.filters = {name: _metered(name, each, meter) for name, each in environment.filters.items()}
    environment.filters |= {f"ttrain {each.__name__}": each for each in (meter.each, meter.made, meter.written)}
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except Exception as error:  # such as Python's own where too many blocks stand inside each other
        line = getattr(error, "lineno", None)
        why = str(error) or type(error).__name__
        raise DataError(f"the tokenizer's chat template{f', line {line}' if line else ''}: {why}.") from None


def _generation(opening: str, closing: str) -> Any:
    """The extension {% generation %} .. {% endgeneration %}, around what the assistant wrote."""
    from jinja2 import ext, nodes

    class Generation(ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{opening}{caller()}{closing}"

    return Generation


def _metered_nodes() -> Any:
    """Puts a filter of the meter around all that is looped over, joined or written."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Metered(NodeTransformer):
        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            node.iter = filtered(node.iter, "each")
            return node

        def visit_Concat(self, node: Any) -> Any:
            return filtered(self.generic_visit(node), "made")

        def visit_Output(self, node: Any) -> Any:
            self.generic_visit(node)
            plain = nodes.TemplateData
            node.nodes = [part if isinstance(part, plain) else filtered(part, "written") for part in node.nodes]
            return node

    def filtered(node: Any, name: str) -> Any:
        return nodes.Filter(node, f"ttrain {name}", [], [], None, None, lineno=node.lineno)

    return Metered()


def _metered_sandbox(meter: Meter) -> Any:
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))

        def _parse(self, *given: Any) -> Any:
            return _metered_nodes().visit(super()._parse(*given))

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            meter.check_operands(operator, left, right)
            return meter.made(super().call_binop(context, operator, left, right))

        def call(self, context: Context, function: Any, /, *given: Any, **named: Any) -> Any:
            method = getattr(function, "__wrapped__", function)  # the sandbox's own around str.format
            owner = getattr(method, "__self__", None)
            meter.check()
            if owner is not None:
                meter.given(method.__name__, *_by_role(method, owner, [*given, *named.values()]))
            return meter.made(super().call(context, function, *given, **named))

    return Sandbox


def _by_role(method: Any, owner: Any, given: list[Any]) -> tuple[Any, list[Any]]:
    """The value that a method works on, and what it is given beside: of str.join the text is what is beside."""
    return (given[0], [owner]) if method.__name__ == "join" and given else (owner, given)


def _metered(name: str, function: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """A filter of Jinja2 that counts."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the environment or the like

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        meter.given(name, given[first], [*given[first + 1 :], *named.values()])
        return meter.made(function(*given, **named))

    return run


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # json.dumps takes more, such as a class that it would call
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
