"""Drafting heads that cannot be loaded are refused in one sentence; those that can keep their positions and sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, zeros

from tandem.config.names import checkpoint_method
from tandem.engine.models.heads.dflash import DFlashHead
from tandem.engine.models.heads.eagle import Eagle3Head, EagleHead
from tandem.engine.models.heads.interface import DraftHead
from tandem.engine.models.heads.mtp import MtpHead
from tandem.engine.models.loading import LoadedModel, load_model
from tandem.errors import ModelFolderError
from tandem_target.loading import HEADS
from tests.end_to_end.models import random_model, save_model
from tests.heads import save_dflash, save_eagle, save_eagle3, save_medusa
from tests.mtp_models import FAMILIES, MtpTarget
from tests.paths import SMOLLM2_EAGLE3

Change = Callable[[dict[str, Any]], object]


def save_mtp_target(folder: Path, _: object = None, *, family: str = "deepseek_v3") -> Path:
    return MtpTarget(family, vocabulary=64).save(folder)


FORMS: dict[str, Callable[[Path, Any], Path]] = {
    "eagle": save_eagle,
    "eagle, speculators": partial(save_eagle, form="speculators"),
    "eagle3": save_eagle3,
    "eagle3, wrapped": partial(save_eagle3, wrapped=True),
    "medusa": save_medusa,
    "medusa, published": partial(save_medusa, published=True, draft_vocabulary=96),
    "dflash": save_dflash,
    "dflash, speculators": partial(save_dflash, wrapped=True, draft_vocabulary=96),
    "mtp": save_mtp_target,
    "mtp, separate": partial(save_mtp_target, family="qwen3"),
}
"""A checkpoint of a method, which begins the name, in one of its formats."""


def small_model() -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return random_model(1, num_hidden_layers=6, **shape)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Six layers, 32 wide, with 2048 tokens."""
    return load_model(
        save_model(small_model(), tmp_path_factory.mktemp("target")), dtype="float32", threads=1
    )


