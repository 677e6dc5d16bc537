"""Execution plans: `trace` learns a model's pass, `plan_compiler` makes it a list of calls, `torch_calls` makes those
that are left to torch, `execution_plan` replays the list, and `planned_steps` decides which plan runs a step.
"""
