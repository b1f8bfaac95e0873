"""HTTP servers for a model (OpenAI API), a reward model (scores) and the run viewer. All servers use `asgi.py`."""
