"""What drafting heads have in common: the interface to the engine, their files, what they share with their target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tandem.engine.kv_cache.arena import LayerGeometry
from tandem.engine.models.attention import attention_forward
from tandem.engine.models.checkpoint import find_weights
from tandem.engine.models.loading import LoadedModel, StoredTensor, stored_tensors
from tandem.errors import ModelFolderError

FINAL_STATE = -1
"""Stands in `layer_ids` for the state behind the target's last norm, which its output layer reads."""


class DraftHead(nn.Module):
    """A drafting head. Subclasses compute."""

    layer_ids: tuple[int, ...]
    """Which of the target's states are read: residual streams by the number of layers before them, or `FINAL_STATE`."""
    state_size: int
    """Width of what is kept for each of the target's tokens."""
    vocabulary_size: int
    """The target's."""
    has_reduced_vocabulary: bool
    """True if the head cannot say some of the target's tokens."""
    layers: tuple[LayerGeometry, ...]
    """Attention layers of the head itself."""
    tokens_per_pass: int = 1
    """Tokens that one pass foresees. With more than one a proposal is a single pass, and has at most as many."""

    @property
    def readers(self) -> Sequence[nn.Module]:
        """The modules that `combined` calls."""
        raise NotImplementedError

    def combined(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """The part of the target's states that the head reads, [tokens, state_size].

        Args:
            hidden_states: [tokens, target_hidden_size] for each of `layer_ids`.
        """
        raise NotImplementedError

    def advanced(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, step: Any
    ) -> tuple[Tensor, Tensor]:
        """One pass over pairs of several sequences.

        Args:
            token_ids: int64 [1, tokens], the token of each pair.
            positions: int64 [1, tokens], of the pairs in their sequences.
            states: [tokens, state_size]
            step: the pass, as attention layers see it (`tandem.engine.models.attention.AttentionStep`).

        Returns:
            What `logits` takes, and the states that the next step of a proposal reads; [tokens, state_size] both.
        """
        raise NotImplementedError

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Logits of what the head can say, [rows, width]; see `widened`."""
        raise NotImplementedError

    def widened(self, own_logits: Tensor) -> Tensor:
        """[rows, tokens_per_pass * vocabulary_size], a pass's first token first; minus infinity for tokens that the
        head cannot say. By default the head can say all."""
        return own_logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the target's whole vocabulary."""
        return self.widened(self.own_logits(hidden))


class BlockHead(DraftHead):
    """A drafting head that proposes a block of tokens in one pass. Its positions are those of the tokens themselves: of
    the context it reads the target's states alone, of the block behind it the token ids alone."""

    block_size: int
    """Tokens of a block: the last one of the text, and the masks that become the proposal."""
    mask_token_id: int

    def of_blocks(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, is_in_block: Tensor, step: Any
    ) -> Tensor:
        """One pass over context and blocks of several sequences.

        Args:
            token_ids: int64 [1, tokens]
            positions: int64 [1, tokens], of the tokens in their sequences.
            states: [tokens, state_size]; zeros for tokens of a block.
            is_in_block: bool [tokens]
            step: the pass (`tandem.engine.backends.eager.StepLayout`).

        Returns:
            What `logits` takes, [tokens, state_size]; zeros for tokens of the context.
        """
        raise NotImplementedError


def size(path: Path, content: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of at least 1.

    Raises:
        ModelFolderError: the value is none, or is missing and has no default.
    """
    value = content.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFolderError(f"the file {path} should have a positive number {key}, but it is {value!r}")
    return value


def flag(path: Path, content: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """True or false.

    Raises:
        ModelFolderError: the value is neither.
    """
    value = content.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelFolderError(f"the file {path} should have true or false for {key}, but it is {value!r}")
    return value


def nested(path: Path, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object within the file.

    Raises:
        ModelFolderError: the value is none.
    """
    value = content.get(key)
    if not isinstance(value, dict):
        raise ModelFolderError(f"the file {path} should have an object {key}, but it is {value!r}")
    return value


def check_layer(path: Path, layer: Mapping[str, Any], owner: str) -> None:
    """Refuse what a head's one Llama layer does not compute here.

    Args:
        path: the file.
        layer: the layer's config.
        owner: a head of this method, for the sentence.

    Raises:
        ModelFolderError: it says something else.
    """
    wanted = {"num_hidden_layers": (1, None), "hidden_act": ("silu", None), "attention_bias": (False, None)}
    wanted |= {"mlp_bias": (False, None), "use_sliding_window": (False, None), "qkv_bias": (False, None)}
    for key, allowed in wanted.items():
        if (value := layer.get(key)) not in allowed:
            raise ModelFolderError(f"the file {path} has {key} {value!r}; {owner} has {allowed[0]!r} here")


class HeadTensors:
    """The tensors of a head's folder. Their names are read without the prefixes that some exporters add."""

    def __init__(self, folder: Path, renamed: Mapping[str, str]) -> None:
        """
        Args:
            folder: where the checkpoint is.
            renamed: prefixes of names, and what the head's module calls them.

        Raises:
            ModelFolderError: there are no weights, or a file is damaged.
        """
        self._folder = folder
        self._stored: dict[str, StoredTensor] = {}
        self._written: dict[str, str] = {}
        """Each name as the file spells it."""
        for name, tensor in stored_tensors(find_weights(folder).files, torch.device("cpu")).items():
            known = _renamed(name, renamed)
            self._stored[known], self._written[known] = tensor, name

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def rows(self, name: str) -> int | None:
        """First number of a tensor's shape; None where there is no such tensor."""
        return self._stored[name].to().shape[0] if name in self._stored else None

    def read(self, name: str, shape: tuple[int, ...], reason: str) -> Tensor:
        """A tensor as it is stored.

        Args:
            name: what the head's module calls it.
            shape: the shape that it must have.
            reason: where the shape comes from, for the sentence.

        Raises:
            ModelFolderError: it is missing or has another shape.
        """
        if name not in self._stored:
            raise ModelFolderError(
                f"the drafting head in {self._folder} has no tensor {name}; it must have one of shape "
                f"{list(shape)} ({reason})"
            )
        tensor = self._stored[name].to()
        if tuple(tensor.shape) != shape:
            raise ModelFolderError(
                f"the tensor {self._written[name]} of the drafting head in {self._folder} has the shape "
                f"{list(tensor.shape)}; it must have {list(shape)} ({reason})"
            )
        return tensor


def read_target_ids(tensors: HeadTensors, folder: Path, draft_size: int, vocabulary_size: int) -> Tensor:
    """The target's id of each id of a reduced vocabulary, int64 [draft_size]. `d2t` holds offsets: the target's id is
    the draft's own plus the offset.

    Args:
        tensors: the head's.
        folder: where it is, for the sentence.
        draft_size: tokens that the head can say.
        vocabulary_size: the target's tokens.

    Raises:
        ModelFolderError: `d2t` is missing, or the ids are not distinct ones of the target.
    """
    ids = torch.arange(draft_size) + tensors.read("d2t", (draft_size,), "draft_vocab_size").long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary_size or len(set(ids.tolist())) < len(ids):
        raise ModelFolderError(
            f"the tensor d2t of the drafting head in {folder} leads to ids from {int(ids.min())} to {int(ids.max())}; "
            f"it must hold offsets that lead to distinct ids in 0..{vocabulary_size - 1}"
        )
    return ids


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    for prefix, known in renamed.items():
        if name.startswith(prefix):
            return _renamed(known + name.removeprefix(prefix), renamed)
    return name


def text_config(target: LoadedModel) -> Any:
    """The target's config, that of its language model where it has several."""
    module: Any = target.module
    return module.config.get_text_config(decoder=True)


def check_same(folder: Path, key: str, own: int | None, others: int, target: LoadedModel) -> None:
    """Refuse a head that was made for another target.

    Args:
        folder: the head's.
        key: of the number in its config.json.
        own: the head's number; None if it has none.
        others: the target's.
        target: the model, for the sentence.

    Raises:
        ModelFolderError: the numbers differ.
    """
    if own != others:
        raise ModelFolderError(
            f"the drafting head in {folder} was made for another target: its {key} is {own}, and that of "
            f"{target.info.name} is {others}"
        )


def shared_embedding(target: LoadedModel) -> nn.Embedding:
    """The target's embedding."""
    module: Any = target.module
    weight: Tensor = module.get_input_embeddings().weight
    with torch.device("meta"):
        made = nn.Embedding(*weight.shape)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made


def shared_output_head(target: LoadedModel) -> nn.Linear:
    """The target's output head."""
    module: Any = target.module
    weight: Tensor = module.get_output_embeddings().weight
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return made


Head = TypeVar("Head", bound=nn.Module)


def placed(head: Head, target: LoadedModel) -> Head:
    """A head on its target's device, its parameters in the target's dtype, ready to run.

    Buffers keep their dtype, which `Module.to` would change: in bfloat16 rotary frequencies have 8 significant bits,
    and positions of a few thousand tokens lose their meaning.
    """
    for parameter in head.parameters():
        parameter.data = parameter.data.to(target.device, target.dtype)
    return head.to(target.device).eval().requires_grad_(False)


class LayerShape(Protocol):
    """Numbers of a head's config that its layer needs."""

    @property
    def hidden_size(self) -> int:
        """Width of the layer."""
        ...

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        ...

    @property
    def heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of each."""
        ...


class Norm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, states: Tensor) -> Tensor:
        """Normalized states, of the same shape and dtype."""
        wide = states.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return self.weight * scaled.to(states.dtype)


class Attention(nn.Module):
    """Attention of a head's one layer."""

    layer_idx = 0

    def __init__(self, shape: LayerShape, input_size: int, rotary: LlamaRotaryEmbedding) -> None:
        """
        Args:
            shape: the head's.
            input_size: width of what queries, keys and values are computed from.
            rotary: see `rotary_of`.
        """
        super().__init__()
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=False)
        self.k_proj = nn.Linear(input_size, kv_width, bias=False)
        self.v_proj = nn.Linear(input_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.rotary_emb = rotary
        self._head_dim = shape.head_dim

    def forward(self, states: Tensor, positions: Tensor, step: Any) -> Tensor:
        """[1, tokens, hidden_size] of states [1, tokens, input_size] and positions [1, tokens]."""
        query, key, value = (
            projection(states).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cosines, sines = self.rotary_emb(states, positions)
        query, key = apply_rotary_pos_emb(query, key, cosines, sines)
        attended, _ = attention_forward(self, query, key, value, None, tandem_step=step)
        output: Tensor = self.o_proj(attended.flatten(2))
        return output


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """[..., hidden_size] of states of this shape."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return output


def rotary_of(shape: LayerShape, target: LoadedModel) -> LlamaRotaryEmbedding:
    """The target's rotary parameters: those in a head's own config are often left over from a template."""
    targets = text_config(target)
    own = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=targets.max_position_embeddings,
    )
    parameters = getattr(targets, "rope_parameters", None)
    if isinstance(parameters, dict) and "rope_type" in parameters:
        own.rope_parameters = dict(parameters)
    return LlamaRotaryEmbedding(own)
