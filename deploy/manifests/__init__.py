"""Renders the manifests of deploy/kubernetes and checks them: `python -m deploy.manifests`.

Only tests and `make kubernetes` import this. No cluster and no `kubectl` are needed.
"""
