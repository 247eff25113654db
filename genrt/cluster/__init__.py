"""One runtime over several engines: replicas in processes of their own, and what keeps them going."""
