"""From many awaits to few engine calls.

The way of a request: a method of ``lm.py`` makes it, with a module of ``questions/`` for its kind, and
``ask.py`` awaits it. ``batcher.py`` finds its row in the cache, joins an equal request, or queues it
until no coroutine of its event loop can run. On the engine's thread, ``thread.py`` gives the batcher its
turns. A turn submits a flush to ``answers.py``, which asks an engine of ``engines/`` for rows and answers
reads from them. The batcher ends the requests and delivers to each caller its own results.
"""
