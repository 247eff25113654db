"""From many awaits to one call: the batcher, its parts, and the one thread that talks to the engine.

A request's way: a method of ``lm.py`` checks the question and makes its requests, by its kind in
``questions/``. Here, ``ask.py`` asks; ``batcher.py`` finds rows in the cache, joins equal requests or
queues them; ``waiters.py`` waits until the loop has asked all it will; ``engine_loop.py`` gives the
batcher its turns; ``answers.py`` submits the flush, and reads from its rows; ``engines/`` compute. Back:
``batcher.py`` ends the requests, ``waiters.py`` gives each caller results of its own.
"""
