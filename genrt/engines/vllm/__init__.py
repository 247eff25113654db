"""Runs vLLM in this process; no other part of genrt imports vLLM.

``docs/new_vllm.md`` lists the parts of vLLM that these files use and says how to support a new version.
Tests compare that list with the installed vLLM and with these files.
"""
