"""From many awaits to one call: the batcher, its parts, and the one thread that talks to the engine."""
