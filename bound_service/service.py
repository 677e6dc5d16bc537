"""The process of a target with a draft beside it: TargetService and DraftService on one port."""

from __future__ import annotations

from pathlib import Path

import grpc.aio

from draft_service.servicer import DraftServicer
from tandem.config.names import BOUND_METHODS, OWN_METHODS, canonical_method, checkpoint_method
from tandem.errors import ConfigurationError
from tandem.serving.model_service import ModelService, ServedModel
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_service.servicer import TargetServicer
from target_service.settings import TargetSettings, check_extraction


def chosen_head(settings: TargetSettings) -> tuple[str, Path | None]:
    """Return the drafting method and the head's folder; None if the target's own checkpoint has the head."""
    given, folder = settings.speculative_method, settings.draft_model
    if (method := canonical_method(given or "")) in OWN_METHODS:
        if folder is not None:
            raise ConfigurationError(
                f"--method is {given}, whose weights lie in the target's own checkpoint, and --draft-model is "
                f"{folder}; leave out --draft-model"
            )
        return method, None
    if folder is None:
        raise ConfigurationError(
            "--draft-model is missing; give the folder of a drafting head for this model"
        )
    if not folder.is_dir():
        raise ConfigurationError(f"--draft-model is {folder}; there is no such folder")
    method = method or checkpoint_method(folder)
    hosted = [each for each in BOUND_METHODS if each not in OWN_METHODS]
    if method not in hosted:
        raise ConfigurationError(
            f"--method is {given or method or 'not given'} for the draft {folder}; beside a target it must be "
            f"{' or '.join(hosted)}"
        )
    return method, folder


class BoundService(ModelService):
    """Serves a target, and proposals of a head that reads it."""

    name = "target"
    full_names = (
        target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
        draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    )

    def __init__(self, settings: TargetSettings) -> None:
        check_extraction(settings)
        chosen_head(settings)
        super().__init__(settings)
        self._settings = settings
        self._target, self._draft = TargetServicer(self._observer), DraftServicer()
        self.streams = [self._target.streams, self._draft.streams]

    def register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._target, server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._draft, server)

    def load(self) -> list[ServedModel]:
        settings = self.with_folder(self._settings, self._settings.model)
        from bound_service.loading import load_pair

        pair = load_pair(settings, self._observer.on_step, self.fail)
        self._target.verifier, self._draft.proposer = pair.verifier, pair.proposer
        return [pair.verifier, pair.proposer]
