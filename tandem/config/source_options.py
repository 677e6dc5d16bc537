"""Sources of options besides the command line and the environment: a file, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.config.options import Options
from tandem.config.rule import Rule


class SourceOptions(Options):
    """Further sources of options."""

    config_file: Path | None = None
    """TOML, YAML or JSON file with options; other sources are stronger. MAX's name."""
    section_name: str | None = None
    """Section of config_file that holds the options; by default the whole file. MAX's name."""
    speculative_config: str | None = None
    """Options as one JSON object; a separate option is stronger. vLLM's form."""

    @classmethod
    def rules(cls) -> tuple[Rule[Any], ...]:
        """Rules for the sources of options."""
        return (*super().rules(), *SOURCE_RULES)


def _section(options: SourceOptions) -> Iterator[str]:
    if options.section_name is not None and options.config_file is None:
        yield f"section_name is {options.section_name}; it needs config_file, the file that has the section"


SOURCE_RULES: tuple[Rule[SourceOptions], ...] = (
    Rule(
        "section-name", "`section_name` goes with `config_file`.", _section, ("section_name", "config_file")
    ),
)
"""Rules for the sources of options."""
