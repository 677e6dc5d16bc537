"""The process of a target with a draft beside it: TargetService and DraftService on one port."""

from __future__ import annotations

import grpc.aio

from tandem.serving.model_service import ModelService, ServedModel
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from tandem_bound.heads import chosen_head
from tandem_draft.servicer import DraftServicer
from tandem_target.servicer import TargetServicer
from tandem_target.settings import TargetSettings, check_extraction


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
        self._target = TargetServicer(self._observer)
        self._draft = DraftServicer()
        self.streams = [self._target.streams, self._draft.streams]

    def register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._target, server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._draft, server)

    def load(self) -> list[ServedModel]:
        settings = self.with_folder(self._settings, self._settings.model)
        from tandem_bound.loading import load_pair

        pair = load_pair(settings, self._observer.on_step, self.fail)
        self._target.verifier = pair.verifier
        self._draft.proposer = pair.proposer
        return [pair.verifier, pair.proposer]
