"""Sources of models: a folder, the bundled demo pair, a short name, or a Hugging Face id.

The services that run a model import `find`. The coordinator imports `bundled` and `hub` only: `find` may need torch.
"""
