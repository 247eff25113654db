"""One runtime over several engines: replicas in Ray actors, and ranks."""
