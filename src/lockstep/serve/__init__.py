"""HTTP servers: the OpenAI API of a model, the rewards of a reward model, and the run viewer. One server, `asgi.py`."""
