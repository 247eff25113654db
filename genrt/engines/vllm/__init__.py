"""vLLM as an engine. Only files in this folder import it."""
