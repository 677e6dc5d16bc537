"""Steps of fixed shapes that are captured once as CUDA graphs and replayed."""
