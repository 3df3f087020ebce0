"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes in binary units, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: float) -> str:
    """A plain count in decimal units, such as 124.4M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}P"


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
