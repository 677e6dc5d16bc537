"""Reads a Hugging Face folder's files in seconds and without torch, so that a wrong folder is refused at once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from tandem.errors import ModelFolderError
from tandem.model.sampling.defaults import GENERATION_CONFIG_FILE, sampling_defaults
from tandem.model.types import SamplingDefaults
from tandem.model.vocabulary import vocabulary_hash
from tandem.model_sources.files import MAX_CONFIG_BYTES, check_size, read_object, refusal, unreadable

MAX_LARGE_BYTES = 128 << 20
"""Maximum size of tokenizer.json and of an index of weights: four times the largest that is published."""

WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_SUFFIX = ".safetensors"
LONGEST_REASON = 200
"""Characters of another's message that fit into a sentence of ours."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Tensors of a checkpoint, from the headers of its files."""

    files: tuple[Path, ...]
    tensor_count: int
    """Tensors that hold anything."""
    value_count: int
    """Numbers in all of the tensors."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor, by name."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)


def find_weights(folder: Path, max_tensors: int | None = None) -> Weights:
    """The weights of a model folder."""
    files = _weight_files(folder)
    shapes = [shape for file in files for shape in _shapes(file, max_tensors)]
    sizes = [prod(shape) for _, shape in shapes]
    return Weights(files, sum(size > 0 for size in sizes), sum(sizes), dict(shapes))


def weights_fingerprint(folder: Path, weights: Weights) -> str:
    """SHA-256, in hexadecimal, of config.json and of the files of the weights. Folders with the same one hold the same
    model; another division into files has another one."""
    digest = hashlib.sha256()
    for path in (folder / CONFIG_FILE, *weights.files):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise unreadable(path, error) from error
    return digest.hexdigest()


def check_unchanged(folder: Path, found: str, freed: str) -> None:
    """Refuse to take back weights whose fingerprint is not that of the weights that were freed.

    Raises ModelFolderError.
    """
    if found != freed:
        raise ModelFolderError(
            f"the weights in {folder} have the fingerprint {found[:12]} by now and had {freed[:12]} when they were "
            "freed; load the wanted ones"
        )


def first_of(names: Sequence[str]) -> str:
    """The first name, and the number of others: short enough for a sentence."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / WEIGHTS_INDEX_FILE
    if (folder / WEIGHTS_FILE).is_file():
        return (folder / WEIGHTS_FILE,)
    if index.is_file():
        return _sharded_files(index)
    pickled = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickled:
        raise ModelFolderError(
            f"the model folder {folder} has its weights only as pickle ({pickled[0]}), which can run code when it is "
            "loaded; convert it once with AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelFolderError(
        f"the model folder {folder} has no weights: neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX_FILE}"
    )


