"""HTTP with TLS uses gRPC's certificate files, and reloads them when they change."""

from __future__ import annotations

import os
import ssl
import time
from pathlib import Path

import httpx2
import trustme

from tests.certificates import issued
from tests.service.fakes import FakeTarget
from tests.service.http_cluster import http_cluster


async def serial(url: str, ca: Path) -> int:
    """Return the serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context(cafile=str(ca))
    async with httpx2.AsyncClient(verify=context) as client, client.stream("GET", f"{url}/health") as answer:
        assert answer.status_code == 200
        shown = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        return int(shown["serialNumber"], 16)


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = issued(tmp_path, authority)
    async with http_cluster(FakeTarget(), tls_cert_file=files.cert, tls_key_file=files.key) as cluster:
        assert cluster.url.startswith("https://127.0.0.1:")
        before = await serial(cluster.url, files.ca)
        assert await serial(cluster.url, files.ca) == before
        issued(tmp_path, authority)
        later = time.time() + 5
        for path in (files.cert, files.key):
            os.utime(path, (later, later))
        assert await serial(cluster.url, files.ca) != before
