"""Tests whether two runs train alike, and locates their first difference. Used by `cli`, `api` and `serve`."""
