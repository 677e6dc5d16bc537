"""Options and methods that users of MAX or vLLM know and that this version does not have, each with the reason."""

from __future__ import annotations

_TARGETS = "a model's folder is served as it is; "

REFUSED_OPTIONS = {
    "tensor_parallel_size": "a service runs its model on one device; start more replicas to serve "
    "more requests",
    "enforce_eager": "whether the draft runs captured graphs is decided by its own service and device",
    "quantization": _TARGETS
    + "name one whose weights have the type you want, and set dtype on the draft service",
    "moe_backend": "the draft model runs through transformers, which chooses its own kernels",
    "draft_load_config": "weights are read from safetensors and nothing else",
    "disable_padded_drafter_batch": "batches are packed without padding, so there is none to disable",
    "use_local_argmax_reduction": "the draft's vocabulary is not split over devices, so there is nothing to reduce",
    "speculative_token_tree": "proposals are chains; set their length with num_speculative_tokens",
    "parallel_drafting": "the method decides it: dflash proposes a block in one pass, the others token after token",
    "draft_sample_method": "the draft samples as the acceptance rule needs; set rejection_sampling_strategy",
}
"""Named in the reference classes, refused here: the reason, which says what to do instead where there is something."""

_HEAD = (
    "of the heads that read the target's hidden states eagle, eagle3, medusa, mtp and dflash are run; use one of "
    "these, standalone, ngram or suffix"
)

REFUSED_METHODS = {
    "mlp_speculator": _HEAD,
    "extract_hidden_states": "it proposes nothing; start the target with --shared-storage-path, which writes the "
    "hidden states of requests with any draft",
    "ngram_gpu": "prompt lookup needs no GPU here; use ngram",
    "custom_class": "no code from outside is loaded; use standalone, ngram or suffix",
}
"""Drafting methods, likewise. vLLM's deprecated names such as deepseek_mtp count as mtp."""
