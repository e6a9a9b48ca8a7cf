from tidegate_testing.models import one_torch_thread, smollm2

__all__ = ["one_torch_thread", "smollm2"]
