"""How the coordinator authenticates itself and its services."""

from __future__ import annotations

from pathlib import Path

from pydantic import SecretStr

from tandem.config.options import Options
from tandem.rpc.credentials import Credentials


class ServiceAccessOptions(Options):
    """TLS and tokens towards the draft and target services."""

    service_tls: bool = False
    """Connect to the services by TLS, and trust this machine's authorities."""
    service_tls_ca_file: Path | None = None
    """Use TLS with the authorities in this PEM file."""
    service_tls_cert_file: Path | None = None
    """PEM file of the coordinator's own certificate, for services that ask for one (mutual TLS)."""
    service_tls_key_file: Path | None = None
    """PEM file of its key, unencrypted."""
    service_tls_server_name: str = ""
    """Name in the services' certificates, where it differs from their address."""
    service_token: SecretStr | None = None
    """Bearer token for the services. Prefer the environment or service_token_file."""
    service_token_file: Path | None = None
    """File whose first line is that token. Read again when it changes."""

    @property
    def service_credentials(self) -> Credentials:
        """These options as credentials of a channel."""
        return Credentials(
            ca_file=self.service_tls_ca_file,
            cert_file=self.service_tls_cert_file,
            key_file=self.service_tls_key_file,
            server_name=self.service_tls_server_name,
            token="" if self.service_token is None else self.service_token.get_secret_value(),
            token_file=self.service_token_file,
            tls=self.service_tls,
        )
