"""The coordinator's options, and the configuration that it checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from tandem.acceptance.strategies import COMBINATION_RULES, LOSSLESS_RULES
from tandem.config import SpeculativeConfig
from tandem.config.options import SHORT_HELP, Options
from tandem.config.rule import Rule, Rules, not_below, rule
from tandem.config.settings import ServerSettings
from tandem.config.speculative import check_rule, split_list
from tandem.model.types import MAX_LEAD
from tandem.rpc.addresses import is_loopback, split_addresses
from tandem.rpc.credentials import Credentials
from tandem.serving.protection import AdminOptions, exposure_rule
from tandem.serving.scopes import SharedKinds
from tandem_coordinator.parsers.forms import AUTO, CALL_PARSERS, REASONING_PARSERS, known_name
from tandem_coordinator.settings.sampling import SamplingOptions

MAX_SPECULATIVE_TOKENS = 32
"""A request may ask for so many tokens per proposal, or for as many as the coordinator's own setting."""
MAX_CHAT_MESSAGES = 2_048
"""Maximum messages of a chat."""


RuleNames = Annotated[tuple[Annotated[str, AfterValidator(check_rule)], ...], BeforeValidator(split_list)]
"""Names of acceptance rules."""


class RequestBounds(Options):
    """Bounds on the coordinator's work."""

    max_concurrent_requests: int = Field(default=256, ge=1)
    """Maximum requests that run at once. A free place goes to the client address that has the fewest, and an eighth
    more are kept for addresses with fewer than four."""
    max_queued_requests: int = Field(default=256, ge=0)
    """Maximum requests that wait for a place; others are refused at once, with the time after which to try again."""
    max_streams_per_peer: int | None = Field(default=None, ge=1)
    """Maximum requests of one client address at once, including those whose client does not read. By default as many
    as may run and wait. Behind a proxy all clients have the proxy's address. An IPv6 /64 counts as one address."""
    stalled_stream_seconds: float = Field(default=1.0, gt=0)
    """How long a stream may wait for its client before it gives up its places in the coordinator, on the draft and on
    the target. It takes them again when its client reads."""
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    """Maximum bytes of a prompt's text, in UTF-8."""
    max_stop_strings: int = Field(default=16, ge=0)
    """Maximum stop strings of a request."""
    max_stop_length: int = Field(default=256, ge=1)
    """Maximum characters of a stop string."""
    max_logit_biases: int = Field(default=1024, ge=0)
    """Maximum token ids in a request's logit_bias, and in its allowed_token_ids."""
    max_stop_token_ids: int = Field(default=256, ge=0)
    """Maximum stop token ids of a request."""
    structured_output: Literal["allow", "refuse"] = "allow"
    """Treatment of requests whose completion must follow a JSON schema, a regular expression, a choice or a grammar, or
    call tools: serve them, or refuse them, as MAX does beside speculative decoding. Tandem's own."""
    allowed_rejection_sampling_strategies: RuleNames = LOSSLESS_RULES
    """Acceptance rules that a request may name, with commas between them; it may always name the one that the
    coordinator is set to. By default the lossless ones: under a lossy rule the draft changes the text, so a client
    could learn from its own text what the draft knows of others. Tandem's own."""
    max_grammar_bytes: int = Field(default=64 << 10, ge=1)
    """Maximum bytes of a JSON schema, regular expression, list of choices or grammar, in UTF-8."""
    draft_model_penalties: Literal["refuse", "target-only", "draft"] = "target-only"
    """Treatment of a request with repetition, frequency or presence penalties where a separate draft model
    proposes. draft: propose all the same; the target verifies with the penalties, exactly. target-only: let the target
    serve it without drafting, and say so. refuse: as MAX does. Tandem's own."""
    compatibility: Literal["none", "max"] = "none"
    """max: refuse what MAX refuses beside speculative decoding, so that `structured_output` and `draft_model_penalties`
    are refuse unless they are set. none: serve all of it. docs/comparison.md says what each peer does. Tandem's own."""

    @model_validator(mode="before")
    @classmethod
    def _as_peer(cls, values: Any) -> Any:
        if values.get("compatibility") != "max":
            return values
        return {"structured_output": "refuse", "draft_model_penalties": "refuse", **values}


def encryption_rule(subject: str, advice: str, *addresses: str) -> Rule[Any]:
    """The rule that services on other machines, which the options name, are reached by TLS, or the process is
    `insecure`."""

    def check(options: Any) -> Iterator[str]:
        if options.insecure or options.service_credentials.uses_tls:
            return
        for option in addresses:
            for address in split_addresses(getattr(options, option) or ""):
                if address.port >= 0 and not is_loopback(address.host):
                    yield (
                        f"{option} is {address}, another machine, and prompts would go there in plain text: {advice} "
                        "where the network is trusted"
                    )

    requirement = f"Services on other machines are reached by TLS, or the {subject} is `insecure`."
    return Rule("service-tls", requirement, check)


