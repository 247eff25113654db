"""The questions: one kind a file, and the arguments of callers, checked."""
