"""The draft services that propose: a pool as the coordinator has one, and which drafts fit vLLM's model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.replicas.compatibility import MODEL_RULES, Deployment
from coordinator.replicas.hangs import VerificationTimes
from coordinator.replicas.means import Means
from coordinator.replicas.member import Member
from coordinator.replicas.pool import Pool
from coordinator.transport.draft_client import DraftClient
from tandem.config import SpeculativeConfig
from tandem.config.rule import broken
from tandem.engine.models.checkpoint import TOKENIZER_FILE, tokenizer_hash
from tandem.errors import ModelFolderError
from tandem.integrations.vllm.settings import VllmSettings
from tandem.replica import ReplicaState, Role
from tandem.rpc.channels import DEFAULT_MESSAGE_LIMIT_BYTES, SERVICE_KEEPALIVE, open_channel
from tandem.rpc.resolver import Address, resolve, split_addresses
from tandem.types import ModelInfo

logger = logging.getLogger(__name__)

_RULES = [rule for rule in MODEL_RULES if rule.name in {"vocabulary-size", "tokenizer"}]
"""The coordinator's rules that hold here too. Lengths may differ: past a draft's, nothing is proposed."""


def target_info(model_config: Any, tensor_parallel_size: int) -> ModelInfo:
    """vLLM's model, described as a service describes its own.

    Args:
        model_config: vLLM's `ModelConfig`.
        tensor_parallel_size: Devices that the model is split over.
    """
    return ModelInfo(
        name=str(model_config.model),
        architecture="",
        vocabulary_size=int(model_config.get_vocab_size()),
        tokenizer_hash=_tokenizer_hash(str(model_config.tokenizer or model_config.model)),
        max_length=int(model_config.max_model_len),
        dtype="",
        tensor_parallel_size=tensor_parallel_size,
    )


def _tokenizer_hash(tokenizer: str) -> str:
    """Hash of the tokenizer in a folder or of a Hugging Face id that vLLM has downloaded; empty where there is none."""
    folder = Path(tokenizer)
    if not folder.is_dir():
        folder = _cached_folder(tokenizer) or folder
    try:
        return tokenizer_hash(folder)
    except ModelFolderError as error:
        logger.warning("tokenizers cannot be compared; sizes are", extra={"reason": str(error)})
        return ""


def _cached_folder(model_id: str) -> Path | None:
    """Folder of a Hugging Face id in the cache that vLLM shares; None where it is not one, or not there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model_id, TOKENIZER_FILE)
    except ValueError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def why_unfit(target: ModelInfo, draft: ModelInfo) -> str:
    """Reason why a draft cannot propose for a target; empty where it can."""
    rules = [rule for rule in _RULES if target.tokenizer_hash or rule.name != "tokenizer"]
    return "; ".join(broken(rules, Deployment(SpeculativeConfig(), target, draft)))


def draft_pool(settings: VllmSettings, target: ModelInfo) -> Pool[DraftClient]:
    """The drafts that the settings name, as far as they fit. Construct it on the event loop that is to use it."""
    credentials = settings.service_credentials
    times = VerificationTimes()

    def make_member(found: str, origin: Address, changed: Callable[[], None]) -> Member[DraftClient]:
        means = Means(
            role=Role.DRAFT,
            open_channel=lambda limit: open_channel(
                found, limit, credentials.for_address(origin), SERVICE_KEEPALIVE
            ),
            credentials_state=credentials.files_state,
            message_limit=lambda: DEFAULT_MESSAGE_LIMIT_BYTES,
            make_client=DraftClient,
            judge=lambda info: why_unfit(target, info),
            probe=_no_probe,
            verification_times=times,
            changed=changed,
        )
        return Member(found, origin, means)

    addresses = split_addresses(settings.draft_address or "")
    return Pool(Role.DRAFT, addresses, make_member, resolve, settings.resolve_interval_seconds)


async def first_draft(pool: Pool[DraftClient], seconds: float) -> str:
    """Wait for the first draft: empty when it is ready, otherwise the reason why none is, once that is known."""
    try:
        async with asyncio.timeout(seconds):
            while pool.choose() is None:
                shots = pool.snapshots()
                if shots and all(shot.state is ReplicaState.INCOMPATIBLE for shot in shots):
                    break
                await pool.change()
    except TimeoutError:
        pass
    return "" if pool.choose() is not None else pool.reasons()


async def _no_probe(_: DraftClient) -> None:
    """Do nothing: a late draft costs its sequences only the speed-up."""
