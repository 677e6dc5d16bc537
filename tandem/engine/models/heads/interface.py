"""Common parts of drafting heads: the interface to the engine, their files, and the layers that the target lends."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.attention import ATTENTION_NAME, STEP_ARGUMENT
from tandem.engine.models.checkpoint import CONFIG_FILE, find_weights
from tandem.engine.models.loading import LoadedModel, StoredTensor, stored_tensors
from tandem.errors import ModelFolderError
from tandem.model_sources.files import read_object, refusal

PassStates: TypeAlias = tuple[Tensor, Tensor]
"""The input of a head's output layer, and the states that the next step of a proposal reads; [tokens, state_size]
both."""

FINAL_STATE = -1
"""Stands in `layer_ids` for the state behind the target's last norm, which its output layer reads."""


class StateReader:
    """Says which states of a target are kept of each token."""

    layer_ids: tuple[int, ...] = (FINAL_STATE,)
    """Residual streams by the number of layers before them, or `FINAL_STATE`."""
    state_size: int
    readers: Sequence[nn.Module] = ()

    def combine(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """The numbers to keep, [tokens, state_size], of [tokens, target_hidden_size] for each of `layer_ids`; by
        default all of them, beside each other."""
        return hidden_states[0] if len(hidden_states) == 1 else torch.cat(list(hidden_states), dim=-1)


class DraftHead(nn.Module, StateReader):
    """The engine's view of a drafting head: a model of its own that reads pairs of a token and a state.

    The pair of position i is the token at i + 1 and the target's state at i, so a head predicts the token at i + 2.
    Within a proposal, where the target has not read the token yet, the head's own state takes its state's place.

    A head is made from its config alone, so that a folder that fits none is refused before the target is read. Then it
    is loaded for its target, or built for it, to be trained.
    """

    architecture: str
    vocabulary_size: int
    target_ids: Tensor | None
    """The target's id of each id of a reduced vocabulary, int64; None where the head can say all of the target's."""
    layers: tuple[LayerGeometry, ...]
    tokens_per_pass: int = 1
    """Tokens that one pass foresees. With more than one a proposal is a single pass, and has at most as many."""
    lm_head: nn.Linear
    renamed: Mapping[str, str] = {}
    """Prefixes of tensors' names in a checkpoint, and what the head's module calls them."""
    written: Mapping[str, str] = {}
    """Beginnings of parameters' names that the checkpoint has with others, and those."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.register_buffer("target_ids", None, persistent=False)
        self.file = HeadFile.of(folder)
        self.expected: dict[str, int | None] = {}
        """Numbers of the config, by key, that have to be the target's: `vocab_size`, or any other its `hidden_size`;
        None where the config leaves one to the target."""

    def load(self, target: LoadedModel) -> Self:
        """Build the head for its target, in the target's dtype and on its device, and read its tensors."""
        folder = self.file.folder
        config = text_config(target)
        for key, own in self.expected.items():
            others = target.info.vocabulary_size if key == "vocab_size" else config.hidden_size
            if own not in (None, others):
                raise self.misfit(
                    f"was made for another target: its {key} is {own}, and that of {target.info.name} is {others}"
                )
        tensors = HeadTensors(folder, self.renamed)
        self.build(target, tensors)
        reads_layers = self.layer_ids != DraftHead.layer_ids
        count = config.num_hidden_layers
        if reads_layers and not all(0 <= each <= count for each in self.layer_ids):
            layers = list(self.layer_ids)
            raise self.misfit(
                f"reads the target's states after {layers} layers; {target.info.name} has {count}"
            )
        self.read(target, tensors)
        # Buffers keep their dtype, which `Module.to` would change: in bfloat16 rotary frequencies have 8 significant
        # bits, and positions of a few thousand tokens lose their meaning.
        for parameter in self.parameters():
            parameter.data = parameter.data.to(target.device, target.dtype)
        return self.to(target.device).eval().requires_grad_(False)

    def misfit(self, fault: str) -> ModelFolderError:
        return ModelFolderError(f"the drafting head in {self.file.folder} {fault}")

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        """Make the modules, with any numbers. The names of the checkpoint's `tensors` say what a config leaves open."""
        raise NotImplementedError

    @torch.no_grad()
    def read(self, target: LoadedModel, tensors: HeadTensors) -> None:
        """Read all parameters but those without memory, which are the target's."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(self.convert(name, parameter, tensors))

    def convert(self, name: str, parameter: Tensor, tensors: HeadTensors) -> Tensor:
        return tensors.read(with_prefix_of(self.written, name), parameter.shape)

    def advance(self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any) -> PassStates:
        """One pass over pairs of several sequences: their tokens and positions, int64 [1, tokens] both, and states,
        [tokens, state_size]. `step` is an `AttentionStep`."""
        raise NotImplementedError

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of what the head can say, [rows, width]; see `widen`."""
        own: Tensor = self.lm_head(hidden)
        return own

    def widen(self, own_logits: Tensor) -> Tensor:
        """[rows, tokens_per_pass * vocabulary_size], a pass's first token first; minus infinity for tokens that the
        head cannot say."""
        if self.target_ids is None:
            return own_logits
        passes = self.tokens_per_pass
        own = own_logits.view(len(own_logits), passes, own_logits.shape[1] // passes)
        scores = own.new_full((*own.shape[:2], self.vocabulary_size), -torch.inf)
        return scores.index_copy_(2, self.target_ids, own).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.widen(self.own_logits(hidden))


class BlockHead(DraftHead):
    """A drafting head that proposes a block of tokens in one pass. Its positions are those of the tokens themselves: of
    the context it reads the target's states alone, of the block behind it the token ids alone."""

    block_size: int
    """Tokens of a block: the last one of the text, and the masks that become the proposal."""
    mask_token_id: int

    def of_blocks(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, is_in_block: Tensor, step: Any
    ) -> Tensor:
        """One pass over context and blocks of several sequences; see `advance`. The states of tokens of a block are
        zeros; `is_in_block` is bool [tokens], and `step` an `eager.StepLayout`. Returns the input of `logits`, [tokens,
        state_size]; zeros for tokens of the context."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head's `config.json`, or an object in it. Values that no head has here are refused in one sentence each."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> HeadFile:
        return cls(folder / CONFIG_FILE, read_object(folder / CONFIG_FILE, "a drafting head needs one"))

    @property
    def folder(self) -> Path:
        return self.path.parent

    def refusal(self, fault: str) -> ModelFolderError:
        return refusal(self.path, fault)

    def architecture(self, default: str) -> str:
        names = self.content.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else default

    def number(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < minimum:
            raise self.refusal(f"should have a number of at least {minimum} in {key}, but it is {value!r}")
        return value

    def optional_number(self, key: str) -> int | None:
        return None if self.content.get(key) is None else self.number(key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = default if self.content.get(key) is None else self.content[key]
        if not isinstance(value, bool):
            raise self.refusal(f"should have true or false for {key}, but it is {value!r}")
        return value

    def read_nested(self, key: str) -> HeadFile:
        value = self.content.get(key)
        if not isinstance(value, dict):
            raise self.refusal(f"should have an object {key}, but it is {value!r}")
        return HeadFile(self.path, value)

    def layer_ids(self, key: str) -> tuple[int, ...]:
        ids = self.content.get(key)
        if not isinstance(ids, list) or not ids or not all(type(each) is int and each >= 0 for each in ids):
            raise self.refusal(f"should have layer numbers in {key}, but it is {ids!r}")
        return tuple(ids)

    def check(self, owner: str, **only: object) -> None:
        """Refuse keys with another value than the only one that is computed here. They may be absent."""
        for key, value in only.items():
            if self.content.get(key) not in (None, value):
                raise self.refusal(f"has {key} {self.content[key]!r}; {owner} has {value!r} here")


_EMBEDDING = "embed_tokens.weight"


class LlamaHead(DraftHead):
    """A drafting head of one Llama layer."""

    shape: Any
    """`LlamaConfig` of the layer. Any: its annotations allow None, which its own constructor replaces."""

    def take_shape(self, layer: HeadFile, owner: str) -> None:
        layer.check(
            owner,
            num_hidden_layers=1, hidden_act="silu", attention_bias=False, mlp_bias=False, use_sliding_window=False,
            qkv_bias=False,
        )  # fmt: skip
        hidden_size = layer.number("hidden_size")
        heads = layer.number("num_attention_heads")
        self.shape = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=layer.number("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=layer.number("num_key_value_heads", heads),
            head_dim=layer.number("head_dim", hidden_size // heads),
            vocab_size=layer.number("vocab_size"),
            rms_norm_eps=float(layer.content.get("rms_norm_eps") or 1e-6),
        )
        shape: Any = self.shape
        self.state_size = hidden_size
        self.vocabulary_size = shape.vocab_size
        self.layers = (LayerGeometry(shape.num_key_value_heads, shape.head_dim, shape.head_dim),)
        self.expected["vocab_size"] = shape.vocab_size

    def build(self, target: LoadedModel, tensors: Container[str] = ()) -> None:
        self.embed_tokens = nn.Embedding(self.vocabulary_size, self.state_size, device="meta")
        """Set by `read`: often the target's own tensor."""

    def read(self, target: LoadedModel, tensors: HeadTensors) -> None:
        """See `DraftHead`. The embedding is the target's where the head has none or the same: published heads bring a
        copy of it."""
        super().read(target, tensors)
        module: Any = target.module
        embedding: Tensor = module.get_input_embeddings().weight.detach()
        if _EMBEDDING in tensors:
            own = tensors.read(_EMBEDDING, self.embed_tokens.weight.shape).to(embedding)
            embedding = embedding if torch.equal(own, embedding) else own
        elif embedding.shape[1] != self.state_size:
            raise self.misfit(
                f"has no {_EMBEDDING}, and the target's embedding is {embedding.shape[1]} wide; it must be as wide as "
                f"the head, {self.state_size}"
            )
        self.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)


class HeadLayer(LlamaDecoderLayer):
    """A head's one Llama layer, for pairs of several sequences. Its attention may read more than the residual."""

    def __init__(self, shape: Any, target: LoadedModel, input_size: int) -> None:
        layer = copy(shape)
        # The target's rotary parameters: those in a head's own config are often left over from a template
        targets = text_config(target)
        layer.max_position_embeddings = targets.max_position_embeddings
        parameters = getattr(targets, "rope_parameters", None)
        if isinstance(parameters, dict) and "rope_type" in parameters:
            layer.rope_parameters = dict(parameters)
        layer._attn_implementation = ATTENTION_NAME
        super().__init__(layer, 0)  # type: ignore[no-untyped-call]
        attention: Any = self.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            width = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(input_size, width, bias=False))
        self.rotary_emb = LlamaRotaryEmbedding(layer)

    def compute(self, residual: Tensor, inputs: Tensor, positions: Tensor, step: Any) -> Tensor:
        """[1, tokens, hidden_size] of a residual of that shape, inputs [1, tokens, input_size] and positions."""
        rotary = self.rotary_emb(inputs, positions)
        attended, _ = self.self_attn(inputs, rotary, **{STEP_ARGUMENT: step})
        hidden = residual + attended
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class HeadTensors:
    """The tensors of a head's folder, by names without the prefixes that some exporters add."""

    def __init__(self, folder: Path, renamed: Mapping[str, str]) -> None:
        self._folder = folder
        stored = stored_tensors(find_weights(folder).files, torch.device("cpu"))
        self._stored: dict[str, tuple[str, StoredTensor]] = {}
        for written, tensor in stored.items():
            name = written
            while (prefix := next(filter(name.startswith, renamed), None)) is not None:
                name = renamed[prefix] + name.removeprefix(prefix)
            self._stored[name] = written, tensor

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def rows(self, name: str) -> int | None:
        return self._stored[name][1].shape[0] if name in self._stored else None

    def read(self, name: str, shape: Sequence[int], reason: str = "by config.json") -> Tensor:
        """A tensor as it is stored; the sentence that refuses another shape says for what reason it is wrong."""
        if name not in self._stored:
            raise ModelFolderError(
                f"the drafting head in {self._folder} has no tensor {name}; it must have one of shape "
                f"{list(shape)} ({reason})"
            )
        written, stored = self._stored[name]
        tensor = stored.to()
        if tuple(tensor.shape) != tuple(shape):
            raise ModelFolderError(
                f"the tensor {written} of the drafting head in {self._folder} has the shape "
                f"{list(tensor.shape)}; it must have {list(shape)} ({reason})"
            )
        return tensor

    def target_ids(self, name: str, count: int, vocabulary_size: int, *, are_offsets: bool) -> Tensor:
        """The target's id of each id of a reduced vocabulary, int64 [count]. An offset is it minus the head's own."""
        ids = self.read(name, (count,), "the size of the head's vocabulary").long()
        if are_offsets:
            ids = ids + torch.arange(count)
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size or len(set(ids.tolist())) < count:
            raise ModelFolderError(
                f"the tensor {name} of the drafting head in {self._folder} leads to ids from {int(ids.min())} to "
                f"{int(ids.max())}; it must hold {'offsets that lead to ' if are_offsets else ''}distinct ids in "
                f"0..{vocabulary_size - 1}"
            )
        return ids


def with_prefix_of(names: Mapping[str, str], name: str) -> str:
    """The name with its beginning replaced, if it is one of those that have another."""
    beginning = next(filter(name.startswith, names), "")
    return names.get(beginning, "") + name.removeprefix(beginning)


def text_config(target: LoadedModel) -> Any:
    """The target's config, that of its language model where it has several."""
    module: Any = target.module
    return module.config.get_text_config(decoder=True)


def shared_layers(target: LoadedModel) -> tuple[nn.Embedding, nn.Linear]:
    """Modules of a head's own over the target's weights: whoever packs the target's must not change a head."""
    module: Any = target.module
    weights: list[Tensor] = [
        layer.weight.detach() for layer in (module.get_input_embeddings(), module.get_output_embeddings())
    ]
    rows, width = weights[1].shape
    with torch.device("meta"):
        layers = nn.Embedding(*weights[0].shape), nn.Linear(width, rows, bias=False)
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return layers
