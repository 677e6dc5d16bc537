"""Libraries of others, each in a process of its own, ask for structured output and tools over real services
(`make test-clients`). Those that are not found are skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from tests.service.http_cluster import MakeApi

SECONDS = 500.0
PYTHONS = os.environ.get("CLIENTS_PYTHON", sys.executable).split(os.pathsep)
"""Of the environments that have the libraries."""
MISSING = 75
"""Exit code of a script whose library is not there."""
HEAD = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
from typing import Literal
from pydantic import BaseModel, Field
try:
    VERSION = version("{package}")
except PackageNotFoundError:
    sys.exit(75)
URL = sys.argv[1] + "/v1"
class Weather(BaseModel, extra="forbid"):
    "The weather of a city."
    city: Literal["Oslo", "Køge"]
    days: int = Field(ge=1, le=9)
TOOL = {{"type": "function", "function": {{"name": "Weather", "parameters": Weather.model_json_schema()}}}}
ASK = [{{"role": "user", "content": "How is it in Oslo?"}}]
SAMPLING = dict(temperature=1.0, seed=3, max_tokens=120)
found = []
def take(value):
    found.append(value.model_dump() if isinstance(value, BaseModel) else Weather.model_validate(value).model_dump())
"""
TAIL = """
print(json.dumps([VERSION, found]))
"""
SCRIPTS = {
    "langchain-openai": """
import langchain_openai
chat = langchain_openai.ChatOpenAI(base_url=URL, api_key="none", model="m", **SAMPLING)
take(chat.with_structured_output(Weather).invoke("How is it?"))
take(chat.with_structured_output(Weather, method="function_calling").invoke("How is it?"))
for choice in ("Weather", "required"):
    (call,) = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False).invoke("How?").tool_calls
    take(call["args"])
pieces = chat.bind_tools([Weather], tool_choice="Weather").stream("How?")
whole = next(pieces)
for piece in pieces:
    whole += piece
take(whole.tool_calls[0]["args"])
""",
    "litellm": """
import litellm
ask = dict(model="openai/m", api_base=URL, api_key="none", messages=ASK, **SAMPLING)
schema = {"name": "w", "strict": True, "schema": Weather.model_json_schema()}
done = litellm.completion(**ask, response_format={"type": "json_schema", "json_schema": schema})
take(json.loads(done.choices[0].message.content))
done = litellm.completion(**ask, tools=[TOOL], tool_choice="required")
take(json.loads(done.choices[0].message.tool_calls[0].function.arguments))
""",
    "pydantic-ai-slim": """
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=URL, api_key="none"))
for output in (Weather, NativeOutput(Weather)):
    take(Agent(model, output_type=output, model_settings=SAMPLING).run_sync("How is it?").output)
""",
    "instructor": """
import instructor, openai
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    take(client.chat.completions.create(model="m", messages=ASK, response_model=Weather, max_retries=0, **SAMPLING))
""",
}


async def answered(script: str, url: str) -> tuple[int | None, str, str]:
    """Exit code and output of a script in the first environment that has its library."""
    code = None
    out = b""
    err = b""
    for python in PYTHONS:
        process = await asyncio.create_subprocess_exec(
            python, "-W", "ignore", "-c", script, url,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )  # fmt: skip
        out, err = await process.communicate()
        code = process.returncode
        if code != MISSING:
            break
    return code, out.decode(), err.decode()


@pytest.mark.soak
@pytest.mark.parametrize("package", SCRIPTS)
async def test_structured_output_and_tools_reach_it(api: MakeApi, package: str) -> None:
    script = HEAD.format(package=package) + SCRIPTS[package] + TAIL
    async with asyncio.timeout(SECONDS), api() as client:
        url = str(client.base_url).removesuffix("/v1/")
        code, out, err = await answered(script, url)
    if code == MISSING:
        pytest.skip(f"{package} is not installed")
    assert code == 0, err[-3000:]
    version, found = json.loads(out.strip().splitlines()[-1])
    sys.stdout.write(f"{package} {version}: {len(found)} answers\n")
    assert len(found) >= 2
    for each in found:
        assert each["city"] in ("Oslo", "Køge")
        assert 1 <= each["days"] <= 9
