"""Python clients: `aio` (asyncio), `sync` and `admin`.

Imported by users and by the CLI; import `tandem.rpc` and `tandem.wire`.
"""
