"""Where else a process finds options: a file, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.config.options import Options
from tandem.config.rule import Rule


class SourceOptions(Options):
    """Where else options are found."""

    config_file: Path | None = None
    """TOML or YAML file to read options from; what is given elsewhere is stronger. MAX's name."""
    section_name: str | None = None
    """Section of config_file that holds the options; by default the whole file. MAX's name."""
    speculative_config: str | None = None
    """Options as one JSON object; an option that is given by itself beside it is stronger. vLLM's form."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """What must hold for where options are found."""
        return (*super().rules(), *SOURCE_RULES)


def _section(options: SourceOptions) -> Iterator[str]:
    if options.section_name is not None and options.config_file is None:
        yield f"section_name is {options.section_name}; it needs config_file, the file that has the section"


SOURCE_RULES: tuple[Rule[SourceOptions], ...] = (
    Rule(
        "section-name", "`section_name` goes with `config_file`.", _section, ("section_name", "config_file")
    ),
)
"""What must hold for where options are found."""
