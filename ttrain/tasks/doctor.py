"""task=doctor: what this machine can train on, each line with what would mend it."""

from __future__ import annotations

from ttrain.config.schema import Config


def run(config: Config) -> None:
    """Prints one line a finding: + usable, - not there, ! broken."""
    from ttrain.train.doctor import report

    report(print)
