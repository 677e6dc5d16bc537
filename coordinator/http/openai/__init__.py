"""OpenAI's API: schema, prompts, answers, streaming, chat templates.

Imported by `coordinator.http`; imports `admin`, `requests` and below.
"""
