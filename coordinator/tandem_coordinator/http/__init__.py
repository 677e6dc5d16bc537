"""The coordinator's HTTP side: OpenAI's API, what monitors and scrapers ask for, and a page to try it on."""