def changed_config(folder: Path, change: Change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def changed_tensors(folder: Path, change: Change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, dtype="float32", threads=1)


def refusal(form: str, folder: Path, target: LoadedModel) -> str:
    method = form.partition(",")[0]
    with pytest.raises(ModelFolderError) as error:
        HEADS[method](folder).load(loaded(folder) if method == "mtp" else target)
    return str(error.value)


def of(key: str | None = None, /, **values: object) -> Change:
    """Sets values, of the object at a key or of the whole."""
    return lambda content: (content if key is None else content[key]).update(values)


def without(*path: str) -> Change:
    def change(content: dict[str, Any]) -> None:
        *parents, name = path
        for parent in parents:
            content = content[parent]
        del content[name]

    return change


ANOTHER_VOCABULARY = "was made for another target: its vocab_size is 4096, and that of target"
ANOTHER_WIDTH = "was made for another target: its hidden_size is 64, and that of target"
LAYER = "transformer_layer_config"
CONFIGS: list[tuple[str, Change, str]] = [
    ("eagle", of(num_hidden_layers=8), "has num_hidden_layers 8; an EAGLE head has 1 here"),
    ("eagle", of(draft_vocab_size=96), "has draft_vocab_size 96, which an EAGLE head does not have"),
    ("eagle", of(speculators_model_type="eagle"), "should have an object transformer_layer_config, but it is None"),
    ("eagle", of(speculators_model_type="peagle"), "has speculators_model_type 'peagle'"),
    ("eagle", of(truncated_vocab_size=96), "has truncated_vocab_size 96"),
    ("eagle", without("hidden_size"), "should have a number of at least 1 in hidden_size, but it is None"),
    ("eagle", of(vocab_size=4096), ANOTHER_VOCABULARY),
    ("eagle", of(hidden_size=64), ANOTHER_WIDTH),
    ("eagle, speculators", of(transformer_layer_architecture="Qwen3DecoderLayer"), "has 'LlamaDecoderLayer' here"),
    ("eagle, speculators", of(LAYER, num_hidden_layers=2), "has num_hidden_layers 2"),
    ("eagle, speculators", of(layernorms="yes"), "should have true or false for layernorms, but it is 'yes'"),
    ("eagle, speculators", of(fusion_bias=True), "has no tensor fusion_fc.bias"),
    ("eagle, speculators", of(layernorms=True), "has no tensor embedding_layernorm.weight"),
    ("eagle, speculators", of(LAYER, vocab_size=4096), ANOTHER_VOCABULARY),
    ("eagle, speculators", of(LAYER, hidden_size=64), ANOTHER_WIDTH),
    ("eagle3", of(architectures=["LlamaForCausalLM"]), "is no EAGLE-3 head's: speculators_model_type is None"),
    ("eagle3", of(speculators_model_type="peagle"), "is no EAGLE-3 head's: speculators_model_type is 'peagle'"),
    ("eagle3", without("hidden_size"), "should have a number of at least 1 in hidden_size"),
    ("eagle3", of(norm_output="yes"), "should have true or false for norm_output"),
    ("eagle3", of(num_hidden_layers=2), "has num_hidden_layers 2"),
    ("eagle3", of(eagle_aux_hidden_state_layer_ids=[1, 2]), "should have 3 layer numbers"),
    ("eagle3", of(eagle_aux_hidden_state_layer_ids=[1, 2, 7]), "states after [1, 2, 7] layers; target"),
    ("eagle3", of(vocab_size=4096), ANOTHER_VOCABULARY),
    ("eagle3", of(target_hidden_size=64), "was made for another target: its target_hidden_size is 64"),
    ("eagle3, wrapped", without(LAYER), "should have an object transformer_layer_config"),
    ("medusa", of(model_type="llama"), "is not that of Medusa heads: model_type is 'llama'"),
    ("medusa", without("num_heads"), "should have a number of at least 1 in medusa_num_heads"),
    ("medusa", of(num_heads=5), "has no tensor blocks.4.layers.0.weight"),
    ("medusa", of(vocab_size=4096), ANOTHER_VOCABULARY),
    ("medusa", of(hidden_size=64), ANOTHER_WIDTH),
    ("medusa", of(truncated_vocab_size=96), "has no tensor token_map; it must have one of shape [96]"),
    ("dflash", of(architectures=["LlamaForCausalLM"]), "is no DFlash draft's"),
    ("dflash", without("block_size"), "should have a number of at least 2 in block_size"),
    ("dflash", without("dflash_config"), "should have an object dflash_config"),
    ("dflash", without("dflash_config", "mask_token_id"), "should have a number of at least 0 in mask_token_id"),
    ("dflash", of("dflash_config", target_layer_ids=[]), "should have layer numbers in target_layer_ids"),
    ("dflash", of(layer_types=["full_attention", "sliding_attention"]), "has 'sliding_attention' in layer_types"),
    ("dflash", of("dflash_config", mask_token_id=2048), "it must be one of the 2048 tokens of target"),
    ("dflash", of("dflash_config", target_layer_ids=[1, 6]), "states after [2, 7] layers; target"),
    ("dflash", of(vocab_size=4096), ANOTHER_VOCABULARY),
    ("dflash", of(hidden_size=64), ANOTHER_WIDTH),
    ("dflash, speculators", of(speculators_model_type="dspark"), "has speculators_model_type 'dspark'"),
    ("dflash, speculators", without(LAYER), "should have an object transformer_layer_config"),
    ("dflash, speculators", of(LAYER, model_type="gemma3"), "a DFlash draft has qwen3 or llama here"),
    ("dflash, speculators", of(LAYER, layer_types=["sliding_attention"] * 2), "has 'sliding_attention'"),
    ("dflash, speculators", of(sample_from_anchor=True), "has sample_from_anchor True"),
    ("dflash, speculators", of(projector_type="domino"), "has projector_type 'domino'"),
    ("dflash, speculators", without("mask_token_id"), "should have a number of at least 0 in mask_token_id"),
    ("dflash, speculators", of(aux_hidden_state_layer_ids=None), "in aux_hidden_state_layer_ids, but it is None"),
    ("dflash, speculators", of(aux_hidden_state_layer_ids=[1, 7]), "states after [1, 7] layers; target"),
    ("dflash, speculators", of(target_hidden_size=64), "another target: its target_hidden_size is 64"),
    ("dflash, speculators", of(draft_vocab_size=0), "should have a number of at least 1 in draft_vocab_size"),
    ("mtp", of(model_type="llama"), "has the model_type 'llama'"),
    ("mtp", of(num_nextn_predict_layers=0), "num_nextn_predict_layers is 0; it must be at least 1"),
    ("mtp", of(n_routed_experts=None), "should have a number of at least 1 in n_routed_experts"),
    ("mtp, separate", of(mtp_num_hidden_layers=0), "mtp_num_hidden_layers is 0; it must be at least 1"),
]  # fmt: skip
MAP = torch.arange(2048 - 96, 2048)
TENSORS: list[tuple[str, Change, str]] = [
    ("eagle", without("layers.0.mlp.up_proj.weight"), "has no tensor layers.0.mlp.up_proj.weight"),
    ("eagle", of(**{"fc.weight": zeros(32, 96)}), "the tensor fc.weight of the drafting head in"),
    ("eagle", of(**{"embed_tokens.weight": zeros(96, 32)}), "has the shape [96, 32]; it must have [2048, 32]"),
    ("eagle, speculators", without("transformer.mlp.up_proj.weight"), "has no tensor transformer.mlp.up_proj.weight"),
    ("eagle, speculators", of(**{"fusion_fc.weight": zeros(32, 96)}), "has the shape [32, 96]"),
    ("eagle3", without("midlayer.mlp.up_proj.weight"), "has no tensor midlayer.mlp.up_proj.weight"),
    ("eagle3", of(**{"fc.weight": zeros(32, 64)}), "has the shape [32, 64]; it must have [32, 96] (by config.json)"),
    ("eagle3", without("d2t"), "has no tensor d2t; it must have one of shape [96]"),
    ("eagle3", of(d2t=MAP), "it must hold offsets that lead to distinct ids in 0..2047"),
    ("medusa, published", without("2.1.weight"), "has no tensor lm_heads.2.weight"),
    ("medusa, published", of(**{"1.0.linear.weight": zeros(16, 32)}), "the tensor 1.0.linear.weight of"),
    ("medusa, published", of(token_map=MAP + 1), "leads to ids from 1953 to 2048; it must hold distinct ids"),
    ("dflash", without("layers.1.self_attn.k_norm.weight"), "has no tensor layers.1.self_attn.k_norm.weight"),
    ("dflash", of(**{"fc.weight": zeros(32, 32)}), "has the shape [32, 32]; it must have [32, 64]"),
    ("dflash, speculators", without("lm_head.weight"), "has no tensor lm_head.weight"),
    ("dflash, speculators", without("d2t"), "has no tensor d2t; it must have one of shape [96]"),
    ("dflash, speculators", of(d2t=MAP), "it must hold offsets that lead to distinct ids in 0..2047"),
    ("mtp", without("model.layers.3.enorm.weight"), "has no tensor model.layers.3.enorm.weight"),
    ("mtp", without("model.layers.3.mlp.experts.2.up_proj.weight"), "experts.2.up_proj.weight; it must have one of"),
    ("mtp", of(**{"model.layers.3.eh_proj.weight": zeros(32, 32)}), "has the shape [32, 32]; it must have [32, 64]"),
    ("mtp, separate", without("mtp.fc.weight"), "no tensor mtp.fc.weight"),
    # Qwen3-Next's queries come with a gate, so they are twice as wide.
    ("mtp, separate", of(**{"mtp.layers.0.self_attn.q_proj.weight": zeros(64, 32)}), "has the shape [64, 32]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "form", "change", "sentence"),
    [*((changed_config, *case) for case in CONFIGS), *((changed_tensors, *case) for case in TENSORS)],
)
def test_a_wrong_checkpoint_is_refused(
    changed: Callable[[Path, Change], None],
    form: str,
    change: Change,
    sentence: str,
    tmp_path: Path,
    target: LoadedModel,
) -> None:
    folder = FORMS[form](tmp_path / "head", target.module)
    changed(folder, change)
    if form.startswith("mtp") and changed is changed_config:
        with pytest.raises(ModelFolderError) as error:  # before its target is loaded
            HEADS["mtp"](folder)
        assert sentence in str(error.value)
    else:
        assert sentence in refusal(form, folder, target)


def test_published_medusa_heads_of_another_width_are_refused_by_their_tensors(
    tmp_path: Path, target: LoadedModel
) -> None:
    other = random_model(2, num_hidden_layers=1, hidden_size=48, num_attention_heads=2, num_key_value_heads=1)
    folder = save_medusa(tmp_path / "head", other, published=True)
    assert "has the shape [48, 48]; it must have [32, 32]" in refusal("medusa", folder, target)


@pytest.mark.parametrize(("embedding", "is_shared"), [("none", True), ("copied", True), ("own", False)])
def test_a_copy_of_the_targets_embedding_takes_no_memory(
    embedding: str, is_shared: bool, tmp_path: Path, target: LoadedModel
) -> None:
    head = EagleHead(save_eagle(tmp_path, target.module, embedding=embedding)).load(target)
    module: Any = target.module
    targets = module.get_input_embeddings().weight
    assert (head.embed_tokens.weight.data_ptr() == targets.data_ptr()) is is_shared


def test_flags_of_nvidias_nested_config_count(tmp_path: Path, target: LoadedModel) -> None:
    nested = {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]}
    folder = save_eagle3(tmp_path / "head", target.module)
    changed_config(folder, of(eagle_config=nested))
    head = Eagle3Head(folder)
    assert head.norm_before_fc
    assert head.layer_ids == (0, 2, 4)
    assert not head.norm_before_residual


def test_layers_of_dflash_may_be_configured_as_llamas(tmp_path: Path, target: LoadedModel) -> None:
    """Speculators writes such configs too; its layers have norms of queries and keys either way."""
    folder = save_dflash(tmp_path / "head", target.module, wrapped=True)
    plain = DFlashHead(folder).load(target)
    changed_config(folder, of(LAYER, model_type="llama", mlp_bias=False, pretraining_tp=1))
    found = DFlashHead(folder).load(target)
    assert found.layers == plain.layers
    assert all(map(torch.equal, found.state_dict().values(), plain.state_dict().values()))


def test_newer_configs_of_dflash_have_the_block_size_elsewhere(tmp_path: Path, target: LoadedModel) -> None:
    folder = save_dflash(tmp_path / "head", target.module)
    changed_config(folder, lambda config: config["dflash_config"].update(block_size=config.pop("block_size")))
    assert DFlashHead(folder).block_size == 5
    assert checkpoint_method(folder) == "dflash"
    assert checkpoint_method(FORMS["dflash, speculators"](tmp_path / "other", target.module)) == "dflash"


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    """As transformers itself keeps them, and as some exporters write them."""
    folder = save_mtp_target(tmp_path / "target", family="qwen3_moe")
    target = loaded(folder)
    apart = MtpHead(folder).load(target).layer.state_dict()
    name = "mlp.experts.down_proj"
    changed_tensors(folder, of(**{f"mtp.layers.0.{name}": 2 * apart[f"mtp_block.{name}"]}))
    together = MtpHead(folder).load(target).layer.state_dict()
    assert torch.equal(together[f"mtp_block.{name}"], 2 * apart[f"mtp_block.{name}"])


@pytest.mark.parametrize("layer_types", [None, ["linear_attention", "full_attention", "full_attention"]])
def test_qwen3_next_with_recurrent_layers_is_refused(layer_types: list[str] | None, tmp_path: Path) -> None:
    folder = save_mtp_target(tmp_path / "target", family="qwen3_next")
    changed_config(folder, of(layer_types=layer_types))
    with pytest.raises(ModelFolderError, match="keeps recurrent state, which cannot be rolled back"):
        loaded(folder)


def test_embedding_and_output_head_of_mtp_are_the_targets(tmp_path: Path) -> None:
    folder = save_mtp_target(tmp_path / "target")
    target = loaded(folder)
    module: Any = target.module
    head = MtpHead(folder).load(target)
    assert head.embed_tokens.weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()
    assert head.lm_head.weight.data_ptr() == module.get_output_embeddings().weight.data_ptr()


HIDDEN_SIZE = 576
LAYERS = 30
VOCABULARY_SIZE = 49_152
END_OF_ANSWER = 2
"""`<|im_end|>`."""
MAX_BYTES = 16 * 1000 * 1000


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    """Loaded for a random model of SmolLM2's width, depth and vocabulary, whose layers are otherwise small."""
    model = random_model(
        1,
        vocab_size=VOCABULARY_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        intermediate_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
    )
    target = load_model(save_model(model, tmp_path_factory.mktemp("target")), dtype="float32", threads=1)
    return Eagle3Head(SMOLLM2_EAGLE3).load(target)


def test_its_draft_vocabulary_is_the_same_in_both_directions(head: Eagle3Head) -> None:
    tensors = load_file(SMOLLM2_EAGLE3 / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert head.target_ids is not None
    assert head.target_ids.tolist() == ids.tolist()
    assert END_OF_ANSWER in ids.tolist()


def test_it_is_small(head: Eagle3Head) -> None:
    assert sum(file.stat().st_size for file in Path(SMOLLM2_EAGLE3).iterdir()) <= MAX_BYTES


POSITION = 5_000
ROUNDING = 2**-8
"""Of a cosine in bfloat16, which has 8 significant bits. Frequencies in bfloat16 would be off by up to 2**-9 of their
size, and angles at `POSITION` by whole radians."""
SAVED = {method: FORMS[method] for method in ("eagle", "eagle3", "medusa", "dflash")}


def narrow_head(method: str, folder: Path) -> DraftHead:
    """A head in bfloat16 beside a target in bfloat16."""
    if method in FAMILIES:
        targets = heads = save_mtp_target(folder / "target", family=method)
        method = "mtp"
    else:
        model = small_model()
        heads = SAVED[method](folder / "head", model)
        targets = save_model(model, folder / "target")
    return HEADS[method](heads).load(load_model(targets, dtype="bfloat16", threads=1))


def angles(rotary: Any) -> Tensor:
    """Angles of the pairs of numbers at `POSITION`, in float64, from the numbers of a config."""
    parameters = rotary.config.rope_parameters
    assert parameters["rope_type"] == "default"
    width = 2 * len(rotary.inv_freq)
    theta = float(parameters["rope_theta"])
    return POSITION / theta ** (torch.arange(0, width, 2, dtype=torch.float64) / width)


@pytest.mark.parametrize("method", [*SAVED, *FAMILIES])
def test_a_narrow_head_keeps_its_positions(method: str, tmp_path: Path) -> None:
    head = narrow_head(method, tmp_path)
    assert {each.dtype for each in head.parameters()} == {torch.bfloat16}
    rotaries: list[Any] = [module for module in head.modules() if hasattr(module, "inv_freq")]
    assert len(rotaries) == (0 if method == "medusa" else 1)
    for rotary in rotaries:
        states = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
        cosines, sines = rotary(states, position_ids=torch.tensor([[POSITION]]))
        expected = angles(rotary)
        half = len(expected)
        for found, exact in ((cosines, expected.cos()), (sines, expected.sin())):
            assert found.dtype == torch.bfloat16
            assert torch.allclose(found[0, 0, :half].double(), exact, rtol=0, atol=ROUNDING)
