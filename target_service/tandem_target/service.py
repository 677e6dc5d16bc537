"""The target's process."""

from __future__ import annotations

import grpc.aio

from tandem.serving.model_service import ModelService, ServedModel
from tandem.serving.weights_servicer import WEIGHTS_SERVICE
from tandem.v1 import target_pb2, target_pb2_grpc
from tandem_target.chosen_head import chosen_head
from tandem_target.servicer import TargetServicer
from tandem_target.settings import TargetSettings, check_extraction


class TargetService(ModelService):
    """Serves TargetService with one model."""

    name = "target"
    full_names = (target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name, WEIGHTS_SERVICE)

    def __init__(self, settings: TargetSettings) -> None:
        check_extraction(settings)
        if settings.has_head:
            chosen_head(settings)
        super().__init__(settings)
        self._settings = settings
        self._servicer = TargetServicer(self._observer)
        self.streams = [self._servicer.streams]

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._servicer, server)

    def load(self) -> list[ServedModel]:
        settings = self.with_folder(self._settings, self._settings.model)
        from tandem_target.loading import load_verifier

        verifier = self._servicer.verifier = load_verifier(settings, self._observer.on_step, self.fail)
        return [verifier]
