"""vLLM in this process; nothing else of genrt imports it.

What these files touch of vLLM's own objects is listed in ``docs/new_vllm.md``, which tests hold to the
installed vLLM and to these files, and which says how to support a new vLLM.
"""
