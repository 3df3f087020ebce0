"""A result for people: tables and notes on the terminal and in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ttrain.bench.results import COST_MODEL, SIMULATED, CaseResult, Earlier, Result, Row
from ttrain.bench.tables import Lines, sweep_tables, tables_of
from ttrain.config.registry import families
from ttrain.core.tables import fitted, window

BUSY = 0.1  # share of all cores used by others from which on a note says so


def sections(result: Result, earlier: Earlier | None) -> Iterator[tuple[str, list[Lines], list[str]]]:
    """(heading, tables, notes) in order: one section per case, or one for all sizes of a sweep."""
    cases = result.cases
    if result.kind == "sweep" and cases and all(case.basis != COST_MODEL for case in cases):
        told = list(dict.fromkeys(note for case in cases for note in notes(result, case, earlier)))
        found = sweep_tables(cases, earlier)
        for number, (precision, lines) in enumerate(found):
            yield f"{result.bench}, {precision}", [lines], told if number == len(found) - 1 else []
    else:
        seen: set[str] = set()
        for case in cases:
            told = [note for note in notes(result, case, earlier) if note not in seen]
            seen.update(told)
            yield case.heading, tables_of(case, result.kind, earlier), told
    if result.notes:
        yield "", [], result.notes


def _verdict(row: Row, case: CaseResult, several: bool) -> str:
    """Why there is nothing to compare."""
    where = f" at {case.title}" if several else ""
    return f"{row.contender}{where}: {row.status}" + (f", {row.reason}" if row.reason else "").rstrip(".") + "."


def notes(result: Result, case: CaseResult, earlier: Earlier | None) -> Iterator[str]:
    """What a reader must know about a case's table."""
    device = case.device
    if case.basis == COST_MODEL:
        yield (
            f"These times are from {device['model']} ({device['name']}), not from a card: there is none here. "
            "docs/planning.md tells what the model rests on."
        )
    elif device:
        if case.basis == SIMULATED:
            yield f"On a simulator: {device.get('note')}."
        facts = ", ".join(f"{device[key]} {unit}" for key, unit in (("threads", "threads"),) if key in device)
        made = [device.get("hardware") or device.get("arch"), facts.replace("1 threads", "1 thread")]
        packages = ("torch", *(family.package for family in families()))
        versions = [f"{name} {device[name]}" for name in packages if name in device]
        yield f"{device['name']}: {', '.join(filter(None, [*map(str, filter(None, made)), *versions]))}."
    if case.others_cpu is not None and case.others_cpu >= BUSY:
        yield (
            f"Other processes used {100 * case.others_cpu:.0f} % of the CPU cores during the interleaved steps, so the "
            "times are noisy. Repeat on a quiet machine."
        )
    for row in case.rows.values():
        if row.status not in ("ok", "not measured"):
            yield _verdict(row, case, result.kind == "sweep")
        if row.description.endswith("in this time"):
            yield f"{row.contender}: {row.description.partition('; ')[2]}."
    if earlier:
        yield f"Compared with {earlier.path}."
        yield from _differences(result, case, earlier)
    if not result.complete:
        yield "Interrupted: the results are partial."


def _differences(result: Result, case: CaseResult, earlier: Earlier) -> Iterator[str]:
    """What else differs from the earlier result, so that a changed time is not taken for a changed program."""
    before, now = earlier.environment, result.environment
    for key in ("platform", "versions"):
        if before.get(key) != now.get(key):
            yield f"{key} differ: {before.get(key)} earlier, {now.get(key)} now."
    then = before.get("device") or {}
    places = [f"{device.get('name')}, {device.get('mode', 'measured')}" for device in (then, case.device)]
    if then.get("name") and places[0] != places[1]:
        yield f"The device differs, so the times do not tell of the program: {places[0]} earlier, {places[1]} now."
        return
    for key in ("hardware", "threads"):
        if then.get(key) != case.device.get(key):
            yield f"The {key} differ: {then.get(key)} earlier, {case.device.get(key)} now."


def print_result(result: Result, earlier: Earlier | None, folder: Path) -> None:
    """Tables and notes on the standard output."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    ours = {row.contender for case in result.cases for row in case.rows.values() if row.side == "ttrain"}
    for heading, tables, told in sections(result, earlier):
        if heading:
            console.print(Text(heading, style="bold"))
        for lines in tables:
            left = [
                number for number, title in enumerate(lines[0]) if number == 0 or title in ("same work", "bound by")
            ]
            for row, line in fitted(lines, window(), left):
                console.print(Text(line, style="bold" if row >= 0 and lines[row][0] in ours else ""))
            console.print()
        for note in told:
            console.print(Text(note))
        console.print()
    console.print(Text(f"results: {folder}"))
    console.print(Text(f"compare a later run with it: bench.compare={shlex.quote(str(folder / 'results.json'))}"))


def markdown(result: Result, earlier: Earlier | None) -> str:
    """The same as Markdown, for the docs."""
    words, started = shlex.split(result.environment["command"]), result.environment.get("started")
    # Where the result went to is no part of what was measured.
    command = shlex.join(word for word in words if not word.startswith(("bench.out=", "bench.markdown=")))
    parts = [f"```sh\n{command}\n```" + (f"\n\nStarted {started}." if started else "")]
    for heading, tables, told in sections(result, earlier):
        parts.append(f"**{heading}**" if heading else "")
        parts += map(_markdown_table, tables)
        parts.append("\n".join(f"- {note}" for note in told))
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    rule = "| --- " + "| ---: " * (len(lines[0]) - 1) + "|"
    return "\n".join([rows[0], rule, *rows[1:]])
