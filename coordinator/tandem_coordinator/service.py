"""The coordinator's process: connects to its services and answers clients."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import grpc.aio

from tandem.acceptance.strategies import GREEDY
from tandem.errors import ServiceUnavailableError
from tandem.model.admin import Status
from tandem.model.grammar import Grammars
from tandem.model.replica import ReplicaState, Role
from tandem.model.types import ModelInfo
from tandem.serving.interceptors import RunningCalls
from tandem.serving.protection import token_source
from tandem.serving.server import Service, announce
from tandem.telemetry.settings import is_observed
from tandem.v1 import admin_pb2, generation_pb2, generation_pb2_grpc
from tandem_coordinator.admin.administration import Administration
from tandem_coordinator.admin.servicer import AdminServicer
from tandem_coordinator.controller import Terms, request_kind
from tandem_coordinator.decoding.tokenization import PromptEncoder, read_tokenizer
from tandem_coordinator.http.chat import Chats
from tandem_coordinator.replicas.compatibility import head_of
from tandem_coordinator.replicas.pool import Member
from tandem_coordinator.replicas.registry import ReplicaRegistry
from tandem_coordinator.requests.grammars import CheckedGrammars
from tandem_coordinator.requests.plan import Models
from tandem_coordinator.requests.runner import RequestRunner
from tandem_coordinator.servicer import GenerationServicer, admit
from tandem_coordinator.settings.coordinator import CoordinatorSettings
from tandem_coordinator.settings.live import LiveConfig
from tandem_coordinator.speculation_report import describe_decisions, forecast
from tandem_coordinator.telemetry.observer import Observer, State
from tandem_coordinator.transport.target_client import TargetClient

if TYPE_CHECKING:
    from tandem_coordinator.http.server import HttpServer

logger = logging.getLogger(__name__)


class CoordinatorService(Service):
    """Serves GenerationService over draft and target services, and AdminService beside it."""

    name = "coordinator"
    full_names = (
        generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    )

    def __init__(self, settings: CoordinatorSettings, observer: Observer | None = None) -> None:
        """Set everything up; nothing is connected yet. The observer replaces the settings' own."""
        self._settings = settings
        self.live_config = LiveConfig(settings)
        self.observer = observer or _observer_for(settings, is_read=settings.http_port is not None)
        self.completions = RequestRunner(self.live_config, self.observer)
        self.steps = (partial(admit, self.completions),)
        self.replicas = ReplicaRegistry(settings, settings.service_credentials)
        self.administration = Administration(self.completions, self.live_config, self.replicas)
        self.chats = Chats(
            settings.chat_template,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        self._grammars: CheckedGrammars | None = None
        self.http: HttpServer | None = None
        self._calls: RunningCalls | None = None

    def open_other_endpoints(self, calls: RunningCalls) -> None:
        self._calls = calls
        if self._settings.http_port is not None:
            # Imported here, so that HTTP is loaded only where it is on.
            from tandem_coordinator.http.app import App
            from tandem_coordinator.http.server import HttpServer

            app = App(self._settings, self.completions, self.chats, self.status, self.metrics, calls)
            self.http = HttpServer(self._settings, app)

    async def status(self) -> Status:
        return await self.administration.status()

    async def metrics(self) -> bytes | None:
        await self.replicas.ask_for_statistics()
        return self.observer.prometheus_text()

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(
                self.completions, self.chats, token_source(self._settings, self._settings.host)
            ),
            server,
        )
        AdminServicer(self.administration).add_to(server)

    async def start(self) -> None:
        self.observer.start()
        # HTTP answers while the services are not ready yet, if only with that.
        self._start_http()
        await self.replicas.start(self._wait_for)
        target_info = self.replicas.fleet.target
        assert target_info is not None
        if (member := self.replicas.targets.choose()) is None:
            raise ServiceUnavailableError(f"the target service left again: {self.replicas.targets.reasons()}")
        files = await member.client.tokenizer_files()
        encoder = PromptEncoder(read_tokenizer(files))
        completions = self.completions
        tokens = Grammars(encoder.tokenizer.to_str, target_info.vocabulary_size, target_info.eos_token_ids)
        await tokens.prepare()
        self._grammars = CheckedGrammars(tokens)
        defaults = self.replicas.fleet.sampling_defaults
        models = Models(target_info, None, encoder, self._grammars, defaults)
        completions.connect(self.replicas, models)
        name = self._settings.served_names(target_info.name)[0]
        self.observer.ready(name, self._state, self.replicas.ask_for_statistics)
        # Without HTTP the process of the template starts with the first chat.
        await self.chats.meet(target_info.name, files, is_checked=self.http is not None)
        ready = [shot for shot in self.replicas.snapshots() if shot.state is ReplicaState.READY]
        joined = {
            role.value: ", ".join(shot.address for shot in ready if shot.role is role)
            for role in (Role.TARGET, Role.DRAFT)
        }
        described = {"model": target_info.name, "sampling_defaults": str(defaults)}
        logger.info("services joined", extra={**joined, **described})
        if doubt := self._forecast():
            announce(f"tandem coordinator: {doubt}")

    def _forecast(self) -> str:
        """A sentence where drafting is predicted not to pay for a request by itself, with the options as they are."""
        settings = self._settings
        target = self.replicas.targets.choose()
        draft = self._draft_to_come(target)
        if not settings.speculation or target is None or draft is None:
            return ""
        controller = self.completions.speculation
        # Without the way to them: the first health check is a slow one.
        controller.introduce(target.address, target.model, None)
        controller.introduce(draft.name, draft, None)
        terms = Terms(
            request_kind(draft.name, GREEDY.name, 0.0),
            settings.num_speculative_tokens,
            draft_ahead=settings.draft_ahead if draft.drafts_ahead else "off",
            leads=settings.target_lead > 0,
            has_head=bool(draft.drafting_method),
        )
        return forecast(controller.predict(target.address, terms, 1))

    def _draft_to_come(self, target: Member[TargetClient] | None) -> ModelInfo | None:
        """The model that proposes for the next request: a draft service's, or the target's own head."""
        draft = self.replicas.drafts.choose()
        if draft is not None:
            return draft.model
        if self.replicas.drafts.addresses or target is None or target.model is None or not target.has_head:
            return None
        return head_of(target.model)

    def _wait_for(self, services: str) -> None:
        logger.info("waiting", extra={"for": services})
        if self._calls is not None and self._calls.closed_because:
            self._calls.closed_because = f"the coordinator is still starting: it waits for {services}"

    def _state(self) -> State:
        completions = self.completions
        return State(
            self._settings.served_names(completions.models.target.name)[0],
            self._settings.num_speculative_tokens,
            completions.admission.running,
            completions.admission.queued,
            completions.requests.tokens.total,
            completions.stats.snapshot()[1],
            completions.stats.last_minute(),
            self.replicas.snapshots(),
            [*describe_decisions(completions.speculation)],
            completions.stats.round_counts(),
            completions.admission.rejections,
            self.replicas.engines(),
        )

    def _start_http(self) -> None:
        if self.http is not None:
            self.http.start()
            announce(f"tandem coordinator: http on {self.http.url}")

    async def close(self) -> None:
        self.chats.close()
        if self._grammars is not None:
            self._grammars.close()
        if self.http is not None:
            await self.http.close()
        self.completions.stats.close()
        await self.observer.close()
        await self.replicas.close()


def _observer_for(settings: CoordinatorSettings, is_read: bool = False) -> Observer:
    """The observer that the settings ask for; `is_read`: something besides the Prometheus port reads its metrics."""
    if not is_observed(settings, is_read):
        return Observer()
    from tandem_coordinator.telemetry.observed import ObservedRequests

    return ObservedRequests(settings)
