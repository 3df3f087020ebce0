"""The child process in which chat templates run; `sandbox` starts it. It imports Jinja2 and nothing of ttrain.

A request is a pickle of (template, marks, names, variants); a variant is (messages, prompting). The answer is a line of
JSON. Its `text` is that of the first variant. Its `compared` has a list for every other variant: the number of
characters at the start that equal those of the first, the length, and the number of opening marks. If the template does
not compile, the answer has `template` with line and reason instead; after any other failure it has `failed`.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


def main(seconds: int, memory: int, out_of_memory: int) -> None:
    """Answer the requests on stdin until they end.

    `seconds` of computing bound each rendering, and `memory` the bytes of the process, which exits with the code
    `out_of_memory` when they are spent.
    """
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        _limit(kind, 0)
    if sys.platform == "linux":  # elsewhere memory is not bounded
        _limit(resource.RLIMIT_AS, memory)
    try:
        while True:
            source, marks, names, variants = pickle.load(sys.stdin.buffer)
            answer = _answer(source, marks, names, variants, seconds)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    except EOFError:
        return
    except MemoryError:
        os._exit(out_of_memory)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(
    source: str, marks: tuple[str, str], names: dict[str, Any], variants: list[Any], seconds: int
) -> dict[str, Any]:
    def begin() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))

    begin()
    try:
        template = _compiled(source, *marks)
    except MemoryError:
        raise
    except Exception as error:  # such as Python's own where too many blocks stand inside each other
        return {"template": [getattr(error, "lineno", None), str(error) or type(error).__name__]}
    texts = []
    try:
        for messages, prompting in variants:
            begin()
            texts.append(template.render(**names, messages=messages, add_generation_prompt=prompting))
    except MemoryError:
        raise
    except jinja2.TemplateError as error:
        return {"failed": f"refuses it: {error.message or error}"}
    except Exception as error:  # whatever a template may do wrong
        return {"failed": f"fails: {type(error).__name__}: {error}"}
    first = "".join(texts[:1])
    compared = [[_shared(first, text), len(text), text.count(marks[0] or "\0")] for text in texts[1:]]
    return {"text": first, "compared": compared}


def _shared(one: str, other: str) -> int:
    """Count the characters at the start that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


@lru_cache(maxsize=4)
def _compiled(source: str, opening: str, closing: str) -> jinja2.Template:
    """Compile a template as Transformers does, with `opening` and `closing` around what {% generation %} marks."""

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{opening}{caller()}{closing}"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:  # json.dumps takes more, such as a class that it would call
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
