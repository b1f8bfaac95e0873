"""The servers of a model (OpenAI API), of a reward model (scores) and of the run viewer. All use `http_server/`."""
