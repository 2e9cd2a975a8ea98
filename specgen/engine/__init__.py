"""What runs next: requests, KV blocks, the scheduler and the busy loop. No tensors here."""
