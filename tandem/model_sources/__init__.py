"""Sources of models: a folder, the bundled demo pair, a short name, or a Hugging Face id.

`tandem.model_sources.find` decides, and the services that run a model import it. The coordinator imports `demo`,
`extras`, `hub` and `names` only: the others need safetensors.
"""
