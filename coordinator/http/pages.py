"""The page at `/`: its files, sent as they are."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).with_name("page")

_FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "code.js": ("code.js", "text/javascript; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}

PATHS = tuple(f"/{name}" for name in _FILES)

_HEADERS = {
    # The page loads nothing from elsewhere, and nothing that it shows can run as a script.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Pages:
    """The files, read once."""

    def __init__(self) -> None:
        self._contents = {
            f"/{path}": ((_FOLDER / name).read_bytes(), media_type)
            for path, (name, media_type) in _FILES.items()
        }

    async def file(self, request: Request) -> Response:
        """`GET` of one of them."""
        content, media_type = self._contents[request.url.path]
        return Response(content, media_type=media_type, headers=_HEADERS)
