"""What is asked: requests as values, the engine protocol, and what callers give, checked."""