def _sharded_files(index: Path) -> tuple[Path, ...]:
    weight_map = read_object(index, "it was just there", MAX_LARGE_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refusal(index, "should have a 'weight_map' from tensor names to files, but has none")
    foreign = next((name for name in weight_map.values() if not _is_inside(name)), None)
    if foreign is not None:
        name = _shorten(foreign)
        raise refusal(index, f"names the file {name}; it should name {_SUFFIX} files inside its folder")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelFolderError(
            f"the checkpoint in {index.parent} is incomplete: {index.name} names {len(names)} files, of which "
            f"these are missing: {first_of(missing)}"
        )
    return tuple(index.parent / name for name in names)


def _is_inside(name: object) -> bool:
    """True if a file's name stays in the folder. Links are followed: Hugging Face's cache consists of them."""
    if not isinstance(name, str) or not name.endswith(_SUFFIX) or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _shorten(value: object) -> str:
    """A value as Python writes it, cut to fit a sentence."""
    text = repr(value)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."


def _shapes(path: Path, max_tensors: int | None) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a file's tensors. Opening it compares sizes, offsets and types with each other."""
    try:
        # Python's own error has the true reason: safetensors says of every file that it cannot open that there is none.
        with path.open("rb"):
            pass
        with safe_open(path, framework="np") as tensors:
            names = tensors.keys()
            if max_tensors is not None and len(names) > max_tensors:
                fault = (
                    f"has {len(names)} tensors; a model as config.json describes has at most {max_tensors}"
                )
                raise refusal(path, fault)
            return [(name, tuple(tensors.get_slice(name).get_shape())) for name in names]
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        reason = str(error).partition("\n")[0].rstrip(".")[:LONGEST_REASON]
        raise refusal(path, f"is damaged: {reason}") from error


_LAYERS = frozenset({"num_hidden_layers", "n_layer", "n_layers", "num_layers"})
_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"})
_SIZES = frozenset(
    {
        "vocab_size", "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "n_heads",
        "num_key_value_heads", "head_dim",
    }
)  # fmt: skip
_MAX_PARTS = 4096
"""Layers of a model and experts of a layer: ten times as many as any published model has."""


_TENSORS_PER_BLOCK = 64
"""Maximum tensors of an expert, or of a layer without its experts, with scales and biases: published ones have 30."""


def _most_tensors(config: Mapping[str, Any]) -> int:
    """Maximum tensors of a model that the config describes; of one with wrong numbers, which are refused later."""

    def most(names: frozenset[str]) -> int:
        values = (section.get(name) for section in _sections(config) for name in names)
        numbers = (number for value in values for number in _as_list(value) if isinstance(number, int))
        return min(max(numbers, default=0), _MAX_PARTS)

    blocks = max(most(_LAYERS), 1) * (1 + most(_EXPERTS))
    return _TENSORS_PER_BLOCK * (blocks + _TENSORS_PER_BLOCK)


def _sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    nested = config.get("text_config")
    return [config, nested] if isinstance(nested, dict) else [config]


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_numbers(path: Path, config: Mapping[str, Any], tensor_count: int) -> None:
    """Refuse a config with sizes that no model has, or with more layers than the checkpoint has tensors."""
    bounds = dict.fromkeys(_SIZES, (1, (1 << 31) - 1, ""))
    bounds |= dict.fromkeys(_EXPERTS, (0, _MAX_PARTS, ""))
    why = f", the checkpoint having {tensor_count} tensors"
    bounds |= dict.fromkeys(_LAYERS, (1, min(_MAX_PARTS, max(tensor_count, 1)), why))
    sentences = []
    named = [(name, section[name]) for section in _sections(config) for name in section if name in bounds]
    for name, value in named:
        least, most, why = bounds[name]
        # Some configs have one per layer, and null where it is derived
        numbers = [number for number in _as_list(value) if number is not None]
        if wrong := [each for each in numbers if type(each) is not int or not least <= each <= most]:
            found = str(wrong[0])[:40]
            sentences.append(f"{name} is {found!r} and must be a whole number from {least} to {most}{why}")
    if sentences:
        raise refusal(path, f"describes no model that can be: {'; '.join(sentences)}")


CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
_ADAPTER_FILE = "adapter_config.json"
"""As peft writes it, beside the weights of the adapter."""

_MAX_SENT_BYTES = {"tokenizer_config.json": MAX_CONFIG_BYTES, "chat_template.jinja": 1 << 20}
"""Maximum sizes of files that are sent to coordinators unchanged."""
_MAX_END_IDS = 256
"""Published models have a handful."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that holds a whole checkpoint of a decoder-only model."""

    folder: Path
    architecture: str
    model_type: str
    config: Mapping[str, Any]
    weights: Weights
    eos_token_ids: tuple[int, ...]
    """Ids that end a text; empty when the folder names none."""
    sampling_defaults: SamplingDefaults
    """Those of its generation_config.json."""


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Checks everything that can be checked without reading the weights; a ModelFolderError says what is wrong."""
    folder = Path(folder)
    try:
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise ModelFolderError(
                f"the model folder {folder} should be a directory with a checkpoint, but {found} is there"
            )
        config = read_object(folder / CONFIG_FILE, "a Hugging Face model folder has one")
        architecture = _architecture(folder, config)
        weights = find_weights(folder, _most_tensors(config))
        _check_numbers(folder / CONFIG_FILE, config, weights.tensor_count)
        _check_tokenizer_file(folder)
        for name, max_bytes in _MAX_SENT_BYTES.items():
            if (folder / name).is_file():
                check_size(folder / name, max_bytes)
        model_type = str(config.get("model_type", ""))
        return Checkpoint(
            folder,
            architecture,
            model_type,
            config,
            weights,
            eos_token_ids(folder),
            sampling_defaults(folder) if (folder / GENERATION_CONFIG_FILE).is_file() else SamplingDefaults(),
        )
    except OSError as error:
        raise unreadable(folder, error) from error


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: those of generation_config.json, else those of config.json, else none."""
    for name in (GENERATION_CONFIG_FILE, CONFIG_FILE):
        path = folder / name
        if not path.is_file():
            continue
        for section in _sections(read_object(path, "it was just there")):
            if (value := section.get("eos_token_id")) is not None:
                return _ids(path, value)
    return ()


def tokenizer_hash(folder: str | Path) -> str:
    """SHA-256, in hexadecimal, of the mapping from token to id, added tokens included.

    Two folders with the same hash give every id the same meaning, however their files are laid out.
    """
    path = _check_tokenizer_file(Path(folder))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    return vocabulary_hash(parsed_tokenizer(content, str(path)))


def parsed_tokenizer(content: bytes, where: str) -> Tokenizer:
    """The tokenizer in the content of a tokenizer.json; `where` completes "the file" for errors."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises bare Exception, whatever the cause
        raise refusal(where, f"is not a tokenizer that can be read: {error}") from error
    _try_long_runs(where, tokenizer)
    return tokenizer


def _try_long_runs(where: str, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose regular expression backtracks without end: one character again and again shows most."""
    try:
        tokenizer.encode_batch_fast(
            [character * 64 + end for character in "a1 .\n" for end in ("", "!", "x")]
        )
    except BaseException as error:
        # Rust's panics are a BaseException that no module exports. The search ends at 10 million steps, a second.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            fault = f"is a tokenizer that cannot split a run of one character: {_shorten(str(error))}"
            raise refusal(where, fault) from None
        raise


def _check_tokenizer_file(folder: Path) -> Path:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelFolderError(
            f"the model folder {folder} has no {TOKENIZER_FILE}, which is needed to compare vocabularies"
        )
    check_size(path, MAX_LARGE_BYTES)
    return path


def _architecture(folder: Path, config: Mapping[str, Any]) -> str:
    """The model class; refuses a folder whose model is not this one alone, decoder-only and from safetensors."""
    path = folder / CONFIG_FILE
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise refusal(
            path,
            f"names no model class: 'architectures' is {architectures!r} and should be a list such as "
            "['LlamaForCausalLM']",
        )
    if (folder / _ADAPTER_FILE).is_file():
        raise ModelFolderError(
            f"the model folder {folder} has an adapter ({_ADAPTER_FILE}), which is not applied; merge it into the "
            "weights once (merge_and_unload of peft), or remove the file to serve the model without it"
        )
    if config.get("is_encoder_decoder"):
        raise ModelFolderError(
            f"the model in {folder} is an encoder-decoder ({architectures[0]}); only decoder-only models can be served"
        )
    if (other := config.get("transformers_weights")) is not None:
        raise refusal(
            path,
            f"has transformers_weights {_shorten(other)}; it should have none, since weights are read from "
            f"{WEIGHTS_FILE} or {WEIGHTS_INDEX_FILE} alone",
        )
    return architectures[0]


def _ids(path: Path, value: object) -> tuple[int, ...]:
    values = _as_list(value)
    if len(values) > _MAX_END_IDS or not all(type(item) is int and item >= 0 for item in values):
        fault = (
            f"has eos_token_id {_shorten(value)}; it should be an id or a list of up to {_MAX_END_IDS} ids"
        )
        raise refusal(path, fault)
    return tuple(values)
