"""The coordinator: joins a draft service and a target service into one stream of text. Read `generate` first."""
