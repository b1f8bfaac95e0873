"""Models behind HTTP: the endpoint of `lockstep serve`. Imported by the commands and by OpenRLHF's `serve_rm`."""