class ServiceAccessOptions(Options):
    """TLS and tokens towards the draft and target services."""

    service_tls: bool = False
    """Connect to the services by TLS, and trust this machine's authorities."""
    service_tls_ca_file: Path | None = None
    """Use TLS with the authorities in this PEM file."""
    service_tls_cert_file: Path | None = None
    """PEM file of the coordinator's own certificate, for services that ask for one (mutual TLS)."""
    service_tls_key_file: Path | None = None
    """PEM file of the coordinator's key, unencrypted."""
    service_tls_server_name: str = ""
    """Name in the services' certificates, where it differs from their address."""
    service_token: SecretStr | None = None
    """Bearer token for the services. Prefer the environment or service_token_file."""
    service_token_file: Path | None = None
    """File whose first line is the bearer token for the services. Read again when it changes."""

    @property
    def service_credentials(self) -> Credentials:
        """These options as credentials of a channel."""
        options = {
            name.removeprefix("service_"): getattr(self, name) for name in ServiceAccessOptions.model_fields
        }
        token = "" if self.service_token is None else self.service_token.get_secret_value()
        return Credentials.of({**options, "token": token})


class SharingOptions(Options):
    """Sharing between callers."""

    share_between_callers: SharedKinds | None = None
    """State that requests of different callers share: suffix (earlier answers, which drafts with the method suffix
    propose), prefix (prefix caches and compiled grammars), or both with a comma. A caller can then find out what others
    wrote or were told. By default nothing: a caller is a token, else a client's address. Tandem's own."""


def split_entries(text: str | None) -> list[str]:
    """Each of the entries in an option's text, which has commas between them."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


_ORIGIN = re.compile(r"\*|https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]+)?")


@rule("`cors_origin` is `*` or origins: `scheme://host:port`.")
def _cors_origin(settings: Any) -> Iterator[str]:
    for origin in split_entries(settings.cors_origin):
        if not _ORIGIN.fullmatch(origin):
            yield f"cors_origin is {origin}; it must be * or scheme://host:port, such as https://chat.example"


def _one_text(value: object) -> object:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


CallParser = Annotated[str, AfterValidator(known_name(CALL_PARSERS))]
ReasoningParser = Annotated[str, AfterValidator(known_name(REASONING_PARSERS))]
"""Names of parsers."""


class HttpOptions(Options):
    """HTTP beside gRPC, off unless it has a port. TLS and tokens are those of the server."""

    http_port: Annotated[int | None, SHORT_HELP] = Field(default=None, ge=0, le=65535)
    """Port for HTTP: OpenAI's API, /metrics and a page to try it on; 0 takes any free one. By default there is none."""
    http_host: Annotated[str, SHORT_HELP] = "127.0.0.1"
    """Address to listen on for HTTP."""
    http_max_connections: int = Field(default=1024, ge=1)
    """Maximum HTTP connections at once; others are answered with 503."""
    http_max_body_bytes: int = Field(default=4 << 20, ge=1024)
    """Maximum bytes of a request's body."""
    http_max_held_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Maximum bytes of incomplete bodies over all connections; the first 64 KiB of each are free."""
    http_max_held_answer_bytes: int = Field(default=256 << 20, ge=1024)
    """Maximum bytes of answers that are not streamed, over all connections; the first 64 KiB of each are free."""
    served_model_name: Annotated[str, BeforeValidator(_one_text)] | None = None
    """Name of the model in OpenAI's API, or several with commas between them: requests may use any, and answers have
    the first. By default the name of the target's folder. Name and meaning are vLLM's."""
    chat_template: Path | None = None
    """Jinja template for chats, in place of the model's own. Name and meaning are vLLM's."""
    tool_call_parser: CallParser = AUTO
    """Form in which the model writes calls of tools, by the name of vLLM's parser for it. auto: the one that the chat
    template has. none: calls are not read. docs/tool-calls.md lists the names."""
    reasoning_parser: ReasoningParser = AUTO
    """Form in which the model writes reasoning, by the name of vLLM's parser for it. auto: the one that the chat
    template has. none: reasoning stays in the content."""
    strict_requests: bool = False
    """Refuse unknown fields of requests by name. Otherwise they are ignored: each is logged once, and named in the
    header X-Tandem-Ignored. Tandem's own."""
    cors_origin: Annotated[str, BeforeValidator(_one_text)] | None = None
    """Origins whose web pages may call HTTP, such as https://chat.example, with commas between them; * for all. By
    default none may."""

    own_rules: ClassVar[Rules] = (
        _cors_origin,
        not_below("http_max_held_body_bytes", "http_max_body_bytes", ", or the largest body is never taken"),
        exposure_rule("http_host", "http_port"),
    )


