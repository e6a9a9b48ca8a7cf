"""Ways to execute a `StepPlan`: on PyTorch, and simulated."""
