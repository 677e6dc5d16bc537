"""The settings of a service reach its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config.settings import load_settings
from tandem.engine.core.jobs import StepRecord
from tandem.engine.models.loading import load_model
from tandem.errors import ConfigurationError
from tandem.model.types import Delta, RowKind, SamplingParams, TargetOptions, VerifyStep
from tandem_target.loading import load_verifier
from tandem_target.service import TargetService
from tandem_target.settings import TargetSettings
from tests.paths import DEMO_TARGET
from tests.service.clients import until

SECONDS = 60.0


@pytest.mark.parametrize("is_enabled", [True, False])
async def test_a_prompt_is_read_in_chunks_and_kept_only_with_prefix_caching(is_enabled: bool) -> None:
    steps: list[StepRecord] = []
    settings = TargetSettings(
        model=DEMO_TARGET, max_length=64, max_sequences=2, compile="off", max_num_batched_tokens=20,
        enable_prefix_caching=is_enabled,
    )  # fmt: skip
    verifier = load_verifier(settings, steps.append)
    await verifier.start()
    try:
        steps.clear()
        async with verifier.sequence(
            TargetOptions("a request", SamplingParams(), 64, scope="a caller")
        ) as sequence:
            await sequence.verify(VerifyStep(Delta(0, list(range(3, 51))), RowKind.TOKEN, 1))
        assert [step.token_count for step in steps] == [20, 20, 8]
        await until(lambda: verifier.kv_usage().sequence_count == 0, SECONDS)
        assert (verifier.kv_usage().retained_tokens > 0) is is_enabled
    finally:
        await verifier.close()


async def test_the_kv_cache_has_the_size_in_bytes_that_was_asked_for() -> None:
    settings = TargetSettings(model=DEMO_TARGET, max_length=64, max_sequences=9, compile="off")
    whole = load_verifier(settings).kv_usage().total_tokens
    layers = load_model(DEMO_TARGET, dtype="float32").layers
    size = 3 * 64 * 4 * sum(layer.values_per_token for layer in layers)
    limited = load_verifier(settings.model_copy(update={"kv_cache_memory_bytes": size}))
    assert (whole, limited.kv_usage().total_tokens) == (10 * 64, 3 * 64), (
        "nine, and one that is kept for clients with few"
    )


REFUSED_EXTRACTIONS: list[tuple[dict[str, Any], str]] = [
    ({"speculative_method": "extract_hidden_states"},
        "--method is extract_hidden_states and --shared-storage-path is missing; name the folder for the files"),
    ({"eagle_aux_hidden_state_layer_ids": (1,)},
        "--eagle-aux-hidden-state-layer-ids is [1] and --shared-storage-path is missing"),
    ({"shared_storage_path": Path("states"), "speculative_method": "eagle3"},
        "--shared-storage-path is states beside the draft --method eagle3"),
    ({"speculative_method": "ngram"}, "--method is ngram, and the target has no --draft-model"),
    ({"speculative_method": "eagle3"}, "--method is eagle3 and --draft-model is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "sentence"), REFUSED_EXTRACTIONS)
def test_extraction_is_refused_where_options_do_not_fit(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        TargetService(TargetSettings(model=DEMO_TARGET, **options))
    assert str(error.value).startswith(sentence)


def test_a_method_that_all_processes_share_concerns_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SPECULATIVE_METHOD", "ngram")
    TargetService(load_settings(TargetSettings, ["--model", str(DEMO_TARGET)], "target"))
    with pytest.raises(ConfigurationError, match="--method is suffix"):
        TargetService(load_settings(TargetSettings, ["--model", "x", "--method", "suffix"], "target"))


def test_extraction_needs_layers_of_the_model_and_a_folder(tmp_path: Path) -> None:
    settings = TargetSettings(
        model=DEMO_TARGET, shared_storage_path=tmp_path, eagle_aux_hidden_state_layer_ids=(1, 99)
    )
    with pytest.raises(ConfigurationError, match=r"is \[1, 99\]; .* layers, so each must be from 0 to"):
        load_verifier(settings)
    (tmp_path / "file").touch()
    blocked = settings.model_copy(update={"shared_storage_path": tmp_path / "file" / "states"})
    with pytest.raises(ConfigurationError, match="which cannot be written to: Not a directory"):
        load_verifier(blocked)
