"""The scheduler's state machine: pure, deterministic, no tensors, no clock."""
