"""The coordinator's options, one module per subject; `coordinator` joins them.

Imported from everywhere above `rejection`; imports only `rejection`.
"""
