"""vLLM behind the engines' seam: its workers compute, our scheduler decides what, our code draws rows of the logits."""
