"""Tests of another project's API, run against ours: `make test-peer`.

`run.py` fetches the source of vLLM and starts pytest on its tests, `plugin.py` takes the place of their server, and
`listed.toml` names the tests that do not pass here, each with its reason. No test of ours lies here.
"""
