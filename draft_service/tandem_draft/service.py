"""The draft's process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc.aio

from tandem.config.names import BOUND_METHODS, checkpoint_method
from tandem.errors import ConfigurationError
from tandem.serving.model_service import ModelService, ServedModel
from tandem.serving.weights_servicer import WEIGHTS_SERVICE
from tandem.v1 import draft_pb2, draft_pb2_grpc
from tandem_draft.proposers import Proposer
from tandem_draft.proposers.ngram import ngram_proposer
from tandem_draft.proposers.suffix import suffix_proposer
from tandem_draft.servicer import DraftServicer
from tandem_draft.settings import DraftSettings


class DraftService(ModelService):
    """Serves DraftService with one drafting method."""

    name = "draft"
    full_names = (draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name, WEIGHTS_SERVICE)

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self._load_proposer = self._loader(settings)
        self._servicer = DraftServicer(self._observer)
        self.streams = [self._servicer.streams]

    def register(self, server: grpc.aio.Server) -> None:
        super().register(server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        await super().start()
        self._observer.waits(self._wait_steps)

    def _wait_steps(self) -> float:
        """Present wait of a question, in steps of one sequence; 0 where nothing was measured."""
        step = self._servicer.proposer.model_info.step_profile.seconds.get((1, 1))
        return self._servicer.load.now.wait_seconds / step if step else 0.0

    def load(self) -> list[ServedModel]:
        proposer = self._servicer.proposer = self._load_proposer()
        return [proposer]

    def _loader(self, settings: DraftSettings) -> Callable[[], Proposer]:
        """Return the loader of the drafting method. Bad options are refused before anything is loaded."""
        folder = settings.model  # which may name its method, as that of a head does
        named = checkpoint_method(folder) if folder is not None and folder.is_dir() else ""
        match settings.speculative_method or named or settings.method:
            case "ngram":
                return partial(ngram_proposer, settings)
            case "suffix":
                return partial(suffix_proposer, settings)
            case "eagle3" if settings.target_features:
                if settings.target_model is None:
                    raise ConfigurationError("--target-model is missing; name the folder of the target")
                return partial(self._head_apart, settings)
            case method if method in BOUND_METHODS:
                raise ConfigurationError(
                    f"speculative_method is {method}, which reads the target's hidden states and runs in its process: "
                    "start the target with --draft-model or --method mtp, and no draft service"
                )
            case _:
                return partial(self._standalone, settings, settings.checkpoint)

    def _head_apart(self, settings: DraftSettings) -> Proposer:
        from tandem_draft.proposers import head_apart

        return head_apart.load_head_apart(settings, self._observer.on_step, self.fail)

    def _standalone(self, settings: DraftSettings, checkpoint: Path) -> Proposer:
        settings = self.with_folder(settings, checkpoint)
        from tandem_draft.proposers.standalone import load_standalone

        return load_standalone(settings, self._observer.on_step, self.fail)
