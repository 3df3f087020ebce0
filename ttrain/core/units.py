"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes in binary units, such as 1.5 GiB."""
    return _scaled(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_count(count: float) -> str:
    """A plain count in decimal units, such as 124.4M."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    place = next((place for place in range(len(units)) if abs(count) < base ** (place + 1)), len(units) - 1)
    return f"{count / base**place:.{min(place, 1)}f}{units[place]}"


def format_duration(seconds: float) -> str:
    """Seconds as 850 ms, 12.3 s, 4 min 05 s or 2 h 07 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def counted(number: int, noun: str) -> str:
    """1 -> "1 step", 2000 -> "2,000 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
