"""What is asked: requests as values, and what callers give, checked."""
