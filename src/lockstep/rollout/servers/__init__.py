"""Rollout engines that are servers (vLLM, SGLang): processes with their own copy of the weights, called over HTTP.

`server_engine.py` is the engine that the run calls. `server_manager.py`, `server_process.py` and `fleet.py` start the
servers and distribute requests (`request_stream.py`). `weight_sync.py` sends weights through files, a process group or
shared memory (`weight_transports.py`), and `weight_check.py` verifies the result. `server_client.py` sends the HTTP
requests and combines many samples into one request. Each serving engine has a `ServerAdapter` (`adapter.py`). The
folder `plugin` contains the modules that vLLM's processes import.
"""