DEFAULT_PORT = 50051
"""The port of gRPC's own examples."""


def _check_addresses(text: str) -> str:
    addresses = split_addresses(text)
    if not addresses:
        raise ValueError("names no address; give host:port, or several with commas between them")
    return ",".join(map(str, addresses))


Addresses = Annotated[str, BeforeValidator(_one_text), AfterValidator(_check_addresses)]
"""Addresses of a service's replicas with commas between them; a list becomes such a text."""


class CoordinatorSettings(
    SpeculativeConfig,
    SamplingOptions,
    RequestBounds,
    SharingOptions,
    ServiceAccessOptions,
    HttpOptions,
    AdminOptions,
    ServerSettings,
):
    """Join a draft service and a target service."""

    env_prefix: ClassVar = "TANDEM_COORDINATOR_"

    repeatable: ClassVar = (
        "target_address",
        "draft_address",
        "served_model_name",
        "cors_origin",
        "share_between_callers",
    )
    """Options that may be given several times on a command line."""

    port: Annotated[int, SHORT_HELP] = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """Port to listen on; 0 takes any free one."""
    target_address: Annotated[Addresses, SHORT_HELP]
    """host:port of the target service; several have commas between them. A name stands for all of its addresses,
    and is looked up again every `resolve_interval_seconds`."""
    draft_address: Annotated[Addresses | None, SHORT_HELP] = None
    """Addresses of the draft service. Without one the target works alone."""
    speculation: bool = True
    """Let drafts propose. Off: the target works alone, through the same path. Tandem's own."""
    resolve_interval_seconds: float = Field(default=5.0, gt=0)
    """Interval at which names of services are resolved again."""
    target_wait_seconds: float = Field(default=30.0, ge=0)
    """How long a request waits when no target is ready, at its start or later."""
    verification_timeout_seconds: float | None = Field(default=None, gt=0)
    """How long a target may leave a verification without an answer before the sequence moves to another target. By
    default eight times as long as the slowest recent answers, at least 10 s, and longer while it reads prompts."""
    draft_patience_seconds: float | None = Field(default=None, gt=0)
    """How long a round waits for a proposal before the target goes on alone. By default the draft's usual time plus
    four verifications, between 0.25 and 0.8 s."""
    draft_ahead: Literal["auto", "off"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Outcomes of a verification for which the draft works ahead while the target verifies. auto: as many as pay,
    possibly none. off: none. A number: always this many. Tandem's own."""
    target_lead: int = Field(default=2, ge=0, le=MAX_LEAD)
    """How many rounds a target may begin before it is asked for them, under a lossless rule; 0 turns it off."""
    stream_interval: int = Field(default=1, ge=1, le=1024)
    """Tokens per streamed chunk: rounds are joined until a chunk has this many. The first tokens and the end are sent
    at once, and so are waiting tokens when a stream pauses. 1: each round is a chunk. vLLM's name."""
    trace_rounds: float = Field(default=0.0, ge=0, le=1)
    """Share of the traced requests that have a span for each round."""
    measure_waits: bool = False
    """Measure how long rounds wait inside the coordinator: the metric `tandem_round_wait_seconds`. A thread wakes the
    event loop every 5 ms for that. Tandem's own."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long to wait at start until the other services are ready."""
    start_without_draft: float = Field(default=30.0, ge=0)
    """How long to wait at start for a draft before the target serves alone. Drafts join when they are ready. Tandem's
    own."""

    own_rules: ClassVar[Rules] = (
        *COMBINATION_RULES,
        encryption_rule(
            "coordinator",
            "give service_tls_ca_file or service_tls, or insecure",
            *("target_address", "draft_address"),
        ),
    )

    def served_names(self, target: str) -> list[str]:
        """The names that the model is served under, of which answers and metrics have the first.

        Args:
            target: Name of the target's folder, which is the only one by default.
        """
        return split_entries(self.served_model_name) or [target]

    @property
    def certificate_files(self) -> tuple[Path, ...]:
        """Files of certificates that the process uses, including those for its services."""
        towards_services = (self.service_tls_cert_file, self.service_tls_ca_file)
        return (*super().certificate_files, *(path for path in towards_services if path is not None))


class ConfigSettings(CoordinatorSettings):
    """The settings as `tandem config` reads them, which needs no running service."""

    target_address: Addresses | None = None  # type: ignore[assignment]
    """host:port of the target service."""
