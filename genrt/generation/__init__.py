"""Many texts from one runtime: of a stream of prompts, until enough are valid, as resumable jobs."""
