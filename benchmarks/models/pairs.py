"""The pair of models that is measured."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.inputs.prompts import held_out_prompts
from benchmarks.models.shape import parse_shaped
from benchmarks.reports.report import PairInfo
from tandem.errors import ConfigurationError

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
PROMPT_COUNT = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """Two folders and what to ask of them."""

    target: Path
    draft: Path
    info: PairInfo

    def prompts(self) -> list[tuple[int, ...]]:
        """Beginnings of real functions, as token ids of the pair's own tokenizer."""
        tokenizer = Tokenizer.from_file(str(self.target / "tokenizer.json"))
        return [tuple(tokenizer.encode(prompt.text).ids) for prompt in held_out_prompts(PROMPT_COUNT)]


def open_pair(text: str, cache_folder: Path, device: str) -> Pair:
    """The pair that `--pair` names; a shaped one is made when it is not in the cache.

    Raises:
        ConfigurationError: there is no such pair.
    """
    if text.startswith("shaped:"):
        asked = parse_shaped(text)
        from benchmarks.models.shaping import shaped_pair

        target, draft, made = shaped_pair(asked, cache_folder, device)
        return Pair(
            target,
            draft,
            PairInfo(
                name=text,
                target_parameters=made.target_parameters,
                draft_parameters=made.draft_parameters,
                agreement=made.agreement,
                overlap=made.overlap,
            ),
        )
    target, draft = _folders(text)
    return Pair(
        target,
        draft,
        PairInfo(name=text, target_parameters=_parameters(target), draft_parameters=_parameters(draft)),
    )


def _folders(text: str) -> tuple[Path, Path]:
    if text == "demo":
        return DEMO / "target", DEMO / "draft"
    folders = [Path(part) for part in text.split(":")]
    if len(folders) != 2 or not all((folder / "config.json").is_file() for folder in folders):
        raise ConfigurationError(
            f"--pair is {text!r}; it must be demo, the folders of a target and a draft as TARGET:DRAFT, "
            "or shaped:TARGET_PARAMETERS:DRAFT_LAYERS:AGREEMENT"
        )
    return folders[0], folders[1]


def _parameters(folder: Path) -> int:
    """Numbers in the folder's weights, from the files' headers."""
    return sum(_file_parameters(file) for file in folder.glob("*.safetensors"))


def _file_parameters(file: Path) -> int:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
