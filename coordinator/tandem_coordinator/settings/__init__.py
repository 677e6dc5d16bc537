"""The coordinator's options, one module per subject; `coordinator` joins them."""
